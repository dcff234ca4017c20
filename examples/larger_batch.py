"""The memory wall: the largest batch that a model of 48 blocks trains with in limited memory, with and without an SSD.

Each attempt is a process of its own, whose memory is limited (``RLIMIT_DATA`` on the CPU,
``set_per_process_memory_fraction`` on a GPU) to what it has when training begins and ``--room`` more. The room also
holds gradients and the state of the optimizer. Batches are doubled until training fails, and then bisected. At the
largest batch with offloading, the losses of a run without any limit are the same to the last bit.

By plain PyTorch, by a Trainer of Lightning with the callback, or by Accelerate with the options of its flag:

    python examples/larger_batch.py [--by plain | lightning | accelerate]
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import re
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastensor.offload import ActivationOffload, OffloadConfig, OffloadStatistics

MIB = 1 << 20
STEPS = 2
OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory|could not create a primitive|bad_alloc", re.IGNORECASE)
"""What torch says, oneDNN, and the library of C++."""


class Block(nn.Module):
    """Saves about 40 × ``width`` bytes for each row of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@dataclasses.dataclass(frozen=True)
class Task:
    """One attempt."""

    by: str
    batch: int
    offloads: bool
    room: int | None
    """Bytes; None for no limit."""
    blocks: int
    width: int
    device: str
    directory: str

    def config(self) -> OffloadConfig:
        """The room is for activations; what is on its way to the SSD and back may take a quarter of it."""
        share = (self.room or 1 << 30) // 8
        return OffloadConfig(directories=(self.directory,), staging_bytes=share, prefetch_bytes=share)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.width) for _ in range(self.blocks))).to(self.device)

    def rows(self) -> Tensor:
        return torch.randn(self.batch, self.width, generator=torch.Generator().manual_seed(1))

    def limit_memory(self) -> None:
        """Allow what is in use, and the room."""
        if self.room is None:
            return
        if self.device.startswith("cuda"):
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + self.room) / total)
            return
        status = Path("/proc/self/status").read_text()
        (used,) = re.findall(r"^VmData:\s+(\d+) kB", status, re.M)
        resource.setrlimit(resource.RLIMIT_DATA, ((int(used) << 10) + self.room, resource.RLIM_INFINITY))


Outcome = tuple[list[float], OffloadStatistics | None]
"""The loss of each step, and what was offloaded."""


def train_plain(task: Task) -> Outcome:
    """A loop of PyTorch, which needs one ``with``."""
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    rows = task.rows().to(task.device)
    offload = ActivationOffload(task.config()) if task.offloads else None
    if offload is not None:
        offload.attach(model)
    task.limit_memory()
    losses = []
    for _ in range(STEPS):
        step: AbstractContextManager[Any] = nullcontext() if offload is None else offload.step()
        with step:
            loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, None if offload is None else offload.statistics()


