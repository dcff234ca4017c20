"""The selectors that ``backend="auto"`` asks, with what is known of this machine.

For each filesystem there is one of whole files, one of single tensors, and one of activations."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time

from fastensor.backends.afterwards import do_afterwards
from fastensor.select.dictionary import Change
from fastensor.select.files import DictionaryFile, Kind, file_for
from fastensor.select.machine import nearest
from fastensor.select.selector import Selector

EXPLORE_VARIABLE = "FASTENSOR_EXPLORE"
"""Environment variable: with a no, nothing is tried and nothing learned, so choices are the same every time."""
_YES = ("1", "true", "yes", "on")
_NO = ("0", "false", "no", "off")
_FLUSH_SECONDS = 5.0
"""What is learned reaches the disk so often, and when the process ends."""


class _Keeper:
    """Puts what a selector learns into a file, now and then, in a thread: disks that do not answer hold up nobody."""

    def __init__(self, file: DictionaryFile) -> None:
        self._file = file
        self._due = time.monotonic() + _FLUSH_SECONDS
        self._flushing = threading.Lock()
        """Held while a thread does it, or is to."""

    def note(self, change: Change) -> None:
        """Called with the selector's lock held: nothing waits here."""
        self._file.note(change)

    def flush_if_due(self) -> None:
        """Waits for nothing."""
        if not self._file.pending or time.monotonic() < self._due or not self._flushing.acquire(blocking=False):
            return
        self._due = time.monotonic() + _FLUSH_SECONDS
        if not do_afterwards(self._flush_and_release):  # another time, or when the process ends
            self._flushing.release()

    def _flush_and_release(self) -> None:
        try:
            self.flush()
        finally:
            self._flushing.release()

    def flush(self) -> None:
        self._file.flush()


_lock = threading.RLock()
_made: dict[tuple[int, Kind], tuple[Selector, _Keeper]] = {}
"""By device, and what they are of."""
_for_all: Selector | None = None


def use_selector(selector: Selector | None) -> None:
    """Have one selector choose all backends in this process that nobody else chooses.

    Args:
        selector: for every filesystem; None goes back to those that know this machine.
    """
    global _for_all
    _for_all = selector


def current_selector(path: str | os.PathLike[str], *, of: Kind = "files") -> Selector:
    """The selector for files at a path, which need not exist.

    It knows what earlier processes have learned about this machine and the path's filesystem, and adds to it.

    Args:
        path: of a file or folder.
        of: ``"files"``; ``"tensors"`` for the one that a :class:`fastensor.TensorStore` there asks;
            ``"activations"`` for that of :class:`fastensor.offload.ActivationOffload`.

    Raises:
        ValueError: ``FASTENSOR_EXPLORE`` is set to something else than a yes or a no.
    """
    if _for_all is not None:
        return _for_all
    key = (nearest(path)[1], of)
    found = _made.get(key)
    if found is None:
        with _lock:
            found = _made[key] = _made.get(key) or _make(file_for(path, of=of))
    selector, keeper = found
    keeper.flush_if_due()
    return selector


def flush() -> None:
    """Put everything that was learned into its files, by this thread."""
    for _, keeper in tuple(_made.values()):
        keeper.flush()


def explores() -> bool:
    """Whether backends are tried, unless the user says no."""
    given = os.environ.get(EXPLORE_VARIABLE, "")
    if given.lower() not in ("", *_YES, *_NO):
        raise ValueError(
            f"the environment variable {EXPLORE_VARIABLE} is {given!r}; expected one of {', '.join(_YES)} to try "
            f"backends, which is the default, or one of {', '.join(_NO)} not to"
        )
    return given.lower() not in _NO


def _make(file: DictionaryFile) -> tuple[Selector, _Keeper]:
    keeper = _Keeper(file)
    return Selector(file.load(), explore=explores(), on_change=keeper.note), keeper


def _begin_anew() -> None:
    """In a forked child: what was learned is the parent's to keep, and locks may be held by nobody who lives."""
    global _lock
    _lock = threading.RLock()
    _made.clear()


atexit.register(flush)
with contextlib.suppress(RuntimeError):  # it is ending already
    # Processes of multiprocessing know no atexit, but end their threads. After this, writers have nothing pending.
    getattr(threading, "_register_atexit", atexit.register)(flush)
os.register_at_fork(after_in_child=_begin_anew)
