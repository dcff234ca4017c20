"""The processes of a job that save a state together: all, or the main process alone."""

from __future__ import annotations

import itertools
import logging
from functools import partial

import torch.distributed as dist

from fastensor.checkpoint.agreement import PATIENCE, Agreement
from fastensor.errors import CheckpointWriteError
from fastensor.files.job_store import JobStore, connect_to_job, has_others, wait_until

_ARRIVAL_SECONDS = 30.0
"""Seconds that the main process waits for the others to call ``save_state``, too, before it goes on alone."""

_logger = logging.getLogger("fastensor")
_calls = itertools.count()
"""Numbers the calls of :func:`_everyone_calls`, alike in all processes."""


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
    store = JobStore(connect, PATIENCE.total_seconds(), _unreachable)
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


def _unreachable(error: Exception) -> CheckpointWriteError:
    return CheckpointWriteError(f"the main process cannot be reached: {error}")
