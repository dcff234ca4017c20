"""LMDB's pages as arrays: pure functions from the bytes of pages to the places of keys and values.

LMDB has two formats, both in the byte order and with the word size of the machine that wrote the file. The page header
of data version 1 (LMDB 0.9) has 16 bytes: page number u64, pad, flags, lower, upper (u16 each). That of version 3 (LMDB
1.0) has 24: a transaction number u64 comes after the page number. The functions of this module take pages in one
buffer, parse all of them at once, and raise :class:`CorruptDatasetError` for what does not fit into its page or file.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fastensor.errors import CorruptDatasetError, UnsupportedDatasetError

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

HEAD_NBYTES = 24 + 136
"""The bytes of a meta page that say everything, in both versions."""
TXNID_OFFSET = 128
"""Offset of the transaction's number in a meta page, from the end of its header."""
META_PAGES = 2
NO_PAGE = 2**64 - 1
MOST_LEVELS = 32
"""LMDB's own limit (CURSOR_STACK)."""

BRANCH, LEAF, OVERFLOW, META, DIRTY, LEAF2, SUBPAGE = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40
"""Flags of pages. A LEAF2 page packs keys of one size; a sub-page is the value of a node that has several values."""
_KINDS = BRANCH | LEAF | OVERFLOW | META | LEAF2 | SUBPAGE
_BIG_DATA, _SUB_DATA, _DUP_DATA = 0x01, 0x02, 0x04
REVERSE_KEY, DUP_SORT, INTEGER_KEY, DUP_FIXED, INTEGER_DUP, REVERSE_DUP = 0x02, 0x04, 0x08, 0x10, 0x20, 0x40
"""Flags of databases."""
_ENCRYPTED = 0x2000
_MAGIC = 0xBEEFC0DE
_NODE_HEADER_NBYTES = 8
_TREE_NBYTES = 48
_MOST_PAGE_NBYTES = 1 << 16
_KEY_LENGTH_BITS = 16
MOST_FILE_NBYTES = 1 << (64 - _KEY_LENGTH_BITS)
"""Largest file in which 8 bytes hold the offset and the length of a key."""


class Tree(NamedTuple):
    """LMDB's record of a B+ tree (``MDB_db``): a database, or the values of one key."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def parse(cls, data: bytes) -> Tree:
        """The record in 48 bytes."""
        return cls(*struct.unpack("=IHH5Q", data))

    def packed(self) -> bytes:
        """The 48 bytes of the record."""
        return struct.pack("=IHH5Q", *self)


@dataclass(frozen=True, slots=True)
class Format:
    """Layout of pages that distinguishes LMDB's data versions."""

    version: int
    header_nbytes: int
    """The size of a page header."""
    node_base: int
    """Offset from which pointers to nodes count, and ``lower`` and ``upper`` with them."""
    reference_nbytes: int
    """The size of a node's reference to overflow pages."""
    has_txnid: bool
    """True if page headers carry the number of the transaction that wrote the page."""


_FORMATS = {1: Format(1, 16, 0, 8, False), 3: Format(3, 24, 24, 24, True)}


