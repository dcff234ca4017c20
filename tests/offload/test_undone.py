"""What a dry run has trained is undone."""

from __future__ import annotations

import copy
import operator
import os
import random
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

import fastensor_accelerate
from fastensor.offload import OffloadConfig
from fastensor.offload.undone import undone

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), amsgrad=True),
    "Adagrad": lambda net: torch.optim.Adagrad(net.parameters()),
    "LBFGS": lambda net: torch.optim.LBFGS(net.parameters(), max_iter=3),
    "lr is a tensor": lambda net: torch.optim.Adam(net.parameters(), lr=torch.tensor(0.1), capturable=False),
}


class Training:
    """A program that trains with random data."""

    def __init__(self, kind: str = "Adam") -> None:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        self.net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 2))
        self.optimizer = OPTIMIZERS[kind](self.net)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)

    def train(self) -> None:
        for _ in range(3):
            x = torch.randn(4, 5) * random.random() * np.random.rand()
            self.optimizer.step(lambda x=x: self.loss(x))
            self.schedule.step()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.net(x).square().mean()
        loss.backward()
        return loss

    def state(self) -> Any:
        generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
        gradients = [one.grad for one in self.net.parameters()]
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict(), gradients, generators))


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("trained", [False, True])
def test_training_is_undone(tmp_path: Path, kind: str, trained: bool) -> None:
    """And training goes on as if nothing had been. The same tensors have the values."""
    program = Training(kind)
    if trained:
        program.train()
    before, tensors = program.state(), [*program.net.parameters(), *program.net.buffers()]
    rate = program.schedule.state_dict()
    with undone(program.net, str(tmp_path)):
        program.train()
        assert os.listdir(tmp_path) == []
    assert_same(program.state(), before)
    assert all(map(operator.is_, (*program.net.parameters(), *program.net.buffers()), tensors))

    program.schedule.load_state_dict(rate)
    program.train()
    found = program.state()
    expected = Training(kind)
    for _ in range(2 if trained else 1):
        expected.train()
    assert_same(found, expected.state())


def test_a_model_that_is_not_known_is_that_of_its_optimizer() -> None:
    """But for buffers and gradients."""
    program = Training()
    before = program.state()
    with undone(None, None):
        program.train()
    found = program.state()
    names = [name for name, _ in program.net.named_parameters()]
    assert_same([found[0][name] for name in names], [before[0][name] for name in names])
    assert_same(found[1], before[1])
    assert not torch.equal(found[0]["1.running_mean"], before[0]["1.running_mean"])


def test_training_that_fails_is_undone() -> None:
    program = Training()
    before = program.state()

    def fail_after_a_step(*_: Any) -> None:
        if program.optimizer.state:
            raise ZeroDivisionError

    program.net.register_forward_pre_hook(fail_after_a_step)
    with pytest.raises(ZeroDivisionError), undone(program.net, None):
        program.train()
    assert_same(program.state(), before)


def test_later_training_stays() -> None:
    program = Training()
    with undone(program.net, None):
        program.train()
    before = program.state()
    program.train()
    assert not torch.equal(program.net.state_dict()["0.weight"], before[0]["0.weight"])
    assert program.optimizer.state


def test_gradients_that_were_there_are_there_again() -> None:
    program = Training()
    program.loss(torch.ones(4, 5))
    before = program.state()
    with undone(program.net, None):
        program.net(torch.rand(4, 5)).sum().backward()
        program.train()
    assert_same(program.state(), before)


def test_buffers_that_repeat_the_same_memory_or_are_slices(tmp_path: Path) -> None:
    """The file from which buffers are restored holds a slice alone, and not the storage behind it."""
    net = nn.Module()
    whole = torch.zeros(1 << 20)
    net.register_buffer("mask", torch.ones(1, 3).expand(10, 3))
    net.register_buffer("slice", whole[4:8])
    with limited_file(1 << 16), undone(net, str(tmp_path)):
        whole.fill_(2)
        net.mask[0].fill_(3)
    assert net.mask.tolist() == [[1.0] * 3] * 10
    assert net.slice.tolist() == [0.0] * 4


@contextmanager
def limited_file(nbytes: int) -> Iterator[None]:
    """Files cannot get larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_groups_that_were_added_go() -> None:
    program = Training()
    before = program.optimizer.state_dict()
    with undone(program.net, None):
        program.train()
        program.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        program.train()
    assert_same(program.optimizer.state_dict(), before)


def test_what_other_threads_train_stays() -> None:
    program, other = Training(), Training()
    with undone(program.net, None), ThreadPoolExecutor(1) as thread:
        thread.submit(other.train).result()
    assert other.optimizer.state


def test_lazy_parameters_do_no_harm() -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.BatchNorm1d(3))
    with undone(net, None):
        net(torch.randn(4, 5))
    assert net[1].running_mean.tolist() == [0.0] * 3


def test_hundreds_of_optimizers_need_one_file() -> None:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(300)]
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in parameters]
    with undone(None, None):
        before = len(os.listdir("/proc/self/fd"))
        for one, optimizer in zip(parameters, optimizers, strict=True):
            one.sum().backward()
            optimizer.step()
        assert len(os.listdir("/proc/self/fd")) == before
    assert all(one.item() == 1 for one in parameters)


def test_buffers_that_were_replaced_are_those_of_before() -> None:
    net = nn.BatchNorm1d(6)
    buffer = net.running_mean
    assert buffer is not None
    with undone(net, None):
        net.running_mean = torch.ones(6)
        buffer.fill_(5)
    assert net.running_mean is buffer
    assert buffer.tolist() == [0.0] * 6


def test_a_dry_run_with_accelerate_leaves_no_trace() -> None:
    accelerator = Accelerator(cpu=True)
    program = Training()
    net, optimizer = accelerator.prepare(program.net, program.optimizer)
    offload = fastensor_accelerate.attach(net, OffloadConfig(min_bytes=1, schedule=0))
    before = program.state()

    def train() -> None:
        optimizer.zero_grad()
        accelerator.backward(net(torch.randn(4, 5)).square().mean())
        optimizer.step()

    assert offload.dry_run(train).plan.tensors
    assert_same(program.state(), before)
    fastensor_accelerate.detach(net)
