"""Reading the B+ trees of an LMDB file: branch pages level by level, then leaf pages in coalesced reads.

Only ``pread`` is used, so a file that shrinks or fails gives an error, not a signal. Overflow pages are never read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fastensor.data.pages import (
    BRANCH,
    LEAF,
    LEAF2,
    META_PAGES,
    MOST_LEVELS,
    NO_PAGE,
    Block,
    Duplicates,
    Geometry,
    Ints,
    Leaves,
    Pages,
    Tree,
    check_headers,
    children,
    keys,
    leaves,
    pack_keys,
    unpack_key,
)
from fastensor.data.snapshot import naming
from fastensor.errors import CorruptDatasetError
from fastensor.files import posix
from fastensor.files.words import counted

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the pages that were read so far and those in all."""

CHUNK_NBYTES = 8 << 20
"""Pages that are read and parsed at a time."""


class Records(NamedTuple):
    """Records in the order of the database."""

    offsets: Ints
    """Offset of each value in the file."""
    lengths: Ints
    """The bytes of each value."""
    keys: npt.NDArray[np.uint64]
    """Packed place of each key in the file, see :func:`fastensor.data.pages.pack_keys`."""
    databases: Ints
    """Positions of the records whose values are records of named databases."""


class _PageChunk(NamedTuple):
    """Pages that the kernel reads, and that are to be copied from its cache."""

    numbers: Ints
    """The page numbers, in the order of the tree."""
    order: Ints
    """The positions in ``numbers``, in the order of the file."""
    runs: list[tuple[int, int, int]]
    """Neighbours in the file: where they begin there, and where they begin and end in memory, in bytes."""


