"""Comparing two checkpoints, whatever they are in: files, or directories of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from isal import isal_zlib

from fastensor.backends import registry
from fastensor.checkpoint.catalog import TensorInfo, in_words, read_catalog
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.lazy import open as open_lazily
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.opened import opened
from fastensor.errors import CorruptCheckpointError
from fastensor.select.transfer import BackendChoice

_AT_ONCE = 1 << 22
"""How many elements are compared at once."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that both checkpoints have, and that differs."""

    name: str
    first: str
    """Dtype and shape in the first checkpoint."""
    second: str
    elements: int = 0
    """How many elements have other bytes; 0 if dtypes or shapes differ."""
    largest: float = 0.0
    """The largest absolute difference of two elements; NaN if that is not a number, or torch does not compute with the
    dtype."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of a :func:`diff`."""

    first: str
    second: str
    only_first: tuple[str, ...]
    """Names of tensors and other values that only the first checkpoint has."""
    only_second: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    others: Mapping[str, tuple[str, str]]
    """Other values that differ, in words."""
    same: int
    """How many tensors and other values are the same in both."""

    @property
    def is_empty(self) -> bool:
        """Whether the checkpoints hold the same."""
        return not (self.only_first or self.only_second or self.tensors or self.others)


class _Side(Protocol):
    """One of the two checkpoints."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def others(self) -> Mapping[str, str]: ...

    def read(self, name: str) -> torch.Tensor: ...


def diff(first: Location, second: Location, *, backend: BackendChoice = registry.AUTO) -> Difference:
    """Compare the tensors and the other values of two checkpoints by their names, in memory for two tensors.

    Args:
        first: a file of torch or of safetensors, or the directory of a distributed checkpoint.
        second: the same, not necessarily of the same kind.
        backend: as for :func:`fastensor.load`.

    Returns:
        What differs. Tensors are compared byte by byte: NaNs are the same if their bytes are. Values of torch files
        that are no tensors are compared as far as :func:`fastensor.inspect` shows them.

    Raises:
        FileNotFoundError: one of the checkpoints is missing.
        CorruptCheckpointError: one of them is damaged. All tensors are compared with their checksums.
        UnsupportedContentError: a tensor is not a dense one, or a file can only be loaded whole.
        CheckpointReadError: the operating system failed to deliver bytes.

    No code of the checkpoints is run.

    >>> import os, tempfile, torch, fastensor
    >>> folder = tempfile.mkdtemp()
    >>> _ = fastensor.save({"w": torch.zeros(3), "b": torch.ones(1)}, f"{folder}/a.ckpt")
    >>> _ = fastensor.save({"w": torch.tensor([0.0, 0.0, 2.5]), "b": torch.ones(1)}, f"{folder}/b.safetensors")
    >>> found = fastensor.diff(f"{folder}/a.ckpt", f"{folder}/b.safetensors")
    >>> [(one.name, one.elements, one.largest) for one in found.tensors], found.same
    ([('w', 1, 2.5)], 1)
    """
    with _opened(first, backend) as one, _opened(second, backend) as two:
        tensors = []
        same = 0
        for name in one.tensors.keys() & two.tensors.keys():
            found = _compare(name, one, two)
            same += found is None
            tensors += [] if found is None else [found]
        shared = one.others.keys() & two.others.keys()
        others = {
            name: (one.others[name], two.others[name])
            for name in sorted(shared)
            if one.others[name] != two.others[name]
        }
        names = [{*side.tensors, *side.others} for side in (one, two)]
        mixed = (one.tensors.keys() & two.others.keys()) | (one.others.keys() & two.tensors.keys())
        others.update({name: (_in_words(one, name), _in_words(two, name)) for name in sorted(mixed)})
        return Difference(
            first=name_of(first),
            second=name_of(second),
            only_first=tuple(sorted(names[0] - names[1])),
            only_second=tuple(sorted(names[1] - names[0])),
            tensors=tuple(sorted(tensors, key=lambda one: one.name)),
            others=others,
            same=same + len(shared) - sum(name in shared for name in others),
        )


def _in_words(side: _Side, name: str) -> str:
    return _described(side.tensors[name]) if name in side.tensors else side.others[name]


def _described(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {' × '.join(map(str, info.shape)) or 'scalar'}"


def _compare(name: str, one: _Side, two: _Side) -> TensorDifference | None:
    infos = one.tensors[name], two.tensors[name]
    kinds = _described(infos[0]), _described(infos[1])
    if kinds[0] != kinds[1]:
        return TensorDifference(name, *kinds)
    tensors = [side.read(name).contiguous().view(-1) for side in (one, two)]
    elements = 0
    largest = 0.0
    for at in range(0, infos[0].nbytes // infos[0].dtype.itemsize, _AT_ONCE):
        parts = [tensor[at : at + _AT_ONCE] for tensor in tensors]
        of_bytes = [part.view(torch.uint8).view(-1, part.dtype.itemsize) for part in parts]
        differing = (of_bytes[0] != of_bytes[1]).any(dim=1)
        count = int(differing.sum())
        if count:
            elements += count
            found = _largest(*(part[differing].view(-1).view(tensors[0].dtype) for part in of_bytes))
            largest = found if math.isnan(found) else max(largest, found)
    return TensorDifference(name, *kinds, elements, largest) if elements else None


def _largest(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest absolute difference of elements that are not the same; NaN if torch cannot tell."""
    try:
        # complex128 holds every value of every dtype but large integers, of which it keeps the magnitude
        return float((one.to(torch.complex128) - two.to(torch.complex128)).abs().max())
    except NotImplementedError:  # four-bit floats, raw bits
        return math.nan


@contextmanager
def _opened(location: Location, backend: BackendChoice) -> Iterator[_Side]:
    with ExitStack() as stack:
        if metadata_names(location):
            yield _OfDirectory(location, backend, stack)
        else:
            yield _OfFile(location, backend, stack)


class _OfFile:
    """A file."""

    def __init__(self, location: Location, backend: BackendChoice, stack: ExitStack) -> None:
        self._checkpoint = stack.enter_context(open_lazily(location, backend=backend))
        self.tensors = self._checkpoint.info
        self.others = self._checkpoint.others

    def read(self, name: str) -> torch.Tensor:
        return self._checkpoint[name]


class _OfDirectory:
    """A distributed checkpoint."""

    def __init__(self, location: Location, backend: BackendChoice, stack: ExitStack) -> None:
        from fastensor.checkpoint.dcp.catalog import describe, read_contents  # loads torch.distributed.checkpoint
        from fastensor.checkpoint.dcp.tensors import DirectoryTensors

        contents = read_contents(cast(str, location))
        found = describe(contents)
        self._tensors = stack.enter_context(DirectoryTensors(contents, backend, verify=True))
        self.tensors = {info.name: info for info in found.tensors}
        self.others = {name: self._word(name) for name in found.others}

    def _word(self, name: str) -> str:
        data = self._tensors.read_bytes(name)
        try:
            with opened(io.BytesIO(data)) as file:
                return in_words(read_catalog(file, verify=False).structure)
        except CorruptCheckpointError:  # a planner of the user's has made the bytes; they are as they were saved
            return f"<{len(data)} bytes with CRC32 {isal_zlib.crc32(data):08x}>"

    def read(self, name: str) -> torch.Tensor:
        return self._tensors.read(name)
