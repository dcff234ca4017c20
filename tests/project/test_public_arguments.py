"""Arguments of all that users call: wrong keywords are named with the right one, sizes are numbers or words."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import pickle
import re
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from public import GIVEN, public_names

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.checkpoint.nested import is_nested
from fastensor.data import LmdbDataset, Merging
from fastensor.files.arguments import checks_keywords, checks_keywords_with
from fastensor.offload import OffloadConfig
from fastensor.provision import DataService
from fastensor_accelerate import CheckpointMapping, ConfigError, FastensorConfig
from fastensor_lightning import FastensorCheckpointIO, SSDActivationOffload

PASSED = {f"fastensor.data.decoders.{name}" for name in ("npy", "tensor", "image_tensor", "msgpack", "unpickle")}
"""Functions that users pass on: a dataset calls them for each sample, with a value and without keywords."""


def is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0].startswith("fastensor")


def is_overridden(kind: type, name: str) -> bool:
    """Whether a class of others has the method: then a framework calls it."""
    return any(name in vars(base) for base in kind.__mro__ if not is_ours(base))


def public_callables() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Functions, constructors and methods: under which names they are, how they name themselves, and what to call."""
    for path, value in public_names():
        if inspect.isfunction(value) and path not in PASSED:
            yield path, value.__qualname__, value
        if not inspect.isclass(value) or issubclass(value, Exception) or typing.is_typeddict(value):
            continue
        if getattr(value, "_is_protocol", False) or value.__name__.endswith("Tests"):
            continue  # users extend them
        if path not in GIVEN and not (value.__init__ is object.__init__ and value.__new__ is object.__new__):
            yield path, value.__qualname__, value
        for name in dir(value):
            method = inspect.getattr_static(value, name)
            function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
            if name.startswith("_") or not inspect.isfunction(function) or not is_ours(function):
                continue
            if not is_overridden(value, name):
                bound = getattr(value, name) if isinstance(method, classmethod | staticmethod) else None
                yield f"{path}.{name}", function.__qualname__, bound or functools.partial(function, object())


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """The keywords that a callable takes, those that a TypedDict lists included."""
    found = []
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_KEYWORD and "Unpack[" in str(one.annotation):
            owner: Any = inspect.unwrap(getattr(function, "__init__" if inspect.isclass(function) else "__call__"))
            owner = function if inspect.isfunction(function) else owner
            owner = inspect.unwrap(function.func) if isinstance(function, functools.partial) else inspect.unwrap(owner)
            listed = owner.__globals__[str(one.annotation).removeprefix("Unpack[").removesuffix("]")]
            found += listed.__annotations__
        elif one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            found.append(one.name)
    return [name for name in found if not name.startswith("_")]


CALLABLES = [(path, name, function, keywords_of(function)) for path, name, function in public_callables()]
SIZES = [
    (path, name) for path, _, _, keywords in CALLABLES for name in keywords if re.search(r"(^|_)n?bytes(_|$)", name)
]
"""The arguments in bytes: those of calls, and the fields of records that users make."""
FACTS = {
    ("fastensor.TensorRef", "nbytes"),
    ("fastensor.Change", "nbytes"),
}
"""What was counted, by Fastensor: nobody gives it in words."""


class Ten:
    def __len__(self) -> int:
        return 10


def with_sizes() -> dict[str, Callable[..., Any]]:
    """What takes sizes, with all other arguments that it needs."""
    selector, context, some = fastensor.Selector(), fastensor.Context("write"), {"weight": torch.zeros(1)}
    choice: dict[str, Any] = {"context": context, "candidates": ["numpy"]}
    return {
        "fastensor.AsyncWriter": fastensor.AsyncWriter,
        "fastensor.Dictionary.of": functools.partial(fastensor.Dictionary().of, context),
        "fastensor.Selector.choose": functools.partial(selector.choose, **choice),
        "fastensor.Selector.explain": functools.partial(selector.explain, **choice),
        "fastensor.Selector.failed": functools.partial(selector.failed, context=context, backend="numpy", reason="x"),
        "fastensor.Selector.record": functools.partial(selector.record, context=context, backend="numpy", seconds=1.0),
        "fastensor.convert": functools.partial(fastensor.convert, "a.pt", "b.pt"),
        "fastensor.save_sharded": functools.partial(fastensor.save_sharded, some, "folder"),
        "fastensor.data.LmdbDataset": functools.partial(LmdbDataset, "x.lmdb"),
        "fastensor.data.Merging": Merging,
        "fastensor.offload.OffloadConfig": OffloadConfig,
        "fastensor.provision.DataService.loader": functools.partial(DataService.loader, Ten()),  # type: ignore[arg-type]
        "fastensor.provision.DataService.start": functools.partial(DataService.start, [1]),
        "fastensor_accelerate.CheckpointMapping": functools.partial(CheckpointMapping, "x.safetensors"),
        "fastensor_accelerate.FastensorConfig": FastensorConfig,
        "fastensor_lightning.OffloadConfig": OffloadConfig,
        "fastensor_lightning.SSDActivationOffload": SSDActivationOffload,
    }


