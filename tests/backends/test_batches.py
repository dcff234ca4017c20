"""Several pieces of a file, read at a time by several threads."""

from __future__ import annotations

import os
import random
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor.backends import numpy as buffered
from fastensor.backends.numpy import BufferedReader
from fastensor.backends.threads import run_each
from fastensor.checkpoint.reading import reader as part_reader
from fastensor.files import posix
from fastensor.files.posix import EndOfFile

NBYTES = 3 << 20
DATA = random.Random(0).randbytes(NBYTES)


@pytest.fixture(scope="module")
def fd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("batches") / "data"
    path.write_bytes(DATA)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


PIECES = st.lists(st.tuples(st.integers(0, NBYTES), st.integers(0, 2 << 20)), max_size=6)


@given(pieces=PIECES, threads=st.integers(1, 4))
def test_any_pieces_are_read_by_any_number_of_threads(fd: int, pieces: list[tuple[int, int]], threads: int) -> None:
    targets = [(offset, memoryview(bytearray(min(nbytes, NBYTES - offset)))) for offset, nbytes in pieces]
    with mock.patch.object(buffered, "usable_cores", return_value=threads):
        found = BufferedReader(fd).read_batch(targets, checksum=True)
    for (offset, target), crc32 in zip(targets, found, strict=True):
        expected = DATA[offset : offset + target.nbytes]
        assert target == expected
        assert crc32 == zlib.crc32(expected)


def test_a_file_that_ends_too_early(fd: int) -> None:
    targets = [(0, memoryview(bytearray(NBYTES))), (NBYTES - 5, memoryview(bytearray(6)))]
    with mock.patch.object(buffered, "usable_cores", return_value=2), pytest.raises(EndOfFile):
        BufferedReader(fd).read_batch(targets, checksum=True)


def test_nothing_runs_any_more_when_a_call_has_failed() -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended = []

    def work(number: int) -> None:
        if number == 0:
            begun.wait(60)
            go_on.set()
            raise KeyError("the first one")
        begun.set()
        go_on.wait(60)
        ended.append(number)

    with pytest.raises(KeyError, match="the first one"):
        run_each(work, [0, 1])
    assert ended == [1]


def test_threads_that_cannot_be_started_are_done_without() -> None:
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
        assert run_each(lambda number: 2 * number, [1, 2, 3]) == [2, 4, 6]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were read at a time."""
    found: list[int] = []
    original = BufferedReader.read_batch

    def count(self: BufferedReader, pieces: list[tuple[int, memoryview]], *, checksum: bool) -> list[int]:
        found.append(sum(target.nbytes for _, target in pieces))
        return original(self, pieces, checksum=checksum)

    monkeypatch.setattr(BufferedReader, "read_batch", count)
    monkeypatch.setattr(part_reader, "BATCH_NBYTES", 1 << 20)
    return found


STATE = {f"t{number}": torch.full((50_000 + number,), float(number)) for number in range(24)}


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_parts_are_read_together_in_batches_of_bounded_size(tmp_path: Path, read: list[int], name: str) -> None:
    fastensor.save(STATE, tmp_path / name)
    loaded = fastensor.load(tmp_path / name, backend="numpy")
    assert all(torch.equal(loaded[key], value) for key, value in STATE.items())
    assert 3 * STATE["t0"].nbytes < max(read) <= 1 << 20


def test_no_byte_is_read_twice_if_storages_are_asked_for_in_another_order(tmp_path: Path, read: list[int]) -> None:
    """Before torch 2.1 records were sorted as text."""
    torch.save(STATE, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive, zipfile.ZipFile(tmp_path / "y.pt", "w") as other:
        for record in sorted(archive.namelist()):
            other.writestr(record, archive.read(record))
    loaded = fastensor.load(tmp_path / "y.pt", backend="numpy")
    assert all(torch.equal(loaded[key], value) for key, value in STATE.items())
    assert sum(read) < sum(value.nbytes for value in STATE.values()) + (16 << 10)


def test_records_are_read_where_torch_puts_them_and_their_headers_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header that is read first makes the disk seek, and breaks off the kernel's read-ahead."""
    torch.save(STATE, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        headers = {info.header_offset for info in archive.infolist() if "/data/" in info.filename}
    batches: list[list[int]] = []
    original = BufferedReader.read_batch

    def note(self: BufferedReader, pieces: list[tuple[int, memoryview]], *, checksum: bool) -> list[int]:
        batches.append([offset for offset, _ in pieces])
        return original(self, pieces, checksum=checksum)

    monkeypatch.setattr(BufferedReader, "read_batch", note)
    loaded = fastensor.load(tmp_path / "x.pt", backend="numpy")
    assert all(torch.equal(loaded[key], value) for key, value in STATE.items())
    (together,) = [batch for batch in batches if len(batch) > 1]
    assert len(together) == len(STATE)
    assert together == sorted(together)
    behind = batches[batches.index(together) + 1 :]
    assert [[header] for header in sorted(headers)] == behind, "nothing is read again"


@pytest.mark.parametrize("checked", [True, False])
def test_records_that_begin_elsewhere_are_read_again(tmp_path: Path, read: list[int], checked: bool) -> None:
    torch.save(STATE, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive, zipfile.ZipFile(tmp_path / "y.pt", "w") as other:
        for number, name in enumerate(archive.namelist()):
            info = zipfile.ZipInfo(name)
            info.extra = b"" if number % 3 else b"\x99\x99\x04\x00more"
            other.writestr(info, archive.read(name))
    loaded = fastensor.load(tmp_path / "y.pt", backend="numpy", verify=checked)
    assert all(torch.equal(loaded[key], value) for key, value in STATE.items())
    first_batch = 1 << 20
    assert 0 < sum(read) - sum(value.nbytes for value in STATE.values()) <= first_batch, "later ones are read once"


@pytest.mark.parametrize(
    ("resident", "small_nbytes", "expected"),
    [(0.0, 32 << 20, 1), (0.4, 32 << 20, 1), (0.6, 32 << 20, 2), (1.0, 32 << 20, 2), (0.0, NBYTES, 2)],
)
def test_a_small_file_that_is_on_the_disk_is_read_by_one_thread(
    fd: int, monkeypatch: pytest.MonkeyPatch, resident: float, small_nbytes: int, expected: int
) -> None:
    threads = set()
    original = buffered._read_block

    def note(fd: int, block: buffered._Block, checksum: bool) -> int:
        threads.add(threading.get_ident())
        barrier.wait(60)
        return original(fd, block, checksum)

    barrier = threading.Barrier(expected)
    monkeypatch.setattr(buffered, "_read_block", note)
    monkeypatch.setattr(buffered, "usable_cores", lambda most: 2)
    monkeypatch.setattr(buffered, "_ORDERED_NBYTES", small_nbytes)
    monkeypatch.setattr(posix, "resident_fraction", lambda fd, nbytes: resident)
    target = memoryview(bytearray(2 << 20))
    assert BufferedReader(fd).read_batch([(5, target)], checksum=False) == [0]
    assert target == DATA[5 : 5 + target.nbytes]
    assert len(threads) == expected


def test_damage_in_a_batch_is_found_in_what_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save(STATE, path)
    sound = path.read_bytes()
    at = sound.index(STATE["t7"].numpy().tobytes())
    path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    with pytest.raises(fastensor.CorruptCheckpointError, match=r"data/7' .* has CRC32"):
        fastensor.load(path, backend="numpy")
