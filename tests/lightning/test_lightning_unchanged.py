"""Frozen weights of a Trainer's model are written once, where files can share blocks."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_models import loader, make_module, make_trainer
from sharing import SharingDisk
from torch import nn

import fastensor
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]
FROZEN_NBYTES = 4 * 600 * 600


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_frozen_weights_are_written_once(
    pl: Any, tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SharingDisk(monkeypatch)
    monkeypatch.setattr(logging.getLogger(pl.__name__), "propagate", True)
    module = make_module(pl)
    module.frozen = nn.Linear(600, 600, bias=False).requires_grad_(False)
    plugin = FastensorCheckpointIO(asynchronous=asynchronous)
    logger = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger(tmp_path)
    checkpoints = importlib.import_module(f"{pl.__name__}.callbacks").ModelCheckpoint(save_top_k=-1)
    waiting = importlib.import_module(f"{pl.__name__}.callbacks").LambdaCallback(
        on_train_epoch_start=lambda *_: plugin.teardown()  # a pending save is no base
    )
    callbacks = [CheckpointMonitor(), checkpoints, waiting]
    trainer = make_trainer(pl, tmp_path, plugin, callbacks=callbacks, logger=logger, max_epochs=4)
    trainer.fit(module, loader())
    paths = sorted(Path(checkpoints.dirpath).iterdir())
    assert len(paths) == 4
    for path in paths:
        state = fastensor.load(path, weights_only=False)["state_dict"]
        assert torch.equal(state["frozen.weight"], module.frozen.weight)
    assert plugin.last_save is not None
    assert FROZEN_NBYTES - 8192 < plugin.last_save.shared_nbytes <= FROZEN_NBYTES
    assert disk.nbytes == 3 * plugin.last_save.shared_nbytes
    assert "unchanged and shared" in caplog.text
    assert "checkpoint/shared_bytes" in (Path(logger.log_dir) / "metrics.csv").read_text()


def test_a_wrong_choice() -> None:
    with pytest.raises(ValueError, match="share_unchanged is True, False or 'trust', found 'trusted'; did you mean"):
        FastensorCheckpointIO(share_unchanged="trusted")  # type: ignore[arg-type]
