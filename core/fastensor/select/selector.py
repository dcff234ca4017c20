"""Choosing a backend, and learning from how long it took. Decides, and moves no bytes."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import median
from typing import Any, Literal

from fastensor.select.choice import Choice, Explanation, Mode, SelectorStatistics, check_mode, human, shown, up_to
from fastensor.select.context import Context
from fastensor.select.dictionary import ENOUGH_TRIES, MOST_SAMPLES, Change, Dictionary, Key
from fastensor.select.explore import (
    HOPELESS,
    MOST_TRIES,
    in_order,
    next_to_try,
    relative_to,
    seconds_to_read,
    slowness_nearby,
)
from fastensor.select.sizes import bucket_of, scaled, size_of

_TIE = 1.03
"""Differences below that do not count."""
_DRIFT = 1.5
"""Having become so many times slower, or faster, is more than noise."""
_PATIENCE = 3
"""So many uses follow each try before a drift is a reason to try again, and in one process twice as many each time that
one was found as soon as that: where timings are noisy for good, at most a quarter of the transfers explore, and ever
fewer."""
_MOST_PATIENCE = 48
_NOTICED_SECONDS = 1.0
"""Trying something that takes less is no news to users."""

_logger = logging.getLogger("fastensor")
_counter: partial[defaultdict[str, int]] = partial(defaultdict, int)


@dataclass(slots=True)
class _Course:
    """What one key has been used for in this process. Ends with it, or with a refresh."""

    tries: defaultdict[str, int]
    """How often each backend was tried, measured or not, now or in an earlier process."""
    tries_to_read: defaultdict[str, int] = field(default_factory=_counter)
    """How often each was tried to find out how fast it is read what it writes."""
    begun: defaultdict[str, list[defaultdict[str, int]]] = field(default_factory=partial(defaultdict, list))
    """Tries of which nothing has been heard yet: where each was counted."""
    candidates: tuple[str, ...] = ()
    """Those of the last time."""
    withdrawn: defaultdict[str, int] = field(default_factory=_counter)
    """How often each was tried in vain: an error has come between that is no backend's fault."""
    failed: dict[str, str] = field(default_factory=dict)
    """Backends that could not do it, and why."""
    explored: set[tuple[str, ...]] = field(default_factory=set)
    """Candidates of which it is known."""
    patience: int = _PATIENCE
    """How many uses for each try there are before a drift matters."""
    before: Mapping[str, float] | None = None
    """How many times as long as the best each took before a refresh; None if it is the first time."""

    def end_try(self, backend: str) -> defaultdict[str, int] | None:
        """Something was heard of a try; returns where it was counted, or None if none was begun."""
        begun = self.begun[backend]
        return begun.pop() if begun else None

    @property
    def possible(self) -> tuple[str, ...]:
        """The candidates of the last time, without those that cannot do it."""
        return tuple(name for name in self.candidates if name not in self.failed)


