"""CRC32s by torch's own operations: the same on every device. Here on the host, in tests/gpu on a GPU."""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastensor.backends.device_crc32 import LANE_NBYTES, LEAST_NBYTES, PendingCrc32s


def crc32s(*contents: bytes) -> list[int]:
    return PendingCrc32s([torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in contents]).values()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 9, 4095, 4096, LEAST_NBYTES - 1, LEAST_NBYTES, 70_000, 131_072]), st.integers(0, 9)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_of_several_at_once(shapes: list[tuple[int, int]]) -> None:
    contents = [random.Random(seed).randbytes(nbytes + seed) for nbytes, seed in shapes]
    assert crc32s(*contents) == [zlib.crc32(one) for one in contents]


@pytest.mark.parametrize("nbytes", [LEAST_NBYTES, 4 << 20, (4 << 20) + LANE_NBYTES, (9 << 20) + 7])
@pytest.mark.parametrize("fill", [None, 0, 255])
def test_of_large_ones(nbytes: int, fill: int | None) -> None:
    content = random.Random(nbytes).randbytes(nbytes) if fill is None else bytes([fill]) * nbytes
    assert crc32s(content) == [zlib.crc32(content)]


def test_every_bit_counts() -> None:
    content = bytearray(LEAST_NBYTES + 5)
    expected = zlib.crc32(content)
    for at in (0, 4, 5, LANE_NBYTES, len(content) - 1):
        for bit in range(8):
            content[at] ^= 1 << bit
            assert crc32s(bytes(content)) == [zlib.crc32(content)] != [expected]
            content[at] ^= 1 << bit


def test_of_none_at_all() -> None:
    assert PendingCrc32s([]).values() == []
