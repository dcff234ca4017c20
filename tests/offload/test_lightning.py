"""``SSDActivationOffload`` in Trainers: the same weights at the end, and something was offloaded."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import logging
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from offload.lightning_callbacks import WrittenFirst
from programs import free_port
from recomputing import plans_that_recompute
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import fastensor
from fastensor.offload import ActivationOffload, OffloadConfig, moving
from fastensor.offload.config import OffloadOptions
from fastensor_lightning import SSDActivationOffload

EVERYTHING = OffloadConfig(schedule="all", min_bytes=1)


class Net(pl.LightningModule):
    """Saves activations, masks and casts; has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(x)))
        return found

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        with torch.enable_grad():
            self(batch[0]).sum().backward()
        self.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self(batch[0]).square().mean())
            optimizer.step()


class Gan(Net):
    """Two optimizers in turn, the second on what the first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        made = torch.tanh(self.body(batch[0]))
        first.zero_grad()
        self.manual_backward(self.head(made).mean())
        first.step()
        second.zero_grad()
        self.manual_backward(self.head(made.detach()).square().mean())
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (self.body, self.head)]


class Lbfgs(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class SometimesNone(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:  # type: ignore[override]
        return -1 if batch_idx == 3 else None


class Checkpointed(Net):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant))
        return found


class Compiled(Net):
    """In regions."""

    def __init__(self) -> None:
        super().__init__()
        self.head.compile(backend="aot_eager")


def trained(make: Callable[[], Net], folder: Path, *callbacks: pl.Callback, **options: Any) -> dict[str, Tensor]:
    pl.seed_everything(7, verbose=False)
    net = make()
    data = DataLoader(TensorDataset(torch.randn(48, 16)), batch_size=8)
    settings: dict[str, Any] = {
        "max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
    }  # fmt: skip
    pl.Trainer(callbacks=list(callbacks), **{**settings, **options}).fit(net, data, data)
    return {name: value.clone() for name, value in net.state_dict().items()}


SETTINGS: dict[str, tuple[Callable[[], Net], dict[str, Any]]] = {
    "automatic": (Net, {}),
    "accumulation": (Net, {"accumulate_grad_batches": 4}),
    "bf16": (Net, {"precision": "bf16-mixed"}),
    "clipping": (Net, {"gradient_clip_val": 0.1}),
    "manual": (Manual, {}),
    "two optimizers": (Gan, {}),
    "lbfgs": (Lbfgs, {}),
    "nothing returned": (SometimesNone, {}),
    "checkpointed": (Checkpointed, {}),
    "checkpointed reentrantly": (lambda: Checkpointed(reentrant=True), {}),
    "compiled regions": (Compiled, {}),
    "anomalies": (Net, {"detect_anomaly": True}),
    "weights averaged": (Net, {"callbacks_beside": "average"}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_weights_are_the_same(tmp_path: Path, name: str) -> None:
    make, options = SETTINGS[name]
    options = dict(options)
    beside = [pl.callbacks.WeightAveraging()] if options.pop("callbacks_beside", None) else []
    expected = trained(make, tmp_path, *copy.deepcopy(beside), **options)
    callback = SSDActivationOffload(EVERYTHING)
    found = trained(make, tmp_path, *beside, callback, **options)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert callback.statistics is not None
    assert callback.statistics.offloaded > 0
    assert callback.statistics.kept.get("parameter", 0) > 0


class InBlocks(Net):
    """Has blocks that can be computed again, with dropout and statistics of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), *(self.block() for _ in range(3)))

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))


RECOMPUTED: dict[str, tuple[dict[str, Any], int]] = {
    "automatic": ({}, 10),
    "accumulation": ({"accumulate_grad_batches": 4}, 10),
    "bf16": ({"precision": "bf16-mixed"}, 10),
    "anomalies": ({"detect_anomaly": True}, 10),
}
"""And the passes in which blocks are computed again: all of 12 but the first two."""


@pytest.mark.parametrize("name", RECOMPUTED)
def test_blocks_are_computed_again(tmp_path: Path, name: str) -> None:
    options, passes = RECOMPUTED[name]
    expected = trained(InBlocks, tmp_path, **options)
    callback = SSDActivationOffload(schedule=1 << 30, min_bytes=1, recompute="auto")
    with plans_that_recompute():
        found = trained(InBlocks, tmp_path, callback, **options)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert callback.statistics is not None
    assert callback.statistics.recomputed == 3 * passes


