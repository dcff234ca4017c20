"""What offloading activations costs and saves: training steps with and without, of several models.

Run by ``make bench``, or alone. Each round trains each model with each contender, in a process of its own and in turns:
some steps to warm up, in which schedules are planned, then some that are measured, of the same data. *Blocked* is the
time that forward and backward passes spend in the hooks that autograd calls; *CPU* is what all threads of the process
take of the processors; *memory* is how far the process (on a GPU: the device) has grown at most since before the first
step; the gradients of the last step are compared.
Contenders:

- ``none``: nothing is offloaded;
- ``dropped``: what would be offloaded is forgotten, and made up in the backward pass. Gradients are wrong; what is less
  memory than ``none`` takes is the activations' share of it, and the least that any offload can leave;
- ``pt``, ``npy``: one file for each tensor, written by ``torch.save`` or ``numpy.save`` when autograd hands it
  over, and read and removed when it asks for it, as the Fastensor paper's baselines do (section 5.2.2);
- ``checkpointing``: nothing is offloaded; each block saves its input only, and is computed again
  (``torch.utils.checkpoint``), which is what users do today;
- ``save_on_cpu``, ``streamed`` (on a GPU only): torch's own hooks, and copies on a stream of their own as in torchtune;
- ``auto``, ``half``, ``all``: :class:`fastensor.offload.ActivationOffload` by its schedules: the default, one that may
  keep half of the bytes, and one that keeps none. *Predicted* is what the limit model says of the plan;
- ``all, freed memory kept`` (on a CPU): as ``all``, without ``return_freed_memory``;
- ``oracle``: as ``half``, by the best plan that two seconds of simulated annealing find for the same measurements;
- ``csr``: as ``all``, with the lossless codec. ``dram`` (on a GPU only): as ``all``, to host memory;
- ``equal``: with as much memory as ``checkpointing`` has taken in the same round.

All of them have torch use huge pages for large tensors (``THP_MEM_ALLOC_ENABLE=1``), from which each of them gains.
Beside them, the bytes of a step are written to the same disk and read again, by direct I/O alone.

Then each way gets the same room (``offload_limits.py``), with blocks that are computed again where that is the best.
The largest batch in limited memory is looked for (``examples/larger_batch.py``), with gradient checkpointing too;
and a job that needs the bandwidth of memory runs beside the training, as in FlashNeuron's section 4.3.
``--models`` and ``--parts`` choose. What earlier runs have measured stays in the results, part by part and model by
model, until it is measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar
from unittest import mock

import offload_beside
import offload_largest
import offload_limits
import torch
from measuring import describe_machine, peak_of, settle, synchronize
from offload_contenders import MODELS, NPY, PT, Counted, Dropped, FilePerTensor, Streamed, checkpoint_blocks

from fastensor.backends import registry
from fastensor.backends.buffers import BUFFER_NBYTES, transfer_buffers
from fastensor.files import posix
from fastensor.offload import ActivationOffload, OffloadConfig, planner, recomputing, scheduler

T = TypeVar("T")
NONE, DROPPED, CHECKPOINTING, SAVE_ON_CPU, STREAMED = "none", "dropped", "checkpointing", "save_on_cpu", "streamed"
AUTO, HALF, ORACLE, ALL, CSR, DRAM, EQUAL = "auto", "half", "oracle", "all", "csr", "dram", "equal"
ALL_KEPT = f"{ALL}, freed memory kept"
OPTIONS: dict[str, dict[str, Any]] = {
    AUTO: {},
    HALF: {"schedule": 0.5},
    ORACLE: {"schedule": 0.5},
    ALL: {"schedule": "all"},
    ALL_KEPT: {"schedule": "all", "return_freed_memory": False},
    CSR: {"schedule": "all", "codecs": ("csr",)},
    DRAM: {"schedule": "all", "target": "dram"},
}
ON_BOTH = (NONE, DROPPED, PT, NPY, CHECKPOINTING, AUTO, HALF, ORACLE, ALL, CSR)
ON_CPU = (*ON_BOTH, ALL_KEPT)
ON_GPU = (*ON_BOTH, SAVE_ON_CPU, STREAMED, DRAM)
PARTS = ("steps", "limits", "largest", "beside")
WARM_UP = 5
SEARCH_SECONDS = 2.0
_HEADER = ("| | step, s | : none | predicted | blocked, s | CPU, s | memory, MiB | offloaded, MiB | written, MiB |",
           "|---|---:|---:|---:|---:|---:|---:|---:|---:|")  # fmt: skip
LEAST_SAVED_BLOCKING, MOST_OF_STEP, LEAST_MEMORY_SAVED = 8.0, 1.08, 0.8
MOST_OF_STEP_THAT_FITS, MOST_OF_ALL, MOST_OF_ORACLE = 1.03, 1.03, 1.03
LEAST_OF_COPY = 0.85
PREDICTED_WITHIN_OVERHEAD, PREDICTED_WITHIN_STEP = 0.2, 0.03
"""What is promised. A prediction may be off by a share of the overhead or of the step, whichever is larger."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process: its measured steps."""

    contender: str
    step_seconds: float
    """Median."""
    blocked_seconds: float
    cpu_seconds: float
    """Mean time of one step."""
    memory_nbytes: int
    offloaded_nbytes: int
    written_nbytes: int
    """In one step."""
    gradients: int
    """Their CRC32."""
    predicted_ratio: float | None = None
    """A step by the plan, relative to one without offloading."""
    counted_nbytes: int | None = None
    """The most bytes of saved tensors that an offload has had in memory at a time, by its own count."""


