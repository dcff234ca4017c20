"""Train a small vision transformer on scikit-learn's digits, kill it in mid-training, resume, and finish.

The first run is ended by SIGKILL, as by a node failure. The second run finds the newest checkpoint, goes on from
there and reaches more than 95 % validation accuracy; the plugin says what its checkpoints have cost. Then plain
``torch.load`` reads the result, and the first ten saves of a large state, and loads of it, are timed beside those of
``torch.save`` and ``torch.load``. Each load is the first of a process of its own, as when a run resumes. Run by ``make
demo``.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import fastensor
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO

EPOCHS = 40
KILL_IN_EPOCH = 10
REQUIRED_ACCURACY = 0.95
IMAGE, PATCH, CLASSES = 8, 2, 10
SAVES, LOADS = 10, 5
LOADER = """
import os, sys, time
import torch
from fastensor import load
import fastensor.backends.direct, fastensor.backends.numpy, fastensor.backends.ring_reader
import fastensor.checkpoint.containers.torch_file, fastensor.checkpoint.reading.torch_errors  # as a first load does

for line in sys.stdin:
    tool, path = line.rstrip("\\n").split(maxsplit=1)
    if not os.fork():
        started = time.perf_counter()
        state = {"fastensor": load, "torch": torch.load}[tool](path)
        print(time.perf_counter() - started, flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit("a load has failed")
"""
"""Times loads, each in a fresh process that has only imported what it needs. A later load in the same process may get
memory that another one has left there, and saves most of its time: the kernel has no pages to clear."""


class DigitTransformer(LightningModule):
    """A vision transformer over 2 × 2 patches of 8 × 8 grey images, values 0 to 1."""

    def __init__(self, width: int = 96, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        tokens = (IMAGE // PATCH) ** 2
        self.patches = nn.Conv2d(1, width, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.encoder(tokens).mean(dim=1))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, digits = batch
        return functional.cross_entropy(self(images), digits)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, digits = batch
        correct = (self(images).argmax(dim=1) == digits).float().mean()
        self.log("accuracy", correct, on_epoch=True, batch_size=len(digits))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def digit_loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """1437 training and 360 validation images of scikit-learn's digits."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(data.target)
    train, validation = train_test_split(range(len(digits)), test_size=360, random_state=0, stratify=digits)
    return (
        DataLoader(TensorDataset(images[train], digits[train]), batch_size=64, shuffle=True),
        DataLoader(TensorDataset(images[validation], digits[validation]), batch_size=360),
    )


def train(folder: Path, resume_from: str | None, epochs: int) -> float:
    """Train up to ``epochs`` epochs with a checkpoint each; returns the validation accuracy."""
    seed_everything(0, verbose=False)
    saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_last=True)
    trainer = Trainer(
        plugins=[FastensorCheckpointIO()],
        callbacks=[saving, CheckpointMonitor()],
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    training, validation = digit_loaders()
    trainer.fit(DigitTransformer(), training, validation, ckpt_path=resume_from)
    return float(trainer.callback_metrics["accuracy"])


def train_until_killed(folder: Path, epochs: int, kill_in_epoch: int) -> Path:
    """Train in a process of its own, and kill it in the epoch after ``kill_in_epoch`` checkpoints were seen."""
    command = [sys.executable, __file__, "--train", str(folder), "--epochs", str(epochs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    last = folder / "last.ckpt"
    saves, seen = 0, None
    while saves < kill_in_epoch:
        if process.poll() is not None:
            raise RuntimeError(f"training ended by itself with status {process.returncode} before it was killed")
        found = os.stat(last).st_ino if last.exists() else None
        saves, seen = saves + (found != seen), found
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        raise RuntimeError(f"the training process ended with {process.returncode}, not by SIGKILL")
    return last


def compare(folder: Path, nbytes: int) -> None:
    """Print tables: saves and loads of random tensors, in turn with torch's, by default, first use included.

    Saves share this process, as those of one training do; each load has its own, as each resume does.
    """
    state = {f"layer{i}.weight": torch.randn(nbytes // 16 // 4) for i in range(16)}
    ours, theirs = folder / "fastensor.ckpt", folder / "torch.ckpt"

    def torch_save() -> None:
        temporary = theirs.with_suffix(".tmp")
        torch.save(state, temporary)
        sync(temporary)
        temporary.rename(theirs)
        sync(folder)

    saves = {
        "fastensor": lambda: seconds_of(lambda: fastensor.save(state, ours)),
        "torch": lambda: seconds_of(torch_save),
    }
    print(f"\nSaves of {nbytes >> 20} MiB in 16 tensors, file and folder synced: the first {SAVES}, in seconds")
    show(in_turn(saves, SAVES))
    with subprocess.Popen(
        [sys.executable, "-c", LOADER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as loader:
        compare_loads(loader, ours, theirs)


def compare_loads(loader: subprocess.Popen[str], ours: Path, theirs: Path) -> None:
    loads = {
        "fastensor": lambda: load_alone(loader, "fastensor", ours),
        "torch": lambda: load_alone(loader, "torch", theirs),
    }
    for title, resident in (("from the disk", False), ("from the page cache", True)):

        def prepare(resident: bool = resident) -> None:
            for path in (ours, theirs):
                set_residency(path, resident=resident)

        print(f"Loads {title}, ours compared with its checksums: {LOADS}, each the first of a new process, in seconds")
        show(in_turn(loads, LOADS, prepare))


def seconds_of(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def load_alone(loader: subprocess.Popen[str], tool: str, path: Path) -> float:
    """The seconds of one load in a process of its own."""
    assert loader.stdin is not None
    assert loader.stdout is not None
    print(tool, path, file=loader.stdin, flush=True)
    seconds = loader.stdout.readline()
    if not seconds:
        raise RuntimeError(f"{path} could not be loaded by {tool}: see above")
    return float(seconds)


def in_turn(
    contenders: dict[str, Callable[[], float]], rounds: int, prepare: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """The seconds that each contender says it has taken in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        prepare()
        for name, run in contenders.items():
            seconds[name].append(run())
    return seconds


def show(seconds: dict[str, list[float]]) -> None:
    for name, all_seconds in seconds.items():
        print(f"  {name:<10}{''.join(f'{one:7.3f}' for one in all_seconds)}   median {median(all_seconds):.3f}")
    ours, theirs = (median(all_seconds) for all_seconds in seconds.values())
    print(f"  {theirs / ours:.1f} × as fast as torch, by the medians")


def quieten_lightning() -> None:
    """Let Lightning's log say nothing but what Fastensor says there, without the hint to tune a folder that goes."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        log = logging.getLogger(f"{package}.utilities.rank_zero")
        log.addFilter(lambda record: record.getMessage().startswith("fastensor: "))
        log.addFilter(lambda record: "`fastensor tune " not in record.getMessage())
    logging.getLogger("lightning.fabric.utilities.registry").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def set_residency(path: Path, *, resident: bool) -> None:
    """Bring a file into the page cache or drop it from there."""
    with path.open("rb") as file:
        if resident:
            while file.read(1 << 20):
                pass
        else:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, metavar="FOLDER", help="only train, as the process to be killed does")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--kill-in-epoch", type=int, default=KILL_IN_EPOCH)
    parser.add_argument("--compare-mib", type=int, default=256)
    parser.add_argument("--required-accuracy", type=float, default=REQUIRED_ACCURACY)
    options = parser.parse_args()
    quieten_lightning()
    if options.train:
        train(options.train, None, options.epochs)
        return
    with tempfile.TemporaryDirectory(prefix="fastensor-demo-", dir=Path.cwd()) as name:
        folder = Path(name)
        last = train_until_killed(folder, options.epochs, options.kill_in_epoch)
        checkpoint = fastensor.load(last)
        print(f"Killed by SIGKILL; {last.name} is whole: epoch {checkpoint['epoch']}, verified.")
        accuracy = train(folder, str(last), options.epochs)
        print(f"Resumed from it and trained to epoch {options.epochs}: validation accuracy {accuracy:.1%}")
        plain = torch.load(last, weights_only=True)
        print(f"Plain torch.load reads the result: {sorted(plain)[:4]}, ..., step {plain['global_step']}")
        compare(folder, options.compare_mib << 20)
        if accuracy <= options.required_accuracy:
            sys.exit(f"The accuracy is not above {options.required_accuracy:.0%}.")


if __name__ == "__main__":
    main()
