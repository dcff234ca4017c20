"""What is attacked, and what withstanding it means."""

from __future__ import annotations

import pkgutil
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fastensor
from fastensor import FastensorError, UnsupportedContentError, UnverifiedCheckpointWarning, checkpoint, stitch
from fastensor.backends.registry import available_names
from fastensor.checkpoint import containers, models, reading, tools
from fastensor.checkpoint.reading import storages
from fastensor.stitch.signatures import SAFETENSORS_SUFFIX

for _name in fastensor.__all__:
    getattr(fastensor, _name)  # imports it: what an attack imports after that is the file's doing
for _folder in (checkpoint, containers, models, reading, tools, stitch):
    for _module in pkgutil.iter_modules(_folder.__path__, f"{_folder.__name__}."):
        import_module(_module.name)  # some are imported when they are needed

BRANCH = "plain"
"""The dict of dense tensors in the states of torch files here: all that a safetensors file can hold."""
W = torch.arange(12, dtype=torch.int32).reshape(3, 4)
PLAIN = {"w": W, "b": torch.linspace(0, 1, 5), "none": torch.empty(0, 2)}
STATE: dict[str, Any] = {
    BRANCH: PLAIN,
    "tied": W,
    "strided": torch.arange(16.0).reshape(4, 4)[::2, 1::2],
    "name": "x" * 20,
    "epoch": 3,
}


DEEPEST = 20
"""How far pictures go."""
REFUSED = "refused"
"""The picture of what a load refuses."""


@dataclass(frozen=True)
class Reading:
    """What an entry point gave."""

    picture: Any
    """Plain values that are equal if what was read is."""
    verified: bool
    """Whether no warning said that something could not be verified."""


def picture(value: Any, depth: int = 0) -> Any:
    """The type, layout and bytes of everything in a tree, also of what its strides skip."""
    if depth > DEEPEST:
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        geometry = (type(value).__name__, value.dtype, tuple(value.shape), value.layout, value.requires_grad)
        if value.layout != torch.strided or value.is_quantized or value.device.type == "meta":
            return geometry
        return (*geometry, value.stride(), value.storage_offset(), picture(value.untyped_storage()))
    if isinstance(value, torch.UntypedStorage):
        return bytes(value.tolist()) if value.device.type == "cpu" else value.nbytes()
    if isinstance(value, dict):
        return type(value).__name__, [(key, picture(inner, depth + 1)) for key, inner in dict.items(value)]
    if isinstance(value, list | tuple):
        return type(value).__name__, [picture(inner, depth + 1) for inner in value]
    return value


@contextmanager
def in_one_step() -> Iterator[None]:
    """The small pickles of tests are read as large ones are."""
    with mock.patch.object(storages, "_LARGE_PICKLE_NBYTES", 0):
        yield


def load(path: Path, **options: Any) -> Reading:
    """Calls that make tensors are run opcode by opcode, and in one step: both are refused, or give the same."""
    if not options.keys() <= {"backend"}:
        return _load(path, **options)
    try:
        with in_one_step():
            found = _load(path, **options)
    except FastensorError:
        _load(path, **options)  # which has to raise, too
        raise AssertionError("only in one step, it is refused") from None
    assert repr(found) == repr(_load(path, **options))  # a key may be NaN, or a storage
    return found


def _load(path: Path, **options: Any) -> Reading:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fastensor.load(path, **options)
    return Reading(picture(result), not any(one.category is UnverifiedCheckpointWarning for one in caught))


@contextmanager
def not_warned() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnverifiedCheckpointWarning)
        yield


def load_keys(path: Path) -> Reading:
    return load(path, keys=["*w"])


def load_trusting(path: Path) -> Reading:
    """What a crafted checkpoint may do here is not ours to refuse; what is no checkpoint may do nothing."""
    return load(path, weights_only=False)


def load_mapped(path: Path) -> Reading:
    return Reading(load(path, mmap=True).picture, verified=False)


def read_lazily(path: Path) -> Reading:
    """Every tensor of an open checkpoint, and the beginning of each."""
    with not_warned(), fastensor.open(path) as checkpoint:
        found = [(name, _pictures(checkpoint, name)) for name in checkpoint]
        rest = dict(checkpoint.others_in_words), dict(checkpoint.metadata)
        return Reading((found, rest), checkpoint.verified)


def _pictures(checkpoint: fastensor.LazyCheckpoint, name: str) -> Any:
    try:
        whole = checkpoint[name]
    except UnsupportedContentError as error:
        return type(error)
    return picture(whole), picture(checkpoint[name, :1] if whole.ndim else checkpoint[name, ...])


