"""The target of a save: replaced by a new file, atomically and durably, or written in place.

New contents go to a new file in the target's directory, which is synced and takes the target's name; then the directory
is synced. A crash at any instant leaves the old file or the new one, whole.

A target is written in place, as ``torch.save`` does, where a replacement would change more than the contents or is
refused: the target was given by its descriptor, is no regular file, is empty, is mounted by itself, is in a directory
that may not be written, or has an owner or rights that a new file cannot have. All of this is found out before the
first byte is written. A file that may not be written is not replaced either.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial

from fastensor.checkpoint.freeing import Freeing, freeing_afterwards
from fastensor.errors import CheckpointWriteError
from fastensor.files import posix
from fastensor.files.atomic import NewFile
from fastensor.files.os_errors import kept_at, write_error, write_errors

_MOST_LINKS = 40
_DESCRIPTORS = re.compile(r"/proc/\d+(/task/\d+)?/fd")
_NOT_POSSIBLE = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors by which systems refuse an operation on a file for good, whatever space and time there is."""


@dataclass(frozen=True, slots=True)
class Target:
    """The file that a save writes."""

    path: str
    """The given path, with symlinks followed."""
    is_descriptor: bool = False
    """True if the path names an open file of this process: ``/dev/fd/3``, ``/proc/self/fd/3``."""

    @property
    def directory(self) -> str:
        return os.path.dirname(self.path)


def resolve_target(path: str | os.PathLike[str], *, follow_symlinks: bool = True) -> Target:
    """The file that a save to ``path`` writes.

    Args:
        path: the path that the user gave.
        follow_symlinks: whether a symlink's target is replaced, or the link itself.

    Raises:
        CheckpointWriteError: nothing can be saved there: the path is a directory, or a symlink loop, or the path's
            directory is missing.
    """
    given = os.fspath(path)
    if not isinstance(given, str):
        raise TypeError(f"expected a path of type str or os.PathLike[str], found {type(given).__name__}")
    if given.endswith("/"):
        raise CheckpointWriteError(
            errno.EISDIR,
            "cannot save: the path ends with a slash, so it names no file; give that of a file",
            given,
        )
    try:
        real, found, is_descriptor = _resolve(given, follow_symlinks=follow_symlinks)
    except FileNotFoundError as error:
        raise CheckpointWriteError(
            error.errno, "cannot save: its directory is missing; create it first", given
        ) from error
    except OSError as error:
        raise write_error(error, given, "cannot look at the target") from error
    if found is None and is_descriptor:
        raise CheckpointWriteError(errno.EBADF, "cannot save: no file is open under this descriptor", given)
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise CheckpointWriteError(
            errno.EISDIR, "cannot save: the target is a directory; give the path of a file", given
        )
    return Target(real, is_descriptor)


