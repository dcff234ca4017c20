"""Fixtures of the tests of the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastensor.backends import direct, registry
from fastensor.errors import BackendUnavailableError

PLUGIN = Path(__file__).parents[1] / "plugin"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that brings the backend ``elsewhere``."""
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(registry, "_others_wanted", True)
    monkeypatch.syspath_prepend(PLUGIN)


@pytest.fixture
def direct_io(tmp_path: Path) -> None:
    """Skips where the backend ``direct`` has to refuse."""
    fd = os.open(tmp_path, os.O_RDWR | os.O_TMPFILE)
    try:
        direct._limits(fd)
    except BackendUnavailableError as error:
        pytest.skip(f"no direct I/O at {tmp_path}: {error}")
    finally:
        os.close(fd)
