"""Replacing a file atomically and durably, and cleaning up after processes that died while doing so.

New contents go to a temporary file in the target's directory, which is synced and renamed over the target; then the
directory is synced. A crash at any instant leaves the old file or the new one, whole. The writer holds a ``flock`` on
its temporary, which the kernel drops when the process dies: that tells a leftover from a file that is being written,
also between containers that do not see each other's processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastensor.backends import posix
from fastensor.errors import CheckpointWriteError

_TOKEN_NBYTES = 6
_NAME_MAX = 255
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Target:
    """Where a save ends up."""

    path: str
    """The file that is replaced: the path given, with symlinks followed."""
    previous: os.stat_result | None
    """What was there before."""

    @property
    def directory(self) -> str:
        return os.path.dirname(self.path)


def resolve_target(path: str | os.PathLike[str], *, follow_symlinks: bool = True) -> Target:
    """Find out which file a save to ``path`` replaces, and refuse what must not be replaced.

    Args:
        path: as given by the user.
        follow_symlinks: whether a symlink's target is replaced, or the link itself.

    Raises:
        CheckpointWriteError: the path is a directory, a device or a pipe, a symlink loop, or its directory is missing.
    """
    given = os.fspath(path)
    if not isinstance(given, str):
        raise TypeError(f"expected a path of type str or os.PathLike[str], found {type(given).__name__}")
    if follow_symlinks:
        real = os.path.realpath(given)
    else:
        directory, name = os.path.split(os.path.abspath(given))
        real = os.path.join(os.path.realpath(directory), name)
    try:
        previous = os.stat(real, follow_symlinks=False)
    except FileNotFoundError:
        previous = None
    except OSError as error:
        raise _failure(error, "cannot look at the target", given) from error
    if previous is not None and stat.S_ISLNK(previous.st_mode) and not follow_symlinks:
        previous = None
    if previous is not None and not stat.S_ISREG(previous.st_mode):
        kind = "a directory" if stat.S_ISDIR(previous.st_mode) else "not a regular file"
        code = errno.EISDIR if stat.S_ISDIR(previous.st_mode) else errno.EINVAL
        raise CheckpointWriteError(code, f"cannot save: the target is {kind}; give the path of a file", given)
    try:
        os.stat(os.path.dirname(real))
    except FileNotFoundError as error:
        raise CheckpointWriteError(
            error.errno, "cannot save: its directory is missing; create it first", given
        ) from error
    except OSError as error:
        raise _failure(error, "cannot look at the target's directory", given) from error
    return Target(real, previous)


@dataclass(slots=True)
class Temporary:
    """A file that is to take a target's place. It has to be closed: nothing happens by itself, least of all in a child
    that was forked meanwhile."""

    fd: int
    name: str
    target: Target
    published: bool = False
    """Whether it has."""

    def close(self) -> None:
        """Remove it, unless it was published.

        Raises:
            CheckpointWriteError: the file could not be closed.
        """
        with contextlib.suppress(OSError):  # it has taken the target's place, or the filesystem is gone
            os.unlink(self.name)
        try:
            os.close(self.fd)
        except OSError as error:
            outcome = "the new file is in place" if self.published else "what was there before is kept"
            raise _failure(error, f"closing the file that was written failed; {outcome}", self.target.path) from error


def open_temporary(target: Target) -> Temporary:
    """A locked, empty file beside the target.

    Raises:
        CheckpointWriteError: the directory does not let files be created.
    """
    _remove_leftovers(target)
    try:
        return _create_temporary(target)
    except OSError as error:
        raise _failure(error, "cannot create a temporary file in the target's directory", target.path) from error


def copy_ownership(temporary: Temporary) -> None:
    """Give the new file the mode, and where allowed the owner, of the one that it replaces. To be done before syncs.

    Where it cannot have the same group, no group gets rights: the old one's are not for another.
    """
    previous = temporary.target.previous
    if previous is None:
        return
    current = os.fstat(temporary.fd)
    mode = stat.S_IMODE(previous.st_mode)
    if (current.st_uid, current.st_gid) != (previous.st_uid, previous.st_gid) and not (
        _change_owner(temporary.fd, previous.st_uid, previous.st_gid)
        or current.st_gid == previous.st_gid
        or _change_owner(temporary.fd, -1, previous.st_gid)
    ):
        mode &= ~stat.S_IRWXG
    if stat.S_IMODE(current.st_mode) != mode:  # filesystems without modes refuse even what changes nothing
        os.fchmod(temporary.fd, mode)


def _change_owner(fd: int, uid: int, gid: int) -> bool:
    """Whether that was allowed; containers and network filesystems refuse it in several ways."""
    try:
        os.fchown(fd, uid, gid)
    except OSError:
        return False
    return True


def publish(temporary: Temporary, *, durable: bool) -> None:
    """Rename a finished temporary over its target and make the name durable.

    Raises:
        OSError: a call failed; ``temporary.published`` tells whether it has taken the target's place.
    """
    target = temporary.target
    with _keeping_open(target.path):
        os.rename(temporary.name, target.path)
        temporary.published = True
        if durable:
            posix.sync_directory(target.directory)


def replace_link(target: str, link: str) -> None:
    """Make ``link`` a symlink to ``target``, relative to its own directory, in place of whatever file it is.

    Durable, and at every instant there is the old link or the new one.
    """
    directory = os.path.dirname(os.path.abspath(link))
    temporary = _stem(Target(os.path.abspath(link), None)) + secrets.token_hex(_TOKEN_NBYTES) + posix.TEMPORARY_SUFFIX
    os.symlink(os.path.relpath(os.path.abspath(target), directory), temporary)
    try:
        os.rename(temporary, link)
    except BaseException:
        os.unlink(temporary)
        raise
    posix.sync_directory(directory)


def wait_for_writers(path: str, seconds: float) -> bool:
    """Wait until no process is about to replace a file, or a link but not its target; False if it takes longer.

    They are known by their temporaries, which they lock: seen from other machines where the filesystem shares locks.
    """
    pattern = glob.escape(_stem(Target(os.path.abspath(path), None))) + "*" + posix.TEMPORARY_SUFFIX
    deadline = time.monotonic() + seconds
    while any(_is_locked(name) for name in glob.glob(pattern)):
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
    with _keeping_open(path):
        os.unlink(path)


@contextmanager
def _keeping_open(path: str) -> Iterator[None]:
    """Let a thread free the space of a file that loses its name in the block.

    The filesystem does so when a nameless file is closed, which takes ext4 about 0.1 s per GiB that nobody needs to
    wait for, and which would hold up a sync. Exits wait for the thread; the kernel closes a killed process's files.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # not there, not readable, or a link: nothing to keep
        yield
        return
    try:
        yield
    finally:
        closing = threading.Thread(target=posix.close_read_only, args=(fd,), name="fastensor-free")
        try:
            closing.start()
        except RuntimeError:  # no thread can be started any more
            posix.close_read_only(fd)
        else:
            _freeing.append(closing)


