"""Fixtures of the tests of activation offload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastensor.offload import ActivationOffload, OffloadConfig

Make = Callable[..., ActivationOffload]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes offloads of everything, however small, to the test's folder; they are closed afterwards."""
    made: list[ActivationOffload] = []

    def make(**options: Any) -> ActivationOffload:
        options = {"min_bytes": 1, "directories": (str(tmp_path),)} | options
        made.append(ActivationOffload(OffloadConfig(**options)))
        return made[-1]

    yield make
    for one in made:
        one.close()
