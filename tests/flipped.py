"""Flipping bytes of all files in a folder, one at a time."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fastensor
from fastensor.errors import FastensorError

_LOCAL_HEADER_NBYTES = 30


def offsets(path: Path) -> list[int]:
    """A byte of each region of a file that says something: data, and structure."""
    nbytes = path.stat().st_size
    if path.suffix == ".safetensors":
        return [0, 12, nbytes - 1]
    if path.suffix == ".distcp":  # a row of archives
        whole = path.read_bytes()
        name = whole.find(b"archive/data/0")
        return [0, name, name + 14 + int.from_bytes(whole[name - 2 : name], "little"), nbytes - 4]
    if not zipfile.is_zipfile(path):
        return sorted({0, nbytes // 2, max(nbytes - 4, 0)})
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if record.file_size]
        directory = archive.start_dir
    largest, pickled = max(records, key=lambda record: record.file_size), records[0]
    assert pickled.filename.endswith("/data.pkl")
    return [0, _middle(path, pickled), _middle(path, largest), directory + 17, directory + 48, nbytes - 8]


def _middle(path: Path, record: zipfile.ZipInfo) -> int:
    """The offset of a byte in the middle of a record."""
    with path.open("rb") as file:
        file.seek(record.header_offset + _LOCAL_HEADER_NBYTES - 4)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return record.header_offset + _LOCAL_HEADER_NBYTES + name + extra + record.file_size // 2


@contextmanager
def flipped(path: Path, offset: int) -> Iterator[None]:
    """A byte of a file is another one in the block."""
    whole = path.read_bytes()
    path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x15]) + whole[offset + 1 :])
    try:
        yield
    finally:
        path.write_bytes(whole)


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def assert_answers_for_all(folder: Path, *, not_compared: set[str]) -> fastensor.VerifyReport:
    """Each flip in each file in a folder is found, but in files that are named.

    Args:
        folder: is intact.
        not_compared: the paths of those files in it.

    Returns:
        The report of the intact folder.
    """
    intact = fastensor.verify(folder)
    assert set(intact.not_compared) == not_compared, intact.not_compared
    unseen = []
    for path in files_below(folder):
        for offset in offsets(path):
            with flipped(path, offset):
                try:
                    report = fastensor.verify(folder)
                except (FastensorError, FileNotFoundError):
                    continue
                name = str(path.relative_to(folder))
                if name not in report.not_compared or (name not in not_compared and report.complete):
                    unseen.append((name, offset))
    assert not unseen, unseen
    return intact
