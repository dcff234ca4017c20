"""What ``save_state`` and ``load_state`` of an Accelerator do: stage, write, agree, publish, rotate."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator, DistributedType

import fastensor
from fastensor.backends.fallback import announce
from fastensor.checkpoint import cooperative, ordering
from fastensor.checkpoint.agreement import Agreement
from fastensor.checkpoint.asynchronous.for_adapters import in_turn, reserve, staging_first, touch_staging
from fastensor.checkpoint.directories import nbytes_in_directory
from fastensor.checkpoint.freeing import wait_for_space
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.save import SavedContainer
from fastensor.errors import CheckpointWriteError, CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.files import posix
from fastensor.files.job_store import has_others
from fastensor.files.new_directory import DirectoryInUseError
from fastensor.files.words import human_size
from fastensor.select.share import Sharing, share_choice
from fastensor_accelerate.agreement import SavingProcesses
from fastensor_accelerate.config import ConfigError, FastensorConfig
from fastensor_accelerate.directories import (
    CHECKPOINTS,
    StateDirectory,
    finish,
    is_incomplete,
    is_state,
    named_state,
    place_of,
    published_path,
    remove_state,
    restore_replaced,
    state_in,
    states_in,
    surplus,
)
from fastensor_accelerate.metrics import StateMetrics, Totals
from fastensor_accelerate.seam import Files, Write, replaced

if TYPE_CHECKING:
    from fastensor.checkpoint.dcp.redirect import Redirected
    from fastensor_accelerate.shards import ShardWriters

_logger = logging.getLogger("fastensor")
_accelerates_logger = logging.getLogger("accelerate.accelerator")  # its adapter would ask Accelerate's state
_HOW_TO_KEEP_APART = (
    "give each job a directory of its own. If it is one job, its launcher has started processes that do not know each "
    "other"
)
_OTHER_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


@dataclass(slots=True)
class _Saving:
    """One state that is being saved by this process. It has all that the save needs when ``save_state`` has returned:
    the Accelerator may be reset or used for something else by then."""

    directory: StateDirectory
    agreement: Agreement
    """With whom this process agrees that the state is whole."""
    config: FastensorConfig
    is_main: bool
    is_first_of_machine: bool
    is_sharded: bool
    """Whether FSDP has processes save together."""
    total_limit: int | None
    started: float = field(default_factory=time.perf_counter)
    replaces: bool = False
    """Whether the state takes the place of an older one of the same name."""
    metrics: StateMetrics = field(default_factory=StateMetrics)
    handles: list[fastensor.SaveHandle] = field(default_factory=list)
    shards: list[Callable[[], object]] = field(default_factory=list)
    """What writes copies of shards, which all processes do together."""
    folders_of_shards: list[str] = field(default_factory=list)
    failure: Exception | None = None
    """What this process has failed with while Accelerate saved."""
    is_settled: bool = False
    """Whether all processes know that one has failed."""

    def together(self, do: Callable[[], None], what: str = "") -> None:
        """:meth:`Agreement.together` for this state. By default, ``what`` says that it was not saved."""
        self.agreement.together(do, what or f"{self.directory.path} was not saved")


savers: weakref.WeakSet[StateSaver] = weakref.WeakSet()
"""All savers of this process."""


class StateSaver:
    """Saves and loads the states of one Accelerator. Call it in the thread that trains, in all processes of a job.

    Args:
        accelerator: whose states they are. Its own methods collect and restore them; the files are written and read
            here.
        config: the options.
    """

    def __init__(self, accelerator: Accelerator, config: FastensorConfig) -> None:
        self.accelerator = accelerator
        self.config = config
        self.keeps_options = True
        """Whether the next :func:`~fastensor_accelerate.enable` leaves the options as they are."""
        self._writer: fastensor.AsyncWriter | None = None
        self._processes = SavingProcesses()
        self._sharing: Sharing | None = None
        self._to_log: deque[StateMetrics] = deque()
        self._totals = Totals()
        """Totals of what the main process has saved and loaded."""
        self._said_other_engine = False
        self._saving_in_turn = False
        self._shard_writers: ShardWriters | None = None
        self.step: int | None = None
        """The step that was given to ``Accelerator.log`` last."""
        savers.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the Accelerator has a saver of its own, with nothing pending."""
        return StateSaver, (self.accelerator, self.config)

    def save_state(self, stock: Callable[..., Path], output_dir: str | None, **options: Any) -> Path:
        """Save a state as ``Accelerator.save_state`` does, whole or not at all.

        Args:
            stock: Accelerate's own method, bound.
            output_dir: as for Accelerate.
            options: as for Accelerate.

        Returns:
            The directory of the state. An asynchronous save of a state that Accelerate names returns the directory
            where its files are staged. What is written there is published with the state, and then a link of that
            name leads to the state.

        Raises:
            Exception: what Accelerate or a hook raises, or what the pending state has failed with. The states that
                were there before are kept.
            CheckpointWriteError: the state cannot be written, or another process has failed.
        """
        naming = self.accelerator.project_configuration.automatic_checkpoint_naming
        if self._has_own_engine() or (output_dir is None and not naming):  # Accelerate says what is wrong
            return stock(output_dir, **options)
        self._check_cooperation()
        agreement = self._processes.all() if naming else self._processes.callers()
        if agreement is None:  # the main process does not wait for this one's files
            with self.saving():
                return stock(output_dir, **options)
        project = self.accelerator.project_configuration
        iteration = project.iteration
        returned, directory = self._directory(output_dir)
        saving = self._begin(directory, agreement, self.config)
        saving.together(lambda: self._check(saving))  # all processes raise, or none
        if agreement.size > 1:
            self._share_choice()
        try:
            _on_each_machine(saving, lambda: self._prepare(saving), lambda: not directory.is_staged)
            self._write(saving, stock, options)
            saving.metrics.stall_seconds = time.perf_counter() - saving.started
            if not saving.config.asynchronous:
                self._confirm(saving)
                project.iteration = iteration + 1
                self._publish(saving)
        except BaseException:
            if saving.handles:  # their files are still being written
                self._in_turn(saving, lambda: None)
            else:
                directory.discard()
            raise
        if not saving.config.asynchronous:
            self._log()
            return returned
        project.iteration = iteration + 1  # in all processes, whether or not they fail
        self._in_turn(saving, partial(self._commit, saving))
        if saving.failure is not None:
            raise saving.failure
        return Path(directory.staging) if naming else returned

    def load_state(self, stock: Callable[..., None], input_dir: str | None, **options: Any) -> None:
        """Load a state as ``Accelerator.load_state`` does, after the pending one is published.

        Args:
            stock: Accelerate's own method, bound.
            input_dir: as for Accelerate, or what ``save_state`` has returned.
            options: as for Accelerate.

        Raises:
            Exception: what Accelerate raises, or what the pending state has failed with; also that of another
                Accelerator of this process in the same place.
            CorruptCheckpointError: a file is damaged.
        """
        if self._has_own_engine():
            return stock(input_dir, **options)
        self.wait()
        directory = None
        if input_dir:
            given = os.path.expanduser(input_dir)
            for place in (place_of(given), given):  # another Accelerator may save there, and stage where the path leads
                ordering.wait_to_read_directory(place)
            restore_replaced(str(place_of(given).parent))
            directory = published_path(given)
            if directory.is_dir():
                finish(directory, durable=self.config.durable)
        elif self.accelerator.project_dir is not None:
            folder = os.path.join(self.accelerator.project_dir, CHECKPOINTS)
            ordering.wait_to_read_directory(folder)
            restore_replaced(folder)
        try:
            with self.loading(together=self.config.cooperative) as shards:
                stock(input_dir if directory is None else str(directory), **options)
            if shards is not None:
                self._check_shards(shards.loads)
        except FileNotFoundError as error:
            if directory is not None and is_incomplete(directory):
                error.add_note(f"a save to {directory} has begun and was never finished; load another state")
            raise

    @contextmanager
    def loading(self, *, together: bool = False) -> Iterator[Redirected | None]:
        """Read what is loaded in the block by Fastensor, after the pending state is published.

        Args:
            together: whether all processes load the same at the same time.

        Yields:
            How often shards were saved and loaded; None if they are left to torch.

        Raises:
            Exception: what the save of the pending state has failed with.
            CorruptCheckpointError: a file is damaged, even if the block has gone on without it.
        """
        self.wait()
        damaged: list[CorruptCheckpointError | NotACheckpointError] = []
        files = replace(self._files(damaged=damaged), load_together=together and has_others())
        with replaced(files) as shards:
            yield shards
        if damaged:  # Accelerate goes on without the states of random number generators
            raise damaged[0]

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Write what is saved in the block by Fastensor. Each file is whole, and durable when its save returns,
        unless the block is inside of :meth:`saving_in_turn`."""
        if self._saving_in_turn:
            yield
            return
        with replaced(self._files()):
            yield

    @contextmanager
    def saving_in_turn(self, directory: str, *, reader: str | None = None) -> Iterator[list[Callable[[], None]]]:
        """Write what is saved in the block by Fastensor: file by file, or asynchronously if the options say so.

        Args:
            directory: where the files go, for messages.
            reader: says what may read the files as soon as they are saved. Then this process and all others wait for
                each file.

        Yields:
            A list. The functions that are put into it are called when the files of all processes are durable, and not
            at all if one is not.

        Raises:
            Exception: what an earlier save has failed with, or the block.
            CheckpointWriteError: a file was not written, or another process has failed.
        """
        self.wait()
        agreement = self._processes.all()  # in the thread that trains, in the same order in all processes
        config = self.config
        readers = agreement.gather(reader, f"{directory} was not saved") if config.asynchronous else []
        if first := next(filter(None, readers), None):
            announce("saving a Trainer's checkpoints asynchronously", f"{first} may read each as soon as it is saved")
            config = replace(config, asynchronous=False)
        saving = self._begin(state_in(os.path.abspath(directory)), agreement, config)
        afterwards: list[Callable[[], None]] = []

        def finish_saving() -> None:
            self._finish_writing(saving)
            for do in afterwards:
                do()
            self._account(saving)

        self._saving_in_turn = True
        try:
            with self._writing(saving):
                yield afterwards
        except Exception as error:  # noqa: BLE001  # raised when the other processes know
            saving.failure = saving.failure or error
        finally:
            self._saving_in_turn = False
        saving.metrics.stall_seconds = time.perf_counter() - saving.started
        if config.asynchronous:
            self._in_turn(saving, finish_saving)
            if saving.failure is not None:
                self.wait()
                raise saving.failure
        else:
            finish_saving()
            self._log()

    def wait(self) -> None:
        """Return when the pending state is published.

        Raises:
            Exception: what its save has failed with.
        """
        if self._writer is not None:
            self._writer.wait()
        self._log()

    def print_summary(self) -> None:
        """Say in one line on ``stderr`` what the saves and loads have cost, in the main process."""
        if summary := self._totals.summary():
            print(f"fastensor: {summary}", file=sys.stderr)

    def close(self) -> None:
        """:meth:`wait`, and give memory and process group back. The saver can be used again.

        Raises:
            Exception: as :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            self._processes.end()
            self._shard_writers = None
            if self._sharing is not None:
                self._sharing.end()
                self._sharing = None
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    # --- the steps of a save

    def _share_choice(self) -> None:
        """Have the processes of data parallel training choose backends alike, and learn from each other."""
        if self._sharing is None and self.accelerator.distributed_type.value.startswith("MULTI_"):
            folder = os.path.abspath(self.accelerator.project_dir or os.curdir)
            self._sharing = share_choice(self.config.backend, folder, self.accelerator.device)
        if self._sharing is not None:
            self._sharing.sync()

    def _directory(self, output_dir: str | None) -> tuple[Path, StateDirectory]:
        """Path that Accelerate's ``save_state`` returns, and the directory, wherever the process goes to meanwhile."""
        if not self.accelerator.project_configuration.automatic_checkpoint_naming:
            assert output_dir is not None
            return Path(output_dir), state_in(os.path.abspath(output_dir))
        folder, number = self.accelerator.project_dir, self.accelerator.save_iteration
        return Path(named_state(folder, number).path), named_state(os.path.abspath(folder), number)

    def _begin(self, directory: StateDirectory, agreement: Agreement, config: FastensorConfig) -> _Saving:
        accelerator = self.accelerator
        return _Saving(
            directory,
            agreement,
            config,
            is_main=accelerator.is_main_process,
            is_first_of_machine=accelerator.is_local_main_process,
            is_sharded=accelerator.distributed_type == DistributedType.FSDP,
            total_limit=accelerator.project_configuration.total_limit,
        )

    def _check(self, saving: _Saving) -> None:
        """Wait for pending states, also those of other Accelerators of this process, and see that the name is free.

        Raises:
            Exception: what the save of the pending state has failed with.
            ValueError: Accelerate has given the same name before, and the state of that name is to be kept.
        """
        directory = saving.directory
        self.wait()
        folder = os.path.dirname(directory.path)
        ordering.wait_to_remove(folder if directory.is_named_by_accelerate else directory.path)
        self._find_replaced(saving)

    def _find_replaced(self, saving: _Saving) -> None:
        """Find out whether the state replaces an older one. Accelerate would remove that before it saves.

        Raises:
            ValueError: Accelerate has given the same name before, and the state of that name is to be kept.
        """
        directory = saving.directory
        exists = directory.is_named_by_accelerate and directory.exists
        old = surplus(states_in(os.path.dirname(directory.path)), None, saving.total_limit) if exists else []
        saving.replaces = directory.path in old
        if exists and not saving.replaces:
            number = self.accelerator.save_iteration
            path = named_state(self.accelerator.project_dir, number).path
            error = ValueError(  # in Accelerate's words
                f"Checkpoint directory {path} ({number}) already exists. Please manually override "
                "`self.save_iteration` with what iteration to start with."
            )
            error.add_note("Set accelerator.project_configuration.iteration, which load_state leaves as it is.")
            raise error

    def _prepare(self, saving: _Saving) -> None:
        """Make the staging directory, and remove states that a process which was killed in time had left to remove:
        they would add up.

        Raises:
            CheckpointWriteError: another process saves a state of the same name.
            ValueError: another job has saved a state of that name meanwhile, or was about to replace one.
            OSError: the filesystem refused.
        """
        directory = saving.directory
        try:
            directory.prepare(durable=saving.config.durable)
        except DirectoryInUseError as error:
            raise CheckpointWriteError(
                errno.EEXIST, f"{error.strerror}; {_HOW_TO_KEEP_APART}", error.filename
            ) from error
        self._find_replaced(saving)  # from now on, no other process saves one
        if not directory.is_named_by_accelerate:
            return
        folder = os.path.dirname(directory.path)
        if states := [state for state in states_in(folder) if is_state(state)]:
            if saving.config.durable:
                posix.sync_directory(folder)  # the newest one was perhaps published a moment before
            _remove_surplus(saving, states, states[-1])

    def _before_writing(self, saving: _Saving, models: object, weights: object, output_dir: str) -> None:
        """Called by Accelerate when the hooks of the script have left what is to be saved.

        Raises:
            Exception: there is no room; or a hook of another process has failed, for which processes that write files
                together would wait.
        """
        if not self._is_together(saving):
            self._make_room(saving, models, weights, output_dir)
            return
        try:
            saving.together(lambda: self._make_room(saving, models, weights, output_dir))
        except Exception:
            saving.is_settled = True
            raise

    def _make_room(self, saving: _Saving, models: object, weights: object, output_dir: str) -> None:
        """
        Raises:
            CheckpointWriteError: there is no room for the state beside the older ones.
        """
        if not saving.is_main or saving.is_sharded:
            return
        nbytes = nbytes_of([weights, [dict(optimizer.state) for optimizer in self.accelerator._optimizers]])
        free = shutil.disk_usage(output_dir).free
        if nbytes > free:
            wait_for_space()
            free = shutil.disk_usage(output_dir).free
        if nbytes > free:
            raise CheckpointWriteError(
                errno.ENOSPC,
                f"the state takes about {human_size(nbytes)}, and {human_size(free)} are free; older states are only "
                "removed when a new one is durable",
                saving.directory.path,
            )
        if saving.config.asynchronous:
            reserve(self._open_writer(), nbytes)

    def _write(self, saving: _Saving, stock: Callable[..., Path], options: dict[str, Any]) -> None:
        """Have Accelerate write the state to the staging directory."""
        project = self.accelerator.project_configuration
        naming, iteration = project.automatic_checkpoint_naming, project.iteration
        project.automatic_checkpoint_naming = False  # Accelerate takes the directory as it is given
        last_hook = self.accelerator.register_save_state_pre_hook(partial(self._before_writing, saving))
        try:
            with self._writing(saving) as shards:
                stock(saving.directory.staging, **options)
            if shards is not None:
                self._check_shards(shards.saves)
        except Exception as error:  # noqa: BLE001  # raised when the other processes know
            saving.failure = saving.failure or error
        except BaseException:
            saving.agreement.end()  # the others do not wait for this process, which leaves the save
            raise
        finally:
            last_hook.remove()
            project.automatic_checkpoint_naming, project.iteration = naming, iteration

    @contextmanager
    def _writing(self, saving: _Saving) -> Iterator[Redirected | None]:
        first = staging_first(self._open_writer()) if saving.config.asynchronous else nullcontext()
        with first, replaced(self._files(saving)) as shards:
            yield shards

    def _files(
        self, saving: _Saving | None = None, damaged: list[CorruptCheckpointError | NotACheckpointError] | None = None
    ) -> Files:
        write: Write = partial(self._write_now, saving=saving)
        if saving is not None and saving.config.asynchronous:
            write = partial(self._write_later, saving=saving)
        has_shards = self.accelerator.distributed_type == DistributedType.FSDP
        if saving is not None and has_shards:
            write = partial(_note_failure, saving, write)
        shards = partial(self._write_shards, saving=saving) if has_shards else None
        together = None
        if saving is not None and self._is_together(saving):
            together = partial(self._write_together, saving=saving)
        return Files(
            self.config,
            write,
            shards,
            self._totals.add_load if self.accelerator.is_main_process else lambda report: None,
            [] if damaged is None else damaged,
            write_together=together,
        )

    def _write_shards(
        self, state_dict: dict[str, Any], path: str | os.PathLike[str], *, saving: _Saving | None, **options: Any
    ) -> None:
        """Write shards, or copy them if they are to be written later."""
        from fastensor_accelerate.shards import ShardWriters

        if self._shard_writers is None:
            self._shard_writers = ShardWriters()
        if saving is not None:
            saving.folders_of_shards.append(os.fspath(path))
        if saving is None or not saving.config.asynchronous:
            self._shard_writers.write(self.config, state_dict, path, **options)
        else:
            options["process_group"] = saving.agreement.group
            saving.shards.append(self._shard_writers.copy(self.config, state_dict, path, **options))

    def _check_shards(self, number: int) -> None:
        """See that the shards of FSDP went through Fastensor.

        Args:
            number: how often they did.

        Raises:
            UnsupportedContentError: none did.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if number or plugin is None:
            return
        if plugin.state_dict_type.name != "SHARDED_STATE_DICT" or not self.accelerator._models:
            return
        raise UnsupportedContentError(
            "this version of Accelerate saves or loads SHARDED_STATE_DICT in a way that is not known to "
            "fastensor_accelerate; use another version of one of them, or fastensor_accelerate.disable()"
        )

    def _write_now(
        self, obj: object, path: Location, *, container: SavedContainer, saving: _Saving | None = None, **options: Any
    ) -> None:
        report = fastensor.save(
            obj, path, container=container, backend=self.config.backend, durable=self.config.durable, **options
        )
        if saving is not None:
            saving.metrics.nbytes += report.nbytes

    def _write_together(
        self, obj: object, path: Location, *, container: SavedContainer, saving: _Saving, **options: Any
    ) -> None:
        """Write a file, called in all processes. What is not replicated by data parallel training is the main one's."""
        assert isinstance(path, str | os.PathLike)
        if os.path.basename(path).startswith("optimizer"):
            replicated = list(_tensors_in(obj))
        else:
            replicated = [weight for model in self.accelerator._models for weight in model.parameters()]
        report = cooperative.save(
            obj,
            path,
            timeout=self.config.cooperative_timeout,
            replicated=replicated,
            container=container,
            backend=self.config.backend,
            durable=self.config.durable,
            **options,
        )
        if self.accelerator.is_main_process:
            saving.metrics.nbytes += report.nbytes

    def _is_together(self, saving: _Saving) -> bool:
        """Whether all processes write files of this state together."""
        return self.config.cooperative and saving.agreement.size > 1

    def _check_cooperation(self) -> None:
        """
        Raises:
            ConfigError: processes are to save together, and do not hold the same.
        """
        kind = self.accelerator.distributed_type.value
        if self.config.cooperative and kind != "NO" and not kind.startswith("MULTI_"):
            raise ConfigError(
                f"cooperative is for data parallel training (DDP), whose processes hold the same state; found {kind}: "
                f"leave it out"
            )

    def _write_later(
        self, obj: object, path: Location, *, container: SavedContainer, saving: _Saving, **options: Any
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            self._write_now(obj, path, container=container, saving=saving, **options)
            return
        handle = self._open_writer().save(
            obj, path, container=container, backend=self.config.backend, durable=self.config.durable, **options
        )
        saving.handles.append(handle)

    def _commit(self, saving: _Saving) -> None:
        """Publish an asynchronous save, in the writer's thread.

        Raises:
            Exception: the state was not published, and :meth:`save_state` has not said that.
        """
        try:
            self._confirm(saving)
        except Exception as error:
            if error is saving.failure:
                return
            raise
        self._publish(saving)

    def _confirm(self, saving: _Saving) -> None:
        """Return if all processes have written their files.

        Raises:
            Exception: there is no such state.
        """
        try:
            self._finish_writing(saving)
        except BaseException as error:
            if not saving.directory.is_intact:
                error.add_note(
                    f"{saving.directory.staging} was removed meanwhile, perhaps by a job of another machine "
                    f"that saves there, too; {_HOW_TO_KEEP_APART}"
                )
            saving.directory.discard()
            raise

    def _finish_writing(self, saving: _Saving) -> None:
        """Return if all processes have written everything. Asynchronous saves of shards are written here.

        Raises:
            Exception: a process has failed.
        """
        try:
            if saving.is_sharded:
                saving.together(partial(_check_begun, saving))  # then all have the same shards to write together
            if saving.is_settled:
                _check_written(saving)
            saving.together(partial(_check_written, saving))
        except Exception:
            for handle in saving.handles:
                handle.exception()  # is raised here, and by no later call
            raise
        if saving.is_main:  # it publishes, perhaps before another process comes here
            saving.metrics.nbytes += sum(map(nbytes_in_directory, saving.folders_of_shards))

    def _publish(self, saving: _Saving) -> None:
        """Give a state its place, and remove those that are too old.

        Raises:
            Exception: the filesystem refused.
        """
        directory, config = saving.directory, saving.config
        publish = partial(directory.publish, durable=config.durable, link=config.asynchronous, replaces=saving.replaces)
        _on_each_machine(saving, publish, lambda: directory.is_staged)
        self._account(saving)
        if directory.is_named_by_accelerate:
            what = f"{directory.path} is saved, but older states were not removed"
            folder = os.path.dirname(directory.path)
            _on_each_machine(
                saving, lambda: _remove_surplus(saving, states_in(folder), directory.path), lambda: True, what
            )
            if saving.is_first_of_machine:
                directory.tidy()

    def _in_turn(self, saving: _Saving, do: Callable[[], None]) -> None:
        """Have the writer's thread do something behind the files of a state."""
        writer, path = self._open_writer(), saving.directory.path

        def step() -> None:
            try:
                do()
            finally:  # not only at the end: who waits may save to the same path at once
                saving.directory.discard()  # unless it is published

        def end() -> None:
            saving.directory.discard()
            touch_staging(writer)

        in_turn(writer, step, next(ordering.places_behind(path)), f"publishing {path}", at_end=end)

    def _account(self, saving: _Saving) -> None:
        metrics = saving.metrics
        metrics.nbytes += sum(handle.result().nbytes for handle in saving.handles)
        metrics.seconds = time.perf_counter() - saving.started
        if not saving.config.asynchronous:
            metrics.stall_seconds = metrics.seconds
        if saving.is_main:
            self._totals.add_state(metrics)
            self._to_log.append(metrics)

    # --- what they need

    def _has_own_engine(self) -> bool:
        kind = self.accelerator.distributed_type
        if kind not in _OTHER_ENGINES:
            return False
        if self.accelerator.is_main_process and not self._said_other_engine:
            self._said_other_engine = True
            _logger.warning("states of %s are saved and loaded by its own engine, not by Fastensor", kind.value)
        return True

    def _open_writer(self) -> fastensor.AsyncWriter:
        if self._writer is None:
            self._writer = fastensor.AsyncWriter(**self.config.writer_options())
        return self._writer

    def _log(self) -> None:
        """Give trackers what was not logged. They are not made for several threads."""
        while self._to_log:
            metrics = self._to_log.popleft()
            for tracker in self.accelerator.trackers:
                tracker.log(metrics.as_metrics(), step=self.step)


def _remove_surplus(saving: _Saving, states: list[str], newest: str) -> None:
    """Remove those of the states that are too old beside the newest one.

    Raises:
        OSError: the filesystem refused.
    """
    old = surplus(states, newest, saving.total_limit)
    if old and saving.is_main:
        _accelerates_logger.warning(f"[RANK 0] Deleting {len(old)} checkpoints to make room for new checkpoint.")
    for state in old:
        with contextlib.suppress(FileNotFoundError):  # another machine, of the same filesystem, was faster
            remove_state(state)


def _on_each_machine(saving: _Saving, do: Callable[[], None], is_due: Callable[[], bool], what: str = "") -> None:
    """Do something in the main process, and then in the first process of every other machine where it is due: machines
    have the same filesystem, or each its own.

    Raises:
        Exception: what this process has failed with; or another one, as a CheckpointWriteError.
    """
    main, first = saving.is_main, saving.is_first_of_machine
    saving.together(lambda: do() if main else None, what)
    saving.together(lambda: do() if first and not main and is_due() else None, what)


def _note_failure(saving: _Saving, write: Write, *args: Any, **options: Any) -> None:
    """Write a file, and leave a failure to :func:`_check_begun`: the other processes of FSDP gather what is saved next
    together with this one."""
    try:
        write(*args, **options)
    except Exception as error:  # noqa: BLE001  # raised when the other processes know
        saving.failure = saving.failure or error


def _check_begun(saving: _Saving) -> None:
    """
    Raises:
        Exception: what Accelerate has failed with.
    """
    if saving.failure is not None:
        raise saving.failure


def _check_written(saving: _Saving) -> None:
    """Write the shards that are left, and wait for the files.

    Raises:
        Exception: what Accelerate has failed with.
        CheckpointWriteError: a file was not written.
    """
    while saving.shards:
        saving.shards.pop(0)()
    errors = [error for handle in saving.handles if (error := handle.exception()) is not None]  # none is raised later
    if saving.failure is not None:
        raise saving.failure
    if errors:
        raise CheckpointWriteError(f"{saving.directory.path} was not saved: {errors[0]}") from errors[0]


def nbytes_of(value: object) -> int:
    """The bytes of the storages of all tensors in nested dicts and lists. Those that share a storage count once.

    >>> shared = torch.zeros(6)
    >>> nbytes_of([{"a": shared, "b": shared[:2]}, (torch.zeros(1), "no tensor")])
    28
    """
    storages = (tensor.untyped_storage() for tensor in _tensors_in(value))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(inner)