class Selector:
    """Chooses the backend for a transfer, by what earlier ones took. Every method may be called from several threads.

    Whoever moves bytes asks :meth:`choose`, and then tells :meth:`record` how long it took, or :meth:`failed` that it
    could not be done. A choice costs some microseconds.

    Args:
        dictionary: what is known already; what is learned is added to it.
        explore: whether backends are tried that nothing is known of. Without, choices depend on the dictionary alone,
            which never changes then: they are deterministic.
        mode: what files are written for: to be written fast, to be read fast later, or both.
        refresh_every: forget a size and context, and explore it anew, after so many uses; None means only when its
            timings drift.
        on_change: called with everything that is learned, by the thread that tells.

    >>> selector, context = Selector(), Context("write")
    >>> for seconds in (3.0, 1.0, 3.1, 1.1, 1.0):  # of numpy, direct, and so on: numpy turns out to be the slower one
    ...     choice = selector.choose(1 << 30, context, ["direct", "numpy"])
    ...     selector.record(1 << 30, context, choice.backend, seconds)
    >>> selector.choose(1 << 30, context, ["direct", "numpy"])
    Choice(backend='direct', reason='the fastest: 1 s for up to 1 GiB', exploring=False)
    """

    def __init__(
        self,
        dictionary: Dictionary | None = None,
        *,
        explore: bool = True,
        mode: Mode = "write",
        refresh_every: int | None = None,
        on_change: Callable[[Change], None] = lambda change: None,
    ) -> None:
        self._dictionary = Dictionary() if dictionary is None else dictionary
        self._explore = explore
        self.mode = mode
        self.refresh_every = refresh_every
        self._on_change = on_change
        self._courses: dict[Key, _Course] = {}
        self._counts: Counter[str] = Counter()
        self._renew_lock()
        _selectors.add(self)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

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
    def mode(self) -> Mode:
        """What files are written for. May be changed at any time."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        self._mode: Mode = check_mode(mode)

    @property
    def refresh_every(self) -> int | None:
        """After how many uses a size and context is explored anew. May be changed at any time."""
        return self._refresh_every

    @refresh_every.setter
    def refresh_every(self, uses: int | None) -> None:
        if uses is not None and uses < 1:
            raise ValueError(f"refresh_every is at least 1 or None, found {uses}")
        self._refresh_every = uses

    @property
    def dictionary(self) -> Dictionary:
        """A copy of what is known."""
        with self._lock:
            return deepcopy(self._dictionary)

    def choose(
        self,
        nbytes: int,
        context: Context,
        candidates: Iterable[str],
        mode: Mode | None = None,
        default: str | None = None,
        *,
        learn: bool = True,
    ) -> Choice:
        """Decide which backend moves so many bytes.

        Args:
            nbytes: how many.
            context: in which circumstances.
            candidates: the backends that can; at least one.
            mode: what a file is written for; None means what the selector was made for. Of no account for reads.
            default: what to use where nothing is known and nothing is to be tried; None means the candidate that is
                tried first.
            learn: whether it will be told how long it took. If not, nothing is tried.
        """
        mode = check_mode(mode or self._mode)
        key = Key(context, bucket_of(nbytes))
        possible = in_order(candidates)
        with self._lock:
            course = self._course(key)
            course.candidates = possible
            choice, why = self._decide(key, course, possible, mode, default, try_others=self.explore and learn)
            if choice.exploring:
                tries = course.tries if why == "to write" else course.tries_to_read
                tries[choice.backend] += 1
                course.begun[choice.backend].append(tries)
            elif self.explore and learn:
                course.explored.add(possible)
            return choice

    def record(self, nbytes: int, context: Context, backend: str, seconds: float) -> None:
        """A backend has moved so many bytes in so many seconds.

        The first few timings are learned; later ones only tell whether these still hold.
        """
        key = Key(context, bucket_of(nbytes))
        with self._lock:
            course = self._course(key)
            if not self.explore:
                self._counts["exploited"] += 1
                return
            tried = course.end_try(backend)
            exploring = tried is not None
            self._counts["explored" if exploring else "exploited"] += 1
            if exploring:
                self._say_if_slow(key, course, nbytes, backend, seconds)
            later = tried is not course.tries and course.tries[backend] >= MOST_TRIES
            if not exploring and not later:  # nobody had to choose
                course.tries[backend] += 1
            self._learn(Change(context, nbytes, backend, seconds, later))
            if not exploring and later:
                self._look_for_drift(key, course, backend)

    def failed(self, nbytes: int, context: Context, backend: str, reason: str) -> None:
        """A backend could not do it: it is not used again for that until the next refresh, in this process."""
        with self._lock:
            self._counts["failed"] += 1
            course = self._course(Key(context, bucket_of(nbytes)))
            course.failed[backend] = reason
            course.end_try(backend)

    def withdrawn(self, nbytes: int, context: Context, backend: str) -> None:
        """Nothing will be heard of a transfer that was to explore, for a reason that is not the backend's: the disk was
        full, say. It does not count."""
        with self._lock:
            course = self._course(Key(context, bucket_of(nbytes)))
            tries = course.end_try(backend)
            if tries is not None:
                tries[backend] -= 1
                course.withdrawn[backend] += 1
                course.explored.clear()

    def explain(
        self,
        nbytes: int,
        context: Context,
        candidates: Iterable[str] | None = None,
        mode: Mode | None = None,
        default: str | None = None,
    ) -> Explanation:
        """What would be chosen, why, and what is known. Changes nothing.

        Args:
            candidates: the backends that can; None means those that could the last time, or else all that are known of.
            nbytes, context, mode, default: as for :meth:`choose`.

        Raises:
            ValueError: there are no candidates, and none was ever measured.
        """
        key = Key(context, bucket_of(nbytes))
        with self._lock:
            course = self._courses.get(key) or self._new_course(key)
            if candidates is None:
                candidates = course.candidates or sorted(
                    {name for _, entry in self._dictionary for name in entry.timings}
                )
            choice, _ = self._decide(
                key, course, in_order(candidates), check_mode(mode or self._mode), default, try_others=self.explore
            )
            timings = dict(self._dictionary.at(key).timings)
            return Explanation(size_of(key.bucket), context, choice, timings, dict(course.failed))

    def adopt(self, dictionary: Dictionary, *, anew: bool = False) -> None:
        """Forget what is known, and take over what somebody else has learned. Nobody is told.

        Args:
            anew: forget what could not be done here, too.
        """
        with self._lock:
            self._dictionary = deepcopy(dictionary)
            failed = {key: course.failed for key, course in self._courses.items() if course.failed and not anew}
            self._courses.clear()
            for key, reasons in failed.items():
                self._course(key).failed = reasons

    def statistics(self) -> SelectorStatistics:
        """What has been done so far."""
        with self._lock:
            return SelectorStatistics(**{field.name: self._counts[field.name] for field in fields(SelectorStatistics)})

    def __getstate__(self) -> dict[str, Any]:
        """What is known and how it is used; copies learn by themselves, and tell nobody."""
        return {
            "dictionary": self.dictionary,
            "explore": self.explore,
            "mode": self.mode,
            "refresh_every": self.refresh_every,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy begins like any other

    # --- inside, with the lock held

    def _course(self, key: Key) -> _Course:
        course = self._courses.get(key)
        if course is None:
            course = self._courses[key] = self._new_course(key)
        return course

    def _new_course(self, key: Key) -> _Course:
        timings = self._dictionary.at(key).timings
        counts = {name: min(timing.count, MOST_TRIES) for name, timing in timings.items()}
        if MOST_TRIES in counts.values():  # somebody has found out what is best, and needed no more of the others
            counts = {name: MOST_TRIES if count >= ENOUGH_TRIES else count for name, count in counts.items()}
        return _Course(_counter(counts))

    def _decide(
        self,
        key: Key,
        course: _Course,
        candidates: tuple[str, ...],
        mode: Mode,
        default: str | None,
        *,
        try_others: bool,
    ) -> tuple[Choice, Literal["to write", "to read"]]:
        """What is chosen, and by which of its speeds. Changes nothing."""
        if not candidates:
            raise ValueError("there is no backend to choose")
        possible = tuple(name for name in candidates if name not in course.failed) if course.failed else candidates
        if try_others and candidates not in course.explored:
            choice = self._next_try(key, course, possible)
            if choice is not None:
                return choice, "to write"
        if mode != "write" and key.context.operation == "write":
            reads = seconds_to_read(self._dictionary, key)
            choice = self._next_try_to_read(key, course, possible, reads) if try_others else None
            if choice is not None:
                return choice, "to read"
            choice = self._for_reading(key, possible, mode, reads)
            if choice is not None:
                return choice, "to read"
        return self._best(key, course, candidates, default), "to write"

    def _next_try(self, key: Key, course: _Course, possible: tuple[str, ...]) -> Choice | None:
        if course.before is None:
            slowness, size = slowness_nearby(self._dictionary, key)
            where = f"at {human(size)}"
        else:
            slowness, where = course.before, "before"
        slowness = relative_to(possible, slowness)
        entry = self._dictionary.at(key)
        name = next_to_try(
            entry, course.tries, slowness, possible, spare=course.before is None, withdrawn=course.withdrawn
        )
        if name is None:
            return None
        known = entry.slowness
        if name in known:
            slowness, where = known, "so far"
        times = f"; {slowness[name]:.2f} × the best {where}" if name in slowness else ""
        number = course.tries[name] + 1
        return Choice(name, f"tried for {up_to(key.bucket)}, {number} of at most {MOST_TRIES}{times}", exploring=True)

    def _next_try_to_read(
        self, key: Key, course: _Course, possible: tuple[str, ...], reads: Mapping[str, float]
    ) -> Choice | None:
        """For RDic and WRDic, what a backend writes has to be read some time."""
        timings, tries = self._dictionary.at(key).timings, course.tries_to_read
        unknown = [name for name in possible if name in timings and name not in reads and tries[name] < MOST_TRIES]
        if not unknown:
            return None
        name = min(unknown, key=lambda name: tries[name] + course.withdrawn[name])
        number = f"{tries[name] + 1} of at most {MOST_TRIES}"
        return Choice(name, f"tried to learn how fast it is read, for {up_to(key.bucket)}, {number}", exploring=True)

    def _for_reading(
        self, key: Key, possible: tuple[str, ...], mode: Mode, reads: Mapping[str, float]
    ) -> Choice | None:
        """By RDic or WRDic (Algorithm 1, lines 9 to 16)."""
        timings = self._dictionary.at(key).timings
        known = [name for name in possible if name in timings and name in reads]
        if not known:
            return None
        if mode == "read":
            best = min(known, key=reads.__getitem__)
            return Choice(best, f"the fastest to read: {shown(reads[best])} for {up_to(key.bucket)}")
        best = min(known, key=lambda name: timings[name].seconds + reads[name])
        both = timings[best].seconds + reads[best]
        return Choice(best, f"the fastest to write and read: {shown(both)} for {up_to(key.bucket)}")

    def _best(self, key: Key, course: _Course, candidates: tuple[str, ...], default: str | None) -> Choice:
        failed = course.failed
        possible = [name for name in candidates if name not in failed] if failed else candidates
        timings = self._dictionary.at(key).timings
        known = {name: timings[name].seconds for name in possible if name in timings}
        if known:
            best = min(known, key=known.__getitem__)
            return Choice(best, f"the fastest: {shown(known[best])} for {up_to(key.bucket)}")
        slowness, size = slowness_nearby(self._dictionary, key)
        near = [name for name in possible if name in slowness]
        if near:
            return Choice(min(near, key=slowness.__getitem__), f"the fastest at {human(size)}")
        name = next((name for name in (default, *possible) if name in possible), candidates[0])
        return Choice(name, f"by size: nothing was measured for {up_to(key.bucket)}")

    def _learn(self, change: Change) -> None:
        self._dictionary.apply(change)
        try:
            self._on_change(change)
        except Exception:  # what was moved is moved
            _logger.exception("on_change of a fastensor.Selector has raised, told of %s", change)

    def _look_for_drift(self, key: Key, course: _Course, backend: str) -> None:
        """Whether what is known still holds, by the latest uses, of other processes too."""
        entry = self._dictionary.at(key)
        timing = entry.timings[backend]
        uses = sum([one.uses for one in entry.timings.values()])
        least = min(timing.latest, default=timing.seconds)
        perhaps = least > _TIE * timing.seconds or least * _DRIFT < timing.seconds
        if perhaps and len(timing.latest) == MOST_SAMPLES:
            quiet = course.patience * max(sum(len(one.samples) for one in entry.timings.values()), MOST_TRIES)
            known = [one.seconds for name, one in entry.timings.items() if name != backend and name in course.possible]
            slower = min([_DRIFT * timing.seconds, *(_TIE * other for other in known if other >= timing.seconds)])
            usual = median(timing.latest)
            if uses >= quiet and (least > slower or usual * _DRIFT < timing.seconds):
                patience = _PATIENCE if uses > 2 * quiet else min(2 * course.patience, _MOST_PATIENCE)
                self._refresh(key, f"{backend} takes {shown(usual)}, and took {shown(timing.seconds)}", patience)
                return
        if self.refresh_every is not None and uses >= self.refresh_every:
            self._refresh(key, f"it was used {uses} times", _PATIENCE)

    def _refresh(self, key: Key, why: str, patience: int) -> None:
        """Forget what was measured, of all backends: they are compared by timings of the same time."""
        _logger.info("exploring %s, %s anew: %s", key.context, up_to(key.bucket), why)
        self._counts["refreshed"] += 1
        before = {**(self._courses[key].before or {}), **self._dictionary.at(key).slowness}
        self._courses[key] = _Course(_counter(), patience=patience, before=before)
        if key.context.operation == "read":  # others have to be written before they can be read again
            for other, course in self._courses.items():
                if other.bucket == key.bucket and other.context.operation == "write":
                    course.tries_to_read.clear()
        self._learn(Change(key.context, size_of(key.bucket), None))

    def _say_if_slow(self, key: Key, course: _Course, nbytes: int, backend: str, seconds: float) -> None:
        timings = self._dictionary.at(key).timings
        others = [name for name in course.possible if name in timings and name != backend]
        if not others:
            return
        best = min(others, key=lambda name: timings[name].seconds)
        times = scaled(seconds, nbytes) / timings[best].seconds
        if times > HOPELESS:
            noticed = seconds > _NOTICED_SECONDS
            _logger.log(
                logging.WARNING if noticed else logging.INFO,
                "%s was tried for %s (%s), and took %s, %.1f × as long as %s",
                backend, human(nbytes), key.context, shown(seconds), times, best,
            )  # fmt: skip


_selectors: weakref.WeakSet[Selector] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: whoever holds one does not live there."""
    for selector in _selectors:
        selector._renew_lock()


os.register_at_fork(after_in_child=_renew_locks)
