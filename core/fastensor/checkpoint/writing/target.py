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
from contextlib import closing
from functools import partial

from fastensor.checkpoint.location import Target
from fastensor.checkpoint.writing.outputs import InPlace, Replacement
from fastensor.errors import CheckpointWriteError
from fastensor.files import posix
from fastensor.files.os_errors import kept_at, write_error, write_errors

_DESCRIPTORS = re.compile(r"/proc/\d+(/task/\d+)?/fd")
_NOT_POSSIBLE = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors by which systems refuse an operation on a file for good, whatever space and time there is."""


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
    for path in posix.names_along(given, strict=True):
        is_descriptor = _DESCRIPTORS.fullmatch(os.path.dirname(path)) is not None
        if is_descriptor or not follow_symlinks:
            break
    try:
        found = os.stat(path, follow_symlinks=is_descriptor)
    except FileNotFoundError:
        return path, None, is_descriptor
    if not stat.S_ISLNK(found.st_mode):
        return path, found, is_descriptor
    if follow_symlinks:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return path, None, False


def open_output(target: Target, *, hidden: bool = False) -> Replacement | InPlace:
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
        return Replacement(target.path, hidden=hidden)


def _open_existing(target: Target, previous: os.stat_result, *, hidden: bool) -> Replacement | InPlace:
    try:
        posix.check_writable(target.path)
    except PermissionError as error:
        raise PermissionError(
            error.errno, f"{error.strerror}: the file may not be written; save under another name, or change its mode"
        ) from error
    if stat.S_ISREG(previous.st_mode) and not previous.st_size:
        found = _open_if_empty(target)
        if found is not None:
            return found
    new, why = _try_to_replace(target, previous, hidden=hidden)
    return InPlace(target.path, why) if new is None else new


def _open_if_empty(target: Target) -> InPlace | None:
    """Open an empty file in place, so that programs that have the file open see what is saved. None if the file is no
    longer empty, or gone."""
    try:
        found = InPlace(target.path, "")
    except BlockingIOError:
        return None
    if found.nbytes or not (found.has_name or target.is_descriptor):
        found.close()
        return None
    return found


def _try_to_replace(target: Target, previous: os.stat_result, *, hidden: bool) -> tuple[Replacement | None, str]:
    """A new file with the rights of the old one; or None, and why there cannot be one."""
    if why := _why_not_renamed(target, previous):
        return None, why
    try:
        new = Replacement(target.path, mode=0o600, hidden=hidden)
    except OSError as error:
        if error.errno not in _NOT_POSSIBLE:
            raise
        return None, f"its directory lets no files be created ({error.strerror})"
    try:
        _copy_rights(new.fd, target.path, previous)
        new.replaces, new.replaced_nbytes = True, previous.st_size
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


def write_text(path: str, text: str) -> None:
    """Write a text to a file as :func:`fastensor.save` writes a checkpoint, but without syncing.

    Raises:
        OSError: the file could not be written.
    """
    data = memoryview(text.encode())
    with closing(open_output(resolve_target(path))) as output:
        output.begin(0)  # space is reserved in whole blocks, which a backend would cut off
        output.write_at(data, 0)
        output.end()
        output.replace(durable=False)
