"""What the modules here share: where hostile files are, and the processes to attack in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile.isolated import Laboratory, laboratory


@pytest.fixture(scope="session")
def isolated() -> Iterator[Laboratory]:
    with laboratory() as made:
        yield made


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for files that each of thousands of tests overwrites: one for each of them takes long."""
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture
def suffix() -> str:
    """How the name of a hostile file ends."""
    return ".ckpt"


@pytest.fixture
def path(scratch: Path, suffix: str) -> Path:
    """Where the hostile file is to be. Nothing is there: a file of before might still be mapped."""
    found = scratch / f"x{suffix}"
    found.unlink(missing_ok=True)
    return found
