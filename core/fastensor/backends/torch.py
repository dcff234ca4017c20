"""The ``torch`` backend: ``torch.save`` moves the bytes, and ``torch.load`` gets them by plain reads. The reference."""

from __future__ import annotations

import os
from collections.abc import Sequence

from isal import isal_zlib

from fastensor.backends import posix
from fastensor.backends.base import Availability, Capabilities, Extent, Reader
from fastensor.errors import BackendUnavailableError
from fastensor.stitch.source import Source
from fastensor.stitch.torch_zip import TorchZip


class TorchBackend:
    """See :class:`fastensor.backends.base.Backend`."""

    name = "torch"

    def availability(self) -> Availability:
        return Availability(True)

    def capabilities(self) -> Capabilities:
        return Capabilities(bypasses_page_cache=False, extra_nbytes=None)

    def write(self, source: Source, fd: int) -> Sequence[int]:
        if not isinstance(source, TorchZip):
            raise BackendUnavailableError("torch.save writes only its own container")
        os.lseek(fd, 0, os.SEEK_SET)
        with os.fdopen(fd, "wb", closefd=False) as file:
            source.write_with_torch(file)
        posix.truncate(fd, source.image.nbytes)
        return ()

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        return _PlainReader(fd)


class _PlainReader:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        if posix.read_fully(self._fd, buffer, offset) != buffer.nbytes:
            raise posix.EndOfFile(f"the file ends before offset {offset + buffer.nbytes}")
        return isal_zlib.crc32(buffer) if checksum else 0

    def close(self) -> None:
        pass
