"""Dictionaries on the disk: one file for each machine and kind of filesystem, which all processes there learn into.

What is learned is noted, and added now and then to what the file holds by then: processes lose nothing of each other.
Nothing here fails a program that moves bytes. Where a file cannot be read or written, that is said once, and it goes on
in memory. Files are not synced: after a power failure it is learned again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from platformdirs import user_cache_path

from fastensor.backends import posix
from fastensor.select.dictionary import Change, Dictionary, DictionaryError
from fastensor.select.machine import digest, identity

FOLDER_VARIABLE = "FASTENSOR_DICTIONARIES"
"""The environment variable that names the folder of the dictionaries."""
MOST_FILE_NBYTES = 1 << 20
"""What is larger is no dictionary."""
MOST_NOTED = 10_000
"""So many changes are remembered where they cannot be written, the latest ones."""
LOCK_SECONDS = 2.0
"""How long a flush waits for one of another process, or thread."""

Kind: TypeAlias = Literal["files", "tensors", "activations"]
_KINDS: dict[Kind, dict[str, str]] = {
    "files": {},
    "tensors": {"of": "single tensors"},
    "activations": {"of": "activations"},
}
_POLL_SECONDS = 0.005
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_BESIDE = r"(\.lock|\.damaged|\.[0-9a-f]{16}\.tmp)?"
_logger = logging.getLogger("fastensor")


class Stored(NamedTuple):
    """What a file holds."""

    dictionary: Dictionary
    machine: dict[str, str]
    """What it was measured on."""


class DictionaryFile:
    """A dictionary on the disk. Every method may be called from several threads, and by several processes at a time;
    also by a signal handler that interrupts one of them.

    A forked child begins with nothing noted: that is the parent's to write.

    Args:
        path: of the file. It may be missing, and its folder, too.
        machine: what is measured on; the file says so.
    """

    def __init__(self, path: Path, machine: Mapping[str, str]) -> None:
        self.path = path
        self.machine = dict(machine)
        self._begin()
        _files.add(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._flushing = False
        """By the thread that holds the lock: a signal handler in it comes between."""
        self._noted: deque[Change] = deque(maxlen=MOST_NOTED)
        self._unwritten: deque[Change] = deque(maxlen=MOST_NOTED)
        """What a flush has taken from there."""

    def load(self) -> Dictionary:
        """What is on the disk; an empty dictionary if that is nothing, or cannot be used, which is logged."""
        try:
            return read(self.path).dictionary
        except FileNotFoundError:
            pass
        except DictionaryError as error:
            _say_once("unread", self.path, f"{error}; what was learned before is not used")
        except OSError as error:
            _say_once("unread", self.path, f"{self.path} cannot be read: {error}; what was learned before is not used")
        return Dictionary()

    def note(self, change: Change) -> None:
        """Remember a change for the next :meth:`flush`. Waits for nothing."""
        self._noted.append(change)

    @property
    def pending(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._noted or self._unwritten)

    def flush(self) -> None:
        """Write what was noted. If that fails, it is logged, and what was noted is kept for the next time; so it is if
        a signal handler interrupts a flush with another one."""
        lock = self._lock
        if not lock.acquire(timeout=LOCK_SECONDS):
            _say_unwritten(self.path, TimeoutError(errno.ETIMEDOUT, "another thread has been writing it for long"))
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
            _say_unwritten(self.path, error)
        finally:
            self._flushing = False

    def update(self, changes: Iterable[Change]) -> None:
        """Add changes to what is on the disk. If that is damaged, it is kept beside, and the file begins anew.

        Raises:
            OSError: the file, its folder or its lock cannot be read or written; nothing was added.
        """
        path = Path(os.path.realpath(self.path))
        os.makedirs(path.parent, exist_ok=True)
        with _locked(path):
            dictionary = _read_or_set_aside(path)
            for change in changes:
                dictionary.apply(change)
            _replace(path, dictionary.to_json(self.machine))

    def remove(self) -> list[Path]:
        """Remove the file and what is beside it: its lock, a damaged one, leftovers of killed processes.

        Returns:
            What there was.

        Raises:
            OSError: something cannot be removed.
        """
        path = Path(os.path.realpath(self.path))
        found = _family(path.parent, re.escape(path.name))
        if found:
            with _locked(path):
                for file in _family(path.parent, re.escape(path.name)):
                    os.unlink(file)
        return found


_files: weakref.WeakSet[DictionaryFile] = weakref.WeakSet()


def _begin_all() -> None:
    for file in _files:
        file._begin()


os.register_at_fork(after_in_child=_begin_all)


def default_folder() -> Path:
    """Where dictionaries are: what ``FASTENSOR_DICTIONARIES`` says, or a folder in the user's cache."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(os.path.abspath(os.path.expanduser(given)))
    with contextlib.suppress(RuntimeError):  # who has no home has no cache
        folder = user_cache_path("fastensor") / "dictionaries"
        if folder.is_absolute():
            return folder
    return Path(os.devnull) / "dictionaries"  # cannot be written, and that is said


