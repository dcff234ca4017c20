"""Choosing a backend, and learning from how long it took. Decides, and moves no bytes.

A rule by size and residency, the prior, decides until something is known. Other backends are tried only as far as that
costs next to nothing: see :class:`Selector`. Choices stand in a table until enough is learned to decide anew.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from math import inf
from typing import Any, NamedTuple, get_args

from fastensor.errors import BackendUnavailableError
from fastensor.files.arguments import as_nbytes, check_flags, check_word, checks_keywords
from fastensor.files.forks import lock_of
from fastensor.files.shown import shown
from fastensor.files.words import counted, human_seconds, human_size
from fastensor.select.choice import Explanation, Mode, SelectorStatistics, in_order, seconds_to_read, up_to
from fastensor.select.context import Choice, Context, bucket_of, scaled, size_of
from fastensor.select.dictionary import Change, Dictionary, Key

SHARE = 0.05
"""The share of the time of all transfers that exploring may cost."""
CREDIT_SECONDS = 0.05
"""Time that exploring may cost in advance, but no more than ``SHARE`` of the transfer at hand."""
_LEAST_RISK = 0.25
"""The least expected cost of a try, as a share of the best backend's time: expectations are often wrong."""
_UNKNOWN = 2.0
"""The expected time of an unknown backend, relative to the best backend's time."""
_LEAST_GAP, _MOST_GAP = 10, 1000
"""The least and the most uses of a size after which a backend is tried again."""
_GROWTH = 5
"""Between the two, a backend is tried again when uses have grown by a fifth: timings are checked for ever, at ever less
cost. A choice stands for a fifth of the uses, too, ..."""
_MOST_STANDING = 5
"""... but for no more: a lasting change is to be believed after five uses."""
_NOTICED_SECONDS = 1.0
"""A try that has cost more is logged as a warning."""

_logger = logging.getLogger("fastensor")


class _Question(NamedTuple):
    """Parameters of a choice besides its key, and what was learned."""

    candidates: tuple[str, ...]
    mode: Mode
    default: str | None
    explore: bool
    """True if backends may be tried."""
    paper: bool


class _Standing(NamedTuple):
    """A choice that is no try, and how long it stands."""

    question: _Question
    choice: Choice
    uses: int
    """Further uses for which it stands, ..."""
    until_seconds: float
    """... and until all transfers, of other sizes too, have taken so long: then the budget may cover a try."""


class _History:
    """The uses of one key in this process."""

    def __init__(self) -> None:
        self.candidates: tuple[str, ...] = ()
        """The candidates of the latest choice."""
        self.failed: dict[str, str] = {}
        """Backends that have failed, and the reasons."""
        self.unable: set[str] = set()
        """Candidates that could not when the latest choice was made."""
        self.uses = 0
        """Number of choices that might have been tries."""
        self.tried_at: dict[str, int] = {}
        """By backend, ``uses`` at its latest try, whether the try was recorded or not."""
        self.behind_seconds = 0.0
        """Seconds by which transfers took longer than the prior's expected time, by backends that were believed to be
        faster; negative if these were faster."""
        self.disappointing: set[str] = set()
        """Backends that turned out slower than the prior. They are not used until a try shows that they are faster."""
        self.risk_seconds = 0.0
        """The expected cost of a try that is under way."""
        self.standing: _Standing | None = None
        """The latest choice, if it still stands."""


class _Expected(NamedTuple):
    """The expected times of the candidates, in seconds."""

    of: Mapping[str, float]
    """By measured backend, the time that counts: to write, to read, or both."""
    to_write: Mapping[str, float]
    """By measured backend, the time of the transfer at hand alone."""