def test_all_that_is_public_is_looked_at() -> None:
    assert len(CALLABLES) > 120
    for known in ("fastensor.save", "fastensor.AsyncWriter.save", "fastensor.provision.DataService.start"):
        assert known in [path for path, *_ in CALLABLES]
    assert set(dict(public_names())) >= GIVEN | PASSED


@pytest.mark.parametrize(
    ("name", "function", "keyword"),
    [
        pytest.param(name, function, keyword, id=f"{path}-{keyword}")
        for path, name, function, keywords in CALLABLES
        for keyword in ([max(keywords, key=len)] if keywords else [])
    ],
)
def test_a_misspelt_keyword_is_named_with_the_right_one(name: str, function: Callable[..., Any], keyword: str) -> None:
    wrong = keyword[:-2] + keyword[-1] if len(keyword) > 2 else keyword + "s"  # as hands do it
    with pytest.raises(TypeError) as caught:
        function(**{wrong: None})
    said = str(caught.value)
    assert said == f"{name}() got an unexpected keyword argument {wrong!r}; did you mean {keyword!r}?"


@pytest.mark.parametrize(
    ("function", "keyword", "said"),
    [
        (FastensorCheckpointIO, "asynchronus", "did you mean 'asynchronous'?"),
        (FastensorConfig, "bakend", "did you mean 'backend'?"),
        (OffloadConfig, "min_byte", "did you mean 'min_bytes'?"),
        (SSDActivationOffload, "min_byte", "did you mean 'min_bytes'?"),
        (SSDActivationOffload, "dryrun", "did you mean 'dry_run'?"),
        (fastensor.AsyncWriter, "zstd", "; there are staging_bytes, when_busy, max_bytes_per_second, exit_seconds, "
                                        "preemption_seconds"),
        (functools.partial(cooperative.save, {}, "x"), "check_replica", "did you mean 'check_replicas'?"),
        (functools.partial(cooperative.save, {}, "x"), "durabel", "did you mean 'durable'?"),
    ],
)  # fmt: skip
def test_keywords_that_people_get_wrong(function: Callable[..., Any], keyword: str, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        function(**{keyword: True})
    assert str(caught.value).endswith(said)


def test_a_wrong_key_of_storage_options_is_named_with_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"found 'asynchronus'; did you mean 'asynchronous'\?"):
        FastensorCheckpointIO().save_checkpoint({}, tmp_path / "x.ckpt", {"asynchronus": True})


def test_checking_leaves_functions_and_classes_what_they_are() -> None:
    assert "durable: 'bool' = True" in str(inspect.signature(fastensor.save))
    assert str(inspect.signature(OffloadConfig)).startswith("(*, directories: 'tuple[str, ...]' = ()")
    assert inspect.getdoc(fastensor.save)
    assert "def save(" in inspect.getsource(fastensor.save)
    assert pickle.loads(pickle.dumps(fastensor.save)) is fastensor.save
    config = OffloadConfig(min_bytes=1 << 20)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, min_bytes=5).min_bytes == 5
    with pytest.raises(TypeError, match=r"did you mean 'min_bytes'\?"):
        dataclasses.replace(config, min_byte=5)
    change = fastensor.Context("write")._replace(warm=True)
    assert pickle.loads(pickle.dumps(change)) == change == fastensor.Context("write", warm=True)


def test_an_error_from_inside_is_passed_on() -> None:
    error = TypeError("inside() got an unexpected keyword argument 'x'")

    @checks_keywords
    def call(function: Callable[[], object]) -> None:
        function()

    def fail() -> None:
        raise error

    with pytest.raises(TypeError) as caught:
        call(fail)
    assert caught.value is error


def test_all_arguments_in_bytes_are_looked_at() -> None:
    assert {path for path, name in SIZES if (path, name) not in FACTS} == with_sizes().keys()
    assert set(SIZES) >= FACTS


