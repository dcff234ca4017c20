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

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

import fastensor_accelerate
from fastensor.errors import OffloadError
from fastensor.offload import OffloadConfig
from fastensor.offload.undone import undone
from fastensor_lightning import SSDActivationOffload

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


def test_the_rate_is_that_of_before_the_first_step() -> None:
    """Programs set it before each step."""
    program = Training("lr is a tensor")
    rate = program.optimizer.param_groups[0]["lr"]
    with undone(program.net, None, [program.optimizer]):
        rate.fill_(7)
        program.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        program.train()
    assert program.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.1)


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


class Net(pl.LightningModule):
    """Depends on all that a run can leave: random numbers, statistics of batches, schedules, and the order of data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x)
        return found

    def on_train_end(self) -> None:
        assert self.trainer.checkpoint_callback is not None

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


def program(folder: Path, dry_run: bool, *, same_trainer: bool = False) -> dict[str, Any]:
    """Trains, goes on from the last checkpoint, with or without a dry run in between. Returns the last checkpoint."""
    pl.seed_everything(1)
    data = DataLoader(RandomDataset(32, 48), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    net = Net()

    def trainer(epochs: int, *callbacks: pl.Callback) -> pl.Trainer:
        saves = ModelCheckpoint(folder / "saved", monitor="val_loss", save_last=True, every_n_train_steps=2)
        stops = EarlyStopping("val_loss", patience=1, min_delta=100.0)
        return pl.Trainer(
            callbacks=[*callbacks, saves, stops], logger=CSVLogger(folder, "logs", flush_logs_every_n_steps=1),
            max_epochs=epochs, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
            log_every_n_steps=1, default_root_dir=folder,
        )  # fmt: skip

    trainer(1).fit(net, data, data)
    last = trainer(2)
    if dry_run:
        before, files = torch.get_rng_state(), contents(folder)
        callback = SSDActivationOffload(OffloadConfig(min_bytes=1, schedule=0), dry_run=True)
        tried = trainer(2, callback)
        tried.fit(net, data, data, ckpt_path=str(folder / "saved" / "last.ckpt"), weights_only=False)
        assert callback.estimate is not None
        assert (tried.global_step, tried.current_epoch) == (12, 1)
        assert torch.equal(torch.get_rng_state(), before)
        assert contents(folder) == files
        if same_trainer:
            tried.callbacks.remove(callback)  # type: ignore[attr-defined]  # set later
            last = tried
    last.fit(net, data, data, ckpt_path=str(folder / "saved" / "last.ckpt"), weights_only=False)
    found: dict[str, Any] = torch.load(folder / "saved" / "last.ckpt", weights_only=False)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """What is in the files, but for folders of Lightning's loggers, which are made before a callback is asked."""
    return {str(one): one.read_bytes() for one in sorted(folder.rglob("*")) if one.is_file()}


@pytest.mark.parametrize("same_trainer", [False, True])
def test_a_dry_run_of_a_trainer_leaves_no_trace(tmp_path: Path, same_trainer: bool) -> None:
    expected = program(tmp_path / "a", dry_run=False)
    found = program(tmp_path / "b", dry_run=True, same_trainer=same_trainer)
    assert found["global_step"] == 24
    for one in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert_same(found[one], expected[one])
    assert found["loops"]["fit_loop"] == expected["loops"]["fit_loop"]
    (stops,) = (name for name in expected["callbacks"] if name.startswith("EarlyStopping"))
    assert found["callbacks"].keys() == expected["callbacks"].keys()
    assert found["callbacks"][stops] == expected["callbacks"][stops]


class Moves(SingleDeviceStrategy):
    """What becomes of a module on a GPU when training has ended: it goes to the CPU."""

    def teardown(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.double()
        super().teardown()


def test_a_module_that_lightning_has_moved_stays_whole(tmp_path: Path) -> None:
    net = Net()
    net(torch.ones(2, 32)).sum().backward()
    pl.Trainer(
        callbacks=[SSDActivationOffload(OffloadConfig(min_bytes=1), dry_run=True)], logger=False, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False, strategy=Moves(torch.device("cpu")),
        default_root_dir=tmp_path,
    ).fit(net, DataLoader(RandomDataset(32, 48), batch_size=4))  # fmt: skip
    kinds = {one.dtype for one in (*net.parameters(), *net.buffers()) if one.is_floating_point()}
    assert kinds == {torch.float64}


class Unfreezes(BaseFinetuning):
    """Adds a group of parameters when training begins."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])  # type: ignore[arg-type,index]

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.5)  # type: ignore[arg-type,index]


class WarmsUp(pl.Callback):
    """Sets the rate before each step."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 7.0


@pytest.mark.parametrize("changes", [Unfreezes, WarmsUp])
def test_what_a_trainer_does_to_optimizers_before_their_first_step_is_undone(
    tmp_path: Path, changes: type[pl.Callback]
) -> None:
    class Keeps(Net):
        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.Adam([one for one in self.parameters() if one.requires_grad], lr=0.01)
            self.before = self.optimizer.state_dict()
            return self.optimizer

    net = Keeps()
    pl.Trainer(
        callbacks=[SSDActivationOffload(OffloadConfig(min_bytes=1), dry_run=True), changes()], logger=False,
        accelerator="cpu", max_epochs=1, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(net, DataLoader(RandomDataset(32, 48), batch_size=4))  # fmt: skip
    assert_same(net.optimizer.state_dict(), net.before)


def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    callback = SSDActivationOffload(tmp_path / "missing", dry_run=True)
    trainer = pl.Trainer(callbacks=[callback], logger=False, accelerator="cpu", default_root_dir=tmp_path)
    with pytest.raises(OffloadError, match="missing"):
        trainer.fit(Net(), DataLoader(RandomDataset(32, 48), batch_size=4))


def test_a_dry_run_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if index == 2:
                raise ZeroDivisionError
            return super().training_step(batch, index)

    net = Fails()
    before = copy.deepcopy(net.state_dict())
    callback = SSDActivationOffload(OffloadConfig(min_bytes=1), dry_run=True)
    trainer = pl.Trainer(
        callbacks=[callback], logger=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        trainer.fit(net, DataLoader(RandomDataset(32, 48), batch_size=4))
    assert_same(net.state_dict(), before)
    assert trainer.global_step == 0
    assert contents(tmp_path) == {}
    assert len(trainer.checkpoint_callbacks) == 1
