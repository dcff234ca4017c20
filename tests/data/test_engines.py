"""Every engine brings the same bytes, in any order, whatever is merged."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.backends.threads import Pool
from fastensor.data.coalescing import Extents, Merging
from fastensor.data.engines import choice, direct
from fastensor.data.engines.base import Engine
from fastensor.data.engines.choice import ENGINES, EngineName, choose_engine, open_chosen, open_engine
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix

DATA = random.Random(1).randbytes(3 * 4096 * 100 + 57)
MERGINGS = [Merging(gap_nbytes=0, read_nbytes=1), Merging(), Merging(gap_nbytes=100, read_nbytes=10_000)]
SECONDS = 30
ON_HOST: list[EngineName] = [name for name in ENGINES if name != "kvikio"]


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("engines") / "data"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture(params=ON_HOST, scope="module")
def name(request: pytest.FixtureRequest) -> EngineName:
    found: EngineName = request.param
    return found


def opened(name: EngineName, fd: int, merging: Merging) -> Engine:
    try:
        return open_engine(name, fd, merging)
    except BackendUnavailableError as error:
        pytest.skip(str(error))


PLACES = st.lists(
    st.integers(0, len(DATA)).flatmap(lambda at: st.tuples(st.just(at), st.integers(0, min(len(DATA) - at, 9000)))),
    min_size=1,
    max_size=50,
)


@given(places=PLACES, cuts=st.lists(st.integers(1, 20), max_size=50))
@pytest.mark.parametrize("merging", MERGINGS)
def test_values_are_the_bytes_of_the_file(
    fd: int, name: EngineName, merging: Merging, places: list[tuple[int, int]], cuts: list[int]
) -> None:
    engine = opened(name, fd, merging)
    offsets, lengths = (np.array(numbers) for numbers in zip(*places, strict=True))
    fetch, begin = engine.fetch(Extents(offsets, lengths)), 0
    for count in [*cuts, len(places)]:
        end = min(begin + count, len(places))
        if begin < end:
            for value, (offset, length) in zip(fetch.take(begin, end), places[begin:end], strict=True):
                assert isinstance(value, memoryview)
                assert value.readonly
                assert value == DATA[offset : offset + length]
        begin = end
    engine.close()


def test_values_outlive_the_engine(fd: int, name: EngineName) -> None:
    engine = opened(name, fd, Merging())
    (value,) = engine.fetch(Extents(np.array([5000]), np.array([3000]))).take(0, 1)
    engine.close()
    engine.close()
    assert value == DATA[5000:8000]


def test_more_reads_than_are_begun_at_once(fd: int, name: EngineName) -> None:
    """Several fetches are under way, each of more reads than may be in flight; one of them is given up."""
    engine = opened(name, fd, Merging(gap_nbytes=0, read_nbytes=1))
    offsets = np.random.default_rng(1).permutation(1000) * 1200
    one, _, two = (engine.fetch(Extents(offsets, np.full(1000, 1100))) for _ in range(3))
    for fetch in (one, two):
        values = [*fetch.take(0, 1), *fetch.take(1, 900), *fetch.take(900, 1000)]
        assert [bytes(value) for value in values] == [DATA[offset : offset + 1100] for offset in offsets.tolist()]
    engine.close()


def test_a_value_larger_than_a_buffer(tmp_path: Path, name: EngineName) -> None:
    data = os.urandom(9 << 20)
    (tmp_path / "data").write_bytes(data)
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    engine = opened(name, fd, Merging())
    (value,) = engine.fetch(Extents(np.array([77]), np.array([(8 << 20) + 5]))).take(0, 1)
    assert value == data[77 : 77 + (8 << 20) + 5]
    engine.close()
    os.close(fd)


def test_the_file_ends_before_a_value(fd: int, name: EngineName) -> None:
    engine = opened(name, fd, Merging())
    with pytest.raises(posix.EndOfFile, match=f"ends before offset {len(DATA) + 1}"):
        engine.fetch(Extents(np.array([0, len(DATA) - 9]), np.array([10, 10]))).take(0, 2)
    engine.close()


def test_direct_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    os.fsync(fd)
    if posix.evict(fd, len(DATA)):
        pytest.skip("this filesystem keeps files in memory")
    engine = opened("direct", fd, Merging())
    engine.fetch(Extents(np.array([0]), np.array([len(DATA)]))).take(0, 1)
    assert posix.resident_fraction(fd, len(DATA)) < 0.1
    engine.close()
    os.close(fd)


def test_willneed_has_the_kernel_read_ahead(tmp_path: Path) -> None:
    """What is announced gets into the page cache, without anything being taken."""
    (tmp_path / "data").write_bytes(DATA)
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    os.fsync(fd)
    if posix.evict(fd, len(DATA)):
        pytest.skip("this filesystem keeps files in memory")
    extents = Extents(np.array([0]), np.array([40_000]))
    pread = opened("pread", fd, Merging()).fetch(extents)
    assert posix.resident_fraction(fd, len(DATA)) == 0
    willneed = opened("willneed", fd, Merging()).fetch(extents)
    assert posix.resident_fraction(fd, len(DATA)) > 0
    assert pread.take(0, 1)[0] == willneed.take(0, 1)[0] == DATA[:40_000]
    os.close(fd)


def seen(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Offsets and lengths of what is read from now on, and of what the kernel is told about."""
    read: list[tuple[int, int]] = []
    advised: list[tuple[int, int]] = []
    pread = os.pread

    def reads(fd: int, nbytes: int, offset: int) -> bytes:
        read.append((offset, nbytes))
        return pread(fd, nbytes, offset)

    monkeypatch.setattr(os, "pread", reads)
    monkeypatch.setattr(posix, "will_need", lambda fd, offset, nbytes: advised.append((offset, nbytes)))
    return read, advised


