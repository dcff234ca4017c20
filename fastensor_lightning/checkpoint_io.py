"""Lightning's checkpoint plugin: the frame's contract on one side, ``fastensor.save`` and ``load`` on the other."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, cast

import torch

import fastensor
from fastensor.checkpoint import cooperative, ordering
from fastensor.checkpoint.asynchronous.for_adapters import in_turn, log_failures, settle
from fastensor.checkpoint.asynchronous.settings import WhenBusy
from fastensor.checkpoint.cooperative.options import CooperativeOptions, check_cooperation
from fastensor.checkpoint.files import make_parent, remove, remove_at_once
from fastensor.checkpoint.location import RemotePath, as_in_fsspec, locate
from fastensor.checkpoint.reading.placement import check_map_location
from fastensor.checkpoint.writing.save_transaction import ShareUnchanged, check_share_unchanged
from fastensor.files.arguments import check_flags, checks_keywords, nearest
from fastensor.files.atomic import announce_writer, wait_for_writers
from fastensor.files.job_store import has_others
from fastensor.files.new_directory import replace_link
from fastensor.files.posix import memory_filesystem_of
from fastensor.files.shown import shown
from fastensor.select.transfer import check_choice
from fastensor_lightning.frameworks import load_classes
from fastensor_lightning.left_out import Exclude, LeftOut
from fastensor_lightning.sharded import PendingShards, ShardedCheckpoints

CHECKPOINT_IO_CLASSES = load_classes("CheckpointIO", "lightning.fabric.plugins", "lightning_fabric.plugins")
"""The class that every checkpoint plugin inherits from, of each installed package."""
if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO

    from fastensor_lightning.checkpoint_monitor import CheckpointMonitor
else:
    CheckpointIO = type("CheckpointIO", CHECKPOINT_IO_CLASSES, {})

_logger = logging.getLogger(__name__)
_STORAGE_OPTIONS = ["backend", "durable", "asynchronous"]
_PATIENCE_SECONDS = 600.0
_MONITOR_IS_MISSING = (
    "A Trainer gets what watches this plugin by an entry point of the installed package: install Fastensor again (a "
    "checkout by pip install --editable), or pass callbacks=[fastensor_lightning.CheckpointMonitor()] to the Trainer"
)
_FOR_REQUEUE = re.compile(r"hpc_ckpt_\d+\.ckpt")
"""Name of the checkpoint that a Trainer saves in the last seconds before it lets SLURM restart the job."""


class AsyncOptions(TypedDict, total=False):
    """The keywords of :class:`fastensor.AsyncWriter`."""

    staging_bytes: int | str | None
    when_busy: WhenBusy
    max_bytes_per_second: float | str | None
    exit_seconds: float
    preemption_seconds: float | None


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options of one checkpoint."""

    backend: str | fastensor.Selector
    durable: bool
    asynchronous: bool


