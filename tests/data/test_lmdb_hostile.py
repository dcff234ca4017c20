"""LMDB files that lie: an error of ours that says what is wrong, in bounded time and memory."""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import lmdb
import pytest
from data.databases import ENGINES, by_engine, make, some_records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastensor.data import LmdbIndex
from fastensor.errors import CorruptDatasetError, FastensorError, UnknownKeyError, UnsupportedDatasetError

PAGE = 4096
NAMES = (None, b"values", b"packed")
MOST_NBYTES_PER_BYTE = 100
"""Memory for a file, in terms of its size: records of one byte take 24 in the index, and as much while it is built."""


@cache
def sound(engine: int) -> bytes:
    """A file with everything in it: values on pages and out of line, sub-pages, trees of values, packed or not."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "data")
        options = {"map_size": 1 << 24, "max_dbs": 2, "subdir": False, "sync": False} | by_engine(engine)
        with lmdb.open(str(path), **options) as env:
            values, packed = env.open_db(b"values", dupsort=True), env.open_db(b"packed", dupsort=True, dupfixed=True)
            with env.begin(write=True) as txn:
                for key, value in some_records(300, (0, 30, 500, 3000)).items():
                    txn.put(key, value)
                for number in range(600):
                    key = b"many" if number < 500 else b"%d" % (number // 3)
                    txn.put(key, b"%060d" % number, db=values)
                    txn.put(key, struct.pack("=Q", number), db=packed)
                for number in range(3000):
                    txn.put(b"more", struct.pack("=Q", number), db=packed)
        return path.read_bytes()


class File:
    """A file to lie in: numbers of its pages can be read and replaced."""

    def __init__(self, engine: int) -> None:
        self.data = bytearray(sound(engine))
        self.header = (16, 24)[engine]
        self.base = (0, 24)[engine]
        self.meta = max((0, PAGE), key=lambda at: self.get("Q", at + self.header + 128))
        """Where the newer meta page is."""
        self.main = self.meta + self.header + 24 + 48
        """Where the record of the main database is."""

    def get(self, kind: str, at: int) -> int:
        return int(struct.unpack_from(f"={kind}", self.data, at)[0])

    def put(self, kind: str, at: int, value: int) -> None:
        struct.pack_into(f"={kind}", self.data, at, value)

    @property
    def root(self) -> int:
        """Where the root page of the main database is."""
        return self.get("Q", self.main + 40) * PAGE

    def node(self, page: int, number: int) -> int:
        """Where a node of a page is."""
        return page + self.base + self.get("H", page + self.header + 2 * number)

    def child(self, page: int, number: int) -> int:
        """Where the child page is that a node of a branch page leads to."""
        return self.get("I", self.node(page, number)) * PAGE

    @property
    def leaf(self) -> int:
        """Where the first leaf page of the main database is."""
        return self.child(self.root, 0)

    def big(self) -> int:
        """Where the first node is whose value is on overflow pages."""
        count = (self.get("H", self.leaf + self.header - 4) - self.header + self.base) // 2
        return next(node for node in (self.node(self.leaf, n) for n in range(count)) if self.get("H", node + 4) & 1)

    def value(self, flags: int, page_flags: int | None = None) -> int:
        """Where the first value is whose node has these flags; of a sub-page, with those flags of its own."""
        for page in range(2 * PAGE, len(self.data), PAGE):
            if self.get("Q", page) * PAGE == page and self.get("H", page + self.header - 6) == 2:
                count = (self.get("H", page + self.header - 4) - self.header + self.base) // 2
                for node in (self.node(page, number) for number in range(count)):
                    key_nbytes = self.get("H", node + 6)
                    at = node + 8 + key_nbytes + (key_nbytes & 1 if self.base else 0)
                    if self.get("H", node + 4) == flags and (
                        page_flags is None or self.get("H", at + self.header - 6) & 0x6F == page_flags
                    ):
                        return at
        raise LookupError(flags)

    def add(self, kind: str, at: int, amount: int) -> None:
        self.put(kind, at, self.get(kind, at) + amount)


SUB_PAGE, PACKED = 0x42, 0x62
"""Flags of sub-pages."""
OF_SUB_PAGE, OF_TREE = 4, 6
"""Flags of nodes whose key has several values."""


def _same_children(file: File) -> None:
    file.put("I", file.node(file.root, 1), file.leaf // PAGE)


def _cycle(file: File) -> None:
    file.put("I", file.node(file.root, 1), file.root // PAGE)


def _wild_value(file: File) -> None:
    node = file.big()
    file.put("Q", node + 8 + 8, 1 << 40)


def _encrypted(file: File) -> None:
    for at in (0, PAGE):
        file.put("H", at + file.header + 24 + 4, 0x2000)


def _foreign(file: File) -> None:
    file.data[file.header : file.header + 4] = file.data[file.header : file.header + 4][::-1]


def _of_32_bits(file: File) -> None:
    file.data = bytearray(12) + file.data[file.header :]


LIES: dict[str, tuple[Callable[[File], None], str]] = {
    "two children are the same page": (_same_children, "are said to be on the same page"),
    "a branch page is its own child": (_cycle, "a leaf page is expected"),
    "a child is beyond the end": (lambda file: file.put("I", file.node(file.root, 1), 1 << 31), "refers to page 2147"),
    "a child is a meta page": (lambda file: file.put("I", file.node(file.root, 1), 1), "refers to page 1;"),
    "a value is beyond the end": (_wild_value, "pages that the file does not have"),
    "a value is 4 GB": (lambda file: file.put("I", file.big(), 0xFFFFFFFF), "pages that the file does not have"),
    "more records than there are": (
        lambda file: file.put("Q", file.main + 32, file.get("Q", file.main + 32) + 1),
        "said to have 303 records, and has 302",
    ),
    "fewer records than there are": (lambda file: file.put("Q", file.main + 32, 3), "said to have 3 records"),
    "more records than bytes": (lambda file: file.put("Q", file.main + 32, 1 << 63), "records are said to be in"),
    "no levels": (lambda file: file.put("H", file.main + 6, 0), "0 levels"),
    "too many levels": (lambda file: file.put("H", file.main + 6, 33), "33 levels"),
    "one level too few": (lambda file: file.put("H", file.main + 6, 1), "a leaf page is expected"),
    "one level too many": (lambda file: file.put("H", file.main + 6, 3), "a branch page is expected"),
    "the root is another page": (lambda file: file.put("Q", file.root, 77), "it holds the number of another page"),
    "too many nodes": (lambda file: file.put("H", file.root + file.header - 4, 4000), "overlaps its nodes"),
    "a node is off the page": (lambda file: file.put("H", file.leaf + file.header, 4095), "leads off the page"),
    "a key is off the page": (lambda file: file.put("H", file.node(file.leaf, 0) + 6, 65535), "leads off the page"),
    "no nodes": (lambda file: file.put("H", file.root + file.header - 4, file.header - file.base), "without children"),
    "no page at all": (lambda file: file.put("Q", file.meta + file.header + 120, 0), "last page is page 0"),
    "a packed sub-page of keys without bytes": (
        lambda file: file.put("H", file.value(OF_SUB_PAGE, PACKED) + file.header - 8, 0),
        "packed keys lead off the page",
    ),
    "a packed sub-page of too many keys": (
        lambda file: file.put("H", file.value(OF_SUB_PAGE, PACKED) + file.header - 4, 4000),
        "packed keys lead off the page",
    ),
    "a sub-page with a pointer off it": (
        lambda file: file.put("H", file.value(OF_SUB_PAGE, SUB_PAGE) + file.header, 4000),
        "a pointer leads off the page",
    ),
    "a sub-page of too many keys": (
        lambda file: file.put("H", file.value(OF_SUB_PAGE, SUB_PAGE) + file.header - 4, 4000),
        "free space overlaps its nodes",
    ),
    "more values than there are": (
        lambda file: file.add("Q", file.value(OF_TREE) + 32, 1),
        r"a key is said to have \d+ values, and has",
    ),
    "values in no tree": (lambda file: file.put("Q", file.value(OF_TREE) + 40, 1 << 50), "refers to page 1125"),
    "values in the main database": (
        lambda file: file.put("Q", file.value(OF_TREE) + 40, file.root // PAGE),
        r"a key is said to have \d+ values, and has",
    ),
    "values on levels without end": (lambda file: file.put("H", file.value(OF_TREE) + 6, 60000), "60000 levels"),
    "no magic number": (lambda file: file.put("I", file.header, 0), "no LMDB file"),
    "a page size of 0": (lambda file: file.put("I", file.header + 24, 0), "page size is 0"),
    "a page size of 3000": (lambda file: file.put("I", file.header + 24, 3000), "page size is 3000"),
    "meta pages of two sizes": (lambda file: file.put("I", PAGE + file.header + 24, 8192), "meta pages disagree"),
    "data version 2": (lambda file: file.put("I", file.header + 4, 2), "data version 2"),
    "encrypted": (_encrypted, "encrypted"),
    "of another byte order": (_foreign, "the other byte order"),
    "of 32 bits": (_of_32_bits, "32-bit"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lie", LIES)
def test_lies_are_told(tmp_path: Path, engine: int, lie: str) -> None:
    file = File(engine)
    tell, message = LIES[lie]
    tell(file)
    path = tmp_path / "file"
    path.write_bytes(file.data)
    kind = UnsupportedDatasetError if "of" in lie.split() and "page" not in lie else FastensorError
    with pytest.raises(kind, match=message) as caught:
        [LmdbIndex.open(path, name, sidecar=False) for name in NAMES]
    assert str(path) in str(caught.value)


def test_pages_that_a_writer_is_about_to_replace_are_refused(tmp_path: Path) -> None:
    dirty = File(0)
    dirty.put("H", dirty.leaf + 10, dirty.get("H", dirty.leaf + 10) | 0x10)
    files = [(dirty, "a transaction is writing it")]
    if 1 in ENGINES:
        later = File(1)
        later.put("Q", later.leaf + 8, 99)
        files.append((later, "a later transaction has written it"))
    for file, message in files:
        path = tmp_path / "file"
        path.write_bytes(file.data)
        with pytest.raises(CorruptDatasetError, match=message):
            LmdbIndex.open(path, sidecar=False)


@pytest.mark.parametrize("engine", ENGINES)
def test_truncated_files_are_refused(tmp_path: Path, engine: int) -> None:
    data = sound(engine)
    path = tmp_path / "file"
    for nbytes in (0, 1, 16, 100, 159, PAGE, PAGE + 100, 2 * PAGE, 3 * PAGE - 1, len(data) // 2):
        path.write_bytes(data[:nbytes])
        with pytest.raises(CorruptDatasetError, match=r"cut off|ends within|does not have"):
            [LmdbIndex.open(path, name, sidecar=False) for name in NAMES]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.mdb"):
        LmdbIndex.open(tmp_path)
    with pytest.raises(CorruptDatasetError, match="no regular file"):
        LmdbIndex.open("/dev/zero")


MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, 1 << 32),
        st.sampled_from("BHIQ"),
        st.sampled_from(["random", "near", "zero", "ones", "other"]),
    ),
    min_size=1,
    max_size=5,
)


def _mutate(data: bytes, places: list[tuple[int, str, str]]) -> bytes:
    """Replace numbers in meta pages, headers and nodes, rather than in values, whose bytes mean nothing."""
    file = bytearray(data)
    words = _words(data)
    for where, kind, how in places:
        chance = random.Random(where)
        at = words[where % len(words)]
        most = (1 << 8 * struct.calcsize(kind)) - 1
        (old,) = struct.unpack_from(f"={kind}", file, at)
        new = {
            "random": chance.randint(0, most),
            "near": (old + chance.choice((-2, -1, 1, 2))) & most,
            "zero": 0,
            "ones": most,
            "other": struct.unpack_from(f"={kind}", file, chance.choice(words))[0],
        }[how]
        struct.pack_into(f"={kind}", file, at, new)
    return bytes(file)


@cache
def _words(data: bytes) -> list[int]:
    """Places of numbers that mean something: meta pages; headers and pointers; nodes, and where their values begin."""
    header = 16 if data[16:20] == struct.pack("=I", 0xBEEFC0DE) else 24
    base = 0 if header == 16 else 24
    places = [page + at for page in (0, PAGE) for at in range(0, header + 136, 2)]
    for page in range(2 * PAGE, len(data), PAGE):
        number, flags = struct.unpack_from("=Q", data, page)[0], struct.unpack_from("=H", data, page + header - 6)[0]
        if number != page // PAGE or not flags & 3:
            continue  # an overflow page, or one that is free
        count = (struct.unpack_from("=H", data, page + header - 4)[0] - header + base) // 2
        places.extend(range(page, page + header + 2 * min(count, 20), 2))
        if flags & 0x20:
            continue  # packed keys have no nodes
        for pointer in range(page + header, page + header + 2 * min(count, 20), 2):
            node = page + base + struct.unpack_from("=H", data, pointer)[0]
            value = node + 8 + struct.unpack_from("=H", data, node + 6)[0]
            places.extend([*range(node, node + 8, 2), *range(value, value + header + 8, 2)])
    return [place for place in places if place + 8 <= len(data)]


def attack(path: Path) -> bool:
    """Index every database of a file. Returns whether one was refused; what is not has its records in the file."""
    return sum(_is_refused(path, name) for name in NAMES) > 0


def _is_refused(path: Path, name: bytes | None) -> bool:
    nbytes = path.stat().st_size
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        index = LmdbIndex.open(path, name, sidecar=False)
    except FastensorError:
        return True
    finally:
        assert tracemalloc.get_traced_memory()[1] - before < MOST_NBYTES_PER_BYTE * nbytes
    with index:
        assert len(index) <= nbytes
        assert not len(index) or (index.offsets.min() >= 0 and (index.offsets + index.lengths).max() <= nbytes)
        for position in range(0, len(index), 199):
            with contextlib.suppress(UnknownKeyError):  # the keys may be out of order
                index.find(index.key(position))
    return False


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """Where files are to be attacked, while memory is measured."""
    tracemalloc.start()  # once: each start leaks some kilobytes
    yield tmp_path / "file"
    tracemalloc.stop()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(engine=st.sampled_from(ENGINES), places=MUTATIONS)
def test_mutations(file: Path, tally: Counter[str], engine: int, places: list[tuple[int, str, str]]) -> None:
    file.write_bytes(_mutate(sound(engine), places))
    tally["mutated databases refused" if attack(file) else "mutated databases read"] += 1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("count", [100, pytest.param(5000, marks=pytest.mark.torture)], ids=["sample", "many"])
def test_flipped_bits(file: Path, tally: Counter[str], engine: int, count: int) -> None:
    data, words = sound(engine), _words(sound(engine))
    chance = random.Random(engine)
    for _ in range(count):
        flipped = bytearray(data)
        flipped[chance.choice(words) + chance.randrange(2)] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        tally["mutated databases refused" if attack(file) else "mutated databases read"] += 1


def test_sound_files_are_read(file: Path) -> None:
    for engine in ENGINES:
        file.write_bytes(sound(engine))
        assert not attack(file)


def test_an_empty_environment_has_no_records(tmp_path: Path) -> None:
    index = LmdbIndex.open(make(tmp_path / "data", []))
    assert len(index) == 0
    assert list(index.keys()) == []