def told_bytes(advised: list[tuple[int, int]]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each byte of the file, whether the kernel was told about it."""
    told = np.zeros(len(DATA), bool)
    for offset, nbytes in advised:
        told[offset : offset + nbytes] = True
    return told


@pytest.mark.parametrize("step", [4096, 7000])
def test_the_kernel_is_not_told_about_what_comes_in_the_order_of_the_file(
    fd: int, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The kernel reads ahead of large reads by itself. The engine's reads take gaps along, also from the end of the
    batch before on."""
    read, advised = seen(monkeypatch)
    engine = opened("willneed", fd, Merging())
    offsets = np.arange(16, 280 * 4096, step)
    lengths = np.full(len(offsets), 3000)
    for begin, end, count in ((0, 40, 1), (40, 41, 0), (41, len(offsets), 0)):
        some = Extents(offsets[begin:end], lengths[begin:end])
        values = engine.fetch(some).take(0, end - begin)
        assert [*values] == [DATA[offset : offset + 3000] for offset in some.offsets.tolist()]
        assert read == [(offsets[begin], offsets[end - 1] + 3000 - offsets[begin])]
        assert bool(advised) == bool(count)
        read.clear()
        advised.clear()


@pytest.mark.parametrize("read_ahead", [128 << 10, 8 << 20])
def test_a_kernel_that_reads_little_ahead_is_told_about_all_of_a_stream(
    fd: int, monkeypatch: pytest.MonkeyPatch, read_ahead: int
) -> None:
    """By Linux's usual 128 KiB, each large read would wait for the disk."""
    monkeypatch.setattr(posix, "read_ahead_nbytes", lambda fd: read_ahead)
    read, advised = seen(monkeypatch)
    offsets = np.arange(290) * 4096 + 16
    some = Extents(offsets, np.full(290, 3000))
    values = opened("willneed", fd, Merging(read_nbytes="256KiB")).fetch(some).take(0, 290)
    assert [*values] == [DATA[offset : offset + 3000] for offset in offsets.tolist()]
    if read_ahead < 1 << 20:
        assert len(advised) == 5
        assert max(nbytes for _, nbytes in read) < 70 << 10
        assert all(told_bytes(advised)[offset : offset + 3000].all() for offset in offsets.tolist())
    else:
        assert advised == read[:1]


@pytest.mark.parametrize("read_ahead", [128 << 10, 8 << 20])
def test_the_kernel_is_told_about_what_lies_behind_a_jump(
    fd: int, monkeypatch: pytest.MonkeyPatch, read_ahead: int
) -> None:
    """Such as the batches of a process that shares the order with others. Each would wait for the disk."""
    monkeypatch.setattr(posix, "read_ahead_nbytes", lambda fd: read_ahead)
    _, advised = seen(monkeypatch)
    offsets = np.concatenate([np.arange(8) * 4096 + begin for begin in (0, 500_000, 100_000, 900_000)])
    values = opened("willneed", fd, Merging()).fetch(Extents(offsets, np.full(32, 3000))).take(0, 32)
    assert [*values] == [DATA[offset : offset + 3000] for offset in offsets.tolist()]
    assert advised == [(begin, 7 * 4096 + 3000) for begin in (0, 500_000, 100_000, 900_000)]


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("stride", [3, 8])
def test_a_stride_is_brought_with_its_gaps_and_read_without(
    fd: int, monkeypatch: pytest.MonkeyPatch, stride: int, copied: bool
) -> None:
    """The disk reads one stream, for all processes that take every n-th value. Each copies its own values only."""
    read, advised = seen(monkeypatch)
    offsets = np.arange(0, 290, stride) * 4096 + 16
    values = opened("willneed", fd, Merging(read_nbytes="256KiB")).fetch(Extents(offsets, np.full(len(offsets), 3000)))
    taken = values.take(0, len(offsets), copied=copied)
    assert [*taken] == [DATA[offset : offset + 3000] for offset in offsets.tolist()]
    assert {type(value) for value in taken} == {bytes if copied else memoryview}
    assert read == [(offset, 3000) for offset in offsets.tolist()]
    assert len(advised) == 5
    told = told_bytes(advised)
    assert all(told[offset : offset + 3000].all() for offset in offsets.tolist())
    assert told.mean() > 0.85


def test_a_stride_that_is_not_known_ahead_is_read_with_its_gaps(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads ahead of it."""
    read, _ = seen(monkeypatch)
    offsets = np.arange(0, 200, 4) * 4096
    opened("willneed", fd, Merging()).fetch(Extents(offsets, np.full(len(offsets), 3000))).take(0, len(offsets))
    assert read == [(0, 196 * 4096 + 3000)]


def test_the_file_ends_within_a_stride(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA[: 50 * 4096])
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    offsets = np.arange(0, 100, 4) * 4096
    merging = Merging(read_nbytes="64KiB")
    values = opened("willneed", fd, merging).fetch(Extents(offsets, np.full(len(offsets), 3000)))
    assert values.take(0, 12) == [DATA[offset : offset + 3000] for offset in offsets[:12].tolist()]
    with pytest.raises(posix.EndOfFile, match=f"ends before offset {52 * 4096 + 3000}"):
        values.take(12, len(offsets))
    os.close(fd)


def test_large_values_in_the_order_of_the_file_are_what_was_read(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a read of its own, so that none is copied. The kernel is told about the first one, and reads ahead."""
    advised: list[int] = []
    read: list[bytes] = []
    pread = os.pread

    def reads(fd: int, nbytes: int, offset: int) -> bytes:
        read.append(pread(fd, nbytes, offset))
        return read[-1]

    monkeypatch.setattr(posix, "advise", lambda fd, offset, nbytes, advice: advised.append(offset))
    monkeypatch.setattr(os, "pread", reads)
    offsets = np.arange(16) * (72 << 10) + 16
    values = opened("willneed", fd, Merging()).fetch(Extents(offsets, np.full(16, 70_000))).take(0, 16, copied=True)
    assert [*values] == [DATA[offset : offset + 70_000] for offset in offsets.tolist()]
    assert [*map(id, values)] == [*map(id, read)]
    assert advised == [16]


@pytest.mark.parametrize("order", ["backwards", "far apart", "shuffled"])
def test_the_kernel_is_told_about_all_reads_of_other_orders(
    fd: int, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    advised: list[int] = []
    monkeypatch.setattr(posix, "advise", lambda fd, offset, nbytes, advice: advised.append(offset))
    places = {
        "backwards": np.arange(28)[::-1],
        "far apart": np.arange(28),
        "shuffled": np.random.default_rng(1).permutation(28),
    }
    offsets = places[order] * 40_000
    opened("willneed", fd, Merging()).fetch(Extents(offsets, np.full(28, 3000)))
    assert advised == offsets.tolist()


@pytest.mark.parametrize("fits", [True, False])
def test_copies_are_bytes(fd: int, name: EngineName, fits: bool) -> None:
    """Where views would be memoryviews of the same contents, whatever part of its read a value is."""
    engine = opened(name, fd, Merging())
    offsets, lengths = np.array([5000, 0, 5100, len(DATA) - 7]), np.array([100, 3000, 0, 7 if fits else 8])
    fetch = engine.fetch(Extents(offsets, lengths))
    copies = [*fetch.take(0, 3, copied=True)]
    assert copies == [DATA[5000:5100], DATA[:3000], b""]
    assert {type(copy) for copy in copies} == {bytes}
    if fits:
        assert fetch.take(3, 4, copied=True) == [DATA[-7:]]
    else:
        with pytest.raises(posix.EndOfFile, match=f"ends before offset {len(DATA) + 1}"):
            fetch.take(3, 4, copied=True)
    engine.close()


@pytest.mark.parametrize("kind", ["of one length", "of two lengths", "in any order", "too long"])
def test_copies_of_many_small_values_are_bytes(fd: int, name: EngineName, kind: str) -> None:
    """NumPy copies values that are all of one length."""
    offsets, lengths = np.arange(2000) * 316 + 16, np.full(2000, 300)
    if kind == "of two lengths":
        lengths[::2] = 299
    if kind == "in any order":
        offsets = np.random.default_rng(1).permutation(offsets)
    if kind == "too long":
        offsets[-1] = len(DATA) - 299
    engine = opened(name, fd, Merging())
    fetch = engine.fetch(Extents(offsets, lengths))
    places = [*zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True)]
    values = [*fetch.take(0, 900, copied=True), *fetch.take(900, 1000, copied=True)]
    assert values == [DATA[begin:end] for begin, end in places[:1000]]
    assert {type(value) for value in values} == {bytes}
    if kind == "too long":
        with pytest.raises(posix.EndOfFile, match=f"ends before offset {len(DATA) + 1}"):
            fetch.take(1000, 2000, copied=True)
    else:
        assert fetch.take(1000, 2000, copied=True) == [DATA[begin:end] for begin, end in places[1000:]]
    engine.close()


def test_the_engine_is_chosen_by_what_is_in_memory(fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.pread(fd, len(DATA), 0)
    assert choose_engine(fd, 1e6) == "mapped"
    monkeypatch.setattr(posix, "resident_fraction", lambda fd, nbytes: 0.99)
    assert choose_engine(fd, 1e6) == "willneed", "in an epoch, the values that come next are those that are missing"
    monkeypatch.setattr(choice, "available_memory", lambda: len(DATA) - 1)
    assert choose_engine(fd, 1e6) == "direct"
    assert choose_engine(fd, 3000) == "willneed"


def test_direct_is_closed_by_who_drops_it_while_reads_are_under_way(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of the engine that closed it would wait for itself."""
    gc.collect()  # engines of other tests
    closing, read_fully, shut_down = threading.Event(), posix.read_fully, direct.shut_down
    closed_by = []

    def read(*arguments: Any, **options: Any) -> int:
        assert closing.wait(SECONDS)
        return read_fully(*arguments, **options)

    def close(pool: Pool) -> None:
        closed_by.append(threading.current_thread())
        closing.set()
        shut_down(pool)

    engine = opened("direct", fd, Merging())
    monkeypatch.setattr(posix, "read_fully", read)
    monkeypatch.setattr(direct, "shut_down", close)
    fetch = engine.fetch(Extents(np.arange(0, 40) * 20_000, np.full(40, 100)))
    del engine, fetch
    try:
        assert closed_by == [threading.current_thread()]
    finally:
        closing.set()


def test_files_without_direct_io_are_read_by_willneed(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "choose_engine", lambda fd, mean_nbytes: "direct")
    monkeypatch.setattr(posix, "direct_limits", lambda fd: None)
    with pytest.raises(BackendUnavailableError, match="no direct I/O"):
        open_engine("direct", fd, Merging())
    assert open_chosen(fd, 1e6, Merging()).name == "willneed"


def test_files_that_cannot_be_mapped_are_read_by_willneed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "choose_engine", lambda fd, mean_nbytes: "mapped")
    fd = os.open("/sys/kernel/mm/transparent_hugepage/enabled", os.O_RDONLY)
    with pytest.raises(OSError, match="No such device"):
        open_engine("mapped", fd, Merging())
    assert open_chosen(fd, 1e6, Merging()).name == "willneed"
    os.close(fd)


def test_an_unknown_engine(fd: int) -> None:
    unknown: Any = "mmap"
    with pytest.raises(ValueError, match=r"engine is 'auto' or one of .*'mapped'.* found 'mmap'"):
        open_engine(unknown, fd, Merging())


def test_kvikio_needs_a_gpu(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BackendUnavailableError, match="torch finds none"):
        open_engine("kvikio", fd, Merging())
