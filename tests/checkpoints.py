"""Saving and loading distributed checkpoints in tests, and states that show what went wrong."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import DTYPES, random_bytes
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.testing.calls import Call, intercepted

TIMEOUT_SECONDS = 40


def save(state: dict[str, Any], writer: Any, *, no_dist: bool = True, **options: Any) -> Metadata:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcp.save(state, storage_writer=writer, no_dist=no_dist, **options)


def load(state: dict[str, Any], reader: Any, *, no_dist: bool = True, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=no_dist, **options)
    return state


def fails_to_load(state: dict[str, Any], reader: FastensorStorageReader, why: str) -> None:
    """See that metadata cannot be read. Before torch 2.13, ``dcp.load`` does not say why."""
    with pytest.raises(Exception, match=why):
        reader.read_metadata()
    said = why if torch.__version__ >= "2.13" else "metadata is None"
    with pytest.raises(dcp.api.CheckpointException, match=said):
        load(state, reader)


def state_of_all_kinds() -> dict[str, Any]:
    """Tensors of all dtypes and layouts, large and small; other objects; nested."""
    base = torch.randn(300, 500)
    return {
        "dtypes": {str(dtype).rpartition(".")[2]: random_bytes(dtype, [3, 5], 7) for dtype in DTYPES},
        "plain": {"a": torch.randn(40, 70), "b.c": torch.arange(5)},
        "large": base,
        "transposed": base.t(),
        "rows": base[100:200],
        "columns": base[:, 3:7],
        "strided": base[::2],
        "bits": random_bytes(torch.bool, [400, 500], 3),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "expanded": torch.arange(3.0).expand(4, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "step": 7,
        "text": ["a", {"b": None}],
    }


def emptied(value: Any) -> Any:
    """A state of the same structure, to load into."""
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    return [emptied(one) for one in value] if isinstance(value, list) else None


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        one, two = (
            tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for tensor in (found, expected)
        )
        assert torch.equal(one, two)
    else:
        assert found == expected


def stamped(step: int) -> dict[str, Any]:
    """A state in which every tensor and object holds the step."""
    return {
        "large": torch.full((50_000,), step),
        "small": torch.full((3,), step),
        "layers": {f"{number}.weight": torch.full((10, 7), step) for number in range(4)},
        "step": step,
    }


def unstamped() -> dict[str, Any]:
    """A state to load a stamped one into."""
    state: dict[str, Any] = emptied(stamped(0))
    return state


def step_of(state: Any) -> int:
    """The step in a state, which is one and the same everywhere."""
    steps: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            for one in value.values():
                visit(one)
        elif isinstance(value, Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            steps.update(local.flatten().tolist())
        else:
            steps.add(value)

    visit(state)
    (found,) = steps
    return int(found)


def join(folder: str | Path, rank: int, world: int, store: dist.Store | None = None) -> DeviceMesh:
    """Join the group of a test's processes, which meet at a store, or at a file in the folder."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=None if store is not None else f"file://{folder}/store-{world}",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    return init_device_mesh("cpu", (world,))


def sharded(mesh: DeviceMesh, step: int | None) -> dict[str, Any]:
    """A state that is sharded in several ways. Values are those of ``step``; zeros if that is None."""
    values = (
        torch.zeros
        if step is None
        else lambda *shape: step * 1000.0 + torch.arange(float(torch.Size(shape).numel())).view(shape)
    )
    return {
        "rows": distribute_tensor(values(37, 50), mesh, [Shard(0)]),
        "columns": distribute_tensor(values(8, 300), mesh, [Shard(1)]),
        "large": distribute_tensor(values(1000, 70), mesh, [Shard(0)]),
        "replicated": distribute_tensor(values(9, 9), mesh, [Replicate()]),
        "plain": values(5, 5),
        "step": step,
    }


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """The same state with whole tensors."""
    return {key: one.full_tensor() if hasattr(one, "full_tensor") else one for key, one in state.items()}


class Calls:
    """How often storage of Fastensor and of torch was asked, in this process."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        for kind, method in (
            (FastensorStorageWriter, "write_data"), (FastensorStorageReader, "read_data"),
            (FileSystemWriter, "write_data"), (FileSystemReader, "read_data"),
        ):  # fmt: skip
            patches.setattr(kind, method, self._counted(kind.__name__, getattr(kind, method)))

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.names.append(name)
            return method(*arguments)

        return counted

    def since(self) -> dict[str, int]:
        """The numbers of calls by class, since this was called before."""
        names, self.names = self.names, []
        return {name: names.count(name) for name in dict.fromkeys(names)}


@contextmanager
def counted_calls() -> Iterator[Calls]:
    with pytest.MonkeyPatch.context() as patches:
        yield Calls(patches)


def shard_writers() -> list[FastensorStorageWriter]:
    """The writers that are alive."""
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is FastensorStorageWriter]


@contextmanager
def at_call(name: str, do: Callable[[], object], *, required: bool = True) -> Any:
    """Does something before the first call of that name that concerns the file that ranks share. ``required``: there
    has to be one."""
    done = []

    def intercept(call: Call) -> Any:
        if call.name == name and not done and (name != "open" or "fastensor-tmp" in str(call.arguments[0])):
            done.append(name)
            do()
        return call.perform()

    with intercepted(intercept):
        yield
    assert done or not required
