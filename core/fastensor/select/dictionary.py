"""What has been measured: how long each backend takes, by size and context (the Fastensor paper, section 4). Pure.

The paper's three dictionaries are views of this one: WDic is its writes, RDic its reads, WRDic the sums of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple, Self

from fastensor.errors import FastensorError
from fastensor.select.context import Context
from fastensor.select.sizes import bucket_of, scaled, size_of

MOST_SAMPLES = 5
"""The latest timings are kept."""
ENOUGH_TRIES = 2
"""The first use of a backend may take longer than later ones (section 3.4), so one timing rules nothing out."""
MOST_NBYTES = 64 << 10
"""Of a dictionary as JSON. What was learned the longest ago is left out."""
MOST_SIZE = 1 << 63
"""No file is larger."""
VERSION = 1
_MOST_SERIAL = 1 << 53
_LEAST_SECONDS = 1e-9
"""Clocks may be so coarse that something takes no time."""
_FORMAT = "fastensor dictionary"


class DictionaryError(FastensorError, ValueError):
    """What was given as a dictionary is none, or one of another version."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a backend takes for one bucket of sizes."""

    count: int
    """How often it was measured."""
    samples: tuple[float, ...]
    """The latest of when it was tried, in seconds, scaled to the bucket's largest size."""
    latest: tuple[float, ...] = ()
    """The latest of when it was used, because it was known: likewise. They tell whether what is known still holds."""
    seconds: float = field(init=False)
    """The least of the samples. Whatever else the machine does adds to a timing, and to few of them equally: among as
    many as are affordable, the least tells backends apart more often than the median does."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", max(min(self.samples), _LEAST_SECONDS))

    @property
    def spread(self) -> float:
        """How far the median of the samples lies above the least, in seconds."""
        return max(median(self.samples) - self.seconds, 0.0)

    @property
    def uses(self) -> int:
        """How often it was used since it was tried."""
        return max(self.count - len(self.samples), 0)


class Key(NamedTuple):
    """What timings are of."""

    context: Context
    bucket: int


@dataclass(slots=True)
class Entry:
    """What is known of one key."""

    timings: dict[str, Timing] = field(default_factory=dict)
    """By backend."""
    serial: int = 0
    """The larger, the later something was learned."""
    _slowness: dict[str, float] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def best(self) -> str | None:
        """The fastest backend."""
        return min(self.timings, key=lambda name: self.timings[name].seconds, default=None)

    @property
    def slowness(self) -> Mapping[str, float]:
        """How many times as long as the best each takes, of those that were measured often enough to tell."""
        if self._slowness is None:
            seconds = {name: timing.seconds for name, timing in self.timings.items() if timing.count >= ENOUGH_TRIES}
            fastest = min(seconds.values(), default=0.0)
            self._slowness = {name: taken / fastest for name, taken in seconds.items()} if fastest else {}
        return self._slowness

    def changed(self) -> None:
        """The timings are others now."""
        self._slowness = None


def _with_sample(timing: Timing | None, sample: float, *, later: bool) -> Timing:
    if timing is None:
        return Timing(1, (sample,))
    if later:
        return Timing(timing.count + 1, timing.samples, (*timing.latest, sample)[-MOST_SAMPLES:])
    return Timing(timing.count + 1, (*timing.samples, sample)[-MOST_SAMPLES:], timing.latest)


_NOTHING = Entry()
_NO_SIZES: Mapping[int, Entry] = {}


class Change(NamedTuple):
    """Something that was learned: how long a backend took; or, without that, that what was known is out of date."""

    context: Context
    nbytes: int
    backend: str | None
    """None if what was known of all of them is out of date."""
    seconds: float | None = None
    later: bool = False
    """Whether it was used because it was known, so that nothing was tried."""


class Dictionary:
    """Timings by size, context and backend. Not thread-safe.

    >>> dictionary = Dictionary()
    >>> dictionary.apply(Change(Context("write"), 1 << 20, "numpy", seconds=0.002))
    >>> dictionary.apply(Change(Context("write"), 1 << 20, "direct", seconds=0.003))
    >>> dictionary.of(Context("write"), 1 << 20).best
    'numpy'
    """

    def __init__(self) -> None:
        self._entries: dict[Context, dict[int, Entry]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def __iter__(self) -> Iterator[tuple[Key, Entry]]:
        """By context, then by size."""
        for context in sorted(self._entries, key=str):
            for bucket, entry in sorted(self._entries[context].items(), key=itemgetter(0)):
                yield Key(context, bucket), entry

    def of(self, context: Context, nbytes: int) -> Entry:
        """What is known about a size."""
        return self.at(Key(context, bucket_of(nbytes)))

    def at(self, key: Key) -> Entry:
        """What is known of a key, not to be changed."""
        return self.within(key.context).get(key.bucket, _NOTHING)

    def contexts(self) -> Iterable[Context]:
        """Those of which something is, or was, known."""
        return self._entries.keys()

    def within(self, context: Context) -> Mapping[int, Entry]:
        """What is known of a context, by bucket, not to be changed."""
        return self._entries.get(context, _NO_SIZES)

    def apply(self, change: Change) -> None:
        """Learn something."""
        bucket = bucket_of(change.nbytes)
        sizes = self._entries.setdefault(change.context, {})
        entry = sizes.setdefault(bucket, Entry())
        if change.backend is None:
            entry.timings.clear()
        elif change.seconds is None:
            entry.timings.pop(change.backend, None)
        else:
            sample = max(_rounded(scaled(change.seconds, change.nbytes)), _LEAST_SECONDS)
            entry.timings[change.backend] = _with_sample(entry.timings.get(change.backend), sample, later=change.later)
        if not entry.timings:
            del sizes[bucket]
        entry.changed()
        self._serial = entry.serial = self._serial + 1

    def to_json(self, machine: Mapping[str, Any] | None = None) -> str:
        """As text that people can read, one line for each size; at most ``MOST_NBYTES`` long.

        Args:
            machine: what it was measured on.
        """
        lines = [_Line(key, entry.serial, _line(key, entry)) for key, entry in self]
        left = MOST_NBYTES - len(_to_json([], machine or {}).encode())
        kept = set()
        for line in sorted(lines, key=lambda line: -line.serial):
            left -= line.most_nbytes
            if left < 0:
                break
            kept.add(line.key)
        return _to_json([line for line in lines if line.key in kept], machine or {})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What :meth:`to_json` has written.

        Raises:
            DictionaryError: it is something else.
        """
        return cls.with_machine(text)[0]

    @classmethod
    def with_machine(cls, text: str) -> tuple[Self, dict[str, str]]:
        """What :meth:`to_json` has written, and what it was measured on.

        Raises:
            DictionaryError: it is something else.
        """
        try:
            found = json.loads(text)
            if not isinstance(found, dict) or found.get("format") != _FORMAT:
                raise DictionaryError("not a dictionary of Fastensor's")
            if found.get("version") != VERSION:
                raise DictionaryError(f"a dictionary of version {found.get('version')!r}, expected {VERSION}")
            result = cls()
            for context, sizes in found["entries"].items():
                known = result._entries.setdefault(Context.parse(context), {})
                for size, entry in sizes.items():
                    parsed = known[bucket_of(_parse_size(size))] = _parse_entry(entry)
                    result._serial = max(result._serial, parsed.serial)
            machine = found.get("machine", {})
            if not isinstance(machine, dict):
                raise DictionaryError(f"damaged: {machine!r} is no machine")
        except DictionaryError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
            raise DictionaryError(f"damaged: {error!r}") from error
        return result, {str(name): str(fact) for name, fact in machine.items()}


