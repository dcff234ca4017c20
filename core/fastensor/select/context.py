"""What decides how fast a transfer is: its circumstances, and its size in buckets that share their timings; the rule by
both, and the choice of a backend. Pure."""

from __future__ import annotations

from functools import lru_cache
from math import ceil, log2
from typing import Literal, NamedTuple, TypeAlias

from fastensor.files.arguments import checks_keywords

Operation: TypeAlias = Literal["write", "read"]
DIRECT_NBYTES = {"write": 4 << 20, "read": 32 << 20}
"""Files from these sizes on are written, or read, around the page cache. Reads set up a ring of buffers first, which
takes longer for a smaller file in a new process than it saves."""
RESIDENT_FRACTION = 2 / 3
"""Files of which at least this fraction is in the page cache are read through it. Cold bytes cost about 2.4 times as
much that way as by direct reads, resident bytes a seventh, so the two are equal at 0.62."""
_SMALL_NBYTES = 1 << 20
_PER_OCTAVE = 2
LEAST_BUCKET = 12 * _PER_OCTAVE
"""The bucket of all sizes up to 4 KiB."""
STAGED = "staged"
"""Stands in place of a device: an asynchronous save has copied the bytes, and the program goes on meanwhile."""


@checks_keywords
class Context(NamedTuple):
    """The circumstances of one transfer.

    >>> str(Context("write")), str(Context("read", "cuda", warm=True))
    ('write cpu durable', 'read cuda resident')
    """

    operation: Operation
    device: str = "cpu"
    """Type of the device that the bytes come from or go to, as torch names it; or ``STAGED``."""
    warm: bool = False
    """For a read: most of the file is in the page cache. For a write: the file may stay there, without a sync."""

    def __str__(self) -> str:
        return f"{self.operation} {self.device} {_STATES[self.operation][self.warm]}"

    @classmethod
    def parse(cls, text: str) -> Context:
        """The context that :meth:`__str__` has written.

        >>> Context.parse("read cuda resident") == Context("read", "cuda", warm=True)
        True

        Raises:
            ValueError: the text is no context.
        """
        name, _, rest = text.partition(" ")
        device, _, state = rest.partition(" ")
        for operation, states in _STATES.items():
            if name == operation and device and state in states:
                return cls(operation, device, bool(states.index(state)))
        raise ValueError(f"no context is called {text!r}")


class Choice(NamedTuple):
    """The chosen backend, and the reason for the choice."""

    backend: str
    reason: str
    exploring: bool = False
    """True if the backend is tried to measure it, rather than known to be the fastest."""
    best_seconds: float | None = None
    """Expected seconds of the best backend, for a try. A longer transfer has cost the difference."""
    prior_seconds: float | None = None
    """The time that the prior is expected to take; None if the prior was chosen."""
    risk_seconds: float = 0.0
    """Expected seconds of a try beyond those of the best backend."""
    compared: tuple[str, ...] = ()
    """The backends with which it was compared: the best one, and the prior."""

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


def by_rule(context: Context, nbytes: int) -> str:
    """The backend of a transfer as long as nothing was measured.

    >>> by_rule(Context("write"), 1 << 10), by_rule(Context("write"), 1 << 30)
    ('numpy', 'direct')
    >>> by_rule(Context("read"), 1 << 30), by_rule(Context("read", warm=True), 1 << 30)
    ('direct', 'numpy')
    >>> by_rule(Context("write"), 10 << 20), by_rule(Context("write", warm=True), 10 << 20)
    ('direct', 'numpy')
    """
    is_cached = context.warm and (context.operation == "read" or nbytes < DIRECT_NBYTES["read"])
    return "numpy" if is_cached or nbytes < DIRECT_NBYTES[context.operation] else "direct"


def is_small(context: Context, nbytes: int) -> bool:
    """True if to look anything up for a transfer, or to learn from it, would take longer than the best backend could
    save: below 1 MiB, and between the host and a file below 32 MiB.

    >>> is_small(Context("read"), 10 << 20), is_small(Context("read", "cuda"), 10 << 20)
    (True, False)
    >>> is_small(Context("write"), 31 << 20), is_small(Context("write"), 32 << 20)
    (True, False)
    """
    return nbytes < (DIRECT_NBYTES["read"] if context.device in ("cpu", STAGED) else _SMALL_NBYTES)


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


_STATES: dict[Operation, tuple[str, str]] = {"write": ("durable", "unsynced"), "read": ("cold", "resident")}
