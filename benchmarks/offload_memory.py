"""A picture of the memory that training steps take over time, with activation offload and without.

Each way trains an encoder of transformer blocks for a few steps in a process of its own, with a trace
(``OffloadConfig(trace=...)``) whose samples of memory are drawn: of the last step, from its first saved tensor to the
last one that is needed. Without offload the same hooks run, and keep every tensor. In both, the C library maps each
large tensor by itself, and gives its memory back to the system when it is freed: the picture is of memory in use.

    python benchmarks/offload_memory.py --batch 16
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pictures
import torch
from measuring import preload
from torch import nn

from fastensor.offload import ActivationOffload, OffloadConfig

WAYS: dict[str, dict[str, Any]] = {"without offload": {"min_bytes": 1 << 62}, "with offload": {}}
RESULT = Path(__file__).parent / "results" / "offload-memory.png"


@dataclass(frozen=True, slots=True)
class MemoryOfStep:
    """Samples of the last step in a trace."""

    seconds: list[float]
    """Since the forward pass has saved its first tensor."""
    nbytes: list[int]
    """More than at the first sample of the trace."""
    backward: float
    """When the backward pass has needed its first tensor."""


def memory_of_step(trace: Path, device: str) -> MemoryOfStep:
    """The memory that the last step in a trace has taken.

    Args:
        trace: the file.
        device: ``host`` or ``cuda:0``.
    """
    events = json.loads(trace.read_text())["traceEvents"]
    samples = [(one["ts"], one["args"][device]) for one in events if one["ph"] == "C" and one["name"] == "memory"]
    last = max(one["args"]["pass"] for one in events if one["name"] == "backward")
    of_last = [one for one in events if one["ph"] in "be" and one["args"]["pass"] == last]
    begin, end = min(one["ts"] for one in of_last), max(one["ts"] for one in of_last)
    backward = min(one["ts"] for one in of_last if one["name"] == "backward")
    within = [(at, nbytes) for at, nbytes in samples if begin <= at <= end]
    return MemoryOfStep(
        [(at - begin) / 1e6 for at, _ in within],
        [nbytes - samples[0][1] for _, nbytes in within],
        (backward - begin) / 1e6,
    )


def train(way: str, arguments: argparse.Namespace, trace: str, folder: str) -> None:
    """Train for some steps, and write a trace."""
    device = torch.device(arguments.device)
    layer = nn.TransformerEncoderLayer(arguments.width, 8, 4 * arguments.width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, arguments.layers, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(arguments.batch, 256, arguments.width, device=device)
    with ActivationOffload(OffloadConfig(schedule="all", directories=(folder,), trace=trace, **WAYS[way])) as offload:
        offload.attach(model)
        for _ in range(arguments.steps):
            with offload.step():
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()


def plot(steps: dict[str, MemoryOfStep], path: Path) -> None:
    """Memory over time, a line for each way; dotted where its backward pass begins."""
    figure, (axis,) = pictures.panels(1, height=3.6)
    for way, step in steps.items():
        colour, peak = pictures.COLOURS[way], max(step.nbytes) / 2**20
        axis.plot(step.seconds, [nbytes / 2**20 for nbytes in step.nbytes], color=colour, label=way)
        axis.axvline(step.backward, color=colour, linestyle=":")
        at = (step.seconds[step.nbytes.index(max(step.nbytes))], peak)
        axis.annotate(f"{peak:.0f} MiB", at, xytext=(12, 3), textcoords="offset points", color=colour)
    axis.set(xlabel="seconds (dotted: the backward pass begins)", ylabel="memory of a step, MiB")
    axis.set_ylim(bottom=0)
    pictures.legend(figure, [axis])
    pictures.write(figure, path)


def main() -> None:
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))  # glibc's; it counts in the processes that train
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", default=".", help="where activations go")
    parser.add_argument("--result", type=Path, default=RESULT)
    arguments = parser.parse_args()
    preload()
    steps = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for way in WAYS:
            trace = os.path.join(folder, "trace.json")
            process = multiprocessing.get_context("forkserver").Process(
                target=train, args=(way, arguments, trace, folder)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"the steps {way} have failed")
            steps[way] = memory_of_step(Path(trace), "host" if arguments.device == "cpu" else "cuda:0")
            print(f"{way}: at most {max(steps[way].nbytes) / 2**20:.0f} MiB, {steps[way].seconds[-1]:.2f} s")
    plot(steps, arguments.result)


if __name__ == "__main__":
    main()
