"""Taking a file's place: atomically and durably, or in place where that cannot be.

New contents go to a new file in the target's directory, which is synced and takes the target's name; then the directory
is synced. A crash at any instant leaves the old file or the new one, whole.

Where that would change more than the contents, or is refused, the file is written in place, as ``torch.save`` does: it
has been given by its descriptor, is no regular file, is empty, is mounted by itself, is in a directory that may not be
written, or has an owner or rights that a new file cannot have. All of this is found out before the first byte is
written. A file that may not be written is not replaced either.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass

from fastensor.backends import posix
from fastensor.backends.new_file import NewFile, names_of_writers
from fastensor.checkpoint.freeing import Freeing, freeing_afterwards
from fastensor.errors import CheckpointWriteError

_MOST_LINKS = 40
_DESCRIPTORS = re.compile(r"/proc/\d+(/task/\d+)?/fd")
_POLL_SECONDS = 0.01
_KEPT = "what was there before is kept"
_NOT_POSSIBLE = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""How systems say that something cannot be done with a file, be there room and time."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a save ends up."""

    path: str
    """The file that is replaced, or written in place: the path given, with symlinks followed."""
    is_descriptor: bool = False
    """Whether the path is that of somebody's open file: ``/dev/fd/3``, ``/proc/self/fd/3``."""

    @property
    def directory(self) -> str:
        return os.path.dirname(self.path)


def resolve_target(path: str | os.PathLike[str], *, follow_symlinks: bool = True) -> Target:
    """Find out which file a save to ``path`` ends up in, and refuse what cannot be one.

    Args:
        path: as given by the user.
        follow_symlinks: whether a symlink's target is replaced, or the link itself.

    Raises:
        CheckpointWriteError: the path is a directory, or a symlink loop, or its directory is missing.
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
        raise _failure(error, "cannot look at the target", given) from error
    if found is None and is_descriptor:
        raise CheckpointWriteError(errno.EBADF, "cannot save: no file is open under this descriptor", given)
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise CheckpointWriteError(
            errno.EISDIR, "cannot save: the target is a directory; give the path of a file", given
        )
    return Target(real, is_descriptor)


def _resolve(given: str, *, follow_symlinks: bool) -> tuple[str, os.stat_result | None, bool]:
    """Where a path leads, what is there, and whether it is the path of a descriptor.

    Raises:
        FileNotFoundError: its directory is missing.
        OSError: it cannot be looked at, or its symlinks lead in a circle.
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
    """A target that is written from front to back, as it is. To be closed. Used by one thread at a time.

    Args:
        target: something that is there. It is opened, and locked if it is a regular file.
        why: it is not replaced; empty if there is nothing in it that an atomic replacement could keep.

    Raises:
        OSError: it may not be written.
        BlockingIOError: another process has locked it, perhaps because it writes to it.
    """

    def __init__(self, target: Target, why: str) -> None:
        self.path = target.path
        self.why = why
        self.begun = False
        """Whether what was there before is gone."""
        self.fd = os.open(target.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            self.is_file = stat.S_ISREG(os.fstat(self.fd).st_mode)
            if self.is_file and not posix.try_lock(self.fd):
                raise BlockingIOError(errno.EAGAIN, "another process has locked it, perhaps to write to it")
            status = os.fstat(self.fd)
            self.nbytes = status.st_size
            """What is in it, or was until it was dropped."""
            self.has_name = status.st_nlink > 0
        except BaseException:
            posix.close_read_only(self.fd)
            raise
        self._position = 0
        self.finished = False
        """Whether all was written."""

    def begin(self, nbytes: int) -> None:
        """Drop what was there before, if there is room for so many bytes.

        Raises:
            OSError: there is not; then what was there before is kept.
        """
        if self.is_file:
            self.nbytes = os.fstat(self.fd).st_size
            try:
                posix.preallocate(self.fd, max(nbytes, 1), keep_size=True)
                posix.truncate(self.fd, 0)
            except BaseException:
                with contextlib.suppress(OSError):  # give back what was reserved behind the end
                    posix.truncate(self.fd, os.fstat(self.fd).st_size)
                raise
        self.begun = True

    def write(self, data: memoryview) -> int:
        """Write all of it behind what was written before; returns how many bytes."""
        if self.is_file:
            posix.write_fully(self.fd, data, self._position)
        else:
            at = 0
            while at < data.nbytes:
                at += os.write(self.fd, data[at:])
        self._position += data.nbytes
        return data.nbytes

    def finish(self) -> None:
        """All is written."""
        self.finished = True

    def withdraw(self) -> None:
        """Let what is still written go nowhere, and unlock the file. At any instant, in any thread."""
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, self.fd, inheritable=False)
        os.close(null)

    def close(self) -> None:
        """Let go of it. A file that was empty is so again unless all was written.

        Raises:
            OSError: the file could not be closed, so what was written to it may be lost.
        """
        if self.begun and not self.finished and self.is_file and not self.nbytes:
            with contextlib.suppress(OSError):  # the error that is on its way says more
                posix.truncate(self.fd, 0)
        posix.unlock(self.fd)
        os.close(self.fd)


