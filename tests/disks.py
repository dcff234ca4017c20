"""What saves leave on a disk, and disks that are full or slow."""

from __future__ import annotations

import errno
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import states

import fastensor
from fastensor.files import posix


def content(path: Path) -> int:
    """The number of which the tensor "w" of a checkpoint consists."""
    w = fastensor.load(path, verify=True)["w"]
    assert (w == w[0]).all()
    return int(w[0])


def assert_only(path: Path, state: Any) -> None:
    """The file holds the state, whole, and nothing else is in its folder."""
    states.assert_equal(fastensor.load(path, verify=True), state)
    assert os.listdir(path.parent) == [path.name]


def leftovers(folder: Path) -> list[str]:
    """The names of temporary files."""
    return [name for name in os.listdir(folder) if name.endswith(posix.TEMPORARY_SUFFIX)]


class FullDisk:
    """Files cannot be synced while it is full, or when ``full_after`` others were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.full_after = math.inf
        self._syncs = 0
        sync = posix.sync_file

        def sync_if_possible(fd: int) -> None:
            self._syncs += not os.path.isdir(f"/proc/self/fd/{fd}")
            if not os.path.isdir(f"/proc/self/fd/{fd}") and (self.full or self._syncs > self.full_after):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(fd)

        monkeypatch.setattr(posix, "sync_file", sync_if_possible)


class SlowDisk:
    """Syncs take a while, so that every file is written later than what follows its save."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        sync = posix.sync_file

        def sync_later(fd: int) -> None:
            threading.Event().wait(seconds)
            sync(fd)

        monkeypatch.setattr(posix, "sync_file", sync_later)


class Gate:
    """Files cannot be synced by other threads than the one that trains until it is open: what they save is pending."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._opened = threading.Event()
        self._trains = threading.get_ident()
        sync = posix.sync_file

        def wait_and_sync(fd: int) -> None:
            if threading.get_ident() != self._trains:
                assert self._opened.wait(60)
            sync(fd)

        monkeypatch.setattr(posix, "sync_file", wait_and_sync)

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()
