"""Each test begins as a new process does: Accelerate keeps what it knows of the process for all Accelerators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerators import Seen, begin_anew, watch
from disks import Gate


@pytest.fixture(autouse=True)
def _new_process() -> Iterator[None]:
    begin_anew()
    yield
    begin_anew()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return watch(monkeypatch)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Saves of other threads stay pending until the gate is opened."""
    found = Gate(monkeypatch)
    yield found
    found.open()
