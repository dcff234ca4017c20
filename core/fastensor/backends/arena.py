"""Memory for snapshots: blocks that are touched once, kept between saves, and never more than a budget allows."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from fastensor.backends.memory import BUFFER_NBYTES, Buffer, map_buffers

BLOCK_NBYTES = BUFFER_NBYTES


class ArenaClosedError(RuntimeError):
    """There are no blocks any more."""


class Arena:
    """Hands out blocks of ``BLOCK_NBYTES``. Every method may be called from several threads at once.

    A block belongs to whoever took it until it is given back. Memory is mapped when :meth:`reserve` asks for it, backed
    when a block is first used, and kept until :meth:`close`.

    Args:
        budget: how many bytes there may be at most, at any instant; at least a block. Asked once, when memory is first
            wanted.
    """

    def __init__(self, budget: Callable[[], int]) -> None:
        self._budget = budget
        self._most: int | None = None
        """How many blocks the budget allows."""
        self._changed = threading.Condition()
        self._idle: list[Buffer] = []
        self._in_use: set[Buffer] = set()
        self._count = 0
        self._peak = 0
        self._closed = False
        # An owner that is forgotten rather than closed: its memory must not stay pinned.
        self._finalizer = weakref.finalize(self, _release, self._idle)
        self._finalizer.atexit = False

    @property
    def nbytes(self) -> int:
        """How much there is, used or not."""
        return self._count * BLOCK_NBYTES

    @property
    def free_nbytes(self) -> int:
        """How much could be taken at once."""
        return len(self._idle) * BLOCK_NBYTES

    @property
    def peak_nbytes(self) -> int:
        """The most that was in use at any instant."""
        return self._peak * BLOCK_NBYTES

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes can be taken at once, or all there are if that is less."""
        return self.free_nbytes >= min(nbytes, self.nbytes)

    def reserve(self, nbytes: int) -> None:
        """Grow to at least so many bytes, or as many as the budget allows.

        Raises:
            MemoryError: the operating system refuses so much address space.
            ArenaClosedError: it has been closed.
        """
        with self._changed:
            if self._closed:
                raise ArenaClosedError("the staging memory has been released")
            if self._most is None:
                self._most = self._budget() // BLOCK_NBYTES
            missing = min(-(-nbytes // BLOCK_NBYTES), self._most) - self._count
            if missing <= 0:
                return
            try:
                self._idle += map_buffers(missing)[::-1]
            except OSError as error:
                raise MemoryError(f"cannot map {missing * BLOCK_NBYTES} bytes for staging: {error}") from error
            self._count += missing
            self._check_budget()
            self._changed.notify_all()

    def take(
        self,
        holder: list[Buffer],
        *,
        while_waiting: Callable[[], AbstractContextManager[None]],
        stopped: Callable[[], bool],
    ) -> Buffer | None:
        """A block, as soon as there is one.

        Args:
            holder: the block is appended to it, so that it is not lost if an interrupt comes before this returns.
            while_waiting: entered if there is none right now, until there is.
            stopped: asked whenever something changes; whether to give up and return None.

        Raises:
            ArenaClosedError: it has been closed.
        """
        with nullcontext() if self._idle else while_waiting(), self._changed:
            self._changed.wait_for(lambda: self._idle or self._closed or stopped())
            if self._closed:
                raise ArenaClosedError("the staging memory has been released")
            if stopped():
                return None
            holder.extend(map(list.pop, (self._idle,)))  # one call: there is no instant between the two lists
            self._in_use.add(holder[-1])
            self._peak = max(self._peak, len(self._in_use))
            self._check_budget()
            return holder[-1]

    def give(self, block: Buffer) -> None:
        """Give a block back."""
        with self._changed:
            self._in_use.discard(block)
            if self._closed:
                block.release()
                self._count -= 1
            else:
                self._idle.append(block)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let those who wait in :meth:`take` ask again whether to stop."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Release the memory, of blocks in use as soon as they are given back. Calling it again does nothing."""
        with self._changed:
            self._closed = True
            self._count -= len(self._idle)
            _release(self._idle)
            self._changed.notify_all()

    def forget(self) -> None:
        """In a forked child: what is pinned is its parent's."""
        self._finalizer.detach()

    def _check_budget(self) -> None:
        found = len(self._in_use) + len(self._idle)
        assert self._most is not None
        assert found <= self._count <= self._most, f"{found} of {self._count} blocks, and {self._most} allowed"


def _release(blocks: list[Buffer]) -> None:
    while blocks:
        blocks.pop().release()
