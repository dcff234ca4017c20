"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


@pytest.fixture(scope="session")
def occupy() -> Callable[[int], None]:
    """Keeps the current stream busy for so many cycles of the GPU's clock: torch has no public name for that."""

    def occupy(cycles: int) -> None:
        torch.cuda._sleep(cycles)  # noqa: SLF001

    return occupy
