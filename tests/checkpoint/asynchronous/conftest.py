"""A gate in front of what a drain does last, so that tests decide when saves go on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fastensor.checkpoint import ordering
from fastensor.files import posix

PATIENCE_SECONDS = 60


@pytest.fixture(autouse=True)
def nothing_is_left_to_be_waited_for() -> Iterator[None]:
    yield
    gc.collect()  # writers that were not closed
    assert not ordering._pending


class Gate:
    """Stops every ``fsync`` of a file until it is opened. Open when it is made."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()

    def close(self) -> None:
        self._reached.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait_until_reached(self) -> None:
        """Return when a thread waits at the gate."""
        assert self._reached.wait(PATIENCE_SECONDS)

    def pass_through(self) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE_SECONDS), "the gate was not opened"


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    sync = posix.sync_file

    def sync_behind_gate(fd: int) -> Any:
        gate.pass_through()
        return sync(fd)

    monkeypatch.setattr(posix, "sync_file", sync_behind_gate)
    yield gate
    gate.open()
