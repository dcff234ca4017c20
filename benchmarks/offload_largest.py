"""The part of ``benchmarks/offload.py`` that looks for the largest batch in limited memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from offload_contenders import checkpoint_each
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import larger_batch

LEAST_TIMES = 24.0
"""What is promised."""


class Checkpointed(larger_batch.Task):
    """An attempt by gradient checkpointing of each block."""

    def model(self) -> nn.Module:
        net: nn.Module = super().model()
        checkpoint_each(net)
        return net


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--room", type=int, default=512, help="MiB for training, where the largest batch is looked for")
    parser.add_argument("--blocks", type=int, default=48)
    parser.add_argument("--width", type=int, default=128)


def measure(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    task = larger_batch.Task(
        "plain", 256, False, options.room << 20, options.blocks, options.width, options.device, folder
    )
    values = {field.name: getattr(task, field.name) for field in fields(task)}
    none, _ = larger_batch.largest(task, 1.1)
    checkpointing, _ = larger_batch.largest(Checkpointed(**{**values, "batch": max(2 * none, 1)}), 1.1)
    offloads = larger_batch.Task(**{**values, "offloads": True, "batch": max(2 * none, 1)})
    offloading, _ = larger_batch.largest(offloads, 1.1)
    return {"room": options.room, "none": none, "checkpointing": checkpointing, "auto": offloading}


def report(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"Rows in a batch of the model of `examples/larger_batch.py`, in {found['room']} MiB."
    yield from ("", "| | rows | : none |", "|---|---:|---:|")
    for name in ("none", "checkpointing", "auto"):
        times = found[name] / max(found["none"], 1)
        kept = name != "auto" or times >= LEAST_TIMES
        yield f"| {name} | {found[name]} | {f'{times:.1f}' if kept else f'**{times:.1f}**'} |"
    yield from ("", f"Promised: {LEAST_TIMES:.0f} × by auto.")
