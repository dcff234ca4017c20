"""How much memory staging may take."""

from __future__ import annotations

from fastensor.backends.buffers import BUFFER_NBYTES

_SHARE = 2
"""Staging may take one half of the memory that is available when staging begins: the program wants to grow, too."""


def staging_limit(available_nbytes: int, processes: int) -> int:
    """The most bytes that this process may take for staging: at least a buffer.

    >>> staging_limit(16 << 30, 4) >> 20
    2048
    """
    return max(available_nbytes // (_SHARE * processes), BUFFER_NBYTES)
