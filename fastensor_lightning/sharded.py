"""Lightning's ``FSDPStrategy`` and ``ModelParallelStrategy`` save and load by the plugin.

These strategies ask the plugin for full checkpoints only, and only to save them. So three of their methods are
replaced, for Trainers that have :class:`FastensorCheckpointIO`. Their own code still does all of the work. It writes to
a hidden directory, which then takes its place, and what it asks ``torch.distributed.checkpoint`` for goes to the
storage of Fastensor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

import fastensor
from fastensor.checkpoint import ordering
from fastensor.checkpoint.agreement import Agreement
from fastensor.checkpoint.asynchronous.for_adapters import in_turn
from fastensor.checkpoint.directories import nbytes_in_directory, survives_power_failure
from fastensor.checkpoint.files import make_parent, remove_at_once
from fastensor.checkpoint.location import as_in_fsspec, locate
from fastensor.errors import CheckpointReadError, FastensorError
from fastensor.files.new_directory import NewDirectory
from fastensor.files.os_errors import kept_at, write_errors
from fastensor.files.replacing import wrap_method
from fastensor_lightning.frameworks import load_classes

if TYPE_CHECKING:
    from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
    from fastensor_lightning.checkpoint_io import CheckpointOptions, FastensorCheckpointIO

_STRATEGIES = ("FSDPStrategy", "ModelParallelStrategy")
_REPLACED = "_fastensor_replaced"
_METADATA = "meta.pt"
"""Lightning's name of the file of everything but model and optimizers, in the directory of a sharded checkpoint."""


class UnknownLightningError(FastensorError):
    """This version of Lightning saves or loads sharded checkpoints in a way that Fastensor does not know."""


@dataclass(frozen=True, slots=True)
class PendingShards:
    """The latest asynchronous save of a sharded checkpoint. Like a :class:`fastensor.SaveHandle`."""

    path: str
    future: Future[None]

    def done(self) -> bool:
        """True if the save has succeeded or failed."""
        return self.future.done()

    @property
    def stage(self) -> Literal["writing", "durable", "failed"]:
        """Stage of the save."""
        if not self.future.done():
            return "writing"
        return "durable" if self.future.exception() is None else "failed"


@dataclass(frozen=True, slots=True)
class _ShardedSave:
    """One save of a sharded checkpoint."""

    path: str
    directory: NewDirectory
    options: CheckpointOptions
    agreement: Agreement
    is_first: bool
    """True if this is the first of all ranks, which publishes the checkpoint."""
    is_first_of_machine: bool
    started: float
    step: int | None

    def together(self, do: Callable[[], None]) -> None:
        """Do something on all ranks.

        Raises:
            Exception: what this rank has failed with, or another one. Nothing is left of the save then.
        """
        with self._or_nothing():
            self.agreement.together(do, f"{self.path} was not saved")

    def total(self, number: int) -> int:
        """The sum of the numbers of all ranks.

        Raises:
            CheckpointWriteError: a rank cannot be reached. Nothing is left of the save then.
        """
        with self._or_nothing():
            return self.agreement.total(number, f"{self.path} was not saved")

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.is_first:
                self.directory.discard()
            raise


