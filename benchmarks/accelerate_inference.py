"""What a forward pass costs of a model that is larger than memory, by Accelerate's ``disk_offload`` and by Fastensor.

A model of transformers' Llama architecture, in float32, with random weights. Each run is a fresh process whose memory
(RLIMIT_DATA) is limited to a part of the model's size. It runs some forward passes: the first one with everything that
has to be done before, from an empty model on. Cold: no page of the weights is in the page cache before the first pass.
Warm: all are. The ways take turns, and have to give the same output to the last bit.

- ``disk_offload``: Accelerate's function, on a folder that it has written.
- ``fastensor, checkpoint``: ``cpu_offload`` with a ``CheckpointMapping`` of a sharded checkpoint of safetensors.
- ``fastensor, folder``: the same with the folder of ``disk_offload``.

fio reads as many bytes directly: what the disk can do. Run by ``make bench``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import time
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload, init_empty_weights
from accelerate.utils import offload_weight, save_offload_index
from accelerate_state import add_places, in_turn, promises, report, say, verdict
from async_checkpoint import collect
from contenders import fio_seconds
from measuring import drop_caches, settle
from transformers import LlamaConfig, LlamaForCausalLM

import fastensor
from fastensor.files import posix
from fastensor_accelerate import CheckpointMapping

STOCK, CHECKPOINT, FOLDER = "disk_offload", "fastensor, checkpoint", "fastensor, folder"
WAYS = (STOCK, CHECKPOINT, FOLDER)
FIO = "fio"
SIZES: dict[str, dict[str, int]] = {
    "4GiB": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 19, "vocab_size": 32000},
    "1GiB": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100},
}
"""What differs from transformers' ``LlamaConfig``."""
TOKENS = 8
SHARD_NBYTES = 1 << 30
MEMORY = 0.6
"""How much memory for data (RLIMIT_DATA) a process may have, as a part of the model's size."""
LEAST_MEMORY_NBYTES = 64 << 20
PROMISED_COLD = 2.0
"""How many times as fast as ``disk_offload`` the first pass of a process is."""
PROMISED_WARM = 1.05
"""The seconds of a pass, divided by those of ``disk_offload``."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One forward pass, or one read of as many bytes by fio."""

    way: str
    start: str
    """``cold`` or ``warm``: what was in the page cache before the process's first pass."""
    number: int
    """0 for the first one of its process."""
    seconds: float
    peak_bytes: int = 0
    """The most resident memory of the process that no file backs, sampled at the ends of modules."""


def empty_model(size: str) -> LlamaForCausalLM:
    """The model without memory for its weights."""
    heads = SIZES[size]["hidden_size"] // 64
    config = LlamaConfig(**SIZES[size], num_attention_heads=heads, num_key_value_heads=heads)
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    return model.eval()


def write_weights(size: str, checkpoint: Path, folder: Path) -> int:
    """Write the same random weights as a sharded checkpoint and as ``disk_offload`` does, a tensor at a time in memory,
    a shard at a time. Returns their bytes."""
    generator = torch.Generator().manual_seed(0)
    checkpoint.mkdir()
    folder.mkdir()
    index: dict[str, Any] = {}
    files: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = 0

    def save_shard() -> None:
        name = f"model-{len(set(files.values())) + 1:05}.safetensors"
        fastensor.save(dict(shard), checkpoint / name)
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, like in empty_model(size).state_dict().items():
        tensor = torch.empty(like.shape).normal_(0, 0.02, generator=generator)
        offload_weight(tensor, name, folder, index)
        if shard and sum(one.nbytes for one in shard.values()) + tensor.nbytes > SHARD_NBYTES:
            save_shard()
        shard[name] = tensor
        total += tensor.nbytes
    save_shard()
    save_offload_index(index, folder)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return total


