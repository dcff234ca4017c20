"""Which shapes tensors can have."""

from __future__ import annotations

from collections.abc import Sequence

MAX_SIZE = (1 << 63) - 1


def is_shape(sizes: Sequence[int]) -> bool:
    """Whether sizes, none of which is negative, are a shape: their product is a size.

    Sizes of zero count as one: readers multiply the others first.

    >>> is_shape([3, 0]), is_shape([1 << 40, 1 << 40])
    (True, False)
    """
    numel = 1
    for size in sizes:
        numel *= max(size, 1)
        if numel > MAX_SIZE:
            return False
    return True