def file_for(path: str | os.PathLike[str], folder: Path | None = None, *, of: Kind = "files") -> DictionaryFile:
    """The dictionary of the filesystem that a path is on.

    Args:
        path: of a file or folder, which need not exist.
        folder: of the dictionaries; None means the default one.
        of: what is moved. A single tensor in a file of its own, or in a part of a file that is there already, takes
            another time than a checkpoint of the same size, above all if that is small.
    """
    machine = identity(path) | _KINDS[of]
    return DictionaryFile((default_folder() if folder is None else folder) / f"{digest(machine)}.json", machine)


def files_in(folder: Path) -> list[Path]:
    """The dictionaries in a folder, and those of which only something beside them is left. Other files are not ours."""
    names = {re.sub(f"{_BESIDE}$", "", path.name) for path in _family(folder, r"[0-9a-f]{16}\.json")}
    return [folder / name for name in sorted(names)]


def read(path: Path) -> Stored:
    """What a file holds.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        DictionaryError: it is damaged, or something else.
    """
    try:
        return Stored(*Dictionary.with_machine(read_text(path)))
    except DictionaryError as error:
        raise DictionaryError(f"{path}: {error}") from error
    except ValueError as error:
        raise DictionaryError(f"{path}: damaged: {error!r}") from error


def read_text(path: Path) -> str:
    """A file's text, if it is one, and not larger than dictionaries are.

    Raises:
        OSError: it cannot be read, or is no file.
        ValueError: it is too large, or no text.
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
        _say_once("damaged", path, f"{error}; learning begins anew, and the file is kept as {path}.damaged")
        return Dictionary()


def _replace(path: Path, text: str) -> None:
    temporary = f"{path}.{secrets.token_hex(8)}.tmp"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            posix.write_fully(fd, memoryview(text.encode()), 0)
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else changes a dictionary meanwhile, unless the filesystem has no locks."""
    while True:
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(fd, path)
            if os.fstat(fd).st_nlink:
                yield
                return
        finally:  # the lock was removed, or it is over
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)  # a forked child may have the descriptor, too
            posix.close_read_only(fd)


def _lock(fd: int, path: Path) -> None:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds the lock", f"{path}.lock") from error
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise


def _family(folder: Path, name: str) -> list[Path]:
    """Files of that name, a regular expression, and what is kept beside them."""
    try:
        return sorted(folder / found for found in os.listdir(folder) if re.fullmatch(name + _BESIDE, found))
    except FileNotFoundError:
        return []


_said: set[tuple[str, Path]] = set()


def _say_unwritten(path: Path, error: OSError) -> None:
    advice = f"what is learned stays in memory, unless {FOLDER_VARIABLE} names another folder"
    _say_once("unwritten", path, f"{path} cannot be written: {error}; {advice}")


def _say_once(what: str, path: Path, message: str) -> None:
    """Log a warning, once per process for the same path."""
    if (what, path) not in _said:
        _said.add((what, path))
        _logger.warning("%s", message)
