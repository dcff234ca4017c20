"""Time of ``torch.save`` with ``fsync`` on this machine, with which messages compare saves.

``fastensor tune`` measures it. No selector looks at it, and saves of a user's own are never spent on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from fastensor.select.context import LEAST_BUCKET, Context, bucket_of, size_of
from fastensor.select.dictionary import Change, Dictionary
from fastensor.select.files import file_for

NAME: Final = "torch.save"
_CONTEXT = Context("write")
_FARTHEST = 8
"""Largest ratio of a size to the largest measured one."""


def learned(nbytes: int, seconds: Iterable[float]) -> list[Change]:
    """The changes of the dictionary by measurements of files of ``nbytes``."""
    return [Change(_CONTEXT, nbytes, NAME, one, counts=False) for one in seconds]


def seconds_known(path: str, sizes: Iterable[int]) -> float | None:
    """Seconds that ``torch.save`` with ``fsync`` would take for files of these sizes, by what was measured there.

    Args:
        path: a file or folder on the filesystem in question.
        sizes: in bytes.

    Returns:
        The sum for all sizes, in seconds; None if nothing was measured for one of them.
    """
    dictionary = file_for(path, of=NAME).load()
    found = [estimate(dictionary, nbytes) for nbytes in sizes]
    known = [seconds for seconds in found if seconds is not None]
    return sum(known) if found and len(known) == len(found) else None


def is_measured(path: str) -> bool:
    """True if any size was measured where ``path``, a file or folder, is."""
    return bool(_points(file_for(path, of=NAME).load()))


def estimate(dictionary: Dictionary, nbytes: int) -> float | None:
    """The time of one file, in seconds: between the sizes that were measured, in proportion.

    None if the size is in a bucket of smaller sizes than the least that was measured, or more than 8 times as large as
    the largest in the last bucket that was measured. All sizes up to 4 KiB take the same time.

    >>> dictionary = Dictionary()
    >>> for change in [*learned(1 << 20, [1.0, 1.0]), *learned(4 << 20, [4.0, 4.0, 9.0])]:
    ...     dictionary.apply(change)
    >>> [estimate(dictionary, size << 10) for size in (512, 768, 1024, 2048, 8192, 65536)]
    [None, 0.75, 1.0, 2.0, 8.0, None]
    """
    points = _points(dictionary)
    counted = max(nbytes, size_of(LEAST_BUCKET))
    if not points or bucket_of(counted) < bucket_of(points[0][0]) or counted > _FARTHEST * points[-1][0]:
        return None
    return _between(points, counted)


def _points(dictionary: Dictionary) -> list[tuple[int, float]]:
    """The largest size of each bucket that was measured, and the seconds for it; the least first."""
    entries = sorted(dictionary.within(_CONTEXT).items())
    return [(size_of(bucket), entry.timings[NAME].seconds) for bucket, entry in entries if NAME in entry.timings]


def _between(points: Sequence[tuple[int, float]], nbytes: int) -> float:
    first, seconds = points[0]
    if nbytes <= first:  # in the same bucket, whose timings are scaled to its largest size
        return seconds * nbytes / first
    for (smaller, least), (larger, most) in pairwise(points):
        if nbytes <= larger:
            return least + (most - least) * (nbytes - smaller) / (larger - smaller)
    largest, seconds = points[-1]
    return seconds * nbytes / largest