def replacing(dictionary: Dictionary) -> Iterator[Change]:
    """What to apply to another dictionary so that it knows the same of the same: the latest timings take the place of
    those that it has; measurements that are older than those are forgotten, and no more counted."""
    for key, entry in dictionary:
        nbytes = size_of(key.bucket)
        for name, timing in entry.timings.items():
            yield Change(key.context, nbytes, name)
            for seconds in timing.samples:
                yield Change(key.context, nbytes, name, seconds)
            for seconds in timing.latest:
                yield Change(key.context, nbytes, name, seconds, later=True)


class _Line(NamedTuple):
    key: Key
    serial: int
    text: str

    @property
    def most_nbytes(self) -> int:
        """What it adds to the file: it may be the first one of its context."""
        return len(self.text.encode()) + len(str(self.key.context)) + 16


def _line(key: Key, entry: Entry) -> str:
    return f'   "{size_of(key.bucket)}": {json.dumps(_describe(entry))}'


def _to_json(lines: Sequence[_Line], machine: Mapping[str, Any]) -> str:
    by_context: dict[str, list[str]] = {}
    for line in lines:
        by_context.setdefault(str(line.key.context), []).append(line.text)
    blocks = [f"  {json.dumps(context)}: {{\n" + ",\n".join(texts) + "\n  }" for context, texts in by_context.items()]
    head = f'{{\n "format": "{_FORMAT}",\n "version": {VERSION},\n "machine": {json.dumps(machine)},\n'
    return head + ' "entries": {\n' + ",\n".join(blocks) + "\n }\n}\n"


def _describe(entry: Entry) -> dict[str, Any]:
    timings = {
        name: {
            "count": timing.count,
            "seconds": _rounded(timing.seconds),
            "spread": _rounded(timing.spread),
            "samples": timing.samples,
            **({"latest": timing.latest} if timing.latest else {}),
        }
        for name, timing in entry.timings.items()
    }
    return {"best": entry.best, "serial": entry.serial, "timings": timings}


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _parse_size(found: str) -> int:
    nbytes = int(found)
    if not 0 <= nbytes <= MOST_SIZE:
        raise DictionaryError(f"damaged: a size of {nbytes} bytes")
    return nbytes


def _parse_entry(found: Mapping[str, Any]) -> Entry:
    entry = Entry(serial=int(found.get("serial", 0)))
    if not 0 <= entry.serial <= _MOST_SERIAL:
        raise DictionaryError(f"damaged: a serial number of {entry.serial}")
    for name, timing in found["timings"].items():
        count = int(timing["count"])
        samples, latest = (tuple(map(float, timing.get(part, ()))) for part in ("samples", "latest"))
        if not 1 <= len(samples) <= min(count, MOST_SAMPLES) or len(latest) > MOST_SAMPLES:
            raise DictionaryError(f"damaged: {count} measurements, of which {samples} and {latest} s are kept")
        if not all(isfinite(one) and one >= 0 for one in (*samples, *latest)):
            raise DictionaryError(f"damaged: measurements of {samples} and {latest} s")
        entry.timings[str(name)] = Timing(count, samples, latest)
    return entry
