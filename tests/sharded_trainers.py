"""Trainers whose ranks hold parts of a model, on CPUs."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_models import act_as_rank
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, fully_sharded_data_parallel
from torch.distributed.fsdp._init_utils import _init_device_handle
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

Rank = Callable[[Any, int, Path], Any]


def make_module(pl: Any, width: int = 14) -> Any:
    """A model of 3 layers. Their sizes are odd, so that the shards of ranks differ."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers: Any = None

        def configure_model(self) -> None:
            if self.layers is not None:
                return
            torch.manual_seed(1)
            self.layers = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 7), nn.Linear(7, 3))
            mesh = self.device_mesh
            if mesh is None:  # FSDP 1 wraps the layers
                return
            if mesh["tensor_parallel"].size() > 1:
                plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(self.layers, mesh["tensor_parallel"], plan)
            if mesh["data_parallel"].size() > 1 or mesh["tensor_parallel"].size() == 1:
                fully_shard(self.layers, mesh=mesh["data_parallel"])

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.layers(batch[0]).square().mean()
            self.log("step_number", float(self.global_step))
            return loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.log("score", self.layers(batch[0]).mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def loader() -> DataLoader[Any]:
    values = torch.arange(16 * 5.0).view(16, 5).sin()
    return DataLoader(TensorDataset(values), batch_size=4)


def make_trainer(pl: Any, folder: Path, plugin: Any, *, full: bool = False, tensor: int = 1, **options: Any) -> Any:
    world = int(os.environ["WORLD_SIZE"])
    strategies = importlib.import_module(f"{pl.__name__}.strategies")
    strategy = options.pop("strategy", None) or strategies.ModelParallelStrategy(
        data_parallel_size=world // tensor, tensor_parallel_size=tensor, save_distributed_checkpoint=not full
    )
    defaults = {
        "max_epochs": 3, "accelerator": "cpu", "devices": world, "logger": False, "default_root_dir": folder,
        "enable_progress_bar": False, "enable_model_summary": False, "strategy": strategy, "num_sanity_val_steps": 0,
        "plugins": [plugin] if plugin else None,
    }  # fmt: skip
    return pl.Trainer(**{**defaults, **options})


def fit(pl: Any, folder: Path, plugin: Any, ckpt_path: Any = None, **options: Any) -> tuple[Any, Any]:
    """A Trainer that has trained, and its module."""
    trainer, module = make_trainer(pl, folder, plugin, **options), make_module(pl)
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return trainer, module


def values_of(trainer: Any, module: Any) -> dict[str, list[float]]:
    """All numbers of the model and of its optimizer, on all ranks alike."""
    found = {name: whole(value) for name, value in module.state_dict().items()}
    for optimizer in trainer.optimizers:
        for number, state in enumerate(optimizer.state.values()):
            found.update({f"{number}.{name}": whole(value) for name, value in state.items()})
    return found


def whole(value: Tensor) -> list[float]:
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    return [float(one) for one in full.detach().flatten()]


@contextmanager
def fsdp_on_cpus(pl: Any, **options: Any) -> Iterator[Any]:
    """A function that makes strategies of FSDP 1, which needs a GPU only to find out what streams there are."""
    strategies = importlib.import_module(f"{pl.__name__}.strategies")

    class Strategy(strategies.FSDPStrategy):  # type: ignore[misc]
        root_device = torch.device("cpu")

    def handle(state: Any, module: Any, ignored: Any, device: Any) -> Any:
        return _init_device_handle(state, module, ignored, torch.device("cpu"))

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(fully_sharded_data_parallel, "_init_device_handle", handle)
        yield lambda: Strategy(process_group_backend="gloo", auto_wrap_policy={nn.Linear}, **options)


def start(rank: int, program: Rank, world: int, brand: str, port: int, folder: Path) -> None:
    """One rank of a job. What it returns goes to a file."""
    act_as_rank(rank, port, world)
    torch.set_num_threads(1)
    pl = importlib.import_module(brand)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (folder / f"{program.__name__}-{rank}.json").write_text(json.dumps(program(pl, rank, folder)))
    torch.distributed.destroy_process_group()
