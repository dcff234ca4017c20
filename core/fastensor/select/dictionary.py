"""Measured timings of each backend, by size and context (the Fastensor paper, section 4). Pure.

The paper's three dictionaries are views of this one: WDic is its writes, RDic its reads, WRDic the sums of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, Self

from fastensor.errors import FastensorError
from fastensor.files.arguments import as_nbytes, checks_keywords
from fastensor.files.shown import shown
from fastensor.files.words import counted, human_seconds, human_size
from fastensor.select.context import Context, bucket_of, scaled, size_of

MOST_SAMPLES = 9
"""The most samples of a backend that are kept: enough to tell backends apart if timings vary by half, and few enough to
believe a lasting change after five uses."""
_RECENT = 3
MOST_NBYTES = 64 << 10
"""The most bytes of a dictionary as JSON. The oldest entries are left out."""
MOST_SIZE = 1 << 63
"""The largest size of a file."""
VERSION = 2
_MOST_SERIAL = 1 << 53
_MOST_SECONDS = 1e9
"""30 years: longer than any transfer, or all transfers together, can have taken."""
_LEAST_SECONDS = 1e-9
"""The least time of a sample: with a coarse clock a transfer may seem to take no time."""
_FORMAT = "fastensor dictionary"
_FORGETTING = 0.98
"""Weight of a measurement relative to the next one: about the latest 50 decide."""
_ONE_SIZE = 1e-3
"""Below this relative variance (sizes within about 3 %), the slope is not fitted."""


class DictionaryError(FastensorError, ValueError):
    """The text or file is no dictionary, is damaged, or has another version."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a backend for one bucket of sizes."""

    count: int
    """Number of measurements."""
    samples: tuple[float, ...]
    """The latest measurements, in seconds, scaled to the bucket's largest size."""
    measured_at: int = 0
    """Number of transfers of the key, by any backend, at the last measurement of this backend."""

    @property
    def seconds(self) -> float:
        """The lower median of the samples. The first use of a backend may take longer than later uses (section 3.4), so
        the lesser of two samples counts. Other work of the machine slows a few samples."""
        return _quantile(self.samples, 1 / 2)

    @property
    def hoped_seconds(self) -> float:
        """``seconds``, or the lower median of the latest three samples if that is less: a backend that is seldom tried
        may have become faster."""
        return min(_quantile(self.samples[-_RECENT:], 1 / 2), self.seconds)

    @property
    def quartile(self) -> float:
        """The lower quartile of the samples."""
        return _quantile(self.samples, 1 / 4)

    @property
    def spread(self) -> float:
        """The difference between the longest and the shortest sample, in seconds."""
        return max(self.samples) - min(self.samples)


def _quantile(samples: Sequence[float], share: float) -> float:
    """The sample that this share of the others is less than, or the next lower one."""
    return max(sorted(samples)[int((len(samples) - 1) * share)], _LEAST_SECONDS)


class Line:
    """Latency plus bytes over bandwidth, fitted to measurements of one backend in one context.

    The fit minimizes squares of relative errors: a transfer of 4 KiB counts as much as one of 4 GiB, and a transfer
    that took ten times as long as expected has little weight.

    >>> line = Line()
    >>> for nbytes in (1000, 2000, 3000):
    ...     line.add(nbytes, 1.0 + nbytes / 1000)
    >>> round(line.seconds(10_000), 6)
    11.0
    """

    _weight = _bytes = _bytes_squared = _seconds = _product = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Add a measurement; ``seconds`` is above zero."""
        weight = 1.0 / (seconds * seconds)
        self._weight = _FORGETTING * self._weight + weight
        self._bytes = _FORGETTING * self._bytes + weight * nbytes
        self._bytes_squared = _FORGETTING * self._bytes_squared + weight * nbytes * nbytes
        self._seconds = _FORGETTING * self._seconds + weight * seconds
        self._product = _FORGETTING * self._product + weight * nbytes * seconds

    def seconds(self, nbytes: int) -> float:
        """The expected time of a transfer of ``nbytes``. At least one measurement was added before.

        If only one size was measured, larger sizes are expected to take longer in proportion, and smaller sizes equally
        long: that is the most that either can take.
        """
        mean_bytes, mean_seconds = self._bytes / self._weight, self._seconds / self._weight
        determinant = self._weight * self._bytes_squared - self._bytes * self._bytes
        if determinant > _ONE_SIZE * self._weight * self._bytes_squared:
            slope = (self._weight * self._product - self._bytes * self._seconds) / determinant
            latency = mean_seconds - slope * mean_bytes
            if slope >= 0 and latency >= 0:
                return latency + slope * nbytes
        return mean_seconds * max(nbytes / mean_bytes, 1.0) if mean_bytes else mean_seconds


class Key(NamedTuple):
    """A context and a bucket of sizes."""

    context: Context
    bucket: int


@dataclass(slots=True)
class Entry:
    """The timings of one key."""

    timings: dict[str, Timing] = field(default_factory=dict)
    """Timings by backend."""
    serial: int = 0
    """Rank in the order of changes: the latest changed entry has the largest."""

    @property
    def best(self) -> str | None:
        """The fastest backend."""
        return min(self.timings, key=lambda name: self.timings[name].seconds, default=None)

    @property
    def uses(self) -> int:
        """Number of measured transfers, by any backend."""
        return max(map(attrgetter("measured_at"), self.timings.values()), default=0)

    def learn(self, backend: str, sample: float) -> None:
        before = self.timings.get(backend)
        count, samples = (before.count, before.samples) if before is not None else (0, ())
        self.timings[backend] = Timing(count + 1, (*samples, sample)[-MOST_SAMPLES:], self.uses + 1)


_NOTHING = Entry()


@checks_keywords
class Change(NamedTuple):
    """A change of a dictionary: a measurement, or, if ``seconds`` is None, the removal of a backend's timings."""

    context: Context
    nbytes: int
    backend: str
    seconds: float | None = None
    extra_seconds: float = 0.0
    """Seconds by which the transfer took longer than by the best backend, because another one was tried."""
    counts: bool = True
    """True if the transfer was one of the user's. Measurements for their own sake (``fastensor tune``) do not add to
    the budget of exploring."""
    failed: bool = False
    """True if the backend failed: the seconds are lost, and are no measurement."""

    def __str__(self) -> str:
        what = f"{self.backend}, {self.context}, {human_size(self.nbytes)}"
        if self.seconds is None:
            return f"{what}: timings removed"
        return f"{what}: {'failed after ' * self.failed}{human_seconds(self.seconds)}"


