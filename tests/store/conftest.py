"""Fixtures of the tests of the store."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.fixture
def only_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filesystem refuses files without names."""
    monkeypatch.setattr(os, "open", _refusing(os.open))


@pytest.fixture(params=["nameless", "named"])
def temporaries(request: pytest.FixtureRequest) -> str:
    """What files are before they are published: the filesystem may refuse those without names."""
    if request.param == "named":
        request.getfixturevalue("only_named")
    return str(request.param)


def _refusing(function: Callable[..., int]) -> Callable[..., int]:
    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return function(path, flags, *arguments, **options)

    return refuse
