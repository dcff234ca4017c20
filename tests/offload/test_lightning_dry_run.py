"""Dry runs of activation offload in a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from fastensor.errors import OffloadError
from fastensor.offload import OffloadConfig
from fastensor_lightning import SSDActivationOffload

EVERYTHING = OffloadConfig(min_bytes=1, schedule=0)


class Net(pl.LightningModule):
    """A model whose third batch fails if that is wanted."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 2))
        self.fails = fails

    def on_train_end(self) -> None:
        assert self.trainer.checkpoint_callback is not None

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if self.fails and index == 2:
            raise ZeroDivisionError
        loss: torch.Tensor = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def data() -> Any:
    return DataLoader(RandomDataset(32, 48), batch_size=4)


def make_trainer(folder: Path, offload: SSDActivationOffload) -> pl.Trainer:
    saves = ModelCheckpoint(folder / "saved", save_last=True, every_n_train_steps=1)
    return pl.Trainer(
        callbacks=[offload, saves], logger=CSVLogger(folder, "logs", flush_logs_every_n_steps=1), max_epochs=2,
        accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        default_root_dir=folder,
    )  # fmt: skip


def files_in(folder: Path) -> list[Path]:
    return [one for one in folder.rglob("*") if one.is_file()]


def test_it_trains_for_three_batches_saves_nothing_and_logs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offload = SSDActivationOffload(EVERYTHING, dry_run=True)
    trainer = make_trainer(tmp_path, offload)
    trainer.fit(Net(), data())
    assert offload.estimate is not None
    assert f"dry run of activation offload on rank 0:\n{offload.estimate}" in capsys.readouterr().out
    assert trainer.global_step == 3
    assert files_in(tmp_path) == []
    assert isinstance(trainer.logger, CSVLogger)
    assert not trainer.should_stop


def test_the_real_run_saves_and_logs(tmp_path: Path) -> None:
    make_trainer(tmp_path, SSDActivationOffload(EVERYTHING, dry_run=True)).fit(Net(), data())
    make_trainer(tmp_path, SSDActivationOffload(EVERYTHING)).fit(Net(), data())
    assert torch.load(tmp_path / "saved" / "last.ckpt", weights_only=False)["global_step"] == 24
    assert list((tmp_path / "logs").rglob("metrics.csv"))


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="missing"):
        make_trainer(tmp_path, SSDActivationOffload(tmp_path / "missing", dry_run=True)).fit(Net(), data())


def test_one_that_fails_saves_nothing_and_gives_the_trainer_back_its_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, SSDActivationOffload(EVERYTHING, dry_run=True))
    saver, logger = trainer.checkpoint_callback, trainer.logger
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Net(fails=True), data())
    assert files_in(tmp_path) == []
    assert (trainer.checkpoint_callback, trainer.logger) == (saver, logger)
    assert not {name for name in (*vars(saver), *vars(trainer.strategy)) if name in ("on_train_end", "save_checkpoint")}