@checks_keywords
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
        """Time of all measured transfers."""
        self.extra_seconds = 0.0
        """The part of ``seconds`` that exploring has cost."""

    @shown
    def __repr__(self) -> str:
        return f": {counted(len(self), 'sizes')} known in {counted(len(self._entries), 'contexts')}"

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def __iter__(self) -> Iterator[tuple[Key, Entry]]:
        """Yield all keys and entries, ordered by context, then by size."""
        for context in sorted(self._entries, key=str):
            for bucket, entry in sorted(self._entries[context].items(), key=itemgetter(0)):
                yield Key(context, bucket), entry

    def of(self, context: Context, nbytes: int | str) -> Entry:
        """The timings of a size, which is a number of bytes or in words (``"1GiB"``)."""
        return self.at(Key(context, bucket_of(as_nbytes(nbytes, "nbytes"))))

    def at(self, key: Key) -> Entry:
        """The timings of a key. Do not change them."""
        return self.within(key.context).get(key.bucket, _NOTHING)

    def contexts(self) -> Iterable[Context]:
        """The contexts that have, or had, timings."""
        return self._entries.keys()

    def within(self, context: Context) -> Mapping[int, Entry]:
        """The entries of a context by bucket. Do not change them."""
        return self._entries.get(context, {})

    def line(self, context: Context, backend: str) -> Line | None:
        """The model of a backend's time in a context, fitted to all sizes; None without measurements."""
        return self._lines.get((context, backend))

    def apply(self, change: Change) -> None:
        """Apply a change."""
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
        """The dictionary as readable JSON, one line for each size, of at most ``MOST_NBYTES``.

        Args:
            machine: the identity of the machine that was measured.
        """
        rows = [
            _Row(key, entry.serial, f'   "{size_of(key.bucket)}": {json.dumps(_describe(entry))}')
            for key, entry in self
        ]
        head = self._head(machine or {})
        left = MOST_NBYTES - len(_to_json([], head).encode())
        kept = set()
        for row in sorted(rows, key=lambda row: -row.serial):
            left -= row.most_nbytes
            if left < 0:
                break
            kept.add(row.key)
        return _to_json([row for row in rows if row.key in kept], head)

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
        """The dictionary that :meth:`to_json` has written.

        Raises:
            DictionaryError: the text is no dictionary, is damaged, or has another version.
        """
        return cls.with_machine(text)[0]

    @classmethod
    def with_machine(cls, text: str) -> tuple[Self, dict[str, str]]:
        """The dictionary that :meth:`to_json` has written, and the identity of the machine that was measured.

        Raises:
            DictionaryError: the text is no dictionary, is damaged, or has another version.
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
    """The changes that overwrite another dictionary's timings with those of this one, for the keys and backends of
    this one."""
    for key, entry in dictionary:
        nbytes = size_of(key.bucket)
        for name, timing in entry.timings.items():
            yield Change(key.context, nbytes, name)
            for seconds in timing.samples:
                yield Change(key.context, nbytes, name, seconds, counts=False)


class _Row(NamedTuple):
    """A line of the JSON: the timings of one key."""

    key: Key
    serial: int
    text: str

    @property
    def most_nbytes(self) -> int:
        """The most bytes that the row adds to the file: it may be the first row of its context."""
        return len(self.text.encode()) + len(str(self.key.context)) + 16


def _to_json(rows: Sequence[_Row], head: Mapping[str, Any]) -> str:
    by_context: dict[str, list[str]] = {}
    for row in rows:
        by_context.setdefault(str(row.key.context), []).append(row.text)
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