@checks_keywords
class Selector:
    """Chooses the backend of a transfer, by the times of earlier ones. Every method may be called from several threads.

    Code that moves bytes calls :meth:`choose`, and then :meth:`record` with the time, or :meth:`failed`. A choice
    stands for a fifth of the uses of its size so far, five at most, while no try can become due: until then it is
    looked up in a table. It is made anew at once when a try ends, when a backend fails, and when one that was believed
    to be faster turns out slower.

    The prior, which the caller names by its ``default``, is used until it was measured. Then other backends may be
    tried. **Exploring may never have cost more than 5 % of the time that transfers have taken so far**, here and in the
    dictionary, plus a credit of 50 ms or 5 % of the transfer at hand, whichever is less.

    The cost of a try is the time that it takes longer than the best backend is expected to. A try is made if its
    expected cost fits into the budget that is left, less the expected costs of tries that are under way. The expected
    time comes from the backend's own timings, or else from its timings of other sizes (a latency and a bandwidth), or
    else is twice the best backend's time. If a try costs more than expected, no try is made until the budget has grown.

    A backend that was measured to be faster than the prior, by more than the prior's own timings vary, is used as long
    as its transfers together do not take longer than the prior was expected to. If they do, the loss is charged to the
    budget, too. So transfers of one size take at most about 1.05 × the prior's time, the credit, and one try that
    disappoints, or two if the machine has just changed for good. Processes that begin at once each spend the budget
    that they have found.

    Args:
        dictionary: the timings that are known already; new timings are added to it.
        explore: whether backends are tried, and timings learned. If not, choices depend on the dictionary alone, which
            then never changes: they are deterministic.
        mode: what files are written for: to be written fast, to be read fast later, or both.
        paper: explore by Algorithm 1 of the Fastensor paper instead, which tries every backend once at each size,
            whatever it costs, and uses the fastest from then on.
        on_change: called with each change of the dictionary, in the thread that records it.

    >>> selector, context = Selector(), Context("write")
    >>> for seconds in [1.0] * 19 + [0.25] * 5:  # of direct, until numpy is tried, which turns out to be faster
    ...     choice = selector.choose(1 << 30, context, ["direct", "numpy"], default="direct")
    ...     selector.record(1 << 30, context, choice.backend, seconds, choice)
    >>> choice.backend, choice.reason
    ('numpy', 'the fastest: 250 ms for up to 1 GiB')
    """

    def __init__(
        self,
        dictionary: Dictionary | None = None,
        *,
        explore: bool = True,
        mode: Mode = "write",
        paper: bool = False,
        on_change: Callable[[Change], None] = lambda change: None,
    ) -> None:
        check_flags(explore=explore, paper=paper)
        if not isinstance(dictionary, Dictionary | None):
            raise TypeError(f"dictionary is a fastensor.Dictionary or None, found {dictionary!r}")
        self._dictionary = Dictionary() if dictionary is None else dictionary
        self.explore = explore
        """True if backends are tried, and timings learned. May be changed at any time."""
        self.mode = mode
        self.paper = paper
        """True if the paper's Algorithm 1 explores. May be changed at any time."""
        self._on_change = on_change
        self._histories: defaultdict[Key, _History] = defaultdict(_History)
        self._counts: Counter[str] = Counter()
        self._lock = lock_of(self)

    @shown
    def __repr__(self) -> str:
        """
        >>> Selector(explore=False)
        <Selector: does not explore, mode 'write', 0 sizes known, 0 transfers>
        """
        how = "explores" if self.explore else "does not explore"
        with self._lock:
            known, moved = len(self._dictionary), self._counts.total()
        return f": {how}, mode {self.mode!r}, {counted(known, 'sizes')} known, {counted(moved, 'transfers')}"

    @property
    def mode(self) -> Mode:
        """Purpose of files that are written. May be changed at any time."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        check_word(mode, "mode", get_args(Mode))
        self._mode: Mode = mode

    @property
    def dictionary(self) -> Dictionary:
        """A copy of the dictionary."""
        with self._lock:
            return deepcopy(self._dictionary)

    def choose(
        self,
        nbytes: int | str,
        context: Context,
        candidates: Iterable[str],
        mode: Mode | None = None,
        default: str | None = None,
        *,
        learn: bool = True,
        can: Callable[[str], bool] = lambda name: True,
    ) -> Choice:
        """Choose the backend of one transfer.

        Args:
            nbytes: the bytes to move, as a number or in words (``"1GiB"``).
            context: the circumstances.
            candidates: the backends that can move them; at least one.
            mode: what a file is written for; None means the selector's own mode. Ignored for reads.
            default: the prior, used while nothing is known; None means the first candidate in the paper's order.
            learn: whether the time will be recorded. If not, no backend is tried.
            can: whether a candidate can move them. Only those are asked that would be chosen, or compared with the
                choice; the choice is as if the others were no candidates.

        Raises:
            ValueError: there are no candidates.
            BackendUnavailableError: none of them can.
        """
        question = _Question(tuple(candidates), mode or self.mode, default, self.explore and learn, self.paper)
        key = Key(context, bucket_of(as_nbytes(nbytes, "nbytes")))
        with self._lock:
            history = self._histories[key]
            history.candidates = question.candidates
            found = self._looked_up(history, question)
            choice = found if found and can(found.backend) else self._choose_anew(key, history, question, can)
            history.uses += question.explore
            if history.standing is not None:
                history.standing = history.standing._replace(uses=history.standing.uses - 1)
            if choice.exploring:
                history.tried_at[choice.backend] = history.uses
                history.risk_seconds = choice.risk_seconds
            return choice

    def record(
        self, nbytes: int | str, context: Context, backend: str, seconds: float, choice: Choice | None = None
    ) -> None:
        """Record the time of a transfer.

        Args:
            nbytes, context: as for :meth:`choose`.
            backend: the backend that has moved the bytes.
            seconds: the time.
            choice: the choice that led to the transfer, so that the cost of a try is counted; None without a choice.
        """
        nbytes = as_nbytes(nbytes, "nbytes")
        key = Key(context, bucket_of(nbytes))
        if choice is not None and choice.backend != backend:
            choice = None  # which could not do it
        with self._lock:
            self._counts["explored" if choice is not None and choice.exploring else "exploited"] += 1
            if not self.explore:
                return
            history = self._histories[key]
            history.risk_seconds = 0.0
            extra = self._cost(history, choice, seconds, scaled(1.0, nbytes)) if choice is not None else 0.0
            if extra > _NOTICED_SECONDS:
                _logger.warning(
                    "measuring %s with %s (%s) has cost %s: it took %s; FASTENSOR_EXPLORE=0 measures nothing",
                    backend, human_size(nbytes), context, human_seconds(extra), human_seconds(seconds),
                )  # fmt: skip
            if extra or choice is None or choice.exploring:
                history.standing = None
            self._learn(Change(context, nbytes, backend, seconds, extra))

    def failed(
        self,
        nbytes: int | str,
        context: Context,
        backend: str,
        reason: str,
        seconds: float = 0.0,
        choice: Choice | None = None,
    ) -> None:
        """Record that a backend has failed: it is not used again for such transfers in this process.

        Args:
            nbytes, context, backend: as for :meth:`record`.
            reason: why it failed.
            seconds: the time that was lost.
            choice: the choice that led to the attempt. If that was a try, the lost time is its cost.
        """
        nbytes = as_nbytes(nbytes, "nbytes")
        with self._lock:
            self._counts["failed"] += 1
            history = self._histories[Key(context, bucket_of(nbytes))]
            history.failed[backend] = reason
            history.risk_seconds = 0.0
            history.standing = None
            if self.explore and choice is not None and choice.exploring:
                self._learn(Change(context, nbytes, backend, seconds, seconds, failed=True))

    def explain(
        self,
        nbytes: int | str,
        context: Context,
        candidates: Iterable[str] | None = None,
        mode: Mode | None = None,
        default: str | None = None,
    ) -> Explanation:
        """Choice that :meth:`choose` would make, its reason, and the timings behind it. Changes nothing.

        Args:
            candidates: the backends that can move the bytes; None means those of the latest choice, or else all that
                were measured.
            nbytes, context, mode, default: as for :meth:`choose`.

        Raises:
            ValueError: there are no candidates, and no backend was ever measured.
        """
        key = Key(context, bucket_of(as_nbytes(nbytes, "nbytes")))
        with self._lock:
            history = self._histories.get(key) or _History()
            if candidates is None:
                candidates = history.candidates or sorted(
                    {name for _, entry in self._dictionary for name in entry.timings}
                )
            question = _Question(tuple(candidates), mode or self.mode, default, self.explore, self.paper)
            choice = self._looked_up(history, question) or self._decide(key, history, question)
            timings = dict(self._dictionary.at(key).timings)
            return Explanation(
                size_of(key.bucket), context, choice, timings, dict(history.failed),
                self._dictionary.seconds, self._dictionary.extra_seconds,
            )  # fmt: skip

    def adopt(self, dictionary: Dictionary) -> None:
        """Replace the dictionary by a copy of another one, without a call of ``on_change``. Backends that have failed
        here stay excluded."""
        with self._lock:
            self._dictionary = deepcopy(dictionary)
            for history in self._histories.values():
                history.standing = None

    def statistics(self) -> SelectorStatistics:
        """Counts of what the selector has done so far."""
        with self._lock:
            counts = {name: self._counts[name] for name in ("explored", "exploited", "failed")}
            known = self._dictionary
            return SelectorStatistics(**counts, seconds=known.seconds, extra_seconds=known.extra_seconds)

    def __getstate__(self) -> dict[str, Any]:
        """The dictionary and the settings. Copies learn by themselves, without ``on_change``."""
        return {"dictionary": self.dictionary, "explore": self.explore, "mode": self.mode, "paper": self.paper}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy begins like any other

    # --- inside, with the lock held

    def _looked_up(self, history: _History, question: _Question) -> Choice | None:
        """The choice that still stands."""
        one = history.standing
        stands = one is not None and one.uses > 0 and self._dictionary.seconds <= one.until_seconds
        return one.choice if one is not None and stands and one.question == question else None

    def _choose_anew(self, key: Key, history: _History, question: _Question, can: Callable[[str], bool]) -> Choice:
        """A choice by what was learned. It stands as long as no try can become due, a few uses at most."""
        history.standing = None
        choice, known = self._decide_able(key, history, question, can), self._dictionary
        uses = min(known.at(key).uses // _GROWTH, _MOST_STANDING) if question.explore else _MOST_STANDING
        while uses > 1 and (choice.exploring or self._decide(key, history, question, ahead=uses).exploring):
            uses //= 2
        if uses > 1:
            timing = known.at(key).timings.get(choice.backend)
            until = known.seconds + uses * timing.seconds if timing is not None else inf
            history.standing = _Standing(question, choice, uses, until)
        return choice

    def _decide_able(self, key: Key, history: _History, question: _Question, can: Callable[[str], bool]) -> Choice:
        """The choice among those that can, and notes who cannot."""
        history.unable.clear()
        choice = self._decide(key, history, question)
        while unable := {name for name in (choice.backend, *choice.compared) if not can(name)}:
            history.unable |= unable
            if history.unable.issuperset(question.candidates):
                raise BackendUnavailableError(f"none of {', '.join(question.candidates)} can do it")
            choice = self._decide(key, history, question)
        return choice

    def _decide(self, key: Key, history: _History, question: _Question, ahead: int = 0) -> Choice:
        """The choice for :meth:`choose` and :meth:`explain`. Changes nothing.

        Args:
            ahead: how many transfers later, if they take what is expected.
        """
        if not question.candidates:
            raise ValueError("there is no backend to choose: none was measured, and no candidates were given")
        check_word(question.mode, "mode", get_args(Mode))
        mode, explore, candidates = question.mode, question.explore, in_order(question.candidates)
        able = tuple(name for name in candidates if name not in history.unable) or candidates
        possible = tuple(name for name in able if name not in history.failed) or able
        prior = question.default if question.default in possible else possible[0]
        expected = self._expected(key, possible, mode, None if not explore or question.paper else prior)
        if explore and question.paper:
            unknown = next((one for one in possible if one not in expected.of and one not in history.tried_at), None)
            if unknown is not None:
                return Choice(unknown, f"to measure it once for {up_to(key.bucket)}, as the paper does", exploring=True)
        if not expected.of or (explore and not question.paper and prior not in expected.of):
            missing = "nothing was measured" if prior not in expected.to_write else "nothing that it wrote was read"
            return Choice(prior, f"by size: {missing} for {up_to(key.bucket)}")
        if not explore or question.paper:
            best = min(expected.of, key=expected.of.__getitem__)
        else:
            best = self._best(key, history, prior, expected)
            if choice := self._next_try(key, history, possible, prior, best, expected, ahead):
                return choice
        return Choice(
            best, _why(key, mode, best, expected), prior_seconds=_break_even(expected, best, prior), compared=(prior,)
        )

    def _expected(self, key: Key, possible: tuple[str, ...], mode: Mode, prior: str | None) -> _Expected:
        """The expected times by the dictionary that the mode names (Algorithm 1, lines 9 to 16). Until reads were
        measured, writes alone decide. Backends other than the prior are judged by their latest timings or by all,
        whichever is better."""
        timings = self._dictionary.at(key).timings
        alone = {
            name: timings[name].seconds if prior in (None, name) else timings[name].hoped_seconds
            for name in possible
            if name in timings
        }
        if mode == "write" or key.context.operation == "read":
            return _Expected(alone, alone)
        reads = seconds_to_read(self._dictionary, key)
        both = {name: reads[name] + (alone[name] if mode == "write_read" else 0.0) for name in alone if name in reads}
        return _Expected(both or alone, alone)

    def _cost(self, history: _History, choice: Choice, seconds: float, scale: float) -> float:
        """Cost of a transfer as exploration: as a try, or by a backend that a try had recommended."""
        if choice.best_seconds is not None:
            if choice.prior_seconds is not None and seconds < choice.prior_seconds / scale:
                history.disappointing.discard(choice.backend)
            return max(seconds - choice.best_seconds / scale, 0.0)
        if choice.prior_seconds is None:
            return 0.0
        history.behind_seconds += seconds - choice.prior_seconds / scale
        if history.behind_seconds <= _credit(choice.prior_seconds):
            return 0.0
        lost, history.behind_seconds = history.behind_seconds, 0.0
        history.disappointing.add(choice.backend)
        return lost

    def _best(self, key: Key, history: _History, prior: str, expected: _Expected) -> str:
        """The fastest backend that has not turned out slower than the prior; the prior if it might be as fast."""
        dropped = history.disappointing - {prior}
        best = min((name for name in expected.of if name not in dropped), key=expected.of.__getitem__)
        if best == prior:
            return best
        luck = expected.to_write[prior] - self._dictionary.at(key).timings[prior].quartile
        return best if expected.of[best] < expected.of[prior] - luck else prior

    def _next_try(
        self,
        key: Key,
        history: _History,
        possible: tuple[str, ...],
        prior: str,
        best: str,
        expected: _Expected,
        ahead: int,
    ) -> Choice | None:
        """The try with the least risk, if the budget covers one."""
        known = self._dictionary
        usual = expected.to_write[best]
        seconds = known.seconds - known.extra_seconds + ahead * usual
        left = SHARE * seconds + _credit(usual) - known.extra_seconds
        left -= sum(other.risk_seconds for other in self._histories.values() if other is not history)  # under way
        if left < _LEAST_RISK * usual:
            return None
        risks = {
            name: max(self._estimate(key, name, expected, usual) - usual, _LEAST_RISK * usual)
            for name in possible
            if name != best and self._is_due(key, history, name, _LEAST_GAP if name == prior else _MOST_GAP, ahead)
        }
        name = prior if prior in risks else min(risks, key=risks.__getitem__, default=None)  # all are compared with it
        if name is None or risks[name] > left:
            return None
        risk, budget = human_seconds(risks[name]), human_seconds(left)
        reason = f"to measure it for {up_to(key.bucket)}: that may cost {risk}, of {budget} to spend on measuring"
        return Choice(
            name,
            reason,
            exploring=True,
            best_seconds=expected.to_write[best],
            prior_seconds=expected.to_write[prior],
            risk_seconds=risks[name],
            compared=(best, prior),
        )

    def _is_due(self, key: Key, history: _History, name: str, most_gap: int, ahead: int) -> bool:
        """True if enough transfers have passed since a backend was tried or measured."""
        entry = self._dictionary.at(key)
        timing, tried_at = entry.timings.get(name), history.tried_at.get(name)
        if tried_at is not None and history.uses + ahead - tried_at < _gap(tried_at, most_gap):
            return False
        return timing is None or entry.uses + ahead - timing.measured_at >= _gap(timing.measured_at, most_gap)

    def _estimate(self, key: Key, name: str, expected: _Expected, usual: float) -> float:
        """Seconds that a backend is expected to take for the transfer at hand, by its own timings or else by those of
        other sizes. Its first use may have been slow, so that alone says nothing."""
        timing = self._dictionary.at(key).timings.get(name)
        if timing is not None and timing.count > 1:
            return expected.to_write[name]
        line = self._dictionary.line(key.context, name)
        return _UNKNOWN * usual if line is None else line.seconds(size_of(key.bucket))

    def _learn(self, change: Change) -> None:
        self._dictionary.apply(change)
        try:
            self._on_change(change)
        except Exception:  # the transfer has succeeded
            _logger.exception("on_change of a fastensor.Selector has raised when it was called with %s", change)


def _gap(uses: int, most: int) -> int:
    """The number of uses after which a backend is tried again that was measured after ``uses``."""
    return min(max(uses // _GROWTH, _LEAST_GAP), most)


def _why(key: Key, mode: Mode, best: str, expected: _Expected) -> str:
    what = ""
    if expected.of is not expected.to_write:
        what = " to read" if mode == "read" else " to write and read"
    return f"the fastest{what}: {human_seconds(expected.of[best])} for {up_to(key.bucket)}"


def _credit(usual: float) -> float:
    return min(CREDIT_SECONDS, SHARE * usual)


def _break_even(expected: _Expected, best: str, prior: str) -> float | None:
    """The longest time of the transfer at hand by the best backend that does not lose to the prior; None if the prior
    is the best."""
    if best == prior or prior not in expected.of:
        return None
    return expected.of[prior] - (expected.of[best] - expected.to_write[best])
