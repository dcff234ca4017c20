"""A model of a folder's disk, which grants no more than ``fsync`` promises.

Until the ``fsync`` of a file has returned, each 4096-byte block of it, its length and its mode may each be as it was
after any earlier operation, independently of all others: written back early, late or never, in any order, with zeros
where nothing was written. The same holds for each name in the folder until the folder's ``fsync`` has returned, also
before the data that the name stands for. A name changes at once from one file to the other, as POSIX asks of
``rename``.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

BLOCK_NBYTES = 4096
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class File:
    """A file as a reader finds it."""

    content: bytes
    mode: int


@dataclass(frozen=True, slots=True)
class Create:
    """A new, empty file got a name, or is open without one."""

    name: str | None
    file: int
    """By which later operations refer to it; positive."""
    mode: int


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes of a file were replaced or added."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A file was cut or, with zeros, made longer."""

    file: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SetMode:
    """A file got other permissions."""

    file: int
    mode: int


@dataclass(frozen=True, slots=True)
class SyncFile:
    """An ``fsync`` of a file returned."""

    file: int
    covers: int
    """How many operations had been completed when it was called."""


@dataclass(frozen=True, slots=True)
class Link:
    """A file got one more name, which no file had."""

    file: int
    name: str


@dataclass(frozen=True, slots=True)
class Rename:
    """A file got another name, which may have been that of another file."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Unlink:
    """A name was removed."""

    name: str


@dataclass(frozen=True, slots=True)
class SyncFolder:
    """An ``fsync`` of the folder returned."""

    covers: int
    """As in :class:`SyncFile`."""


Operation: TypeAlias = Create | Write | Resize | SetMode | SyncFile | Link | Rename | Unlink | SyncFolder


@dataclass(frozen=True, slots=True)
class State:
    """What is found when the power is back."""

    file: File | None
    """Under the name in question."""
    others: frozenset[str]
    """The other names in the folder."""


class Disk:
    """A folder and all that a power failure can still undo of it.

    Args:
        before: its durable contents, by name.
    """

    def __init__(self, before: Mapping[str, File]) -> None:
        self._completed = 0
        self._inodes: dict[int, _Inode] = {}
        self._names: dict[str, _Cell[int | None]] = {}
        for number, (name, file) in enumerate(before.items()):
            inode = _Inode(_Cell(0), _Cell(file.mode))
            inode.write(-1, 0, file.content)
            _sync(inode.cells(), 0)
            self._inodes[-1 - number] = inode
            self._names[name] = _Cell(-1 - number)

    def apply(self, operation: Operation) -> None:
        """An operation has been completed."""
        number = self._completed
        self._completed += 1
        match operation:
            case Create(name, file, mode):
                self._inodes[file] = _Inode(_Cell(0), _Cell(mode))
                if name is not None:
                    self._name(name).add(number, file)
            case Link(file, name):
                self._name(name).add(number, file)
            case Write(file, offset, data):
                self._inodes[file].write(number, offset, data)
            case Resize(file, nbytes):
                self._inodes[file].resize(number, nbytes)
            case SetMode(file, mode):
                self._inodes[file].mode.add(number, mode)
            case SyncFile(file, covers):
                _sync(self._inodes[file].cells(), covers)
            case Rename(source, target):
                self._name(target).add(number, self._name(source).newest)
                self._name(source).add(number, None)
            case Unlink(name):
                self._name(name).add(number, None)
            case SyncFolder(covers):
                _sync(self._names.values(), covers)

    def without_failure(self) -> dict[str, File]:
        """The files, by name, if the power does not fail."""
        newest = {name: cell.newest for name, cell in self._names.items()}
        return {name: self._inodes[number].file({}) for name, number in newest.items() if number is not None}

    def after_failure(self, name: str, rng: random.Random, sample: int) -> Iterator[State]:
        """What can be found under ``name`` if the power fails now.

        Of the files, all contents that :func:`_choices` thinks of come with one set of the other names, and all sets
        of these with one content.
        """
        others = self._sets_of_others(name)
        for number in set(self._name(name).values):
            files = iter([None] if number is None else _distinct_files(self._inodes[number], rng, sample))
            first = next(files)
            yield from (State(first, names) for names in others)
            yield from (State(file, others[0]) for file in files)

    def _name(self, name: str) -> _Cell[int | None]:
        return self._names.setdefault(name, _Cell(None))

    def _sets_of_others(self, name: str) -> list[frozenset[str]]:
        possible = [
            {None if number is None else other for number in cell.values}
            for other, cell in self._names.items()
            if other != name
        ]
        return sorted({frozenset(filter(None, names)) for names in itertools.product(*possible)}, key=sorted)


class _Cell(Generic[T]):
    """Something that reaches the disk whole or not at all, in the versions that may be found there, oldest first."""

    __slots__ = ("numbers", "values")

    def __init__(self, value: T) -> None:
        self.values = [value]
        self.numbers = [-1]
        """For each version, the number of the operation that made it; -1 for the first one."""

    @property
    def newest(self) -> T:
        return self.values[-1]

    def add(self, number: int, value: T) -> None:
        self.values.append(value)
        self.numbers.append(number)

    def sync(self, covers: int) -> None:
        """Forget the versions that had been replaced when the first ``covers`` operations were completed."""
        first = self.as_of(covers - 1)
        del self.values[:first], self.numbers[:first]

    def as_of(self, number: int) -> int:
        """Which version was the newest after that operation."""
        return max((i for i, made_by in enumerate(self.numbers) if made_by <= number), default=0)

    def without(self, number: int) -> int:
        """Which version is the newest that was not made by that operation."""
        return max((i for i, made_by in enumerate(self.numbers) if made_by != number), default=0)

    def only(self, number: int) -> int:
        """Which version was made by that operation, else the oldest."""
        return self.numbers.index(number) if number in self.numbers else 0


@dataclass(slots=True)
class _Inode:
    """A file on the disk, whatever its name."""

    nbytes: _Cell[int]
    mode: _Cell[int]
    blocks: dict[int, _Cell[bytes]] = field(default_factory=dict)

    def cells(self) -> list[_Cell[Any]]:
        return [self.nbytes, self.mode, *(self.blocks[index] for index in sorted(self.blocks))]

    def write(self, number: int, offset: int, data: bytes) -> None:
        end = offset + len(data)
        for index in range(offset // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
            start = index * BLOCK_NBYTES
            first, last = max(offset, start), min(end, start + BLOCK_NBYTES)
            cell = self.blocks.setdefault(index, _Cell(bytes(BLOCK_NBYTES)))
            old = cell.newest
            cell.add(number, old[: first - start] + data[first - offset : last - offset] + old[last - start :])
        if end > self.nbytes.newest:
            self.nbytes.add(number, end)

    def resize(self, number: int, nbytes: int) -> None:
        for index, cell in self.blocks.items():
            kept = min(max(nbytes - index * BLOCK_NBYTES, 0), BLOCK_NBYTES)
            if any(cell.newest[kept:]):
                cell.add(number, cell.newest[:kept].ljust(BLOCK_NBYTES, b"\0"))
        self.nbytes.add(number, nbytes)

    def file(self, choice: Mapping[_Cell[Any], int]) -> File:
        """What is found if these versions of cells are on the disk, and the newest of the others."""
        nbytes = self.nbytes.values[choice.get(self.nbytes, -1)]
        content = bytearray(nbytes)
        for index, cell in self.blocks.items():
            start = index * BLOCK_NBYTES
            if start < nbytes:
                content[start : start + BLOCK_NBYTES] = cell.values[choice.get(cell, -1)][: nbytes - start]
        return File(bytes(content), self.mode.values[choice.get(self.mode, -1)])


def _sync(cells: Iterable[_Cell[Any]], covers: int) -> None:
    for cell in cells:
        cell.sync(covers)


def _distinct_files(inode: _Inode, rng: random.Random, sample: int) -> Iterator[File]:
    seen = set()
    for choice in _choices(inode, rng, sample):
        file = inode.file(choice)
        if (digest := hash(file)) not in seen:
            seen.add(digest)
            yield file


def _choices(inode: _Inode, rng: random.Random, sample: int) -> Iterator[Mapping[_Cell[Any], int]]:
    """Which versions of the cells are on the disk; those that are not named are there in the newest.

    All or none; those of the first operations, of all but one, of one alone; all cells but one, one alone, random ones.
    """
    cells = [cell for cell in inode.cells() if len(cell.values) > 1]
    oldest = dict.fromkeys(cells, 0)
    yield {}
    for length in range(len(inode.nbytes.values)):  # the newest, too: otherwise the rest is out of sight
        yield {**oldest, inode.nbytes: length}
    for number in sorted({number for cell in cells for number in cell.numbers}):
        yield {cell: cell.as_of(number) for cell in cells}
        yield {cell: cell.without(number) for cell in cells}
        yield {cell: cell.only(number) for cell in cells}
    for cell in cells if len(cells) <= sample else [*cells[:2], *rng.sample(cells, sample), cells[-1]]:
        for version in range(len(cell.values) - 1):
            yield {cell: version}
        yield {**oldest, inode.nbytes: -1, cell: -1}
    for _ in range(sample if cells else 0):
        share = rng.random()
        yield {cell: rng.randrange(len(cell.values)) for cell in cells if rng.random() < share}
