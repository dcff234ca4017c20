"""What offloading activations costs and saves: training steps on the CPU, with and without.

Run by ``make bench``, or alone. Each round trains each model with each contender, in a process of its own and in turns:
some steps to warm up, in which schedules are planned, then some that are measured, of the same data. *Blocked* is the
time that forward and backward passes spend in the hooks that autograd calls; *CPU* is what all threads of the process
take of the processors; *memory* is how far the process has grown at most since before the first step; the gradients of
the last step are compared.
Contenders:

- ``none``: nothing is offloaded;
- ``dropped``: what would be offloaded is forgotten, and made up in the backward pass. Gradients are wrong; what is less
  memory than ``none`` takes is the activations' share of it, and the least that any offload can leave;
- ``pt``, ``npy``: one file for each tensor, written by ``torch.save`` or ``numpy.save`` when autograd hands it
  over, and read and removed when it asks for it, as the Fastensor paper's baselines do (section 5.2.2);
- ``checkpointing``: nothing is offloaded; each block saves its input only, and is computed again
  (``torch.utils.checkpoint``), which is what users do today;
- ``auto``, ``half``, ``all``: :class:`fastensor.offload.ActivationOffload` by its schedules: the default, one that may
  keep half of the bytes, and one that keeps none. *Predicted* is what the limit model says of the plan.

All of them have torch use huge pages for large tensors (``THP_MEM_ALLOC_ENABLE=1``), from which each of them gains.
Beside them, the bytes of a step are written to the same disk and read again, by direct I/O alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measuring import describe_machine, peak_memory, settle
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastensor.backends import registry
from fastensor.backends.buffers import BUFFER_NBYTES, transfer_buffers
from fastensor.files import posix
from fastensor.offload import ActivationOffload, OffloadConfig, Schedule
from fastensor.offload.persistent import is_cast_of_parameter, reason_to_keep

NONE, DROPPED, PT, NPY, CHECKPOINTING = "none", "dropped", "pt", "npy", "checkpointing"
AUTO, HALF, ALL = "auto", "half", "all"
SCHEDULES: dict[str, Schedule] = {AUTO: "auto", HALF: 0.5, ALL: "all"}
CONTENDERS = (NONE, DROPPED, PT, NPY, CHECKPOINTING, *SCHEDULES)
WARM_UP = 5
_HEADER = ("| | step, s | : none | predicted | blocked, s | CPU, s | memory, MiB | offloaded, MiB |",
           "|---|---:|---:|---:|---:|---:|---:|---:|")  # fmt: skip
_COLUMNS = ("step_seconds", "blocked_seconds", "cpu_seconds", "memory_nbytes", "offloaded_nbytes")
LEAST_SAVED_BLOCKING, MOST_OF_STEP, LEAST_MEMORY_SAVED = 8.0, 1.08, 0.8
MOST_OF_STEP_THAT_FITS, MOST_OF_ALL = 1.03, 1.03
"""What is promised."""
PREDICTED_WITHIN_OVERHEAD, PREDICTED_WITHIN_STEP = 0.2, 0.03
"""How far a prediction may be off, whichever is larger."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process: its measured steps."""

    model: str
    contender: str
    step_seconds: float
    """Median."""
    blocked_seconds: float
    cpu_seconds: float
    """Mean time of one step."""
    memory_nbytes: int
    offloaded_nbytes: int
    """In one step."""
    gradients: int
    """Their CRC32."""
    predicted_ratio: float | None = None
    """A step by the plan, relative to one without offloading."""


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        stride = 1 if inner == outer else 2
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.short = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def encoder(layers: int, width: int, heads: int, inner: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, inner, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def resnet(blocks: int) -> nn.Module:
    widths = [64, *(width for width in (64, 128, 256, 512) for _ in range(blocks))]
    parts = [Residual(inner, outer) for inner, outer in itertools.pairwise(widths)]
    return nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *parts, nn.AdaptiveAvgPool2d(1))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer encoder": lambda: (encoder(6, 512, 8, 2048), torch.randn(32, 256, 512)),
    "BERT-base": lambda: (encoder(12, 768, 12, 3072), torch.randn(16, 128, 768)),
    "ResNet-18": lambda: (resnet(2), torch.randn(64, 3, 128, 128)),
    "ViT-S, 197 tokens": lambda: (encoder(12, 384, 6, 1536), torch.randn(16, 197, 384)),
    "48 blocks": lambda: (encoder(48, 256, 4, 1024), torch.randn(16, 128, 256)),
    "tiny": lambda: (encoder(2, 64, 4, 128), torch.randn(8, 32, 64)),
}