@checks_keywords
class FastensorCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of a Trainer or a Fabric at the speed of the disk, durable and verified.

    The files are standard ones: a Trainer without the plugin, ``load_from_checkpoint`` and ``torch.load`` read them,
    and this plugin reads what those wrote. When a save returns, file and name are on stable storage; until then the
    file that was there before is untouched.

    Args:
        backend: how bytes are moved, as in :func:`fastensor.save` and :func:`fastensor.load`: by default, by what was
            fastest on this machine.
        durable: whether saves are synced, as in :func:`fastensor.save`.
        map_location: where checkpoints are loaded to when Lightning does not say, which it never does for resuming.
            ``"cpu"`` is what Lightning does by itself; ``"cuda"`` loads every tensor to the process's own device.
        verify: compare everything that is loaded with the CRC32s in the file, as :func:`fastensor.load` does.
        asynchronous: whether saves return when the state has been copied, as with :class:`fastensor.AsyncWriter`; a
            dict of its keywords (``{"staging_bytes": 2 << 30}``) also says how; None means False. Loads and removals
            keep to the order of the calls; an old checkpoint is only removed when what was saved after it is durable; a
            failure is raised by the next call; the end of ``fit`` (``teardown``) waits for what is pending, and until
            another run begins, saves are synchronous. The Trainer's loggers, ``last.ckpt`` links and version counter
            wait for finished files. Checkpoints for a requeue by SLURM are saved synchronously, inside Lightning's
            signal handler, whatever the signal interrupts. With ``when_busy="skip"`` or ``"latest"``,
            ``best_model_path`` and ``best_k_models`` of a ``ModelCheckpoint`` may name files that were never written,
            because it takes every save as done.
        share_unchanged: whether tensors that have not changed since the last checkpoint are not written again on
            filesystems whose files can share blocks, as in :func:`fastensor.save`. Frozen weights, above all.
        cooperative: whether the ranks of DDP save together, each one a part of the file, as
            :func:`fastensor.checkpoint.cooperative.save` does, and load together, so that each machine reads a file
            once; a dict of ``timeout`` and ``check_replicas`` also says how; None means False. The file has the
            parameters and optimizer states that all ranks hold alike; everything else in it is rank 0's, as in any
            checkpoint of DDP. Outside of a run, while an exception is handled, and for a requeue by SLURM, rank 0 saves
            alone. Not with ``asynchronous``.
        exclude: what a Trainer's checkpoints leave out of the model, if ``base`` has it: "frozen", for parameters that
            have no ``requires_grad`` when a checkpoint is saved; or a list of names and glob patterns of the state
            dict. A tensor whose bytes are not in ``base`` then is saved all the same. Not with ``cooperative``, nor
            with strategies other than one device and DDP.
        base: the file that has what is left out, under whatever names: any that :func:`fastensor.open` reads, or a
            model's folder. Loads add from it what a checkpoint leaves out. The plugin does not replace or remove it.
            :func:`add_left_out` does so for ``load_from_checkpoint``.

    When ``fit`` ends, Lightning's log says in a line what was saved and what that cost. A :class:`CheckpointMonitor`
    says more, and logs it.

    The plugin needs no other object. Lightning adds a callback of Fastensor's to each Trainer (entry point
    ``callbacks_factory``), which does what Lightning asks no plugin for: it keeps loggers, links and the version
    counter behind asynchronous saves, has all ranks save with ``cooperative``, and has ranks of DDP share which backend
    is the fastest. Without the plugin, or beside a :class:`CheckpointMonitor`, which does the same, it does nothing.
    Where entry points are not installed (a checkout on ``PYTHONPATH``), a Trainer needs a :class:`CheckpointMonitor`
    for all of that; the plugin warns if it misses one.

    With ``FSDPStrategy`` and ``ModelParallelStrategy`` of a Trainer, sharded checkpoints go through
    :class:`fastensor.checkpoint.dcp.FastensorStorageWriter` and ``FastensorStorageReader``: they take their place
    whole, with ``meta.pt``, and if one rank fails, all raise. Lightning itself reads full checkpoints of these
    strategies; before, they are verified. ``docs/distributed.md`` says more.

    A single save can override ``backend``, ``durable`` and ``asynchronous``: ``trainer.save_checkpoint(path,
    storage_options={"asynchronous": False})``. Picklable, without what is pending. Saves are called on global rank 0,
    loads on all ranks. Paths may be URLs of remote filesystems (``s3://...``), as in :func:`fastensor.save`.

    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(plugins=[FastensorCheckpointIO(asynchronous=True)], logger=False, accelerator="cpu")
    >>> type(trainer.strategy.checkpoint_io).__name__
    'FastensorCheckpointIO'
    """

    def __init__(
        self,
        *,
        backend: str | fastensor.Selector = "auto",
        durable: bool = True,
        map_location: Any = "cpu",
        verify: bool = True,
        asynchronous: bool | AsyncOptions | None = False,
        cooperative: bool | CooperativeOptions | None = False,
        share_unchanged: ShareUnchanged = True,
        exclude: Exclude = None,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        check_choice(backend)
        check_flags(durable=durable, verify=verify)
        check_share_unchanged(share_unchanged)
        check_map_location(map_location)
        self.backend = backend
        self.durable = durable
        self.map_location = map_location
        self.verify = verify
        self.share_unchanged = share_unchanged
        self._options = cast(AsyncOptions, _check_options("asynchronous", asynchronous, AsyncOptions))
        self.asynchronous = asynchronous not in (False, None)
        self._cooperation = cast(CooperativeOptions, _check_options("cooperative", cooperative, CooperativeOptions))
        self.cooperative = cooperative not in (False, None)
        check_cooperation(**self._cooperation)
        if self.cooperative and self.asynchronous:
            raise ValueError(
                "cooperative and asynchronous contradict: ranks that save together wait for each other; choose one"
            )
        self._left_out = LeftOut(exclude, base)
        if self.cooperative and exclude is not None:
            raise ValueError(
                "cooperative and exclude contradict: ranks that save together would each have to compare the whole "
                "base; choose one"
            )
        self.last_save: fastensor.SaveReport | None = None
        """Report of the latest save in this process, once it is finished."""
        self.last_load: fastensor.LoadReport | None = None
        """Report of the latest load in this process."""
        self._writer: fastensor.AsyncWriter | None = None
        if self.asynchronous:
            self._writer = fastensor.AsyncWriter(**self._options)
        self._latest: fastensor.SaveHandle | PendingShards | None = None
        """The latest asynchronous save in this process."""
        self._may_be_alone = True
        """Warn that no monitor was seen: not if one was seen, or the warning was given."""
        self._said_in_memory = False
        """True if the warning was given that files are in memory."""
        self._torn_down = False
        """True if a run has ended, and none has begun: then no teardown waits for pending saves."""
        self._waited_seconds = 0.0
        """Seconds that the end of the latest run, which was seen to begin, has waited for pending saves."""
        self._handled_before: BaseException | None = None
        """Exception that was being handled when the run began, if it began in an ``except`` block."""
        self._monitors: list[CheckpointMonitor] = []
        """The monitors of the run that is going on, of which there is usually one."""
        self._options_of_save: CheckpointOptions | None = None
        """The options of the save that a strategy is about to ask for without its options."""
        self._sharded = ShardedCheckpoints(self)

    @shown
    def __repr__(self) -> str:
        options = {"backend": self.backend, "durable": self.durable, "map_location": self.map_location}
        options |= {"verify": self.verify, "asynchronous": self._options or self.asynchronous}
        options |= {"cooperative": self._cooperation or self.cooperative, "share_unchanged": self.share_unchanged}
        if self._left_out.base is not None:
            options |= {"exclude": self._left_out.exclude, "base": self._left_out.base}
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        last = f", last saved {self.last_save.path!r}" if self.last_save is not None else ""
        return f"({given}){last}"

    def __getattr__(self, name: str) -> NoReturn:
        """Raise a clear error where the plugin was given as a callback: Lightning then asks for a callback's
        attributes.

        Raises:
            TypeError: a Trainer or Fabric has taken the plugin for a callback.
        """
        if name == "state_dict" or name.startswith("on_"):
            self[0]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitem__(self, index: object) -> NoReturn:
        """A Trainer whose ``callbacks`` are the plugin itself goes through it."""
        raise TypeError(f"{type(self).__name__} is a plugin: pass plugins=[{type(self).__name__}(...)], not callbacks")

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; its directory is created if missing.

        Args:
            checkpoint: what to save; it must not change until this returns.
            path: the file to create or replace. A symlink is replaced, not what it leads to.
            storage_options: overrides for this save: ``{"backend": ..., "durable": ..., "asynchronous": ...}``.

        Raises:
            TypeError: ``storage_options`` is not a dict or holds other keys.
            ValueError: the path is that of ``base``.
            fastensor.CheckpointWriteError: the save failed, as in :func:`fastensor.save`, or an earlier one did. While
                an exception is handled, what failed earlier is logged instead: this may be the last chance to save.
            OSError: the directory is missing and cannot be created.
        """
        self._warn_without_monitor(checkpoint)
        path = as_in_fsspec(path)
        chosen = self._save_options(storage_options)
        self._left_out.check_not_base(path)
        if _is_trainers(checkpoint):
            checkpoint = self._left_out.without(checkpoint)
        make_parent(path, durable=chosen.durable)
        options: dict[str, Any] = {"backend": chosen.backend, "durable": chosen.durable}
        # ModelCheckpoint's "last.ckpt" may be a link to the best checkpoint, which must not be replaced through it.
        options.update(container="torch", follow_symlinks=False, share_unchanged=self.share_unchanged)
        step = checkpoint.get("global_step") if isinstance(checkpoint, dict) else None
        if chosen.asynchronous and self._may_be_left_pending(checkpoint, path):
            with ExitStack() as until_saved:
                _announce(path, until_saved)
                self._latest = self._open_writer().save(checkpoint, path, **options)
                announced = until_saved.pop_all()
            self._latest.add_done_callback(lambda handle: announced.close())
            self._latest.add_done_callback(lambda handle: self._finished(handle, step))
        else:
            self._notify(fastensor.save(checkpoint, path, **options), step)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint and verify it.

        Args:
            path: a file of this plugin, of Lightning's own, or of ``torch.save``.
            map_location: as for ``torch.load``; None means the one given to the plugin.
            weights_only: as for ``torch.load``; None means torch's default, which is True.

        Raises:
            FileNotFoundError: there is no such file.
            fastensor.StateMismatchError: the checkpoint leaves out what ``base`` does not have.
            fastensor.FastensorError: as :func:`fastensor.load`.
        """
        given, path = path, as_in_fsspec(path)
        if map_location is None:
            map_location = self.map_location
        if self.asynchronous:
            _wait_for_rank_0(path)
        checkpoint: dict[str, Any]
        try:
            if self.cooperative:
                timeout = self._cooperation.get("timeout", cooperative.DEFAULT_TIMEOUT_SECONDS)
                checkpoint, self.last_load = cooperative.load_with_report(
                    path, map_location, timeout=timeout, weights_only=weights_only, verify=self.verify
                )
            else:
                checkpoint, self.last_load = fastensor.load_with_report(
                    path, map_location, weights_only=weights_only, verify=self.verify, backend=self.backend
                )
        except FileNotFoundError as error:
            if _is_there(path):  # something else is missing
                raise
            raise FileNotFoundError(f"Checkpoint file not found: {given}") from error  # in Lightning's words
        _logger.debug("loaded %s", self.last_load)
        self._left_out.add(checkpoint, path)
        for monitor in self._monitors:
            monitor._on_load(self.last_load)
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: a file, a directory with all it holds, or a symlink but not its target.

        Nothing happens if there is none, or if it is the ``base``. An asynchronous plugin does it when what was saved
        last is durable, and not at all if that fails, is skipped or is replaced.
        """
        path = as_in_fsspec(path)
        if self._left_out.is_base(path):
            _logger.warning("%s is not removed, because it is the base of other checkpoints", path)
        elif self._writer is None:
            remove(path)
        elif isinstance(self._latest, PendingShards):
            place, latest = next(ordering.places_behind(path)), self._latest
            what = f"removing {path}"
            in_turn(self._open_writer(), lambda: _remove_after(latest, path), place, what, leaves_file=False)
        elif self._latest is not None and self._latest.stage == "skipped":
            _logger.warning("%s is not removed, because the save after it was skipped", path)
        else:
            self._open_writer().remove(path)

    def teardown(self) -> None:
        """Wait for what is pending, and release the memory. The plugin can be used again.

        After an exception it is the last that Lightning calls, and callbacks are not torn down: monitors end then.

        Raises:
            Exception: what a save failed with, unless the Trainer is handling an exception: then it is logged.
        """
        interrupted = self._is_interrupted()
        try:
            self._close_writer()
        except Exception as error:
            if not interrupted:
                raise
            _logger.error("a checkpoint was not saved: %s", error, exc_info=error)
        finally:
            while interrupted and self._monitors:
                self._monitors.pop()._on_interrupted_run()

    # --- for the callbacks of this package

    def _wait(self) -> None:
        """Wait for what is pending; failures are left to the next call."""
        if self._writer is not None:
            with self._timed_wait():
                settle(self._writer)

    @contextmanager
    def _timed_wait(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._waited_seconds += time.perf_counter() - started

    def _log_failures(self) -> None:
        """Log the failures that were not raised, so that the next call does not raise them."""
        if self._writer is not None:
            log_failures(self._writer)

    def _will_exist(self, path: str | os.PathLike[str]) -> bool | None:
        """True if there will be a file at a path once nothing is pending; None if nothing is, for that path."""
        return ordering.will_exist(as_in_fsspec(path))

    def _save_together(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any, replicated: list[Any]
    ) -> None:
        """:meth:`save_checkpoint`, called on all ranks.

        Args:
            checkpoint, path, storage_options: as there.
            replicated: the tensors that all ranks hold alike.
        """
        path = as_in_fsspec(path)
        options = self._save_options(storage_options)
        if options.asynchronous:
            raise ValueError(f"{path} was not saved: ranks save it together, which is never asynchronous")
        self._left_out.check_not_base(path)
        make_parent(path, durable=options.durable)
        report = cooperative.save(
            checkpoint, path, replicated=replicated, backend=options.backend, durable=options.durable,
            container="torch", follow_symlinks=False, **self._cooperation,
        )  # fmt: skip
        if torch.distributed.get_rank() == 0:
            self._notify(report, checkpoint.get("global_step"))
        else:
            self.last_save = report

    def _leaves_to_rank_0(self, path: str | os.PathLike[str]) -> bool:
        """True if other ranks may not come when a checkpoint is saved."""
        return self._is_interrupted() or _FOR_REQUEUE.fullmatch(os.path.basename(path)) is not None

    def _link(self, target: str, link: str) -> None:
        """Make ``link`` a symlink to a checkpoint after the pending saves, unless the checkpoint's own save fails.

        For asynchronous plugins. Until it is done, a temporary beside the link makes other ranks wait for it.
        """
        if not isinstance(locate(as_in_fsspec(link)), str):
            _logger.warning("the link %s is not made: remote filesystems have no links", link)
            return
        target, link = as_in_fsspec(target), as_in_fsspec(link)  # the process may be elsewhere by then
        if target == link:
            return
        if self._left_out.is_base(link):
            _logger.warning("%s is no link to %s, because it is the base of other checkpoints", link, target)
            return
        place = next(ordering.places_behind(link))
        announcement = announce_writer(place)

        def replace_if_there() -> None:
            if os.path.exists(target):
                replace_link(target, link)
            else:
                _logger.warning("%s is left as it is, because %s was not saved", link, target)

        what = f"linking {link} to {target}"
        in_turn(self._open_writer(), replace_if_there, place, what, at_end=announcement.close)

    @property
    def _chooses(self) -> bool:
        """True if backends are chosen by measured timings."""
        return not isinstance(self.backend, str) or self.backend == "auto"

    def _begin_run(self, monitor: CheckpointMonitor) -> None:
        """Tell a monitor of every save and load that is finished in this process, in the thread that has finished it.

        A monitor is told until it ends the run (:meth:`_end_run`), or :meth:`teardown` does so after an exception. It
        stays behind when the plugin is pickled.
        """
        self._torn_down, self._may_be_alone, self._handled_before = False, False, sys.exc_info()[1]
        self._waited_seconds = 0.0
        self._monitors.append(monitor)

    def _end_run(self, monitor: CheckpointMonitor) -> None:
        """Tell a monitor of nothing more. Calling it again does nothing."""
        if monitor in self._monitors:
            self._monitors.remove(monitor)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_monitors": [], "_latest": None, "_handled_before": None, "_options_of_save": None}

    def _open_writer(self) -> fastensor.AsyncWriter:
        if self._writer is None or self._writer.closed:
            self._writer = fastensor.AsyncWriter(**self._options)
        elif self._is_interrupted():
            log_failures(self._writer)
        return self._writer

    def _is_interrupted(self) -> bool:
        """True if an exception is being handled that was not when the run began."""
        handled = sys.exc_info()[1]
        return handled is not None and handled is not self._handled_before

    def _close_writer(self) -> None:
        if self._writer is not None:
            self._torn_down, self._latest = True, None
            with self._timed_wait():
                self._writer.close()

    def _finished(self, handle: fastensor.SaveHandle, step: int | None) -> None:
        if handle.stage == "durable":
            self._notify(handle.result(), step)

    def _notify(self, report: fastensor.SaveReport, step: int | None) -> None:
        _logger.debug("saved %s", report)
        self._warn_if_in_memory(report)
        self.last_save = report
        for monitor in tuple(self._monitors):  # also in the writer's thread
            monitor._on_save(report, step)

    def _warn_if_in_memory(self, report: fastensor.SaveReport) -> None:
        if self._said_in_memory or not self.durable or report.durable or not os.path.isabs(report.path):
            return
        if kind := memory_filesystem_of(report.path):
            self._said_in_memory = True
            _logger.warning(
                "%s is on %s, which is in memory: checkpoints there do not survive a power failure or a reboot; set "
                "the Trainer's default_root_dir, or ModelCheckpoint's dirpath, to a folder on a disk",
                report.path,
                kind,
            )

    def _may_be_left_pending(self, checkpoint: object, path: str | os.PathLike[str]) -> bool:
        """True if an asynchronous save may be left pending when it returns, because :meth:`teardown` is still to come.
        A monitor says when the run of a Trainer begins, and ends."""
        is_for_requeue = _FOR_REQUEUE.fullmatch(os.path.basename(path)) is not None
        return not (is_for_requeue or self._torn_down) and (bool(self._monitors) or not _is_trainers(checkpoint))

    def _warn_without_monitor(self, checkpoint: object) -> None:
        """Warn once of what a Trainer does without a monitor, or Fabric, which has none."""
        leaves_out = self._left_out.exclude is not None
        if not self._may_be_alone or not (_is_trainers(checkpoint) or self.cooperative or leaves_out):
            return
        lacks = {
            "checkpoints are saved synchronously": self.asynchronous,
            "rank 0 saves alone (with Fabric, call fastensor.checkpoint.cooperative.save on all ranks)": (
                self.cooperative and has_others()
            ),
            "ranks do not share which backend is the fastest": self._chooses and has_others(),
            "nothing is left out of checkpoints": leaves_out,
        }
        if missing := [text for text, is_lacking in lacks.items() if is_lacking]:
            self._may_be_alone = False
            warnings.warn(f"without a CheckpointMonitor, {' and '.join(missing)}. {_MONITOR_IS_MISSING}", stacklevel=3)

    @contextmanager
    def _saving_with(self, options: CheckpointOptions) -> Iterator[None]:
        """In the block, a strategy saves with these options, which it does not pass on."""
        self._options_of_save = options
        try:
            yield
        finally:
            self._options_of_save = None

    def _save_options(self, overrides: Any | None) -> CheckpointOptions:
        options = self._options_of_save or CheckpointOptions(self.backend, self.durable, self.asynchronous)
        if overrides is None:
            return options
        _check_keys(f"storage_options of {type(self).__name__}", overrides, _STORAGE_OPTIONS)
        check_choice(overrides.get("backend", options.backend))
        check_flags(**{name: overrides[name] for name in ("durable", "asynchronous") if name in overrides})
        return replace(options, **overrides)


def _remove_after(save: PendingShards, path: str) -> None:
    """Remove a checkpoint unless the save that it makes room for has failed."""
    if save.stage == "failed":
        _logger.warning("%s is not removed, because %s was not saved", path, save.path)
    else:
        remove_at_once(path)


def _is_trainers(checkpoint: object) -> bool:
    """True if a Trainer has made a checkpoint, and not Fabric or a script."""
    return isinstance(checkpoint, dict) and "pytorch-lightning_version" in checkpoint


def _check_options(name: str, value: object, kind: type) -> dict[str, Any]:
    """The options of a dict, or none.

    Args:
        name: the argument's name.
        value: the argument.
        kind: the TypedDict of known options.

    Raises:
        TypeError: the argument is neither a bool, None, nor a dict of known options.
    """
    if value is None or isinstance(value, bool):
        return {}
    known = list(kind.__annotations__)
    if not isinstance(value, dict):
        raise TypeError(f"{name} is a bool, or a dict with keys among {known}; found {value!r}")
    _check_keys(name, value, known)
    return value


def _check_keys(name: str, value: object, known: Sequence[str]) -> None:
    """
    Raises:
        TypeError: the argument is no dict, or has unknown keys.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{name} is a dict with keys among {known}; found {value!r}")
    unknown = [key for key in value if key not in known]
    if unknown:
        hint = nearest(str(unknown[0]), known)
        raise TypeError(f"{name} is a dict with keys among {known}; found {', '.join(map(repr, unknown))}{hint}")


def _announce(path: str, until: ExitStack) -> None:
    """Announce to the other ranks of this job that a file is being written: :func:`_wait_for_rank_0` waits for it."""
    if not has_others() or not isinstance(locate(path), str):
        return
    try:
        until.callback(announce_writer(next(ordering.places_behind(path))).close)
    except OSError as error:
        _logger.warning("other ranks that load %s do not wait until it is written: %s", path, error)


def _is_there(path: str) -> bool:
    found = locate(path)
    return bool(found.filesystem.exists(found.path)) if isinstance(found, RemotePath) else os.path.exists(path)


def _wait_for_rank_0(path: str | os.PathLike[str]) -> None:
    """Wait until the file that another process of this job has announced for a path is there, which is to be loaded."""
    if not has_others() or torch.distributed.get_rank() == 0 or not isinstance(locate(path), str):
        return
    # a link is read when no process is about to replace it
    if not all(wait_for_writers(place, _PATIENCE_SECONDS) for place in ordering.places_behind(path)):
        _logger.warning(
            "%s is loaded although another process is still writing it, after %g s", path, _PATIENCE_SECONDS
        )