def measure_passes(
    way: str, start: str, size: str, passes: int, limit: int, checkpoint: Path, folder: Path, results: Any
) -> None:
    """In a fresh process: send the CRC32 of the output, then a sample for each pass."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (status("VmData") + limit,) * 2)
    tokens = torch.arange(TOKENS).reshape(1, -1)
    peaks: list[int] = []
    samples: list[Sample] = []
    torch.set_grad_enabled(False)
    started = time.perf_counter()
    model = empty_model(size)
    if way == STOCK:
        disk_offload(model, folder, torch.device("cpu"))
    else:
        weights = CheckpointMapping(checkpoint if way == CHECKPOINT else folder, model)
        cpu_offload(model, torch.device("cpu"), state_dict=weights)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda *_: peaks.append(status("RssAnon")))
    for number in range(passes):
        peaks.clear()
        output = model(tokens).logits
        samples.append(Sample(way, start, number, time.perf_counter() - started, max(peaks)))
        started = time.perf_counter()
    results.send(zlib.crc32(output.numpy().tobytes()))
    for sample in samples:
        results.send(sample)


def status(field: str) -> int:
    """A size in bytes of what the kernel says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def prepare(start: str, way: str, checkpoint: Path, folder: Path) -> None:
    """Read all files of the way. Then drop them from the page cache, if the pass is to be cold: what the host of a
    virtual disk keeps is the same for all ways then."""
    for path in sorted((checkpoint if way == CHECKPOINT else folder).iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.read(8 << 20):
                pass
            os.fsync(file.fileno())  # pages that are not on the disk stay
            if start == "cold" and posix.evict(file.fileno(), path.stat().st_size):
                raise SystemExit(f"{path}: not all of it leaves the page cache")
    if start == "cold":
        drop_caches("inodes")


def measure(size: str, runs: int, passes: int, folder: Path) -> tuple[int, list[Sample]]:
    """The bytes of the model, and everything that was measured."""
    samples: list[Sample] = []
    outputs: set[int] = set()
    places = (folder / "checkpoint", folder / "folder")
    say(f"writing the weights, {size}")
    nbytes = write_weights(size, *places)
    limit = max(int(MEMORY * nbytes), LEAST_MEMORY_NBYTES)
    for run in range(runs):
        for start in ("cold", "warm"):
            for way in in_turn(WAYS, run):
                say(f"run {run + 1} of {runs}, {way}, {start}")
                settle()
                prepare(start, way, *places)
                output, *found = collect(measure_passes, way, start, size, passes, limit, *places)
                outputs.add(output)
                samples += found
        settle()
        seconds = fio_seconds(folder / "limit", nbytes, write=False)
        samples += [] if seconds is None else [Sample(FIO, "cold", 0, seconds)]
    if len(outputs) != 1:
        raise SystemExit("the outputs of the ways differ")
    return nbytes, samples


def median(samples: list[Sample], way: str, start: str, *, later: bool) -> float:
    return statistics.median(
        one.seconds for one in samples if (one.way, one.start, bool(one.number)) == (way, start, later)
    )


def judge(samples: list[Sample]) -> list[dict[str, Any]]:
    """What was promised, what was measured, and whether it holds."""
    verdicts = []
    for way in (CHECKPOINT, FOLDER):
        cold = median(samples, STOCK, "cold", later=False) / median(samples, way, "cold", later=False)
        verdicts.append(verdict(f"{way}: {STOCK} / cold first pass ≥ {PROMISED_COLD}", cold, cold >= PROMISED_COLD))
        for later in (False, True):
            warm = median(samples, way, "warm", later=later) / median(samples, STOCK, "warm", later=later)
            what = f"{way}: warm {'later' if later else 'first'} pass / {STOCK} ≤ {PROMISED_WARM}"
            verdicts.append(verdict(what, warm, warm <= PROMISED_WARM))
    return verdicts


def table(machine: dict[str, str], nbytes: int, samples: list[Sample], verdicts: list[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    lines = ["# Forward passes of a model that is larger than memory: default options", ""]
    lines += [f"- {what}: {text}" for what, text in machine.items()]
    lines += [f"- weights: {nbytes / 2**20:.0f} MiB; memory for data: {MEMORY:.0%} of that", "", "## medians", ""]
    lines += ["| at the start | way | pass | median s (minimum–maximum) | / disk_offload | GB/s | MiB | times |"]
    lines += ["|---|---|---|---:|---:|---:|---:|---:|"]
    for start, later in (("cold", False), ("cold", True), ("warm", False), ("warm", True)):
        for way in (*WAYS, FIO):
            group = [one for one in samples if (one.way, one.start, bool(one.number)) == (way, start, later)]
            if not group:
                continue
            seconds = [one.seconds for one in group]
            middle = statistics.median(seconds)
            memory = f"{max(one.peak_bytes for one in group) / 2**20:.0f}" if group[0].peak_bytes else "–"
            lines.append(
                f"| {start} | {way} | {'later' if later else 'first'} "
                f"| {middle:.3f} ({min(seconds):.3f}–{max(seconds):.3f}) "
                f"| {middle / median(samples, STOCK, start, later=later):.2f} | {nbytes / middle / 1e9:.2f} "
                f"| {memory} | {len(group)} |"
            )
    lines += ["", "MiB: the most anonymous memory of a process."]
    return "\n".join([*lines, *promises(verdicts)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="4GiB")
    parser.add_argument("--runs", type=int, default=5, help="processes of each way, cold and warm")
    parser.add_argument("--passes", type=int, default=3, help="in each process")
    add_places(parser, Path("benchmarks/results/accelerate_inference"))
    options = parser.parse_args()
    if options.passes < 2:
        parser.error("--passes: 2 or more, so that there is a later one")
    libraries = ["fastensor_accelerate", "transformers.models.llama.modeling_llama", "torch._dynamo"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)
    report(options, lambda folder: measure(options.size, options.runs, options.passes, folder), judge, table)


if __name__ == "__main__":
    main()
