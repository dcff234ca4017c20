"""Old states of an Accelerator are removed without waiting for the filesystem."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastensor.checkpoint.writing import freeing
from fastensor_accelerate.directories import remove_state, states_in


def test_the_space_of_a_removed_state_is_freed_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = tmp_path / "checkpoints"
    for number in range(2):
        (checkpoints / f"checkpoint_{number}" / "nested").mkdir(parents=True)
        (checkpoints / f"checkpoint_{number}" / "nested" / "big").write_bytes(os.urandom(1 << 20))
        (checkpoints / f"checkpoint_{number}" / "link").symlink_to("nested")
    freeing.wait_for_space()
    begun: list[freeing.Freeing] = []
    with monkeypatch.context() as nobody_frees:
        nobody_frees.setattr(freeing, "do_afterwards", lambda job: begun.append(job.__self__.freeing) is None)
        remove_state(str(checkpoints / "checkpoint_0"))
    assert states_in(str(checkpoints)) == [str(checkpoints / "checkpoint_1")]
    assert not os.listdir(tmp_path / "checkpoints.saving")
    assert [(one.nbytes >= 1 << 20, one.seconds) for one in begun] == [(True, None)], (
        "the call has waited for the space"
    )
    freeing.wait_for_space()
    assert begun[0].seconds is not None
