"""Train a small vision transformer on scikit-learn's digits twice: as usual, and with activations on an SSD.

Nothing changes but the Trainer's callbacks. The loss of every step, and every weight at the end, are the same to the
last bit; what was moved is shown. Here all that is larger than 64 KiB is offloaded, because the model is small.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from resume_after_kill import DigitTransformer, digit_loaders
from torch import Tensor

from fastensor.offload import OffloadConfig
from fastensor_lightning import SSDActivationOffload


class Losses(Callback):
    """Keeps the loss of every training step."""

    def __init__(self) -> None:
        self.all: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: dict[str, Tensor], *args: Any) -> None:
        self.all.append(outputs["loss"].item())


def train(folder: str, epochs: int, *callbacks: Callback) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each step, and the weights at the end."""
    seed_everything(0, verbose=False)
    model, losses = DigitTransformer(), Losses()
    trainer = Trainer(
        callbacks=[losses, *callbacks],
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, *digit_loaders())
    return losses.all, model.state_dict()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--directory", help="on the SSD; default: the system's temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        usual, weights = train(folder, options.epochs)
        offload = SSDActivationOffload(OffloadConfig(schedule="all", min_bytes=64 << 10))
        offloaded, same_weights = train(folder, options.epochs, offload)
    print(f"{len(usual)} steps; the loss went from {usual[0]:.4f} to {usual[-1]:.4f}, offloaded to {offloaded[-1]:.4f}")
    print(offload.statistics)
    equal = usual == offloaded and all(torch.equal(weights[name], same_weights[name]) for name in weights)
    print("The losses and the weights are equal to the last bit." if equal else "The losses or the weights DIFFER.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
