"""The processes of a job that save a state together: all, or the main process alone."""

from __future__ import annotations

import itertools
import logging
import time
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fastensor.checkpoint.agreement import PATIENCE, Agreement, has_others
from fastensor.errors import CheckpointWriteError
from fastensor.files.bounded_call import call_within

_ARRIVAL_SECONDS = 30.0
"""How long the main process waits for the others to call ``save_state``, too, before it goes on alone."""
_SHORTEST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.005, 0.1

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
    number, rank, size = next(_calls), dist.get_rank(), dist.get_world_size()
    key = f"fastensor/save_state/{number}/"
    here = [f"{key}{one}" for one in range(size)]
    started = time.monotonic()
    try:
        ask = partial(call_within, PATIENCE.total_seconds())
        store = _get_default_store()
        ask(store.set, here[rank], "here")
        while not any(found := ask(lambda: (store.check(here), store.check([f"{key}decision"])))):
            waited = time.monotonic() - started
            if rank == 0 and waited > _ARRIVAL_SECONDS:
                break
            if waited > PATIENCE.total_seconds():
                raise CheckpointWriteError("the main process does not call save_state, but other processes do")
            time.sleep(min(max(waited / 50, _SHORTEST_POLL_SECONDS), _LONGEST_POLL_SECONDS))
        # the first answer is that of all
        decision = ask(store.compare_set, f"{key}decision", "", "everyone" if found[0] else "alone")
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise CheckpointWriteError(f"the main process cannot be reached: {error}") from error
    if decision != b"everyone" and rank == 0:
        _logger.warning(
            "save_state was called by the main process alone: others have not called it within %.0f s. From now on, "
            "the main process does not wait for them before it saves states in directories that the script names. If "
            "all processes call save_state, call accelerator.wait_for_everyone() before it",
            _ARRIVAL_SECONDS,
        )
    return bool(decision == b"everyone")
