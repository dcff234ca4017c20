"""Trainers whose data comes from a service: each sample of an epoch trains once, wherever the training is resumed."""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_models import make_trainer
from programs import Program
from provision.datasets import Numbers

from fastensor.provision import DataService
from fastensor_lightning import DataWaitMonitor, FastensorDataModule

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]

N = 60


def trained(pl: Any, folder: Path, data: FastensorDataModule, checkpoint: Path | None = None, **options: Any) -> Any:
    """The model, which says what it was trained with, before the checkpoint and since."""

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += batch["id"].tolist()
            return self.layer(batch["id"][:, None].float()).mean() * 1e-6

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["seen"] = list(self.seen)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = list(checkpoint["seen"])

    model = Model()
    trainer = make_trainer(pl, folder, **{"enable_checkpointing": False, **options})
    trainer.fit(model, datamodule=data, ckpt_path=checkpoint, weights_only=False)
    return model


def test_training_is_resumed_by_its_service_or_its_address(
    tmp_path: Path, folder: Path, warm_services: list[Program], capsys: pytest.CaptureFixture[str]
) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    saver = import_module(f"{pl.__name__}.callbacks").ModelCheckpoint(
        tmp_path / "steps", filename="{step}", every_n_train_steps=3, save_top_k=-1
    )
    with DataService.start(Numbers(N, folder), cache_bytes=1 << 20, workers=1) as service:
        data = FastensorDataModule(service=service, batch_size=9, seed=3)
        callbacks = [saver, DataWaitMonitor()]
        whole = trained(pl, tmp_path, data, callbacks=callbacks, enable_checkpointing=True).seen
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
        assert [line[:6] for line in lines] == [["epoch", f"{number},", "rank", "0", "7", "60"] for number in range(2)]
        assert [sorted(whole[begin : begin + N]) for begin in (0, N)] == [list(range(N))] * 2
        checkpoints = sorted((tmp_path / "steps").iterdir())
        assert len(checkpoints) == 4
        for number, checkpoint in enumerate(checkpoints):
            given = service.address if number % 2 else service
            resumed = trained(pl, tmp_path, FastensorDataModule(service=given, batch_size=9, seed=3), checkpoint)
            assert resumed.seen == whole, checkpoint
    del data, given, resumed, callbacks
    gc.collect()  # trainers are cycles, and have connected to the service


def test_training_has_one_source() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        FastensorDataModule("train.lmdb", service="local:somewhere")
