"""Plans that compute blocks again whatever is measured, for tests that must not depend on times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fastensor.offload import engine, planner
from fastensor.offload.recomputing import predict_with_blocks
from fastensor.offload.scheduler import OffloadPlan, StepProfile, TransferRates

MEASURED = planner._MEASURED
"""Passes of a kind in which nothing is computed again."""


def plans_that_recompute(which: Callable[[int], bool] = lambda number: True, *, inputs_leave: bool = False) -> Any:
    """Patch for a ``with`` block. From the second pass of a kind on, the blocks of these numbers that can be computed
    again are; all else stays, or the inputs of these blocks leave."""

    def plan(profile: StepProfile, limit: int, rates: TransferRates, among: object = None) -> OffloadPlan:
        blocks = frozenset(number for number, one in enumerate(profile.blocks) if one.tensors and which(number))
        out = frozenset(len(profile.tensors) + number for number in blocks if inputs_leave)
        return OffloadPlan(out, predict_with_blocks(profile, out, blocks, rates), blocks)

    return mock.patch.object(planner, "plan_with_blocks", plan)


@contextmanager
def a_slow_disk() -> Iterator[None]:
    """Patch for a ``with`` block: plans are made as if each byte took a hundred thousandth of a second to move, and
    training had to wait for that: with room for what is on its way, what has not begun to leave would cost nothing."""
    rates = TransferRates(1e5, 1e5, 1, 1)
    found = mock.patch.object(engine.OffloadEngine, "_rates", return_value=rates)
    with found, mock.patch.object(planner, "_rates_within", return_value=rates):
        yield
