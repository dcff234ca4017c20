"""A dataset whose samples say what has happened to them, and functions for workers. They are imported by workers."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


class Numbers:
    """Sample ``i`` has the number ``i``, and some bytes of the value ``i``.

    Files in a folder say how samples are read: each read adds a line to ``reads``; ``fail-3`` lets sample 3 fail;
    ``kill-3`` kills whoever reads it, and is removed before.
    """

    def __init__(self, count: int, folder: Path, *, nbytes: int = 1000) -> None:
        self.fingerprint = f"numbers-{count}-{nbytes}"
        self._count = count
        self._folder = folder
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> dict[str, Any]:
        with (self._folder / "reads").open("a") as file:
            file.write(f"{position}\n")
        if (self._folder / f"fail-{position}").exists():
            raise ValueError(f"sample {position} is bad")
        if (self._folder / f"kill-{position}").exists():
            (self._folder / f"kill-{position}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"id": position, "bytes": np.full(self._nbytes, position % 251, np.uint8)}


class Killing(Numbers):
    """Sample 5 always kills whoever reads it."""

    def __getitem__(self, position: int) -> dict[str, Any]:
        if position == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(position)


def reads_in(folder: Path) -> Counter[int]:
    """How often each sample was read."""
    path = folder / "reads"
    return Counter(map(int, path.read_text().split())) if path.exists() else Counter()


def draw() -> float:
    """A number that depends on the generators of Python, NumPy and torch."""
    return random.random() + float(np.random.random()) + torch.rand(()).item()


def mark_before(sample: dict[str, Any]) -> dict[str, Any]:
    """Before the cache: add a random number."""
    return {**sample, "before": draw()}


def mark_after(sample: dict[str, Any]) -> dict[str, Any]:
    """After the cache: add a random number, and change the sample in place."""
    sample["bytes"] += 1
    return {**sample, "after": draw()}


LOG: Callable[[int], object] = print
"""Replaced by a script."""


def logged(sample: dict[str, Any]) -> dict[str, Any]:
    """Before the cache: write the number to the log of the script."""
    LOG(sample["id"])
    return sample


def ids_only(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Makes a batch."""
    return {"id": [sample["id"] for sample in samples], "process": os.getpid()}


def foreign_with_5(samples: list[dict[str, Any]]) -> Any:
    """Makes a batch; the one of sample 5 is of a class that processes which have not called this do not know."""
    numbers = [sample["id"] for sample in samples]
    if 5 not in numbers:
        return {"id": torch.tensor(numbers)}
    from provision.only_in_workers import Foreign

    return Foreign(numbers)


class Refuses:
    """A transform that refuses some samples.

    Args:
        name: of the transform.
        numbers: of the samples.
    """

    def __init__(self, name: str, *numbers: int) -> None:
        self._name, self._numbers = name, numbers

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] in self._numbers:
            raise ValueError(f"{sample['id']} is refused {self._name}")
        return sample


class Waits:
    """A transform that waits for a sample until somebody opens a named pipe for writing, while there is one."""

    def __init__(self, number: int, fifo: Path) -> None:
        self._number, self._fifo = number, fifo

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == self._number and self._fifo.exists():
            self._fifo.read_bytes()
        return sample


class Interrupts:
    """A transform that interrupts a process when it is first given a sample, and then takes its time."""

    def __init__(self, number: int, pid: int, interrupted: Path) -> None:
        self._number, self._pid, self._interrupted = number, pid, interrupted

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if sample["id"] == self._number and not self._interrupted.exists():
            self._interrupted.touch()
            os.kill(self._pid, signal.SIGINT)
        return sample
