"""Fixtures of the tests of the store."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastensor.backends import direct
from fastensor.errors import BackendUnavailableError


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
