"""CRC32s of storages where they are."""

from __future__ import annotations

import random
import zlib

import pytest
import torch
from device_model import modelled

from fastensor.backends.storage_crc32 import StoragePart, crc32s_of

SIZES = (1, 4095, 5 << 20, 9 << 20)


def parts() -> tuple[list[StoragePart], list[int]]:
    """Parts of storages, and their CRC32s."""
    found, expected = [], []
    for seed, nbytes in enumerate(SIZES):
        data = random.Random(seed).randbytes(nbytes + 20)
        storage = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone().untyped_storage()
        found += [StoragePart(storage, 0, nbytes), StoragePart(storage, 13, nbytes)]
        expected += [zlib.crc32(data[:nbytes]), zlib.crc32(data[13 : 13 + nbytes])]
    return found, expected


@pytest.mark.parametrize("where", ["host", "device"])
def test_crc32s_are_those_of_zlib(where: str) -> None:
    found, expected = parts()
    if where == "host":
        assert crc32s_of(found) == expected
    else:
        with modelled() as model, model.queuing():
            assert crc32s_of(found) == expected


def test_of_none() -> None:
    assert crc32s_of([]) == []
