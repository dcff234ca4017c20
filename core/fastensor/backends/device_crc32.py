"""CRC32s of memory on any device of torch's, computed there, without a copy on the host.

A CRC is linear: the CRC of a lane of bytes is the XOR of one table entry for each byte, chosen by the byte's value and
position. So the device looks up and folds, without a loop over the bytes, and the host combines the few values of the
lanes. Zeros in front of a message do not change the linear part, so lanes and powers of two are filled up in front.
Small vectors go to the host, all in one copy, because looking them up would take longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib

LANE_NBYTES = 4096
LEAST_NBYTES = 64 << 10
"""Smaller vectors are copied to the host."""
_CHUNK_NBYTES = 4 << 20
"""Looked up at a time. The device holds eight times as much meanwhile, and keeps a table of the same size."""
_ONES = 0xFFFFFFFF
_POLYNOMIAL = 0xEDB88320

_Words = npt.NDArray[np.uint32]


class PendingCrc32s:
    """The CRC32s of some uint8 vectors on one device, equal to those of ``zlib.crc32``.

    Make the object on the stream that fills the vectors. When the work that was queued there by then is done, the
    vectors may change, and :meth:`values` may be called.

    >>> PendingCrc32s([torch.arange(9, dtype=torch.uint8)]).values() == [isal_zlib.crc32(bytes(range(9)))]
    True
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._nbytes = [part.numel() for part in parts]
        small = [part for part in parts if part.numel() < LEAST_NBYTES]
        lanes = [lane for part in parts if part.numel() >= LEAST_NBYTES for lane in _lanes(part)]
        self._small = _on_host(torch.cat(small)) if small else None
        self._lanes = _on_host(torch.cat(lanes)) if lanes else None

    def values(self) -> list[int]:
        """The CRC32 of each vector, in their order."""
        small = memoryview(b"") if self._small is None else self._small.numpy().data
        lanes = np.empty(0, np.uint32) if self._lanes is None else self._lanes.numpy().view(np.uint32)
        result = []
        for nbytes in self._nbytes:
            if nbytes < LEAST_NBYTES:
                result.append(int(isal_zlib.crc32(small[:nbytes])))
                small = small[nbytes:]
            else:
                count = -(-nbytes // LANE_NBYTES)
                result.append(_shifted(_ONES, nbytes) ^ _ONES ^ _combined(lanes[:count]))
                lanes = lanes[count:]
        return result


def _on_host(found: torch.Tensor) -> torch.Tensor:
    """A copy on the host, complete when the work that is queued on the device is done."""
    target = torch.empty_like(found, device="cpu", pin_memory=found.is_cuda)
    return target.copy_(found, non_blocking=True)


def _lanes(part: torch.Tensor) -> list[torch.Tensor]:
    """The linear part of the CRC of each lane. The first lane may be short."""
    result = []
    odd = part.numel() % LANE_NBYTES
    if odd:
        first = torch.zeros(LANE_NBYTES, dtype=torch.uint8, device=part.device)
        first[-odd:] = part[:odd]
        result.append(_lookup(first))
    return result + [_lookup(chunk) for chunk in torch.split(part[odd:], _CHUNK_NBYTES)]


def _lookup(chunk: torch.Tensor) -> torch.Tensor:
    begins, table = _device_table(chunk.device)
    index = chunk.view(-1, LANE_NBYTES).to(torch.int32).add_(begins)
    values = table.index_select(0, index.flatten()).view_as(index)
    del index
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] ^ values[:, half:]
    return values[:, 0]


@cache
def _device_table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The table, by position in a lane and value of a byte, and the index at which each position begins."""
    step = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        step = np.where(step & 1, (step >> 1) ^ np.uint32(_POLYNOMIAL), step >> 1)
    table = np.empty((LANE_NBYTES, 256), np.uint32)
    table[-1] = step
    for position in range(LANE_NBYTES - 2, -1, -1):  # each position is followed by one more zero than the next
        after = table[position + 1]
        table[position] = step[after & 0xFF] ^ (after >> 8)
    begins = torch.arange(0, table.size, 256, dtype=torch.int32, device=device)
    return begins, torch.from_numpy(table.view(np.int32).ravel()).to(device)


def _combined(lanes: _Words) -> int:
    """The linear part of the CRC of all lanes together."""
    values = np.zeros(1 << (len(lanes) - 1).bit_length(), np.uint32)
    values[-len(lanes) :] = lanes
    nbytes = LANE_NBYTES
    while len(values) > 1:
        shifts = _shift_table(nbytes)
        before, after = values[::2], values[1::2]
        for number in range(4):
            after = after ^ shifts[number][(before >> np.uint32(8 * number)) & 0xFF]
        values, nbytes = after, 2 * nbytes
    return int(values[0])


@cache
def _shift_table(nbytes: int) -> _Words:
    """The effect of ``nbytes`` zeros on each byte of a CRC. XOR the four entries for the effect on the CRC."""
    bits = [_shifted(1 << bit, nbytes) for bit in range(32)]
    table = np.zeros((4, 256), np.uint32)
    for number in range(4):
        for bit in range(8):
            table[number, np.arange(256) >> bit & 1 == 1] ^= np.uint32(bits[8 * number + bit])
    return table


def _shifted(crc: int, nbytes: int) -> int:
    return int(isal_zlib.crc32_combine(crc, 0, nbytes))