class Hooks:
    """Saved tensors go through :meth:`put` and :meth:`get`, but for those that no contender offloads."""

    def __init__(self, least_nbytes: int) -> None:
        self._least_nbytes = least_nbytes
        self.blocked_seconds = 0.0
        self.offloaded_nbytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._timed(self._pack), self._timed(self._unpack)):
            yield

    def _timed(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(argument: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(argument)
            finally:
                self.blocked_seconds += time.perf_counter() - started

        return timed

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.nbytes < self._least_nbytes or reason_to_keep(tensor) or is_cast_of_parameter(tensor):
            return tensor.detach()
        self.offloaded_nbytes += tensor.nbytes
        return self.put(tensor.detach())

    def _unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else self.get(packed)

    def put(self, tensor: Tensor) -> Any:
        """Store a tensor, and return what stands for the tensor in the graph, and does not keep it alive."""
        raise NotImplementedError

    def get(self, packed: Any) -> Tensor:
        raise NotImplementedError


class Dropped(Hooks):
    def put(self, tensor: Tensor) -> Any:
        return tensor.shape, tensor.stride(), tensor.dtype

    def get(self, packed: Any) -> Tensor:
        shape, stride, dtype = packed
        return torch.empty_strided(shape, stride, dtype=dtype).zero_()


class FilePerTensor(Hooks):
    """The paper's baselines."""

    def __init__(self, folder: str, kind: str, least_nbytes: int) -> None:
        super().__init__(least_nbytes)
        self._folder, self._kind = Path(folder), kind
        self._numbers = itertools.count()

    def put(self, tensor: Tensor) -> Path:
        path = self._folder / f"{next(self._numbers)}.{self._kind}"
        if self._kind == PT:
            torch.save(tensor, path)
        else:
            np.save(path, tensor.numpy())
        return path

    def get(self, packed: Path) -> Tensor:
        found: Tensor = torch.load(packed) if self._kind == PT else torch.from_numpy(np.load(packed))
        packed.unlink()
        return found


def train(model: str, contender: str, steps: int, folder: str, least_nbytes: int) -> Run:
    """Some steps to warm up, and ``steps`` that are measured."""
    torch.manual_seed(0)
    net, data = MODELS[model]()
    offload: Any = None
    if contender in SCHEDULES:
        schedule = SCHEDULES[contender]
        offload = ActivationOffload(OffloadConfig(schedule=schedule, directories=(folder,), min_bytes=least_nbytes))
        offload.attach(net)
    elif contender == CHECKPOINTING:
        checkpoint_blocks(net)
    elif contender == DROPPED:
        offload = Dropped(least_nbytes)
    elif contender != NONE:
        offload = FilePerTensor(folder, contender, least_nbytes)
    seconds, before, cpu_before = [], (0.0, 0), 0.0
    with peak_memory() as peak:
        for step in range(WARM_UP + steps):
            if step == WARM_UP:
                before, cpu_before = _so_far(offload), time.process_time()
            net.zero_grad()
            started = time.perf_counter()
            with nullcontext() if offload is None else offload.step():
                loss = net(data).square().mean()
            loss.backward()
            seconds.append(time.perf_counter() - started)
    cpu_seconds = (time.process_time() - cpu_before) / steps
    blocked, moved = (now - then for now, then in zip(_so_far(offload), before, strict=True))
    crc32 = 0
    for parameter in net.parameters():
        if parameter.grad is not None:
            crc32 = zlib.crc32(parameter.grad.contiguous().numpy().data, crc32)
    plan = offload.plan() if isinstance(offload, ActivationOffload) else None
    return Run(
        model, contender, median(seconds[WARM_UP:]), blocked / steps, cpu_seconds, peak(), int(moved / steps), crc32,
        None if plan is None else plan.slowdown,
    )  # fmt: skip


def checkpoint_blocks(net: nn.Module) -> None:
    """Have each block of a model save its input only, and be computed again in the backward pass."""
    for block in [one for one in net.modules() if isinstance(one, Residual | nn.TransformerEncoderLayer)]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]


def _so_far(offload: Any) -> tuple[float, int]:
    if isinstance(offload, ActivationOffload):
        found = offload.statistics()
        return found.hook_seconds, found.offloaded_bytes
    return (0.0, 0) if offload is None else (offload.blocked_seconds, offload.offloaded_nbytes)


def disk_seconds(nbytes: int, folder: str) -> tuple[float, float]:
    """How long the disk takes to write so many bytes, and to read them, with one transfer after the other."""
    fd = posix.open_nameless(folder)
    try:
        posix.preallocate(fd, nbytes + BUFFER_NBYTES)
        with transfer_buffers.lending() as lent:
            view = transfer_buffers.take(lent).view
            view[:] = random.Random(0).randbytes(len(view))
            slots: Any = registry.get("direct").open_slots(fd)  # type: ignore[attr-defined]
            times = []
            for move in (slots.write, slots.read):
                started = time.perf_counter()
                for offset in range(0, nbytes, BUFFER_NBYTES):
                    move(view, offset)
                times.append(time.perf_counter() - started)
            slots.close()
    finally:
        posix.close_read_only(fd)
    return times[0], times[1]


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def report(machine: dict[str, str], runs: list[Run], disks: dict[str, list[tuple[float, float]]]) -> str:
    lines = ["# Activation offload", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in machine.items()), ""]
    for model in dict.fromkeys(run.model for run in runs):
        of = {name: [run for run in runs if (run.model, run.contender) == (model, name)] for name in CONTENDERS}
        written, read = (median(times) for times in zip(*disks[model], strict=True))
        nbytes = of[ALL][0].offloaded_nbytes
        disk = f"{nbytes / (1 << 20):.0f} MiB a step; the disk alone: {written:.2f} s to write, {read:.2f} s to read."
        lines += [f"## {model}", "", disk, "", *_HEADER]
        rounds = range(len(of[NONE]))
        for name in CONTENDERS:
            ratio = median(of[name][at].step_seconds / of[NONE][at].step_seconds for at in rounds)
            values = [median(getattr(run, field) for run in of[name]) for field in _COLUMNS]
            predictions = [run.predicted_ratio for run in of[name] if run.predicted_ratio is not None]
            predicted = f"{median(predictions):.2f}" if predictions else "–"
            lines.append(f"| {name} | {values[0]:.2f} | {ratio:.2f} | {predicted} | {values[1]:.3f} | "
                         f"{values[2]:.2f} | {values[3] / (1 << 20):.0f} | {values[4] / (1 << 20):.0f} |")  # fmt: skip
        lines += ["", *judge(of), ""]
    return "\n".join(lines)


