"""Priority lock for asyncio: one coroutine at a time, in the order of keys that may change meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

Key: TypeAlias = tuple[int, int, int]
"""Smaller ones come first. See :func:`fastensor.provision.credits.turn`."""


class PriorityLock:
    """A lock of asyncio that is passed on to whoever has the smallest key at that moment.

    Used by one event loop.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: list[tuple[Callable[[], Key], asyncio.Future[None]]] = []

    @asynccontextmanager
    async def held(self, key: Callable[[], Key]) -> AsyncIterator[None]:
        """Wait for one's turn, and have it until the end of the block.

        Args:
            key: called whenever the lock is passed on.
        """
        if self._is_taken:
            await self._wait(key)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, key: Callable[[], Key]) -> None:
        entry = key, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:  # the turn had come just now
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Leave the lock taken if somebody waits: it is theirs now."""
        ready = [entry for entry in self._waiting if not entry[1].done()]  # those that were cancelled remove themselves
        self._is_taken = bool(ready)
        if ready:
            entry = min(ready, key=lambda one: one[0]())
            self._waiting.remove(entry)
            entry[1].set_result(None)
