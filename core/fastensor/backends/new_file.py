"""Files that nobody sees before they are whole.

Such a file has no name while it is written (``O_TMPFILE``), so a process that is killed leaves nothing behind. It gets
its name by ``linkat``; where another file has that name, it gets a hidden one first, for the instant until the rename.
Where the filesystem has no nameless files it has the hidden name from the start.

Hidden names are numbered and made from the target's name, and the file is locked (``flock``) as long as its process
lives, which other containers see as well: so the next save to the same target finds what a killed process has left
there, and removes it, without listing the folder.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Self

from fastensor.backends import posix

LEFTOVER_SECONDS = 3600.0
"""What was written to since then may be of another machine, whose locks are not seen on every filesystem."""
_DIGITS = 16
_HIDDEN = re.compile(rf"\.[0-9a-f]{{{_DIGITS}}}\.\d+{re.escape(posix.TEMPORARY_SUFFIX)}")


class NewFile:
    """A new, locked, empty file that will have the name ``path``, in that name's directory.

    To be left by ``with``, or closed: nothing is left of it then, unless it was published. Used by one thread at a
    time.

    Args:
        path: absolute.
        mode: of the file, as for ``os.open``.
        hidden: whether it has a hidden name from the start, by which others see that the path is being written. Else
            only where the filesystem has no nameless files.

    Raises:
        OSError: the directory does not let files be created.
    """

    def __init__(self, path: str, *, mode: int = 0o666, hidden: bool = False) -> None:
        self.path = path
        self.published = False
        """Whether it has taken its place."""
        self._names: list[str] = []
        """Names that may lead to it."""
        self._withdrawn = False
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

    def publish(self) -> None:
        """Give it its name, in place of the file that has it.

        Raises:
            OSError: the filesystem refused; :attr:`published` tells whether the file has taken its place all the same.
        """
        if not self._names:
            if self._link(self.path):
                self.published = True
                return
            _claim(self.path, self._link)
            if self._withdrawn:
                raise OSError(errno.ECANCELED, "another save replaces it", self.path)
        if not _leads_to(self._names[-1], self.fd):
            what = "it was removed or replaced, perhaps by another machine, which does not see our locks"
            raise OSError(errno.ESTALE, what, self._names[-1])
        os.rename(self._names[-1], self.path)
        self.published = True

    def withdraw(self) -> None:
        """Have :meth:`publish` raise unless the file has its name by now. At any instant, in any thread."""
        self._withdrawn = True
        if not self.published:
            self._remove()  # whoever is about to rename it finds it no more

    def close(self) -> None:
        """Remove it unless it was published.

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
            os.close(fd)  # another save took it for a leftover in the instant before it was locked, and removes it
            return False

        _claim(self.path, create)
        return fds[0]

    def _keep(self, fd: int, name: str) -> bool:
        """Lock a file that was just created. Whether it is still there."""
        self._names = [name]
        try:
            if posix.try_lock(fd) and os.fstat(fd).st_nlink:
                return True
        except BaseException:
            with contextlib.suppress(OSError):
                if _leads_to(name, fd):
                    os.unlink(name)
            os.close(fd)
            raise
        self._names = []
        return False

    def _lock_if_nameless(self) -> None:
        if not self._names:
            try:
                posix.try_lock(self.fd)  # nobody else knows the file
            except BaseException:
                posix.close_read_only(self.fd)
                raise

    def _link(self, name: str) -> bool:
        """Whether it has got the name, which no other file has."""
        self._names.append(name)
        try:  # with src_dir_fd Python calls linkat, which can follow the link that /proc shows
            os.link(f"/proc/self/fd/{self.fd}", name, src_dir_fd=self.fd)
        except FileExistsError:
            self._names.pop()
            return False
        return True

    def _remove(self) -> None:
        for name in self._names:
            with contextlib.suppress(OSError):  # it is not, or no more, there
                if _leads_to(name, self.fd):
                    os.unlink(name)


def _leads_to(name: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(name), os.fstat(fd))
    except FileNotFoundError:
        return False


def names_of_writers(path: str) -> list[str]:
    """The hidden files of those who are about to replace a file, be they alive or dead. Lists the folder."""
    return glob.glob(glob.escape(_stem(path)) + "*" + posix.TEMPORARY_SUFFIX)


def _stem(path: str) -> str:
    """What all hidden names for a target begin with: short, whatever the filesystem's limit on names."""
    directory, name = os.path.split(path)
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:_DIGITS]
    return os.path.join(directory, f".{digest}.")


def hidden_names(path: str) -> Iterator[str]:
    """The names that files have, one each, before they take the target's place."""
    return (f"{_stem(path)}{number}{posix.TEMPORARY_SUFFIX}" for number in itertools.count())


def _claim(path: str, take: Callable[[str], bool]) -> None:
    """Take the first hidden name that no living process has."""
    for name in hidden_names(path):
        if take(name):
            return
        posix.remove_leftover(name)
        if take(name):
            return


@cache
def _remove_old_leftovers(directory: str) -> None:
    """Remove what killed processes have left for any target. Once for each directory and process."""
    with contextlib.suppress(OSError):  # not ours to look into
        for name in os.listdir(directory):
            if _HIDDEN.fullmatch(name):
                posix.remove_leftover(os.path.join(directory, name), LEFTOVER_SECONDS)