def test_blocks_are_computed_again_in_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp_fork", "max_epochs": 2}
    expected = trained(InBlocks, tmp_path, **options)
    with plans_that_recompute():
        callback = SSDActivationOffload(schedule=1 << 30, min_bytes=1, recompute="auto")
        found = trained(InBlocks, tmp_path, callback, Recomputed(callback), **options)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class Recomputed(pl.Callback):
    """In the processes that train."""

    def __init__(self, callback: SSDActivationOffload) -> None:
        self.callback = callback

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert self.callback._offload is not None
        assert self.callback._offload.statistics().recomputed > 0


def test_codecs_and_a_trace(tmp_path: Path) -> None:
    expected = trained(Net, tmp_path)
    trace = str(tmp_path / "trace.json")
    callback = SSDActivationOffload(OffloadConfig(schedule="all", min_bytes=1, codecs=("csr",), trace=trace))
    found = trained(Net, tmp_path, callback)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert callback.statistics is not None
    written = sum(one["args"].get("bytes", 0) for one in events if one["name"] == "write")
    assert written == callback.statistics.written_bytes
    assert sum(one["name"] == "backward" and one["ph"] == "b" for one in events) == 12, "one for each training step"


def test_what_is_still_being_written_when_training_ends_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes have written, and note it only when somebody waits for them."""
    may_end, write = threading.Event(), moving.write

    def write_and_wait(*arguments: Any, **options: Any) -> int:
        crc32 = write(*arguments, **options)
        assert may_end.wait(60)
        return crc32

    def opening(method: Callable[[ActivationOffload], None]) -> Callable[[ActivationOffload], None]:
        def opened(offload: ActivationOffload) -> None:
            may_end.set()
            method(offload)

        return opened

    monkeypatch.setattr(moving, "write", write_and_wait)
    for name in ("settle", "close"):
        monkeypatch.setattr(ActivationOffload, name, opening(getattr(ActivationOffload, name)))
    trace = tmp_path / "trace.json"
    callback = SSDActivationOffload(dataclasses.replace(EVERYTHING, trace=str(trace)))
    trained(Net, tmp_path, callback)
    written = sum(
        one["args"].get("bytes", 0) for one in json.loads(trace.read_text())["traceEvents"] if one["name"] == "write"
    )
    assert callback.statistics is not None
    assert callback.statistics.written_bytes == written > 0


def test_validation_is_left_alone_and_each_step_is_counted(tmp_path: Path) -> None:
    callback = SSDActivationOffload(EVERYTHING)
    trained(Net, tmp_path, callback)
    assert callback.statistics is not None
    assert callback.statistics.steps == 12


def test_fit_may_be_called_twice(tmp_path: Path) -> None:
    callback = SSDActivationOffload(EVERYTHING)
    first = trained(Net, tmp_path, callback)
    second = trained(Net, tmp_path, callback)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert callback.statistics is not None
    assert callback.statistics.steps == 12


class Failing(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise ValueError("in the third step")
        return loss


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    callback = SSDActivationOffload(EVERYTHING)
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    with pytest.raises(ValueError, match="third step"):
        trained(Failing, tmp_path, callback, strategy=strategy)
    assert "train_step_context" not in strategy.precision_plugin.__dict__
    assert callback._offload is None
    x = torch.randn(10, requires_grad=True)
    y = x.exp()
    assert y.grad_fn is not None
    assert torch.equal(y.grad_fn._saved_result, y), "no hooks are left"  # type: ignore[attr-defined]


def test_a_run_without_offloading_says_so_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(Net, tmp_path, SSDActivationOffload())
    assert "activation offload: nothing has left memory of " in caplog.text
    assert "are smaller than min_bytes (256 KiB)" in caplog.text


class Elsewhere(SingleDeviceStrategy):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.training_step(*args, **kwargs)


def test_a_strategy_that_goes_another_way_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(Net, tmp_path, SSDActivationOffload(EVERYTHING), strategy=Elsewhere(torch.device("cpu")))
    assert "Elsewhere does not run training steps in" in caplog.text


@pytest.mark.parametrize(("strategy", "stage"), [("FSDPStrategy", None), ("DeepSpeedStrategy", True)])
def test_strategies_that_move_parameters_are_refused(tmp_path: Path, strategy: str, stage: bool | None) -> None:
    kind = type(strategy, (SingleDeviceStrategy,), {"zero_stage_3": stage})
    with pytest.raises(fastensor.UnsupportedContentError, match=f"{strategy}.*, DDP, or"):
        trained(Net, tmp_path, SSDActivationOffload(EVERYTHING), strategy=kind(torch.device("cpu")))


def test_a_line_says_what_was_gained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "propagate", True)
    caplog.set_level(logging.INFO)
    callback = SSDActivationOffload(EVERYTHING)
    trained(Net, tmp_path, callback, WrittenFirst(callback))
    found = callback.statistics
    assert 0 < found.peak_memory_bytes <= found.peak_saved_bytes
    assert found.written_bytes > 0
    (line,) = (one for one in caplog.messages if one.startswith("fastensor: "))
    size, time = r"[1-9][0-9.]* K?i?B", r"[0-9.]+ [mµ]?s"
    assert re.fullmatch(
        rf"fastensor: activation offload: activations took at most {size} of memory in place of {size}, at {time} a "
        rf"step; {size} written",
        line,
    )


def test_options_may_be_given_one_by_one(tmp_path: Path) -> None:
    one_by_one = SSDActivationOffload(tmp_path, min_bytes="1MiB", schedule=0.5)
    config = OffloadConfig(directories=(str(tmp_path),), min_bytes=1 << 20, schedule=0.5)
    assert one_by_one.config == SSDActivationOffload(config).config == SSDActivationOffload(config=config).config
    assert SSDActivationOffload(directories=("/a", "/b"), codecs=["csr"]).config.directories == ("/a", "/b")  # type: ignore[typeddict-item]
    assert SSDActivationOffload().config == OffloadConfig()
    fields = {field.name for field in dataclasses.fields(OffloadConfig)}
    assert fields == OffloadOptions.__annotations__.keys(), "each option can be given by itself"


def test_loggers_get_what_each_batch_has_moved(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    trained(Net, tmp_path, SSDActivationOffload(EVERYTHING, log=True), logger=logger, log_every_n_steps=1)
    header = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"offload/written_bytes", "offload/read_bytes", "offload/stall_seconds"} <= set(header)


def test_it_can_be_pickled_while_it_runs(tmp_path: Path) -> None:
    callback = SSDActivationOffload(EVERYTHING)

    class Pickles(pl.Callback):
        def on_train_batch_end(self, *args: Any, **options: Any) -> None:
            again = pickle.load(io.BytesIO(pickle.dumps(callback)))
            assert again.config == callback.config
            assert again._offload is None

    trained(Net, tmp_path, callback, Pickles())


def test_files_are_where_the_trainer_says(tmp_path: Path) -> None:
    callback = SSDActivationOffload(EVERYTHING)
    opened: list[str] = []
    from fastensor.files import posix

    original = posix.open_nameless
    with mock.patch.object(posix, "open_nameless", lambda folder: opened.append(folder) or original(folder)):
        trained(Net, tmp_path, callback)
    assert opened == [str(tmp_path)] * 2  # it is tried when fit starts


@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.torture)])
def test_two_processes(tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    options = {"devices": 2, "max_epochs": 1}
    expected = trained(Net, tmp_path, strategy="ddp_fork", **options)  # which begins much sooner than spawned processes
    found = trained(Net, tmp_path, SSDActivationOffload(EVERYTHING), strategy=strategy, **options)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


class Average(pl.Callback):
    """As in many code bases."""

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.copied = copy.deepcopy(module)
        self.pickled = pickle.dumps(module.body)


@pytest.mark.parametrize("average", [Average, pl.callbacks.EMAWeightAveraging])
@pytest.mark.parametrize("first", [True, False])
def test_models_are_averaged_while_parts_of_them_are_excluded(
    tmp_path: Path, average: Callable[[], pl.Callback], first: bool
) -> None:
    callback = SSDActivationOffload(OffloadConfig(schedule="all", min_bytes=1, exclude=("head", "body.*")))
    beside = average()
    trained(Net, tmp_path, *((callback, beside) if first else (beside, callback)))
    assert callback.statistics is not None
    assert callback.statistics.kept["module"] > 0
    if isinstance(beside, Average):
        assert b"fastensor" not in beside.pickled
        assert beside.copied(torch.randn(8, 16)).shape == (8, 4)


def test_two_of_them_in_a_trainer_are_refused_before_anything_runs(tmp_path: Path) -> None:
    two = SSDActivationOffload(EVERYTHING), SSDActivationOffload()
    strategy = SingleDeviceStrategy(torch.device("cpu"))
    with pytest.raises(fastensor.UnsupportedContentError, match=r"2 SSDActivationOffload in this Trainer.*Leave one"):
        trained(Net, tmp_path, *two, strategy=strategy)
    assert "train_step_context" not in strategy.precision_plugin.__dict__
    assert two[0].statistics is None
    trained(Net, tmp_path, two[0])
    assert two[0].statistics is not None
