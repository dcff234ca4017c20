"""Making tens of thousands of objects, or importing modules, without the garbage collector in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fastensor.files.forks import first_in_children

_MANY = 1000
_paused: list[tuple[int, int, int]] = []
"""The thresholds of the collector outside of the blocks that pause it. Each block that has begun while the collector
ran adds them: one, or one for each thread that has begun at the same instant."""


@contextmanager
def without_collection(objects: int = _MANY) -> Iterator[None]:
    """Make objects faster: the collector would visit all of the program's again and again, which takes most of the
    time of 50,000 small tensors. It pauses in all threads until the block ends. ``gc.isenabled()`` stays what it is.
    Thresholds that somebody sets meanwhile stay, unless the first one is 0; and whoever reads them meanwhile finds a 0.

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
        # Another block may have ended before this one paused. A module that was imported meanwhile may have set others.
        if not gc.get_threshold()[0]:
            gc.set_threshold(*thresholds)
        with suppress(ValueError):  # this is a forked child
            _paused.remove(thresholds)


def _go_on() -> None:
    """In a forked child: have the collector run as before. The block may be that of a thread that the child lacks."""
    if _paused:
        if not gc.get_threshold()[0]:
            gc.set_threshold(*_paused[-1])
        _paused.clear()


first_in_children(_go_on)
