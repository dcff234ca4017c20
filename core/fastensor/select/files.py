"""Dictionaries on the disk: one file for each machine and kind of filesystem, which all processes there share.

A process notes changes, and now and then adds them to the current contents of the file, so processes keep each other's
changes. A file that cannot be read or written fails no save and no load: that is logged once, and the dictionary stays
in memory. Files are not synced: after a power failure, timings are learned again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from platformdirs import user_cache_path

from fastensor.files import posix
from fastensor.files.afterwards import do_afterwards
from fastensor.files.forks import in_children
from fastensor.select.dictionary import Change, Dictionary, DictionaryError
from fastensor.select.machine import digest, identity

FOLDER_VARIABLE = "FASTENSOR_DICTIONARIES"
"""The environment variable that names the folder of the dictionaries."""
MOST_FILE_NBYTES = 1 << 20
"""A larger file is no dictionary."""
MOST_NOTED = 10_000
"""The most changes that are kept while they cannot be written: the latest."""
LOCK_SECONDS = 2.0
"""Seconds that a flush waits for the flush of another process, or thread."""
_FLUSH_SECONDS = 5.0

Kind: TypeAlias = Literal["files", "tensors", "activations", "torch.save"]
_KINDS: dict[Kind, dict[str, str]] = {
    "files": {},
    "tensors": {"of": "single tensors"},
    "activations": {"of": "activations"},
    "torch.save": {"of": "torch.save with fsync"},
}
_BESIDE = r"(\.lock|\.damaged)?"
_logger = logging.getLogger("fastensor")


class Stored(NamedTuple):
    """The contents of a file."""

    dictionary: Dictionary
    machine: dict[str, str]
    """The machine that was measured."""


class DictionaryFile:
    """A dictionary on the disk. Every method may be called from several threads, by several processes at a time, and by
    a signal handler that interrupts one of them.

    A forked child begins with nothing noted: the parent writes what the parent has noted.

    Args:
        path: the file. The file and its folder may be missing.
        machine: what was measured on, to be written into the file.
    """

    def __init__(self, path: Path, machine: Mapping[str, str]) -> None:
        self.path = path
        self.machine = dict(machine)
        self._begin()
        in_children(self, DictionaryFile._begin)

    def _begin(self) -> None:
        self._due = time.monotonic() + _FLUSH_SECONDS
        self._scheduled = threading.Lock()
        """Held while another thread flushes, or is to flush."""
        self._lock = threading.RLock()
        self._flushing = False
        """True if the thread that holds the lock flushes. A signal handler of that thread may note and flush, too."""
        self._noted: deque[Change] = deque(maxlen=MOST_NOTED)
        self._unwritten: deque[Change] = deque(maxlen=MOST_NOTED)
        """Changes that a flush has taken from ``_noted``, and not written yet."""

    def load(self) -> Dictionary:
        """The dictionary on the disk; an empty one if there is none, or if the file cannot be used, which is logged."""
        try:
            return read(self.path).dictionary
        except FileNotFoundError:
            pass
        except DictionaryError as error:
            _warn_once("unread", self.path, f"{error}; what was learned before is not used")
        except OSError as error:
            _warn_once("unread", self.path, f"{self.path} cannot be read: {error}; what was learned before is not used")
        return Dictionary()

    def note(self, change: Change) -> None:
        """Keep a change for the next :meth:`flush`, which another thread does every 5 seconds, so that a disk that does
        not answer delays no caller. Waits for nothing."""
        self._noted.append(change)
        if time.monotonic() < self._due or not self._scheduled.acquire(blocking=False):
            return
        self._due = time.monotonic() + _FLUSH_SECONDS
        if not do_afterwards(self._flush_scheduled):  # later, or when the process ends
            self._scheduled.release()

    def _flush_scheduled(self) -> None:
        try:
            self.flush()
        finally:
            self._scheduled.release()

    def flush(self) -> None:
        """Write the changes that were noted. If that fails, or if a signal handler interrupts a flush with another one,
        the changes are kept for the next time; a failure is logged."""
        lock = self._lock
        if not lock.acquire(timeout=LOCK_SECONDS):
            _warn_unwritten(self.path, TimeoutError(errno.ETIMEDOUT, "another thread has been writing it for long"))
            return
        try:
            if not self._flushing:
                self._write()
        finally:
            lock.release()

    def _write(self) -> None:
        self._flushing = True
        try:
            while self._noted:
                self._unwritten.append(self._noted.popleft())
            if self._unwritten:
                self.update(self._unwritten)
                self._unwritten.clear()
        except OSError as error:
            _warn_unwritten(self.path, error)
        finally:
            self._flushing = False

    def update(self, changes: Iterable[Change]) -> None:
        """Add changes to the dictionary on the disk. A damaged file is renamed, and a new one is begun.

        Raises:
            OSError: the file, its folder or its lock cannot be read or written. Nothing was added.
        """
        from fastensor.files.atomic import replace_contents  # the first load needs nothing of it

        path = Path(os.path.realpath(self.path))
        os.makedirs(path.parent, exist_ok=True)
        with _locked(path):
            dictionary = _read_or_set_aside(path)
            for change in changes:
                dictionary.apply(change)
            replace_contents(str(path), dictionary.to_json(self.machine).encode())

    def remove(self) -> list[Path]:
        """Remove the file, its lock, and the damaged file beside it.

        Returns:
            The files that were there.

        Raises:
            OSError: a file cannot be removed.
        """
        path = Path(os.path.realpath(self.path))
        found = _family(path.parent, re.escape(path.name))
        if found:
            with _locked(path):
                for file in _family(path.parent, re.escape(path.name)):
                    os.unlink(file)
        return found


def default_folder() -> Path:
    """The folder of dictionaries: ``FASTENSOR_DICTIONARIES``, or a folder in the user's cache."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(os.path.abspath(os.path.expanduser(given)))
    with contextlib.suppress(RuntimeError):  # a user without a home folder has no cache
        folder = user_cache_path("fastensor") / "dictionaries"
        if folder.is_absolute():
            return folder
    return Path(os.devnull) / "dictionaries"  # cannot be written, which is logged


