"""Two ranks train on JPEG files that one data service decodes for both, once; its server is killed, training goes on.

The files are tiles of scikit-learn's two sample photos. The network tells the photos apart. Workers of the service
decode a file before it goes to the cache, and flip it at random for each use. In the middle of the second epoch, rank 0
kills the server with SIGKILL. The ranks find that out, start the service again, and go on with the batch that comes
next. Each rank counts how often each image has trained it: after N epochs, the ranks' counts add up to N for each.

    python examples/provisioned_training.py [--epochs 3] [--workers 2]
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from fastensor.provision import DataService
from fastensor.provision.metrics import table
from fastensor.provision.sources import File

WORLD = 2
TILE = 64
BATCH_SIZE = 16
CACHE_BYTES = 64 << 20
KILLED_IN_EPOCH = 1
Sample = dict[str, Any]


def build(folder: Path, stride: int) -> int:
    """Write the files, ``LABEL-NUMBER.jpg``; returns how many there are."""
    number = 0
    for label, photo in enumerate(load_sample_images().images):
        for top in range(0, photo.shape[0] - TILE, stride):
            for left in range(0, photo.shape[1] - TILE, stride):
                tile = Image.fromarray(photo[top : top + TILE, left : left + TILE])
                tile.save(folder / f"{label}-{number:06d}.jpg", quality=90)
                number += 1
    return number


def decode(file: File) -> Sample:
    """Done once for each file, before the cache."""
    label, number = Path(file.path).stem.split("-")
    with Image.open(io.BytesIO(file.data)) as image:
        pixels = np.array(image.convert("RGB"))
    return {"number": int(number), "label": int(label), "pixels": torch.from_numpy(pixels).permute(2, 0, 1)}


def flip(sample: Sample) -> Sample:
    """Done for each use. The service seeds torch for each sample and epoch."""
    pixels = sample["pixels"].float() / 255
    return {**sample, "pixels": pixels.flip(2) if torch.rand(()) < 0.5 else pixels}


def network() -> nn.Module:
    return nn.Sequential(
        nn.AvgPool2d(4), nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(16 * (TILE // 16) ** 2, 2),
    )  # fmt: skip


def train(rank: int, folder: Path, count: int, epochs: int, workers: int) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trained = torch.zeros(count, dtype=torch.int64)
    with DataService.start(
        folder / "images" / "*.jpg", cache_bytes=CACHE_BYTES, before_cache=decode, after_cache=flip, workers=workers
    ) as service:
        loader = service.loader(BATCH_SIZE, seed=0)
        for epoch in range(epochs):
            right, longest = 0, 0.0
            asked = time.perf_counter()
            for step, batch in enumerate(loader):
                longest = max(longest, time.perf_counter() - asked)
                logits = model(batch["pixels"])
                functional.cross_entropy(logits, batch["label"]).backward()
                optimizer.step()
                optimizer.zero_grad()
                right += int((logits.argmax(1) == batch["label"]).sum())
                trained[batch["number"]] += 1
                if (rank, epoch, step) == (0, KILLED_IN_EPOCH, len(loader) // 2):
                    os.kill(service.status()["pid"], signal.SIGKILL)
                    print(f"The server was killed by SIGKILL, after step {step + 1} of {len(loader)}.", flush=True)
                asked = time.perf_counter()
            report(rank, epoch, epochs, count, trained, right, longest, loader.stats())
    dist.destroy_process_group()


def report(
    rank: int, epoch: int, epochs: int, count: int, trained: Tensor, right: int, longest: float, found: Any
) -> None:
    """Print what the ranks have done, on rank 0; fail if the counts are wrong at the end."""
    together = trained.clone()
    dist.all_reduce(together)
    reports: list[Any] = [None] * WORLD
    dist.all_gather_object(reports, (right, longest, found))
    exact = bool((together == epoch + 1).all())
    if rank == 0:
        accuracy = sum(one[0] for one in reports) / count
        print(
            f"epoch {epoch}: accuracy {accuracy:.3f}, longest wait {max(one[1] for one in reports):.2f} s", flush=True
        )
        if epoch == epochs - 1:
            print(table({f"rank {number}": one[2].given for number, one in enumerate(reports)}))
            print(f"Each of the {count} images has trained the network "
                  f"{'exactly' if exact else 'NOT exactly'} {epochs} times.", flush=True)  # fmt: skip
    if not exact:
        raise SystemExit(1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stride", type=int, default=16, help="pixels between tiles: fewer, more images")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).absolute()
        (folder / "images").mkdir()
        count = build(folder / "images", options.stride)
        print(f"{count} images, {WORLD} ranks, {options.workers} workers of one service", flush=True)
        mp.start_processes(train, (folder, count, options.epochs, options.workers), nprocs=WORLD, start_method="spawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