@dataclass(frozen=True, slots=True)
class Task:
    """What all contenders of a model have in common."""

    model: str
    steps: int
    folder: str
    least_nbytes: int
    device: str

    def config(self, **options: Any) -> OffloadConfig:
        return OffloadConfig(directories=(self.folder,), min_bytes=self.least_nbytes, **options)


def train(task: Task, contender: str, options: Mapping[str, Any]) -> Run:
    """Some steps to warm up, and some that are measured. ``options`` are those of an offload, for others empty."""
    torch.manual_seed(0)
    net, data = MODELS[task.model]()
    net, data = net.to(task.device), data.to(task.device)
    offload = offload_of(task, contender, options, net)
    seconds, before, cpu_before = [], (0.0, 0, 0), 0.0
    with searching() if contender == ORACLE else nullcontext(), peak_of(task.device) as peak:
        for step in range(WARM_UP + task.steps):
            if step == WARM_UP:
                before, cpu_before = _so_far(offload), time.process_time()
            net.zero_grad()
            started = time.perf_counter()
            with nullcontext() if offload is None else offload.step():
                loss = net(data).square().mean()
            loss.backward()
            synchronize(task.device)
            seconds.append(time.perf_counter() - started)
    cpu_seconds = (time.process_time() - cpu_before) / task.steps
    blocked, moved, written = (now - then for now, then in zip(_so_far(offload), before, strict=True))
    crc32 = 0
    for parameter in net.parameters():
        if parameter.grad is not None:
            crc32 = zlib.crc32(parameter.grad.contiguous().cpu().numpy().data, crc32)
    is_ours = isinstance(offload, ActivationOffload)
    plan = offload.plan() if is_ours else None
    return Run(
        contender, median(seconds[WARM_UP:]), blocked / task.steps, cpu_seconds, peak(), int(moved / task.steps),
        int(written / task.steps), crc32, None if plan is None else plan.slowdown,
        offload.statistics().peak_memory_bytes if is_ours else None,
    )  # fmt: skip


def offload_of(task: Task, contender: str, options: Mapping[str, Any], net: torch.nn.Module) -> Any:
    """What the steps of a contender enter; None if there is nothing to enter."""
    if contender in (CHECKPOINTING, offload_limits.INPUTS_MOVED):
        checkpoint_blocks(net)
    if options or contender in OPTIONS:
        offload = ActivationOffload(task.config(**options))
        offload.attach(net)
        return offload
    if contender == SAVE_ON_CPU:
        return SaveOnCpu()
    if contender in (PT, NPY):
        return FilePerTensor(task.folder, contender, task.least_nbytes)
    made = {DROPPED: Dropped, STREAMED: Streamed}.get(contender)
    return None if made is None else made(task.least_nbytes)


class SaveOnCpu:
    """torch's own hooks. They are not timed."""

    blocked_seconds, offloaded_nbytes = 0.0, 0

    def step(self) -> Any:
        return torch.autograd.graph.save_on_cpu(pin_memory=True)


@contextmanager
def searching() -> Iterator[None]:
    """Have plans be the best ones that can be found. Passes that warm up are planned five times at most."""

    def with_blocks(*arguments: Any) -> scheduler.OffloadPlan:
        return best_plan(*arguments[:3])

    def plan(profile: scheduler.StepProfile, limit: int, rates: scheduler.TransferRates) -> scheduler.OffloadPlan:
        return best_plan(replace(profile, blocks=()), limit, rates)

    with mock.patch.object(planner, "plan_with_blocks", with_blocks), mock.patch.object(planner, "plan", plan):
        yield


