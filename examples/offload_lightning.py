"""Train a small vision transformer on scikit-learn's digits twice: as usual, and with activations on an SSD.

Nothing changes but the Trainer's callbacks. The loss of every step, and every weight at the end, are the same to the
last bit; what was moved, the memory that was gained, and the time that it cost are shown. Here all that is larger than
64 KiB is offloaded, and little may be on the way at a time, because the model is small: in so short a step, the time
counts for more than in a long one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from resume_after_kill import DigitTransformer, digit_loaders
from torch import Tensor

from fastensor_lightning import SSDActivationOffload


class Steps(Callback):
    """Keeps the loss and the time of every training step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: dict[str, Tensor], *args: Any) -> None:
        self.losses.append(outputs["loss"].item())
        self.seconds.append(time.perf_counter() - self._started)


def train(folder: str, epochs: int, *callbacks: Callback) -> tuple[Steps, dict[str, Tensor]]:
    """The loss and the time of each step, and the weights at the end."""
    seed_everything(0, verbose=False)
    model, steps = DigitTransformer(), Steps()
    trainer = Trainer(
        callbacks=[steps, *callbacks],
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, *digit_loaders())
    return steps, model.state_dict()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--directory", help="on the SSD; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        usual, weights = train(folder, options.epochs)
        offload = SSDActivationOffload(
            folder, schedule="all", min_bytes="64KiB", staging_bytes="2MiB", prefetch_bytes="2MiB"
        )
        offloaded, same_weights = train(folder, options.epochs, offload)
    before, after = usual.losses, offloaded.losses
    print(f"{len(before)} steps; the loss went from {before[0]:.4f} to {before[-1]:.4f}, offloaded to {after[-1]:.4f}")
    print(offload.statistics)
    print(f"A step took {1e3 * median(usual.seconds):.1f} ms, offloaded {1e3 * median(offloaded.seconds):.1f} ms.")
    equal = before == after and all(torch.equal(weights[name], same_weights[name]) for name in weights)
    print("The losses and the weights are equal to the last bit." if equal else "The losses or the weights DIFFER.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
