"""What ``save_state`` and ``load_state`` of Accelerate cost, by Accelerate alone and by Fastensor.

A GPT-2-small with AdamW, after one step of the optimizer. Each run is a fresh process, in which nothing but imports has
happened, with a dictionary folder of its own and default options. It saves some states, as training does, under names
that Accelerate gives (``total_limit=1``). Or it loads the last of them into a new model and optimizer. The ways take
turns.

Accelerate does not sync what it writes, so it is measured as it is, and with its files and directories synced here.
Beside each save, the bytes of the state are copied in memory that was touched before: what a snapshot costs at least.
fio moves as many bytes directly. Run by ``make bench``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from async_checkpoint import collect
from contenders import fio_seconds
from measuring import describe_machine, settle
from new_user import evict
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import fastensor_accelerate
from fastensor.files import posix

STOCK, SYNCED, OURS, ASYNC = "accelerate", "accelerate, synced", "fastensor", "fastensor, asynchronous"
SAVING = (STOCK, SYNCED, OURS, ASYNC)
LOADING = (STOCK, OURS)
FIO = "fio"
MODELS: dict[str, dict[str, int]] = {
    "gpt2": {},
    "tiny": {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0},
}
"""What differs from transformers' ``GPT2Config``."""
PROMISED_SAVE = 0.6
"""Of the seconds of Accelerate's synced saves, the first one included."""
PROMISED_CALL = 1.3
"""Of the seconds of a copy, from the second save of a process on."""
PROMISED_LOAD = 1.4
"""Times as fast as Accelerate's cold load."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One save, load, or move by fio."""

    operation: str
    way: str
    number: int
    """0 for the first one of its process."""
    call_seconds: float
    """How long the program waits."""
    done_seconds: float
    """How long it takes until a save is on the disk, or published, if nothing syncs it."""
    copy_seconds: float | None = None
    """Of a plain copy of the same bytes, right before."""