def best_plan(
    profile: scheduler.StepProfile, limit: int, rates: scheduler.TransferRates, seconds: float = SEARCH_SECONDS
) -> scheduler.OffloadPlan:
    """The best plan within ``limit`` that simulated annealing finds, from the scheduler's own one."""
    best = current = recomputing.plan_with_blocks(profile, limit, rates)
    if not (best.out or best.recomputed):
        return best
    chance = random.Random(0)
    blocks, count = len(profile.blocks), len(profile.tensors) + len(profile.blocks)
    end = time.perf_counter() + seconds
    scale = 0.02 * best.prediction.step_seconds
    while (left := (end - time.perf_counter()) / seconds) > 0:
        changed = min(chance.choice((0, 0, 1, 2)), blocks)
        again = current.recomputed ^ frozenset(chance.sample(range(blocks), changed))
        out = current.out ^ frozenset(chance.sample(range(count), min(chance.choice((1, 1, 2, 2, 3)), count)))
        if recomputing.peak_nbytes(profile, out, again) > limit:
            continue
        other = scheduler.OffloadPlan(out, recomputing.predict_with_blocks(profile, out, again, rates), again)
        worse = other.prediction.step_seconds - current.prediction.step_seconds
        if worse <= 0 or chance.random() < math.exp(-worse / (scale * left)):
            current = other
        if current.prediction.step_seconds < best.prediction.step_seconds:
            best = current
    _, numbers = recomputing.without_blocks(profile, best.recomputed)
    return replace(best, out=best.out & set(numbers))


def sparse_nbytes(task: Task) -> tuple[int, int]:
    """The bytes of one step's activations without their zeros but with a bit for each number, and all bytes."""
    torch.manual_seed(0)
    net, data = MODELS[task.model]()
    counted = Counted(task.least_nbytes)
    with counted.step():
        net.to(task.device)(data.to(task.device)).square().mean()
    return counted.sparse_nbytes, counted.nbytes


def checkpointed_nbytes(task: Task) -> int:
    """The most bytes of saved tensors in memory at a time, if all blocks save their inputs only."""
    net, data = MODELS[task.model]()
    net, data = net.to(task.device), data.to(task.device)
    with ActivationOffload(task.config(schedule=1 << 50, recompute="auto")) as offload:
        offload.attach(net)
        for _ in range(WARM_UP):
            with offload.step():
                loss = net(data).square().mean()
            loss.backward()
        plan = offload.plan()
    assert plan is not None
    return plan.ways["recompute"].peak_bytes


def _so_far(offload: Any) -> tuple[float, int, int]:
    if isinstance(offload, ActivationOffload):
        found = offload.statistics()
        return found.hook_seconds, found.offloaded_bytes, found.written_bytes
    return (
        (0.0, 0, 0)
        if offload is None
        else (offload.blocked_seconds, offload.offloaded_nbytes, offload.offloaded_nbytes)
    )


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


