"""Train a small network on scikit-learn's digits with Accelerate, and go on where an earlier run has ended.

Nothing here knows Fastensor. Run it without and with the flag: the states have the same files, and either run goes on
from the states of the other.

    accelerate launch examples/train_accelerate.py
    fastensor-accelerate launch --fastensor examples/train_accelerate.py
    fastensor-accelerate launch --fastensor_async examples/train_accelerate.py
    fastensor-accelerate launch --fastensor_offload examples/train_accelerate.py

``--kill-after 3`` ends the run by SIGKILL after the third ``save_state``, as a node failure would. The next run
resumes. Its weights are those of a run that was never killed, to the last bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import zlib
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

Loader = DataLoader[tuple[torch.Tensor, ...]]


class Progress:
    """How many epochs are done. Accelerate saves and loads it with the state."""

    def __init__(self) -> None:
        self.epochs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


def digit_loaders() -> tuple[Loader, Loader]:
    """1437 training and 360 validation images of 8 × 8 pixels, values 0 to 1."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    digits = torch.tensor(data.target)
    train, validation = train_test_split(range(len(digits)), test_size=360, random_state=0, stratify=digits)
    return (
        DataLoader(TensorDataset(images[train], digits[train]), batch_size=64, shuffle=True),
        DataLoader(TensorDataset(images[validation], digits[validation]), batch_size=360),
    )


def new_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GELU(), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128), nn.GELU(), nn.Linear(128, 10),
    )  # fmt: skip


def accuracy(accelerator: Accelerator, model: nn.Module, loader: Loader) -> float:
    model.eval()
    correct = []
    with torch.no_grad():
        for images, digits in loader:
            found, wanted = accelerator.gather_for_metrics((model(images).argmax(dim=1), digits))
            correct.append(found == wanted)
    return torch.cat(correct).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=Path("digits"), help="the folder of the states")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--kill-after", type=int, metavar="STATES", help="end by SIGKILL after so many saved states")
    options = parser.parse_args()
    naming = ProjectConfiguration(str(options.project), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=naming)
    set_seed(0)
    training, validation = digit_loaders()
    model, progress = new_model(), Progress()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=options.epochs * len(training))
    model, optimizer, schedule, training, validation = accelerator.prepare(
        model, optimizer, schedule, training, validation
    )
    accelerator.register_for_checkpointing(progress)
    if any((options.project / "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()  # the newest one
        accelerator.project_configuration.iteration = progress.epochs  # the number of the next one
        accelerator.print(f"Resumed after epoch {progress.epochs}.")
    saved = 0
    while progress.epochs < options.epochs:
        model.train()
        for images, digits in training:
            loss = functional.cross_entropy(model(images), digits)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        progress.epochs += 1
        accelerator.save_state()
        saved += 1
        if saved == options.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
    found = accuracy(accelerator, model, validation)
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in accelerator.get_state_dict(model).values())
    accelerator.print(f"Validation accuracy {found:.1%}, CRC32 of the weights {zlib.crc32(weights):08x}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
