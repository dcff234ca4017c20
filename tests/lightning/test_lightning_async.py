"""Trainers and Fabric with asynchronous checkpoints: every step of theirs sees what it has asked for."""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import FullDisk, SlowDisk
from lightning_models import (
    act_as_rank,
    fit,
    loader,
    make_module,
    make_trainer,
    without_entry_points,
)
from programs import free_port, run, run_ranks

import fastensor
from fastensor.backends import snapshot
from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.checkpoint import ordering
from fastensor.files import posix
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*unclosed.*:ResourceWarning"),
]


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


_earlier: list[threading.Thread] = []
"""Threads of writers that earlier tests have left open."""


def drain_threads() -> list[threading.Thread]:
    """Threads of this test's writers. One whose start was interrupted, which Python never forgets, is none."""
    living = (one for one in threading.enumerate() if one.name.startswith("fastensor-drain") and one.is_alive())
    return [one for one in living if one not in _earlier]


@pytest.fixture(autouse=True)
def nothing_is_left_pending() -> Iterator[None]:
    _earlier[:] = [one for one in threading.enumerate() if one.name.startswith("fastensor-drain")]
    yield
    assert not ordering._pending
    assert not drain_threads()


@pytest.fixture
def no_entry_points() -> Iterator[None]:
    with without_entry_points():
        yield


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch, 0.02)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


@pytest.fixture
def disk_is_free(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set; while it is cleared, nothing is written, and no staging memory comes back."""
    free = threading.Event()
    free.set()
    write = posix.write_fully

    def write_when_free(*arguments: Any) -> None:
        assert free.wait(60), "the save was not released"
        write(*arguments)

    monkeypatch.setattr(posix, "write_fully", write_when_free)
    yield free
    free.set()


def checkpoints(pl: Any, folder: Path, **options: Any) -> Any:
    return pl.callbacks.ModelCheckpoint(dirpath=folder / "c", **options)


def options_of(pl: Any, folder: Path, **options: Any) -> dict[str, Any]:
    return {"callbacks": [CheckpointMonitor(), checkpoints(pl, folder, **options)]}


def make_logger(pl: Any, folder: Path) -> Any:
    """A logger that records the steps of the saves that are reported to it."""
    base = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger

    class Recorder(base):  # type: ignore[misc]
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if "checkpoint/save_bytes" in metrics:
                self.steps.append(step)
            super().log_metrics(metrics, step)

    logger = Recorder(folder)
    logger.steps = []
    return logger


def is_patched(saver: Any, logger: Any) -> bool:
    """Whether a ModelCheckpoint and a logger have methods of the monitor's, all of them."""
    patched = {
        "file_exists" in vars(saver), "_link_checkpoint" in vars(saver), "after_save_checkpoint" in vars(logger)
    }  # fmt: skip
    assert len(patched) == 1
    return patched.pop()


def stop_at(pl: Any, step: int) -> Any:
    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == step:
                raise ValueError("of the training")

    return Stop()


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "c"))


def step_of(path: Any) -> int:
    return int(fastensor.load(path, weights_only=False)["global_step"])


