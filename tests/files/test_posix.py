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
