"""The memory that saved tensors may take: how many bytes of them may stay on each device, and how many do."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import torch

from fastensor.offload.config import OffloadConfig
from fastensor.offload.host_memory import bytes_in_use, free_heap_bytes, free_host_memory

_HOST = torch.device("cpu")
_SHARE_OF_FREE_MEMORY = 0.8
"""Share of the memory that is left when transfers and gradients have theirs. The rest is for what nobody counts: what
other processes take, and holes between tensors."""
_LOOK_AGAIN_SECONDS = 1.0
"""Time after which the planner finds out anew how much memory is free."""
OPERATION_TENSORS = 4
"""An operation, in either pass, may take the memory of so many of the largest saved tensors besides: for its results or
gradients, and for what it computes on the way."""
_USUAL_HOLES = 64 << 20
"""Bytes of holes of the C library's heap that are left alone. Training has more of them anyway: 100 to 126 MiB where
saved tensors are dropped, with 6 blocks as large as those of BERT-base. Without this, a step of 48 blocks in the
room of checkpointing touched 82,000 to 102,000 pages anew, in place of 63,000."""
_KEPT_PER_PASS = 0.875
"""The share of the largest saved tensor that still counts after one more pass."""

_MUCH = 16
"""What stays is much if it is more than the limit by this."""


class KeptBytes:
    """The graphs' handle of bytes that stay in memory by plan.

    Args:
        nbytes: how many.
        device: where.
        released: is told when the handle goes.
    """

    __slots__ = ("__weakref__", "_released", "device", "nbytes")

    def __init__(self, nbytes: int, device: torch.device, released: deque[tuple[torch.device, int]]) -> None:
        self.nbytes = nbytes
        self.device = device
        self._released = released

    def __del__(self) -> None:
        self._released.append((self.device, self.nbytes))


class MemoryLimits:
    """The limit of each device, and what stays within it. Call every method with the lock of
    :class:`~fastensor.offload.planner.Planner` held; handles may go in any thread.

    Args:
        config: the schedule, and the budgets of transfers. The planner replaces it when it divides memory.
        unallocated: bytes of gradients that the backward pass will allocate.
        in_transit: bytes of host memory that transfers take now, of their budgets.
    """

    def __init__(self, config: OffloadConfig, unallocated: Callable[[], int], in_transit: Callable[[], int]) -> None:
        self.config = config
        self._unallocated = unallocated
        self._in_transit = in_transit
        self._released: deque[tuple[torch.device, int]] = deque()
        """What handles that went had kept, appended by finalizers."""
        self._kept: Counter[torch.device] = Counter()
        self._limits: dict[torch.device, int] = {}
        self._largest: Counter[torch.device] = Counter()
        """The bytes of the largest saved tensor of the latest passes."""
        self._looked_at = 0.0
        self._most_in_use: int | None = None
        """The most bytes that the process may have in use in the latest pass; None if any number may."""
        self.again_nbytes = 0
        """Bytes that come on top of those that stay, while a block is computed again."""
        self.peak_bytes = 0
        """The most bytes that stayed at a time."""

    def keep(self, device: torch.device, nbytes: int) -> KeptBytes | None:
        """The handle of bytes that stay on a device; None if there is no room for them."""
        if nbytes > self.room(device):
            return None
        self._kept[device] += nbytes
        self.peak_bytes = max(self.peak_bytes, self._kept.total())
        return KeptBytes(nbytes, device, self._released)

    def room(self, device: torch.device) -> int:
        """How many more bytes may stay on a device."""
        return self.limit(device) - self._kept[device] - self.again_nbytes

    def give_back(self, kept: KeptBytes, nbytes: int) -> None:
        """Have so many bytes of a handle stay no longer."""
        kept.nbytes -= nbytes
        self._kept[kept.device] -= nbytes

    def kept_bytes(self) -> int:
        """Bytes that stay, on all devices."""
        while self._released:
            device, nbytes = self._released.popleft()
            self._kept[device] -= nbytes
        return self._kept.total()

    def keeps_much(self) -> bool:
        """True if what stays takes a good part of what may."""
        self.kept_bytes()
        return any(kept > self.limit(device) / _MUCH for device, kept in list(self._kept.items()))

    def keeps_too_much(self) -> bool:
        """True if more stays than may."""
        self.kept_bytes()
        return any(kept > self.limit(device) for device, kept in list(self._kept.items()))

    def limit(self, device: torch.device) -> int:
        """The most bytes that may stay on a device, those that do included."""
        self.kept_bytes()  # what went leaves room
        if isinstance(self.config.schedule, int):
            return self.config.schedule
        if device not in self._limits:
            left = _free_memory(device) - self._reserve(device)
            self._limits[device] = int(_SHARE_OF_FREE_MEMORY * left) + self._kept[device]
        return max(self._limits[device] - OPERATION_TENSORS * self._largest[device], 0)

    def _reserve(self, device: torch.device) -> int:
        """Bytes of free memory that transfers and gradients will take."""
        config = self.config.for_device(device)
        reserve = config.staging_nbytes + config.prefetch_nbytes + self._unallocated()
        if device == _HOST:  # which also keeps memory that was read into, for what is read next
            reserve += config.prefetch_nbytes + (config.dram_bytes or 0) - self._in_transit()
        return reserve

    def begin_pass(self) -> None:
        """Find out how much this process may have in use in the pass that begins, if the schedule is a number of bytes:
        what it has in use beside saved tensors, the room of these and of transfers, and gradients."""
        config = self.config
        if isinstance(config.schedule, int):
            self.kept_bytes()  # what went is not kept any more
            others = bytes_in_use() - self._kept[_HOST] - self._in_transit()
            room = config.schedule + config.staging_nbytes + config.prefetch_nbytes + (config.dram_bytes or 0)
            self._most_in_use = others + room + self._unallocated()

    def room_for_holes(self) -> int:
        """How many more bytes may lie in holes of the C library's heap, before these are more than what the latest pass
        may take yet, and more than usual; negative if they are."""
        if self._most_in_use is None:
            return sys.maxsize
        to_come = max(self._most_in_use - bytes_in_use(), 0)
        return to_come + max(OPERATION_TENSORS * self._largest[_HOST], _USUAL_HOLES) - free_heap_bytes()

    def look_again(self) -> None:
        """Find out how much memory is free when a limit is asked for next."""
        self._limits.clear()

    def look_again_in_time(self) -> None:
        """The same, if the last look is old."""
        if time.monotonic() > self._looked_at + _LOOK_AGAIN_SECONDS:
            self.look_again()
            self._looked_at = time.monotonic()

    def note_tensor(self, device: torch.device, nbytes: int) -> None:
        """Note that a tensor is saved, of which operations may take several."""
        self._largest[device] = max(self._largest[device], nbytes)

    def end_pass(self, tensors: Iterable[tuple[torch.device, int]]) -> None:
        """Note the tensors of a pass that has ended. Those of earlier ones count less."""
        for device in self._largest:
            self._largest[device] = int(_KEPT_PER_PASS * self._largest[device])
        for device, nbytes in tensors:
            self.note_tensor(device, nbytes)


def _free_memory(device: torch.device) -> int:
    """Bytes that this process may still take on a device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
        return min(int(free), allowed) + reserved - torch.cuda.memory_allocated(device)
    return free_host_memory()
