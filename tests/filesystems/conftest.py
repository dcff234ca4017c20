"""Filesystems in files, which tests use one after the other."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from disk_images import CannotMountError, mounted

del sys.path[0]  # other modules there have names of folders of tests
NBYTES = 320 << 20


@pytest.fixture(scope="session", params=["xfs", "btrfs"])
def filesystem(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A filesystem whose files can share blocks."""
    try:
        with mounted(request.param, tmp_path_factory.mktemp("images") / "image", NBYTES) as folder:
            yield folder
    except CannotMountError as error:
        pytest.skip(f"no filesystem can be mounted here: {error}")


@pytest.fixture
def folder(filesystem: Path) -> Iterator[Path]:
    """An empty folder there."""
    found = filesystem / "test"
    found.mkdir()
    yield found
    shutil.rmtree(found)
