"""The rule behind ``backend="auto"``. Pure: sizes and residency in, a backend's name out."""

from __future__ import annotations

DIRECT_WRITE_NBYTES = 4 << 20
"""Files from this size on are written around the page cache."""
DIRECT_READ_NBYTES = 32 << 20
"""Files from this size on are read around the page cache, unless they are in it. Below, setting up the ring in a new
process takes longer than it saves."""
RESIDENT_FRACTION = 2 / 3
"""From here on a file is read through the page cache: cold bytes cost about 2.4 times more that way than by direct
reads, resident ones a seventh, so the two are equal at 0.62."""


def choose_writer(nbytes: int) -> str:
    """Which backend writes a file of that size.

    >>> choose_writer(1 << 10), choose_writer(1 << 30)
    ('numpy', 'direct')
    """
    return "direct" if nbytes >= DIRECT_WRITE_NBYTES else "numpy"


def choose_reader(nbytes: int, resident_fraction: float) -> str:
    """Which backend reads a file of that size of which that much is in the page cache.

    >>> choose_reader(1 << 30, resident_fraction=0.0), choose_reader(1 << 30, resident_fraction=1.0)
    ('direct', 'numpy')
    """
    cold = resident_fraction < RESIDENT_FRACTION
    return "direct" if cold and nbytes >= DIRECT_READ_NBYTES else "numpy"
