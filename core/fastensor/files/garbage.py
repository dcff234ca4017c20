"""Making tens of thousands of objects without the garbage collector in between."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from fastensor.files.forks import first_in_children

_MANY = 1000
_pauses: list[None] = []
"""One for each block that pauses the collector. Each change is one call, so the list needs no lock."""


@contextmanager
def without_collection(objects: int = _MANY) -> Iterator[None]:
    """Make objects faster: the collector would visit all of the program's again and again, which takes most of the
    time of 50,000 small tensors. It pauses in all threads until the block ends.

    Args:
        objects: about how many are made. A few hundred are made as always.
    """
    if objects < _MANY or not gc.isenabled():
        yield
        return
    _pauses.append(None)
    try:
        gc.disable()
        yield
    finally:
        _pauses.pop()
        gc.enable()


first_in_children(lambda: gc.enable() if _pauses else None)  # the block may be one of a thread that only the parent has
