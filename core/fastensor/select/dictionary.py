"""What has been measured: how long each backend takes, by size and context (the Fastensor paper, section 4). Pure.

The paper's three dictionaries are views of this one: WDic is its writes, RDic its reads, WRDic the sums of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from statistics import median_low
from typing import Any, NamedTuple, Self

from fastensor.errors import FastensorError
from fastensor.select.context import Context
from fastensor.select.line import Line
from fastensor.select.sizes import bucket_of, scaled, size_of

MOST_SAMPLES = 9
"""The latest timings are kept: enough to tell backends apart where timings vary by half, and few enough to believe a
change for good after five uses."""
_RECENT = 3
MOST_NBYTES = 64 << 10
"""Of a dictionary as JSON. What was learned the longest ago is left out."""
MOST_SIZE = 1 << 63
"""No file is larger."""
VERSION = 2
_MOST_SERIAL = 1 << 53
_MOST_SECONDS = 1e9
"""More than a transfer, or all that were measured, can have taken: 30 years."""
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
    """The latest, in seconds, scaled to the bucket's largest size."""
    measured_at: int = 0
    """How many transfers of its key had been measured, by whatever backend, when it was measured last."""
    seconds: float = field(init=False)
    """The lower median of the samples. The first use of a backend may take longer than later ones (section 3.4): of
    two, the lesser counts. Whatever else the machine does now and then adds to a few of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", max(median_low(self.samples), _LEAST_SECONDS))

    @property
    def hoped_seconds(self) -> float:
        """That, or the lower median of the latest three, if that is less: what is seldom tried may have changed."""
        return min(max(median_low(self.samples[-_RECENT:]), _LEAST_SECONDS), self.seconds)

    @property
    def quartile(self) -> float:
        """What one in four samples is not above: less than that is no luck."""
        return max(sorted(self.samples)[(len(self.samples) - 1) // 4], _LEAST_SECONDS)

    @property
    def spread(self) -> float:
        """How far the samples lie apart, in seconds."""
        return max(self.samples) - min(self.samples)


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

    @property
    def best(self) -> str | None:
        """The fastest backend."""
        return min(self.timings, key=lambda name: self.timings[name].seconds, default=None)

    @property
    def uses(self) -> int:
        """How many transfers were measured."""
        return max([timing.measured_at for timing in self.timings.values()], default=0)

    def learn(self, backend: str, sample: float) -> None:
        before = self.timings.get(backend)
        count, samples = (before.count, before.samples) if before is not None else (0, ())
        self.timings[backend] = Timing(count + 1, (*samples, sample)[-MOST_SAMPLES:], self.uses + 1)


_NOTHING = Entry()
_NO_SIZES: Mapping[int, Entry] = {}


class Change(NamedTuple):
    """Something that was learned: how long a backend took; or, without that, that it is to be forgotten."""

    context: Context
    nbytes: int
    backend: str
    seconds: float | None = None
    extra_seconds: float = 0.0
    """How much longer that was than the best would have taken, because something was tried."""
    counts: bool = True
    """Whether it was a transfer that somebody wanted. What was measured by itself pays for no tries."""
    failed: bool = False
    """Whether the backend could not do it after all: the seconds are lost, and say nothing about how long it takes."""


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
        self._lines: dict[tuple[Context, str], Line] = {}
        self._serial = 0
        self.seconds = 0.0
        """What all transfers have taken that were measured."""
        self.extra_seconds = 0.0
        """How much of that exploring has cost."""

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

    def line(self, context: Context, backend: str) -> Line | None:
        """How long a backend takes in a context, by all sizes; None if nothing is known of it."""
        return self._lines.get((context, backend))

    def apply(self, change: Change) -> None:
        """Learn something."""
        if change.seconds is not None and change.counts:
            self.seconds += change.seconds
            self.extra_seconds += change.extra_seconds
        if change.failed:
            return
        bucket = bucket_of(change.nbytes)
        sizes = self._entries.setdefault(change.context, {})
        entry = sizes.setdefault(bucket, Entry())
        self._serial = entry.serial = self._serial + 1
        if change.seconds is not None:
            sample = max(_rounded(scaled(change.seconds, change.nbytes)), _LEAST_SECONDS)
            entry.learn(change.backend, sample)
            self._add_to_line(Key(change.context, bucket), change.backend, sample)
            return
        entry.timings.pop(change.backend, None)
        if not entry.timings:
            del sizes[bucket]
        self._lines.pop((change.context, change.backend), None)
        for other, known in sizes.items():
            self._add_samples_to_line(Key(change.context, other), known, change.backend)

    def _add_samples_to_line(self, key: Key, entry: Entry, backend: str) -> None:
        timing = entry.timings.get(backend)
        for sample in timing.samples if timing is not None else ():
            self._add_to_line(key, backend, sample)

    def _add_to_line(self, key: Key, backend: str, sample: float) -> None:
        line = self._lines.setdefault((key.context, backend), Line())
        line.add(size_of(key.bucket), max(sample, _LEAST_SECONDS))

    def to_json(self, machine: Mapping[str, Any] | None = None) -> str:
        """As text that people can read, one line for each size; at most ``MOST_NBYTES`` long.

        Args:
            machine: what it was measured on.
        """
        lines = [_Line(key, entry.serial, _line(key, entry)) for key, entry in self]
        head = self._head(machine or {})
        left = MOST_NBYTES - len(_to_json([], head).encode())
        kept = set()
        for line in sorted(lines, key=lambda line: -line.serial):
            left -= line.most_nbytes
            if left < 0:
                break
            kept.add(line.key)
        return _to_json([line for line in lines if line.key in kept], head)

    def _head(self, machine: Mapping[str, Any]) -> Mapping[str, Any]:
        return {
            "format": _FORMAT,
            "version": VERSION,
            "machine": machine,
            "seconds": round(self.seconds, 6),
            "extra_seconds": round(self.extra_seconds, 6),
        }

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
            result.seconds, result.extra_seconds = _parse_totals(found["seconds"], found["extra_seconds"])
            for context, sizes in found["entries"].items():
                known = result._entries.setdefault(Context.parse(context), {})
                for size, entry in sizes.items():
                    parsed = known[bucket_of(_parse_size(size))] = _parse_entry(entry)
                    result._serial = max(result._serial, parsed.serial)
                    for name in parsed.timings:
                        result._add_samples_to_line(Key(Context.parse(context), bucket_of(int(size))), parsed, name)
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
                yield Change(key.context, nbytes, name, seconds, counts=False)


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


def _to_json(lines: Sequence[_Line], head: Mapping[str, Any]) -> str:
    by_context: dict[str, list[str]] = {}
    for line in lines:
        by_context.setdefault(str(line.key.context), []).append(line.text)
    blocks = [f"  {json.dumps(context)}: {{\n" + ",\n".join(texts) + "\n  }" for context, texts in by_context.items()]
    facts = "".join(f" {json.dumps(name)}: {json.dumps(fact)},\n" for name, fact in head.items())
    return "{\n" + facts + ' "entries": {\n' + ",\n".join(blocks) + "\n }\n}\n"


def _describe(entry: Entry) -> dict[str, Any]:
    timings = {
        name: {
            "count": timing.count,
            "seconds": _rounded(timing.seconds),
            "spread": _rounded(timing.spread),
            "samples": timing.samples,
            "measured_at": timing.measured_at,
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
        count, measured_at = int(timing["count"]), int(timing["measured_at"])
        samples = tuple(map(float, timing["samples"]))
        if not 1 <= len(samples) <= min(count, MOST_SAMPLES) or not 0 <= measured_at <= _MOST_SERIAL:
            raise DictionaryError(
                f"damaged: {count} measurements, the last at {measured_at}, of which {samples} s are kept"
            )
        if not all(0 <= one <= _MOST_SECONDS for one in samples):
            raise DictionaryError(f"damaged: measurements of {samples} s")
        entry.timings[str(name)] = Timing(count, samples, measured_at)
    return entry


def _parse_totals(seconds: float, extra_seconds: float) -> tuple[float, float]:
    found = float(seconds), float(extra_seconds)
    if not all(0 <= one <= _MOST_SECONDS for one in found):
        raise DictionaryError(f"damaged: transfers of {seconds} s, of which exploring has cost {extra_seconds} s")
    return found