class TreeReader:
    """Reads the trees of one snapshot of a file. Never reads more pages than the file has.

    Args:
        fd: the file, which the caller keeps open.
        geometry: the limits of the snapshot.
        progress: is called after each chunk of leaf pages.
    """

    def __init__(self, fd: int, geometry: Geometry, progress: Progress | None = None) -> None:
        self._fd = fd
        self._geometry = geometry
        self._progress = progress
        self._read = 0
        """Pages that were read, or are about to be: no more than the file has, whatever its trees look like."""

    def records(self, tree: Tree) -> Iterator[Records]:
        """The records of a database, a chunk of leaf pages at a time.

        Raises:
            CorruptDatasetError: the tree is damaged, or is not as large as its record says.
            OSError: the file cannot be read.
        """
        count = 0
        if self._has_pages(tree):
            pages, _ = self._leaf_pages(np.array([tree.root], np.uint64), tree.depth)
            done = 0
            for chunk in self._chunks(pages, LEAF, "a leaf page"):
                found = self._records_of(leaves(chunk), chunk)
                count += len(found.offsets)
                done += len(chunk.starts)
                if count > tree.entries:
                    raise self._damaged(
                        f"the database is said to have {counted(tree.entries, 'records')}, and has more"
                    )
                yield found
                if self._progress is not None:
                    self._progress(done, len(pages))
        if count < tree.entries:
            raise self._damaged(f"the database is said to have {counted(tree.entries, 'records')}, and has {count}")

    def named(self, main: Tree) -> Iterator[tuple[bytes, Tree]]:
        """The named databases of an environment, in the order of the main database that lists them.

        Raises:
            CorruptDatasetError: the main database is damaged.
            OSError: the file cannot be read.
        """
        terminator = b"\0" if self._geometry.format.has_txnid else b""
        for found in self.records(main):
            for position in found.databases:
                name = posix.read_exactly(self._fd, *unpack_key(int(found.keys[position])))
                tree = posix.read_exactly(self._fd, int(found.offsets[position]), int(found.lengths[position]))
                yield name.removesuffix(terminator), Tree.parse(tree)

    def _records_of(self, found: Leaves, pages: Pages) -> Records:
        packed = pack_keys(found.key_offsets, found.key_lengths)
        if not found.has_duplicates.any():
            return Records(found.offsets, found.lengths, packed, np.flatnonzero(found.is_tree))
        single = np.flatnonzero(~found.has_duplicates)
        parts = [
            Duplicates(single, found.offsets[single], found.lengths[single]),
            self._in_sub_pages(found, pages),
            *self._in_sub_trees(found, pages),
        ]
        owner, offsets, lengths = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(owner, kind="stable")
        owner = owner[order]
        named = found.is_tree & ~found.has_duplicates
        return Records(offsets[order], lengths[order], packed[owner], np.flatnonzero(named[owner]))

    def _in_sub_pages(self, found: Leaves, pages: Pages) -> Duplicates:
        """The values of keys whose values are in a sub-page, which lies on the leaf page."""
        nodes = np.flatnonzero(found.has_duplicates & ~found.is_tree)
        owner = found.owner[nodes]
        numbers = pages.numbers[owner]
        shift = numbers * self._geometry.page_size - pages.starts[owner]
        sub_pages = Pages(pages.block, found.offsets[nodes] - shift, found.lengths[nodes], numbers, self._geometry)
        of, offsets, lengths = keys(sub_pages)
        return Duplicates(nodes[of], offsets + shift[of], lengths)

    def _in_sub_trees(self, found: Leaves, pages: Pages) -> Iterator[Duplicates]:
        """The values of keys whose values are in a tree of their own. Trees of the same depth are read together."""
        nodes = np.flatnonzero(found.has_duplicates & found.is_tree)
        if not len(nodes):
            return
        owner = found.owner[nodes]
        places = found.offsets[nodes] - (pages.numbers[owner] * self._geometry.page_size - pages.starts[owner])
        trees = [pages.block.tree(int(place)) for place in places]
        depths = np.array([tree.depth if self._has_pages(tree) else 0 for tree in trees])
        for depth in np.unique(depths[depths > 0]):
            some = np.flatnonzero(depths == depth)
            values = self._values_of([trees[number] for number in some], int(depth))
            yield Duplicates(nodes[some[values.owner]], values.offsets, values.lengths)

    def _values_of(self, trees: list[Tree], depth: int) -> Duplicates:
        numbers, tree_of = self._leaf_pages(np.array([tree.root for tree in trees], np.uint64), depth)
        parts = []
        done = 0
        for chunk in self._chunks(numbers, (LEAF, LEAF | LEAF2), "a leaf page of values"):
            owner, offsets, lengths = keys(chunk)
            shift = (chunk.numbers * self._geometry.page_size - chunk.starts)[owner]
            parts.append(Duplicates(tree_of[done + owner], offsets + shift, lengths))
            done += len(chunk.starts)
        values = Duplicates(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        claimed = np.array([tree.entries for tree in trees], np.uint64)
        counts = np.bincount(values.owner, minlength=len(trees)).astype(np.uint64)
        if (counts != claimed).any():
            first = int(np.argmax(counts != claimed))
            raise self._damaged(f"a key is said to have {counted(claimed[first], 'values')}, and has {counts[first]}")
        return values

    def _has_pages(self, tree: Tree) -> bool:
        if tree.root == NO_PAGE:
            return False
        if not 1 <= tree.depth <= MOST_LEVELS:
            raise self._damaged(f"a tree is said to have {counted(tree.depth, 'levels')}, expected 1 to {MOST_LEVELS}")
        return True

    def _leaf_pages(self, roots: npt.NDArray[np.uint64], depth: int) -> tuple[Ints, Ints]:
        """The leaf pages of trees of the same depth, in order, and the position of the tree of each."""
        pages = self._checked(roots)
        tree_of = np.arange(len(roots))
        for _ in range(depth - 1):
            below, owners, done = [], [], 0
            for chunk in self._chunks(pages, BRANCH, "a branch page"):
                owner, numbers = children(chunk)
                below.append(numbers)
                owners.append(done + owner)
                done += len(chunk.starts)
            pages = self._checked(np.concatenate(below).astype(np.uint64))
            tree_of = tree_of[np.concatenate(owners)]
        return pages, tree_of

    def _checked(self, numbers: npt.NDArray[np.uint64]) -> Ints:
        """The page numbers of one level of a tree: no page twice, none outside the file, no more than are left."""
        holds = (numbers >= META_PAGES) & (numbers < self._geometry.page_count)
        if not holds.all():
            wrong = int(numbers[np.argmin(holds)])
            pages = f"the file has {counted(self._geometry.page_count, 'pages')}, the first two of which are meta pages"
            raise self._damaged(f"a tree refers to page {wrong}; {pages}; it is damaged or was cut off")
        if len(np.unique(numbers)) < len(numbers) or self._read + len(numbers) > self._geometry.page_count:
            raise self._damaged("several parts of its trees are said to be on the same page")
        self._read += len(numbers)
        return numbers.astype(np.int64)

    def _chunks(self, numbers: Ints, kind: int | tuple[int, ...], what: str) -> Iterator[Pages]:
        """Pages of a level, a chunk at a time. The kernel reads the next chunk while the caller parses this one."""
        most = CHUNK_NBYTES // self._geometry.page_size
        split = (numbers[at : at + most] for at in range(0, len(numbers), most))
        chunks = itertools.chain(map(self._begin, split), [None])
        for chunk, _ in itertools.pairwise(chunks):
            assert chunk is not None  # only the last one is
            pages = self._load(chunk)
            check_headers(pages, kind, what)
            yield pages

    def _begin(self, numbers: Ints) -> _PageChunk:
        """Have the kernel read pages, those that are neighbours in the file together."""
        size = self._geometry.page_size
        order = np.argsort(numbers, kind="stable")
        inside = numbers[order]
        bounds = np.flatnonzero(np.diff(inside) != 1) + 1
        firsts = np.concatenate([[0], bounds])
        ends = np.concatenate([bounds, [len(inside)]])
        columns = (inside[firsts] * size, firsts * size, ends * size)
        runs = list(zip(*(column.tolist() for column in columns), strict=True))
        for offset, first, end in runs:
            posix.will_need(self._fd, offset, end - first)
        return _PageChunk(numbers, order, runs)

    def _load(self, chunk: _PageChunk) -> Pages:
        """The pages of a chunk, in memory in the order of the file."""
        size, count = self._geometry.page_size, len(chunk.numbers)
        data = np.empty(count * size, np.uint8)
        with naming(self._geometry.path):
            for offset, first, end in chunk.runs:
                filled = posix.read_fully(self._fd, data.data[first:end], offset)
                posix.check_end(filled, end - first, offset)
        starts = np.empty(count, np.int64)
        starts[chunk.order] = np.arange(count) * size
        return Pages(Block(data), starts, np.full(count, size), chunk.numbers, self._geometry)

    def _damaged(self, what: str) -> CorruptDatasetError:
        return CorruptDatasetError(f"{self._geometry.path}: {what}")
