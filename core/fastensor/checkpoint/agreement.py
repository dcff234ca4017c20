"""The processes of a distributed job agree whether a checkpoint is whole. This needs ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fastensor.errors import CheckpointWriteError, FastensorError
from fastensor.files.job_store import call_within

PATIENCE = timedelta(minutes=30)
"""Time that a process waits for one that does not answer, or for the store of the job. The death of a process is
noticed at once."""


class Agreement:
    """Exchanges outcomes among all processes of a job, in a process group of its own. All processes make it, and call
    :meth:`exchange`, at the same points. One thread at a time may call it. With one process there is nothing to agree.
    If the group cannot be made, each exchange fails.

    Args:
        alone: whether this process has nobody to agree with, although there are others.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.group: Any = None
        """The process group, on the CPU, also of one process; None without ``torch.distributed``. Collectives of others
        in it must not overlap with those here."""
        self._broken: Exception | None = None
        self.size = 1
        if not alone and dist.is_available() and dist.is_initialized():
            self.size = dist.get_world_size()
            try:
                self.group = call_within(
                    PATIENCE.total_seconds(), lambda: dist.new_group(backend="gloo", timeout=PATIENCE)
                )
            except (RuntimeError, TimeoutError) as error:
                self._broken = error  # the next exchange says what was not done

    def exchange(
        self, failure: BaseException | None, what: str, error: type[FastensorError] = CheckpointWriteError
    ) -> None:
        """Return when all processes have come here without a failure.

        Args:
            failure: what this process has failed with.
            what: says what was not done, for messages.
            error: what is raised for the failures of others.

        Raises:
            BaseException: the failure of this process.
            CheckpointWriteError: other processes have failed, or cannot be reached. The message names them. An
                ``error`` is raised in its place.
        """
        texts: list[str | None] = []
        try:
            texts = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}", what, error)
        except FastensorError as unreachable:
            failure = failure or unreachable
        if failure is not None:
            raise failure
        failed = [f"process {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise error(f"{what}: {'; '.join(failed)}")

    def gather(
        self, text: str | None, what: str, error: type[FastensorError] = CheckpointWriteError
    ) -> list[str | None]:
        """The texts of all processes, in their order.

        Args:
            text: that of this process.
            what: says what was not done if they are not known, for messages.
            error: what is raised then.

        Raises:
            CheckpointWriteError: other processes cannot be reached, now or in an earlier call. An ``error`` is raised
                in its place.
        """
        texts = [text] * self.size
        if self.size == 1:
            return texts
        try:
            if self._broken is not None:
                raise RuntimeError(f"as before: {self._broken}")
            dist.monitored_barrier(self.group, PATIENCE, wait_all_ranks=True)  # names those who do not come
            dist.all_gather_object(texts, text, group=self.group)
        except (RuntimeError, ValueError) as broken:  # ValueError: the process group was destroyed
            self._broken = self._broken or broken
            self.end()  # so that others, which wait for this process, do not wait on
            raise error(f"{what}: a process cannot be reached: {broken}") from broken
        return texts

    def total(self, number: int, what: str) -> int:
        """The sum of the numbers of all processes.

        Raises:
            CheckpointWriteError: as :meth:`gather`.
        """
        return sum(int(text or 0) for text in self.gather(str(number), what))

    def together(self, do: Callable[[], None], what: str, error: type[FastensorError] = CheckpointWriteError) -> None:
        """Do something in all processes. Returns when all have done it.

        Args:
            do: what this process does.
            what: says what was not done if a process fails, for messages.
            error: as for :meth:`exchange`.

        Raises:
            Exception: what this process has failed with; or another one, as an ``error``.
        """
        failure = None
        try:
            do()
        except Exception as raised:  # noqa: BLE001  # raised when the other processes know
            failure = raised
        self.exchange(failure, what, error)

    def end(self) -> None:
        """Give the process group back. Others that wait in it are told that this process cannot be reached. Each
        further exchange fails at once."""
        if self.size > 1:
            self._broken = self._broken or RuntimeError("this process has ended the agreement")
        group, self.group = self.group, None
        if group is not None:
            with suppress(ValueError):  # the program has destroyed all groups, and perhaps made others
                dist.destroy_process_group(group)
