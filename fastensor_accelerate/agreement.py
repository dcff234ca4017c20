"""The processes of a job agree whether a state is whole."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fastensor.errors import CheckpointWriteError

_PATIENCE = timedelta(minutes=30)
"""How long a process waits for one that does not answer. The death of a process is noticed at once."""
_ARRIVAL_SECONDS = 30.0
"""How long the main process waits for the others to call ``save_state``, too, before it goes on alone."""
_POLL_SECONDS = 0.005

_logger = logging.getLogger("fastensor")
_calls = itertools.count()
"""Numbers the calls of :func:`_everyone_calls`, alike in all processes."""


class Agreement:
    """Exchanges outcomes among all processes of a job, in a process group of its own. All processes make it, and call
    :meth:`exchange`, at the same points. One thread at a time may call it. With one process there is nothing to agree.

    Args:
        alone: whether this process has nobody to agree with, although there are others.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._group: Any = None
        self._broken: Exception | None = None
        self.size = 1
        if not alone and has_others():
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self.size = dist.get_world_size()

    def exchange(self, failure: BaseException | None, what: str) -> None:
        """Return when all processes have come here without a failure.

        Args:
            failure: what this process has failed with.
            what: says what was not done, for messages.

        Raises:
            BaseException: the failure of this process.
            CheckpointWriteError: other processes have failed, or cannot be reached. The message names them.
        """
        texts: list[str | None] = [None] * self.size
        if self.size > 1:
            own = None if failure is None else f"{type(failure).__name__}: {failure}"
            try:
                self._gather(texts, own)
            except (RuntimeError, ValueError) as error:  # ValueError: the process group was destroyed
                if failure is None:
                    raise CheckpointWriteError(f"{what}: a process cannot be reached: {error}") from error
        if failure is not None:
            raise failure
        failed = [f"process {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise CheckpointWriteError(f"{what}: {'; '.join(failed)}")

    def together(self, do: Callable[[], None], what: str) -> None:
        """Do something in all processes. Returns when all have done it.

        Args:
            do: what this process does.
            what: says what was not done if a process fails, for messages.

        Raises:
            Exception: what this process has failed with; or another one, as a CheckpointWriteError.
        """
        failure = None
        try:
            do()
        except Exception as error:  # noqa: BLE001  # raised when the other processes know
            failure = error
        self.exchange(failure, what)

    def end(self) -> None:
        """Give the process group back. Others that wait in it are told that this process cannot be reached."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _gather(self, texts: list[str | None], own: str | None) -> None:
        """
        Raises:
            RuntimeError, ValueError: a process cannot be reached, now or in an earlier call.
        """
        if self._broken is not None:
            raise RuntimeError(f"as before: {self._broken}")
        try:
            dist.monitored_barrier(self._group, _PATIENCE, wait_all_ranks=True)  # names those who do not come
            dist.all_gather_object(texts, own, group=self._group)
        except (RuntimeError, ValueError) as error:
            self._broken = error
            self.end()  # so that others, which wait for this process, do not wait on
            raise


def has_others() -> bool:
    """Whether the job has more processes than this one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


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
        store = _get_default_store()
        store.set(here[rank], "here")
        while not (arrived := store.check(here)) and not store.check([f"{key}decision"]):
            waited = time.monotonic() - started
            if rank == 0 and waited > _ARRIVAL_SECONDS:
                break
            if waited > _PATIENCE.total_seconds():
                raise CheckpointWriteError("the main process does not call save_state, but other processes do")
            time.sleep(_POLL_SECONDS)
        # the first answer is that of all
        decision = store.compare_set(f"{key}decision", "", "everyone" if arrived else "alone")
    except (RuntimeError, ValueError) as error:
        raise CheckpointWriteError(f"the main process cannot be reached: {error}") from error
    if decision != b"everyone" and rank == 0:
        _logger.warning(
            "save_state was called by the main process alone: others have not called it within %.0f s. From now on, "
            "the main process does not wait for them before it saves states in directories that the script names. If "
            "all processes call save_state, call accelerator.wait_for_everyone() before it",
            _ARRIVAL_SECONDS,
        )
    return bool(decision == b"everyone")
