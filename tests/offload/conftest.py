"""Fixtures of the tests of activation offload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fastensor.backends import direct
from fastensor.offload import ActivationOffload, OffloadConfig, copying

Make = Callable[..., ActivationOffload]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes offloads of everything, however small, to the test's folder; they are closed afterwards."""
    made: list[ActivationOffload] = []

    def make(**options: Any) -> ActivationOffload:
        options = {"schedule": "all", "min_bytes": 1, "directories": (str(tmp_path),)} | options
        made.append(ActivationOffload(OffloadConfig(**options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory in the place of a device's: it is copied to other host memory first."""
    monkeypatch.setattr(copying, "STAGED", {"cpu"})


@dataclass
class HeldWrites:
    """Writes of the backend ``direct`` wait until they are let go."""

    begun: threading.Event = field(default_factory=threading.Event)
    """One has begun."""
    each: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released by each that begins."""
    go: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def held_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldWrites]:
    held, write = HeldWrites(), direct.DirectSlots.write

    def when_let_go(self: direct.DirectSlots, data: memoryview, offset: int) -> None:
        held.begun.set()
        held.each.release()
        assert held.go.wait(60)
        write(self, data, offset)

    monkeypatch.setattr(direct.DirectSlots, "write", when_let_go)
    yield held
    held.go.set()
