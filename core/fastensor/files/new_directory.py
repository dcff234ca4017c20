"""Atomic replacement by directories, and of directories by links or nothing: at every instant a name leads to what was
there, or to what is new, whole."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from fastensor.files import posix
from fastensor.files.atomic import LEFTOVER_SECONDS, leads_to
from fastensor.files.forks import in_children

SUFFIX = ".fastensor-saving"
ASIDE_SUFFIX = ".fastensor-replaced"
_DIGITS = 16


class DirectoryInUseError(FileExistsError):
    """Another process fills a directory for the same path, or other work of this process does."""


class NewDirectory:
    """A directory that is filled under another name, and then takes the place of whatever is at its path.

    Several processes may fill it. One of them calls the methods, in one thread at a time. The directory is locked
    (``flock``) until it is published or discarded, so that others know what a killed process has left.

    Args:
        path: the absolute path that the directory is to have. Its parent exists.
        hidden: the absolute path while the directory is filled, on the same filesystem. It follows from ``path``. None
            means a hidden name beside ``path``.
    """

    def __init__(self, path: str, hidden: str | None = None) -> None:
        self.path = path
        self.hidden = _hidden_name(path) if hidden is None else hidden
        """The path while the directory is filled."""
        self.contents = path
        """The path of the directory that has the files in the end."""
        self._aside = _aside_name(self.hidden)
        """The path of what was replaced, where two renames are needed."""
        self._lock: int | None = None
        _filled[os.path.realpath(self.hidden)] = self
        in_children(self, NewDirectory.forget)

    def create(self) -> None:
        """Create the directory, empty, and remove what killed processes have left in its parent. What such a process
        was about to replace gets its path back.

        Raises:
            DirectoryInUseError: another process is filling the directory.
            OSError: the filesystem refused.
        """
        for left in (self.hidden, *_old_leftovers(os.path.dirname(self.path))):
            with contextlib.suppress(FileNotFoundError):  # its own process was faster
                remove_unless_locked(left)
        if not self._make_and_lock():
            raise DirectoryInUseError(errno.EEXIST, "another process is saving to the same path", self.path)
        restore(self._aside, self.path)
        _remove(self._aside)

    @property
    def is_intact(self) -> bool:
        """True if the unpublished directory is the one that was created here: not removed, not replaced."""
        return self._lock is None or leads_to(self.hidden, self._lock)

    @property
    def is_there(self) -> bool:
        """True if a directory, and no link to one, has the path while it is filled, whoever has created it. A network
        filesystem, which may remember what a name was, is asked for the names."""
        parent, name = os.path.split(self.hidden)
        with contextlib.suppress(FileNotFoundError):
            return name in os.listdir(parent) and not os.path.islink(self.hidden)
        return False

    def check(self) -> None:
        """
        Raises:
            OSError: the directory is not intact.
        """
        if not self.is_intact:
            what = "it was removed or replaced, perhaps by another machine, which does not see our locks"
            raise OSError(errno.ESTALE, what, self.hidden)

    def publish(self, *, durable: bool) -> None:
        """Give the directory its path, and remove what was there before.

        That takes one instant, except where the filesystem cannot exchange two names (some network filesystems): there
        is nothing at the path between two renames then, and what was there has a hidden name.

        Args:
            durable: whether everything is on stable storage then.

        Raises:
            OSError: the filesystem refused, or another process has removed the new directory. What was at the path is
                there, unless only its removal has failed.
        """
        self.check()
        if durable:
            posix.sync_tree(self.hidden)
        if replaces := os.path.lexists(self.path):
            _exchange(self.hidden, self.path)
        else:
            os.rename(self.hidden, self.path)
        if durable:
            parent, staging = os.path.dirname(self.path), os.path.dirname(self.hidden)
            posix.sync_directory(parent)
            if staging != parent:
                with contextlib.suppress(FileNotFoundError):  # another process has removed it, now empty
                    posix.sync_directory(staging)
        _remove(self._aside)
        self._unlock()
        if replaces:
            with contextlib.suppress(FileNotFoundError):
                remove_unless_locked(self.hidden)

    def discard(self) -> None:
        """Remove the directory, if it was created here and not published. Calling this again does nothing."""
        if self._lock is not None:
            try:
                _remove_locked(self.hidden, self._lock)
            finally:
                self._unlock()

    def _make_and_lock(self) -> bool:
        """Make the directory, unless it is there, and lock it. False if another process fills or removes it."""
        with contextlib.suppress(FileNotFoundError):  # another process has just removed its parent, which was empty
            os.makedirs(self.hidden, exist_ok=True)
        os.makedirs(self.hidden, exist_ok=True)
        try:
            self._lock = os.open(self.hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        if posix.try_lock(self._lock) and self.is_intact:
            return True
        self._unlock()
        return False

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            posix.unlock(lock)
            posix.close_read_only(lock)

    def forget(self) -> None:
        """In a forked child: the directory is its parent's, whose lock ends with the parent, not with the child."""
        lock, self._lock = self._lock, None
        if lock is not None:
            posix.close_read_only(lock)


