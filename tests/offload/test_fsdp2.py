"""Models that FSDP2 shards: their parameters' memory comes and goes, and is not offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from checkpoints import join
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_models import act_as_rank
from offload.lightning_callbacks import WrittenFirst
from programs import free_port, run_ranks
from recomputing import MEASURED, plans_that_recompute
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fastensor.offload import ActivationOffload, OffloadConfig
from fastensor.offload.swapper import Swapper
from fastensor_lightning import SSDActivationOffload

STEPS = 3
WIDTH = 24
Prepare = Callable[[nn.Module, DeviceMesh], None]


class Block(nn.Module):
    """Autograd saves views of trained and frozen weights, and tensors that share a weight's memory without being
    views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mix = self.mix.to_local() if isinstance(self.mix, DTensor) else self.mix
        x = x + self.narrow(functional.gelu(self.wide(self.norm(x))))
        return self.frozen(x).sigmoid() + x @ mix + x @ mix.detach()

    encode = forward


class Model(nn.Module):
    """The embedding and the head share their weight."""

    def __init__(self, checkpointed: bool = False, encodes: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpointed = checkpointed
        self.encodes = encodes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            run = block.encode if self.encodes else block
            x = checkpoint(run, x, use_reentrant=False) if self.checkpointed else run(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


def sharded(**options: Any) -> Prepare:
    def prepare(model: nn.Module, mesh: DeviceMesh) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, **options)
            register_fsdp_forward_method(block, "encode")
        fully_shard(model, mesh=mesh, **options)

    return prepare


def compiled(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    sharded()(model, mesh)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Of a parameter that tensor parallelism has sharded, FSDP2 shards the part of this rank."""
    for block in model.blocks:
        mix = distribute_tensor(block.mix.detach(), mesh["tp"], [Shard(1)])
        block.mix = nn.Parameter(mix)
        block.forward = functional_of(block, mesh["tp"])  # type: ignore[method-assign]
    sharded()(model, mesh["dp"])


def functional_of(block: Any, mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward pass that multiplies by this rank's columns of ``mix``."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        local = block.mix.to_local()
        x = x + block.narrow(functional.gelu(block.wide(block.norm(x))))
        columns = (x @ local).sigmoid() + x @ local.detach()
        return block.frozen(x).sigmoid() + columns.sum(-1, keepdim=True)

    return forward


class Admitted:
    """What was handed over to be offloaded."""

    def __init__(self) -> None:
        self.storages: set[int] = set()
        self.nbytes: list[int] = []
        """In the first step. Later ones leave alone what others were found to keep alive, which is a matter of time."""

    @contextmanager
    def watching(self, *, first: bool) -> Iterator[None]:
        admit = Swapper.admit

        def watch(swapper: Swapper, saved: Any) -> None:
            self.storages.add(saved.source._cdata)
            if first:
                self.nbytes.append(saved.nbytes)
            admit(swapper, saved)

        with mock.patch.object(Swapper, "admit", watch):
            yield


def groups_in(state: Any) -> list[Any]:
    """The groups of parameters of a module. Before torch 2.13 it has one, or none."""
    if torch.__version__ >= "2.13":
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def memory_of_parameters(model: nn.Module) -> set[int]:
    """The storages that FSDP2 gathers parameters in."""
    groups = [group for module in model.modules() if hasattr(module, "unshard")
              for group in groups_in(module._get_fsdp_state())]  # fmt: skip
    outputs = [output for group in groups for one in group.fsdp_params for output in one.all_gather_outputs]
    assert outputs
    return {output.untyped_storage()._cdata for output in outputs}


def train(
    prepare: Prepare | None,
    mesh: DeviceMesh,
    offload: ActivationOffload | None,
    *,
    micro_batches: int = 1,
    by_hand: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], Model, Admitted]:
    """Losses of all micro-batches, and weights and states of the optimizer at the end."""
    torch.manual_seed(0)
    model: Any = Model(**options)
    if offload is not None:
        offload.attach(model)  # before it is sharded, as a user may
    if prepare is not None:
        prepare(model, mesh)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)
    results, admitted = [], Admitted()
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        for micro in range(micro_batches):
            if prepare is not None:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            if by_hand:
                for module in (model, *model.blocks):
                    module.unshard()
            with admitted.watching(first=step == 0), nullcontext() if offload is None else offload.step():
                loss = model(torch.randint(40, (4, 16)))
            loss.backward()
            results.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    for parameter in optimizer.param_groups[0]["params"]:
        states = optimizer.state[parameter]
        for tensor in (parameter.detach(), states["exp_avg"], states["exp_avg_sq"]):
            results.append(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
    return results, model, admitted


def check(folder: Path, name: str, prepare: Prepare, mesh: DeviceMesh, **options: Any) -> Admitted:
    expected, *_ = train(prepare, mesh, None, **options)
    with ActivationOffload(
        OffloadConfig(schedule="all", min_bytes=1, dram_bytes=0, directories=(str(folder),))
    ) as offload:
        found, model, admitted = train(prepare, mesh, offload, **options)
        statistics = offload.statistics()
    assert len(found) == len(expected)
    different = [index for index, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)]
    assert not different, f"{name}: results {different} differ"
    assert statistics.written_bytes > 0, name
    assert statistics.failed_writes == 0, name
    assert not admitted.storages & memory_of_parameters(model), f"{name}: parameters are offloaded"
    return admitted


def test_training_is_the_same(tmp_path: Path) -> None:
    run_ranks(_train_on_two, 2, tmp_path)


def _train_on_two(rank: int, folder: Path) -> None:
    mesh = join(folder, rank, 2)
    admitted = check(folder, "resharded", sharded(), mesh)
    with ActivationOffload(OffloadConfig(schedule="all", min_bytes=1, directories=(str(folder),))) as offload:
        *_, alone = train(None, mesh, offload)
    assert admitted.nbytes == alone.nbytes, "the same is offloaded as of a model that is not sharded"
    check(folder, "unsharded until the backward pass", sharded(reshard_after_forward=False), mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    check(folder, "mixed precision", sharded(mp_policy=policy), mesh)
    check(folder, "activation checkpointing", sharded(), mesh, checkpointed=True)
    check(folder, "accumulation", sharded(), mesh, micro_batches=2)
    check(folder, "unsharded by hand", sharded(), mesh, by_hand=True)
    check(folder, "a method that is not forward", sharded(), mesh, encodes=True)
    dist.destroy_process_group()


def test_blocks_are_computed_again(tmp_path: Path) -> None:
    """With the parameters that FSDP2 has gathered for the backward pass. Ranks need not do it alike."""
    run_ranks(_recompute_on_two, 2, tmp_path)


def _recompute_on_two(rank: int, folder: Path) -> None:
    mesh = join(folder, rank, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    config = OffloadConfig(schedule=1 << 30, min_bytes=1, directories=(str(folder),), recompute="auto")
    ways: dict[str, tuple[Prepare, dict[str, Any]]] = {
        "resharded": (sharded(), {}),
        "unsharded until the backward pass": (sharded(reshard_after_forward=False), {}),
        "mixed precision": (sharded(mp_policy=policy), {}),
        "accumulation": (sharded(), {"micro_batches": 2}),
        "unsharded by hand": (sharded(), {"by_hand": True}),
        "the model alone": (lambda model, mesh: fully_shard(model, mesh=mesh) and None, {}),
    }
    for name, (prepare, options) in ways.items():
        expected, *_ = train(prepare, mesh, None, **options)
        with plans_that_recompute(lambda number: number != rank), ActivationOffload(config) as offload:
            found, *_ = train(prepare, mesh, offload, **options)
            assert offload.statistics().recomputed == 2 * (STEPS * options.get("micro_batches", 1) - MEASURED), name
        assert all(map(torch.equal, found, expected)), name
    dist.destroy_process_group()


@pytest.mark.torture
def test_training_of_compiled_blocks(tmp_path: Path) -> None:
    run_ranks(_train_compiled, 2, tmp_path)


def _train_compiled(rank: int, folder: Path) -> None:
    mesh = join(folder, rank, 2)
    check(folder, "compiled", compiled, mesh)
    check(folder, "compiled, with activation checkpointing", compiled, mesh, checkpointed=True)
    dist.destroy_process_group()


def test_training_on_meshes_of_two_dimensions(tmp_path: Path) -> None:
    run_ranks(_train_on_four, 4, tmp_path)


def _train_on_four(rank: int, folder: Path) -> None:
    mesh = join(folder, rank, 4)
    check(folder, "resharded to two ranks", sharded(reshard_after_forward=2), mesh)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check(folder, "hybrid", sharded(), mesh)
    check(folder, "tensor parallelism", tensor_parallel, mesh)
    dist.destroy_process_group()


class Net(pl.LightningModule):
    """A module that Lightning's ModelParallelStrategy shards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Model()

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        sharded()(self.model, self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch[0])
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_a_trainer_with_model_parallel_strategy(tmp_path: Path) -> None:
    run_ranks(_fit, 2, free_port(), tmp_path)


def _fit(rank: int, port: int, folder: Path) -> None:
    act_as_rank(rank, port)
    torch.set_num_threads(1)
    tokens = torch.randint(40, (8, 16), generator=torch.Generator().manual_seed(0))
    weights, admitted = [], Admitted()
    for callback in (None, SSDActivationOffload(OffloadConfig(schedule="all", min_bytes=1, dram_bytes=0))):
        module = Net()
        trainer = pl.Trainer(
            default_root_dir=folder, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, max_epochs=1,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            callbacks=[callback, WrittenFirst(callback)] if callback else [],
        )  # fmt: skip
        with admitted.watching(first=True):
            trainer.fit(module, DataLoader(TensorDataset(tokens), batch_size=2))
        weights.append([parameter.to_local() for parameter in module.parameters()])
    assert callback is not None
    assert callback.statistics is not None
    assert callback.statistics.written_bytes > 0
    assert callback.statistics.failed_writes == 0
    assert not admitted.storages & memory_of_parameters(module.model)
    assert all(map(torch.equal, *weights))
    dist.destroy_process_group()
