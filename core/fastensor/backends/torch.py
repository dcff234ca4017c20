"""The ``torch`` backend, the reference: ``torch.save`` writes the file, and plain reads get the bytes for loads."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO

import torch
from isal import isal_zlib

from fastensor.backends.base import Extent, Reader
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.stitch.plain_tensors import skips_values
from fastensor.stitch.source import Source
from fastensor.stitch.torch_zip import TorchZip

_GATHERED_NBYTES = 64 << 10
"""torch writes five or more small pieces for each record. They are gathered up to this size."""


class TorchBackend:
    """See :class:`fastensor.backends.base.Backend`."""

    name = "torch"

    def why_unavailable(self) -> str:
        return ""

    def can_write(self, source: Source) -> bool:
        return isinstance(source, TorchZip)

    def write(self, source: Source, fd: int) -> Sequence[int]:
        if not isinstance(source, TorchZip):
            raise BackendUnavailableError("torch.save writes only its own container, and from memory")
        if skips_values():
            raise BackendUnavailableError(
                "torch.serialization.skip_data is active, so torch would leave the values out"
            )
        with file_for_torch(partial(_write, source, fd)) as file:
            source.write_with_torch(file)
        posix.truncate(fd, source.nbytes)
        return ()

    def open_reader(self, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        return _PlainReader(fd)


def _write(source: TorchZip, fd: int, data: memoryview, offset: int) -> None:
    posix.write_fully(fd, data, offset)
    source.progress(offset + data.nbytes)


@contextmanager
def file_for_torch(write: Callable[[memoryview, int], object]) -> Iterator[BinaryIO]:
    """A file for ``torch.save``. When the block is left, all bytes have gone through ``write``.

    Args:
        write: writes all bytes at an offset before it returns. Called in the order of the offsets; only
            ``torch.serialization.skip_data`` leaves gaps between them.

    Raises:
        BaseException: what the first failing ``write`` raised. No ``write`` was called after it.
        OSError: torch wrote nothing.
    """
    raw = _FileForTorch(write)
    try:
        with io.BufferedWriter(raw, _GATHERED_NBYTES) as file:
            yield file
    except Exception as error:
        if raw.failure is not None:
            raise raw.failure from error
        raise
    if raw.failure is not None:
        raise raw.failure
    if not raw.position:
        raise OSError(errno.EIO, f"torch.save has written nothing; it is {torch.save!r}")


class _FileForTorch(io.RawIOBase):
    """Keeps the first failure of a write, and drops the bytes that follow.

    torch's C++ ignores what a write returns. After an exception torch goes on, and raises at the end the exception or a
    ``RuntimeError`` about a wrong position. So failures are not reported to torch.
    """

    def __init__(self, write: Callable[[memoryview, int], object]) -> None:
        self._write = write
        self.position = 0
        self.failure: BaseException | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_CUR or offset < 0:
            raise io.UnsupportedOperation(f"seek to {offset} (whence {whence}): torch only leaves holes")
        self.position += offset
        return self.position

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self.failure is None:
            try:
                self._write(view, self.position)
            except BaseException as failure:  # noqa: BLE001  # raised when torch has returned
                self.failure = failure.with_traceback(None)  # the frames of the traceback hold memory that torch frees
        self.position += view.nbytes
        return view.nbytes


class _PlainReader:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        if posix.read_fully(self._fd, buffer, offset) != buffer.nbytes:
            raise posix.EndOfFile(f"the file ends before offset {offset + buffer.nbytes}")
        return isal_zlib.crc32(buffer) if checksum else 0

    def close(self) -> None:
        pass