_filled: weakref.WeakValueDictionary[str, NewDirectory] = weakref.WeakValueDictionary()
"""The directories that this process may fill, by their paths meanwhile, symlinks followed."""


def names_of(path: str) -> tuple[str, ...]:
    """The path of a file; and, if it is in a directory that is filled, the one that it will have."""
    file = Path(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    for folder in file.parents:
        if (found := _filled.get(str(folder))) is not None:
            return path, os.path.join(found.contents, file.relative_to(folder))
    return (path,)


def replace_link(target: str, link: str) -> None:
    """Make ``link`` a symlink to ``target``, relative to its own directory, in place of whatever is there.

    Durable. At every instant there is what was there, or the new link, except where a directory is replaced and the
    filesystem cannot exchange two names.

    Raises:
        OSError: the filesystem refused.
    """
    link = os.path.abspath(link)
    parent, hidden = os.path.dirname(link), _hidden_name(link)
    _remove(hidden)
    os.symlink(os.path.relpath(os.path.abspath(target), parent), hidden)
    try:
        try:
            os.rename(hidden, link)
        except IsADirectoryError:
            _exchange(hidden, link)
    except BaseException:
        os.unlink(hidden)
        raise
    posix.sync_directory(parent)
    _remove(hidden)
    _remove(_aside_name(hidden))


def _exchange(hidden: str, path: str) -> None:
    """Give a path what is at a hidden name. What was at the path is at that name then, or aside."""
    if posix.exchange(hidden, path):
        return
    aside = _aside_name(hidden)
    os.rename(path, aside)
    try:
        os.rename(hidden, path)
    except BaseException:
        os.rename(aside, path)
        raise


def _hidden_name(path: str) -> str:
    """
    >>> _hidden_name("/runs/last.ckpt")
    '/runs/.e6f69ff248c8b801.fastensor-saving'
    """
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{hashlib.sha256(os.fsencode(name)).hexdigest()[:_DIGITS]}{SUFFIX}")


def _aside_name(hidden: str) -> str:
    """Path that keeps the replaced directory between two renames."""
    return hidden.removesuffix(SUFFIX) + ASIDE_SUFFIX


def restore(aside: str, path: str) -> None:
    """Move what a process was about to replace from ``aside`` back to ``path``, if that process was killed between its
    two renames.
    Several processes may do this at a time.

    Raises:
        OSError: the filesystem refused.
    """
    if os.path.lexists(aside) and not os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.rename(aside, path)


def _old_leftovers(parent: str) -> Iterator[str]:
    """Hidden directories that no process of another machine is likely to fill still."""
    for left in glob.glob(f"{glob.escape(parent)}/.*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(left).st_mtime < time.time() - LEFTOVER_SECONDS:
                yield left


def remove_unless_locked(path: str) -> None:
    """Remove a directory unless a process fills it; or a file or link, which a directory has replaced.

    Raises:
        FileNotFoundError: it is not there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError:
        os.unlink(path)
        return
    try:
        if posix.try_lock(fd):
            _remove_locked(path, fd)
    finally:
        posix.close_read_only(fd)


def _remove_locked(path: str, lock: int) -> None:
    """Remove a directory that this process has locked, and not one that another process makes there afterwards."""
    while leads_to(path, lock):  # its process may have published it meanwhile
        with contextlib.suppress(FileNotFoundError):  # a process that is told to give up removes its own files
            shutil.rmtree(path)


def remove_directory(path: str) -> None:
    """Remove a directory with all it holds; nothing if it is missing. Several processes may do this at a time.

    A process that is killed has left the whole directory, or a hidden rest of it, which a later save removes.

    Raises:
        OSError: the filesystem refused, or another process saves to the same path.
    """
    path = os.path.abspath(path)
    hidden = _hidden_name(path)
    with contextlib.suppress(FileNotFoundError):
        remove_unless_locked(hidden)
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        os.rename(path, hidden)
        _remove(hidden)


def _remove(path: str) -> None:
    """Remove a file, a link, or a directory with all it holds; nothing if it is missing. Several processes may do this
    at a time."""
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
