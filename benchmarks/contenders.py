"""What is compared: ways to save a dict of tensors durably and atomically, and ways to load it to usable tensors."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import fastensor

Shape: TypeAlias = tuple[str, list[int], str]
"""Name, shape and dtype of a tensor."""
State = dict[str, Tensor]
SHAPES = Path(__file__).parent / "model_shapes.json"


@dataclass(frozen=True, slots=True)
class Contender:
    """One way. Both functions get the path that is its own."""

    name: str
    save: Callable[[State, Path], object]
    load: Callable[[Path, str], State]


def build_state(model: str, device: str) -> State:
    """A dict of random tensors: see :func:`shapes_of`."""
    return filled(shapes_of(model), device)


def shapes_of(model: str) -> list[Shape]:
    """The shapes of a model in ``model_shapes.json``, of ``gpt2_adam``, or of ``tiny``."""
    if model == "gpt2_adam":
        return [(f"{part}.{k}", s, "float32") for part in ("model", "exp_avg", "exp_avg_sq") for k, s in _gpt2()]
    if model == "tiny":
        return [(f"layer{i}.weight", [64, 64], "float32") for i in range(8)]
    return [tuple(entry) for entry in json.loads(SHAPES.read_text())[model]]


def filled(shapes: list[Shape], device: str) -> State:
    """Random tensors of these shapes."""
    generator = torch.Generator().manual_seed(0)
    return {key: _random(shape, dtype, generator).to(device) for key, shape, dtype in shapes}


def model_names() -> list[str]:
    return ["gpt2_adam", *json.loads(SHAPES.read_text())]


def gpt2_block(d: int) -> dict[str, list[int]]:
    """Shapes of the parameters of one of GPT-2's layers; ``d`` is its width."""
    return {
        "ln_1.weight": [d], "ln_1.bias": [d], "attn.c_attn.weight": [d, 3 * d], "attn.c_attn.bias": [3 * d],
        "attn.c_proj.weight": [d, d], "attn.c_proj.bias": [d], "ln_2.weight": [d], "ln_2.bias": [d],
        "mlp.c_fc.weight": [d, 4 * d], "mlp.c_fc.bias": [4 * d],
        "mlp.c_proj.weight": [4 * d, d], "mlp.c_proj.bias": [d],
    }  # fmt: skip


def _gpt2() -> list[tuple[str, list[int]]]:
    """Shapes of GPT-2 small's parameters: 148 tensors, 124.4 million values; its output layer is tied to ``wte``."""
    d = 768
    blocks = [(f"h.{i}.{name}", shape) for i in range(12) for name, shape in gpt2_block(d).items()]
    return [("wte.weight", [50257, d]), ("wpe.weight", [1024, d]), *blocks, ("ln_f.weight", [d]), ("ln_f.bias", [d])]


def _random(shape: list[int], dtype: str, generator: torch.Generator) -> Tensor:
    if dtype.startswith("int"):
        return torch.randint(0, 1 << 30, shape, dtype=getattr(torch, dtype), generator=generator)
    return torch.randn(shape, dtype=getattr(torch, dtype), generator=generator)


def publish(temporary: Path, target: Path) -> None:
    """What Fastensor does, for those who do not: sync, rename, sync the directory."""
    for path in [temporary, *temporary.iterdir()] if temporary.is_dir() else [temporary]:
        sync(path)
    if target.is_dir():
        shutil.rmtree(target)
    temporary.rename(target)
    sync(target.parent)


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _save_torch(state: State, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    publish(temporary, path)


def _save_torch_without_crc(state: State, path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        _save_torch(state, path)
    finally:
        torch.serialization.set_crc32_options(True)


def _save_safetensors(state: State, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    safetensors.torch.save_file(state, temporary)
    publish(temporary, path)


def _save_dcp(threads: int) -> Callable[[State, Path], None]:
    def save(state: State, path: Path) -> None:
        temporary = path.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        writer = dcp.FileSystemWriter(temporary, thread_count=threads)
        dcp.save(dict(state), storage_writer=writer, no_dist=True)
        publish(temporary, path)

    return save


def _usable(state: State, device: str) -> State:
    """Tensors in memory of their own, where a library returns views of a mapped file."""
    return {key: tensor.clone() if device == "cpu" else tensor.to(device) for key, tensor in state.items()}


def _load_dcp(path: Path, device: str) -> State:
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {k: torch.empty(m.size, dtype=m.properties.dtype, device=device) for k, m in metadata.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return state


OURS = "fastensor"
OURS_SAFETENSORS = "fastensor, safetensors"
REFERENCE = "torch"
MAPPED = "torch, no crc / mmap"
SAFETENSORS = "safetensors"
CONTENDERS = (
    Contender(OURS, lambda state, path: fastensor.save(state, path), lambda path, d: fastensor.load(path, d)),
    Contender(
        OURS_SAFETENSORS,
        lambda state, path: fastensor.save(state, path, container="safetensors"),
        lambda path, d: fastensor.load(path, d),
    ),
    Contender(REFERENCE, _save_torch, lambda path, d: torch.load(path, d)),
    Contender(
        MAPPED,
        _save_torch_without_crc,
        lambda path, d: _usable(torch.load(path, mmap=True), d),
    ),
    Contender(
        SAFETENSORS,
        _save_safetensors,
        lambda path, d: _usable(safetensors.torch.load_file(path), d),
    ),
    Contender("dcp, 1 thread", _save_dcp(1), _load_dcp),
    Contender("dcp, 2 threads", _save_dcp(2), _load_dcp),
)
SAVING_ONLY = ("dcp, 2 threads",)
"""Loads that are the same as another contender's."""


def fio_seconds(path: Path, nbytes: int, *, write: bool) -> float | None:
    """How long fio takes to move that many bytes directly and, when writing, to sync them; None without fio.

    fio counts whole milliseconds: None, too, for files that take less. Blocks of 8 MiB at most divide a number of MiB.
    """
    if shutil.which("fio") is None:
        return None
    divisor = nbytes & -nbytes
    block = min(8 << 20, divisor if divisor >= 1 << 20 else 1 << math.floor(math.log2(nbytes)))
    command = [
        "fio", "--name=limit", f"--filename={path}", f"--rw={'write' if write else 'read'}", f"--size={nbytes}",
        f"--bs={block}", "--direct=1", "--ioengine=io_uring", "--iodepth=4",
        "--end_fsync=1", "--output-format=json", "--randrepeat=0", "--thread",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
    milliseconds = int(job["job_runtime"])
    return milliseconds / 1000 or None
