"""Activation offload of models that Accelerate shards by FSDP2.

Accelerate gives FSDP to machines with accelerators only, so the tests say to it that two processes of gloo are FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from programs import run_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fastensor_accelerate
from fastensor.offload import OffloadConfig
from fastensor_accelerate import FastensorConfig


def accelerator_of_fsdp2() -> Accelerator:
    PartialState._reset_state()
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, auto_wrap_policy="size_based_wrap", min_num_params=1000
    )
    return accelerator


def trained(folder: Path, *, by: str | None) -> tuple[list[torch.Tensor], Any]:
    """Losses and this process's weights, and what the offload has done."""
    if by == "flag":
        config = FastensorConfig(
            offload=True, offload_schedule="all", offload_min_bytes=1, offload_directories=(str(folder),)
        )
        fastensor_accelerate.enable(config)
    accelerator = accelerator_of_fsdp2()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.GELU())))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    assert isinstance(model, FSDPModule)
    if by == "attach":
        fastensor_accelerate.attach(model, OffloadConfig(schedule="all", min_bytes=1, directories=(str(folder),)))
    torch.manual_seed(1 + dist.get_rank())
    found = []
    for _ in range(3):
        loss = model(torch.randn(8, 64)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    found += [parameter.to_local() for parameter in model.parameters()]
    statistics = None
    if by is not None:
        statistics = fastensor_accelerate.attach(model).statistics()  # the offload of the earlier call
        fastensor_accelerate.detach(model)
    fastensor_accelerate.disable()
    return found, statistics


def _train(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    expected, _ = trained(folder, by=None)
    for by in ("attach", "flag"):
        found, statistics = trained(folder, by=by)
        assert statistics.offloaded_bytes > 0, by
        assert statistics.failed_writes == 0, by
        assert all(map(torch.equal, found, expected)), by
    dist.destroy_process_group()


def test_training_is_the_same(tmp_path: Path) -> None:
    run_ranks(_train, 2, tmp_path)
