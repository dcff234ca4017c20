"""Comparing two checkpoints, whatever they are in: files, or directories of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fastensor.backends import registry
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.progress import Progress
from fastensor.checkpoint.tools.catalog import TensorInfo
from fastensor.checkpoint.tools.contents import OpenCheckpoint, open_checkpoint
from fastensor.checkpoint.tools.folders import FolderEntry, entries_at, folder_at, main_entry, name_behind, name_in
from fastensor.errors import UnsupportedContentError
from fastensor.files.arguments import checks_keywords
from fastensor.files.os_errors import read_errors
from fastensor.files.shown import record_repr, without_secrets
from fastensor.files.words import counted, some_of
from fastensor.select.transfer import BackendChoice

_SHOWN = 10
"""Number of differences that are shown in words."""
_AT_ONCE = 1 << 22
"""Elements that are compared at once."""
_WRAPS_FROM = 2.0**62
"""Larger differences of integers of 64 bits may not have room in one."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that both checkpoints have, and that differs."""

    name: str
    first: str
    """Dtype and shape in the first checkpoint."""
    second: str
    elements: int = 0
    """Number of elements that have other bytes, and are not within the tolerances; 0 if dtypes or shapes differ."""
    largest: float = 0.0
    """The largest absolute difference of two elements; NaN if that is not a number, or torch does not compute with the
    dtype."""

    def __str__(self) -> str:
        if self.elements:
            return f"{self.name}: {self.elements} elements of {self.first} differ, by {self.largest:g} at most"
        return f"{self.name}: {self.first} in the first, {self.second} in the second"


@dataclass(frozen=True, slots=True)
class Difference:
    """The result of a :func:`diff`."""

    first: str
    second: str
    only_first: tuple[str, ...]
    """Names of tensors and other values that only the first checkpoint has, and of files that only its folder has."""
    only_second: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    others: Mapping[str, tuple[str, str]]
    """Other values that differ, in words."""
    same: int
    """Number of tensors, other values and files that are no checkpoints that are the same in both, within the
    tolerances."""
    not_compared: tuple[str, ...] = ()
    """Files of a folder that are no checkpoints, if the other side is a single checkpoint with nothing beside it; and
    what is no file: directories of Git and of saves that go on, links to directories, pipes."""

    __repr__ = record_repr

    def __str__(self) -> str:
        """The differences for people; of many the first ones."""
        lines = [f"{name}: only in the first" for name in self.only_first]
        lines += [f"{name}: only in the second" for name in self.only_second]
        lines += map(str, self.tensors)
        lines += [f"{name}: {one} in the first, {two} in the second" for name, (one, two) in self.others.items()]
        head = f"{without_secrets(self.first)} and {without_secrets(self.second)}: "
        head += f"{counted(len(lines), 'differences')}, {self.same} the same"
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        if self.not_compared:
            more.append(f"not compared: {some_of(self.not_compared, _SHOWN)}")
        return "\n".join([head, *lines[:_SHOWN], *more])

    @property
    def is_empty(self) -> bool:
        """True if the checkpoints hold the same."""
        return not (self.only_first or self.only_second or self.tensors or self.others)