@dataclass(frozen=True, slots=True)
class Meta:
    """A meta page: the state of the file that one transaction has committed."""

    format: Format
    page_size: int
    main: Tree
    last_page: int
    txnid: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The limits that references in pages are checked against."""

    path: str
    """The file, for messages."""
    format: Format
    page_size: int
    page_count: int
    """Pages of the snapshot that are in the file."""
    txnid: int
    """The transaction that has committed the snapshot."""


def parse_meta(head: bytes, path: str) -> Meta:
    """The meta page that begins with ``head``.

    Args:
        head: the first :data:`HEAD_NBYTES` bytes of the page.
        path: the file, for messages.

    Raises:
        CorruptDatasetError: this is no meta page of LMDB.
        UnsupportedDatasetError: it is one, of a format that is not read here.
    """
    if len(head) < HEAD_NBYTES:
        raise CorruptDatasetError(f"{path}: a meta page of LMDB is expected, and the file ends within it")
    format = _format_of(head, path)
    at = format.header_nbytes
    *_, free, main, last_page, txnid = struct.unpack_from(f"=IIQQ{_TREE_NBYTES}s{_TREE_NBYTES}sQQ", head, at)
    if not struct.unpack_from("=H", head, at - 6)[0] & META:
        raise CorruptDatasetError(f"{path}: a meta page of LMDB is expected, and its flags say that it is none")
    if Tree.parse(free).flags & _ENCRYPTED:
        raise UnsupportedDatasetError(f"{path}: this LMDB file is encrypted, which is not supported")
    page_size = Tree.parse(free).pad
    if page_size & (page_size - 1) or not 256 <= page_size <= _MOST_PAGE_NBYTES:
        raise CorruptDatasetError(f"{path}: the page size is {page_size}, expected a power of 2 from 256 to 65536")
    return Meta(format, page_size, Tree.parse(main), last_page, txnid)


def _format_of(head: bytes, path: str) -> Format:
    native = _MAGIC.to_bytes(4, sys.byteorder)
    foreign = native[::-1]
    for header_nbytes in (16, 24):
        if head[header_nbytes : header_nbytes + 4] == native:
            version = struct.unpack_from("=I", head, header_nbytes + 4)[0]
            found = _FORMATS.get(version)
            if found is None or found.header_nbytes != header_nbytes:
                raise UnsupportedDatasetError(
                    f"{path}: LMDB's data version {version}, with page headers of {header_nbytes} bytes, is not read; "
                    "versions 1 (LMDB 0.9) and 3 (LMDB 1.0) of 64-bit machines are"
                )
            return found
    if foreign in (head[at : at + 4] for at in (12, 16, 24)):
        raise UnsupportedDatasetError(
            f"{path}: this LMDB file was written by a machine of the other byte order; "
            "mdb_dump it there, and mdb_load it here"
        )
    if head[12:16] == native:
        raise UnsupportedDatasetError(
            f"{path}: this LMDB file was written by a 32-bit program; mdb_dump it by that, and mdb_load it here"
        )
    raise CorruptDatasetError(f"{path}: this is no LMDB file: neither byte 16 nor byte 24 begins LMDB's magic number")


class Block:
    """Pages, or parts of them, in one buffer. Numbers may begin at any byte, as they do in LMDB's nodes."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data = data

    def u16(self, at: Ints) -> Ints:
        """The numbers of 2 bytes that begin at ``at``."""
        return self._view("=u2")[at].astype(np.int64)

    def u64(self, at: Ints) -> npt.NDArray[np.uint64]:
        """The numbers of 8 bytes that begin at ``at``."""
        found: npt.NDArray[np.uint64] = self._view("=u8")[at]
        return found

    def tree(self, at: int) -> Tree:
        """The record of a tree that begins at ``at``."""
        return Tree.parse(self.data[at : at + _TREE_NBYTES].tobytes())

    def _view(self, dtype: str) -> npt.NDArray[np.unsignedinteger]:
        """Element i is the number that begins at byte i."""
        kind = np.dtype(dtype)
        return np.ndarray((len(self.data) - kind.itemsize + 1,), kind, self.data, strides=(1,))


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages, or sub-pages, in a block."""

    block: Block
    starts: Ints
    """Offset of each page in the block."""
    spans: Ints
    """The bytes that each has."""
    numbers: Ints
    """The page of the file that each is, or is on."""
    geometry: Geometry

    def field(self, from_end: int) -> Ints:
        """The u16 of each page header, counted in bytes from the header's end."""
        return self.block.u16(self.starts + (self.geometry.format.header_nbytes - from_end))

    @property
    def flags(self) -> Ints:
        """The flags of each page."""
        return self.field(6)

    def require(self, holds: Flags, what: str, owner: Ints | None = None) -> None:
        """
        Args:
            holds: a condition for each page; or, with ``owner``, for each thing on the pages.
            what: what is wrong with a page, if the condition does not hold.
            owner: the position of the page that each thing is on.

        Raises:
            CorruptDatasetError: the condition does not hold; the message names the first page.
        """
        if not holds.all():
            first = int(np.argmin(holds))
            number = int(self.numbers[first if owner is None else owner[first]])
            raise CorruptDatasetError(f"{self.geometry.path}: page {number} is damaged: {what}")


