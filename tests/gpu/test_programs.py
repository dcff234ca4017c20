"""The random programs that the model of a device runs without a GPU, on a real one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_programs import Graph, Steps, graphs, offload_config, programs, run_pass, run_saves
from hypothesis import given
from hypothesis import strategies as st

from fastensor import AsyncWriter
from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.offload import ActivationOffload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


class CudaComputer:
    """Computes on the current stream, which is late at random.

    Args:
        occupy: keeps the stream busy for so many cycles.
        seed: of the random numbers.
    """

    device = torch.device("cuda", 0)

    def __init__(self, occupy: Callable[[int], None], seed: int) -> None:
        self._occupy = occupy
        self._random = random.Random(seed)
        self._right: list[torch.Tensor] = []

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        self._occupy(self._random.choice([1, 1_000_000, 20_000_000]))
        tensor.fill_(value)

    def compare(self, tensor: torch.Tensor, value: int) -> None:
        self._right.append((tensor == value).all())

    def finish(self) -> bool:
        torch.cuda.synchronize(self.device)
        right, self._right = self._right, []
        return all(bool(one) for one in right)


@given(
    graph=graphs(),
    seed=st.integers(0, 1 << 16),
    blocks=st.sampled_from([1, 3, 8]),
    ahead=st.sampled_from([0, 1, 4]),
    target=st.sampled_from(["dram", "ssd"]),
)
def test_any_graph_gets_what_it_has_saved(
    tmp_path_factory: pytest.TempPathFactory,
    occupy: Callable[[int], None],
    graph: Graph,
    seed: int,
    blocks: int,
    ahead: int,
    target: Any,
) -> None:
    computer, generator = CudaComputer(occupy, seed), random.Random(seed)
    config = offload_config(tmp_path_factory.getbasetemp(), target, blocks=blocks, ahead=ahead)
    with ActivationOffload(config) as offload:
        for number in range(3):
            run_pass(computer, offload, graph, generator, number)


@given(
    program=programs(),
    sizes=st.lists(st.integers(0, 3 * BUFFER_NBYTES // 4), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 16),
    staging=st.sampled_from([1, 2, 5]),
)
def test_any_program_saves_what_it_has_computed_by_then(
    tmp_path_factory: pytest.TempPathFactory,
    occupy: Callable[[int], None],
    program: Steps,
    sizes: list[int],
    seed: int,
    staging: int,
) -> None:
    with AsyncWriter(staging_bytes=staging * BUFFER_NBYTES) as writer:
        check = run_saves(CudaComputer(occupy, seed), writer, program, sizes, tmp_path_factory.mktemp("saves"))
    check()
