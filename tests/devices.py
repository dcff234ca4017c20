"""Host memory in the place of a device's: what is done for devices is done, by the same operations of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from fastensor.backends import memory, to_device
from fastensor.backends.base import Reader


@contextmanager
def filled_at_once() -> Iterator[list[int]]:
    """Storages go to the host as they would to a device; gives a list of their sizes."""
    filled: list[int] = []
    fill = to_device.fill_device

    def noted(reader: Reader, storage: torch.UntypedStorage, offset: int, *, checksum: bool) -> int:
        filled.append(storage.nbytes())
        return fill(reader, storage, offset, checksum=checksum)

    with mock.patch.object(to_device, "fill_device", noted):
        memory.FILLED_AT_ONCE.add("cpu")
        try:
            yield filled
        finally:
            memory.FILLED_AT_ONCE.remove("cpu")
