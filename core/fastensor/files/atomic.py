"""Atomic replacement: at every instant a name leads to the old file or to the new one, whole.

A new file has no name while it is written (``O_TMPFILE``), so a process that is killed leaves nothing behind.
``linkat`` gives the file its name. Where another file has that name, the new file first gets a hidden name, for the
instant until the rename. Where the filesystem has no nameless files, the new file has a hidden name from the start.

Hidden names are numbered and made from the target's name, and a process locks its file (``flock``) as long as the
process lives, which other containers see as well. So the next writer of the same target finds the file of a killed
process without listing the folder, and removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Self

from fastensor.files import posix
from fastensor.files.os_errors import kept_at, write_errors

LEFTOVER_SECONDS = 3600.0
"""A younger file may belong to another machine, whose locks are not seen on every filesystem."""
_DIGITS = 16
_HIDDEN = rf"\.[0-9a-f]{{{_DIGITS}}}\.\d+{re.escape(posix.TEMPORARY_SUFFIX)}"


class NewFile:
    """A new, locked, empty file that :meth:`publish` gives the name ``path``.

    Use it in ``with``, or close it: if it was not published, nothing is left of it. Use it in one thread at a time.

    Args:
        path: the absolute path of the target.
        mode: the mode of the file, as for ``os.open``.
        hidden: give the file a hidden name from the start, by which other processes see that the path is being
            written. Otherwise it has one only where the filesystem has no nameless files.

    Raises:
        OSError: the directory does not let files be created.
    """

    replaces = False
    """True if a file was at the path when this one was made, so that the name is likely to be taken."""

    def __init__(self, path: str, *, mode: int = 0o666, hidden: bool = False) -> None:
        self.path = path
        self.published = False
        """True once the file has taken the target's place."""
        self._names: list[str] = []
        """Names that may lead to the file."""
        directory = os.path.dirname(path)
        fd = None if hidden else posix.try_nameless(directory, mode)
        if fd is None:
            _remove_old_leftovers(directory)
            fd = self._create_hidden(mode)
        self.fd = fd
        self._lock_if_nameless()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close()

    @property
    def hidden_name(self) -> str:
        """The name of a file that has had one from the start, until it is published."""
        (name,) = self._names
        return name

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all of ``data`` at an offset."""
        posix.write_fully(self.fd, data, offset)

    def publish(self, *, durable: bool = False) -> None:
        """Give the file its name, and replace the file that has the name.

        Args:
            durable: whether the name is durable then. The caller has synced the file.

        Raises:
            OSError: the filesystem refused; :attr:`published` says whether the file has taken its place all the same.
        """
        self._take_name()
        self.published = True
        if durable:
            posix.sync_directory(os.path.dirname(self.path))

    def _take_name(self) -> None:
        if not self._names:
            if not self.replaces and self._link(self.path):
                return
            self._link_hidden()
        if not leads_to(self._names[-1], self.fd):
            what = "it was removed or replaced, perhaps by another machine, which does not see our locks"
            raise OSError(errno.ESTALE, what, self._names[-1])
        os.rename(self._names[-1], self.path)

    def left(self) -> str:
        """Words for what is at the path after a failure."""
        if self.published:
            return "the new file is in place, but a power failure may bring back what was there before"
        return kept_at(self.path)

    def close(self) -> None:
        """Close the file, and remove it unless it was published.

        Raises:
            OSError: the file could not be closed, so what was written to it may be lost.
        """
        if not self.published:
            self._remove()
        posix.unlock(self.fd)
        os.close(self.fd)

    def _create_hidden(self, mode: int) -> int:
        fds: list[int] = []

        def create(name: str) -> bool:
            try:
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            except FileExistsError:
                return False
            if self._keep(fd, name):
                fds.append(fd)
                return True
            os.close(fd)  # another writer took the file for a leftover before it was locked, and removes it
            return False

        _claim(self.path, create)
        return fds[0]

    def _keep(self, fd: int, name: str) -> bool:
        """Lock a file that was just created. Returns whether the file is still there."""
        self._names = [name]
        try:
            if posix.try_lock(fd) and os.fstat(fd).st_nlink:
                return True
        except BaseException:
            with contextlib.suppress(OSError):
                if leads_to(name, fd):
                    os.unlink(name)
            os.close(fd)
            raise
        self._names = []
        return False

    def _lock_if_nameless(self) -> None:
        if not self._names:
            try:
                posix.try_lock(self.fd)  # no other process knows the file
            except BaseException:
                posix.close_read_only(self.fd)
                raise

    def _link_hidden(self) -> None:
        """Give the file the first hidden name for the target that no living process has."""
        _claim(self.path, self._link)

    def _link(self, name: str) -> bool:
        """Give the file a name. Returns False if another file has the name."""
        self._names.append(name)
        try:  # with src_dir_fd Python calls linkat, which can follow the link that /proc shows
            os.link(f"/proc/self/fd/{self.fd}", name, src_dir_fd=self.fd)
        except FileExistsError:
            self._names.pop()
            return False
        return True

    def _remove(self) -> None:
        for name in self._names:
            with contextlib.suppress(OSError):  # the file is not there, or may not be removed
                if leads_to(name, self.fd):
                    os.unlink(name)


@contextmanager
def new_file(path: str, what: str) -> Iterator[NewFile]:
    """A :class:`NewFile`, to be published in the block.

    Raises:
        CheckpointWriteError: the operating system refused something; ``what`` failed. It says what is at the path.
    """
    with write_errors(path, what, lambda: kept_at(path)):
        new = NewFile(path)
    with write_errors(path, what, new.left), new:
        yield new


def replace_contents(path: str, data: bytes) -> None:
    """Replace a file, or create it. Other processes see the old contents or the new; a power failure may lose both.

    Raises:
        OSError: the file could not be replaced; the old contents are kept.
    """
    new = NewFile(path)
    try:
        new.write_at(memoryview(data), 0)
        os.close(os.dup(new.fd))  # network filesystems report failed writes when a descriptor is closed
        new.publish()
    finally:
        with contextlib.suppress(OSError):
            new.close()


def announce_writer(path: str) -> NewFile:
    """A hidden file that shows other processes of this machine, until it is closed, that a file is being written."""
    return NewFile(os.path.abspath(path), mode=0o600, hidden=True)


def wait_for_writers(path: str, seconds: float) -> bool:
    """Wait while any process has announced (:func:`announce_writer`) that it is writing the file at ``path``.

    A symlink is a file of its own here: announcements for its target do not count.

    Writers of other machines are seen where the filesystem shares locks.

    Returns:
        False if that takes longer than ``seconds``.
    """
    from fastensor.files.job_store import wait_until  # the first save needs nothing of it

    pattern = f"{glob.escape(_stem(os.path.abspath(path)))}*{posix.TEMPORARY_SUFFIX}"
    return wait_until(lambda: not any(map(_is_locked, glob.glob(pattern))), seconds)


def _is_locked(name: str) -> bool:
    try:
        fd = _open_to_lock(name)
    except OSError:  # the file has just taken its target's place
        return False
    try:
        return not posix.try_lock(fd, shared=True)
    except OSError:  # the filesystem refuses to say
        return False
    finally:
        posix.close_read_only(fd)


def leads_to(name: str, fd: int) -> bool:
    """True if a name, which is no symlink, is that of an open file or directory."""
    try:
        return os.path.samestat(os.lstat(name), os.fstat(fd))
    except FileNotFoundError:
        return False


@lru_cache(maxsize=64)
def _stem(path: str) -> str:
    """The beginning of all hidden names for a target: short, so that no filesystem's limit on names is met."""
    directory, name = os.path.split(path)
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:_DIGITS]
    return os.path.join(directory, f".{digest}.")


