"""Frozen weights of a model are written once, though each state has a directory of its own, which is renamed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerators import MODES, by, training
from sharing import SharingDisk
from torch import nn

import fastensor
from fastensor_accelerate import FastensorConfig

NUMEL = 200_000
modes = pytest.mark.parametrize("config", MODES)


@modes
@pytest.mark.parametrize("named", [True, False])
def test_frozen_weights_are_written_once(
    tmp_path: Path, config: FastensorConfig, named: bool, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    disk = SharingDisk(monkeypatch)
    found = training(tmp_path if named else None)
    model = found.accelerator.unwrap_model(found.models[0])
    model.register_parameter("frozen", nn.Parameter(torch.randn(NUMEL), requires_grad=False))
    with by(config):
        for number in range(3):
            found.train()
            before = disk.nbytes
            directory = tmp_path / "checkpoints" / f"checkpoint_{number}"
            found.accelerator.save_state(None if named else str(directory))
            found.accelerator._fastensor_saver.wait()
            assert (disk.nbytes - before > 4 * NUMEL - 8192) == (number > 0)
            saved = fastensor.load(directory / "model.safetensors")
            assert torch.equal(saved["frozen"], model.frozen)
            assert torch.equal(saved["first.weight"], model.first.weight)
        found.accelerator.end_training()
    assert "unchanged and shared" in capsys.readouterr().err


def test_states_share_nothing_if_that_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SharingDisk(monkeypatch)
    found = training(tmp_path)
    model = found.accelerator.unwrap_model(found.models[0])
    model.register_parameter("frozen", nn.Parameter(torch.randn(NUMEL), requires_grad=False))
    with by(FastensorConfig(share_unchanged=False)):
        for _ in range(2):
            found.accelerator.save_state()
    assert disk.calls == 0