@pytest.mark.parametrize(("path", "name"), [one for one in SIZES if one not in FACTS])
def test_an_argument_in_bytes_takes_words(path: str, name: str) -> None:
    call = with_sizes()[path]
    with pytest.raises(ValueError, match=f"^(offload_)?{name.removeprefix('offload_')}: expected a size such as 5GB"):
        call(**{name: "lots"})
    with pytest.raises(ConfigError if path.endswith("FastensorConfig") else TypeError, match=f"^{name} is "):
        call(**{name: [1]})


def test_sizes_in_words_become_numbers() -> None:
    assert Merging("1KiB", "2KiB") == Merging(1024, 2048)
    assert OffloadConfig(min_bytes="1MiB", ssd_bytes="1GB", schedule="1GB") == OffloadConfig(
        min_bytes=1 << 20, ssd_bytes=10**9, schedule=10**9
    )
    assert OffloadConfig(schedule="64K").schedule == 65536
    assert FastensorConfig(staging_bytes="1GiB", max_bytes_per_second="1MB") == FastensorConfig(
        staging_bytes=1 << 30, max_bytes_per_second=1e6
    )
    selector, context = fastensor.Selector(), fastensor.Context("write")
    selector.record("1MiB", context, "numpy", 1.0)
    assert selector.dictionary.of(context, "1MiB") == selector.dictionary.of(context, 1 << 20)
    assert selector.explain("1MiB", context).nbytes == 1 << 20
    assert selector.choose("1MiB", context, ["numpy"]) == selector.choose(1 << 20, context, ["numpy"])
    with pytest.raises(ValueError, match=r"^schedule is 'auto', 'all', a number"):
        OffloadConfig(schedule="0.5")


def test_what_a_class_is_checked_for() -> None:
    class Framework:
        def on_start(self, step: int) -> int:
            return step

    @checks_keywords
    class Ours(Framework):
        def __init__(self, size: int = 1) -> None:
            self.size = size

        def on_start(self, step: int) -> int:
            return step + self.size

        @classmethod
        def made(cls, size: int) -> Ours:
            return cls(size)

        @staticmethod
        def doubled(size: int) -> int:
            return 2 * size

        @checks_keywords_with(("durable",))
        def save(self, path: str, **options: Any) -> dict[str, Any]:
            return options

    ours = Ours.made(size=3)
    assert (ours.on_start(step=1), Ours.doubled(size=2), ours.save("x", durable=1)) == (4, 4, {"durable": 1})
    for call, said in (
        (Ours, r"^Ours\(\) got .* 'sise'; did you mean 'size'\?$"),
        (Ours.made, r"^Ours.made\(\) got .* 'sise'; did you mean 'size'\?$"),
        (Ours.doubled, r"^Ours.doubled\(\) got .* 'sise'; did you mean 'size'\?$"),
        (functools.partial(ours.save, "x"), r"^Ours.save\(\) got .* 'sise'; there are path, durable$"),
    ):
        with pytest.raises(TypeError, match=said):
            call(sise=3)  # type: ignore[operator]
    of_python = r"\. Did you mean 'step'\?" if sys.version_info >= (3, 13) else ""
    with pytest.raises(TypeError, match=rf"got an unexpected keyword argument 'stepp'{of_python}$"):
        ours.on_start(stepp=1)  # type: ignore[call-arg]


def test_a_warning_names_the_line_of_the_program(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"weight": torch.ones(2)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    model = torch.nn.ParameterDict({"weight": torch.ones(2)})
    for call in (
        lambda: fastensor.load(tmp_path / "x.pt"),
        lambda: fastensor.load_with_report(tmp_path / "x.pt"),
        lambda: fastensor.open(tmp_path / "x.pt").close(),
        lambda: fastensor.load_model(model, tmp_path / "x.pt"),
        lambda: fastensor.convert(tmp_path / "x.pt", tmp_path / "x.safetensors"),
        lambda: fastensor.convert(tmp_path / "x.pt", tmp_path / "folder", container="dcp"),
    ):
        with warnings.catch_warnings(record=True, action="always") as caught, contextlib.nullcontext():
            call()
        ours = [one for one in caught if one.category is fastensor.UnverifiedCheckpointWarning]
        assert [one.filename for one in ours] == [__file__]


def test_a_call_from_a_function_of_the_program_is_not_nested_because_its_caller_is_checked() -> None:
    """fastensor.data calls functions of programs, which may save: the check's own frame is no work of ours."""
    found: dict[str, Any] = {"__name__": "fastensor.data.x", "checks_keywords": checks_keywords}
    exec("@checks_keywords\ndef call(function):\n    return function()\n", found)
    assert not found["call"](function=is_nested)
    found["__name__"] = "fastensor.checkpoint.x"
    assert found["call"](function=lambda: is_nested())
