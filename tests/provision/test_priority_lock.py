"""A lock that is passed on by keys; and memory that was read-only."""

from __future__ import annotations

import asyncio
import mmap

import numpy as np
import pytest

from fastensor.provision.ray.memory import owned
from fastensor.provision.ray.priority_lock import PriorityLock


async def wait_for(lock: PriorityLock) -> str:
    async with lock.held(lambda: (0, 0, 0)):
        return "came"


def test_the_smallest_key_at_that_moment_is_next() -> None:
    keys = {"a": 3, "b": 2, "c": 1}
    came: list[str] = []

    async def come(lock: PriorityLock, name: str) -> None:
        async with lock.held(lambda: (keys[name], 0, 0)):
            came.append(name)
            await asyncio.sleep(0)
            keys["b"] = 0  # while others wait

    async def main() -> None:
        lock = PriorityLock()
        async with lock.held(lambda: (0, 0, 0)):
            waiting = [asyncio.create_task(come(lock, name)) for name in keys]
            await asyncio.sleep(0)
        await asyncio.gather(*waiting)

    asyncio.run(main())
    assert came == ["c", "b", "a"]


def test_who_gives_up_holds_nobody_up() -> None:
    async def main() -> None:
        lock = PriorityLock()
        async with lock.held(lambda: (0, 0, 0)):
            first, second, third = (asyncio.create_task(wait_for(lock)) for _ in range(3))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.sleep(0)
        first.cancel()  # its turn has come, and it has not noticed yet
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await third == "came"
        with pytest.raises(ValueError, match="free again"):
            async with lock.held(lambda: (0, 0, 0)):
                raise ValueError("free again")
        assert await wait_for(lock) == "came"

    asyncio.run(main())


def test_who_has_just_given_up_is_passed_over() -> None:
    async def main() -> None:
        lock = PriorityLock()
        async with lock.held(lambda: (0, 0, 0)):
            first, second = (asyncio.create_task(wait_for(lock)) for _ in range(2))
            await asyncio.sleep(0)
            first.cancel()  # it has not noticed when the turn is passed on
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second == "came"
        assert await wait_for(lock) == "came"

    asyncio.run(main())


def test_memory_that_is_mapped_writable_is_not_copied() -> None:
    mapped = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    shown = mapped[64:128]
    shown.flags.writeable = False
    view = owned(shown)
    view[0] = 7
    assert mapped[64] == 7
    odd = mapped[1:9]
    odd.flags.writeable = False
    copy = owned(odd)
    copy[0] = 9
    assert mapped[1] == 0
    constant = np.frombuffer(mmap.mmap(-1, 4096, prot=mmap.PROT_READ), np.uint8)
    copy = owned(constant)
    copy[0] = 5
    assert constant[0] == 0
    assert not len(owned(constant[:0]))