def check_headers(pages: Pages, kind: int | tuple[int, ...], what: str) -> None:
    """Check that each page is the one that was asked for, of one of some kinds, and older than the snapshot.

    Raises:
        CorruptDatasetError: a page is not; ``what`` is said to have been expected.
    """
    geometry = pages.geometry
    numbers = pages.block.u64(pages.starts)
    pages.require(numbers == pages.numbers.astype(np.uint64), "it holds the number of another page")
    flags = pages.flags
    kinds = (kind,) if isinstance(kind, int) else kind
    fits = np.logical_or.reduce([flags & _KINDS == one for one in kinds])
    pages.require(fits, f"{what} is expected, and its flags say that it is none")
    if geometry.format.has_txnid:
        newest = np.uint64(geometry.txnid)
        pages.require(pages.block.u64(pages.starts + 8) <= newest, "a later transaction has written it")
    else:
        pages.require(flags & DIRTY == 0, "a transaction is writing it")


def nodes(pages: Pages) -> tuple[Ints, Ints, Ints]:
    """The nodes of pages that are no LEAF2 pages, in the order of the pages and, on each, of the keys.

    Each node has the 8 bytes of its header on its page.

    Returns:
        for each the position of the page that it is on; its offset in the block; and the end of its page there.

    Raises:
        CorruptDatasetError: a page has more nodes than fit, or a pointer leads off the page.
    """
    base, header = pages.geometry.format.node_base, pages.geometry.format.header_nbytes
    pages.require(pages.spans >= header, "a sub-page is smaller than its header")
    lower, upper = pages.field(4), pages.field(2)
    counts = (lower - (header - base)) >> 1
    room = pages.spans - base - upper
    pages.require(
        (counts >= 0) & (lower <= upper) & (room >= counts * _NODE_HEADER_NBYTES),
        "its free space overlaps its nodes",
    )
    owner = np.repeat(np.arange(len(counts)), counts)
    first = np.cumsum(counts) - counts
    position = np.arange(len(owner)) - first[owner]
    pointers = pages.block.u16(pages.starts[owner] + header + 2 * position) + base
    spans = pages.spans[owner]
    holds = (pointers >= upper[owner] + base) & (pointers + _NODE_HEADER_NBYTES <= spans)
    pages.require(holds, "a pointer leads off the page", owner)
    starts = pages.starts[owner]
    return owner, starts + pointers, starts + spans


def children(pages: Pages) -> tuple[Ints, Ints]:
    """The children of branch pages: for each the position of the page that it is a child of, and its page number.

    Raises:
        CorruptDatasetError: a page has no child.
    """
    owner, starts, _ = nodes(pages)
    pages.require(np.bincount(owner, minlength=len(pages.starts)) > 0, "a branch page without children")
    low, middle, high = (pages.block.u16(starts + offset) for offset in (0, 2, 4))
    return owner, low | middle << 16 | high << 32


class Duplicates(NamedTuple):
    """The values of keys that have several, in order. In their own trees and sub-pages, they are the keys."""

    owner: Ints
    """The position of the page that each is on; or, later, of the node of its key."""
    offsets: Ints
    """Offset of each, from the start of the block; or, later, of the file."""
    lengths: Ints
    """Their bytes."""


def keys(pages: Pages) -> Duplicates:
    """The keys on leaf pages or sub-pages, LEAF2 or not, in order.

    Raises:
        CorruptDatasetError: a key is not all on its page, or some pages are packed and others are not.
    """
    pages.require(pages.spans >= pages.geometry.format.header_nbytes, "a sub-page is smaller than its header")
    packed = pages.flags & LEAF2 != 0
    pages.require(packed == packed[:1], "of the pages of one database only some have packed keys")
    return _packed_keys(pages) if packed.any() else _keys_of_nodes(pages)


