"""Leaving out samples that cannot be made: ``on_error="skip"``.

A batch is then made of its other samples. A batch that has none left gets one other sample of the dataset: all ranks
have as many batches as the plan says, because a rank without a batch would let the others wait for ever. Errors that
are not those of a sample are raised all the same: those that :func:`concerns_all`, those of a ``collate_fn``, and the
error of a sample if no other one can be made either. Imports no torch.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from fastensor.errors import BackendUnavailableError, CorruptDatasetError, DatasetChangedError, NodeReaderError

T = TypeVar("T")

OnError: TypeAlias = Literal["raise", "skip"]
"""Treatment of a sample that cannot be made: its error is raised in place of the batch, or it is left out."""
_OF_ALL = (BackendUnavailableError, CorruptDatasetError, DatasetChangedError, MemoryError, NodeReaderError)
_NUMBERS_OF_ALL = frozenset(
    {
        *(errno.EIO, errno.EREMOTEIO, errno.ENODEV, errno.ENXIO),  # the disk
        *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EHOSTDOWN),  # what is mounted, or a store of turns
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),  # this process or machine
    }
)
"""The ``errno`` of ``OSError``s that are the fault of no single sample, so that no sample is skipped for them."""
_SUBSTITUTES = 16
"""Number of samples that are tried in place of those of a batch that has none left."""
_REASON_LENGTH = 300


class Skipped(NamedTuple):
    """A sample that was left out."""

    position: int
    reason: str
    """Its error, in a line."""


def concerns_all(error: BaseException) -> bool:
    """True if an error is one of all samples, and not of the one that has raised it: none is left out for it.

    Decoders, which say what is wrong with a file, raise OSError without a number; so the number tells them apart from
    the operating system. A file that is missing or may not be read is that sample's error.

    >>> concerns_all(OSError(errno.EIO, "Input/output error")), concerns_all(OSError("broken image"))
    (True, False)
    """
    return isinstance(error, _OF_ALL) or (isinstance(error, OSError) and error.errno in _NUMBERS_OF_ALL)


def tried(make: Callable[[int], T], position: int) -> T | Skipped:
    """A sample; or why it is left out.

    Raises:
        Exception: it concerns all samples.
    """
    try:
        return make(position)
    except Exception as error:
        if concerns_all(error):
            raise
        return Skipped(position, reason_of(error))


def tried_together(
    make_all: Callable[[Sequence[int]], Sequence[T]], make: Callable[[int], T], positions: Sequence[int]
) -> list[T | Skipped]:
    """Samples, made together; or, if that raises an error, one by one, so that it is known which ones are left out."""
    try:
        return list(make_all(positions))
    except Exception as error:
        if concerns_all(error):
            raise
        return [tried(make, position) for position in positions]


def substitute(make: Callable[[int], T], position: int, count: int) -> T:
    """A sample in place of those of a batch that has none left: the first one that can be made of some that are spread
    evenly over the dataset, beginning behind a position.

    Args:
        make: makes the sample at a position.
        position: the first one of the batch.
        count: samples of the dataset.

    Raises:
        Exception: that of the sample at the position, if no other one can be made.
    """
    others = substitute_positions(position, count)
    for other in others:
        if not isinstance(found := tried(make, other), Skipped):
            return found
    try:
        return make(position)
    except Exception as error:
        error.add_note(
            f"No sample of its batch can be made, nor can {len(others)} others of the dataset: on_error='skip' does "
            f"not leave out all samples"
        )
        raise


def substitute_positions(position: int, count: int) -> list[int]:
    """Other positions, spread evenly over a dataset.

    >>> substitute_positions(5, 34)[:4], substitute_positions(1, 3), substitute_positions(0, 1)
    ([7, 9, 11, 13], [2, 0], [])
    """
    spread = ((position + step * count // (_SUBSTITUTES + 1)) % count for step in range(1, _SUBSTITUTES + 1))
    return [other for other in dict.fromkeys(spread) if other != position]


def reason_of(error: BaseException) -> str:
    """An error in a line.

    >>> reason_of(OSError("broken image"))
    'OSError: broken image'
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _REASON_LENGTH else f"{text[:_REASON_LENGTH]}…"
