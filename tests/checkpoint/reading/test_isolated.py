"""What makes the attacks: what goes wrong in it is not taken for what goes wrong in what is attacked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hostile import isolated
from hostile.attacks import PLAIN
from hostile.isolated import Limits, Outcome, laboratory

import fastensor
from fastensor import CorruptCheckpointError

pytestmark = pytest.mark.hostile


def test_a_server_that_ends_is_reported_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    fastensor.save(PLAIN, path)
    with laboratory() as made:
        made.attack(["open"], path, path, Limits(20))
        os.kill(made._server.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="has ended with return code -9"):
            made.attack(["open"], path, path, Limits(20))
        assert made.attack(["open"], path, path, Limits(20))["open"].broken == ""


def test_memory_that_was_wanting_is_no_refusal() -> None:
    outcomes = []
    for cause in (MemoryError(), ValueError()):
        error = CorruptCheckpointError("x is damaged")
        error.__cause__ = cause
        outcomes.append(Outcome())
        isolated._describe(error, outcomes[-1])
    assert [bool(outcome.broken) for outcome in outcomes] == [True, False]