def _keys_of_nodes(pages: Pages) -> Duplicates:
    owner, starts, ends = nodes(pages)
    lengths = pages.block.u16(starts + 6)
    offsets = starts + _NODE_HEADER_NBYTES
    pages.require(offsets + lengths <= ends, "a key leads off the page", owner)
    return Duplicates(owner, offsets, lengths)


def _packed_keys(pages: Pages) -> Duplicates:
    form = pages.geometry.format
    counts = (pages.field(4) - (form.header_nbytes - form.node_base)) >> 1
    size = pages.field(8)
    holds = (counts >= 0) & (size > 0) & (form.header_nbytes + counts * size <= pages.spans)
    pages.require(holds, "its packed keys lead off the page")
    owner = np.repeat(np.arange(len(counts)), counts)
    position = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    lengths = size[owner]
    return Duplicates(owner, pages.starts[owner] + form.header_nbytes + position * lengths, lengths)


class Leaves(NamedTuple):
    """The nodes of leaf pages of a database."""

    owner: Ints
    """The position of the page that each node is on."""
    key_offsets: Ints
    """Offset of each key in the file."""
    key_lengths: Ints
    offsets: Ints
    """Offset of each value in the file; of a key with several, that of its sub-page or tree record."""
    lengths: Ints
    is_tree: Flags
    """True if the value is the record of a tree."""
    has_duplicates: Flags
    """True if the key has several values."""


def leaves(pages: Pages) -> Leaves:
    """The nodes of leaf pages. Values on overflow pages are found without reading those.

    Raises:
        CorruptDatasetError: a key or value is not all on its page or, on overflow pages, in the file.
    """
    geometry, form = pages.geometry, pages.geometry.format
    owner, starts, ends = nodes(pages)
    low, high, flags, key_lengths = (pages.block.u16(starts + offset) for offset in (0, 2, 4, 6))
    lengths = low | high << 16
    key_starts = starts + _NODE_HEADER_NBYTES
    pad = key_lengths & 1 if form.has_txnid else 0
    values = key_starts + key_lengths + pad
    big, tree, duplicates = (flags & flag != 0 for flag in (_BIG_DATA, _SUB_DATA, _DUP_DATA))
    on_page = np.where(big, form.reference_nbytes, lengths)
    pages.require(values + on_page <= ends, "a key or value leads off the page", owner)
    pages.require(~(big & (tree | duplicates)), "a node has flags that exclude each other", owner)
    pages.require(~tree | (lengths == _TREE_NBYTES), "the record of a tree has another size than 48 bytes", owner)
    shift = (pages.numbers * geometry.page_size - pages.starts)[owner]
    offsets = values + shift
    out = np.flatnonzero(big)
    if len(out):
        first = pages.block.u64(values[out])
        count = (form.header_nbytes + lengths[out] - 1) // geometry.page_size + 1
        holds = (first >= META_PAGES) & (first <= geometry.page_count)
        overflow = np.where(holds, first, 0).astype(np.int64)
        holds &= overflow + count <= geometry.page_count
        pages.require(holds, "a value is said to be on pages that the file does not have", owner[out])
        offsets[out] = overflow * geometry.page_size + form.header_nbytes
    return Leaves(owner, key_starts + shift, key_lengths, offsets, lengths, tree, duplicates)


def pack_keys(offsets: Ints, lengths: Ints) -> npt.NDArray[np.uint64]:
    """Pack the offset of each key in the file (48 bits) and its length (16 bits) into 8 bytes."""
    return (offsets.astype(np.uint64) << np.uint64(_KEY_LENGTH_BITS)) | lengths.astype(np.uint64)


def unpack_key(packed: int) -> tuple[int, int]:
    """The offset and the length of a key that :func:`pack_keys` has packed."""
    return packed >> _KEY_LENGTH_BITS, packed & ((1 << _KEY_LENGTH_BITS) - 1)