_freeing: deque[threading.Thread] = deque()


def wait_for_space() -> None:
    """Return when the space of all files replaced or removed so far in this process has been freed."""
    with contextlib.suppress(IndexError):  # empty, or emptied by another thread
        while True:
            _freeing.popleft().join()


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


def _stem(target: Target) -> str:
    """What all temporaries of a target begin with: its name, shortened if the filesystem would not take it."""
    name = os.path.basename(target.path)
    room = _NAME_MAX - len(posix.TEMPORARY_SUFFIX) - 2 * _TOKEN_NBYTES - 2
    if len(os.fsencode(name)) > room:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return os.path.join(target.directory, f".{name}.")


def _create_temporary(target: Target) -> Temporary:
    mode = 0o666 if target.previous is None else 0o600  # until it has the mode of the file that it replaces
    while True:
        name = _stem(target) + secrets.token_hex(_TOKEN_NBYTES) + posix.TEMPORARY_SUFFIX
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            if posix.try_lock(fd) and os.fstat(fd).st_nlink:
                return Temporary(fd, name, target)
        except BaseException:
            os.close(fd)
            os.unlink(name)
            raise
        os.close(fd)  # another save took it for a leftover in the instant before it was locked: try another name
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _remove_leftovers(target: Target) -> None:
    """Remove temporaries of this target whose writers are dead."""
    for name in glob.glob(glob.escape(_stem(target)) + "*" + posix.TEMPORARY_SUFFIX):
        token = name[len(_stem(target)) : -len(posix.TEMPORARY_SUFFIX)]
        if len(token) != 2 * _TOKEN_NBYTES or set(token) - set("0123456789abcdef"):
            continue
        posix.remove_leftover(name)


def _failure(error: OSError, what: str, path: str) -> CheckpointWriteError:
    return CheckpointWriteError(error.errno, f"{what}: {error.strerror}", path)