def train_lightning(task: Task) -> Outcome:
    """A Trainer, which needs one callback."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from fastensor_lightning import SSDActivationOffload

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = task.model()
            self.losses: list[float] = []

        def training_step(self, rows: Tensor, index: int) -> Tensor:
            loss = self.model(rows).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    class Limit(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            task.limit_memory()

    offload = SSDActivationOffload(task.config())
    trainer = Trainer(
        callbacks=[Limit(), *([offload] if task.offloads else [])],
        max_steps=STEPS,
        accelerator="gpu" if task.device.startswith("cuda") else "cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=task.directory,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader([task.rows()] * STEPS, batch_size=None))
    return module.losses, offload.statistics if task.offloads else None


def train_accelerate(task: Task) -> Outcome:
    """A script of Accelerate, unchanged: ``fastensor-accelerate launch --fastensor_offload`` enables the options."""
    from accelerate import Accelerator

    import fastensor_accelerate

    config = task.config()
    if task.offloads:
        options = fastensor_accelerate.FastensorConfig(
            offload=True,
            offload_directories=config.directories,
            offload_staging_bytes=config.staging_bytes,
            offload_prefetch_bytes=config.prefetch_bytes,
        )
        fastensor_accelerate.enable(options)
    accelerator = Accelerator(cpu=not task.device.startswith("cuda"))
    model = task.model()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9))
    rows = task.rows().to(accelerator.device)
    task.limit_memory()
    losses = []
    for _ in range(STEPS):
        loss = prepared(rows).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, None


TRAINERS: dict[str, Callable[[Task], Outcome]] = {
    "plain": train_plain,
    "lightning": train_lightning,
    "accelerate": train_accelerate,
}


def attempt(task: Task) -> Outcome | str:
    """Train in this process. If the memory is not enough: what failed."""
    try:
        return TRAINERS[task.by](task)
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
            raise
        return str(error).partition("\n")[0] or type(error).__name__


def in_its_own_process(task: Task) -> Outcome | str:
    """:func:`attempt`. The process may also die: libraries end it where they cannot start a thread, say."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(attempt, task).result()
        except BrokenProcessPool:
            return "the process has died"


def largest(task: Task, step: float) -> tuple[int, str]:
    """The largest batch that trains, to within a factor of ``step``; and what failed with the smallest one that does
    not."""
    good, bad, why = 0, 0, ""
    batch = task.batch
    while not bad or bad > max(good * step, good + 1):
        trained = in_its_own_process(dataclasses.replace(task, batch=batch))
        if isinstance(trained, str):
            bad, why = batch, trained
        else:
            good = batch
        print(f"  {said(task)}, a batch of {batch} rows {'is too large' if bad == batch else 'trains'}", flush=True)
        batch = (good + bad) // 2 if bad else 2 * batch
    return good, why


def trained_again(task: Task) -> Outcome:
    """The outcome of a batch that has trained before.

    Raises:
        SystemExit: now it does not.
    """
    outcome = in_its_own_process(task)
    if isinstance(outcome, str):
        room = "without a limit" if task.room is None else f"in {task.room // MIB} MiB again"
        sys.exit(f"A batch of {task.batch} rows does not train {said(task)} {room}: {outcome}")
    return outcome


def said(task: Task) -> str:
    return "with offloading" if task.offloads else "without offloading"


def too_small(task: Task, why: str) -> str:
    """What to say if not even one row trains, and what to try."""
    gradients = sum(parameter.nbytes for parameter in task.model().parameters()) / MIB
    room = max(2 * (task.room or 0) // MIB, math.ceil(3 * gradients))
    return (
        f"Not even one row trains {said(task)} in this room ({why}). It has to hold the gradients ({gradients:.0f} "
        f"MiB), as much for the optimizer, and some of the largest activations: try --room {room}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=TRAINERS, default="plain")
    parser.add_argument("--room", type=int, default=512, help="MiB for gradients, the optimizer and activations")
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", help="on the SSD; default: the system's temporary folder")
    parser.add_argument("--step", type=float, default=1.1, help="how exactly the largest batch is found")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        task = Task(
            options.by, 256, False, options.room * MIB, options.blocks, options.width, options.device, folder
        )  # fmt: skip
        without, _ = largest(task, options.step)
        offloading = dataclasses.replace(task, offloads=True, batch=max(2 * without, 1))
        most, why = largest(offloading, options.step)
        if not most:
            sys.exit(too_small(offloading, why))
        trained = trained_again(dataclasses.replace(offloading, batch=most))
        unlimited = trained_again(dataclasses.replace(task, batch=most, room=None))
    times = f": {most / without:.1f} ×" if without else ""
    print(f"largest batch in {options.room} MiB: {without} rows without offloading, {most} with{times}")
    if trained[1] is not None:
        print(trained[1])
    equal = trained[0] == unlimited[0]
    print("The losses are equal to the last bit to those without a limit." if equal else "The losses DIFFER.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
