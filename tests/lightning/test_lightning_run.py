"""What a user of the plugin sees, who adds one object to the Trainer."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import pickle
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning_models import fit, install_entry_points, loader, make_module, make_trainer
from programs import run

import fastensor
from fastensor.select import torch_save
from fastensor.select.files import file_for
from fastensor.select.share import Sharing
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO, checkpoint_monitor
from fastensor_lightning.checkpoint_monitor import AutomaticMonitor, find_plugin
from fastensor_lightning.frameworks import package_of
from fastensor_lightning.saved_in_run import SavedInRun, summary

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:pytorch_lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    install_entry_points(tmp_path_factory.mktemp("installed"), monkeypatch)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What the package has said in Lightning's log so far."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.INFO)
    return lambda: [one for one in caplog.messages if one.startswith("fastensor: ")]


def automatic(trainer: Any) -> Any:
    (found,) = (one for one in trainer.callbacks if isinstance(one, AutomaticMonitor))
    return found


def test_the_plugin_alone_keeps_loggers_and_links_behind_finished_files(
    pl: Any, tmp_path: Path, said: Callable[[], list[str]], recwarn: pytest.WarningsRecorder
) -> None:
    base = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger
    seen: list[bool] = []

    class Uploader(base):  # type: ignore[misc]
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            seen.append(os.path.exists(checkpoint_callback.best_model_path))

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            assert not any(name.startswith("checkpoint/") for name in metrics), "nobody has asked for it"
            super().log_metrics(metrics, step)

    plugin, logger = FastensorCheckpointIO(asynchronous=True), Uploader(tmp_path)
    saver = pl.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "c", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last="link"
    )
    trainer = fit(pl, tmp_path, plugin, callbacks=[saver], logger=logger)
    assert sorted(os.listdir(tmp_path / "c")) == ["epoch=1-step=7.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    assert os.readlink(tmp_path / "c" / "last.ckpt") == "epoch=1-step=8.ckpt"
    assert seen
    assert all(seen)
    assert "after_save_checkpoint" not in vars(logger)
    (line,) = said()
    assert line.startswith("fastensor: 8 checkpoints saved durably (")
    assert " of it at the end" in line
    assert not [one for one in recwarn if "CheckpointMonitor" in str(one.message)]
    assert trainer.callback_metrics.keys() == {"score"}
    trainer.test(make_module(pl), loader(), verbose=False)
    assert len(said()) == 1, "a test is no fit"


def test_a_monitor_that_is_added_by_hand_is_the_only_one(
    pl: Any, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    listening: list[int] = []
    shown: dict[str, Any] = {}

    class Watch(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            listening.append(len(plugin._monitors))
            plugin._wait()  # so that the monitor, which comes next, has something to show

        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            shown.update(trainer.progress_bar_metrics)

    plugin = FastensorCheckpointIO(asynchronous=True)
    trainer = fit(pl, tmp_path, plugin, callbacks=[Watch(), CheckpointMonitor()])
    assert automatic(trainer)._plugin is None
    assert set(listening) == {1}
    first, second, hint = said()
    assert "2 checkpoints saved durably" in first
    assert "at a time" in second
    assert "`fastensor tune " in hint
    assert shown["stall_s"] > 0
    assert "save_s" not in shown, "one short number, unless more is asked for"


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_monitor_that_is_kept_keeps_no_trainer(pl: Any, tmp_path: Path, fails: bool, asynchronous: bool) -> None:
    """Nor its model and optimizers, of a run that has ended."""
    monitor = CheckpointMonitor()
    trainers: list[weakref.ref[Any]] = []

    class Ends(pl.Callback):  # type: ignore[misc]
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            trainers.append(weakref.ref(trainer))
            if fails:
                raise ZeroDivisionError

    plugin = FastensorCheckpointIO(asynchronous=asynchronous)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        fit(pl, tmp_path, plugin, callbacks=[monitor, Ends()])
    del monitor.log, monitor.log_dict  # type: ignore[attr-defined]  # Lightning's, in each callback: the module's
    gc.collect()
    assert [one() for one in trainers] == [None]


def test_a_monitor_that_is_torn_down_twice_shares_no_more(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other rank would take part in that."""
    sharing = mock.Mock(spec=Sharing)
    monkeypatch.setattr(checkpoint_monitor, "share_choice", lambda plugin, trainer: sharing)
    monitor = CheckpointMonitor()
    trainer = make_trainer(pl, tmp_path, FastensorCheckpointIO(), callbacks=[monitor])
    monitor.setup(trainer, None, "fit")
    for _ in range(2):
        monitor.teardown(trainer, None, "fit")
    assert [name for name, _, _ in sharing.method_calls] == ["sync", "end"]


