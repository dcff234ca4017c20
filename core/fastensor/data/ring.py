"""Shared memory in which one process hands bytes to another one, slot by slot.

The writer places a slot, fills it, and sends the reader its place, over a socket or any other channel. The reader uses
the bytes where they are. When nothing uses them any more, it sends the slot's sequence number back, and the writer
frees the slot. A writer that finds no gap that is large enough has to wait, or to send the bytes by another way.

- **Slots.** A slot is contiguous, and begins at a multiple of :data:`ALIGNMENT`. The writer places a slot wherever
  there is room between those that the reader keeps, so a slot that is kept for long costs its own bytes only. Memory
  that was given back last comes first: it is in the processor's caches, and costs no page faults.
- **Sequence numbers.** Slots are numbered from 0 on, as they are placed. A number is never used again.
- **Memory.** The memory has no name, so nothing is left in ``/dev/shm``. The kernel frees it when both processes have
  unmapped it or ended, however they end.
- **Ownership.** The writer owns a slot until it sends the place; then the reader does until it sends the number back.
- **Memory ordering.** The ring has no counters in shared memory. Each hand-over is a message through the kernel, whose
  system calls order memory on every architecture: the reader sees all that was written before the message was sent.
- **Forks.** A forked child has the memory mapped, but slots are given back when the parent drops its views: what a
  child has inherited may be overwritten then.
- **Threads.** One thread of each process uses its end. Views may be used and dropped in any thread.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastensor.files.ranges import FreeRanges

ALIGNMENT = 64
"""Slots begin at multiples of this number of bytes: enough for any dtype, and for instructions on vectors."""
NO_SLOT = -1
"""The sequence number of bytes for which the ring had no room, and which come by another way."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Neither process can truncate the memory, which would kill the other one (SIGBUS)."""


def aligned(nbytes: int) -> int:
    """The next multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _units(nbytes: int) -> int:
    """The units of :data:`ALIGNMENT` that a slot takes, at least one."""
    return max(aligned(nbytes) // ALIGNMENT, 1)


def shared_memory(name: str, nbytes: int) -> tuple[int, memoryview]:
    """Memory for several processes, which the kernel provides as it is first used, and frees with the last of them.

    Args:
        name: says in ``/proc`` what it is for.

    Returns:
        a descriptor, which belongs to the caller, and the bytes.

    Raises:
        OSError: there is no memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd, memoryview(mmap.mmap(fd, nbytes))
    except BaseException:
        os.close(fd)
        raise


def mapped(fd: int, *, writable: bool = False) -> npt.NDArray[np.uint8]:
    """The bytes of memory of another process. Its descriptor, which has come, is closed.

    Raises:
        OSError: there is no room for it.
    """
    try:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, prot=protection), np.uint8)
    finally:
        os.close(fd)


class Slot(NamedTuple):
    """Extent of bytes in a ring. The writer sends this to the reader."""

    sequence: int
    offset: int
    nbytes: int


class SlotWriter:
    """The end that fills slots.

    Args:
        nbytes: of the ring. The kernel provides them as they are first used.

    Raises:
        OSError: there is no memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._units = nbytes // ALIGNMENT
        self._free = FreeRanges(self._units)
        self._lent: dict[int, tuple[int, int]] = {}
        """By the sequence number of each slot in use its beginning and its length, in units of ``ALIGNMENT``."""
        self._placed = 0
        self.fd, self._bytes = shared_memory("fastensor-ring", nbytes)
        """The memory, to be sent to the reader. It belongs to this object."""
        self.close = weakref.finalize(self, os.close, self.fd)
        """Give up the descriptor. The memory stays while the reader, or a view, uses it."""

    @property
    def used_nbytes(self) -> int:
        """Bytes that the writer cannot use, because the reader owns them or is about to."""
        return (self._units - self._free.free) * ALIGNMENT

    def place(self, nbytes: int) -> tuple[Slot, memoryview] | None:
        """A new slot, and its bytes to be filled. None if there is no room: wait until the reader gives slots back."""
        begin = self._free.take(_units(nbytes))
        if begin is None:
            return None
        slot = Slot(self._placed, begin * ALIGNMENT, nbytes)
        self._placed += 1
        self._lent[slot.sequence] = begin, _units(nbytes)
        return slot, self.view(slot)

    def view(self, slot: Slot) -> memoryview:
        """The bytes of a slot."""
        return self._bytes[slot.offset : slot.offset + slot.nbytes]

    def shrink(self, slot: Slot, nbytes: int) -> Slot:
        """The slot with fewer bytes, when it is known how many are needed. What is behind them is free.

        Raises:
            KeyError: no slot in use has this number.
        """
        begin, units = self._lent[slot.sequence]
        needed = _units(nbytes)
        if needed < units:
            self._free.add(begin + needed, units - needed)
            self._lent[slot.sequence] = begin, needed
        return slot._replace(nbytes=nbytes)

    def release(self, sequence: int) -> None:
        """Free a slot: the reader has given it back, or was never told of it.

        Raises:
            KeyError: no slot in use has this number.
        """
        self._free.add(*self._lent.pop(sequence))


class SlotReader:
    """The end that uses slots.

    Args:
        fd: the memory of a :class:`SlotWriter`. It belongs to this object, which closes it.
        writable: whether views can be written to, as the reader owns its slots.

    Raises:
        OSError: the memory cannot be mapped.
    """

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        self._bytes = mapped(fd, writable=writable)
        self._dropped: deque[int] = deque()  # views are dropped in any thread, at any time

    def view(self, slot: Slot) -> memoryview:
        """The bytes of a slot. While they or a view of them are kept, the slot is in use.

        In a forked child, they are valid only as long as the parent keeps them, too.

        Raises:
            ValueError: the slot is not in the ring.
        """
        if not 0 <= slot.offset <= slot.offset + slot.nbytes <= len(self._bytes):
            raise ValueError(
                f"slot {slot.sequence} has bytes {slot.offset} to {slot.offset + slot.nbytes}, and the "
                f"ring has {len(self._bytes)}"
            )
        array = self._bytes[slot.offset : slot.offset + slot.nbytes]
        weakref.finalize(array, self._dropped.append, slot.sequence).atexit = False
        return array.data

    def dropped(self) -> list[int]:
        """The sequence numbers of slots that nothing uses any more, each once. Send them to the writer."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]
