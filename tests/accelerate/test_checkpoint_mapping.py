"""Models run from checkpoints by Accelerate's own functions: the same outputs, in bounded memory."""

from __future__ import annotations

import copy
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, init_empty_weights
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import offload_state_dict
from programs import run
from torch import Tensor, nn

import fastensor
from fastensor.errors import CheckpointReadError, CorruptCheckpointError, UnknownKeyError, UnsupportedContentError
from fastensor_accelerate import CheckpointMapping
from fastensor_accelerate.checkpoint_mapping import Order
from fastensor_accelerate.weight_files import Checkpoints

WIDTH = 32
BLOCK_NBYTES = WIDTH * WIDTH * 4
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")


class Block(nn.Module):
    """Its modules are called in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x)).tanh()
        return x + y


class Model(nn.Module):
    """An embedding, blocks, and a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


TOKENS = torch.arange(20) % 50


def trained(**options: Any) -> Model:
    torch.manual_seed(0)
    model = Model(**options).eval()
    for block in model.blocks:
        assert isinstance(block, Block)
        assert block.norm.running_mean is not None
        nn.init.normal_(block.norm.running_mean)
    return model


def empty(**options: Any) -> Model:
    """On the meta device, buffers included."""
    with torch.device("meta"):
        return Model(**options).eval()


def to_safetensors(model: nn.Module, folder: Path) -> Path:
    fastensor.save(model.state_dict(), folder / "model.safetensors", durable=False)
    return folder / "model.safetensors"


def to_safetensors_of_others(model: nn.Module, folder: Path) -> Path:
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def to_torch(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def to_ckpt(model: nn.Module, folder: Path) -> Path:
    fastensor.save(model.state_dict(), folder / "model.ckpt", durable=False)
    return folder / "model.ckpt"


def to_shards(model: nn.Module, folder: Path) -> Path:
    """Two shards, as ``save_pretrained`` and ``Accelerator.save_model`` name them."""
    state = model.state_dict()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    files = {name: names[place % 2] for place, name in enumerate(state)}
    for file in names:
        fastensor.save({name: state[name] for name in state if files[name] == file}, folder / file, durable=False)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return index


def to_offload_folder(model: nn.Module, folder: Path) -> Path:
    offload_state_dict(folder, dict(model.state_dict()))
    return folder


WRITERS = (to_safetensors, to_safetensors_of_others, to_torch, to_ckpt, to_shards, to_offload_folder)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of a trained model."""
    return to_safetensors(trained(), tmp_path)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("read_ahead_bytes", [0, 2 * BLOCK_NBYTES, 1 << 20])
def test_cpu_offload_computes_what_the_model_does(
    write: Callable[[nn.Module, Path], Path], read_ahead_bytes: int, tmp_path: Path
) -> None:
    expected = trained()(TOKENS)
    model = empty()
    with CheckpointMapping(write(trained(), tmp_path), model, read_ahead_bytes=read_ahead_bytes) as weights:
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        for _ in range(3):
            assert torch.equal(model(TOKENS), expected)
        assert all(parameter.device.type == "meta" for parameter in model.parameters())


@pytest.mark.parametrize("write", WRITERS)
def test_dispatch_model_computes_what_the_model_does(
    write: Callable[[nn.Module, Path], Path], tmp_path: Path
) -> None:
    """With main_device="cpu", Accelerate offloads only what is on "disk": a stand-in for a GPU."""
    model = empty()
    with CheckpointMapping(write(trained(), tmp_path), model) as weights:
        dispatch_model(model, {"": "cpu"}, main_device=FakeGpu(), state_dict=weights, offload_buffers=True, force_hooks=True)
        for _ in range(3):
            assert torch.equal(model(TOKENS), trained()(TOKENS))