def test_a_trainer_without_the_plugin_is_left_alone(pl: Any, tmp_path: Path, said: Callable[[], list[str]]) -> None:
    trainer = fit(pl, tmp_path)
    assert automatic(trainer)._trainer is None
    assert said() == []


def test_a_run_that_an_exception_ends_says_what_it_has_saved(
    pl: Any, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")
            if trainer.global_step == 3:
                raise ValueError("of the training")

    plugin = FastensorCheckpointIO(asynchronous=True)
    trainer = make_trainer(pl, tmp_path, plugin, callbacks=[Stop()], enable_checkpointing=False)
    with pytest.raises(ValueError, match="of the training"):
        trainer.fit(make_module(pl), loader())
    (line,) = said()
    assert line.startswith("fastensor: 3 checkpoints saved durably (")
    assert not plugin._monitors


def test_what_fails_at_the_end_hides_no_exception_of_the_training(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            raise ValueError("of the training")

    def fail(*_: object) -> None:
        raise OSError("the dictionary cannot be read")

    monkeypatch.setattr("fastensor.select.torch_save.seconds_known", fail)
    plugin = FastensorCheckpointIO(asynchronous=True)
    trainer = make_trainer(pl, tmp_path, plugin, callbacks=[Stop()], enable_checkpointing=False)
    with pytest.raises(ValueError, match="of the training"):
        trainer.fit(make_module(pl), loader())
    assert "the dictionary cannot be read" in caplog.text
    assert not plugin._monitors


def test_a_test_that_an_exception_ends_says_nothing(
    pl: Any, tmp_path: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(pl.Callback):  # type: ignore[misc]
        def on_test_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            raise ValueError("of the test")

    plugin = FastensorCheckpointIO(asynchronous=True)
    trainer = make_trainer(pl, tmp_path, plugin, callbacks=[Stop()], enable_checkpointing=False)
    with pytest.raises(ValueError, match="of the test"):
        trainer.test(make_module(pl), loader())
    assert (tmp_path / "x.ckpt").exists()
    assert said() == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_callback_can_be_pickled_during_a_run(pl: Any, tmp_path: Path, asynchronous: bool) -> None:
    pickled: list[bytes] = []

    class Pickle(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            pickled.append(pickle.dumps(trainer.checkpoint_callback))

    plugin = FastensorCheckpointIO(asynchronous=asynchronous)
    fit(pl, tmp_path, plugin, callbacks=[Pickle(), pl.callbacks.ModelCheckpoint()])
    assert pickled
    assert type(pickle.loads(pickled[0])) is pl.callbacks.ModelCheckpoint


def test_objects_that_have_every_attribute_hold_no_plugin() -> None:
    trainer: Any = mock.MagicMock()
    assert find_plugin(trainer) is None


def test_only_rank_0_speaks_and_by_the_rules_of_lightnings_log(
    pl: Any, tmp_path: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fit(pl, tmp_path, FastensorCheckpointIO())
    assert package_of(trainer) == pl.__name__
    assert len(said()) == 1
    logging.getLogger(f"{pl.__name__}.utilities.rank_zero").setLevel(logging.ERROR)
    try:
        fit(pl, tmp_path / "quiet", FastensorCheckpointIO())
    finally:
        logging.getLogger(f"{pl.__name__}.utilities.rank_zero").setLevel(logging.NOTSET)
    monkeypatch.setattr(type(trainer), "is_global_zero", False)
    automatic(trainer)._saved.add(report(tmp_path))
    automatic(trainer)._say_what_was_saved(trainer)
    assert len(said()) == 1


def test_saves_are_compared_with_torch_where_that_was_measured(
    tmp_path: Path, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pl = importlib.import_module("lightning.pytorch")
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path / "dictionaries"))
    for nbytes in (1 << 10, 1 << 20):
        file_for(tmp_path, of="torch.save").update(torch_save.learned(nbytes, [2.0] * 3))
    fit(pl, tmp_path, FastensorCheckpointIO())
    fit(pl, tmp_path, FastensorCheckpointIO(durable=False))
    with_it, without_it = said()
    assert with_it.endswith("; torch.save with fsync would have taken 4 s, as fastensor tune has measured")
    assert "2 checkpoints saved, not durably" in without_it
    assert "torch.save" not in without_it, "it is no fair comparison"


def test_saves_in_several_folders_are_compared_folder_by_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: dict[str, float] = {"a": 1.0, "b": 10.0}

    def known(folder: str, sizes: Iterable[int]) -> float | None:
        each = measured.get(os.path.basename(folder))
        return each and each * len([*sizes])

    monkeypatch.setattr(torch_save, "seconds_known", known)
    monkeypatch.setattr(torch_save, "is_measured", lambda folder: os.path.basename(folder) in measured)
    saved = SavedInRun()
    for name in ("a", "b", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "x.ckpt").touch()
        saved.add(report(tmp_path / name))
    line, _ = saved.lines(0.0, more=True)
    assert "torch.save with fsync would have taken 21 s" in line
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "x.ckpt").touch()
    saved.add(report(tmp_path / "c"))
    line, _, hint = saved.lines(0.0, more=True)
    assert "torch.save" not in line
    assert hint == f"`fastensor tune {tmp_path / 'c'}` measures what torch.save would take there"


def test_who_has_measured_is_not_asked_to_do_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path / "dictionaries"))
    (tmp_path / "x.ckpt").touch()
    saved = SavedInRun()
    saved.add(report(tmp_path))
    *_, hint = saved.lines(0.0, more=True)
    assert "fastensor tune" in hint
    file_for(tmp_path, of="torch.save").update(torch_save.learned(1 << 30, [2.0]))
    line, details = saved.lines(0.0, more=True)
    assert "fastensor tune" not in line + details, "1 MiB is far below what was measured"


def report(folder: Path, seconds: float = 0.5, stall: float = 0.5, durable: bool = True) -> fastensor.SaveReport:
    return fastensor.SaveReport(
        str(folder / "x.ckpt"), 1 << 20, "direct", "by size", durable, True, 0, 0, 0, 0, seconds, stall
    )


def test_the_line(tmp_path: Path) -> None:
    stalled = [report(tmp_path, seconds, seconds) for seconds in (0.5, 0.25, 1.0)]
    assert summary(stalled, 0.0, 3.0) == (
        "3 checkpoints saved durably (3 MiB), in 500 ms each (median); training stood still for 1.75 s; "
        "torch.save with fsync would have taken 3 s, as fastensor tune has measured"
    )
    assert summary(stalled[:1], 0.0, None) == (
        "1 checkpoint saved durably (1 MiB), in 500 ms; training stood still for 500 ms"
    )
    pending = [report(tmp_path, 0.5, 0.01), report(tmp_path, 0.5, 0.01, durable=False)]
    assert summary(pending, 0.1, None) == (
        "2 checkpoints saved, 1 of them durably (2 MiB), in 500 ms each (median); training stood still for 120 ms, "
        "100 ms of it at the end"
    )


def test_programs_without_the_plugin_import_nothing_for_it() -> None:
    code = (
        "import sys; from fastensor_lightning.callbacks_factory import callbacks; print(callbacks())\n"
        "print(sorted(name for name in sys.modules if name.startswith(('fastensor', 'torch', 'lightning'))))\n"
    )
    out = run("-c", code, cold=True).stdout.splitlines()
    assert out == ["[]", "['fastensor_lightning', 'fastensor_lightning.callbacks_factory']"]


def test_any_name_of_the_package_may_be_asked_for() -> None:
    import fastensor_lightning

    assert set(fastensor_lightning.__all__) <= set(dir(fastensor_lightning))
    assert fastensor_lightning.OffloadConfig().min_bytes == 256 << 10
    with pytest.raises(AttributeError, match="has no attribute 'CheckpointMontor'"):
        fastensor_lightning.CheckpointMontor  # type: ignore[attr-defined]  # noqa: B018