@checks_keywords
def diff(
    first: Location,
    second: Location,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    values: bool = True,
    backend: BackendChoice = registry.AUTO,
    progress: Progress | None = None,
) -> Difference:
    """Compare the tensors and the other values of two checkpoints by their names, in memory for two tensors.

    Args:
        first: a file of torch or of safetensors; the index of a model in several files; the directory of a distributed
            checkpoint; or a folder of this machine, of which all is compared, with its folders.
        second: the same, not necessarily of the same kind. The files of two folders are compared by their paths in
            them. If the model that :func:`fastensor.load_sharded` finds in each has another path there, and neither
            path is in both, they are compared with each other; so is a single checkpoint with the model of a folder,
            or with all that is in it. Names in all other files stand behind the path of the file.
        rtol, atol: elements ``a`` and ``b`` are the same if ``abs(a - b) <= atol + rtol * abs(b)``, as for
            ``torch.allclose``. If one of the two is not 0, NaNs are the same as each other.
        values: whether to compare the elements of tensors. If False, no tensor is read.
        backend: as for :func:`fastensor.load`.
        progress: called after each tensor with the bytes compared and the bytes to compare.

    Returns:
        What differs. Without tolerances, tensors are compared byte by byte: NaNs are the same if their bytes are.
        Values of torch files that are no tensors are compared as far as :func:`fastensor.inspect` shows them. Files of
        folders that are no checkpoints, or can only be loaded whole, are compared by their SHA-256; if ``values`` is
        False, their sizes.

    Raises:
        FileNotFoundError: one of the checkpoints is missing.
        CorruptCheckpointError: one of them is damaged. All tensors are compared with their checksums.
        UnsupportedContentError: a tensor is not a dense one; or what can only be loaded whole is not a file of a
            folder, but given by itself, or in several files.
        CheckpointReadError: the operating system failed to deliver bytes.
        ValueError: a tolerance is negative, or no number.

    No code of the checkpoints is run.

    >>> import os, tempfile, torch, fastensor
    >>> folder = tempfile.mkdtemp()
    >>> _ = fastensor.save({"w": torch.zeros(3), "b": torch.ones(1)}, f"{folder}/a.ckpt")
    >>> _ = fastensor.save({"w": torch.tensor([0.0, 0.0, 2.5]), "b": torch.ones(1)}, f"{folder}/b.safetensors")
    >>> found = fastensor.diff(f"{folder}/a.ckpt", f"{folder}/b.safetensors")
    >>> [(one.name, one.elements, one.largest) for one in found.tensors], found.same
    ([('w', 1, 2.5)], 1)
    """
    if not (rtol >= 0 and atol >= 0):
        raise ValueError(f"rtol and atol are at least 0, found {rtol} and {atol}")
    pairs, alone = _paired(_files_at(first), _files_at(second))
    closeness = _Closeness(rtol, atol) if values else None
    with ExitStack() as stack:
        sides, whole = _opened(pairs, backend, stack)
        found = [alone, *_compare_contents(sides, closeness, progress)]
    found += [_compare_whole(name, *pair, values=values) for name, pair in whole.items()]
    return Difference(
        first=name_of(first),
        second=name_of(second),
        only_first=tuple(sorted(name for one in found for name in one.only_first)),
        only_second=tuple(sorted(name for one in found for name in one.only_second)),
        tensors=tuple(sorted((tensor for one in found for tensor in one.tensors), key=lambda one: one.name)),
        others={name: words for one in found for name, words in one.others.items()},
        same=sum(one.same for one in found),
        not_compared=tuple(sorted(name for one in found for name in one.not_compared)),
    )


@dataclass(frozen=True, slots=True)
class _Files:
    """Checkpoints and other files at a location."""

    entries: Mapping[str, FolderEntry]
    """By its path in the folder."""
    main: str | None
    """The path of that whose names need no path in front of them."""


def _files_at(location: Location) -> _Files:
    entries = entries_at(location)
    main, folder = main_entry(location, entries), folder_at(location)
    if folder is None:  # its path says nothing about what it is compared with
        return _Files({"": entries[0]}, "")
    return _Files(
        {name_in(folder, entry.path): entry for entry in entries},
        None if main is None else name_in(folder, main.path),
    )


_NOTHING = Difference("", "", (), (), (), {}, 0)
"""Empty findings, with which those of a part of two checkpoints begin. Names get the path of their file in front."""


def _paired(first: _Files, second: _Files) -> tuple[dict[str, tuple[FolderEntry, FolderEntry]], Difference]:
    """The files of both that are compared with each other, by their path, which is empty for what both have as their
    model; and what is found of all others."""
    mains = _mains_are_a_pair(first, second)
    one, two = (
        {"" if mains and name == side.main else name: entry for name, entry in side.entries.items()}
        for side in (first, second)
    )
    single = len(one) == 1 or len(two) == 1
    alone = [{name: side[name] for name in side.keys() - other.keys()} for side, other in ((one, two), (two, one))]

    def only(side: Mapping[str, FolderEntry]) -> tuple[str, ...]:
        return tuple(name or str(at.path) for name, at in side.items() if at.is_checkpoint or not single)

    return {name: (one[name], two[name]) for name in one if name in two}, replace(
        _NOTHING,
        only_first=only(alone[0]),
        only_second=only(alone[1]),
        not_compared=tuple(name for side in alone for name, at in side.items() if single and not at.is_checkpoint),
    )