def file_for(path: str | os.PathLike[str], folder: Path | None = None, *, of: Kind = "files") -> DictionaryFile:
    """The dictionary file of the filesystem that a path is on.

    Args:
        path: a file or folder, which need not exist.
        folder: the folder of the dictionaries; None means the default folder.
        of: what is moved. A single tensor in a file of its own, or in a part of an existing file, takes another time
            than a checkpoint of the same size, above all if the size is small. ``"torch.save"`` is for the times of
            ``torch.save`` itself, with which saves are compared: no selector looks at them.
    """
    machine = identity(path) | _KINDS[of]
    return DictionaryFile((default_folder() if folder is None else folder) / f"{digest(machine)}.json", machine)


def files_in(folder: Path) -> list[Path]:
    """The dictionary files in a folder, those included of which only a lock or a damaged file is left."""
    names = {re.sub(f"{_BESIDE}$", "", path.name) for path in _family(folder, r"[0-9a-f]{16}\.json")}
    return [folder / name for name in sorted(names)]


def read(path: Path) -> Stored:
    """The contents of a dictionary file.

    Raises:
        FileNotFoundError: the file is missing.
        OSError: the file cannot be read.
        DictionaryError: the file is damaged, or no dictionary.
    """
    try:
        return Stored(*Dictionary.with_machine(read_text(path)))
    except DictionaryError as error:
        raise DictionaryError(f"{path}: {error}") from error
    except ValueError as error:
        raise DictionaryError(f"{path}: damaged: {error!r}") from error


def read_text(path: Path) -> str:
    """The text of a dictionary file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: the file is too large, or no text.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        if found.st_size > MOST_FILE_NBYTES:
            raise DictionaryError(f"{found.st_size} bytes, expected at most {MOST_FILE_NBYTES}")
        data = bytearray(found.st_size)
        return data[: posix.read_fully(fd, memoryview(data), 0)].decode()
    finally:
        posix.close_read_only(fd)


def _read_or_set_aside(path: Path) -> Dictionary:
    try:
        return read(path).dictionary
    except FileNotFoundError:
        return Dictionary()
    except DictionaryError as error:
        os.rename(path, f"{path}.damaged")
        _warn_once("damaged", path, f"{error}; learning begins anew, and the file is kept as {path}.damaged")
        return Dictionary()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a dictionary file against other processes and threads, unless the filesystem has no locks."""
    from fastensor.files.job_store import wait_until  # the first load needs nothing of it

    while True:
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not wait_until(partial(posix.try_lock, fd), LOCK_SECONDS):
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", f"{path}.lock")
            if os.fstat(fd).st_nlink:
                yield
                return
        finally:  # the lock file was removed, or the block has ended
            posix.unlock(fd)
            posix.close_read_only(fd)


def _family(folder: Path, name: str) -> list[Path]:
    """Files whose names match a regular expression, and the files beside them."""
    try:
        return sorted(folder / found for found in os.listdir(folder) if re.fullmatch(name + _BESIDE, found))
    except FileNotFoundError:
        return []


_warned: set[tuple[str, Path]] = set()


def _warn_unwritten(path: Path, error: OSError) -> None:
    advice = f"what is learned stays in memory, unless {FOLDER_VARIABLE} names another folder"
    _warn_once("unwritten", path, f"{path} cannot be written: {error}; {advice}")


def _warn_once(what: str, path: Path, message: str) -> None:
    """Log a warning, once per process for the same path."""
    if (what, path) not in _warned:
        _warned.add((what, path))
        _logger.warning("%s", message)
