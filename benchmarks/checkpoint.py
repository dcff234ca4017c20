"""Saving and loading checkpoints, against the tools that people use and against the limit of the disk.

Every figure is the median of interleaved rounds; compare within one run only. Saves are durable and atomic for every
contender. Loads run in a fresh process each, cold (page cache dropped) or warm (file in the page cache), to tensors
in memory of their own. fio moves the same number of bytes with O_DIRECT beside them. Run by ``make bench``.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from contenders import CONTENDERS, SAVING_ONLY, Contender, State, build_state, fio_seconds, model_names
from measuring import describe_machine, drop_caches, peak_memory, preload, settle
from report import judge, plot, table

from fastensor.files import posix

LIMIT = "fio"


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured save or load."""

    model: str
    nbytes: int
    operation: str
    contender: str
    seconds: float
    cpu_seconds: float | None = None
    extra_nbytes: int | None = None
    """Peak resident memory over that before, of a first save in its process; for loads, less the tensors."""


def measure_save(contender: Contender, state: State, path: Path) -> tuple[float, float]:
    settle()
    gc.collect()
    cpu = time.process_time()
    started = time.perf_counter()
    contender.save(state, path)
    seconds = time.perf_counter() - started
    return seconds, time.process_time() - cpu


def measure_memory_of_first_save(contender: Contender, state: State, path: Path) -> int:
    """Extra memory of a save in a forked process that has saved nothing yet, so that kept buffers count."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        with peak_memory() as extra:
            contender.save(state, path)
        os.write(writing, str(extra()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        nbytes = int(pipe.read())
    os.waitpid(pid, 0)
    return nbytes


def measure_load(contender: Contender, path: Path, device: str, nbytes: int) -> tuple[float, float, int]:
    """Load in a process that is forked from a small one: nothing but imports has happened in it."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_load_in_child, args=(contender.name, path, device, theirs))
    process.start()
    theirs.close()
    seconds, cpu, extra, found = ours.recv()
    process.join()
    if found != nbytes:
        raise RuntimeError(f"{contender.name} loaded {found} bytes of tensors, expected {nbytes}")
    return seconds, cpu, extra - (nbytes if device == "cpu" else 0)


def _load_in_child(name: str, path: Path, device: str, results: Any) -> None:
    contender = next(c for c in CONTENDERS if c.name == name)
    if device != "cpu":
        torch.zeros(1, device=device)
    with peak_memory() as extra:
        cpu = time.process_time()
        started = time.perf_counter()
        state = contender.load(path, device)
        if device != "cpu":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        cpu = time.process_time() - cpu
    results.send((seconds, cpu, extra(), sum(tensor.nbytes for tensor in state.values())))


def drop_from_page_cache(path: Path) -> None:
    """Make the next load cold: drop all caches as root, and have the kernel forget these files."""
    drop_caches("all")
    for file in files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            posix.evict(opened.fileno(), file.stat().st_size)


def bring_into_page_cache(path: Path) -> None:
    for file in files_of(path):
        with file.open("rb") as opened:
            while opened.read(8 << 20):
                pass


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def run_model(model: str, device: str, rounds: int, folder: Path) -> list[Sample]:
    state = build_state(model, device)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    samples: list[Sample] = []

    def path_of(contender: Contender) -> Path:
        return folder / f"{CONTENDERS.index(contender)}.ckpt"

    def record(operation: str, name: str, measured: tuple[float | None, ...]) -> None:
        samples.append(Sample(model, nbytes, operation, name, *measured))  # type: ignore[arg-type]

    def limit(operation: str, path: Path) -> None:
        settle()
        if (seconds := fio_seconds(path, nbytes, write=operation == "save")) is not None:
            record(operation, LIMIT, (seconds,))

    extra = (
        {}
        if device != "cpu"
        else {  # a forked process cannot use CUDA
            c.name: measure_memory_of_first_save(c, state, path_of(c)) for c in CONTENDERS
        }
    )
    for number in range(rounds + 1):
        for contender in _shuffled(number):
            seconds, cpu_seconds = measure_save(contender, state, path_of(contender))
            if number:  # the first round pays for first touches of memory in all of them
                record("save", contender.name, (seconds, cpu_seconds, extra.get(contender.name)))
        if number:
            limit("save", folder / "limit.tmp")
            if (folder / "limit.tmp").exists():
                (folder / "limit.tmp").rename(folder / "limit")
    del state
    loaders = [contender for contender in CONTENDERS if contender.name not in SAVING_ONLY]
    for operation, prepare in (("cold load", drop_from_page_cache), ("warm load", bring_into_page_cache)):
        for number in range(rounds):
            for contender in _shuffled(number, loaders):
                prepare(path_of(contender))
                record(operation, contender.name, measure_load(contender, path_of(contender), device, nbytes))
            if operation == "cold load":
                limit(operation, folder / "limit")
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return samples


def _shuffled(number: int, contenders: Any = CONTENDERS) -> list[Contender]:
    """The contenders in another order each round, so that none always follows the same one."""
    shuffled = list(contenders)
    random.Random(number).shuffle(shuffled)
    return shuffled


def summarize(samples: list[Sample]) -> list[dict[str, Any]]:
    """One row per model, operation and contender: medians, and the range of the seconds."""
    groups: dict[tuple[str, int, str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.model, sample.nbytes, sample.operation, sample.contender), []).append(sample)
    return [
        {
            "model": model,
            "nbytes": nbytes,
            "operation": operation,
            "contender": contender,
            "rounds": len(group),
            "seconds": statistics.median(s.seconds for s in group),
            "seconds_min": min(s.seconds for s in group),
            "seconds_max": max(s.seconds for s in group),
            "cpu_seconds": _median([s.cpu_seconds for s in group if s.cpu_seconds is not None]),
            "extra_nbytes": max((s.extra_nbytes for s in group if s.extra_nbytes is not None), default=None),
        }
        for (model, nbytes, operation, contender), group in groups.items()
    ]


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=model_names(), help="tiny, gpt2_adam or names of a shapes file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/checkpoint"), help="without suffix")
    options = parser.parse_args()
    preload()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = describe_machine(Path(folder), options.device)
        for model in options.models:
            print(f"measuring {model} ...", file=sys.stderr, flush=True)
            samples += run_model(model, options.device, options.rounds, Path(folder))
    rows = summarize(samples)
    verdicts = judge(rows)
    text = table(rows, machine, verdicts)
    options.output.with_suffix(".md").write_text(text)
    result = {"machine": machine, "rows": rows, "verdicts": verdicts, "samples": [asdict(s) for s in samples]}
    options.output.with_suffix(".json").write_text(json.dumps(result, indent=1))
    plot(rows, options.output.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