def published(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there for everybody, each of them loaded by torch."""
    paths = (folder / "c").glob("*.ckpt")
    return sorted(torch.load(path, weights_only=False)["global_step"] for path in paths)


def test_every_step_is_saved_and_the_best_are_kept(pl: Any, tmp_path: Path, slow_disk: SlowDisk) -> None:
    plugin = FastensorCheckpointIO(asynchronous=True)
    options = options_of(pl, tmp_path, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True)
    trainer = fit(pl, tmp_path, plugin, **options)
    assert files(tmp_path) == ["epoch=1-step=7.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    assert step_of(trainer.checkpoint_callback.best_model_path) == 8
    assert step_of(tmp_path / "c" / "last.ckpt") == 8
    trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False)
    trainer.fit(make_module(pl), loader(), loader(), ckpt_path="last")
    assert plugin.last_save is not None
    assert plugin.last_save.stall_seconds < plugin.last_save.seconds


def test_the_same_files_as_synchronously(pl: Any, tmp_path: Path, slow_disk: SlowDisk) -> None:
    """Names collide, so versions are counted, for files that are still to come and go."""

    def run(folder: Path, asynchronous: bool) -> dict[str, int]:
        callbacks = [
            CheckpointMonitor(),
            checkpoints(pl, folder, filename="x", every_n_train_steps=1, save_top_k=3, monitor="step", mode="max"),
            checkpoints(pl, folder, filename="{epoch}", every_n_train_steps=2, save_top_k=-1),
        ]
        fit(pl, folder, FastensorCheckpointIO(asynchronous=asynchronous), callbacks=callbacks)
        return {name: step_of(folder / "c" / name) for name in files(folder)}

    found = run(tmp_path / "later", True)
    assert found == run(tmp_path / "now", False)
    assert {"x.ckpt", "x-v1.ckpt", "x-v2.ckpt", "epoch=1.ckpt"} <= found.keys()


def test_the_last_is_a_link_to_a_finished_file(
    pl: Any, tmp_path: Path, slow_disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastensor_lightning import checkpoint_io

    replace_link = checkpoint_io.replace_link
    linked: list[str] = []

    def check_and_replace(target: str, link: str) -> None:
        linked.append(target)
        assert os.path.exists(target), "it is not there yet"
        replace_link(target, link)

    monkeypatch.setattr(checkpoint_io, "replace_link", check_and_replace)
    options = options_of(
        pl, tmp_path, every_n_train_steps=1, save_top_k=1, monitor="step", mode="max", save_last="link"
    )
    trainer = fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), **options)
    assert len(linked) == 8
    assert files(tmp_path) == ["epoch=1-step=8.ckpt", "last.ckpt"]
    assert os.readlink(tmp_path / "c" / "last.ckpt") == "epoch=1-step=8.ckpt"
    trainer.fit(make_module(pl), loader(), loader(), ckpt_path="last")


def test_a_link_that_leads_to_itself_is_not_made(pl: Any, tmp_path: Path) -> None:
    saver = checkpoints(pl, tmp_path, filename="last", save_last="link", enable_version_counter=False)
    fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), callbacks=[CheckpointMonitor(), saver])
    assert not (tmp_path / "c" / "last.ckpt").is_symlink()
    assert step_of(tmp_path / "c" / "last.ckpt") == 8


def test_a_process_that_goes_elsewhere_links_what_it_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, sync = threading.Event(), posix.sync_file
    monkeypatch.setattr(posix, "sync_file", lambda fd: (gone.wait(60), sync(fd)))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    plugin = FastensorCheckpointIO(asynchronous=True)
    plugin.save_checkpoint({"w": torch.ones(3)}, "x.ckpt")
    plugin._link("x.ckpt", "last.ckpt")
    monkeypatch.chdir(tmp_path / "b")
    gone.set()
    plugin.teardown()
    assert os.readlink(tmp_path / "a" / "last.ckpt") == "x.ckpt"
    assert os.listdir(tmp_path / "b") == []


def test_there_are_no_remote_links(caplog: pytest.LogCaptureFixture) -> None:
    FastensorCheckpointIO(asynchronous=True)._link("memory://run/x.ckpt", "memory://run/last.ckpt")
    assert "memory://run/last.ckpt is not made: remote filesystems have no links" in caplog.text


@pytest.mark.parametrize("full_after", [3, 4])
def test_the_last_link_stays_good_when_saves_fail(pl: Any, tmp_path: Path, disk: FullDisk, full_after: int) -> None:
    disk.full_after = full_after
    each = {"every_n_train_steps": 1, "monitor": "step", "mode": "max"}
    options = options_of(pl, tmp_path, **each, save_top_k=1, save_last="link")
    with pytest.raises(fastensor.CheckpointWriteError, match="No space left"):
        fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), **options)
    assert files(tmp_path) == [f"epoch=0-step={full_after}.ckpt", "last.ckpt"]
    assert step_of(tmp_path / "c" / "last.ckpt") == full_after


def test_a_save_after_the_end_of_fit_is_there_at_once(pl: Any, tmp_path: Path, slow_disk: SlowDisk) -> None:
    trainer = fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), **options_of(pl, tmp_path))
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    assert torch.load(tmp_path / "mine.ckpt", weights_only=False)["global_step"] == 8


def test_a_fit_in_an_except_block_raises_what_failed(pl: Any, tmp_path: Path, disk: FullDisk) -> None:
    disk.full_after = 0
    try:
        raise ValueError("the first attempt")
    except ValueError:
        with pytest.raises(fastensor.CheckpointWriteError, match="No space left"):
            fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), **options_of(pl, tmp_path))


def test_loggers_are_called_when_files_are_finished(pl: Any, tmp_path: Path, slow_disk: SlowDisk) -> None:
    base = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger
    seen: list[tuple[bool, bool]] = []

    class Uploader(base):  # type: ignore[misc]
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            path = checkpoint_callback.last_model_path
            seen.append((not path or os.path.exists(path), threading.current_thread() is threading.main_thread()))

    logger = Uploader(tmp_path)
    options = options_of(pl, tmp_path, every_n_train_steps=2, save_top_k=1, save_last=True)
    fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), logger=logger, **options)
    assert seen == [(True, True)] * 8
    assert "after_save_checkpoint" not in vars(logger)
    metrics = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    for name in ("stall_seconds", "save_seconds", "save_bytes", "save_bytes_per_second"):
        assert f"checkpoint/{name}" in metrics[0]
    step, stall = (metrics[0].split(",").index(name) for name in ("step", "checkpoint/stall_seconds"))
    rows = [line.split(",") for line in metrics[1:]]
    assert {row[step] for row in rows if row[stall]} == {"2", "4", "6", "8"}


def test_the_old_one_stays_when_the_new_one_fails(pl: Any, tmp_path: Path, disk: FullDisk) -> None:
    disk.full_after = 3
    options = options_of(pl, tmp_path, every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    with pytest.raises(fastensor.CheckpointWriteError, match="No space left"):
        fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), **options)
    assert files(tmp_path) == ["epoch=0-step=3.ckpt"]
    assert step_of(tmp_path / "c" / "epoch=0-step=3.ckpt") == 3


def test_the_last_failure_is_raised_by_fit(pl: Any, tmp_path: Path, disk: FullDisk) -> None:
    disk.full_after = 0
    plugin = FastensorCheckpointIO(asynchronous=True)
    with pytest.raises(fastensor.CheckpointWriteError, match="No space left"):
        fit(pl, tmp_path, plugin, **options_of(pl, tmp_path, every_n_train_steps=8))
    assert files(tmp_path) == []
    disk.full_after = 10**9
    fit(pl, tmp_path, plugin, **options_of(pl, tmp_path, every_n_train_steps=8))
    assert files(tmp_path) == ["epoch=1-step=8.ckpt"]


def test_an_exception_of_the_training_is_what_is_seen(
    pl: Any, tmp_path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                disk.full_after = 0
                trainer.save_checkpoint(tmp_path / "x")
                raise ValueError("of the training")

    plugin = FastensorCheckpointIO(asynchronous=True)
    with pytest.raises(ValueError, match="of the training"):
        fit(pl, tmp_path, plugin, callbacks=[CheckpointMonitor(), Stop()])
    assert "No space left" in caplog.text


def test_an_earlier_failure_does_not_keep_the_checkpoint_of_the_exception_from_being_saved(
    pl: Any, tmp_path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does it hide the exception. Callbacks may come before the monitor; those of checkpoints come after it."""
    plugin = FastensorCheckpointIO(asynchronous=True)

    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                disk.full_after = 0
                trainer.save_checkpoint(tmp_path / "x")
                plugin._wait()
                disk.full_after = 10**9
                raise ValueError("of the training")

        def on_exception(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "c" / "mine.ckpt")

    callbacks = [Stop(), CheckpointMonitor(), pl.callbacks.OnExceptionCheckpoint(tmp_path / "c")]
    with pytest.raises(ValueError, match="of the training") as found:
        fit(pl, tmp_path, plugin, callbacks=callbacks)
    assert found.value.__context__ is None
    assert [step_of(tmp_path / "c" / name) for name in files(tmp_path)] == [3, 3]
    assert caplog.text.count("an asynchronous save had failed") == 1
    assert not (tmp_path / "x").exists()


def test_what_fails_while_the_exception_is_handled_is_logged(
    pl: Any, tmp_path: Path, disk: FullDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes of what is pending is known before checkpoints of the exception are saved."""

    class Stop(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            disk.full_after = 0
            trainer.save_checkpoint(tmp_path / "x")
            raise ValueError("of the training")

    class Mend(pl.callbacks.Checkpoint):  # type: ignore[misc]
        def on_exception(self, *_: Any) -> None:
            assert "an asynchronous save had failed" in caplog.text
            disk.full_after = 10**9

    callbacks = [CheckpointMonitor(), Stop(), Mend(), pl.callbacks.OnExceptionCheckpoint(tmp_path / "c")]
    with pytest.raises(ValueError, match="of the training"):
        fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), callbacks=callbacks)
    assert step_of(tmp_path / "c" / "on_exception.ckpt") == 1


def test_a_checkpoint_of_the_exception(pl: Any, tmp_path: Path, slow_disk: SlowDisk) -> None:
    saver = pl.callbacks.OnExceptionCheckpoint(tmp_path / "c")
    plugin = FastensorCheckpointIO(asynchronous=True)
    with pytest.raises(ValueError, match="of the training"):
        fit(pl, tmp_path, plugin, callbacks=[CheckpointMonitor(), saver, stop_at(pl, 3)])
    assert step_of(tmp_path / "c" / "on_exception.ckpt") == 3
    fit(pl, tmp_path, plugin, callbacks=[CheckpointMonitor(), saver])
    assert not (tmp_path / "c" / "on_exception.ckpt").exists()


def test_a_run_that_fails_leaves_nothing_behind(pl: Any, tmp_path: Path, asynchronous: bool) -> None:
    """Callbacks are not torn down after an exception. Until the plugin is, others of them may save."""
    plugin, logger = FastensorCheckpointIO(asynchronous=asynchronous), make_logger(pl, tmp_path)
    saver = checkpoints(pl, tmp_path, every_n_train_steps=1, save_last="link", save_on_exception=True)
    seen: list[bool] = []

    class Late(pl.callbacks.Checkpoint):  # type: ignore[misc]
        def on_exception(self, *_: Any) -> None:
            seen.append(is_patched(saver, logger))
            assert plugin._monitors

    with pytest.raises(ValueError, match="of the training"):
        fit(pl, tmp_path, plugin, logger=logger, callbacks=[CheckpointMonitor(), saver, Late(), stop_at(pl, 3)])
    assert seen == [asynchronous]
    assert not plugin._monitors
    assert not is_patched(saver, logger)
    assert step_of(tmp_path / "c" / "last.ckpt") == 3
    logged = list(logger.steps)
    fit(pl, tmp_path, plugin, callbacks=[CheckpointMonitor()])
    assert logger.steps == logged


def test_a_monitor_forgets_a_run_that_failed(pl: Any, tmp_path: Path, asynchronous: bool, slow_disk: SlowDisk) -> None:
    """What it saved last was durable after its loggers had been closed."""
    plugin, monitor = FastensorCheckpointIO(asynchronous=asynchronous), CheckpointMonitor()
    saver = pl.callbacks.OnExceptionCheckpoint(tmp_path)
    with pytest.raises(ValueError, match="of the training"):
        fit(pl, tmp_path, plugin, callbacks=[monitor, saver, stop_at(pl, 3)])
    logger = make_logger(pl, tmp_path)
    fit(pl, tmp_path, plugin, callbacks=[monitor], logger=logger)
    assert logger.steps == [4, 8]


@pytest.mark.parametrize("monitor_first", [True, False])
def test_a_monitor_ends_once(pl: Any, tmp_path: Path, asynchronous: bool, monitor_first: bool) -> None:
    plugin, monitor = FastensorCheckpointIO(asynchronous=asynchronous), CheckpointMonitor()
    trainer = make_trainer(pl, tmp_path, plugin, callbacks=[monitor], logger=make_logger(pl, tmp_path))
    monitor.setup(trainer, None, "fit")
    assert is_patched(trainer.checkpoint_callback, trainer.logger) == asynchronous

    def tear_plugin_down() -> None:
        try:
            raise ValueError("of the training")
        except ValueError:
            plugin.teardown()

    ends = [lambda: monitor.teardown(trainer, None, "fit"), tear_plugin_down]
    for end in (ends if monitor_first else ends[::-1]) * 2:
        end()
        assert not plugin._monitors
        assert not is_patched(trainer.checkpoint_callback, trainer.logger)


def test_what_is_saved_after_the_end_of_fit_is_logged(pl: Any, tmp_path: Path, asynchronous: bool) -> None:
    class Late(pl.Callback):  # type: ignore[misc]
        def on_fit_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "late.ckpt")

    logger = make_logger(pl, tmp_path)
    callbacks = [CheckpointMonitor(), checkpoints(pl, tmp_path, every_n_train_steps=4), Late()]
    fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=asynchronous), callbacks=callbacks, logger=logger)
    assert logger.steps == [4, 8, 8]


def test_tuners_save_restore_and_remove(pl: Any, tmp_path: Path, slow_disk: SlowDisk) -> None:
    tuner = importlib.import_module(f"{pl.__name__}.tuner").Tuner
    trainer = make_trainer(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), enable_checkpointing=False)
    module = make_module(pl)
    module.lr, module.batch_size = 0.1, 2
    before = module.layer.weight.clone()
    tuner(trainer).lr_find(module, loader(), num_training=5, update_attr=False)
    assert torch.equal(module.layer.weight, before)
    module.train_dataloader = module.val_dataloader = lambda: loader(module.batch_size)
    tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=1)
    assert torch.equal(module.layer.weight, before)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".ckpt")]


def test_a_checkpoint_for_a_requeue_is_there_at_once(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_disk: SlowDisk
) -> None:
    """Lightning's handler saves and calls ``scontrol requeue``, which ends the job. The next one resumes by itself."""
    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    connector = importlib.import_module(f"{pl.__name__}.trainer.connectors.signal_connector")
    requeued: list[tuple[list[str], int]] = []
    began: list[int] = []

    def call(command: list[str], **_: Any) -> int:
        saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
        requeued.append((command, saved["global_step"]))
        return 0

    class Job(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            began.append(trainer.global_step)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(connector, "call", call)
    for _ in range(2):
        callbacks = [CheckpointMonitor(), checkpoints(pl, tmp_path, every_n_train_steps=1), Job()]
        fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), callbacks=callbacks)
    assert requeued == [(["scontrol", "requeue", "42"], 3)]
    assert began == [0, 3]


def test_a_requeue_in_the_middle_of_a_save(
    pl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """SLURM's signal interrupts the main thread while that saves another checkpoint. Lightning's handler saves."""
    for name, value in SLURM.items():
        if name != "SLURM_JOB_NAME":
            monkeypatch.setenv(name, value)
    connector = importlib.import_module(f"{pl.__name__}.trainer.connectors.signal_connector")
    requeued: list[int] = []
    steps: list[str] = []

    def call(command: list[str], **_: Any) -> int:
        requeued.append(torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"])
        return 0

    owner, name = (snapshot.Snapshot, "stage") if asynchronous else (posix, "sync_file")
    original = getattr(owner, name)

    def be_interrupted(*arguments: Any) -> Any:
        if steps == ["save"]:
            steps.append("signal")
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(*arguments)

    class Job(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                steps.append("save")
                trainer.save_checkpoint(tmp_path / "mine.ckpt")
                steps.append("saved")

    monkeypatch.setattr(connector, "call", call)
    monkeypatch.setattr(owner, name, be_interrupted)
    plugin = FastensorCheckpointIO(asynchronous=asynchronous)
    fit(pl, tmp_path, plugin, callbacks=[CheckpointMonitor(), Job()], enable_checkpointing=False)
    assert (steps, requeued) == (["save", "signal", "saved"], [3])
    assert step_of(tmp_path / "mine.ckpt") == step_of(tmp_path / "hpc_ckpt_1.ckpt") == 3


SLURM = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0") | {
    "SLURM_NTASKS": "1", "SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "training"
}  # fmt: skip


@pytest.mark.parametrize("environment", [{}, SLURM], ids=["alone", "SLURM"])
def test_a_preempted_trainer_ends_in_good_order(pl: Any, tmp_path: Path, environment: dict[str, str]) -> None:
    """Its handler calls the writer's, which is to leave the end of the process to it."""
    program = Path(__file__).with_name("preempted_trainer.py")
    done = run(program, pl.__name__, tmp_path, check=False, lightning=True, **environment)
    assert "SIGTERMException" in done.stdout, done.stderr
    assert done.returncode >= 0
    assert ("Bypassing SIGTERM" in done.stderr) == bool(environment)
    assert sorted(os.listdir(tmp_path)) == ["before.ckpt", "exception.ckpt"]
    assert step_of(tmp_path / "exception.ckpt") == 3


def test_two_fits_in_a_row(pl: Any, tmp_path: Path, slow_disk: SlowDisk) -> None:
    plugin, monitor = FastensorCheckpointIO(asynchronous=True), CheckpointMonitor()
    trainer = make_trainer(pl, tmp_path, plugin, callbacks=[monitor, checkpoints(pl, tmp_path, save_last=True)])
    trainer.fit(make_module(pl), loader(), loader())
    assert step_of(tmp_path / "c" / "last.ckpt") == 8
    trainer.fit_loop.max_epochs = 4
    trainer.fit(make_module(pl), loader(), loader())
    assert step_of(tmp_path / "c" / "last.ckpt") == 16
    assert not plugin._monitors
    pickle.loads(pickle.dumps((plugin, monitor)))


@pytest.fixture
def watch(pl: Any, tmp_path: Path) -> Any:
    """Saves at every end of a batch and of a fit, and notes which of these saves were asynchronous."""

    class Watch(pl.callbacks.Checkpoint):  # type: ignore[misc]
        def __init__(self) -> None:
            self.asynchronous: list[bool] = []

        def save(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "x.ckpt")
            self.asynchronous.append(trainer.strategy.checkpoint_io._latest is not None)

        on_train_batch_end = on_fit_end = save

    return Watch()


@pytest.mark.usefixtures("no_entry_points")
def test_without_a_monitor_it_says_so_once_and_saves_synchronously(
    pl: Any, tmp_path: Path, slow_disk: SlowDisk, watch: Any
) -> None:
    saver = checkpoints(pl, tmp_path, every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    with pytest.warns(UserWarning, match=r"synchronously. .*callbacks=\[fastensor_lightning.CheckpointMonitor") as said:
        fit(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), callbacks=[saver, watch])
    assert len([one for one in said if "CheckpointMonitor" in str(one.message)]) == 1
    assert watch.asynchronous == [False] * 9
    assert files(tmp_path) == ["epoch=1-step=8.ckpt"]


@pytest.mark.usefixtures("no_entry_points")
@pytest.mark.parametrize("first", ["fit", "validate"])
def test_every_run_saves_asynchronously(
    pl: Any, tmp_path: Path, slow_disk: SlowDisk, watch: Any, first: str, recwarn: Any
) -> None:
    """And what is saved after a run is there at once."""
    plugin = FastensorCheckpointIO(asynchronous=True)
    trainer = make_trainer(pl, tmp_path, plugin, callbacks=[watch, CheckpointMonitor()], max_epochs=1)
    module = make_module(pl)
    getattr(trainer, first)(module, loader())
    for _ in range(2):
        watch.asynchronous.clear()
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        trainer.fit(module, loader(), loader())
        assert torch.load(tmp_path / "x.ckpt", weights_only=False)["global_step"] == trainer.global_step
        assert watch.asynchronous == [True] * 4 + [False]  # on_fit_end comes after the teardown of the plugin
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    assert torch.load(tmp_path / "late.ckpt", weights_only=False)["global_step"] == trainer.global_step
    assert not [one for one in recwarn if "synchronously" in str(one.message)]
    assert not drain_threads()


def test_a_save_after_a_run_that_has_failed_is_there_at_once(pl: Any, tmp_path: Path, slow_disk: SlowDisk) -> None:
    trainer = make_trainer(pl, tmp_path, FastensorCheckpointIO(asynchronous=True), callbacks=[stop_at(pl, 3)])
    with pytest.raises(ValueError, match="of the training"):
        trainer.fit(make_module(pl), loader())
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    assert torch.load(tmp_path / "late.ckpt", weights_only=False)["global_step"] == 3


def test_skipped_checkpoints_cost_no_old_ones(
    pl: Any, tmp_path: Path, disk_is_free: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    """What a skipped one was to replace stays: from step 2 on it is durable, from step 7 on still to be written."""
    plugin = FastensorCheckpointIO(asynchronous={"when_busy": "skip", "staging_bytes": BUFFER_NBYTES})
    saver = checkpoints(pl, tmp_path, every_n_train_steps=1, save_top_k=1, monitor="step", mode="max")
    skipped: list[int] = []
    found: dict[int, list[int]] = {}

    class Watch(pl.callbacks.Checkpoint):  # type: ignore[misc]  # these come last, in the order given
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            step = trainer.global_step
            if plugin._latest is not None and plugin._latest.stage == "skipped":
                skipped.append(step)
            if step in (4, 8):
                disk_is_free.set()
            if disk_is_free.is_set():
                plugin._wait()
            if step in (1, 5):
                disk_is_free.clear()
            if step == 1:
                trainer.save_checkpoint(tmp_path / "other.ckpt")
            found[step] = published(tmp_path)

    fit(pl, tmp_path, plugin, callbacks=[CheckpointMonitor(), saver, Watch()])
    assert all(found.values())
    assert skipped == [2, 3, 4, 7, 8]
    assert found == {1: [1], 2: [1], 3: [1], 4: [1], 5: [1, 5], 6: [1, 5], 7: [1, 5], 8: [1, 6]}
    assert published(tmp_path) == [1, 6]
    assert "is not removed, because the save after it was skipped" in caplog.text


def test_a_single_save_can_be_synchronous(tmp_path: Path) -> None:
    plugin = FastensorCheckpointIO(asynchronous=True)
    plugin.save_checkpoint({"a": 1}, tmp_path / "x", storage_options={"asynchronous": False})
    assert plugin.last_save is not None
    assert plugin.last_save.stall_seconds == plugin.last_save.seconds
    assert plugin._latest is None
    plugin.teardown()
    plugin.teardown()


@pytest.mark.parametrize("value", [1, 0, "true", [("when_busy", "skip")]])
def test_what_asynchronous_cannot_be(value: Any) -> None:
    with pytest.raises(TypeError, match=r"a bool, or a dict with keys among \['staging_bytes', .*found"):
        FastensorCheckpointIO(asynchronous=value)


def test_asynchronous_options_are_checked_at_once() -> None:
    with pytest.raises(
        TypeError, match=r"keys among \['staging_bytes', .*; found 'stagingbytes', 3; did you mean 'staging_bytes'\?$"
    ):
        FastensorCheckpointIO(asynchronous={"stagingbytes": 1, "when_busy": "skip", 3: 1})
    with pytest.raises(ValueError, match="when_busy is one of"):
        FastensorCheckpointIO(asynchronous={"when_busy": "never"})


def test_asynchronous_in_short() -> None:
    assert not FastensorCheckpointIO(asynchronous=None).asynchronous
    assert FastensorCheckpointIO(asynchronous={}).asynchronous


def test_fabric(tmp_path: Path, slow_disk: SlowDisk, recwarn: pytest.WarningsRecorder) -> None:
    from lightning.fabric import Fabric

    plugin = FastensorCheckpointIO(asynchronous=True)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    state = {"w": torch.zeros(3), "step": 0}
    for step in range(5):
        state["w"] += 1
        state["step"] = step
        fabric.save(tmp_path / "x.ckpt", state)
    assert not [warning for warning in recwarn if "CheckpointMonitor" in str(warning.message)]
    found = fabric.load(tmp_path / "x.ckpt")
    assert (found["step"], float(found["w"][0])) == (4, 5.0)
    plugin.teardown()


def fabric_of_two_processes() -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    plugins = [FastensorCheckpointIO(asynchronous=True)]
    return Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(start_method="forkserver"), plugins=plugins)


def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 saves, both load at once; and a Trainer does everything that it can do with checkpoints."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    fabric = fabric_of_two_processes()
    fabric.launch(_save_and_load_on_every_rank, str(tmp_path / "x.ckpt"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1", "x.ckpt"]


def _save_and_load_on_every_rank(fabric: Any, path: str) -> None:
    _slow_down_rank_0(fabric)
    for number in range(5):
        fabric.save(path, {"w": torch.full((5,), number)})
        fabric.barrier()
        assert fabric.load(path)["w"][0] == number
        fabric.barrier()
    Path(path).with_name(f"rank{fabric.global_rank}").touch()


def test_two_processes_and_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is still to replace the link when both load what it will lead to."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    fabric = fabric_of_two_processes()
    fabric.launch(_link_and_load_on_every_rank, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["0.ckpt", "1.ckpt", "2.ckpt", "last.ckpt", "rank0", "rank1"]


def _link_and_load_on_every_rank(fabric: Any, folder: Path) -> None:
    _slow_down_rank_0(fabric)
    for number in range(3):
        path = folder / f"{number}.ckpt"
        fabric.save(path, {"w": torch.full((5,), number)})
        if fabric.global_rank == 0:
            fabric.strategy.checkpoint_io._link(str(path), str(folder / "last.ckpt"))
        fabric.barrier()
        assert fabric.load(folder / "last.ckpt")["w"][0] == number
        fabric.barrier()
    (folder / f"rank{fabric.global_rank}").touch()


def _slow_down_rank_0(fabric: Any) -> None:
    if fabric.global_rank == 0:
        SlowDisk(pytest.MonkeyPatch(), 0.1)  # for as long as the process lives


def test_a_trainer_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    import lightning.pytorch as pl

    plugin = FastensorCheckpointIO(asynchronous=True)
    options = options_of(
        pl, tmp_path, every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last="link"
    )
    strategy = pl.strategies.DDPStrategy(start_method="forkserver")
    trainer = make_trainer(pl, tmp_path, plugin, devices=2, strategy=strategy, **options)
    trainer.fit(make_module(pl), loader(), loader())
    assert files(tmp_path) == ["epoch=1-step=3.ckpt", "epoch=1-step=4.ckpt", "last.ckpt"]
    assert step_of(tmp_path / "c" / "last.ckpt") == 4
    trainer.test(make_module(pl), ckpt_path=str(tmp_path / "c" / "last.ckpt"), dataloaders=loader(), verbose=False)


def test_a_program_of_two_processes_fits_and_tests(tmp_path: Path) -> None:
    """Each of them looks for the last checkpoint by itself, which rank 0 is still writing when the run ends."""
    run_ranks(_fit_and_test, 2, free_port(), tmp_path)
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]


def _fit_and_test(rank: int, port: int, folder: Path) -> None:
    import lightning.pytorch as pl

    act_as_rank(rank, port)
    if rank == 0:
        SlowDisk(pytest.MonkeyPatch(), 0.3)
    options = options_of(pl, folder, every_n_train_steps=2, save_top_k=1, save_last=True)
    trainer = make_trainer(pl, folder, FastensorCheckpointIO(asynchronous=True), devices=2, strategy="ddp", **options)
    trainer.fit(make_module(pl), loader(), loader())
    trainer.test(ckpt_path="last", dataloaders=loader(), verbose=False)
    assert trainer.ckpt_path == str(folder / "c" / "last.ckpt")
    (folder / f"rank{rank}").touch()
    torch.distributed.destroy_process_group()  # gloo aborts now and then if it is left to the end of the process