def judge(of: dict[str, list[Run]]) -> Iterator[str]:
    """What was promised, and what came of it."""
    rounds = range(len(of[NONE]))
    same = len({run.gradients for name, found in of.items() if name != DROPPED for run in found}) == 1
    yield f"- gradients of all contenders (but for {DROPPED}) are {'equal' if same else '**differ**'}"
    for peer in (PT, NPY):
        ratio = median(of[peer][at].blocked_seconds / of[ALL][at].blocked_seconds for at in rounds)
        no_more = median(of[ALL][at].blocked_seconds / of[DROPPED][at].blocked_seconds for at in rounds)
        times = _bold(ratio, ratio >= LEAST_SAVED_BLOCKING or no_more <= 1)
        yield f"- {peer} is blocked {times} × as long as {ALL}, {ALL} {no_more:.2f} × as {DROPPED} (promised: 8, or 1)"
    ratio = median(of[AUTO][at].step_seconds / of[NONE][at].step_seconds for at in rounds)
    yield f"- {AUTO}: a step takes {_bold(ratio, ratio <= MOST_OF_STEP_THAT_FITS)} of one without (promised: 1.03)"
    ratio = median(of[ALL][at].step_seconds / of[NONE][at].step_seconds for at in rounds)
    yield f"- {ALL}: a step takes {_bold(ratio, ratio <= MOST_OF_STEP)} of one without (promised: 1.08)"
    ratio = median(of[HALF][at].step_seconds / of[ALL][at].step_seconds for at in rounds)
    yield f"- {HALF}: a step takes {_bold(ratio, ratio <= MOST_OF_ALL)} of one by {ALL} (promised: 1.03)"
    for name in (HALF, ALL):
        yield _judge_prediction(name, of)
    ratio = median(of[ALL][at].step_seconds / of[CHECKPOINTING][at].step_seconds for at in rounds)
    memory = median(of[ALL][at].memory_nbytes / of[CHECKPOINTING][at].memory_nbytes for at in rounds)
    yield f"- {ALL}: a step takes {ratio:.2f} of one by {CHECKPOINTING}, and memory {memory:.2f}"
    saved = median(
        (of[NONE][at].memory_nbytes - of[ALL][at].memory_nbytes)
        / max(of[NONE][at].memory_nbytes - of[DROPPED][at].memory_nbytes, 1)
        for at in rounds
    )
    share = _bold(saved, saved >= LEAST_MEMORY_SAVED)
    yield f"- {ALL}: the activations' share of memory is less by {share} (promised: 0.80)"


