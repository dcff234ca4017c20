"""What the modules here share: where hostile files are, and the processes to attack in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile.isolated import Laboratory, laboratory

from fastensor.checkpoint.reading import storages


@pytest.fixture(autouse=True)
def in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small pickles of tests are read as large ones are."""
    monkeypatch.setattr(storages, "_LARGE_PICKLE_NBYTES", 0)


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
