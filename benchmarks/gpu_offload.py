"""A training step of a transformer like Llama, in bf16: without offload, recomputed, and offloaded by each way.

A part of ``make gpu``. Contenders take turns in one process, since CUDA takes long to begin; what one of them leaves in
memory is freed before the next one. Each of them makes some steps to warm up, in which schedules are planned, then some
that are measured; *memory* is how far that of the device grows at most in these, gradients included (on a CPU: that of
the process).
Where attention's backward pass is not deterministic, gradients are not equal from run to run without offloading either:
how far they are off is compared with how far those of a second run without offloading are. Nothing begins after the
time that is given.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_results import Row, Rows
from measuring import describe_gpu_machine, peak_of, synchronize
from offload_contenders import Streamed
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fastensor.offload import ActivationOffload, OffloadConfig

NONE, AGAIN, CHECKPOINTING = "nothing offloaded", "nothing offloaded, again", "gradient checkpointing"
STREAMED, SAVE_ON_CPU = "torchtune's kind (Streamed)", "save_on_cpu"
WARM_UP = 3
"""Steps that are not measured: offloads examine the first ones."""
MOST_OFF = 2.0
"""How far gradients may be off, relative to those of a second run without offloading."""
LEAST_OFF = 1e-6


@dataclass(frozen=True, slots=True)
class Size:
    """The dimensions of the model, and of its batch."""

    blocks: int = 16
    width: int = 2048
    head: int = 128
    tokens: int = 2048
    batch: int = 8
    words: int = 8000
    min_bytes: int = 256 << 10
    """Smaller tensors stay with each contender."""
    dram_bytes: int = 48 << 30


TINY = Size(blocks=2, width=64, head=16, tokens=32, batch=2, words=50, min_bytes=1 << 10, dram_bytes=64 << 20)


class Block(nn.Module):
    """One of Llama's."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, inner = size.width, int(size.width * 2.75)
        self.head = size.head
        self.before_attention, self.before_inner = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        normed = self.before_attention(x)
        query, key, value = (
            part(normed).view(batch, tokens, -1, self.head).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        normed = self.before_inner(x)
        found: Tensor = x + self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return found


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.out = nn.Linear(size.width, size.words, bias=False)
        self.checkpoints = False
        """Whether each block saves its input only."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        found: Tensor = self.out(x).flatten(0, 1)
        return found


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to train."""

    name: str
    hooks: Callable[[], AbstractContextManager[Callable[[], AbstractContextManager[Any]]]] = lambda: nullcontext(
        nullcontext
    )
    """Gives what each forward pass runs in."""
    checkpoints: bool = False


def contenders(size: Size, device: torch.device, folder: Path) -> list[Contender]:
    """The contenders in the order in which they run: what is cut off at the end is worth least."""

    @contextmanager
    def offloading(**options: Any) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
        config = OffloadConfig(directories=(str(folder),), min_bytes=size.min_bytes, **options)
        with ActivationOffload(config) as offload:
            yield offload.step

    def ours(name: str, *, checkpoints: bool = False, **options: Any) -> Contender:
        return Contender(f"fastensor, {name}", lambda: offloading(**options), checkpoints)

    def save_on_cpu() -> AbstractContextManager[Any]:
        return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")

    to_memory: dict[str, Any] = {"target": "dram", "dram_bytes": size.dram_bytes}
    return [
        Contender(NONE),
        Contender(AGAIN),
        Contender(CHECKPOINTING, checkpoints=True),
        ours("auto"),
        ours("all to host memory", schedule="all", **to_memory),
        Contender(STREAMED, lambda: nullcontext(Streamed(size.min_bytes, device).step)),
        ours("inputs of checkpointed blocks to host memory", checkpoints=True, schedule="all", **to_memory),
        Contender(SAVE_ON_CPU, lambda: nullcontext(save_on_cpu)),
        ours("half to host memory", schedule=0.5, **to_memory),
        ours("inputs of checkpointed blocks to the SSD", checkpoints=True, schedule="all"),
        ours("a fifth to the SSD", schedule=0.8),
        ours("half to the SSD", schedule=0.5),
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """The measured steps of a contender."""

    contender: str
    seconds: list[float]
    memory_nbytes: int
    loss: float
    gradients_off: float
    """How far they are from those of the first contender, relative to how long these are."""


class Training:
    """A model with random weights, its batch, and the gradients that it has without offloading."""

    def __init__(self, size: Size, device: torch.device) -> None:
        torch.manual_seed(0)
        self._device = device
        self._net = Model(size).to(device, torch.bfloat16)
        self._x = torch.randn(size.batch, size.tokens, size.width, device=device, dtype=torch.bfloat16) * 0.02
        self._words = torch.randint(0, size.words, (size.batch * size.tokens,), device=device)
        self._expected: list[Tensor] = []

    def run(self, contender: Contender, steps: int) -> Run:
        """Warm up, and measure."""
        self._free()
        self._net.checkpoints = contender.checkpoints
        with contender.hooks() as hooks:
            for _ in range(WARM_UP):
                self._step(hooks)
            self._net.zero_grad(set_to_none=True)
            with peak_of(self._device) as peak:
                taken = [self._step(hooks) for _ in range(steps)]
        seconds, losses = zip(*taken, strict=True)
        return Run(contender.name, [*seconds], peak(), losses[-1], self._gradients_off())

    def _step(self, hooks: Callable[[], AbstractContextManager[Any]]) -> tuple[float, float]:
        self._net.zero_grad(set_to_none=True)
        synchronize(self._device)
        started = time.perf_counter()
        with hooks():
            loss = functional.cross_entropy(self._net(self._x), self._words)
        loss.backward()
        synchronize(self._device)
        return time.perf_counter() - started, loss.item()

    def _free(self) -> None:
        """Let nothing stay in caches that was another contender's."""
        self._net.zero_grad(set_to_none=True)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            # Pinned memory; torch before 2.10 or so has no public name for it.
            getattr(torch.accelerator, "empty_host_cache", lambda: None)()

    def _gradients_off(self) -> float:
        found = [one.grad for one in self._net.parameters() if one.grad is not None]
        self._expected = self._expected or [one.cpu() for one in found]
        off = length = 0.0
        for one, other in zip(found, self._expected, strict=True):
            expected = other.to(self._device)
            off += float((one - expected).float().square().sum())
            length += float(expected.float().square().sum())
        return float((off / length) ** 0.5)


def row_of(run: Run, before: list[Run]) -> Row:
    """A line of the table, by the runs before it, of which the first one offloads nothing.

    >>> again = Run("again", [2.0], 5 << 30, 1.0, 0.1)
    >>> row_of(Run("x", [3.0, 1.0, 9.0], 1 << 30, 1.0, 0.3), [Run("none", [2.0], 4 << 30, 1.0, 0.0), again])
    Row(what='x', found='3.000 s (1.50 × nothing), 1.00 GiB; gradients are off by 0.3', holds=False)
    """
    seconds = median(run.seconds)
    found = f"{seconds:.3f} s ({seconds / median((before or [run])[0].seconds):.2f} × nothing)"
    allowed = max(MOST_OFF * before[1].gradients_off, LEAST_OFF) if len(before) > 1 else None
    holds = None if allowed is None else run.gradients_off <= allowed
    found += f", {run.memory_nbytes / 2**30:.2f} GiB"
    return Row(
        run.contender, found + ("" if holds is not False else f"; gradients are off by {run.gradients_off:g}"), holds
    )


def measure(options: argparse.Namespace, rows: Rows, folder: Path, end: float) -> None:
    """All contenders, as long as there is time."""
    device, size = torch.device(options.device), TINY if options.tiny else Size()
    training, runs = Training(size, device), list[Run]()
    for contender in contenders(size, device, folder):
        if time.monotonic() > end:
            rows.add(Row(contender.name, "not begun: the time was up"))
            continue
        rows.begin(contender.name)
        try:
            run = training.run(contender, options.steps)
        except (RuntimeError, OSError, ValueError) as error:  # the others may do better
            rows.add(Row(contender.name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", holds=False))
            continue
        rows.details = [*map(asdict, [*runs, run])]
        rows.add(row_of(run, runs))
        runs.append(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for trying the program itself")
    parser.add_argument("--steps", type=int, default=3, help="that are measured")
    parser.add_argument("--seconds", type=float, default=120.0, help="no contender begins after that")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu-offload.json"))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    rows = Rows.at(options.output)
    rows.machine = describe_gpu_machine(options.folder, options.device)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(options, rows, Path(folder), end)
    rows.end()
    return int(any(row.holds is False for row in rows.rows))


if __name__ == "__main__":
    sys.exit(main())
