"""The part of ``benchmarks/offload.py`` that trains beside a job which needs the bandwidth of memory.

FlashNeuron's section 4.3: a target in host memory takes bandwidth from other jobs, and they take it from the training.
A job that copies arrays runs beside the training; how much each of them loses is measured, with nothing offloaded, with
an SSD as the target, and with a folder in memory as the target. The training has one thread, so that the job has a
processor.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from statistics import median
from typing import Any

import numpy as np
import torch
from measuring import settle
from offload_contenders import MODELS

from fastensor.offload import ActivationOffload, OffloadConfig

ARRAY_NBYTES = 256 << 20
WARM_UP = 5
TARGETS = ("none", "SSD", "memory")
_SECONDS_ALONE = 5.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--beside-model", choices=MODELS, default="ViT-S, 197 tokens")
    parser.add_argument("--array-bytes", type=int, default=ARRAY_NBYTES, help="of each of the two arrays of the job")


def copy_on(copied: Any, nbytes: int) -> None:
    """The job: copy one array to another, and count the copies, until the process is ended."""
    source, target = np.ones(nbytes // 8), np.zeros(nbytes // 8)
    while True:
        np.copyto(target, source)
        copied.value += 1


def train(model: str, steps: int, folder: str | None, copied: Any) -> tuple[float, float]:
    """The median seconds of a step, and the job's copies in a second."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, data = MODELS[model]()
    offload = None if folder is None else ActivationOffload(OffloadConfig(schedule="all", directories=(folder,)))
    if offload is not None:
        offload.attach(net)
    seconds = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            before, begun = copied.value, time.perf_counter()
        net.zero_grad()
        started = time.perf_counter()
        with nullcontext() if offload is None else offload.step():
            loss = net(data).square().mean()
        loss.backward()
        seconds.append(time.perf_counter() - started)
    return median(seconds[WARM_UP:]), (copied.value - before) / (time.perf_counter() - begun)


def once(model: str, steps: int, folder: str | None, nbytes: int, *, beside: bool) -> tuple[float, float]:
    """The seconds of a step, and the bytes that the job copies in a second."""
    context = multiprocessing.get_context("spawn")
    copied = context.Value("q", 0, lock=False)
    job = context.Process(target=copy_on, args=(copied, nbytes), daemon=True)
    if beside:
        job.start()
    try:
        with context.Pool(1, _keep, (copied,)) as pool:
            step, copies = pool.apply(_train, (model, steps, folder))
    finally:
        if beside:
            job.kill()
            job.join()
    return step, copies * nbytes


def _keep(copied: Any) -> None:
    """Values in shared memory are handed over when a process begins, only."""
    global _copied
    _copied = copied


def _train(model: str, steps: int, folder: str | None) -> tuple[float, float]:
    return train(model, steps, folder, _copied)


def job_alone(nbytes: int) -> float:
    """The bytes that the job copies in a second beside nothing."""
    context = multiprocessing.get_context("spawn")
    copied = context.Value("q", 0, lock=False)
    job = context.Process(target=copy_on, args=(copied, nbytes), daemon=True)
    job.start()
    while copied.value < 2:
        time.sleep(0.01)
    before, begun = copied.value, time.perf_counter()
    time.sleep(_SECONDS_ALONE)
    rate = (copied.value - before) / (time.perf_counter() - begun) * nbytes
    job.kill()
    job.join()
    return float(rate)


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"model": options.beside_model, "job alone": [], "rounds": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        folders = {"none": None, "SSD": folder, "memory": memory}
        for _ in range(options.rounds):
            settle()
            found["job alone"].append(job_alone(options.array_bytes))
            times = {}
            for target in TARGETS:
                for beside in (False, True):
                    settle()
                    times[f"{target}, {beside}"] = once(
                        options.beside_model, options.steps, folders[target], options.array_bytes, beside=beside
                    )
                    print(target, beside, times[f"{target}, {beside}"], flush=True)
            found["rounds"].append(times)
    return found


def report(found: Mapping[str, Any]) -> Iterator[str]:
    rounds, alone = found["rounds"], found["job alone"]
    yield f"{found['model']}, one thread; a job that copies memory, alone {median(alone) / 1e9:.1f} GB/s."
    yield from (
        "",
        "| activations go to | step alone, s | : none | step beside the job | : alone | job beside | : job alone |",
        "|---|---:|---:|---:|---:|---:|---:|",
    )
    for target in TARGETS:
        steps = [times[f"{target}, False"][0] for times in rounds]
        nones = [times["none, False"][0] for times in rounds]
        beside = [times[f"{target}, True"] for times in rounds]
        cells = [
            f"{median(steps):.2f}",
            f"{median(a / b for a, b in zip(steps, nones, strict=True)):.2f}",
            f"{median(step for step, _ in beside):.2f}",
            f"{median(step / a for (step, _), a in zip(beside, steps, strict=True)):.2f}",
            f"{median(rate for _, rate in beside) / 1e9:.1f}",
            f"{median(rate / a for (_, rate), a in zip(beside, alone, strict=True)):.2f}",
        ]
        yield f"| {target} | {' | '.join(cells)} |"
