"""Small trainings with an Accelerator, what they hold, and what of their files goes through Fastensor."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from states import assert_equal
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fastensor
import fastensor_accelerate
from fastensor_accelerate import FastensorConfig

MODES = [
    pytest.param(FastensorConfig(), id="synchronous"),
    pytest.param(FastensorConfig(asynchronous=True), id="asynchronous"),
]
TENSOR_FILES = (".safetensors", ".bin", ".pt", ".pkl")


class Tied(nn.Module):
    """Two layers that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, batch: Tensor) -> Tensor:
        found: Tensor = self.second(torch.relu(self.first(batch)))
        return found


class Steps:
    """A custom object: a number, an array, a tensor, and an object that only unrestricted pickles hold."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "array": numpy.arange(3) * self.number,
            "tensor": torch.full((2,), float(self.number)),
            "path": Path("a") / str(self.number),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["path"] == Path("a") / str(state["number"])
        assert (state["array"] == numpy.arange(3) * state["number"]).all()
        assert (state["tensor"] == state["number"]).all()
        self.number = state["number"]


@dataclass
class Training:
    """An Accelerator, and what it has prepared."""

    accelerator: Any
    models: list[Any]
    optimizers: list[Any]
    schedulers: list[Any]
    loader: Any
    custom: list[Steps] = field(default_factory=list)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            for model, optimizer, scheduler in zip(self.models, self.optimizers, self.schedulers, strict=True):
                loss = model(torch.rand(2, 4)).square().mean()
                self.accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            for custom in self.custom:
                custom.number += 1
            self.accelerator.step += 1

    def state(self) -> dict[str, Any]:
        """A copy of all that a state holds, but random numbers."""
        unwrapped = [self.accelerator.unwrap_model(model) for model in self.models]
        found = {
            "models": [dict(model.state_dict()) for model in unwrapped],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "custom": [custom.number for custom in self.custom],
            "step": self.accelerator.step,
        }
        copied: dict[str, Any] = _copied(found)
        return copied


def training(
    folder: Path | None = None,
    *,
    models: int = 1,
    custom: int = 1,
    kind: type[Any] = Accelerator,
    loaders: DataLoaderConfiguration | None = None,
    log_with: Any = None,
    seed: int = 0,
    **project: Any,
) -> Training:
    """A training of which nothing was done. With a folder, Accelerate names its states, unless the options of the
    project say something else."""
    torch.manual_seed(seed)
    if folder is not None:
        project = {"automatic_checkpoint_naming": True, **project}
    accelerator = kind(
        cpu=True,
        project_config=ProjectConfiguration(None if folder is None else str(folder), **project),
        dataloader_config=loaders,
        log_with=log_with,
    )
    parts = [Tied() for _ in range(models)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in parts]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2) for optimizer in optimizers]
    data = DataLoader(TensorDataset(torch.arange(24.0)), batch_size=2, shuffle=True)
    prepared = accelerator.prepare(*parts, *optimizers, *schedulers, data)
    found = Training(
        accelerator,
        [*prepared[:models]],
        [*prepared[models : 2 * models]],
        [*prepared[2 * models : 3 * models]],
        prepared[-1],
        [Steps() for _ in range(custom)],
    )
    accelerator.register_for_checkpointing(*found.custom)
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(inner) for inner in value]
    return value


def random_numbers() -> list[float]:
    return [torch.rand(1).item(), random.random(), numpy.random.rand()]


def assert_goes_on(found: Training, at: dict[str, Any], numbers: list[float]) -> None:
    """It holds a state, and draws the random numbers that came behind it."""
    assert_equal(found.state(), at)
    assert random_numbers() == numbers


def begin_anew() -> None:
    """As in a new process: Accelerate keeps what it knows of the process for all Accelerators."""
    fastensor_accelerate.disable()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@contextmanager
def by(config: FastensorConfig | None) -> Iterator[None]:
    """Accelerators in the block save and load by Fastensor; by themselves if there are no options."""
    if config is None:
        yield
        return
    fastensor_accelerate.enable(config)
    try:
        yield
    finally:
        fastensor_accelerate.disable()


class Seen:
    """The files that Fastensor has saved and loaded."""

    def __init__(self) -> None:
        self.saved: list[str] = []
        self.loaded: list[str] = []

    def take(self, what: str) -> list[str]:
        """The names of those that were saved, or loaded, since the last call, in order."""
        found = [Path(path).name for path in getattr(self, what)]
        getattr(self, what).clear()
        return sorted(found)


def watch(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Record what goes through Fastensor, which does it as ever."""
    seen = Seen()

    def noting(function: Callable[..., Any], paths: list[str], at: int) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            paths.append(str(args[at]))
            return function(*args, **options)

        return note

    monkeypatch.setattr(fastensor, "save", noting(fastensor.save, seen.saved, 1))
    monkeypatch.setattr(fastensor.AsyncWriter, "save", noting(fastensor.AsyncWriter.save, seen.saved, 2))
    monkeypatch.setattr(fastensor, "load_with_report", noting(fastensor.load_with_report, seen.loaded, 0))
    return seen


def files_in(folder: Path) -> list[str]:
    """The paths of all files and empty directories below a folder, links followed."""
    found = []
    for directory, names, files in os.walk(folder, followlinks=True):
        empty = [f"{name}/" for name in names if not os.listdir(os.path.join(directory, name))]
        found += [os.path.relpath(directory, folder) + f"/{name}" for name in files + empty]
    found = [name.removeprefix("./") for name in found]
    return sorted(found)


def tensor_files(folder: Path) -> list[str]:
    return [Path(name).name for name in files_in(folder) if name.endswith(TENSOR_FILES)]