def prepared(way: str, model: str, project: Path) -> tuple[Accelerator, GPT2LMHeadModel, torch.optim.Optimizer]:
    """What a training script has before its first step."""
    if way in (OURS, ASYNC):
        fastensor_accelerate.enable(fastensor_accelerate.FastensorConfig(asynchronous=way == ASYNC))
    naming = ProjectConfiguration(str(project), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(project_config=naming, cpu=True)
    network = GPT2LMHeadModel(GPT2Config(**MODELS[model]))
    return accelerator, *accelerator.prepare(network, torch.optim.AdamW(network.parameters()))


def measure_saves(way: str, model: str, saves: int, project: Path, dictionaries: str, results: Any) -> None:
    """In a fresh process: send the size of a state, then a sample for each save."""
    os.environ["FASTENSOR_DICTIONARIES"] = dictionaries
    accelerator, network, optimizer = prepared(way, model, project)
    tokens = torch.randint(0, network.config.vocab_size, (1, 8))
    accelerator.backward(network(tokens).logits.square().mean())
    optimizer.step()
    optimizer.zero_grad()
    state = list(tensors_of(network, optimizer))
    copies = [torch.ones_like(tensor) for tensor in state]
    results.send(sum(tensor.nbytes for tensor in state))
    for number in range(saves):
        settle()
        started = time.perf_counter()
        for copy, tensor in zip(copies, state, strict=True):
            copy.copy_(tensor)
        copied = time.perf_counter()
        accelerator.save_state()
        returned = time.perf_counter()
        if way == SYNCED:
            sync(project / "checkpoints" / f"checkpoint_{number}")
        elif way == ASYNC:
            accelerator._fastensor_saver.wait()  # what end_training does, and the next save
        done = time.perf_counter()
        called = done if way == SYNCED else returned
        results.send(Sample("save", way, number, called - copied, done - copied, copied - started))
    accelerator.end_training()


def tensors_of(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The tensors of a state; tied ones once."""
    yield from network.parameters()
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, Tensor))


def sync(state: Path) -> None:
    """Make durable what Accelerate has written."""
    for folder, _, names in os.walk(state):
        for name in names:
            with Path(folder, name).open("rb") as file:
                os.fsync(file.fileno())
        posix.sync_directory(folder)
    posix.sync_directory(state.parent)


def measure_load(way: str, model: str, cold: bool, project: Path, dictionaries: str, results: Any) -> None:
    """In a fresh process: send a sample of one load into a new model and a new optimizer."""
    os.environ["FASTENSOR_DICTIONARIES"] = dictionaries
    accelerator, network, optimizer = prepared(way, model, project)
    (state,) = (project / "checkpoints").iterdir()
    for path in state.iterdir():
        evict(path) if cold else path.read_bytes()
    started = time.perf_counter()
    accelerator.load_state(str(state))
    seconds = time.perf_counter() - started
    if len(optimizer.state) != len(list(network.parameters())):
        raise SystemExit(f"{way} has loaded something else than was saved")
    results.send(Sample("cold load" if cold else "warm load", way, 0, seconds, seconds))
    accelerator.end_training()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(model: str, runs: int, saves: int, folder: Path) -> tuple[int, list[Sample]]:
    """The bytes of a state, and everything that was measured."""
    samples: list[Sample] = []
    nbytes = 0

    def fresh(work: Callable[..., None], *arguments: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as dictionaries:
            return collect(work, *arguments, dictionaries)

    for run in range(runs):
        for way in in_turn(SAVING, run):
            say(f"run {run + 1} of {runs}, {way}, saves")
            shutil.rmtree(project_of(way, folder), ignore_errors=True)
            nbytes, *found = fresh(measure_saves, way, model, saves, project_of(way, folder))
            samples += found
        samples += by_fio(folder / "limit", nbytes, write=True)
        for cold in (True, False):
            for way in in_turn(LOADING, run):
                say(f"run {run + 1} of {runs}, {way}, {'cold' if cold else 'warm'} load")
                samples += fresh(measure_load, way, model, cold, project_of(way, folder))
        samples += by_fio(folder / "limit", nbytes, write=False)
    return nbytes, samples


def in_turn(ways: tuple[str, ...], run: int) -> tuple[str, ...]:
    """The ways in another order each run, so that none always follows the same one."""
    return ways[run % len(ways) :] + ways[: run % len(ways)]


def project_of(way: str, folder: Path) -> Path:
    return folder / str(SAVING.index(way))


def by_fio(path: Path, nbytes: int, *, write: bool) -> list[Sample]:
    settle()
    seconds = fio_seconds(path, nbytes, write=write)
    operation = "save" if write else "cold load"
    return [] if seconds is None else [Sample(operation, FIO, 0, seconds, seconds)]


def median(samples: list[Sample], operation: str, way: str, value: Callable[[Sample], float]) -> float:
    return statistics.median(value(one) for one in samples if (one.operation, one.way) == (operation, way))


def judge(samples: list[Sample]) -> list[dict[str, Any]]:
    """What was promised, what was measured, and whether it holds."""

    def done(operation: str, way: str) -> float:
        return median(samples, operation, way, lambda one: one.done_seconds)

    save = done("save", OURS) / done("save", SYNCED)
    call = median([one for one in samples if one.number], "save", ASYNC, stall_to_copy)
    load = done("cold load", STOCK) / done("cold load", OURS)
    return [
        verdict(f"durable save / {SYNCED} ≤ {PROMISED_SAVE}", save, save <= PROMISED_SAVE),
        verdict(f"asynchronous call / copy, from the second on ≤ {PROMISED_CALL}", call, call <= PROMISED_CALL),
        verdict(f"{STOCK} / cold load ≥ {PROMISED_LOAD}", load, load >= PROMISED_LOAD),
    ]


def verdict(promise: str, measured: float, holds: bool) -> dict[str, Any]:
    return {"promise": promise, "measured": round(measured, 3), "holds": holds}


def stall_to_copy(sample: Sample) -> float:
    assert sample.copy_seconds is not None
    return sample.call_seconds / sample.copy_seconds


def table(machine: dict[str, str], nbytes: int, samples: list[Sample], verdicts: list[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    lines = ["# save_state and load_state of Accelerate: empty dictionary, default options, first use included", ""]
    lines += [f"- {what}: {text}" for what, text in machine.items()]
    lines += [f"- state: {nbytes / 2**20:.1f} MiB", "", "## medians", ""]
    lines += ["| what | way | of its process | call: median s (minimum–maximum) | done after | call / copy | times |"]
    lines += ["|---|---|---|---:|---:|---:|---:|"]
    for key in dict.fromkeys((one.operation, one.way, min(one.number, 1)) for one in samples):
        operation, way, later = key
        group = [one for one in samples if (one.operation, one.way, min(one.number, 1)) == key]
        calls = [one.call_seconds for one in group]
        ratio = f"{statistics.median(map(stall_to_copy, group)):.2f}" if group[0].copy_seconds else "–"
        lines.append(
            f"| {operation} | {way} | {'later' if later else 'first'} "
            f"| {statistics.median(calls):.3f} ({min(calls):.3f}–{max(calls):.3f}) "
            f"| {statistics.median(one.done_seconds for one in group):.3f} | {ratio} | {len(group)} |"
        )
    copies = [one.copy_seconds for one in samples if one.copy_seconds is not None]
    lines += ["", f"One copy of the bytes took {statistics.median(copies):.3f} s (median of {len(copies)})."]
    return "\n".join([*lines, *promises(verdicts)]) + "\n"


def promises(verdicts: list[dict[str, Any]]) -> list[str]:
    """The promises as a table of Markdown."""
    lines = ["", "## promises", "", "| promise | measured | holds |", "|---|---:|---|"]
    return lines + [f"| {v['promise']} | {v['measured']:.2f} | {'yes' if v['holds'] else '**no**'} |" for v in verdicts]


def add_places(parser: argparse.ArgumentParser, output: Path) -> None:
    """The options of :func:`report`."""
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=output, help="without suffix")


def report(
    options: argparse.Namespace,
    measure: Callable[[Path], tuple[int, list[Any]]],
    judge: Callable[[list[Any]], list[dict[str, Any]]],
    table: Callable[[dict[str, str], int, list[Any], list[dict[str, Any]]], str],
) -> None:
    """Measure in a new folder, and write and print what was found and how far promises hold."""
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        machine = describe_machine(Path(name), "cpu")
        machine |= {name: version(name) for name in ("accelerate", "transformers")}
        nbytes, samples = measure(Path(name))
    verdicts = judge(samples)
    text = table(machine, nbytes, samples, verdicts)
    options.output.with_suffix(".md").write_text(text)
    document = {"machine": machine, "nbytes": nbytes, "verdicts": verdicts, "samples": [asdict(one) for one in samples]}
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1))
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--runs", type=int, default=5, help="processes of each way")
    parser.add_argument("--saves", type=int, default=4, help="in each process that saves")
    add_places(parser, Path("benchmarks/results/accelerate_state"))
    options = parser.parse_args()
    libraries = ["fastensor_accelerate", "transformers.models.gpt2.modeling_gpt2", "accelerate.checkpointing"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)
    report(options, lambda folder: measure(options.model, options.runs, options.saves, folder), judge, table)


if __name__ == "__main__":
    main()
