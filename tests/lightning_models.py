"""A small model, and Trainers for it, of whichever of the two packages."""

from __future__ import annotations

import os
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fastensor


def __getattr__(name: str) -> Any:
    """In a spawned process, which finds nothing but the name of the class."""
    if name == "Module":
        import lightning.pytorch

        return type(make_module(lightning.pytorch))
    raise AttributeError(name)


def make_module(pl: Any) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(4, width)
            self.tied = self.layer

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.layer(batch[0]).square().mean()
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("score", self.layer(batch[0]).mean())

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    Module.__qualname__ = Module.__name__
    globals()["Module"] = Module  # hyper-parameters are pickled by reference
    return Module()


def loader(batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=batch_size)


def make_trainer(pl: Any, folder: Path, plugin: Any | None = None, **options: Any) -> Any:
    defaults = {
        "max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "default_root_dir": folder,
        "enable_progress_bar": False, "enable_model_summary": False, "plugins": [plugin] if plugin else None,
    }  # fmt: skip
    return pl.Trainer(**{**defaults, **options})


def fit(pl: Any, folder: Path, plugin: Any | None = None, ckpt_path: Any = None, **options: Any) -> Any:
    trainer = make_trainer(pl, folder, plugin, **options)
    trainer.fit(make_module(pl), loader(), loader(), ckpt_path=ckpt_path)
    return trainer


def act_as_rank(rank: int, port: int, world: int = 2) -> None:
    """For Lightning's Trainer, which is to believe that a launcher has started this process."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="1",
    )  # fmt: skip


def install_entry_points(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register what an installation of this version would, whichever is installed."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    name, version = project["name"], fastensor.__version__
    found = folder / f"{name}-{version}.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in names.items())]
    (found / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(folder)


def without_entry_points() -> AbstractContextManager[object]:
    """Trainers get no callback by themselves, as where a checkout is used without being installed."""
    return mock.patch("fastensor_lightning.callbacks_factory.callbacks", list)