def _mains_are_a_pair(first: _Files, second: _Files) -> bool:
    """True if the models of both are compared with each other. What has its path on the other side is compared with
    what is there."""
    if first.main is None or second.main is None:
        return False
    return first.main == second.main or not (first.main in second.entries or second.main in first.entries)


def _compare_whole(name: str, one: FolderEntry, two: FolderEntry, *, values: bool) -> Difference:
    """Compare what nothing is known of but its bytes."""
    if not any(os.path.isfile(str(entry.path)) for entry in (one, two)):
        return replace(_NOTHING, not_compared=(name,))
    words = _file_in_words(one, values), _file_in_words(two, values)
    return replace(_NOTHING, same=1) if words[0] == words[1] else replace(_NOTHING, others={name: words})


def _file_in_words(entry: FolderEntry, values: bool) -> str:
    path = Path(str(entry.path))
    if not path.is_file():
        return f"<{entry.kind}>"
    words = f"{entry.kind} of {path.stat().st_size} bytes"
    if not values:
        return f"<{words}>"
    with read_errors(str(path)), path.open("rb") as file:
        return f"<{words} with SHA-256 {hashlib.file_digest(file, 'sha256').hexdigest()}>"


@dataclass(frozen=True, slots=True)
class _Closeness:
    """Tolerances of elements."""

    rtol: float
    atol: float

    def differing(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        """Mask of the elements of two tensors, all with other bytes, that are not close to each other."""
        if not (self.rtol or self.atol):
            return torch.ones(one.shape, dtype=torch.bool)
        try:
            if not (one.is_floating_point() or one.is_complex()):
                return self._differing_integers(one, two)
            wide_one, wide_two = one.to(torch.complex128), two.to(torch.complex128)
        except NotImplementedError:  # four-bit floats, raw bits
            return torch.ones(one.shape, dtype=torch.bool)
        return ~torch.isclose(wide_one, wide_two, rtol=self.rtol, atol=self.atol, equal_nan=True)

    def _differing_integers(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
        about = (one.double() - two.double()).abs()
        exact = (one.to(torch.int64) - two.to(torch.int64)).double().abs()  # doubles do not tell large integers apart
        return torch.where(about < _WRAPS_FROM, exact, about) > self.atol + self.rtol * two.double().abs()


def _compare_contents(
    pairs: Mapping[str, tuple[OpenCheckpoint, OpenCheckpoint]], closeness: _Closeness | None, progress: Progress | None
) -> list[Difference]:
    """Compare what is in files, directories and models, by their paths."""
    shared = {file: [name for name in one.tensors if name in two.tensors] for file, (one, two) in pairs.items()}
    total = sum(pairs[file][0].tensors[name].nbytes for file, names in shared.items() for name in names)
    done = 0
    found = []
    for file, (one, two) in pairs.items():
        tensors = []
        for name in shared[file]:
            tensors.append(_compare(name, one, two, closeness))
            done += one.tensors[name].nbytes
            if progress is not None:
                progress(done, total)
        found.append(_found_in(file, one, two, [tensor for tensor in tensors if tensor is not None]))
    return found


def _found_in(file: str, one: OpenCheckpoint, two: OpenCheckpoint, tensors: Sequence[TensorDifference]) -> Difference:
    """Findings of a file, of whose tensors these differ."""

    def behind(name: str) -> str:
        return name_behind(file, name) if file else name

    names = [{*side.tensors, *side.others} for side in (one, two)]
    others, same = _compare_others(one, two)
    shared = one.tensors.keys() & two.tensors.keys()
    return replace(
        _NOTHING,
        only_first=tuple(map(behind, names[0] - names[1])),
        only_second=tuple(map(behind, names[1] - names[0])),
        tensors=tuple(replace(tensor, name=behind(tensor.name)) for tensor in tensors),
        others={behind(name): words for name, words in others.items()},
        same=len(shared) - len(tensors) + same,
    )


def _compare_others(one: OpenCheckpoint, two: OpenCheckpoint) -> tuple[dict[str, tuple[str, str]], int]:
    """The values that differ, in words; and how many are the same."""
    shared = one.others.keys() & two.others.keys()
    words = {name: (one.in_words(name), two.in_words(name)) for name in sorted(shared)}
    others = {name: pair for name, pair in words.items() if pair[0] != pair[1]}
    same = len(shared) - len(others)
    mixed = (one.tensors.keys() & two.others.keys()) | (one.others.keys() & two.tensors.keys())
    others.update({name: (_in_words(one, name), _in_words(two, name)) for name in sorted(mixed)})
    return others, same


def _in_words(side: OpenCheckpoint, name: str) -> str:
    return _described(side.tensors[name]) if name in side.tensors else side.in_words(name)


def _described(info: TensorInfo) -> str:
    return f"{str(info.dtype).removeprefix('torch.')} {' × '.join(map(str, info.shape)) or 'scalar'}"


def _compare(
    name: str, one: OpenCheckpoint, two: OpenCheckpoint, closeness: _Closeness | None
) -> TensorDifference | None:
    infos = one.tensors[name], two.tensors[name]
    kinds = _described(infos[0]), _described(infos[1])
    if kinds[0] != kinds[1]:
        return TensorDifference(name, *kinds)
    if closeness is None:
        return None
    tensors = [side.read(name).contiguous().view(-1) for side in (one, two)]
    elements = 0
    largest = 0.0
    for at in range(0, infos[0].nbytes // infos[0].dtype.itemsize, _AT_ONCE):
        differing = _differing(tensors[0][at : at + _AT_ONCE], tensors[1][at : at + _AT_ONCE], closeness)
        if differing is not None:
            elements += differing[0].numel()
            found = _largest(*differing)
            largest = found if math.isnan(found) else max(largest, found)
    return TensorDifference(name, *kinds, elements, largest) if elements else None


def _differing(one: torch.Tensor, two: torch.Tensor, closeness: _Closeness) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The elements of both that differ; None if there are none."""
    of_bytes = [part.unsqueeze(-1).view(torch.uint8) for part in (one, two)]  # the stride of one element may be any
    others = (of_bytes[0] != of_bytes[1]).any(dim=1)
    if not others.any():
        return None
    rows = [part[others] for part in of_bytes]
    apart = closeness.differing(rows[0].view(-1).view(one.dtype), rows[1].view(-1).view(one.dtype))
    if not apart.any():
        return None
    found = [part[apart].view(-1).view(one.dtype) for part in rows]  # torch does not index every dtype
    return found[0], found[1]


def _largest(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest absolute difference of elements that are not the same; NaN if torch cannot tell."""
    try:
        # complex128 holds every value of every dtype but large integers, of which it keeps the magnitude
        return float((one.to(torch.complex128) - two.to(torch.complex128)).abs().max())
    except NotImplementedError:  # four-bit floats, raw bits
        return math.nan


def _opened(
    pairs: Mapping[str, tuple[FolderEntry, FolderEntry]], backend: BackendChoice, stack: ExitStack
) -> tuple[dict[str, tuple[OpenCheckpoint, OpenCheckpoint]], dict[str, tuple[FolderEntry, FolderEntry]]]:
    """Both sides, and what can only be compared as a whole, by path.

    Raises:
        UnsupportedContentError: there is one pair, or not a pair of files, and it can only be loaded whole.
    """
    sides: dict[str, tuple[OpenCheckpoint, OpenCheckpoint]] = {}
    whole: dict[str, tuple[FolderEntry, FolderEntry]] = {}
    for name, (one, two) in pairs.items():
        if not (one.is_checkpoint and two.is_checkpoint):
            whole[name or str(one.path)] = one, two
            continue
        try:
            sides[name] = open_checkpoint(one, stack, backend), open_checkpoint(two, stack, backend)
        except UnsupportedContentError:
            if len(pairs) == 1 or not (_is_one_file(one) and _is_one_file(two)):
                raise
            whole[name or str(one.path)] = one, two
    return sides, whole


def _is_one_file(entry: FolderEntry) -> bool:
    return entry.kind == "checkpoint" and os.path.isfile(str(entry.path))
