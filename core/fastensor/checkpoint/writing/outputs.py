"""Outputs of a save: a new file, or an earlier one, that replaces the target; or a stream that is written from front to
back.

Every output is used in one order: :meth:`~StreamOutput.begin`, :meth:`~StreamOutput.write_at`,
:meth:`~StreamOutput.end`, :meth:`~StreamOutput.replace`; and :meth:`~StreamOutput.close`, whatever happens. One thread
uses it at a time. What the operating system or a filesystem refuses raises ``OSError``.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import BinaryIO, TypeAlias

from fastensor.checkpoint.location import NO_LOCAL_FILE, can
from fastensor.checkpoint.writing.freeing import freeing_afterwards
from fastensor.checkpoint.writing.report import Freeing
from fastensor.errors import CheckpointWriteError, caught_as
from fastensor.files import posix
from fastensor.files.atomic import NewFile, leads_to
from fastensor.files.os_errors import kept_at
from fastensor.files.words import human_size

_GAP_NBYTES = 1 << 20
"""Zeros that are written at a time to fill a gap."""
_FREED_LATER_NBYTES = 1 << 20
"""The space of smaller files is freed where they lose their names: to tell a thread takes longer."""


class Replacement(NewFile):
    """A new file, which takes the target's place when it is published. Backends write to its descriptor."""

    atomic = True
    is_synced = True
    replaced_nbytes = 0
    """Size of the file at the target when this one was opened."""

    def begin(self, nbytes: int) -> None:
        """Reserve space for ``nbytes`` bytes, in whole blocks. Backends cut the file off behind its last byte.

        Raises:
            OSError: there is not enough space.
        """
        try:
            posix.preallocate(self.fd, -(-nbytes // posix.ASSUMED_ALIGNMENT) * posix.ASSUMED_ALIGNMENT)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            beside = " beside the old one" if os.path.lexists(self.path) else ""
            needed = f"{error.strerror}: the new file needs {human_size(nbytes)}{beside}"
            raise OSError(error.errno, needed) from error

    def end(self) -> int:
        """See :meth:`StreamOutput.end`."""
        return os.fstat(self.fd).st_size

    def replace(self, *, durable: bool, free_later: bool = True) -> Freeing:
        """:meth:`publish`, and have a thread free the space of a large old file, unless ``free_later`` is False."""
        is_large = self.replaced_nbytes >= _FREED_LATER_NBYTES
        with freeing_afterwards(self.path) if free_later and is_large else nullcontext(Freeing(seconds=0.0)) as freeing:
            self.publish(durable=durable)
        return freeing


class Link(Replacement):
    """An earlier file, which gets the target's name beside its own. Nothing is written to it.

    Args:
        path: of the target.
        fd: of the earlier file, which the caller closes.

    Raises:
        FileExistsError: the target is another file, whose owner and rights the earlier one may not have.
        OSError: the filesystem refuses the name, or other work has locked the file.
    """

    why = "nothing in it has changed, so it is a hard link to an earlier file"

    def __init__(self, path: str, fd: int) -> None:
        self.path, self.fd, self.published, self._names = path, os.dup(fd), False, []
        try:
            if os.path.lexists(path) and not leads_to(path, fd):
                raise FileExistsError(errno.EEXIST, "another file is to be replaced", path)
            self._link_hidden()  # before the lock, which would keep what a killed process has left
            if not (posix.try_lock(self.fd) and leads_to(self._names[-1], self.fd)):
                raise BlockingIOError(errno.EAGAIN, "other work has locked the earlier file", path)
        except BaseException:
            self.close()
            raise

    def _take_name(self) -> None:
        if leads_to(self.path, self.fd):  # rename does nothing between two names of one file
            self._remove()
        else:
            super()._take_name()


class StreamOutput(ABC):
    """An output that is written from front to back.

    Args:
        path: the name of the output, for reports and messages.
    """

    atomic = False
    """True if the target is replaced in one instant, by :meth:`publish`. If not, :meth:`begin` ends what was there."""
    is_synced = False
    """True if ``fd`` is that of a file on this machine, which is synced after :meth:`end`."""
    fd = -1
    why = NO_LOCAL_FILE
    """Reason for which it is no new file that backends write."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._nbytes = 0
        """Bytes that were written."""

    def begin(self, nbytes: int) -> None:  # noqa: B027  # most outputs need no preparation
        """Prepare for ``nbytes`` bytes; 0 if it is not known how many. Drop the old contents."""

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all of ``data``, which may leave a gap behind what was written before. Zeros fill the gap."""
        while gap := offset - self._nbytes:
            self.write(memoryview(bytes(min(gap, _GAP_NBYTES))))
        self.write(data)

    def write(self, data: memoryview) -> None:
        """Append all of ``data``."""
        while data.nbytes:
            written = self._append(data)
            if not written:
                raise OSError(errno.EIO, "the file accepts no more bytes")
            self._nbytes += written
            data = data[written:]

    @abstractmethod
    def _append(self, data: memoryview) -> int | None:
        """Append some of ``data``; returns how many bytes."""

    def end(self) -> int:
        """Note that everything was written. Returns the size of the file."""
        return self._nbytes

    def replace(self, *, durable: bool, free_later: bool = True) -> Freeing:
        """Let what was written take the target's place, if it is not there yet. See :meth:`Replacement.replace`."""
        return Freeing()

    def left(self) -> str:
        """Words for what is at the target after a failure."""
        return kept_at(self.path)

    def close(self) -> None:  # noqa: B027  # what the caller has opened, the caller closes
        """Close what was opened, and drop what has not taken the target's place."""


Output: TypeAlias = Replacement | StreamOutput


class InPlace(StreamOutput):
    """A target that is overwritten.

    Args:
        path: an existing file, which is opened, and locked if it is a regular file.
        why_not_replaced: empty if the file is empty, so that a replacement would protect nothing.

    Raises:
        OSError: the file may not be written, or has contents and other names, in which they are to stay.
        BlockingIOError: the file is locked: another process, thread or save may be writing to it.
    """

    why = "it is written in place"

    def __init__(self, path: str, why_not_replaced: str) -> None:
        super().__init__(path)
        self.why_not_replaced = why_not_replaced
        self._begun = self._ended = self._is_gone = False
        self.fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            self.is_synced = stat.S_ISREG(os.fstat(self.fd).st_mode)
            if self.is_synced and not posix.try_lock(self.fd):
                why = "another process has locked it, or another save of this one, perhaps to write to it"
                raise BlockingIOError(errno.EAGAIN, why)
            status = os.fstat(self.fd)
            self.nbytes = status.st_size
            """Size of the old contents."""
            self.has_name = status.st_nlink > 0
            if why_not_replaced and self.is_synced and self.nbytes and status.st_nlink > 1:
                raise OSError(
                    errno.EMLINK,
                    f"it has other names (hard links), in which the new contents would appear, too, for it can only be "
                    f"written in place: {why_not_replaced}; save under another name",
                )
        except BaseException:
            posix.close_read_only(self.fd)
            raise

    def begin(self, nbytes: int) -> None:
        """Drop the old contents, if there is room for ``nbytes`` bytes.

        Raises:
            OSError: there is no room; the old contents are kept.
        """
        if self.is_synced:
            self.nbytes = os.fstat(self.fd).st_size
            try:
                posix.preallocate(self.fd, max(nbytes, 1), keep_size=True)
                posix.truncate(self.fd, 0)
            except BaseException:
                with contextlib.suppress(OSError):  # release the space that was reserved behind the end
                    posix.truncate(self.fd, os.fstat(self.fd).st_size)
                raise
        self._begun = True

    def _append(self, data: memoryview) -> int:
        if not self.is_synced:
            return os.write(self.fd, data)
        posix.write_fully(self.fd, data, self._nbytes)
        return data.nbytes

    def end(self) -> int:
        """See :meth:`StreamOutput.end`.

        Raises:
            OSError: the file was removed meanwhile, or a save that could replace it has done so.
        """
        self._ended = True
        self._is_gone = self.is_synced and self.has_name and not os.fstat(self.fd).st_nlink
        if self._is_gone:
            raise OSError(errno.ESTALE, "the file that was written in place was replaced or removed meanwhile")
        return super().end()

    def replace(self, *, durable: bool, free_later: bool = True) -> Freeing:
        """Make the name of the file durable, too, if the file was empty: somebody may have created it just now."""
        if durable and self.is_synced and not self.nbytes:
            posix.sync_directory(os.path.dirname(self.path))
        return super().replace(durable=durable, free_later=free_later)

    def left(self) -> str:
        if self._is_gone:
            return f"what was written is gone; if anything has taken its place, that is at {self.path}"
        if self._ended:
            return "all of it was written in place, but a power failure may cut it off"
        if not self._begun or (self.is_synced and not self.nbytes):
            return kept_at(self.path)
        return "the file was written in place and holds a part of the new contents"

    def close(self) -> None:
        """Close the file. A file that was empty is made empty again unless everything was written.

        Raises:
            OSError: the file could not be closed, so what was written to it may be lost.
        """
        if self._begun and not self._ended and self.is_synced and not self.nbytes:
            with contextlib.suppress(OSError):  # the error that led here says more
                posix.truncate(self.fd, 0)
        posix.unlock(self.fd)
        os.close(self.fd)


class OpenFile(StreamOutput):
    """An open binary file, from its position on. The caller closes it.

    Raises:
        CheckpointWriteError: it is not open for writing, or takes texts.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        super().__init__(name)
        if isinstance(file, io.TextIOBase) or not can(file, "writable", "write"):
            message = "cannot save: expected a file opened in mode 'wb', found something else"
            error = CheckpointWriteError(errno.EINVAL, message, name)
            raise caught_as(error, TypeError if isinstance(file, io.TextIOBase) else io.UnsupportedOperation)
        self._file = file

    def _append(self, data: memoryview) -> int | None:
        written: int | None = self._file.write(data)
        if written is None and not isinstance(self._file, io.RawIOBase):
            return data.nbytes  # against the protocol, but torch.save accepts such files, too
        return written

    def end(self) -> int:
        if hasattr(self._file, "flush"):
            self._file.flush()
        return super().end()

    def left(self) -> str:
        return "the open file holds a part of it"
