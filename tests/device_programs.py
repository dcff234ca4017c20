"""Random programs that use a device with streams. They run on the model (``device_model.py``), and on a real GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from device_model import DeviceModel
from hypothesis import strategies as st

from fastensor import AsyncWriter, SaveDroppedError, SaveHandle
from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.offload import ActivationOffload, OffloadConfig
from fastensor.offload.hooks import StepHooks

Graph: TypeAlias = list[tuple[int, bool]]
"""Sizes of what is saved, in floats, and whether the program drops the tensor itself."""
Steps: TypeAlias = list[tuple[str, int]]
"""What a program does, step by step: changes a tensor, saves all, waits for a save, or drops one."""


class Computer(Protocol):
    """Queues what a device computes."""

    device: torch.device

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        """Queue that all of a tensor gets a value."""

    def compare(self, tensor: torch.Tensor, value: int) -> None:
        """Queue a comparison of all of a tensor with a value."""

    def finish(self) -> bool:
        """Wait until all is done that was queued. Returns whether all comparisons have held since the last call."""


class ModelComputer:
    """Computes on the model, in a block of :meth:`DeviceModel.queuing`."""

    device = torch.device("cpu")

    def __init__(self, model: DeviceModel) -> None:
        self._model = model
        self._right: list[bool] = []

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        def run() -> None:  # by NumPy: or else autograd would notice that the tensor has changed after it was saved
            tensor.numpy().fill(value)

        self._model.kernel(run)

    def compare(self, tensor: torch.Tensor, value: int) -> None:
        self._model.kernel(lambda: self._right.append(bool((tensor == value).all())))

    def finish(self) -> bool:
        self._model.finish_kernels()
        right, self._right = self._right, []
        return all(right)


def offload_config(folder: Path, target: Any, *, blocks: int, ahead: int) -> OffloadConfig:
    """All leaves, to a folder or to host memory, and so many blocks at a time leave and come back."""
    return OffloadConfig(
        schedule="all", min_bytes=1, directories=(str(folder),), target=target,
        dram_bytes=8 * BUFFER_NBYTES, staging_bytes=blocks * BUFFER_NBYTES, prefetch_bytes=ahead * BUFFER_NBYTES,
    )  # fmt: skip


def graphs() -> st.SearchStrategy[Graph]:
    """Graphs of a forward pass."""
    size = st.sampled_from([1, 1000, BUFFER_NBYTES // 4, BUFFER_NBYTES // 4 + 1, 3 * BUFFER_NBYTES // 4 - 5])
    return st.lists(st.tuples(size, st.booleans()), min_size=1, max_size=8)


def run_pass(
    computer: Computer, offload: ActivationOffload, graph: Graph, generator: random.Random, number: int
) -> None:
    """One forward pass, and what its backward pass may ask for. The device computes what is saved, and looks at what
    comes back, in its own time."""
    hooks, packed, kept = StepHooks(offload._engine), list[Any](), []
    for place, (size, is_dropped) in enumerate(graph):
        tensor = torch.empty(size, device=computer.device)
        computer.fill(tensor, number * 100 + place)
        packed.append(hooks.pack(tensor))
        if not is_dropped:
            kept.append(tensor)
        del tensor
    for size, _ in graph:  # what has been freed holds other values, if it is used again
        computer.fill(torch.empty(size, device=computer.device), -1)
    order = [*range(len(graph))] * generator.choice([1, 2])
    generator.shuffle(order)
    for place in order[: generator.randint(0, len(order))]:
        if packed[place] is None:
            continue
        found = hooks.unpack(packed[place])
        assert found.shape == (graph[place][0],)
        computer.compare(found, number * 100 + place)
        del found
        if generator.random() < 0.3:
            packed[place] = None
    assert computer.finish()


def programs() -> st.SearchStrategy[Steps]:
    """Programs that save."""
    step = st.tuples(st.sampled_from(["change", "change", "save", "save", "wait", "cancel"]), st.integers(0, 3))
    return st.lists(step, min_size=1, max_size=14)


def run_saves(
    computer: Computer, writer: AsyncWriter, steps: Steps, sizes: list[int], folder: Path
) -> Callable[[], None]:
    """Run a program with tensors of so many floats. Returns what waits for the saves, and compares each file with what
    was computed when it was saved."""
    tensors = [torch.zeros(size, device=computer.device) for size in sizes]
    values, saves = [0] * len(sizes), []
    for number, (what, which) in enumerate(steps):
        which %= len(sizes)
        if what == "change":
            values[which] = number + 1
            computer.fill(tensors[which], number + 1)
        elif what == "save":
            saves.append((writer.save(tensors, folder / str(number)), folder / str(number), list(values)))
        elif saves:
            handle = saves[which % len(saves)][0]
            _wait(handle) if what == "wait" else handle.cancel()
    return partial(_check_saves, saves, sizes)


def _check_saves(saves: list[tuple[SaveHandle, Path, list[int]]], sizes: list[int]) -> None:
    for handle, path, expected in saves:
        if _wait(handle):
            assert [one.unique().tolist() for one in torch.load(path, map_location="cpu")] == [
                [value] if size else [] for value, size in zip(expected, sizes, strict=True)
            ]


def _wait(handle: SaveHandle) -> bool:
    """Whether the file is there."""
    try:
        handle.result()
    except SaveDroppedError:
        return False
    return True
