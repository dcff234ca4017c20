"""Buckets of sizes: timings of one size hold for all sizes of its bucket. Pure."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2

_PER_OCTAVE = 2
LEAST_BUCKET = 12 * _PER_OCTAVE
"""The bucket of all sizes up to 4 KiB."""


@lru_cache(1024)
def bucket_of(nbytes: int) -> int:
    """The bucket of a size: the next power of the square root of two, by its exponent.

    >>> [bucket_of(nbytes) for nbytes in (0, 4096, 4097, 1 << 20, (1 << 20) + 1)]
    [24, 24, 25, 40, 41]
    """
    return max(ceil(log2(nbytes) * _PER_OCTAVE), LEAST_BUCKET) if nbytes > 1 else LEAST_BUCKET


@lru_cache(1024)
def size_of(bucket: int) -> int:
    """The largest size in a bucket, in bytes. Timings are scaled to this size.

    >>> size_of(40), bucket_of(size_of(41))
    (1048576, 41)
    """
    return int(2 ** (bucket / _PER_OCTAVE))


def scaled(seconds: float, nbytes: int) -> float:
    """The time of a transfer, scaled to the largest size in its bucket.

    >>> round(scaled(0.3, 800 << 10), 3), scaled(0.3, 10)
    (0.384, 0.3)
    """
    bucket = bucket_of(nbytes)
    return seconds if bucket == LEAST_BUCKET else seconds * size_of(bucket) / nbytes
