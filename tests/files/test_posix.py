"""System calls on whatever filesystem the tests run on; ``tests/filesystems`` has those that share blocks."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from fastensor.files import posix


@pytest.mark.parametrize("block_nbytes", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("most", [1 << 20, 5000, 700])
def test_each_part_is_moved_whole(
    tmp_path: Path, block_nbytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts begin at blocks that are smaller than a page, and the kernel may copy less than it is asked for."""
    copy = os.copy_file_range

    def copy_little(source: int, target: int, count: int, begin: int, offset: int) -> int:
        return copy(source, target, min(count, most), begin, offset)

    monkeypatch.setattr(os, "copy_file_range", copy_little)
    sizes = [block_nbytes * number for number in (5, 1, 11, 3)] + [777]
    parts = [random.Random(number).randbytes(nbytes) for number, nbytes in enumerate(sizes)]
    with (tmp_path / "source").open("w+b", 0) as source, (tmp_path / "target").open("w+b", 0) as target:
        source.write(b"".join(parts))
        begin = 0
        for number, part in enumerate(parts):
            posix.move_bytes(source.fileno(), begin, target.fileno(), begin + number * block_nbytes, len(part))
            begin += len(part)
        assert target.read() == bytes(block_nbytes).join(parts)
        assert not any((tmp_path / "source").read_bytes())


def test_what_is_not_there_is_not_moved(tmp_path: Path) -> None:
    with (tmp_path / "source").open("w+b", 0) as source, (tmp_path / "target").open("w+b", 0) as target:
        source.write(b"x" * 100)
        with pytest.raises(posix.EndOfFile, match="the file ends before offset 101"):
            posix.move_bytes(source.fileno(), 0, target.fileno(), 0, 101)


def test_the_kernel_is_told_what_is_needed_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may ignore what a piece has beyond the device's read-ahead, which is 128 KiB as a rule."""
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(posix, "advise", lambda fd, *given: told.append(given))
    posix.will_need(3, 1000, 300 << 10)
    assert [begin for begin, _, _ in told] == [1000 + piece for piece in (0, 128 << 10, 256 << 10)]
    assert [nbytes for _, nbytes, _ in told] == [128 << 10, 128 << 10, 44 << 10]
    assert {kind for _, _, kind in told} == {os.POSIX_FADV_WILLNEED}


def test_texts_of_small_files(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b" 4: ACTIVE\xff \n")
    assert posix.text_of(tmp_path / "state") == "4: ACTIVE\ufffd"
    assert posix.text_of(tmp_path / "absent") == posix.text_of(tmp_path) == ""


@pytest.mark.parametrize(
    ("place", "text", "nbytes"),
    [
        ("class/bdi/{}", "128", 128 << 10),
        ("class/bdi/{}", "0", 0),
        ("dev/disk/queue", "8192", 8 << 20),
        ("class/bdi/another", "128", 0),
        (None, "", 0),
    ],
)
def test_how_far_the_kernel_reads_ahead(tmp_path: Path, place: str | None, text: str, nbytes: int) -> None:
    """The folders of a network filesystem and of a disk have the file; a partition has it in that of its disk."""
    file = tmp_path / "file"
    file.touch()
    device = file.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    if place is not None:
        folder = tmp_path / place.format(name)
        folder.mkdir(parents=True)
        (folder / "read_ahead_kb").write_text(f"{text}\n")
    (tmp_path / "dev/disk/partition").mkdir(parents=True)
    (tmp_path / "dev/block").mkdir()
    (tmp_path / "dev/block" / name).symlink_to(tmp_path / "dev/disk/partition")
    with file.open("rb") as opened:
        assert posix.read_ahead_nbytes(opened.fileno(), root=tmp_path) == nbytes