def copies_to_host(task: Task) -> tuple[float, float]:
    """Seconds for 1 GiB from a GPU to host memory: in one copy to pinned memory, and as tensors that are offloaded."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=task.device)
    target = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    offload = ActivationOffload(task.config(schedule="all", target="dram", dram_bytes=2 << 30, staging_bytes=2 << 30))
    copied = offloaded = 0.0
    for _ in range(3):  # the last one counts
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(task.device)
        copied, started = time.perf_counter() - started, time.perf_counter()
        loss = torch.zeros((), device=task.device)
        with offload.step():
            for _ in range(64):
                tensor = torch.ones(4 << 20, device=task.device, requires_grad=True) * 1
                loss = loss + tensor.square().sum()
        del tensor
        while offload.memory_usage()["pending"]:
            time.sleep(1e-4)
        synchronize(task.device)
        offloaded = time.perf_counter() - started
        loss.backward()
    return copied, offloaded


def in_fresh_process(function: Callable[..., T], *arguments: Any, start: str = "spawn") -> T:
    """Call a function. ``start="forkserver"`` begins with what :func:`measuring.preload` has named."""
    with multiprocessing.get_context(start).Pool(1) as pool:
        return pool.apply(function, arguments)


def equal_memory(of: Mapping[str, list[Run]], at: int) -> dict[str, Any]:
    """The options of an offload that has the memory that gradient checkpointing has taken for activations."""
    room = max(of[CHECKPOINTING][at].memory_nbytes - of[DROPPED][at].memory_nbytes, 1 << 20)
    return {"memory_bytes": room}


def measure_steps(task: Task, rounds: int) -> dict[str, Any]:
    """All contenders of a model."""
    contenders = ON_GPU if task.device == "cuda" else ON_CPU
    of: dict[str, list[Run]] = {name: [] for name in (*contenders, EQUAL)}
    disk = []
    for number in range(rounds):
        for name in [*random.Random(number).sample(contenders, len(contenders)), EQUAL]:
            settle()
            options = equal_memory(of, number) if name == EQUAL else OPTIONS.get(name, {})
            of[name].append(in_fresh_process(train, task, name, options))
            print(task.model, of[name][-1], flush=True)
        settle()
        disk.append(disk_seconds(of[ALL][-1].offloaded_nbytes, task.folder))
    return {
        "contenders": {name: [asdict(run) for run in runs] for name, runs in of.items()},
        "disk": disk,
        "sparse": in_fresh_process(sparse_nbytes, task),
        "copies": in_fresh_process(copies_to_host, task) if task.device == "cuda" else None,
    }


def report_steps(model: str, found: Mapping[str, Any]) -> Iterator[str]:
    of = {name: [Run(**run) for run in runs] for name, runs in found["contenders"].items()}
    written, read = (median(times) for times in zip(*found["disk"], strict=True))
    moved = mib(of[ALL][0].offloaded_nbytes)
    disk = f"{moved} MiB a step; the disk alone: {written:.2f} s to write, {read:.2f} s to read."
    yield from (f"## {model}", "", disk, "", *_HEADER)
    for name, runs in of.items():
        predictions = [run.predicted_ratio for run in runs if run.predicted_ratio is not None]
        cells = [
            f"{median(run.step_seconds for run in runs):.2f}",
            f"{ratio_of(of, name, NONE):.2f}",
            f"{median(predictions):.2f}" if predictions else "–",
            f"{median(run.blocked_seconds for run in runs):.3f}",
            f"{median(run.cpu_seconds for run in runs):.2f}",
            *(str(mib(median(getattr(run, field) for run in runs)))
              for field in ("memory_nbytes", "offloaded_nbytes", "written_nbytes")),
        ]  # fmt: skip
        yield f"| {name} | {' | '.join(cells)} |"
    yield from ("", *judge(of, found["sparse"], written))
    if found["copies"] is not None:
        copied, offloaded = found["copies"]
        share = _bold(copied / offloaded, copied / offloaded >= LEAST_OF_COPY)
        yield f"- tensors go to host memory at {share} of a pinned copy's speed (promised: {LEAST_OF_COPY})"
    yield ""


def mib(nbytes: float) -> int:
    return round(nbytes / (1 << 20))


def ratio_of(of: Mapping[str, Sequence[Any]], name: str, other: str, field: str = "step_seconds") -> float:
    """The median ratio of two contenders, round by round."""
    pairs = zip(of[name], of[other], strict=True)
    return median(getattr(a, field) / max(getattr(b, field), 1e-9) for a, b in pairs)


def judge(of: Mapping[str, list[Run]], sparse: tuple[int, int], disk_writes: float) -> Iterator[str]:
    """What was promised, and what came of it."""
    same = len({run.gradients for name, runs in of.items() if name != DROPPED for run in runs}) == 1
    yield f"- gradients of all contenders (but for {DROPPED}) are {'equal' if same else '**differ**'}"
    no_more = ratio_of(of, ALL, DROPPED, "blocked_seconds")
    for peer in (PT, NPY):
        ratio = ratio_of(of, peer, ALL, "blocked_seconds")
        times = _bold(ratio, ratio >= LEAST_SAVED_BLOCKING or no_more <= 1)
        yield f"- {peer} is blocked {times} × as long as {ALL}, {ALL} {no_more:.2f} × as {DROPPED} (promised: 8, or 1)"
    best = min((ALL, ORACLE), key=lambda name: ratio_of(of, name, NONE))
    for name, other, most in (
        (AUTO, NONE, MOST_OF_STEP_THAT_FITS), (ALL, NONE, MOST_OF_STEP), (HALF, ALL, MOST_OF_ALL),
        (HALF, best, MOST_OF_ORACLE),
    ):  # fmt: skip
        ratio = ratio_of(of, name, other)
        yield f"- {name}: a step takes {_bold(ratio, ratio <= most)} of one by {other} (promised: {most})"
    for name in (HALF, ALL):
        yield _judge_prediction(name, of)
    for name in (EQUAL, ALL):
        ratio, memory = ratio_of(of, name, CHECKPOINTING), ratio_of(of, name, CHECKPOINTING, "memory_nbytes")
        share = disk_writes / median(run.step_seconds for run in of[NONE])
        yield (
            f"- {name}: a step takes {ratio:.2f} of one by {CHECKPOINTING}, and memory {memory:.2f} (the disk alone "
            f"takes {share:.2f} of a step to write all of it)"
        )
    saved = median(
        (none.memory_nbytes - one.memory_nbytes) / max(none.memory_nbytes - dropped.memory_nbytes, 1)
        for none, one, dropped in zip(of[NONE], of[ALL], of[DROPPED], strict=True)
    )
    share_saved = _bold(saved, saved >= LEAST_MEMORY_SAVED)
    yield f"- {ALL}: the activations' share of memory is less by {share_saved} (promised: 0.80)"
    by_csr, by_zeros = ratio_of(of, CSR, ALL, "written_nbytes"), sparse[0] / sparse[1]
    yield f"- {CSR}: writes {by_csr:.2f} of the bytes of {ALL}; by the zeros in them it would be {by_zeros:.2f}"


def _judge_prediction(name: str, of: Mapping[str, list[Run]]) -> str:
    measured = ratio_of(of, name, NONE)
    predicted = median(run.predicted_ratio or 1.0 for run in of[name])
    allowed = max(PREDICTED_WITHIN_OVERHEAD * abs(measured - 1), PREDICTED_WITHIN_STEP)
    off = abs(predicted - measured)
    return f"- {name}: the prediction is off by {_bold(off, off <= allowed)} of a step (promised: {allowed:.2f})"


def _bold(value: float, kept: bool) -> str:
    """A figure, in bold if its promise was not kept."""
    return f"{value:.2f}" if kept else f"**{value:.2f}**"


def report(results: Mapping[str, Any]) -> str:
    lines = ["# Activation offload", ""]
    for title, found in results.items():
        part = found["part"]
        if part == "steps":
            lines += report_steps(title, found)
        elif part == "limits":
            lines += [f"## {title}", "", *offload_limits.report(found), ""]
        elif part == "largest":
            lines += ["## Largest batch", "", *offload_largest.report(found), ""]
        else:
            lines += ["## A job beside the training", "", *offload_beside.report(found), ""]
        lines += [f"{', '.join(f'{name}: {value}' for name, value in found['machine'].items())}", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--min-bytes", type=int, default=OffloadConfig().min_bytes)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", default=None, help="on the disk to measure; default: the system's temporary one")
    parser.add_argument("--output", default="benchmarks/results/offload", help="without .md and .json")
    parser.add_argument(
        "--shares", type=int, nargs="*", default=offload_limits.SHARES, help="rooms, as parts of a step"
    )
    offload_largest.add_options(parser)
    offload_beside.add_options(parser)
    options = parser.parse_args()
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # in the processes to come
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    data = output.with_suffix(".json")
    results: dict[str, Any] = json.loads(data.read_text()) if data.exists() else {}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        parts: dict[str, Callable[[], dict[str, Any]]] = {}
        if "steps" in options.parts:
            for model in options.models:
                task = Task(model, options.steps, folder, options.min_bytes, options.device)
                parts[model] = partial(measure_steps, task, options.rounds)
        if "limits" in options.parts:
            for model in options.models:
                task = Task(model, options.steps, folder, options.min_bytes, options.device)
                parts[f"{model}, limits"] = partial(offload_limits.measure, task, options.rounds, options.shares)
        if "largest" in options.parts:
            parts["largest"] = partial(offload_largest.measure, options, folder)
        if "beside" in options.parts:
            parts["beside"] = partial(offload_beside.measure, options, folder)
        for title, measure in parts.items():
            part = title if title in PARTS else "limits" if title.endswith(", limits") else "steps"
            machine = describe_machine(Path(folder), options.device)
            results[title] = {"part": part, "machine": machine, **measure()}
            data.write_text(json.dumps(results, indent=1) + "\n")
            output.with_suffix(".md").write_text(report(results) + "\n")
    print(report({title: results[title] for title in parts}))


if __name__ == "__main__":
    main()
