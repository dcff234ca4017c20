"""Calls of an Accelerator, or a Trainer, that save or load: each becomes steps of one state, or waits for one."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator, DistributedType

import fastensor
from fastensor.backends.registry import announce
from fastensor.checkpoint import ordering
from fastensor.checkpoint.agreement import Agreement
from fastensor.checkpoint.asynchronous.for_adapters import in_turn, reserve, staging_first, touch_staging
from fastensor.errors import CorruptCheckpointError, NotACheckpointError
from fastensor.files.job_store import has_others
from fastensor.select.share import Sharing, share_choice
from fastensor_accelerate.activation_offload import PreparedOffloads
from fastensor_accelerate.config import FastensorConfig
from fastensor_accelerate.directories import (
    CHECKPOINTS,
    StateDirectory,
    find_state,
    is_incomplete,
    named_state,
    settle_states,
    state_in,
)
from fastensor_accelerate.metrics import StateCost, summary
from fastensor_accelerate.saving import SavingProcesses, StateSave
from fastensor_accelerate.seam import replaced
from fastensor_accelerate.state_files import StateFiles, check_cooperation, check_shards, nbytes_of

if TYPE_CHECKING:
    from fastensor.checkpoint.dcp import FastensorStorageWriter
    from fastensor.checkpoint.dcp.redirect import Redirected

_logger = logging.getLogger("fastensor")
_OTHER_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)

savers: weakref.WeakSet[StateSaver] = weakref.WeakSet()
"""All savers of this process."""


class StateSaver:
    """Saves and loads the states of one Accelerator, and keeps the offloads of its models. Call it in the thread that
    trains, in all processes of a job.

    Args:
        accelerator: whose states they are. Its own methods collect and restore them; the files are written and read
            here.
        config: the options.
    """

    def __init__(self, accelerator: Accelerator, config: FastensorConfig) -> None:
        self.accelerator = accelerator
        self.config = config
        self._writer: fastensor.AsyncWriter | None = None
        self._shard_writers: dict[str, FastensorStorageWriter] = {}
        self._max_shard_sizes: dict[str, int | str] = {}
        self._processes = SavingProcesses()
        self._sharing: Sharing | None = None
        self._offloads: PreparedOffloads | None = None
        self._to_log: deque[StateCost] = deque()
        self._saved: list[StateCost] = []
        """States that the main process has saved."""
        self._loaded: list[fastensor.LoadReport] = []
        """Files that it has loaded."""
        self._said_other_engine = False
        self._saving_in_turn = False
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
        check_cooperation(self.accelerator, self.config)
        agreement = self._processes.all() if naming else self._processes.callers()
        if agreement is None:  # the main process does not wait for this one's files
            with self.saving():
                return stock(output_dir, **options)
        project = self.accelerator.project_configuration
        iteration = project.iteration
        returned, directory = self._directory(output_dir)
        saving = self._begin(directory, agreement, replace(self.config, link_unchanged=False))
        saving.name = f"{returned} ({self.accelerator.save_iteration})"
        saving.is_pickled = not options.get("safe_serialization", True)
        publish = partial(saving.publish, partial(self._account, saving))
        saving.together(lambda: self._check(saving))  # all processes raise, or none
        if agreement.size > 1:
            self._share_choice()
        try:
            saving.on_each_machine(saving.prepare, lambda: not directory.is_staged)
            self._write(saving, stock, options)
            if not saving.config.asynchronous:
                saving.confirm()
                project.iteration = iteration + 1
                publish()
        except BaseException:
            if saving.handles:  # their files are still being written
                self._in_turn(saving, lambda: None)
            else:
                directory.discard()
            raise
        project.iteration = iteration + 1  # in all processes, whether or not an asynchronous save fails
        self._end(saving, publish)
        return Path(directory.staging) if naming and saving.config.asynchronous else returned

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
            directory = find_state(os.path.expanduser(input_dir), durable=self.config.durable)
        elif self.accelerator.project_dir is not None:
            settle_states(os.path.join(self.accelerator.project_dir, CHECKPOINTS), durable=self.config.durable)
        try:
            with self.loading(together=self.config.cooperative) as shards:
                stock(input_dir if directory is None else str(directory), **options)
            if shards is not None:
                check_shards(self.accelerator, shards.loads)
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
        with replaced(self._files(self.config, damaged=damaged, load_together=together and has_others())) as shards:
            yield shards
        if damaged:  # Accelerate goes on without the states of random number generators
            raise damaged[0]

    @contextmanager
    def saving(self, *, links: bool = True) -> Iterator[None]:
        """Write what is saved in the block by Fastensor. Each file is whole, and durable when its save returns,
        unless the block is inside of :meth:`saving_in_turn`.

        Args:
            links: False if other programs may write the files in place: none of them is ever a hard link.
        """
        if self._saving_in_turn:
            yield
            return
        with replaced(self._files(self.config, links=links)):
            try:
                yield
            finally:
                self._max_shard_sizes.clear()  # of what was not saved

    @contextmanager
    def saving_in_turn(
        self, directory: str, *, reader: str | None = None, links: bool = True
    ) -> Iterator[list[Callable[[], None]]]:
        """Write what is saved in the block by Fastensor: file by file, or asynchronously if the options say so.

        Args:
            directory: where the files go, for messages.
            reader: says what may read the files as soon as they are saved. Then this process and all others wait for
                each file.
            links: False if models are saved as without ``link_unchanged``.

        Yields:
            A list. The functions that are put into it are called when the files of all processes are durable, and not
            at all if one is not.

        Raises:
            Exception: what an earlier save has failed with, or the block.
            CheckpointWriteError: a file was not written, or another process has failed.
        """
        self.wait()
        agreement = self._processes.all()  # in the thread that trains, in the same order in all processes
        config = self.config if links else replace(self.config, link_unchanged=False)
        readers = agreement.gather(reader, f"{directory} was not saved") if config.asynchronous else []
        if first := next(filter(None, readers), None):
            announce("saving a Trainer's checkpoints asynchronously", f"{first} may read each as soon as it is saved")
            config = replace(config, asynchronous=False)
        saving = self._begin(state_in(os.path.abspath(directory)), agreement, config)

        def publish() -> None:
            for do in saving.afterwards:
                do()
            self._account(saving)

        self._saving_in_turn = True
        try:
            with self._writing(saving):
                yield saving.afterwards
        except Exception as error:  # noqa: BLE001  # raised when the other processes know
            saving.failure = saving.failure or error
        finally:
            self._saving_in_turn = False
            self._max_shard_sizes.clear()
        if not config.asynchronous:
            saving.confirm()
            publish()
        self._end(saving, publish)

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
        if line := summary(self._saved, self._loaded):
            print(f"fastensor: {line}", file=sys.stderr)

    def close(self) -> None:
        """:meth:`wait`, and give memory and process group back. The saver can be used again.

        Raises:
            Exception: as :meth:`wait`.
        """
        try:
            self.wait()
        finally:
            self._processes.end()
            if self._sharing is not None:
                self._sharing.end()
                self._sharing = None
            self._shard_writers.clear()
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()

    def offloads(self) -> PreparedOffloads:
        """The offloads of the models that the Accelerator has prepared, made by the first call.

        Raises:
            ValueError: an option of the offload has no possible value.
        """
        if self._offloads is None:
            self._offloads = PreparedOffloads(self.accelerator, self.config.offload_config())
        return self._offloads

    def close_offloads(self) -> None:
        """Detach the models. Calling it again does nothing."""
        offloads, self._offloads = self._offloads, None
        if offloads is not None:
            offloads.close()

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

    def _begin(self, directory: StateDirectory, agreement: Agreement, config: FastensorConfig) -> StateSave:
        accelerator = self.accelerator
        return StateSave(
            directory,
            agreement,
            config,
            is_main=accelerator.is_main_process,
            is_first_of_machine=accelerator.is_local_main_process,
            is_sharded=accelerator.distributed_type == DistributedType.FSDP,
            total_limit=accelerator.project_configuration.total_limit,
        )

    def _check(self, saving: StateSave) -> None:
        """Wait for pending states, also those of other Accelerators of this process, and see that the name is free.

        Raises:
            Exception: what the save of the pending state has failed with.
            ValueError: Accelerate has given the same name before, and the state of that name is to be kept.
        """
        directory = saving.directory
        self.wait()
        folder = os.path.dirname(directory.path)
        ordering.wait_inside(folder if directory.is_named_by_accelerate else directory.path)
        saving.find_replaced()

    def _before_writing(self, saving: StateSave, models: object, weights: object, output_dir: str) -> None:
        """Called by Accelerate when the hooks of the script have left what is to be saved.

        Raises:
            Exception: a hook of another process has failed, for which processes that write files together would wait.
        """
        if saving.config.asynchronous and saving.is_main and not saving.is_sharded:
            states = [dict(optimizer.state) for optimizer in self.accelerator._optimizers]
            reserve(self._async_writer(), nbytes_of([weights, states]))
        if saving.is_together:
            try:
                saving.together(lambda: None)
            except Exception:
                saving.is_settled = True
                raise

    def _write(self, saving: StateSave, stock: Callable[..., Path], options: dict[str, Any]) -> None:
        """Have Accelerate write the state to the staging directory."""
        project = self.accelerator.project_configuration
        naming, iteration = project.automatic_checkpoint_naming, project.iteration
        project.automatic_checkpoint_naming = False  # Accelerate takes the directory as it is given
        last_hook = self.accelerator.register_save_state_pre_hook(partial(self._before_writing, saving))
        try:
            with self._writing(saving) as shards:
                stock(saving.directory.staging, **options)
            if shards is not None:
                check_shards(self.accelerator, shards.saves)
        except Exception as error:  # noqa: BLE001  # raised when the other processes know
            saving.failure = saving.failure or error
        except BaseException:
            saving.agreement.end()  # the others do not wait for this process, which leaves the save
            raise
        finally:
            last_hook.remove()
            project.automatic_checkpoint_naming, project.iteration = naming, iteration

    @contextmanager
    def _writing(self, saving: StateSave) -> Iterator[Redirected | None]:
        writer = self._async_writer() if saving.config.asynchronous else None
        first = nullcontext() if writer is None else staging_first(writer)
        with first, replaced(self._files(saving.config, saving=saving, writer=writer)) as shards:
            yield shards

    def _end(self, saving: StateSave, publish: Callable[[], None]) -> None:
        """Log a state that was published, or have the writer's thread publish it.

        Raises:
            Exception: what an asynchronous save of this process has failed with so far.
        """
        if not saving.config.asynchronous:
            self._log()
            return
        saving.stall_seconds = time.perf_counter() - saving.started
        self._in_turn(saving, partial(_confirm_and_publish, saving, publish))
        if saving.failure is not None:
            raise saving.failure

    def _in_turn(self, saving: StateSave, do: Callable[[], None]) -> None:
        """Have the writer's thread do something behind the files of a state."""
        writer, path = self._async_writer(), saving.directory.path

        def step() -> None:
            try:
                do()
            finally:  # not only at the end: who waits may save to the same path at once
                saving.directory.discard()  # unless it is published

        def end() -> None:
            saving.directory.discard()
            touch_staging(writer)

        in_turn(writer, step, next(ordering.places_behind(path)), f"publishing {path}", at_end=end)

    def _account(self, saving: StateSave) -> None:
        nbytes = saving.nbytes + sum(handle.result().nbytes for handle in saving.handles)
        shared_nbytes = saving.shared_nbytes + sum(handle.result().shared_nbytes for handle in saving.handles)
        seconds = time.perf_counter() - saving.started
        stall_seconds = saving.stall_seconds if saving.config.asynchronous else seconds
        cost = StateCost(nbytes, stall_seconds, seconds, shared_nbytes)
        if saving.is_main:
            self._saved.append(cost)
            self._to_log.append(cost)

    # --- what they need

    def _has_own_engine(self) -> bool:
        kind = self.accelerator.distributed_type
        if kind not in _OTHER_ENGINES:
            return False
        if self.accelerator.is_main_process and not self._said_other_engine:
            self._said_other_engine = True
            _logger.warning("states of %s are saved and loaded by its own engine, not by Fastensor", kind.value)
        return True

    def _async_writer(self) -> fastensor.AsyncWriter:
        """The writer of asynchronous saves, made by the first call."""
        if self._writer is None:
            self._writer = fastensor.AsyncWriter(**self.config.writer_options())
        return self._writer

    def _files(self, config: FastensorConfig, **options: Any) -> StateFiles:
        return StateFiles(
            self.accelerator,
            config,
            self._note_load,
            shard_writers=self._shard_writers,
            max_shard_sizes=self._max_shard_sizes,
            **options,
        )

    def _note_load(self, report: fastensor.LoadReport) -> None:
        if self.accelerator.is_main_process:
            self._loaded.append(report)

    def _log(self) -> None:
        """Give trackers what was not logged. They are not made for several threads."""
        while self._to_log:
            cost = self._to_log.popleft()
            for tracker in self.accelerator.trackers:
                tracker.log(cost.as_metrics(), step=self.step)


def _confirm_and_publish(saving: StateSave, publish: Callable[[], None]) -> None:
    """
    Raises:
        Exception: the state was not published, and the call that has saved it has not said that.
    """
    try:
        saving.confirm()
    except Exception as error:
        if error is not saving.failure:
            raise
    else:
        publish()
