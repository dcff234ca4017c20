"""The rule behind ``backend="auto"``. Pure: sizes and residency in, a backend's name out."""

from __future__ import annotations

DIRECT_WRITE_NBYTES = 4 << 20
"""Files from this size on are written around the page cache."""
DIRECT_READ_NBYTES = 32 << 20
"""Files from this size on are read around the page cache, unless they are in it. For smaller files, setting up the ring
of buffers in a new process takes longer than it saves."""
RESIDENT_FRACTION = 2 / 3
"""Files of which at least this fraction is in the page cache are read through it. Cold bytes cost about 2.4 times as
much that way as by direct reads, resident bytes a seventh, so the two are equal at 0.62."""


def choose_writer(nbytes: int) -> str:
    """The backend that writes a file of ``nbytes``.

    >>> choose_writer(1 << 10), choose_writer(1 << 30)
    ('numpy', 'direct')
    """
    return "direct" if nbytes >= DIRECT_WRITE_NBYTES else "numpy"


def choose_reader(nbytes: int, resident_fraction: float) -> str:
    """The backend that reads a file of ``nbytes``, of which a fraction is in the page cache.

    >>> choose_reader(1 << 30, resident_fraction=0.0), choose_reader(1 << 30, resident_fraction=1.0)
    ('direct', 'numpy')
    """
    cold = resident_fraction < RESIDENT_FRACTION
    return "direct" if cold and nbytes >= DIRECT_READ_NBYTES else "numpy"