def hidden_names(path: str) -> Iterator[str]:
    """The hidden names for a target, in the order in which new files take them."""
    return (f"{_stem(path)}{number}{posix.TEMPORARY_SUFFIX}" for number in itertools.count())


def _claim(path: str, take: Callable[[str], bool]) -> None:
    """Take the first hidden name that no living process has."""
    for name in hidden_names(path):
        if take(name):
            return
        _remove_leftover(name)
        if take(name):
            return


def _open_to_lock(path: str) -> int:
    """Open a file, which may belong to another user, to find out whether a process locks it.

    Raises:
        OSError: the path is a link, or missing, or may not be opened.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_RDWR)  # NFS locks only files that are open for writing
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY)  # the writer may have made the file read-only


def _remove_leftover(path: str, unchanged_seconds: float | None = None) -> None:
    """Remove a temporary file if no process locks it: its writer was killed.

    The file stays if it is locked, if this user may not open it, and on a filesystem without locks. Only the process
    that has locked a file may remove the file's name.

    Args:
        path: the path of the file.
        unchanged_seconds: keep a file that was written to in this time. None relies on the lock alone.
    """
    with contextlib.suppress(OSError):
        fd = _open_to_lock(path)
        try:
            if unchanged_seconds is None or os.fstat(fd).st_mtime < time.time() - unchanged_seconds:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.lstat(path), os.fstat(fd)):  # else the name leads to another file by now
                    os.unlink(path)
        finally:
            posix.close_read_only(fd)


@cache
def _remove_old_leftovers(directory: str) -> None:
    """Remove the files that killed processes have left for any target. Once for each directory and process."""
    with contextlib.suppress(OSError):  # the directory may not be listed
        for name in os.listdir(directory):
            if re.fullmatch(_HIDDEN, name):
                _remove_leftover(os.path.join(directory, name), LEFTOVER_SECONDS)
