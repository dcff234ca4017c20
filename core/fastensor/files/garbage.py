"""Making tens of thousands of objects, or importing modules, without the garbage collector in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from fastensor.files.forks import first_in_children

_MANY = 1000
_paused: list[tuple[int, int, int]] = []
"""The thresholds of the collector outside of the block that pauses it, if one does."""


@contextmanager
def without_collection(objects: int = _MANY) -> Iterator[None]:
    """Make objects faster: the collector would visit all of the program's again and again, which takes most of the
    time of 50,000 small tensors. It pauses in all threads until the block ends. ``gc.isenabled()`` stays what it is.

    Args:
        objects: about how many are made. A few hundred are made as always.
    """
    thresholds = gc.get_threshold()
    if objects < _MANY or not thresholds[0]:  # it pauses already
        yield
        return
    _paused.append(thresholds)
    try:
        gc.set_threshold(0, *thresholds[1:])
        yield
    finally:
        _go_on()


def _go_on() -> None:
    """Have the collector run as before. A forked child calls it, too: the block may be that of a thread it lacks."""
    if _paused:
        if not gc.get_threshold()[0]:  # else somebody has set it meanwhile: a module that was imported, say
            gc.set_threshold(*_paused[-1])
        _paused.clear()


first_in_children(_go_on)
