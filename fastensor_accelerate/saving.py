"""One state on its way to its place: staged, agreed on by the processes that save it, published; then old ones are
removed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist

import fastensor
from fastensor.checkpoint.agreement import PATIENCE, Agreement
from fastensor.checkpoint.directories import nbytes_in_directory
from fastensor.errors import CheckpointWriteError
from fastensor.files import posix
from fastensor.files.job_store import JobStore, connect_to_job, has_others, wait_until
from fastensor.files.new_directory import DirectoryInUseError
from fastensor_accelerate.config import FastensorConfig
from fastensor_accelerate.directories import StateDirectory, is_state, remove_state, states_in, surplus

_ARRIVAL_SECONDS = 30.0
"""Seconds that the main process waits for the others to call ``save_state``, too, before it goes on alone."""

_logger = logging.getLogger("fastensor")
_calls = itertools.count()
"""Numbers the calls of :func:`_everyone_calls`, alike in all processes."""
_accelerates_logger = logging.getLogger("accelerate.accelerator")  # its adapter would ask Accelerate's state
_HOW_TO_KEEP_APART = (
    "give each job a directory of its own. If it is one job, its launcher has started processes that do not know each "
    "other"
)


@dataclass(slots=True)
class StateSave:
    """One state that is being saved by this process. It has all that the save needs when ``save_state`` has returned:
    the Accelerator may be reset or used for something else by then. All processes call its methods at the same points.
    """

    directory: StateDirectory
    agreement: Agreement
    """With whom this process agrees that the state is whole."""
    config: FastensorConfig
    is_main: bool
    is_first_of_machine: bool
    is_sharded: bool
    """True if FSDP has processes save together."""
    total_limit: int | None
    name: str = ""
    """Name in messages of a state that Accelerate names."""
    is_pickled: bool = False
    """True if models are saved as ``pytorch_model.bin``, which ``load_state`` reads where it finds nothing else."""
    started: float = field(default_factory=time.perf_counter)
    replaces: bool = False
    """True if the state takes the place of an older one of the same name."""
    nbytes: int = 0
    """Bytes of files that are written, without those of ``handles``."""
    shared_nbytes: int = 0
    """The part of them that has not changed, and is shared with an earlier state; of all processes, once they have
    confirmed a state with shards."""
    stall_seconds: float = 0.0
    """Seconds that the call has taken, if the save is asynchronous."""
    handles: list[fastensor.SaveHandle] = field(default_factory=list)
    shards: list[Callable[[], object]] = field(default_factory=list)
    """Functions that write copies of shards, which all processes call together."""
    folders_of_shards: list[str] = field(default_factory=list)
    afterwards: list[Callable[[], None]] = field(default_factory=list)
    """Functions that are called when the files of all processes are durable."""
    failure: Exception | None = None
    """Failure of this process while Accelerate saved."""
    is_settled: bool = False
    """True if all processes know that one has failed, which does not come to the next exchange."""

    @property
    def is_together(self) -> bool:
        """True if all processes write files of this state together."""
        return self.config.cooperative and self.agreement.size > 1

    def together(self, do: Callable[[], None], what: str = "") -> None:
        """:meth:`Agreement.together` for this state. By default, ``what`` says that it was not saved."""
        self.agreement.together(do, what or f"{self.directory.path} was not saved")

    def on_each_machine(self, do: Callable[[], None], is_due: Callable[[], bool], what: str = "") -> None:
        """Do something in the main process, and then in the first process of every other machine where it is due:
        machines have the same filesystem, or each its own.

        Raises:
            Exception: what this process has failed with; or another one, as a CheckpointWriteError.
        """
        main, first = self.is_main, self.is_first_of_machine
        self.together(lambda: do() if main else None, what)
        self.together(lambda: do() if first and not main and is_due() else None, what)

    def find_replaced(self) -> None:
        """Find out whether the state replaces an older one. Accelerate would remove that before it saves.

        Raises:
            ValueError: Accelerate has given the same name before, and the state of that name is to be kept.
        """
        directory = self.directory
        exists = directory.is_named_by_accelerate and directory.exists
        old = surplus(states_in(os.path.dirname(directory.path)), None, self.total_limit) if exists else []
        self.replaces = directory.path in old
        if exists and not self.replaces:
            error = ValueError(  # in Accelerate's words
                f"Checkpoint directory {self.name} already exists. Please manually override "
                "`self.save_iteration` with what iteration to start with."
            )
            error.add_note("Set accelerator.project_configuration.iteration, which load_state leaves as it is.")
            raise error

    def prepare(self) -> None:
        """Make the staging directory, and remove states that a process which was killed in time had left to remove:
        they would add up.

        Raises:
            CheckpointWriteError: another process saves a state of the same name; or ``load_state`` would read the model
                of an older state.
            ValueError: another job has saved a state of that name meanwhile, or was about to replace one.
            OSError: the filesystem refused.
        """
        try:
            self.directory.prepare(durable=self.config.durable)
        except DirectoryInUseError as error:
            raise CheckpointWriteError(
                errno.EEXIST, f"{error.strerror}; {_HOW_TO_KEEP_APART}", error.filename
            ) from error
        self.find_replaced()  # from now on, no other process saves one
        if not self.directory.is_named_by_accelerate:
            if self.is_pickled and not self.is_sharded:
                self.directory.check_has_no_safetensors()
            return
        folder = os.path.dirname(self.directory.path)
        if states := [state for state in states_in(folder) if is_state(state)]:
            if self.config.durable:
                posix.sync_directory(folder)  # the newest one was perhaps published a moment before
            self._remove_surplus(states, states[-1])

    def confirm(self) -> None:
        """Return if all processes have written everything. Asynchronous saves of shards are written here. Else nothing
        is left of the state.

        Raises:
            Exception: a process has failed.
        """
        try:
            if self.is_sharded:
                self.together(self._check_begun)  # then all have the same shards to write together
            if self.is_settled:
                self.check_written()
            if self.is_sharded:
                self.shared_nbytes = self.agreement.total(self.shared_nbytes, f"{self.directory.path} was not saved")
            self.together(self.check_written)
        except BaseException as error:
            for handle in self.handles if isinstance(error, Exception) else ():
                handle.exception()  # is raised here, and by no later call
            if not self.directory.is_intact:
                error.add_note(
                    f"{self.directory.staging} was removed meanwhile, perhaps by a job of another machine "
                    f"that saves there, too; {_HOW_TO_KEEP_APART}"
                )
            self.directory.discard()
            raise
        if self.is_main:  # it publishes, perhaps before another process comes here
            self.nbytes += sum(map(nbytes_in_directory, self.folders_of_shards))

    def check_written(self) -> None:
        """Write the shards that are left, and wait for the files.

        Raises:
            Exception: what Accelerate has failed with.
            CheckpointWriteError: a file was not written.
        """
        while self.shards:
            self.shards.pop(0)()
        errors = [error for handle in self.handles if (error := handle.exception()) is not None]  # none is raised later
        self._check_begun()
        if errors:
            raise CheckpointWriteError(f"{self.directory.path} was not saved: {errors[0]}") from errors[0]

    def publish(self, published: Callable[[], None]) -> None:
        """Give the state its place, and remove those that are too old.

        Args:
            published: called when it is in its place.

        Raises:
            Exception: the filesystem refused.
        """
        directory, config = self.directory, self.config
        publish = partial(directory.publish, durable=config.durable, link=config.asynchronous, replaces=self.replaces)
        self.on_each_machine(publish, lambda: directory.is_staged)
        published()
        if directory.is_named_by_accelerate:
            what = f"{directory.path} is saved, but older states were not removed"
            folder = os.path.dirname(directory.path)
            self.on_each_machine(lambda: self._remove_surplus(states_in(folder), directory.path), lambda: True, what)
            if self.is_first_of_machine:
                directory.tidy()

    def _check_begun(self) -> None:
        """
        Raises:
            Exception: what Accelerate has failed with.
        """
        if self.failure is not None:
            raise self.failure

    def _remove_surplus(self, states: list[str], newest: str) -> None:
        """Remove those of the states that are too old beside the newest one.

        Raises:
            OSError: the filesystem refused.
        """
        old = surplus(states, newest, self.total_limit)
        if old and self.is_main:
            _accelerates_logger.warning(f"[RANK 0] Deleting {len(old)} checkpoints to make room for new checkpoint.")
        for state in old:
            with contextlib.suppress(FileNotFoundError):  # another machine, of the same filesystem, was faster
                remove_state(state)


class SavingProcesses:
    """The processes of a job that call ``save_state``: all, or the main process alone. Accelerate leaves that to
    scripts. All processes make it, and call its methods, at the same points."""

    def __init__(self) -> None:
        self._all: Agreement | None = None
        self._main_saves_alone = False

    def all(self) -> Agreement:
        """The agreement of all processes, made by the first call."""
        if self._all is None:
            self._all = Agreement()
        return self._all

    def callers(self) -> Agreement | None:
        """The agreement of those that call ``save_state`` now. None in a process that the main process does not wait
        for.

        Raises:
            CheckpointWriteError: the main process does not come, or cannot be reached.
        """
        if has_others() and not self._main_saves_alone:
            self._main_saves_alone = not _everyone_calls()
        if not self._main_saves_alone:
            return self.all()
        return Agreement(alone=True) if dist.get_rank() == 0 else None

    def end(self) -> None:
        """Give the process group back. The next call makes another one."""
        if self._all is not None:
            self._all.end()
            self._all = None


def _everyone_calls() -> bool:
    """Find out whether all processes of a job are here, or the main process alone. All give the same answer.

    A script may call ``save_state`` with a directory in the main process alone, as scripts of diffusers do. Nothing
    tells the two kinds of scripts apart but whether the others come. If they have not come in 30 s, that is logged.

    Raises:
        CheckpointWriteError: the main process does not come, or cannot be reached.
    """
    rank = dist.get_rank()
    here = [f"{one}" for one in range(dist.get_world_size())]
    connect = partial(connect_to_job, f"fastensor/save_state/{next(_calls)}/")
    store = JobStore(
        connect,
        PATIENCE.total_seconds(),
        lambda error: CheckpointWriteError(f"the main process cannot be reached: {error}"),
    )
    store.ask("set", here[rank], "here")
    seconds = _ARRIVAL_SECONDS if rank == 0 else PATIENCE.total_seconds()
    is_decided = wait_until(lambda: store.ask("check", here) or store.ask("check", ["decision"]), seconds)
    if rank and not is_decided:
        raise CheckpointWriteError("the main process does not call save_state, but other processes do")
    # the first answer is that of all
    decision = store.decide("decision", "everyone" if is_decided else "alone")
    if decision != "everyone" and rank == 0:
        _logger.warning(
            "save_state was called by the main process alone: others have not called it within %.0f s. From now on, "
            "the main process does not wait for them before it saves states in directories that the script names. If "
            "all processes call save_state, call accelerator.wait_for_everyone() before it",
            _ARRIVAL_SECONDS,
        )
    return decision == "everyone"
