"""Wrong arguments are told where they are given: what was found, what was expected, what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.data import EpochPlan, LmdbDataset
from fastensor.errors import OffloadError, UnknownBackendError
from fastensor.offload import ActivationOffload, OffloadConfig

STATE = {"weight": torch.ones(3)}


class BytesPath:
    def __fspath__(self) -> bytes:
        return b"x.ckpt"


Use = Callable[[Path, Any], object]
Rows = dict[str, tuple[Any, type[Exception], str]]


def save(folder: Path, arguments: Any) -> object:
    return fastensor.save(STATE, **{"path": folder / "new.ckpt", **arguments})


def save_asynchronously(folder: Path, arguments: Any) -> object:
    with fastensor.AsyncWriter() as writer:
        return writer.save(STATE, folder / "new.ckpt", **arguments)


USES: dict[str, Use] = {
    "save": save,
    "AsyncWriter.save": save_asynchronously,
    "load": lambda folder, arguments: fastensor.load(**{"path": folder / "x.ckpt", **arguments}),
    "save_model": lambda folder, arguments: fastensor.save_model(
        **{"model": torch.nn.Linear(1, 1), "path": folder / "new.ckpt", **arguments}
    ),
    "load_model": lambda folder, arguments: fastensor.load_model(
        torch.nn.Module(), **{"path": folder / "x.ckpt", **arguments}
    ),
    "save_sharded": lambda folder, arguments: fastensor.save_sharded(
        **{"state": STATE, "folder": folder / "new", **arguments}
    ),
    "load_sharded": lambda folder, arguments: fastensor.load_sharded(folder / "x.safetensors", **arguments),
    "open": lambda folder, arguments: fastensor.open(folder / "x.ckpt", **arguments),
    "verify": lambda folder, arguments: fastensor.verify(folder / "x.ckpt", **arguments),
    "convert": lambda folder, arguments: fastensor.convert(folder / "x.ckpt", folder / "new.safetensors", **arguments),
    "AsyncWriter": lambda folder, arguments: fastensor.AsyncWriter(**arguments),
    "TensorStore": lambda folder, arguments: fastensor.TensorStore(**{"directory": folder / "store", **arguments}),
    "Selector": lambda folder, arguments: fastensor.Selector(**arguments),
    "use_selector": lambda folder, arguments: fastensor.use_selector(**arguments),
    "current_selector": lambda folder, arguments: fastensor.current_selector(folder, **arguments),
    "OffloadConfig": lambda folder, arguments: OffloadConfig(**arguments),
    "ActivationOffload": lambda folder, arguments: ActivationOffload(**arguments),
    "cooperative.save": lambda folder, arguments: cooperative.save(STATE, folder / "new.ckpt", **arguments),
    "cooperative.load": lambda folder, arguments: cooperative.load(folder / "x.ckpt", **arguments),
    "FastensorStorageWriter": lambda folder, arguments: FastensorStorageWriter(folder / "dcp", **arguments),
    "FastensorStorageReader": lambda folder, arguments: FastensorStorageReader(folder / "dcp", **arguments),
    "LmdbDataset": lambda folder, arguments: LmdbDataset(folder / "nothing.lmdb", **arguments),
    "EpochPlan": lambda folder, arguments: EpochPlan(10, **arguments),
}
BACKEND: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"backend": "fast"}, UnknownBackendError, r"named 'fast'; did you mean 'auto'\?$"),
    ({"backend": "zzz"}, UnknownBackendError, "no backend is named 'zzz'; there are auto, direct"),
    ({"backend": 3}, TypeError, "backend is a name or a fastensor.Selector, found 3"),
]
PLACE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"map_location": "gpu"}, ValueError, "map_location='gpu' names no device; did you mean 'cuda'"),
    ({"map_location": "cudda:1"}, ValueError, "map_location='cudda:1' names no device; did you mean 'cuda:1'"),
    ({"map_location": 3.5}, TypeError, "map_location is a device, its name, a dict of names or a function, found 3.5"),
]


def flag(name: str, value: Any = "no") -> tuple[dict[str, Any], type[Exception], str]:
    return {name: value}, TypeError, f"{name} is True or False, found {value!r}"


def size(name: str, least: int) -> list[tuple[dict[str, Any], type[Exception], str]]:
    return [
        ({name: "2 lots"}, ValueError, f"{name}: expected a size such as 5GB or 2GiB, found '2 lots'"),
        ({name: [1]}, TypeError, rf"{name} is a whole number of bytes, or a text such as '2GiB', found \[1\]"),
        ({name: least - 1}, ValueError, f"{name} is at least {least}"),
    ]


SAVES = [*BACKEND, flag("durable"), flag("checksums")]
WRONG: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "save": [
        *SAVES,
        flag("follow_symlinks"),
        ({"container": "zip"}, ValueError, "container is 'torch', 'safetensors' or None, found 'zip'"),
        ({"container": "safetensor"}, ValueError, "found 'safetensor'"),
        ({"path": 3}, TypeError, "expected a path"),
        ({"path": BytesPath()}, TypeError, r"expected a path of type str or os.PathLike\[str\]"),
        ({"progress": 3}, TypeError, "progress is a function"),
    ],
    "AsyncWriter.save": SAVES,
    "load": [
        *BACKEND,
        *PLACE,
        ({"verify": "no"}, TypeError, "verify is True, False, 'first' or None, found 'no'"),
        flag("mmap"),
        ({"weights_only": "no"}, TypeError, "weights_only is True, False or None, found 'no'"),
        ({"keys": 3}, TypeError, "keys is a list of names and patterns, found 3"),
        ({"path": 3}, TypeError, "expected a path"),
        ({"path": BytesPath()}, TypeError, r"expected a path of type str or os.PathLike\[str\]"),
    ],
    "save_model": [*SAVES, ({"model": {}}, TypeError, r"model is a torch\.nn\.Module")],
    "load_model": [
        *BACKEND,
        flag("strict"),
        ({"verify": "no"}, TypeError, "verify is True, False, 'first' or None, found 'no'"),
        ({"root": 3}, TypeError, "root is the name of a dict, found 3"),
    ],
    "save_sharded": [
        *SAVES,
        *size("shard_nbytes", 1),
        ({"state": {"epoch": 3}}, fastensor.UnsupportedContentError, "tensors only, but 'epoch' is of type int"),
        ({"state": [1]}, TypeError, r"state is a dict from names to tensors, or a model, found one of type list"),
        ({"folder": 3}, TypeError, "expected a path"),
    ],
    "load_sharded": [*BACKEND, *PLACE],
    "open": [*BACKEND, *PLACE, flag("mmap"), flag("verify"), flag("verify_again")],
    "verify": BACKEND,
    "convert": [
        *BACKEND,
        *size("shard_nbytes", 1),
        *size("memory_nbytes", 1 << 20),
        flag("durable"),
        flag("verify"),
        flag("checksums"),
        flag("copy_ties"),
        ({"container": "zip"}, ValueError, "found 'zip'"),
    ],
    "AsyncWriter": [
        *size("staging_bytes", 4 << 20),
        ({"when_busy": "never"}, ValueError, "when_busy is one of"),
        ({"exit_seconds": "soon"}, TypeError, "exit_seconds is a number of seconds, found 'soon'"),
        ({"preemption_seconds": "soon"}, TypeError, "preemption_seconds is a number of seconds or None, found 'soon'"),
        ({"max_bytes_per_second": "fast"}, ValueError, "max_bytes_per_second: expected a size"),
        ({"max_bytes_per_second": 0}, ValueError, "max_bytes_per_second is positive or None"),
    ],
    "TensorStore": [
        *BACKEND[:2],
        ({"mode": "fast"}, ValueError, "mode is one of"),
        flag("durable"),
        flag("verify"),
        ({"selector": 3}, TypeError, r"selector is a fastensor\.Selector or None, found 3"),
    ],
    "Selector": [
        ({"mode": "fast"}, ValueError, "mode is one of"),
        flag("explore"),
        flag("paper"),
        ({"dictionary": "x.json"}, TypeError, r"dictionary is a fastensor\.Dictionary or None, found 'x.json'"),
    ],
    "use_selector": [({"selector": "direct"}, TypeError, r"selector is a fastensor\.Selector or None, found 'direct'")],
    "current_selector": [({"of": "things"}, ValueError, "of is one of .*'files'.*, found 'things'")],
    "OffloadConfig": [
        *size("min_bytes", 1),
        *size("staging_bytes", 1),
        *size("prefetch_bytes", 0),
        *size("dram_bytes", 0),
        *size("ssd_bytes", 0),
        ({"directories": "/tmp"}, TypeError, r"directories is a tuple of strings, found '/tmp'; .*\('/tmp',\)"),
        ({"backend": "dirct"}, ValueError, "found 'dirct'; did you mean 'direct'"),
        ({"schedule": "some"}, ValueError, "schedule is 'auto', 'all', a number of bytes"),
        ({"target": "disk"}, ValueError, "target is one of"),
        ({"codecs": ("zip",)}, ValueError, "codecs are some of"),
        flag("verify"),
    ],
    "ActivationOffload": [
        ({"config": "/tmp"}, TypeError, r"config is an OffloadConfig, found '/tmp': .*directories=\('/tmp',\)"),
        (
            {"config": OffloadConfig(directories=("/nosuch",))},
            OffloadError,
            r"/nosuch.*No such file or directory.*create it, or name another folder",
        ),
        (
            {"config": OffloadConfig(directories=("/etc/hostname",))},
            OffloadError,
            r"/etc/hostname.*Not a directory.*name another folder",
        ),
        ({"config": OffloadConfig(directories=("/proc",))}, OffloadError, "/proc.*name another folder"),
    ],
    "cooperative.save": [
        *SAVES,
        ({"timeout": "long"}, ValueError, "timeout is a positive number of seconds, found 'long'"),
        ({"timeout": -1}, ValueError, "timeout is a positive number of seconds, found -1"),
        ({"check_replicas": "none"}, ValueError, "check_replicas is one of .*found 'none'"),
    ],
    "cooperative.load": [*PLACE, ({"timeout": 0}, ValueError, "timeout is a positive number of seconds, found 0")],
    "FastensorStorageWriter": [
        *BACKEND,
        flag("sync_files"),
        flag("overwrite"),
        flag("single_file_per_rank"),
        ({"thread_count": 0}, ValueError, "thread_count is at least 1, found 0"),
        ({"thread_count": "2"}, TypeError, "thread_count is a whole number, found '2'"),
    ],
    "FastensorStorageReader": BACKEND,
    "LmdbDataset": [
        ({"engine": "fast"}, ValueError, "engine is 'auto' or one of"),
        ({"reader": "nod"}, ValueError, "reader is one of .*found 'nod'; did you mean 'node'"),
        *size("read_ahead_nbytes", 0),
        ({"decode": 3}, TypeError, "decode is a function, found 3"),
    ],
    "EpochPlan": [
        ({"batch_size": 0}, ValueError, "batch_size is at least 1, found 0"),
        ({"shuffle": "all"}, ValueError, "shuffle is one of"),
        ({"batch_size": "8"}, TypeError, "batch_size is a whole number, found '8'"),
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fastensor.save(STATE, tmp_path / "x.ckpt")
    fastensor.save(STATE, tmp_path / "x.safetensors")
    return tmp_path


def cases() -> list[Any]:
    return [
        pytest.param(name, *row, id=f"{name}: {next(iter(row[0]))}={next(iter(row[0].values()))!r:.20}")
        for name, rows in WRONG.items()
        for row in rows
    ]


@pytest.mark.parametrize(("name", "arguments", "error", "message"), cases())
def test_wrong_arguments(
    folder: Path, name: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = sorted(os.listdir(folder))
    with pytest.raises(error, match=message) as caught:
        USES[name](folder, arguments)
    kind = type(caught.value)
    assert error in (kind, kind.__bases__[0])  # the second one may be torch's
    assert kind.__name__ == error.__name__
    assert sorted(os.listdir(folder)) == before


SIZES: dict[str, tuple[Use, Callable[[Any], Any]]] = {
    "min_bytes": (USES["OffloadConfig"], lambda config: config.min_bytes),
    "dram_bytes": (USES["OffloadConfig"], lambda config: config.dram_bytes),
    "schedule": (USES["OffloadConfig"], lambda config: config.schedule),
    "staging_bytes": (USES["AsyncWriter"], lambda writer: writer._settings.staging_bytes),
    "max_bytes_per_second": (USES["AsyncWriter"], lambda writer: writer._settings.max_bytes_per_second),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_may_be_texts(tmp_path: Path, name: str) -> None:
    use, of = SIZES[name]
    for text, nbytes in (("2GiB", 2 << 30), ("2 GB", 2_000_000_000), (2 << 30, 2 << 30)):
        assert of(use(tmp_path, {name: text})) == nbytes


def test_folders_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_memory = Path("/dev/shm")
    if not in_memory.is_dir() or not os.access(in_memory, os.W_OK):
        pytest.skip("this machine has no folder in memory")
    path = in_memory / f"fastensor-{os.getpid()}.ckpt"
    try:
        assert not fastensor.save(STATE, path).durable
    finally:
        path.unlink(missing_ok=True)
    with ActivationOffload(OffloadConfig(directories=(str(in_memory),))):
        assert "which is in memory: what is offloaded there still takes memory" in caplog.text
