"""Choosing a backend, and learning from how long it took. Decides, and moves no bytes."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any, Literal, TypeAlias, get_args

from fastensor.select.context import Context
from fastensor.select.dictionary import Change, Dictionary, Key, Timing
from fastensor.select.explore import HOPELESS, MOST_TRIES, in_order, next_to_try, seconds_to_read, slowness_nearby
from fastensor.select.sizes import bucket_of, scaled, size_of

Mode: TypeAlias = Literal["write", "read", "write_read"]
"""Which of the paper's dictionaries decides what to write with: WDic, RDic or WRDic."""

_TIE = 1.03
"""Differences below that do not count: the choice stays as it is."""
_DRIFT = 1.5
"""Having become so many times slower, or faster, is more than noise."""
_DRIFT_SAMPLES = 3
_NOTICED_SECONDS = 1.0
"""Trying something that takes less is no news to users."""

_logger = logging.getLogger("fastensor")


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision, and why."""

    backend: str
    reason: str
    exploring: bool = False
    """Whether it is tried to find out, rather than known to be the fastest."""


@dataclass(frozen=True, slots=True)
class SelectorStatistics:
    """What a :class:`Selector` has done."""

    explored: int
    """Transfers by a backend that was tried."""
    exploited: int
    """Transfers by one that was known to be the fastest."""
    failed: int
    """How often a backend could not do it."""
    refreshed: int
    """How often a size and context was explored anew."""


@dataclass(slots=True)
class _Course:
    """How far one key has been explored. Not kept when the process ends."""

    tries: Counter[str]
    choice: Choice | None = None
    """Once it is known."""
    uses: int = 0
    """Since then."""
    expected: float = 0.0
    """What it took then, in scaled seconds."""
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=_DRIFT_SAMPLES))
    """What it takes now."""


class Selector:
    """Chooses the backend for a transfer, by what earlier ones took. Every method may be called from several threads.

    Whoever moves bytes asks :meth:`choose`, and then tells :meth:`record` how long it took, or :meth:`failed` that it
    could not be done.

    Args:
        dictionary: what is known already; what is learned is added to it.
        explore: whether backends are tried that nothing is known of. Without, choices depend on the dictionary alone,
            which never changes then: they are deterministic.
        refresh_every: explore a size and context anew after so many uses; None means only when its timings drift.
        on_change: called with everything that is learned, by the thread that tells.

    >>> selector, context = Selector(), Context("write")
    >>> for seconds in {"numpy": 3.0, "direct": 1.0}.values():
    ...     choice = selector.choose(1 << 30, context, ["direct", "numpy"])
    ...     selector.record(1 << 30, context, choice.backend, seconds)
    >>> selector.choose(1 << 30, context, ["direct", "numpy"]).backend
    'direct'
    """

    def __init__(
        self,
        dictionary: Dictionary | None = None,
        *,
        explore: bool = True,
        refresh_every: int | None = None,
        on_change: Callable[[Change], None] = lambda change: None,
    ) -> None:
        if refresh_every is not None and refresh_every < 1:
            raise ValueError(f"refresh_every is at least 1 or None, found {refresh_every}")
        self._dictionary = Dictionary() if dictionary is None else dictionary
        self._explore = explore
        self._refresh_every = refresh_every
        self._on_change = on_change
        self._lock = threading.RLock()
        self._courses: dict[Key, _Course] = {}
        self._counts: Counter[str] = Counter()

    @property
    def explore(self) -> bool:
        """Whether backends are tried, and timings learned. May be changed at any time."""
        return self._explore

    @explore.setter
    def explore(self, explore: bool) -> None:
        with self._lock:
            self._explore = explore
            self._courses.clear()

    @property
    def dictionary(self) -> Dictionary:
        """A copy of what is known."""
        with self._lock:
            return deepcopy(self._dictionary)

    def choose(
        self, nbytes: int, context: Context, candidates: Iterable[str], mode: Mode = "write", default: str | None = None
    ) -> Choice:
        """Decide which backend moves so many bytes.

        Args:
            nbytes: how many.
            context: in which circumstances.
            candidates: the backends that can.
            mode: what a file is written for: to be written fast, to be read fast later, or both.
            default: what to use where nothing is known and nothing is to be tried; None means the first candidate.
        """
        if mode not in get_args(Mode):
            raise ValueError(f"mode is one of {get_args(Mode)}, found {mode!r}")
        key = Key(context, bucket_of(nbytes))
        with self._lock:
            course = self._courses.get(key) or self._begin(key)
            possible = in_order(candidates)
            if course.choice is not None and course.choice.backend not in possible:
                course.choice = None
            if course.choice is None:
                choice = self._next_try(key, course, possible)
                if choice is not None:
                    return choice
                course.choice = self._best(key, possible, default)
                course.expected = self._seconds(key, course.choice.backend)
            return self._for_reading(key, possible, mode) or course.choice

    def record(self, nbytes: int, context: Context, backend: str, seconds: float) -> None:
        """A backend has moved so many bytes in so many seconds."""
        key = Key(context, bucket_of(nbytes))
        with self._lock:
            course = self._courses.get(key) or self._begin(key)
            exploring = self.explore and course.choice is None and course.tries[backend] < MOST_TRIES
            self._counts["explored" if exploring else "exploited"] += 1
            if not self.explore:
                return
            if exploring:
                self._say_if_slow(key, nbytes, backend, seconds)
            self._learn(Change(context, nbytes, backend, seconds))
            course.tries[backend] += 1
            if course.choice is not None:
                self._watch(key, course, backend, scaled(seconds, nbytes))

    def failed(self, nbytes: int, context: Context, backend: str, reason: str) -> None:
        """A backend could not do it: it is not tried again until the next refresh."""
        key = Key(context, bucket_of(nbytes))
        with self._lock:
            self._counts["failed"] += 1
            course = self._courses.get(key) or self._begin(key)
            course.choice = None
            if self.explore:
                self._learn(Change(context, nbytes, backend, reason=reason))

    def explain(
        self, nbytes: int, context: Context, candidates: Iterable[str], mode: Mode = "write", default: str | None = None
    ) -> Explanation:
        """What would be chosen, why, and what is known. Changes nothing."""
        key = Key(context, bucket_of(nbytes))
        with self._lock:
            known = self._courses.get(key)
            course = self._begin(key) if known is None else replace(known)
            possible = in_order(candidates)
            choice = None if mode == "write" else self._for_reading(key, possible, mode)
            choice = choice or course.choice or (self._next_try(key, course, possible) if self.explore else None)
            if known is None:
                del self._courses[key]
            entry = self._dictionary.at(key)
            return Explanation(
                size_of(key.bucket), context, choice or self._best(key, possible, default), dict(entry.timings),
                dict(entry.excluded),
            )  # fmt: skip

    def adopt(self, dictionary: Dictionary) -> None:
        """Forget what is known, and take over what somebody else has learned. Nobody is told."""
        with self._lock:
            self._dictionary = deepcopy(dictionary)
            self._courses.clear()

    def statistics(self) -> SelectorStatistics:
        """What has been done so far."""
        with self._lock:
            return SelectorStatistics(**{field.name: self._counts[field.name] for field in fields(SelectorStatistics)})

    def __getstate__(self) -> dict[str, Any]:
        """What is known and how it is used; copies learn by themselves, and tell nobody."""
        return {"dictionary": self.dictionary, "explore": self.explore, "refresh_every": self._refresh_every}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy begins like any other

    # --- inside, with the lock held

    def _begin(self, key: Key) -> _Course:
        timings = self._dictionary.at(key).timings
        tries = Counter({name: min(timing.count, MOST_TRIES) for name, timing in timings.items()})
        course = self._courses[key] = _Course(tries)
        return course

    def _for_reading(self, key: Key, candidates: tuple[str, ...], mode: Mode) -> Choice | None:
        """By RDic or WRDic, if they are complete (Algorithm 1, lines 9 to 16)."""
        if mode == "write":
            return None
        entry = self._dictionary.at(key)
        reads = seconds_to_read(self._dictionary, key)
        writes = {name: timing.seconds for name, timing in entry.timings.items()}
        possible = [name for name in candidates if name not in entry.excluded and name in writes]
        if not possible or any(name not in reads for name in possible):
            return None
        if mode == "read":
            best = min(possible, key=lambda name: reads[name])
            return Choice(best, f"the fastest to read: {_shown(reads[best])} for {_size(key)}")
        best = min(possible, key=lambda name: writes[name] + reads[name])
        return Choice(best, f"the fastest to write and read: {_shown(writes[best] + reads[best])} for {_size(key)}")

    def _next_try(self, key: Key, course: _Course, candidates: tuple[str, ...]) -> Choice | None:
        if not self.explore:
            return None
        slowness, size = slowness_nearby(self._dictionary, key)
        name = next_to_try(self._dictionary.at(key), course.tries, slowness, candidates)
        if name is None:
            return None
        number = course.tries[name] + 1
        known = f"; {slowness[name]:.2f} × the best at {_human(size)}" if name in slowness else ""
        return Choice(name, f"tried for {_size(key)}, {number} of at most {MOST_TRIES}{known}", exploring=True)

    def _best(self, key: Key, candidates: tuple[str, ...], default: str | None) -> Choice:
        entry = self._dictionary.at(key)
        known = [name for name in candidates if name in entry.timings and name not in entry.excluded]
        if known:
            best = min(known, key=lambda name: entry.timings[name].seconds)
            return Choice(best, f"the fastest: {_shown(entry.timings[best].seconds)} for {_size(key)}")
        slowness, size = slowness_nearby(self._dictionary, key)
        near = [name for name in candidates if name in slowness and name not in entry.excluded]
        if near:
            return Choice(min(near, key=slowness.__getitem__), f"the fastest at {_human(size)}")
        return Choice(default or candidates[0], f"by size: nothing was measured for {_size(key)}")

    def _seconds(self, key: Key, backend: str) -> float:
        timing = self._dictionary.at(key).timings.get(backend)
        return 0.0 if timing is None else timing.seconds

    def _learn(self, change: Change) -> None:
        self._dictionary.apply(change)
        self._on_change(change)

    def _watch(self, key: Key, course: _Course, backend: str, seconds: float) -> None:
        """Whether the choice still holds."""
        assert course.choice is not None
        course.uses += 1
        if backend == course.choice.backend:
            course.latest.append(seconds)
        if len(course.latest) == _DRIFT_SAMPLES and course.expected:
            change = median(course.latest) / course.expected
            if not 1 / _DRIFT <= change <= _DRIFT:
                self._learn(
                    Change(key.context, size_of(key.bucket), course.choice.backend)
                )  # older timings are no more true
                for latest in course.latest:
                    self._learn(Change(key.context, size_of(key.bucket), course.choice.backend, latest))
                return self._refresh(key, f"{course.choice.backend} takes {change:.2f} × as long as before")
        if self._refresh_every is not None and course.uses >= self._refresh_every:
            return self._refresh(key, f"it was used {course.uses} times")
        entry = self._dictionary.at(key)
        best = entry.best
        if best is not None and self._seconds(key, course.choice.backend) > _TIE * self._seconds(key, best):
            course.choice = Choice(best, f"the fastest by now: {_shown(self._seconds(key, best))} for {_size(key)}")
            course.latest.clear()
            course.expected = self._seconds(key, best)
        return None

    def _refresh(self, key: Key, why: str) -> None:
        _logger.info("exploring %s, %s anew: %s", key.context, _size(key), why)
        self._counts["refreshed"] += 1
        for name in tuple(self._dictionary.at(key).excluded):
            self._learn(Change(key.context, size_of(key.bucket), name))
        self._courses[key] = _Course(Counter())

    def _say_if_slow(self, key: Key, nbytes: int, backend: str, seconds: float) -> None:
        entry = self._dictionary.at(key)
        best = entry.best
        if best in (None, backend) or not entry.timings[best].seconds:
            return
        times = scaled(seconds, nbytes) / entry.timings[best].seconds
        if times > HOPELESS:
            noticed = seconds > _NOTICED_SECONDS
            _logger.log(
                logging.WARNING if noticed else logging.INFO,
                "%s was tried for %s (%s), and took %s, %.1f × as long as %s; it is not tried again at that size",
                backend, _human(nbytes), key.context, _shown(seconds), times, best,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a selector knows about one size, and what it makes of it. As text, a table."""

    nbytes: int
    """The largest size that it holds for."""
    context: Context
    choice: Choice
    timings: Mapping[str, Timing]
    """By backend, for that size."""
    excluded: Mapping[str, str]
    """Backends that could not do it, and why."""

    def __str__(self) -> str:
        lines = [f"{self.context}, up to {_human(self.nbytes)}: {self.choice.backend} ({self.choice.reason})"]
        for name, timing in sorted(self.timings.items(), key=lambda item: item[1].seconds):
            shown = f"{_shown(timing.seconds)} ± {_shown(timing.spread)} in {timing.count} measurements"
            lines.append(f"  {name}: {shown}")
        return "\n".join([*lines, *(f"  {name}: not possible ({reason})" for name, reason in self.excluded.items())])


def _size(key: Key) -> str:
    return f"up to {_human(size_of(key.bucket))}"


def _human(nbytes: int) -> str:
    return f"{nbytes / 2**20:.3g} MiB" if nbytes >= 1 << 20 else f"{nbytes / 2**10:.3g} KiB"


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
