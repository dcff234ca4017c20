"""Open files of every kind that ``torch.load`` and ``torch.save`` take."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import mmap
import os
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import pytest
import states
import torch

import fastensor
from fastensor.checkpoint.reading.borrowed import BorrowedFile, StreamFile
from fastensor.checkpoint.reading.opened import FileView

STATE = {"w": torch.arange(12.0).reshape(3, 4), "large": torch.arange(300_000), "n": {"epoch": 3}}


class Silent:
    """A file whose ``seek`` returns nothing, as that of many wrappers."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)
        self.read, self.readline, self.tell = self._file.read, self._file.readline, self._file.tell
        self.close = self._file.close

    def seek(self, offset: int, whence: int = 0) -> None:
        self._file.seek(offset, whence)


def mapped(data: bytes) -> mmap.mmap:
    found = mmap.mmap(-1, len(data))
    found[:] = data
    return found


def spooled(data: bytes) -> Any:
    found = tempfile.SpooledTemporaryFile()  # noqa: SIM115  # the caller's
    found.write(data)
    found.seek(0)
    return found


def member(data: bytes) -> Any:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as written:
        written.writestr("inner.pt", data)
    return zipfile.ZipFile(archive).open("inner.pt")


READABLE: dict[str, Callable[[bytes], Any]] = {
    "seek returns None": Silent,
    "mmap": mapped,
    "spooled": spooled,
    "zip member": member,
    "gzip": lambda data: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(data, 1))),
    "bz2": lambda data: bz2.BZ2File(io.BytesIO(bz2.compress(data, 1))),
    "lzma": lambda data: lzma.LZMAFile(io.BytesIO(lzma.compress(data, preset=0))),  # noqa: SIM115  # the test closes it
}


@pytest.fixture(scope="module")
def data() -> bytes:
    file = io.BytesIO()
    torch.save(STATE, file)
    return file.getvalue()


@pytest.mark.parametrize("kind", READABLE)
def test_files_that_are_read(data: bytes, kind: str) -> None:
    with closing(READABLE[kind](data)) as file:
        expected = torch.load(file)
    with closing(READABLE[kind](data)) as file:
        states.assert_equal(fastensor.load(file), expected)
    with closing(READABLE[kind](data)) as file, fastensor.open(file) as lazily:
        assert torch.equal(lazily["large"], STATE["large"])


def test_a_mapping_of_a_file_is_read_from_its_position(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "behind"
    path.write_bytes(b"head" + data)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as found:
        found.seek(4)
        states.assert_equal(fastensor.load(found), STATE)


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_compressed_files_that_are_written(tmp_path: Path, suffix: str) -> None:
    kind: Any = {"gz": gzip, "bz2": bz2, "xz": lzma}[suffix]
    with kind.open(tmp_path / "x", "wb") as file:
        fastensor.save(STATE, file)
    with kind.open(tmp_path / "x", "rb") as file:
        states.assert_equal(torch.load(file), STATE)


def test_a_member_of_an_archive_that_is_written(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive, archive.open("inner.pt", "w") as file:
        fastensor.save(STATE, file)  # type: ignore[arg-type]  # zipfile calls it IO[bytes]
    with zipfile.ZipFile(tmp_path / "x.zip") as archive, archive.open("inner.pt") as file:
        states.assert_equal(torch.load(file), STATE)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    with ExitStack() as stack:
        yield lambda mode: stack.enter_context(open(tmp_path / "x", mode))


def test_files_that_are_written_behind_what_is_there(files: Callable[[str], Any]) -> None:
    file = files("ab")
    file.write(b"head")
    fastensor.save(STATE, file)
    found = files("rb")
    found.seek(4)
    states.assert_equal(fastensor.load(found), STATE)


def test_files_that_are_written_and_read(files: Callable[[str], Any]) -> None:
    file = files("w+b")
    fastensor.save(STATE, file)
    file.seek(0)
    states.assert_equal(fastensor.load(file), STATE)


def test_a_pipe_that_is_written() -> None:
    reading, writing = os.pipe()
    found: list[bytes] = []

    def read() -> None:
        with os.fdopen(reading, "rb") as file:
            found.append(file.read())

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writing, "wb") as file:
        fastensor.save(STATE, file)
    thread.join()
    states.assert_equal(torch.load(io.BytesIO(found[0])), STATE)


@pytest.mark.parametrize("folder", ["/dev/shm", None])
def test_no_open_file_is_called_durable(folder: str | None, tmp_path: Path) -> None:
    if folder is not None and not os.access(folder, os.W_OK):
        pytest.skip("there is no folder in memory")
    with tempfile.TemporaryFile(dir=folder or tmp_path) as file:
        assert not fastensor.save(STATE, file, durable=True).durable


class Counting(io.BytesIO):
    """A file that notes how much each call of ``read`` has copied."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.copied = [0]

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.copied.append(len(data))
        return data


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")
def test_tensors_are_read_to_their_place(is_zip: bool, weights_only: bool) -> None:
    """As by ``torch.load``: ``read`` would take memory of the size of the tensor beside it."""
    file = Counting(b"")
    torch.save({"w": torch.zeros(16 << 20, dtype=torch.uint8)}, file, _use_new_zipfile_serialization=is_zip)
    file.seek(0)
    fastensor.load(file, weights_only=weights_only)
    assert max(file.copied) < 4096


def test_what_has_no_readinto_is_read_in_pieces() -> None:
    file = Counting(b"")
    torch.save(torch.zeros(16 << 20, dtype=torch.uint8), file, _use_new_zipfile_serialization=False)

    class Reading(Silent):
        def __init__(self, data: bytes) -> None:
            super().__init__(data)
            self.largest = 0
            self._read, self.read = self.read, self.counted

        def counted(self, size: int = -1) -> bytes:
            self.largest = max(self.largest, size)
            return self._read(size)

    reading = Reading(file.getvalue())
    view = FileView(StreamFile(BorrowedFile(cast(BinaryIO, reading)), "x"))
    assert torch.equal(torch.load(cast(IO[bytes], view)), torch.zeros(16 << 20, dtype=torch.uint8))
    assert reading.largest <= 4 << 20