def inspect(path: Path) -> Reading:
    found = fastensor.inspect(path)
    tensors = [(one.name, one.kind, one.dtype, one.shape, one.nbytes) for one in found.tensors]
    refused = [] if any(reason.startswith("the pickle (") for reason in found.refused) else sorted(found.refused)
    rest = dict(found.others), dict(found.metadata), refused  # where torch cannot read a file, that says so
    return Reading((found.container, tensors, rest, found.ties, found.tensor_bytes), found.checked)


def verify(path: Path) -> Reading:
    """What it calls complete, a load gives: if not what was saved, then nothing."""
    if not fastensor.verify(path).complete:
        return Reading(None, verified=False)
    try:
        return load(path)
    except FastensorError:
        return Reading(REFUSED, verified=True)


def convert(path: Path) -> Reading:
    """To the other container and back into memory. What is refused leaves nothing behind."""
    from_safetensors = path.suffix == SAFETENSORS_SUFFIX
    target = path.parent / f"converted{'.ckpt' if from_safetensors else SAFETENSORS_SUFFIX}"
    root = None if from_safetensors else BRANCH
    with not_warned(), fastensor.open(path) as checkpoint:
        verified = checkpoint.verified
    try:
        with not_warned():
            fastensor.convert(path, target, root=root, copy_ties=True, durable=False)
        return Reading(load(target).picture, verified)
    except FastensorError:
        assert not target.exists()
        raise
    finally:
        with suppress(FileNotFoundError):
            target.unlink()


ENTRY_POINTS: Mapping[str, Callable[[Path], Reading]] = {
    "load": load,
    "load_keys": load_keys,
    "load_mapped": load_mapped,
    "open": read_lazily,
    "inspect": inspect,
    "verify": verify,
    "convert": convert,
    "load_trusting": load_trusting,
    **{f"load_{name}": partial(load, backend=name) for name in available_names()},
}
BY_BACKEND = tuple(name for name in ENTRY_POINTS if name.removeprefix("load_") in available_names())
EVERY = tuple(name for name in ENTRY_POINTS if name not in (*BY_BACKEND, "load_trusting"))
"""All that withstand any file, backends apart."""
COMPARING = ("load", "load_keys", "open", "verify", "convert")
"""Those that read tensors and compare them with their checksums."""


def withstand(
    entry: str, path: Path, sound: Mapping[str, Reading], *, may_be_unverified: bool = False
) -> FastensorError | None:
    """Attack an entry point: it has to refuse the file, and say which it is, or to give what a sound file gives.

    Returns why it was refused.

    Args:
        entry: its name.
        path: the hostile file.
        sound: what each entry point gives for a sound one.
        may_be_unverified: whether it may also give anything, with the remark that it could not be verified.
    """
    try:
        found = ENTRY_POINTS[entry](path)
    except FastensorError as error:
        assert str(path) in str(error), f"the error does not name the file: {error!r}"
        return error
    if found.verified:
        assert found.picture in (REFUSED, sound[entry].picture)
    else:
        assert may_be_unverified or entry == "load_mapped", "it could not be verified"
    return None


@dataclass(frozen=True)
class Defect:
    """Something wrong with a file, and what is said about it."""

    name: str
    damage: Callable[[bytes], bytes]
    """Makes a file that has it from a sound one."""
    message: str
    """A pattern of what is said behind the file's name; of a mapped file, torch says it in words of its own."""
    refused_by: tuple[str, ...] = EVERY
    """The entry points that have to notice. The others may, or give what a sound file gives."""
    may_be_unverified: bool = False
    """Whether the file may be taken for one without checksums."""

    def assert_withstood(self, entry: str, path: Path, sound: bytes) -> None:
        """Attack an entry point with the sound file, damaged."""
        path.write_bytes(sound)
        readings = {entry: ENTRY_POINTS[entry](path)}
        path.write_bytes(self.damage(sound))
        error = withstand(entry, path, readings, may_be_unverified=self.may_be_unverified)
        assert error is not None or entry not in self.refused_by
        if error is not None and entry != "load_mapped":
            pattern = f"{re.escape(str(path))}.*(?:{self.message})"
            assert re.search(pattern, str(error), re.DOTALL), f"expected {pattern!r}, found {error}"


def attacks_with(defects: Iterable[Defect]) -> pytest.MarkDecorator:
    """Parameters ``defect`` and ``entry``: each defect against each entry point."""
    pairs = [(defect, entry) for defect in defects for entry in EVERY]
    names = [f"{defect.name}-{entry}" for defect, entry in pairs]
    return pytest.mark.parametrize(("defect", "entry"), pairs, ids=names)
