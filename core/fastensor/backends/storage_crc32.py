"""CRC32s of storages where they are, without a copy: on the host by several threads, or on their devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from isal import isal_zlib

from fastensor.backends import streams
from fastensor.backends.device_crc32 import PendingCrc32s
from fastensor.backends.streams import Copies
from fastensor.backends.threads import run_each, usable_cores

_BLOCK_NBYTES = 4 << 20
"""A thread's part at a time. Its turn costs microseconds."""
_MOST_THREADS = 4
"""More threads are not faster: memory is the limit."""


class StoragePart(NamedTuple):
    """Bytes of a storage of the host, or of a device on which torch computes."""

    storage: torch.UntypedStorage
    begin: int
    nbytes: int

    @property
    def values(self) -> torch.Tensor:
        """The bytes as a tensor, which shows the storage."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        return whole[self.begin : self.begin + self.nbytes]


def crc32s_of(parts: Sequence[StoragePart]) -> list[int]:
    """The CRC32 of each part. On devices, behind the work that was queued on their current streams."""
    found: dict[int, int] = {}
    numbers: dict[torch.device, list[int]] = {}
    for number, part in enumerate(parts):
        numbers.setdefault(part.storage.device, []).append(number)
    for device, some in numbers.items():
        values = [parts[number].values for number in some]
        is_on_host = device.type == "cpu" and not streams.are_on(device)
        found |= zip(some, _on_host(values) if is_on_host else _on_device(device, values), strict=True)
    return [found[number] for number in range(len(parts))]


def _on_host(parts: Sequence[torch.Tensor]) -> list[int]:
    blocks = [(number, block) for number, part in enumerate(parts) for block in torch.split(part, _BLOCK_NBYTES)]
    views = [block.numpy().data for _, block in blocks]
    crc32s = run_each(isal_zlib.crc32, views, usable_cores(_MOST_THREADS))
    found = [0] * len(parts)
    for (number, block), crc32 in zip(blocks, crc32s, strict=True):
        found[number] = isal_zlib.crc32_combine(found[number], crc32, block.numel())
    return found


def _on_device(device: torch.device, parts: Sequence[torch.Tensor]) -> list[int]:
    copies = Copies({device}, "checksums").follow_current()
    copies.synchronize()  # the caller waits in any case, and a device that has failed says so here
    with copies.entered():
        pending = PendingCrc32s(parts)
    copies.synchronize()
    return pending.values()
