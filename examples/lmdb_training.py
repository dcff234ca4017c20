"""Train on images in LMDB, kill the training in the middle of an epoch, and resume with exactly the remaining images.

The database has scikit-learn's digits as PNG, and tiles of its two sample photos as JPEG. The network tells the ten
digits and the two photos apart. Its buffer counts how often each image has trained it, and is in its checkpoints. So
the counts of the finished network are those of the training that led to it: after N epochs, N for each image.

    python examples/lmdb_training.py [--epochs 2] [--workers 2]
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from fastensor.data import LmdbDataset, LmdbLoader, decoders
from fastensor_lightning import FastensorCheckpointIO, FastensorDataModule

CLASSES = 12
SIZE = 16
TILE = 64
BATCH_SIZE = 32
STEPS_PER_CHECKPOINT = 10
CHECKPOINTS_BEFORE_KILL = 3
_HEAD = struct.Struct("<IB")
"""Each value begins with the number of the image and its class. The file of the image follows."""

Sample = tuple[int, int, Tensor]
"""The number of an image, its class, and its grey values: float32, 1 × SIZE × SIZE, from 0 to 1."""


def images(stride: int) -> Iterator[tuple[int, bytes]]:
    """The class and the file of each image."""
    digits = load_digits()
    for image, digit in zip(digits.images, digits.target, strict=True):
        yield int(digit), encoded(np.uint8(image * 15.9), "PNG")
    for number, photo in enumerate(load_sample_images().images):
        for top in range(0, photo.shape[0] - TILE, stride):
            for left in range(0, photo.shape[1] - TILE, stride):
                yield 10 + number, encoded(photo[top : top + TILE, left : left + TILE], "JPEG")


def encoded(pixels: Any, format: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


def build(path: Path, stride: int) -> int:
    """Write the database; returns the number of images."""
    with lmdb.open(str(path), map_size=1 << 30) as env, env.begin(write=True) as txn:
        for number, (label, file) in enumerate(images(stride)):
            txn.put(b"%08d" % number, _HEAD.pack(number, label) + file)
    return number + 1


def decode(value: memoryview) -> Sample:
    number, label = _HEAD.unpack_from(value)
    image = decoders.Image("L")(value[_HEAD.size :]).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return number, label, torch.from_numpy(np.array(image, np.float32)).unsqueeze(0) / 255


class Classifier(LightningModule):
    """Counts how often each image has trained it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, CLASSES),
        )  # fmt: skip
        self.trained: Tensor
        self.register_buffer("trained", torch.zeros(count, dtype=torch.int64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        numbers, labels, pixels = batch
        self.trained[numbers] += 1
        logits = self.layers(pixels)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), on_step=False, on_epoch=True)
        return functional.cross_entropy(logits, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def train(folder: Path, count: int, epochs: int, workers: int) -> Classifier:
    """Train, and go on from the newest checkpoint, if there is one."""
    seed_everything(0, verbose=False)
    last = folder / "checkpoints" / "last.ckpt"
    model = Classifier(count)
    trainer = Trainer(
        plugins=[FastensorCheckpointIO()],
        callbacks=[ModelCheckpoint(last.parent, save_last=True, every_n_train_steps=STEPS_PER_CHECKPOINT)],
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = FastensorDataModule(folder / "images.lmdb", batch_size=BATCH_SIZE, decode=decode, num_workers=workers)
    trainer.fit(model, datamodule=data, ckpt_path=last if last.exists() else None)
    print(f"accuracy in the last epoch: {float(trainer.callback_metrics['accuracy']):.3f}", flush=True)
    return model


def train_until_killed(folder: Path, arguments: list[str]) -> None:
    """Train in a process of its own, and kill it with its workers when it has saved some checkpoints."""
    command = [sys.executable, __file__, "--train", str(folder), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    last = folder / "checkpoints" / "last.ckpt"
    seen: set[int] = set()
    while len(seen) < CHECKPOINTS_BEFORE_KILL:
        if process.poll() is not None:
            raise RuntimeError(f"the training ended by itself with status {process.returncode} before it was killed")
        if last.exists():
            seen.add(last.stat().st_mtime_ns)
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class StockDataset(Dataset[Sample]):
    """What is usually written for LMDB."""

    def __init__(self, path: Path, count: int) -> None:
        self.env = lmdb.open(str(path), readonly=True, lock=False, readahead=False)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Sample:
        with self.env.begin(buffers=True) as txn:
            return decode(txn.get(b"%08d" % number))


def seconds_of_epoch(path: Path, make_loader: Callable[[], Any]) -> float:
    """How long an epoch of reading and decoding takes when the page cache has nothing of the file."""
    with open(path / "data.mdb", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    for _ in make_loader():
        pass
    return time.perf_counter() - begin


def compare(path: Path, count: int) -> None:
    """Print how long cold epochs take, by py-lmdb and by Fastensor, in one process each."""
    env = StockDataset(path, count)
    stock = seconds_of_epoch(path, lambda: DataLoader(env, BATCH_SIZE, shuffle=True))
    ours = seconds_of_epoch(path, lambda: LmdbLoader(LmdbDataset(path, decode=decode), BATCH_SIZE))
    env.env.close()
    print(f"A cold epoch of reading and decoding, shuffled: py-lmdb {stock:.2f} s, Fastensor {ours:.2f} s.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stride", type=int, default=8, help="pixels between tiles of the photos: fewer, more images")
    parser.add_argument("--train", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    arguments = ["--epochs", str(options.epochs), "--workers", str(options.workers)]
    if options.train is not None:
        count = len(LmdbDataset(options.train / "images.lmdb"))
        train(options.train, count, options.epochs, options.workers)
        return 0
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        count = build(folder / "images.lmdb", options.stride)
        nbytes = (folder / "images.lmdb" / "data.mdb").stat().st_size
        print(f"{count} images in {nbytes / 1e6:.1f} MB of LMDB", flush=True)
        train_until_killed(folder, arguments)
        state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=False)
        before = state["state_dict"]["trained"]
        epoch, consumed = divmod(int(before.sum()), count)
        print(f"Killed by SIGKILL. The last checkpoint is of epoch {epoch}, after {consumed} of {count} images.")
        model = train(folder, count, options.epochs, options.workers)
        after = model.trained - before
        print(f"Resumed: trained with the {int((after == options.epochs - epoch).sum())} images that epoch {epoch} "
              f"lacked, instead of beginning it anew, and all later epochs.")  # fmt: skip
        exact = bool((model.trained == options.epochs).all())
        print(f"Each of the {count} images has trained the network "
              f"{'exactly' if exact else 'NOT exactly'} {options.epochs} times.")  # fmt: skip
        compare(folder / "images.lmdb", count)
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
