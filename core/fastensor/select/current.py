"""The selectors behind ``backend="auto"``, with what is known of this machine.

Each filesystem has a selector for whole files, one for single tensors, and one for activations.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import get_args

from fastensor.files.arguments import check_word, checks_keywords
from fastensor.files.forks import first_in_children, lock_of
from fastensor.select import transfer
from fastensor.select.files import DictionaryFile, Kind, file_for
from fastensor.select.machine import nearest
from fastensor.select.selector import Selector
from fastensor.select.transfer import explores

_lock = lock_of(sys.modules[__name__])
_made: dict[tuple[int, Kind], tuple[Selector, DictionaryFile]] = {}
"""Selectors and their files, by device number and kind."""


@checks_keywords
def use_selector(selector: Selector | None) -> None:
    """Let one selector choose wherever ``backend="auto"`` is asked for in this process.

    Args:
        selector: the selector for every filesystem; None goes back to the selectors that know this machine.
    """
    if not isinstance(selector, Selector | None):
        raise TypeError(f"selector is a fastensor.Selector or None, found {selector!r}")
    transfer.for_all = selector


@checks_keywords
def current_selector(path: str | os.PathLike[str], *, of: Kind = "files") -> Selector:
    """The selector for files at a path, which need not exist.

    The selector knows what earlier processes have learned about this machine and the path's filesystem, and learns
    further.

    Args:
        path: a file or folder.
        of: ``"files"``; ``"tensors"`` for the one that a :class:`fastensor.TensorStore` there asks;
            ``"activations"`` for that of :class:`fastensor.offload.ActivationOffload`.

    Raises:
        ValueError: ``of`` is none of these; or ``FASTENSOR_EXPLORE`` is set to something else than a yes or a no.
    """
    if transfer.for_all is not None:
        return transfer.for_all
    key = (nearest(path)[1], of)
    found = _made.get(key)
    if found is None:
        check_word(of, "of", get_args(Kind))
        with _lock:
            found = _made[key] = _made.get(key) or _make(file_for(path, of=of))
    return found[0]


def flush() -> None:
    """Write all noted changes to their dictionary files, in this thread."""
    for _, file in tuple(_made.values()):
        file.flush()


def _make(file: DictionaryFile) -> tuple[Selector, DictionaryFile]:
    return Selector(file.load(), explore=explores(), on_change=file.note), file


atexit.register(flush)
with contextlib.suppress(RuntimeError):  # the interpreter exits already
    # Processes of multiprocessing do not run atexit, but end their threads. By then, writers have nothing pending.
    getattr(threading, "_register_atexit", atexit.register)(flush)
first_in_children(_made.clear)  # the parent writes what it has learned