def open_output(target: Target) -> NewFile | InPlace:
    """What a save to the target is to be written to: a new file that will replace it, or the target itself.

    A new file has got the owner, the mode, ACLs, labels and ``user.*`` attributes of the one that it replaces.

    Raises:
        CheckpointWriteError: neither can be done. Nothing has been changed.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(target.path, follow_symlinks=target.is_descriptor)
            if not stat.S_ISLNK(found.st_mode):
                return _open_existing(target, found)
        return NewFile(target.path)
    except OSError as error:
        raise _failure(error, f"cannot save ({_KEPT})", target.path) from error


def _open_existing(target: Target, previous: os.stat_result) -> NewFile | InPlace:
    _check_writable(target)
    if stat.S_ISREG(previous.st_mode) and not previous.st_size:
        found = _open_if_empty(target)
        if found is not None:
            return found
    new, why = _try_to_replace(target, previous)
    return InPlace(target, why) if new is None else new


def _check_writable(target: Target) -> None:
    try:
        posix.check_writable(target.path)
    except PermissionError as error:
        raise PermissionError(
            error.errno, f"{error.strerror}: the file may not be written; save under another name, or change its mode"
        ) from error


def _open_if_empty(target: Target) -> InPlace | None:
    """An empty file is written in place, for whoever has it open; None if it is not empty or there any more."""
    try:
        found = InPlace(target, why="")
    except BlockingIOError:
        return None
    if found.nbytes or not (found.has_name or target.is_descriptor):
        found.close()
        return None
    return found


def _try_to_replace(target: Target, previous: os.stat_result) -> tuple[NewFile | None, str]:
    """A new file with the rights of the old one, or why there cannot be one."""
    if why := _why_not_renamed(target, previous):
        return None, why
    try:
        new = NewFile(target.path, mode=0o600)
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
    """Why another file cannot get its name; empty if nothing is known against it."""
    if target.is_descriptor:
        return "it was given by its descriptor, and whoever has that is to see what is saved"
    if not stat.S_ISREG(previous.st_mode):
        return "it is a pipe or a device"
    if posix.is_mounted_by_itself(target.path):
        return "it is mounted by itself"
    folder = os.stat(target.directory)
    if folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid, previous.st_uid):
        return "its directory lets only its owner replace it (the sticky bit)"
    return ""


def _copy_rights(fd: int, path: str, previous: os.stat_result) -> None:
    """Give a new file the owner, the mode and the attributes of the one that it is to replace.

    Raises:
        OSError: the filesystem, or the user's rights, do not allow that.
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
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:  # filesystems without modes refuse even what changes nothing
        os.fchmod(fd, mode)


def publish(new: NewFile, *, durable: bool, free_later: bool = True) -> Freeing:
    """Let a finished file take its place, and make the name durable.

    Args:
        free_later: whether a thread frees the space of the old file; else the filesystem does so at once.

    Returns:
        The space of what was there before, which is freed afterwards.

    Raises:
        OSError: a call failed; ``new.published`` tells whether it has taken the place.
    """
    with freeing_afterwards(new.path) if free_later else nullcontext(Freeing()) as freeing:
        new.publish()
        if durable:
            posix.sync_directory(os.path.dirname(new.path))
    return freeing


def write_text(path: str, text: str) -> None:
    """Have a file hold a text, as :func:`fastensor.save` puts a checkpoint there, but for syncing.

    Raises:
        OSError: it could not be written.
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


def replace_link(target: str, link: str) -> None:
    """Make ``link`` a symlink to ``target``, relative to its own directory, in place of whatever file it is.

    Durable, and at every instant there is the old link or the new one.
    """
    directory = os.path.dirname(os.path.abspath(link))
    temporary = os.path.join(directory, f".{secrets.token_hex(8)}{posix.TEMPORARY_SUFFIX}")
    os.symlink(os.path.relpath(os.path.abspath(target), directory), temporary)
    try:
        os.rename(temporary, link)
    except BaseException:
        os.unlink(temporary)
        raise
    posix.sync_directory(directory)


def announce_writer(path: str) -> NewFile:
    """A hidden file that tells other processes of this machine, until it is closed, that a file is being written."""
    return NewFile(os.path.abspath(path), mode=0o600, hidden=True)


def wait_for_writers(path: str, seconds: float) -> bool:
    """Wait until no process that has announced it is about to replace a file, or a link but not its target.

    They are known by hidden files, which they lock: seen from other machines where the filesystem shares locks.

    Returns:
        False if it takes longer.
    """
    deadline = time.monotonic() + seconds
    while any(_is_locked(name) for name in names_of_writers(os.path.abspath(path))):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_locked(name: str) -> bool:
    try:
        fd = posix.open_to_lock(name)
    except OSError:  # it has just taken its target's place
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return False
    finally:
        os.close(fd)
    return False


def remove_file(path: str) -> None:
    """Remove a file, or a link but not its target; the space is freed meanwhile."""
    with freeing_afterwards(path):
        os.unlink(path)


def make_directories(path: str | os.PathLike[str], *, durable: bool) -> None:
    """Create a directory and its missing parents."""
    missing = []
    current = os.path.abspath(path)
    while not os.path.isdir(current):
        missing.append(current)
        current = os.path.dirname(current)
    for directory in reversed(missing):
        os.makedirs(directory, exist_ok=True)
        if durable:
            posix.sync_directory(os.path.dirname(directory))


def _failure(error: OSError, what: str, path: str) -> CheckpointWriteError:
    return CheckpointWriteError(error.errno, f"{what}: {error.strerror}", path)
