"""The processes of a job agree whether a state is whole."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fastensor.errors import CheckpointWriteError

_PATIENCE = timedelta(minutes=30)
"""How long a process waits for one that does not answer. The death of a process is noticed at once."""


class Agreement:
    """Exchanges outcomes among all processes of a job, in a process group of its own. All processes make it, and call
    :meth:`exchange`, at the same points. One thread at a time may call it. With one process there is nothing to agree.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self.rank = 0
        self.size = 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def exchange(self, failure: BaseException | None, what: str) -> None:
        """Return when all processes have come here without a failure.

        Args:
            failure: what this process has failed with.
            what: says what was done, for messages.

        Raises:
            BaseException: the failure of this process.
            CheckpointWriteError: other processes have failed, or cannot be reached. The message names them.
        """
        texts: list[str | None] = [None] * self.size
        if self._group is not None:
            own = None if failure is None else f"{type(failure).__name__}: {failure}"
            try:
                dist.monitored_barrier(self._group, _PATIENCE, wait_all_ranks=True)
                dist.all_gather_object(texts, own, group=self._group)
            except RuntimeError as error:
                if failure is None:
                    raise CheckpointWriteError(f"{what}: a process cannot be reached: {error}") from error
        if failure is not None:
            raise failure
        failed = [f"process {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise CheckpointWriteError(f"{what}: {'; '.join(failed)}")
