"""A model of a filesystem whose files share blocks: what a file is to share with another one is copied."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
import torch

from fastensor.checkpoint.writing import shared_blocks
from fastensor.files import posix
from fastensor.stitch import safetensors, torch_zip

BLOCK_NBYTES = 4096


class SharingDisk:
    """Every filesystem shares blocks of 4096 bytes, until :attr:`refused` says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        """Bytes that files were given by sharing."""
        self.refused: dict[int, int] = {}
        """Errors by the numbers of the calls, from 1, that fail with them."""
        self.calls = 0
        monkeypatch.setattr(posix, "may_share_blocks", lambda fd: True)
        monkeypatch.setattr(posix, "share_blocks", self._share)
        monkeypatch.setattr(shared_blocks, "_refusing", set())

    def _share(self, source: int, begin: int, fd: int, offset: int, nbytes: int) -> None:
        self.calls += 1
        assert begin % BLOCK_NBYTES == offset % BLOCK_NBYTES == nbytes % BLOCK_NBYTES == 0 < nbytes
        assert begin + nbytes <= os.fstat(source).st_size
        code = self.refused.get(self.calls)
        half = nbytes // 2 if code else nbytes
        os.pwrite(fd, os.pread(source, half, begin), offset)
        if code:
            raise OSError(code, os.strerror(code))
        self.nbytes += nbytes


def share_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors of a block share it, and files be padded to pages whatever that costs."""
    monkeypatch.setattr(shared_blocks, "_LEAST_NBYTES", BLOCK_NBYTES)
    monkeypatch.setattr(torch_zip, "_PADDING_LIMIT", 100.0)
    monkeypatch.setattr(safetensors, "_PADDING_LIMIT", 100.0)


REFUSALS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EXDEV, errno.EINVAL)
"""Errors of a single range."""


def assert_same(found: Any, expected: Any) -> None:
    """Equal values, whatever memory they share, and in whatever order dicts have them."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert_same(found[name], value)
    else:
        assert found == expected
