"""The selectors that ``backend="auto"`` asks: one for each filesystem, with what is known of this machine."""

from __future__ import annotations

import atexit
import os
import threading
import time
from pathlib import Path

from fastensor.select.dictionary import Change
from fastensor.select.files import DictionaryFile, file_for
from fastensor.select.selector import Selector

EXPLORE_VARIABLE = "FASTENSOR_EXPLORE"
"""Environment variable: with ``0`` nothing is tried and nothing learned, so choices are the same every time."""
_FLUSH_SECONDS = 5.0
"""What is learned reaches the disk so often, and when the process ends."""


class _Keeper:
    """Puts what a selector learns into a file, now and then."""

    def __init__(self, file: DictionaryFile) -> None:
        self._file = file
        self._flushed = time.monotonic()

    def note(self, change: Change) -> None:
        """Called with the selector's lock held: nothing waits here."""
        self._file.note(change)

    def flush_if_due(self) -> None:
        if time.monotonic() >= self._flushed + _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._flushed = time.monotonic()
        self._file.flush()


_lock = threading.RLock()
_by_filesystem: dict[int, tuple[Selector, _Keeper]] = {}
_for_all: Selector | None = None


def use_selector(selector: Selector | None) -> None:
    """Have one selector choose all backends in this process that nobody else chooses.

    Args:
        selector: for every filesystem; None goes back to those that know this machine.
    """
    global _for_all
    _for_all = selector


def current_selector(path: str | os.PathLike[str]) -> Selector:
    """The selector for files at a path, which need not exist.

    It knows what earlier processes have learned about this machine and the path's filesystem, and adds to it.
    """
    if _for_all is not None:
        return _for_all
    device = os.stat(_existing(Path(path))).st_dev
    found = _by_filesystem.get(device)
    if found is None:
        with _lock:
            found = _by_filesystem.get(device) or _make(Path(path))
            _by_filesystem[device] = found
    selector, keeper = found
    keeper.flush_if_due()
    return selector


def flush() -> None:
    """Put everything that was learned into its files."""
    for _, keeper in tuple(_by_filesystem.values()):
        keeper.flush()


def _make(path: Path) -> tuple[Selector, _Keeper]:
    file = file_for(path)
    keeper = _Keeper(file)
    return Selector(file.load(), explore=os.environ.get(EXPLORE_VARIABLE) != "0", on_change=keeper.note), keeper


def _existing(path: Path) -> Path:
    """The path, or its nearest ancestor that exists."""
    path = Path(os.path.abspath(path)) if not path.is_absolute() else path
    return next(one for one in (path, *path.parents) if os.path.exists(one))


def _begin_anew() -> None:
    """In a forked child: what was learned is the parent's to keep, and locks may be held by nobody who lives."""
    global _lock
    _lock = threading.RLock()
    _by_filesystem.clear()


atexit.register(flush)
os.register_at_fork(after_in_child=_begin_anew)