class ShardedCheckpoints:
    """The two strategies' saves and loads with a plugin. Methods are called on all ranks, in the thread that trains."""

    def __init__(self, plugin: FastensorCheckpointIO) -> None:
        self._plugin = plugin
        self._agreement: Agreement | None = None
        self._storage: FastensorStorageWriter | None = None
        """The same for all saves, so that the memory for copies is used again."""
        self._world: Any = None
        """The process group of all ranks, at the time when the agreement was made."""
        replace_methods()

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedCheckpoints, (self._plugin,)

    def save(
        self,
        strategy: Any,
        stock: Callable[..., None],
        checkpoint: dict[str, Any],
        filepath: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Takes the place of the strategy's ``save_checkpoint``.

        Raises:
            TypeError, fastensor.CheckpointWriteError, OSError: as ``FastensorCheckpointIO.save_checkpoint``. If one
                rank fails, all raise.
            UnknownLightningError: the checkpoint was not saved, because Lightning does so in an unknown way.
        """
        plugin = self._plugin
        options = plugin._save_options(storage_options)
        if not _saves_shards(strategy):
            self._make_way(strategy, as_in_fsspec(strategy.broadcast(filepath)))
            with plugin._saving_with(options):
                stock(strategy, checkpoint, filepath)
            return
        given: str | os.PathLike[str] = strategy.broadcast(filepath)
        if options.asynchronous:
            plugin._warn_without_monitor(checkpoint)
        waited_for = options.asynchronous and plugin._may_be_left_pending(checkpoint, given)
        options = replace(options, asynchronous=bool(strategy.broadcast(waited_for)))
        saving = self._begin(strategy, given, options, checkpoint)
        copies: list[Callable[[], object]] = []
        saving.together(partial(self._write, saving, strategy, partial(stock, strategy, checkpoint), copies))
        finish = partial(self._finish, saving, copies, time.perf_counter() - saving.started)
        if options.asynchronous:
            place = saving.directory.path
            future = in_turn(plugin._open_writer(), finish, place, f"saving {saving.path}")
            plugin._latest = PendingShards(saving.path, future)
        else:
            plugin._latest = None
            finish()

    def load(self, strategy: Any, stock: Callable[..., Any], checkpoint_path: Any, *args: Any, **options: Any) -> Any:
        """Takes the place of the strategy's ``load_checkpoint``.

        Raises:
            fastensor.CorruptCheckpointError: the checkpoint is damaged.
            fastensor.CheckpointReadError: it cannot be read, or another rank has found damage.
            UnknownLightningError: Lightning has read shards in an unknown way.
            Exception: what a pending save has failed with, or what the strategy raises.
        """
        from fastensor.checkpoint.dcp.redirect import redirected

        path = as_in_fsspec(strategy.broadcast(checkpoint_path))
        agreement = self._agree()
        agreement.together(self._wait, f"{path} was not loaded", CheckpointReadError)
        if self._plugin.verify:
            check = partial(_verify_others, path) if strategy.local_rank == 0 else lambda: None
            agreement.together(check, f"{path} was not loaded", CheckpointReadError)
        with redirected(reader=self._reader) as calls:
            found = stock(strategy, checkpoint_path, *args, **options)
        if os.path.isdir(path) and not calls.loads:
            raise UnknownLightningError(_unknown(strategy, "loads"))
        return found

    def teardown(self, strategy: Any, stock: Callable[..., None]) -> None:
        """Takes the place of the strategy's ``teardown``, which may leave out the plugin's."""
        try:
            stock(strategy)
        finally:
            self._storage = None  # a pending save keeps its own copies
            self._plugin.teardown()

    def _make_way(self, strategy: Any, path: str) -> None:
        """Remove a sharded checkpoint, or a link to one, which a file is to replace. Lightning would have all ranks
        remove it at once, of which some fail, and would not remove a link."""
        if strategy.broadcast(os.path.isfile(os.path.join(path, _METADATA))):  # what Lightning takes for a sharded one
            remove = partial(remove_at_once, path) if strategy.local_rank == 0 else lambda: None
            agreement = self._agree()
            agreement.together(self._wait, f"{path} was not saved")
            agreement.together(remove, f"{path} was not saved")

    def _begin(
        self, strategy: Any, given: str | os.PathLike[str], options: CheckpointOptions, checkpoint: dict[str, Any]
    ) -> _ShardedSave:
        path = as_in_fsspec(given)
        if not isinstance(locate(path), str):
            raise ValueError(
                f"{type(strategy).__name__} of Lightning saves sharded checkpoints to local paths only, found {path}"
            )
        saving = _ShardedSave(
            path=path,
            directory=NewDirectory(next(ordering.places_behind(path))),
            options=options,
            agreement=self._agree(),
            is_first=strategy.global_rank == 0,
            is_first_of_machine=strategy.local_rank == 0,
            started=time.perf_counter(),
            step=checkpoint.get("global_step"),
        )
        saving.together(partial(self._prepare, saving))
        return saving

    def _prepare(self, saving: _ShardedSave) -> None:
        """Wait for the save before. Make the hidden directory."""
        self._wait()
        if saving.is_first:
            make_parent(saving.path, durable=saving.options.durable)
            with write_errors(saving.path, "the save failed", kept_at(saving.path)):
                saving.directory.create()

    def _write(
        self, saving: _ShardedSave, strategy: object, stock: Callable[[str], None], copies: list[Callable[[], object]]
    ) -> None:
        """Have Lightning write the checkpoint to the hidden directory. If shards are to be written later, what writes
        copies of them goes to ``copies``."""
        from fastensor.checkpoint.dcp.redirect import redirected, save_shards

        chosen = saving.options

        def write(state_dict: dict[str, Any], path: str | os.PathLike[str], **options: Any) -> None:
            if chosen.asynchronous:
                options["process_group"] = saving.agreement.group  # for collectives in the writer's thread
            later = copies if chosen.asynchronous else None
            self._storage = save_shards(
                state_dict, path, self._storage, later, durable=chosen.durable, backend=chosen.backend,
                share_unchanged=self._plugin.share_unchanged, **options,
            )  # fmt: skip

        with redirected(save=write) as calls:
            stock(saving.directory.hidden)
        if not calls.saves:
            raise UnknownLightningError(_unknown(strategy, "saves"))

    def _finish(self, saving: _ShardedSave, copies: list[Callable[[], object]], stall_seconds: float) -> None:
        """Write what is left to write, and give the checkpoint its place. Called on all ranks, in any thread.

        Raises:
            Exception: a rank has failed.
        """
        if copies:
            saving.together(partial(_call_all, copies))
        storage = None if saving.options.asynchronous else self._storage  # copies share nothing
        shared = saving.total(0 if storage is None else storage.shared_nbytes)
        self._publish(saving)
        if saving.is_first:
            self._report(saving, stall_seconds, shared)

    def _publish(self, saving: _ShardedSave) -> None:
        """Give the checkpoint its place, where machines have the same filesystem, and where each has its own."""
        directory = saving.directory

        def publish() -> None:
            with write_errors(saving.path, "the save failed"):
                directory.publish(durable=saving.options.durable)

        saving.together(lambda: publish() if saving.is_first else None)
        saving.together(lambda: publish() if saving.is_first_of_machine and directory.is_there else None)

    def _report(self, saving: _ShardedSave, stall_seconds: float, shared_nbytes: int) -> None:
        seconds = time.perf_counter() - saving.started
        report = fastensor.SaveReport(
            path=saving.path,
            nbytes=nbytes_in_directory(saving.directory.path),
            backend=str(saving.options.backend),
            reason="each rank has written its own shards",
            durable=saving.options.durable and survives_power_failure(saving.path),
            atomic=True,
            plan_seconds=0.0,
            write_seconds=seconds,
            sync_seconds=0.0,
            publish_seconds=0.0,
            seconds=seconds,
            stall_seconds=stall_seconds if saving.options.asynchronous else seconds,
            shared_nbytes=shared_nbytes,
        )
        self._plugin._notify(report, saving.step)

    def _wait(self) -> None:
        """Wait for what is pending on this rank.

        Raises:
            Exception: what it has failed with.
        """
        if self._plugin._writer is not None:
            self._plugin._open_writer().wait()

    def _agree(self) -> Agreement:
        if self._agreement is None or self._world is not dist.group.WORLD:
            self._agreement, self._world = Agreement(), dist.group.WORLD
        return self._agreement

    def _reader(self, path: str | os.PathLike[str]) -> FastensorStorageReader:
        from fastensor.checkpoint.dcp import FastensorStorageReader

        return FastensorStorageReader(path, verify=self._plugin.verify, backend=self._plugin.backend)


def replace_methods() -> None:
    """Have the strategies of all installed packages ask the plugin, if they have one of ours. Done once per process."""
    for name in _STRATEGIES:
        for strategy in load_classes(name, "lightning.pytorch.strategies", "pytorch_lightning.strategies"):
            if _REPLACED not in vars(strategy):
                setattr(strategy, _REPLACED, True)
                wrap_method(strategy, "save_checkpoint", partial(_ask_plugin, ShardedCheckpoints.save))
                wrap_method(strategy, "load_checkpoint", partial(_ask_plugin, ShardedCheckpoints.load))
                wrap_method(strategy, "teardown", partial(_ask_plugin, ShardedCheckpoints.teardown))


def _ask_plugin(
    method: Callable[..., Any], stock: Callable[..., Any], strategy: Any, *arguments: Any, **options: Any
) -> Any:
    sharded = getattr(strategy.checkpoint_io, "_sharded", None)
    if not isinstance(sharded, ShardedCheckpoints):
        return stock(strategy, *arguments, **options)
    return method(sharded, strategy, stock, *arguments, **options)


def _saves_shards(strategy: Any) -> bool:
    """True if a strategy saves a directory of shards, and not one file.

    Raises:
        UnknownLightningError: it does not say.
    """
    kind = getattr(strategy, "_state_dict_type", None)
    if kind is not None:
        return bool(kind == "sharded")
    found = getattr(strategy, "_save_distributed_checkpoint", None)
    if found is None:
        raise UnknownLightningError(_unknown(strategy, "chooses how it saves"))
    return bool(found)


def _unknown(strategy: object, does: str) -> str:
    return (
        f"{type(strategy).__name__} of this version of Lightning {does} sharded checkpoints in a way that is not known "
        f"to fastensor_lightning; use another version of one of them, or the Trainer without FastensorCheckpointIO"
    )


def _verify_others(path: str) -> None:
    """Compare what Lightning itself reads with its checksums: a full checkpoint, or the file beside shards.

    Raises:
        fastensor.CorruptCheckpointError: the file is damaged.
    """
    file = os.path.join(path, _METADATA) if os.path.isdir(path) else path
    if os.path.isfile(file):
        fastensor.verify(file)


def _call_all(functions: list[Callable[[], object]]) -> None:
    """Call all functions, and let go of each: they hold copies of states."""
    while functions:
        functions.pop(0)()