def _resolve(given: str, *, follow_symlinks: bool) -> tuple[str, os.stat_result | None, bool]:
    """Resolved path, the status of the file there, and whether the path names a descriptor.

    Raises:
        FileNotFoundError: the directory is missing.
        OSError: the path cannot be looked at, or its symlinks lead in a circle.
    """
    path = given
    for _ in range(_MOST_LINKS):
        directory, name = os.path.split(path)
        directory = os.path.realpath(directory or os.curdir, strict=True)
        path = os.path.join(directory, name)
        is_descriptor = _DESCRIPTORS.fullmatch(directory) is not None
        try:
            found = os.stat(path, follow_symlinks=is_descriptor)
        except FileNotFoundError:
            return path, None, is_descriptor
        if not stat.S_ISLNK(found.st_mode):
            return path, found, is_descriptor
        if not follow_symlinks:
            return path, None, False
        path = os.path.join(directory, os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


class InPlace:
    """A target that is written from front to back. The caller closes it. Use it in one thread at a time.

    Args:
        target: an existing file, which is opened, and locked if it is a regular file.
        why: why the file is not replaced; empty if the file is empty, so that a replacement would protect nothing.

    Raises:
        OSError: the file may not be written.
        BlockingIOError: the file is locked: another process, thread or save may be writing to it.
    """

    def __init__(self, target: Target, why: str) -> None:
        self.path = target.path
        self.why = why
        self.begun = False
        """Whether the old contents are gone."""
        self.fd = os.open(target.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            self.is_file = stat.S_ISREG(os.fstat(self.fd).st_mode)
            if self.is_file and not posix.try_lock(self.fd):
                raise BlockingIOError(errno.EAGAIN, "it is locked: another process or save may be writing to it")
            status = os.fstat(self.fd)
            self.nbytes = status.st_size
            """Size of the old contents."""
            self.has_name = status.st_nlink > 0
        except BaseException:
            posix.close_read_only(self.fd)
            raise
        self._position = 0
        self.finished = False
        """Whether everything was written."""

    def begin(self, nbytes: int) -> None:
        """Drop the old contents, if there is room for ``nbytes`` bytes.

        Raises:
            OSError: there is no room; the old contents are kept.
        """
        if self.is_file:
            self.nbytes = os.fstat(self.fd).st_size
            try:
                posix.preallocate(self.fd, max(nbytes, 1), keep_size=True)
                posix.truncate(self.fd, 0)
            except BaseException:
                with contextlib.suppress(OSError):  # release the space that was reserved behind the end
                    posix.truncate(self.fd, os.fstat(self.fd).st_size)
                raise
        self.begun = True

    def write(self, data: memoryview) -> int:
        """Append all of ``data``; returns the number of bytes."""
        if self.is_file:
            posix.write_fully(self.fd, data, self._position)
        else:
            at = 0
            while at < data.nbytes:
                at += os.write(self.fd, data[at:])
        self._position += data.nbytes
        return data.nbytes

    def finish(self) -> None:
        """Note that everything was written."""
        self.finished = True

    def close(self) -> None:
        """Close the file. A file that was empty is made empty again unless everything was written.

        Raises:
            OSError: the file could not be closed, so what was written to it may be lost.
        """
        if self.begun and not self.finished and self.is_file and not self.nbytes:
            with contextlib.suppress(OSError):  # the error that led here says more
                posix.truncate(self.fd, 0)
        posix.unlock(self.fd)
        os.close(self.fd)


def open_output(target: Target, *, hidden: bool = False) -> NewFile | InPlace:
    """Open the file that a save writes to: a new file that will replace the target, or the target itself.

    A new file has the owner, the mode, ACLs, labels and ``user.*`` attributes of the file that it will replace.

    Args:
        target: the target.
        hidden: as for :class:`~fastensor.files.atomic.NewFile`.

    Raises:
        CheckpointWriteError: the target can neither be replaced nor written in place. Nothing has been changed.
    """
    with write_errors(target.path, "cannot save", partial(kept_at, target.path)):
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(target.path, follow_symlinks=target.is_descriptor)
            if not stat.S_ISLNK(found.st_mode):
                return _open_existing(target, found, hidden=hidden)
        return NewFile(target.path, hidden=hidden)


def _open_existing(target: Target, previous: os.stat_result, *, hidden: bool) -> NewFile | InPlace:
    _check_writable(target)
    if stat.S_ISREG(previous.st_mode) and not previous.st_size:
        found = _open_if_empty(target)
        if found is not None:
            return found
    new, why = _try_to_replace(target, previous, hidden=hidden)
    return InPlace(target, why) if new is None else new


def _check_writable(target: Target) -> None:
    try:
        posix.check_writable(target.path)
    except PermissionError as error:
        raise PermissionError(
            error.errno, f"{error.strerror}: the file may not be written; save under another name, or change its mode"
        ) from error


def _open_if_empty(target: Target) -> InPlace | None:
    """Open an empty file in place, so that programs that have the file open see what is saved. None if the file is no
    longer empty, or gone."""
    try:
        found = InPlace(target, why="")
    except BlockingIOError:
        return None
    if found.nbytes or not (found.has_name or target.is_descriptor):
        found.close()
        return None
    return found


def _try_to_replace(target: Target, previous: os.stat_result, *, hidden: bool) -> tuple[NewFile | None, str]:
    """A new file with the rights of the old one; or None, and why there cannot be one."""
    if why := _why_not_renamed(target, previous):
        return None, why
    try:
        new = NewFile(target.path, mode=0o600, hidden=hidden)
    except OSError as error:
        if error.errno not in _NOT_POSSIBLE:
            raise
        return None, f"its directory lets no files be created ({error.strerror})"
    try:
        _copy_rights(new.fd, target.path, previous)
    except BaseException as error:
        new.close()
        if not isinstance(error, OSError) or error.errno not in _NOT_POSSIBLE:
            raise
        return None, f"a new file cannot be given its owner and rights ({error.strerror})"
    return new, ""


def _why_not_renamed(target: Target, previous: os.stat_result) -> str:
    """Reason for which another file cannot take the target's name; empty if no reason is known."""
    if target.is_descriptor:
        return "it was given by its descriptor, whose other users are to see what is saved"
    if not stat.S_ISREG(previous.st_mode):
        return "it is a pipe or a device"
    if posix.is_mounted_by_itself(target.path):
        return "it is mounted by itself"
    folder = os.stat(target.directory)
    if folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid, previous.st_uid):
        return "its directory lets only its owner replace it (the sticky bit)"
    return ""


def _copy_rights(fd: int, path: str, previous: os.stat_result) -> None:
    """Give a new file the owner, the mode and the attributes of the old one.

    Raises:
        OSError: the filesystem or the user's rights do not allow that.
    """
    current = os.fstat(fd)
    if (current.st_uid, current.st_gid) != (previous.st_uid, previous.st_gid):
        os.fchown(fd, previous.st_uid, previous.st_gid)
    wanted, found = posix.attributes_of(path), posix.attributes_of(fd)
    for name in found.keys() - wanted.keys():
        os.removexattr(fd, name)
    for name, value in wanted.items():
        if found.get(name) != value:
            os.setxattr(fd, name, value)
    mode = stat.S_IMODE(previous.st_mode)
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:  # filesystems without modes refuse every call
        os.fchmod(fd, mode)


def publish(new: NewFile, *, durable: bool, free_later: bool = True) -> Freeing:
    """Let a finished file take the target's place, and make the name durable.

    Args:
        free_later: whether a thread frees the space of the old file; else the filesystem does so at once.

    Returns:
        The space of the old file, which another thread frees; nothing if ``free_later`` is False.

    Raises:
        OSError: a call failed; ``new.published`` says whether the file has taken the target's place.
    """
    with freeing_afterwards(new.path) if free_later else nullcontext(Freeing()) as freeing:
        new.publish()
        if durable:
            posix.sync_directory(os.path.dirname(new.path))
    return freeing


def write_text(path: str, text: str) -> None:
    """Write a text to a file as :func:`fastensor.save` writes a checkpoint, but without syncing.

    Raises:
        OSError: the file could not be written.
    """
    data = memoryview(text.encode())
    with closing(open_output(resolve_target(path))) as output:
        if isinstance(output, NewFile):
            posix.write_fully(output.fd, data, 0)
            publish(output, durable=False)
        else:
            output.begin(data.nbytes)
            output.write(data)
            output.finish()