def _judge_prediction(name: str, of: dict[str, list[Run]]) -> str:
    measured = median(a.step_seconds / b.step_seconds for a, b in zip(of[name], of[NONE], strict=True))
    predicted = median(run.predicted_ratio or 1.0 for run in of[name])
    allowed = max(PREDICTED_WITHIN_OVERHEAD * abs(measured - 1), PREDICTED_WITHIN_STEP)
    off = abs(predicted - measured)
    return f"- {name}: the prediction is off by {_bold(off, off <= allowed)} of a step (promised: {allowed:.2f})"


def _bold(value: float, kept: bool) -> str:
    """A figure, in bold if its promise was not kept."""
    return f"{value:.2f}" if kept else f"**{value:.2f}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--min-bytes", type=int, default=OffloadConfig().min_bytes)
    parser.add_argument("--directory", default=None, help="on the disk to measure; default: the system's temporary one")
    parser.add_argument("--output", default="benchmarks/results/offload", help="without .md and .json")
    options = parser.parse_args()
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # in the processes to come
    runs: list[Run] = []
    disks: dict[str, list[tuple[float, float]]] = {model: [] for model in options.models}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        machine = describe_machine(Path(folder), "cpu")
        for number, model in itertools.product(range(options.rounds), options.models):
            for contender in random.Random(number).sample(CONTENDERS, len(CONTENDERS)):
                settle()
                runs.append(in_fresh_process(train, model, contender, options.steps, folder, options.min_bytes))
                print(runs[-1], flush=True)
            settle()
            disks[model].append(disk_seconds(max(run.offloaded_nbytes for run in runs if run.model == model), folder))
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine, "runs": [asdict(run) for run in runs], "disk": disks}
    Path(f"{options.output}.json").write_text(json.dumps(data, indent=1) + "\n")
    text = report(machine, runs, disks)
    Path(f"{options.output}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
