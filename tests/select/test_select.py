"""Selection: scripted timings in, decisions out. No clock, no file."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import programs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.errors import BackendUnavailableError
from fastensor.select.choice import winners
from fastensor.select.context import Choice, Context, bucket_of, size_of
from fastensor.select.dictionary import (
    MOST_NBYTES,
    MOST_SAMPLES,
    Change,
    Dictionary,
    DictionaryError,
    Key,
    Line,
    Timing,
)
from fastensor.select.selector import CREDIT_SECONDS, SHARE, Selector
from fastensor.select.transfer import Transfer

MIB = 1 << 20
WRITE, READ = Context("write"), Context("read")
ALL = ("direct", "gds", "numpy", "torch")
PRIOR = "direct"


def run(
    selector: Selector,
    seconds: Callable[[str], float],
    uses: int,
    nbytes: int = MIB,
    context: Context = WRITE,
    candidates: Sequence[str] = ALL,
    default: str | None = PRIOR,
) -> list[str]:
    """The backends that are chosen, one after the other."""
    chosen = []
    for _ in range(uses):
        choice = selector.choose(nbytes, context, candidates, default=default)
        chosen.append(choice.backend)
        selector.record(nbytes, context, choice.backend, seconds(choice.backend), choice)
    return chosen


def fixed(**seconds: float) -> Callable[[str], float]:
    return seconds.__getitem__


PRIOR_WINS = fixed(gds=1.5, numpy=2.0, torch=5.0, direct=1.0)
NUMPY_WINS = fixed(gds=1.9, numpy=0.5, torch=5.0, direct=1.0)


def known(seconds: Callable[[str], float], nbytes: int = MIB, context: Context = WRITE, uses: int = 5) -> Dictionary:
    """All backends were measured."""
    dictionary = Dictionary()
    for _ in range(uses):
        for name in ALL:
            dictionary.apply(Change(context, nbytes, name, seconds(name)))
    return dictionary


# --- the prior, and the budget


def test_ten_uses_of_a_new_user_are_the_priors() -> None:
    for nbytes in (3000, 10 * MIB, 1424 * MIB):
        for context in (WRITE, READ, Context("read", warm=True)):
            selector = Selector()
            choices = []
            for _ in range(10):
                choices.append(selector.choose(nbytes, context, ALL, default=PRIOR))
                selector.record(nbytes, context, choices[-1].backend, 0.4, choices[-1])
            assert {choice.backend for choice in choices} == {PRIOR}
            assert choices[0].reason.startswith("by size: nothing was measured")
            assert choices[1].reason.startswith("the fastest: ")


@pytest.mark.parametrize("candidates", [("numpy", "direct"), ALL])
def test_a_backend_that_is_faster_is_found_in_time(candidates: Sequence[str]) -> None:
    """An unknown backend is expected to take twice the best one's time. After 20 uses for each candidate, the budget
    covers a try, which costs less than expected here."""
    chosen = run(Selector(), NUMPY_WINS, 300, candidates=candidates)
    assert "numpy" in chosen[: 25 * (len(candidates) - 1) + 60]
    assert Counter(chosen[-100:])["numpy"] >= 90


def test_tries_cost_what_they_take_longer_than_the_best() -> None:
    selector = Selector()
    run(selector, PRIOR_WINS, 100)
    statistics = selector.statistics()
    tried = {name: timing.count for name, timing in selector.dictionary.of(WRITE, MIB).timings.items() if name != PRIOR}
    assert tried
    extra = sum((PRIOR_WINS(name) - 1.0) * count for name, count in tried.items())
    assert statistics.extra_seconds == pytest.approx(extra)
    assert statistics.seconds == pytest.approx(100 + extra)
    assert statistics.explored == sum(tried.values())
    shown = str(selector.explain(MIB, WRITE, ALL))
    assert f"exploring has cost {extra:.3g} s of {100 + extra:.3g} s in all transfers" in shown


def test_the_budget_is_that_of_all_sizes_and_processes() -> None:
    first = Selector()
    run(first, fixed(direct=1.0), 500, candidates=("direct",))
    second = Selector(Dictionary.from_json(first.dictionary.to_json()))
    assert run(second, PRIOR_WINS, 2, nbytes=64 * MIB) == ["direct", "gds"], "25 s are left"
    assert run(Selector(), PRIOR_WINS, 2, nbytes=64 * MIB) == ["direct", "direct"]


def test_what_costs_much_more_than_expected_is_paid_for_first() -> None:
    selector = Selector()
    awful = fixed(gds=50.0, numpy=0.5, direct=1.0)
    chosen = run(selector, awful, 1500, candidates=("gds", "numpy", "direct"))
    first = chosen.index("gds")
    assert "numpy" not in chosen[: first + 900], "49 s at 5 %"
    assert chosen[-1] == "numpy"
    assert chosen.count("gds") == 1


def test_what_is_hopeless_at_other_sizes_is_hopeless_at_a_new_one() -> None:
    selector = Selector(known(fixed(gds=1.5, numpy=2.0, torch=50.0, direct=1.0), nbytes=MIB))
    for name in ALL:
        for _ in range(5):
            selector.record(4 * MIB, WRITE, name, 4 * fixed(gds=1.5, numpy=2.0, torch=50.0, direct=1.0)(name))
    chosen = run(selector, fixed(gds=24.0, numpy=32.0, torch=800.0, direct=16.0), 30, nbytes=16 * MIB)
    assert "torch" not in chosen
    assert {"gds", "numpy"} & set(chosen), "these are expected to cost less"


def test_a_try_of_more_than_a_second_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    run(Selector(), fixed(numpy=9.0, direct=1.0), 30, candidates=("numpy", "direct"))
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("measuring numpy with 1 MiB (write cpu durable) has cost 8 s: it took 9 s")
    assert "FASTENSOR_EXPLORE=0" in message
    caplog.clear()
    run(Selector(), fixed(numpy=0.9, direct=0.1), 30, candidates=("numpy", "direct"))
    assert not caplog.records


def test_concurrent_transfers_try_one_after_the_other() -> None:
    selector = Selector(known(PRIOR_WINS, uses=20))
    for _ in range(60):
        selector.record(MIB, WRITE, PRIOR, 1.0)
    begun = [selector.choose(MIB, WRITE, ALL, default=PRIOR) for _ in range(40)]
    tried = Counter(choice.backend for choice in begun if choice.exploring)
    assert tried
    assert max(tried.values()) <= 4
    assert Counter(choice.backend for choice in begun)[PRIOR] >= 28


def test_what_was_begun_and_never_heard_of_is_not_begun_again_at_once() -> None:
    selector = Selector()
    run(selector, PRIOR_WINS, 19, candidates=("numpy", "direct"))
    silent = [selector.choose(MIB, WRITE, ("numpy", "direct"), default=PRIOR) for _ in range(12)]
    assert [choice.exploring for choice in silent] == [True] + [False] * 10 + [True]
    assert selector.statistics().explored == 0


def test_known_losers_are_tried_ever_less_often() -> None:
    selector = Selector()
    tried = []
    for number in range(3000):
        choice = selector.choose(MIB, WRITE, ("direct", "numpy"), default=PRIOR)
        if choice.exploring:
            tried.append(number)
        selector.record(MIB, WRITE, choice.backend, PRIOR_WINS(choice.backend), choice)
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    assert len(tried) > 10
    assert gaps[-1] > 300
    assert max(gaps) <= 1000
    assert selector.statistics().extra_seconds < 0.01 * 3000


@pytest.mark.parametrize("change", [{"direct": 4.0}, {"numpy": 0.2}, {"gds": 0.3}])
def test_a_lasting_change_is_found(change: dict[str, float]) -> None:
    """By then, what is tried was tried some dozens of uses ago; it is tried again when a fifth more lie behind."""
    before = {"gds": 1.5, "numpy": 2.0, "direct": 1.0}
    after = before | change
    selector = Selector()
    run(selector, before.__getitem__, 200, candidates=tuple(before))
    run(selector, after.__getitem__, 150, candidates=tuple(before))
    chosen = run(selector, after.__getitem__, 100, candidates=tuple(before))
    best = min(after, key=after.__getitem__)
    assert Counter(chosen)[best] >= 95, "the others are tried"


def test_one_lucky_moment_decides_nothing_for_long() -> None:
    """It takes more than the noise of the prior to be better."""
    lucky = iter([0.93])
    prior = iter([1.0, 0.9, 1.1] * 1000)

    def seconds(name: str) -> float:
        return next(lucky, 1.4) if name == "numpy" else next(prior)

    selector = Selector()
    believed = 0
    for _ in range(200):
        choice = selector.choose(MIB, WRITE, ("numpy", "direct"), default=PRIOR)
        believed += not choice.exploring and choice.backend == "numpy"
        selector.record(MIB, WRITE, choice.backend, seconds(choice.backend), choice)
    assert selector.statistics().explored > 1
    assert believed <= 1


def test_what_disappoints_is_dropped_and_charged_until_a_try_shows_that_it_is_better() -> None:
    selector = Selector(known(NUMPY_WINS, uses=1))
    assert run(selector, NUMPY_WINS, 3)[-1] == "numpy"
    gained = 3 * 0.5
    slow = run(selector, lambda name: 4.0 if name == "numpy" else NUMPY_WINS(name), 2)
    assert slow == ["numpy", "direct"]
    lost = 4.0 - 1.0 - gained
    assert selector.statistics().extra_seconds == pytest.approx(lost)
    chosen = run(selector, NUMPY_WINS, 200)
    assert chosen.index("numpy") > 20, "that is what the loss has cost"
    assert chosen[-1] == "numpy"


def test_ties_stay_with_the_prior() -> None:
    noise = random.Random(0)
    chosen = run(Selector(), lambda name: noise.uniform(0.95, 1.05), 400, candidates=("numpy", "direct"))
    assert Counter(chosen)["direct"] > 300


# --- the table


def test_a_choice_stands_while_no_try_can_become_due() -> None:
    selector, choices = Selector(), []
    for _ in range(200):
        choices.append(selector.choose(MIB, WRITE, ("direct", "numpy"), default=PRIOR))
        selector.record(MIB, WRITE, choices[-1].backend, PRIOR_WINS(choices[-1].backend), choices[-1])
    made = [choice for before, choice in itertools.pairwise(choices) if choice is not before]
    assert len(made) < 0.4 * len(choices), "the others were looked up"
    assert [made.index(choice) for choice in made if choice.exploring], "tries come between"
    longest = max(len(list(group)) for _, group in itertools.groupby(choices, id))
    assert longest == 5


def standing(selector: Selector) -> Choice:
    """The choice that stands for two uses or more after forty."""
    run(selector, PRIOR_WINS, 40, candidates=("direct", "numpy"))
    choice = None
    while (latest := selector.choose(MIB, WRITE, ("direct", "numpy"), default=PRIOR)) is not choice:
        choice = latest
        selector.record(MIB, WRITE, choice.backend, PRIOR_WINS(choice.backend), choice)
    assert choice is not None
    return choice


def test_a_choice_ends_with_a_failure() -> None:
    selector = Selector()
    choice = standing(selector)
    selector.failed(MIB, WRITE, choice.backend, "the disk was replaced", choice=choice)
    assert selector.choose(MIB, WRITE, ("direct", "numpy"), default=PRIOR).backend == "numpy"


def test_a_choice_answers_no_other_question() -> None:
    selector = Selector()
    choice = standing(selector)
    assert selector.choose(MIB, WRITE, ("numpy",), default=PRIOR).backend == "numpy"
    assert selector.choose(MIB, READ, ("direct", "numpy"), default="numpy").backend == "numpy"
    selector.adopt(known(NUMPY_WINS))
    assert choice.backend == "direct"
    assert selector.choose(MIB, WRITE, ("direct", "numpy"), default=PRIOR).backend == "numpy"


def test_a_mode_that_there_is_not_is_refused_where_it_is_set() -> None:
    selector = Selector(mode="read")
    with pytest.raises(ValueError, match=r"mode is one of .*, found 'writes'; did you mean 'write'"):
        selector.mode = "writes"
    assert selector.mode == "read"


# --- candidates that cannot


@pytest.mark.parametrize("unable", ["gds", "direct"])
def test_what_cannot_work_has_no_say(unable: str) -> None:
    """Choices, tries and their costs are as if it were no candidate, however fast it is known to be; and the others are
    asked only when they are chosen."""
    asked: set[str] = set()

    def can(name: str) -> bool:
        asked.add(name)
        return name != unable

    times = fixed(gds=0.1, direct=1.0, numpy=1.5)
    candidates, choices = ("direct", "gds", "numpy"), []
    learned, expected = (Selector(known_to_be_fast(times, uses=30)) for _ in range(2))
    for _ in range(100):
        transfer = Transfer(candidates, 1 << 30, WRITE, learned, default=PRIOR, can=can)
        transfer.done(times(transfer.used))
        choices.append(transfer.choice)
    left = [name for name in candidates if name != unable]
    assert [one.backend for one in choices] == run(expected, times, 100, 1 << 30, candidates=left)
    assert learned.statistics() == expected.statistics()
    assert learned.explain(1 << 30, WRITE, default=PRIOR) == expected.explain(1 << 30, WRITE, default=PRIOR)
    assert len({id(one) for one in choices}) < 0.4 * len(choices), "the others were looked up"
    assert asked == {"gds", "direct", *(one.backend for one in choices)}


def known_to_be_fast(seconds: Callable[[str], float], uses: int) -> Dictionary:
    dictionary = Dictionary()
    for name in ("direct", "gds"):
        for _ in range(uses):
            dictionary.apply(Change(WRITE, 1 << 30, name, seconds(name)))
    return dictionary


def test_what_can_again_is_chosen_again() -> None:
    selector, able = Selector(known(fixed(gds=0.1, direct=1.0, numpy=1.5, torch=2.0)), explore=False), {"direct"}
    used = []
    for _ in range(20):
        used.append(Transfer(("direct", "gds"), MIB, WRITE, selector, default=PRIOR, can=able.__contains__).used)
        able |= {"gds"}
    assert (used[0], used[-1]) == ("direct", "gds")


def test_where_none_can_the_fallbacks_follow() -> None:
    selector = Selector(known(PRIOR_WINS))
    transfer = Transfer(ALL, MIB, WRITE, selector, default=PRIOR, fallbacks=("torch",), can={"torch"}.__contains__)
    assert transfer.used == "torch"
    with pytest.raises(BackendUnavailableError, match="no backend can do it"):
        Transfer(ALL, MIB, WRITE, selector, default=PRIOR, fallbacks=("torch",), can=lambda name: False)
    selector.failed(MIB, WRITE, "direct", "it failed")
    assert Transfer(("direct", "gds"), MIB, WRITE, selector, can={"direct"}.__contains__).used == "direct"


# --- the property: what exploring may cost

Recording = list[dict[str, float]]
"""For each use, what every backend would have taken."""


def replay(selector: Selector, recording: Recording, prior: str = PRIOR) -> list[tuple[float, float, bool]]:
    """For each use: what it took, what the prior would have, and whether it was a try."""
    found = []
    for row in recording:
        choice = selector.choose(MIB, WRITE, tuple(row), default=prior)
        selector.record(MIB, WRITE, choice.backend, row[choice.backend], choice)
        found.append((row[choice.backend], row[prior], choice.exploring))
    return found


def excess(found: list[tuple[float, float, bool]], overruns: int = 1) -> float:
    """By how much the total was ever above what is promised: 1.05 × the prior's, the credit, and the worst overruns."""
    worst = taken = alone = 0.0
    over: list[float] = []
    for mine, priors, _ in found:
        taken, alone = taken + mine, alone + priors
        over = sorted([*over, max(mine - priors, 0.0)])[-overruns:]
        credit = min(CREDIT_SECONDS, SHARE * priors)
        worst = max(worst, taken - (1 + SHARE) * alone - credit - sum(over))
    return worst


means = st.dictionaries(st.sampled_from(["gds", "numpy", "torch"]), st.floats(0.1, 30.0), min_size=1)


@given(means, st.floats(1e-4, 10.0), st.integers(0, 400), st.none() | means)
def test_exploring_costs_no_more_than_is_promised(
    before: dict[str, float], scale: float, change_at: int, after: dict[str, float] | None
) -> None:
    """Without noise, at every moment, also when the machine changes for good: each backend that has become slower
    disappoints once, too."""
    after = after or {}
    others = before | {name: after.get(name, seconds) for name, seconds in before.items()}
    first, then = {"direct": 1.0} | before, {"direct": 1.0} | others
    recording = [
        {name: scale * seconds for name, seconds in (first if number < change_at else then).items()}
        for number in range(500)
    ]
    slower = sum(others[name] > before[name] for name in before)
    assert excess(replay(Selector(), recording), overruns=1 + slower) <= 1e-6 * scale


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "means", [{"numpy": 2.0, "gds": 3.0}, {"numpy": 0.5, "gds": 3.0}, {"numpy": 1.2, "gds": 1.0}], ids=str
)
def test_exploring_costs_no_more_than_is_promised_where_timings_vary(seed: int, means: dict[str, float]) -> None:
    """Each transfer by 10 %, and in one of twenty the machine does something else meanwhile. What the prior would have
    taken is only estimated then: 1 % of it is allowed for that."""
    noise = random.Random(seed)
    recording = []
    for _ in range(600):
        busy = noise.choice([1.0] * 19 + [5.0])
        recording.append(
            {name: mean * busy * noise.lognormvariate(0, 0.1) for name, mean in ({"direct": 1.0} | means).items()}
        )
    found = replay(Selector(), recording)
    assert excess(found) <= 0.01 * sum(prior for _, prior, _ in found)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("best", ["direct", "numpy", "gds"])
def test_in_the_end_it_is_as_fast_as_the_best(seed: int, best: str) -> None:
    """300 uses after the beginning, and 300 after a change for good, choices are within 5 % of the best backend in
    hindsight. What is tried costs 5 % more at most."""
    noise = random.Random(seed)
    selector = Selector()
    for order in (("direct", "numpy", "gds"), ("gds", "direct", "numpy")):
        means = {name: 1.0 if name == best else 2.0 for name in order}
        best = order[(order.index(best) + 1) % 3]  # after that
        recording = [{name: mean * noise.lognormvariate(0, 0.1) for name, mean in means.items()} for _ in range(500)]
        found = replay(selector, recording)[300:]
        used = [(row, mine) for row, (mine, _, tried) in zip(recording[300:], found, strict=True) if not tried]
        assert sum(mine for _, mine in used) <= 1.05 * min(sum(row[name] for row, _ in used) for name in means)
        assert sum(mine for mine, _, _ in found) <= 1.10 * min(
            sum(row[name] for row in recording[300:]) for name in means
        )


# --- candidates that come, go and fail


def test_there_have_to_be_candidates() -> None:
    with pytest.raises(ValueError, match="no backend to choose"):
        Selector().choose(MIB, WRITE, ())


def test_a_new_backend_is_tried_when_it_is_paid_for() -> None:
    first = Selector()
    run(first, PRIOR_WINS, 100, candidates=("numpy", "direct"))
    selector = Selector(Dictionary.from_json(first.dictionary.to_json()))
    seconds = fixed(numpy=2.0, direct=1.0, mine=0.5)
    chosen = run(selector, seconds, 60, candidates=("numpy", "direct", "mine"))
    assert chosen[-1] == "mine"


def test_a_backend_that_goes_is_not_chosen_any_more() -> None:
    selector = Selector(known(NUMPY_WINS))
    assert run(selector, NUMPY_WINS, 1) == ["numpy"]
    assert run(selector, NUMPY_WINS, 1, candidates=("direct", "torch")) == ["direct"]


def test_a_prior_that_is_no_candidate() -> None:
    assert Selector().choose(MIB, WRITE, ("torch", "numpy"), default="direct").backend == "numpy"


def test_what_will_not_be_measured_tries_nothing() -> None:
    selector = Selector()
    for _ in range(500):
        selector.record(MIB, WRITE, "direct", 1.0)
    for _ in range(5):
        choice = selector.choose(MIB, WRITE, ALL, default="direct", learn=False)
        assert (choice.backend, choice.exploring) == ("direct", False)
    assert selector.choose(MIB, WRITE, ALL, default="direct").exploring


def test_a_backend_that_fails_is_excluded_in_this_process() -> None:
    selector = Selector(known(NUMPY_WINS))
    selector.failed(MIB, WRITE, "numpy", "the disk was replaced")
    assert "numpy" not in run(selector, NUMPY_WINS, 100)
    assert "numpy: not possible (the disk was replaced)" in str(selector.explain(MIB, WRITE, ALL))
    assert selector.statistics().failed == 1
    assert run(Selector(selector.dictionary), NUMPY_WINS, 1) == ["numpy"]  # it may be another day


def test_a_backend_that_fails_is_left_alone_without_exploration_too() -> None:
    selector = Selector(known(NUMPY_WINS), explore=False)
    selector.failed(MIB, WRITE, "numpy", "no")
    assert run(selector, NUMPY_WINS, 3) == ["direct"] * 3
    for name in ALL:
        selector.failed(MIB, WRITE, name, "no")
    assert selector.choose(MIB, WRITE, ALL).backend in ALL


def test_what_is_adopted_makes_nothing_possible_that_is_not() -> None:
    selector = Selector()
    selector.failed(MIB, WRITE, "numpy", "no")
    selector.adopt(known(NUMPY_WINS))
    assert selector.choose(MIB, WRITE, ALL, default=PRIOR).backend == "direct"


# --- sizes and contexts


def test_sizes_in_one_bucket_are_compared_by_speed() -> None:
    selector = Selector()
    small, large = size_of(bucket_of(MIB) - 1) + 1, MIB
    for backend, nbytes, seconds in (("numpy", small, 0.8), ("direct", large, 1.0)):
        selector.record(nbytes, WRITE, backend, seconds)
    assert selector.dictionary.of(WRITE, MIB).best == "direct"  # 0.8 s for 0.71 MiB is slower


def test_contexts_are_kept_apart() -> None:
    selector = Selector(known(NUMPY_WINS), explore=False)
    assert run(selector, NUMPY_WINS, 1) == ["numpy"]
    for context in (READ, Context("write", "cuda"), Context("write", warm=True)):
        assert run(selector, NUMPY_WINS, 1, context=context) == ["direct"]


def test_without_exploration_choices_depend_on_the_dictionary_only() -> None:
    dictionary = known(NUMPY_WINS)
    text = dictionary.to_json()
    selector = Selector(Dictionary.from_json(text), explore=False)
    assert run(selector, PRIOR_WINS, 10) == ["numpy"] * 10
    assert selector.dictionary.to_json() == text
    assert selector.choose(1 << 30, WRITE, ALL, default="direct").backend == "direct"
    assert selector.statistics().explored == 0


def test_only_what_was_measured_decides_without_exploration() -> None:
    """A dictionary of the user's, say, in which the prior does not stand."""
    dictionary = Dictionary()
    dictionary.apply(Change(WRITE, MIB, "torch", 1.0))
    assert Selector(dictionary, explore=False).choose(MIB, WRITE, ALL, default="direct").backend == "torch"
    assert Selector(dictionary).choose(MIB, WRITE, ALL, default="direct").backend == "direct"


# --- the three dictionaries


@pytest.mark.parametrize(("mode", "expected"), [("write", "gds"), ("read", "numpy"), ("write_read", "torch")])
@pytest.mark.parametrize("explore", [True, False])
def test_the_three_dictionaries(mode: Any, expected: str, explore: bool) -> None:
    writes, reads = fixed(gds=1.0, numpy=1.9, torch=1.4, direct=1.8), fixed(gds=3.0, numpy=0.5, torch=0.6, direct=2.0)
    dictionary = known(writes)
    for name in ALL:
        dictionary.apply(Change(READ, MIB, name, reads(name)))
    selector = Selector(dictionary, explore=explore)
    choice = selector.choose(MIB, WRITE, ALL, mode, PRIOR)
    assert choice.backend == expected
    assert selector.explain(MIB, WRITE, ALL, mode, PRIOR).choice == choice


@pytest.mark.parametrize("mode", ["read", "write_read"])
def test_what_is_read_fast_is_found_in_time(mode: Any) -> None:
    """Whoever wrote a tensor reads it."""
    writes, reads = fixed(numpy=1.0, torch=1.2, direct=1.1), fixed(numpy=3.0, torch=0.1, direct=3.0)
    selector = Selector(mode=mode)
    chosen = []
    for _ in range(150):
        choice = selector.choose(MIB, WRITE, ("direct", "numpy", "torch"), default="numpy")
        selector.record(MIB, WRITE, choice.backend, writes(choice.backend), choice)
        selector.record(MIB, READ, choice.backend, reads(choice.backend))
        chosen.append(choice.backend)
    assert chosen[:5] == ["numpy"] * 5, "the budget is that of writes and reads, and a try costs a write"
    assert Counter(chosen[-30:])["torch"] >= 24


def test_until_reads_are_known_writes_decide() -> None:
    selector = Selector(known(NUMPY_WINS), explore=False)
    assert selector.choose(MIB, WRITE, ALL, "read").backend == "numpy"
    with pytest.raises(ValueError, match="mode is one of"):
        selector.choose(MIB, WRITE, ALL, "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("warm_reads", [4, 1000])
def test_reads_that_are_usual_count(warm_reads: int) -> None:
    """After a restart, some were cold."""
    dictionary = known(fixed(gds=9.0, numpy=1.0, torch=9.0, direct=1.0))
    for name in ("direct", "numpy"):
        for _ in range(3):
            dictionary.apply(Change(READ, MIB, name, {"direct": 2.0, "numpy": 3.0}[name]))
    for _ in range(warm_reads):
        dictionary.apply(Change(Context("read", warm=True), MIB, "numpy", 0.5))
    assert Selector(dictionary, mode="read").choose(MIB, WRITE, ("direct", "numpy"), default=PRIOR).backend == "numpy"


def test_what_a_backend_reads_is_in_the_page_cache_or_not_as_it_has_written_it() -> None:
    dictionary = known(fixed(gds=9.0, numpy=1.0, torch=9.0, direct=0.9))
    dictionary.apply(Change(READ, MIB, "direct", 2.0))
    for _ in range(5):
        dictionary.apply(Change(Context("read", warm=True), MIB, "numpy", 0.5))
    dictionary.apply(Change(READ, MIB, "numpy", 9.0))
    selector = Selector(dictionary, explore=False)
    assert selector.choose(MIB, WRITE, ("direct", "numpy"), "write").backend == "direct"
    assert selector.choose(MIB, WRITE, ("direct", "numpy"), "write_read").backend == "numpy"


def test_what_is_written_from_a_gpu_and_loaded_to_the_cpu_is_read_from_there() -> None:
    from_gpu = Context("write", "cuda")
    dictionary = Dictionary()
    for name, taken in {"numpy": 1.0, "direct": 0.9}.items():
        dictionary.apply(Change(from_gpu, MIB, name, taken))
    for name, taken in {"numpy": 0.5, "direct": 2.0}.items():
        dictionary.apply(Change(READ, MIB, name, taken))
    assert winners(dictionary, Key(from_gpu, bucket_of(MIB))) == ("direct", "numpy", "numpy")
    for name, taken in {"numpy": 2.0, "direct": 0.5}.items():
        dictionary.apply(Change(Context("read", "cuda"), MIB, name, taken))
    assert winners(dictionary, Key(from_gpu, bucket_of(MIB))) == ("direct", "direct", "direct")
    chosen = Selector(dictionary, explore=False, mode="read").choose(MIB, from_gpu, ALL)
    assert (chosen.backend, chosen.reason) == ("direct", "the fastest to read: 500 ms for up to 1 MiB")
    assert winners(dictionary, Key(READ, bucket_of(MIB))) == ("numpy", None, None)


# --- the paper's own algorithm


def test_the_papers_algorithm_tries_all_once_in_its_order() -> None:
    selector = Selector(paper=True)
    assert run(selector, NUMPY_WINS, 8) == ["gds", "numpy", "torch", "direct"] + ["numpy"] * 4
    assert selector.statistics().explored == 4
    assert run(Selector(selector.dictionary, paper=True), NUMPY_WINS, 2) == ["numpy"] * 2


@pytest.mark.parametrize(("mode", "expected"), [("write", "gds"), ("read", "numpy"), ("write_read", "torch")])
def test_the_papers_algorithm_with_its_three_dictionaries(mode: Any, expected: str) -> None:
    writes, reads = fixed(gds=1.0, numpy=1.9, torch=1.4, direct=1.8), fixed(gds=3.0, numpy=0.5, torch=0.6, direct=2.0)
    selector = Selector(paper=True)
    for _ in range(4):
        choice = selector.choose(MIB, WRITE, ALL, mode)
        assert choice.exploring
        selector.record(MIB, WRITE, choice.backend, writes(choice.backend), choice)
        selector.record(MIB, READ, choice.backend, reads(choice.backend))
    assert selector.choose(MIB, WRITE, ALL, mode).backend == expected


def test_the_papers_algorithm_does_not_wait_for_what_is_never_recorded() -> None:
    selector = Selector(paper=True)
    begun = [selector.choose(MIB, WRITE, ALL) for _ in range(5)]
    assert [choice.backend for choice in begun] == ["gds", "numpy", "torch", "direct", "gds"]
    assert not begun[-1].exploring


# --- explanations, listeners, copies


def test_a_lock_that_is_held_when_the_process_forks() -> None:
    """In a process of its own: in this one, tests before may have left behind what no fork survives."""
    programs.run("-c", FORK_WHILE_LOCKED)


FORK_WHILE_LOCKED = """
import os, signal
from concurrent.futures import ThreadPoolExecutor
from fastensor.select.context import Context
from fastensor.select.selector import Selector

def choose_in_a_child():
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        selector.choose(1 << 20, Context("write", "cpu"), ("direct", "numpy"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

selector = Selector()
with selector._lock, ThreadPoolExecutor(1) as pool:  # as if another thread held the lock
    pool.submit(choose_in_a_child).result()
"""


def test_a_listener_that_raises_fails_no_transfer(caplog: pytest.LogCaptureFixture) -> None:
    def listen(change: Change) -> None:
        raise ValueError("not now")

    selector = Selector(on_change=listen)
    assert run(selector, PRIOR_WINS, 3)[-1] == "direct"
    assert "has raised" in caplog.text
    assert "not now" in caplog.text


def test_a_clock_that_does_not_move() -> None:
    selector = Selector()
    assert set(run(selector, lambda backend: 0.0, 100)) <= set(ALL)
    assert selector.statistics().seconds == 0.0


def test_what_is_explained_is_about_those_that_could_the_last_time() -> None:
    selector = Selector()
    with pytest.raises(ValueError, match="there is no backend"):
        selector.explain(MIB, WRITE)
    selector.adopt(known(NUMPY_WINS))
    run(selector, NUMPY_WINS, 1, candidates=("torch", "direct"))
    assert selector.explain(MIB, WRITE).choice.backend == "direct"
    run(selector, NUMPY_WINS, 1)
    assert selector.explain(MIB, WRITE, default=PRIOR).choice.backend == "numpy"


def test_a_transfer_without_a_choice_costs_nothing() -> None:
    """A file is read by the kind of tool that wrote it: there is nothing to choose."""
    selector = Selector()
    for _ in range(3):
        selector.record(MIB, READ, "numpy", 1.0)
    statistics = selector.statistics()
    assert (statistics.explored, statistics.exploited) == (0, 3)
    assert (statistics.seconds, statistics.extra_seconds) == (3.0, 0.0)


@given(st.data())
def test_what_is_explained_is_what_is_chosen(data: st.DataObject) -> None:
    selector = Selector(explore=data.draw(st.booleans()), paper=data.draw(st.booleans()))
    for _ in range(data.draw(st.integers(0, 40))):
        question = (
            data.draw(st.sampled_from([MIB, 2 * MIB])),
            data.draw(st.sampled_from([WRITE, READ])),
            data.draw(st.sampled_from([ALL, ALL[:2], ("torch",)])),
            data.draw(st.sampled_from(["write", "read", "write_read"])),
            data.draw(st.sampled_from([None, "torch"])),
        )
        explained = selector.explain(*question).choice
        assert selector.explain(*question).choice == explained
        assert selector.choose(*question) == explained
        assert explained.backend in question[2]
        event = data.draw(st.sampled_from(["record", "record many", "failed", "nothing"]))
        if event.startswith("record"):
            for _ in range(20 if event == "record many" else 1):
                selector.record(*question[:2], explained.backend, data.draw(st.floats(0, 10)), explained)
        elif event == "failed":
            selector.failed(*question[:2], explained.backend, "no")


def test_explaining_changes_nothing() -> None:
    selector = Selector()
    run(selector, PRIOR_WINS, 19)
    text = selector.dictionary.to_json()
    for _ in range(5):
        assert selector.explain(MIB, WRITE, ALL, default=PRIOR).choice.exploring
        assert "direct: 1 s (± 0 s), measured 19 times" in str(selector.explain(MIB, WRITE, ALL))
        selector.explain(MIB * 64, WRITE, ALL)
    assert selector.dictionary.to_json() == text
    assert selector.choose(MIB, WRITE, ALL, default=PRIOR).exploring


def test_everything_that_is_learned_is_reported() -> None:
    changes: list[Change] = []
    selector = Selector(on_change=changes.append)
    run(selector, PRIOR_WINS, 60)
    selector.failed(MIB, WRITE, "direct", "gone")
    copy = Dictionary()
    for change in changes:
        copy.apply(change)
    assert copy.to_json() == selector.dictionary.to_json()
    assert copy.extra_seconds > 0


names = st.sampled_from([*ALL, "mine"])
changes = st.builds(
    Change,
    st.builds(Context, st.sampled_from(["write", "read"]), st.sampled_from(["cpu", "cuda"]), st.booleans()),
    st.integers(0, 1 << 42),
    names,
    st.one_of(st.none(), st.floats(0, 1e6)),
    st.floats(0, 10),
)


@given(st.lists(changes, max_size=60))
def test_a_dictionary_comes_back_from_its_text(learned: list[Change]) -> None:
    dictionary = Dictionary()
    for change in learned:
        dictionary.apply(change)
    text = dictionary.to_json({"cpu": "x"})
    again = Dictionary.from_json(text)
    assert again.to_json({"cpu": "x"}) == text
    assert json.loads(text)["machine"] == {"cpu": "x"}
    for key, entry in dictionary:
        found = again.at(key)
        assert found.serial == entry.serial
        for name, timing in entry.timings.items():
            assert found.timings[name].count == timing.count
            assert found.timings[name].seconds == pytest.approx(timing.seconds, rel=1e-3, abs=1e-12)


def test_a_dictionary_stays_small() -> None:
    dictionary = Dictionary()
    for often, bucket in enumerate(range(24, 90)):
        for device in ("cpu", "cuda", "staged"):
            for warm in (False, True):
                for backend in ALL:
                    for _ in range(1 + (often > 60)):
                        dictionary.apply(Change(Context("write", device, warm), size_of(bucket), backend, 0.123456789))
    text = dictionary.to_json()
    assert len(text.encode()) <= MOST_NBYTES
    kept = Dictionary.from_json(text)
    assert all(len(kept.of(Context("write"), size_of(bucket)).timings) == 4 for bucket in range(85, 90))
    kept.apply(Change(Context("read"), MIB, "numpy", 1.0))  # what is new is not what has to go
    for _ in range(3):
        kept = Dictionary.from_json(kept.to_json())
        assert kept.of(Context("read"), MIB).timings["numpy"].count == 1


def test_timings_are_robust() -> None:
    timing = Timing(9, (1.0, 1.1, 9.0, 1.2, 0.9))
    assert (timing.seconds, timing.quartile, round(timing.spread, 6)) == (1.1, 1.0, 8.1)
    assert Timing(2, (30.0, 1.0)).seconds == 1.0, "the first use may be slow"
    dictionary = Dictionary()
    for number in range(100):
        dictionary.apply(Change(WRITE, MIB, "numpy", float(number)))
    timing = dictionary.of(WRITE, MIB).timings["numpy"]
    assert timing == Timing(100, tuple(map(float, range(100 - MOST_SAMPLES, 100))), 100)


def test_totals_are_kept() -> None:
    dictionary = Dictionary()
    for _ in range(1000):
        dictionary.apply(Change(WRITE, MIB, "numpy", 1000.0))
        dictionary = Dictionary.from_json(dictionary.to_json())
        dictionary.apply(Change(WRITE, MIB, "direct", 0.001, extra_seconds=0.0005))
        dictionary = Dictionary.from_json(dictionary.to_json())
    assert dictionary.seconds == pytest.approx(1000 * 1000.001, rel=1e-9)
    assert dictionary.extra_seconds == pytest.approx(0.5)


GOOD = Selector(known(NUMPY_WINS))


@pytest.mark.parametrize("total", ["-1", "Infinity", "NaN", '"much"', "null"])
def test_totals_that_cannot_be_are_refused(total: str) -> None:
    text = re.sub(r'"seconds": [0-9.]+,\n', f'"seconds": {total},\n', GOOD._dictionary.to_json(), count=1)
    with pytest.raises(DictionaryError, match="damaged"):
        Dictionary.from_json(text)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-6, 1e4)), min_size=1, max_size=30))
def test_a_line_is_never_below_zero(points: list[tuple[int, float]]) -> None:
    line = Line()
    for nbytes, seconds in points:
        line.add(nbytes, seconds)
    for nbytes in (0, 1, MIB, 1 << 40):
        assert line.seconds(nbytes) >= 0
    assert line.seconds(1 << 40) >= line.seconds(1)


def test_a_line_of_one_size() -> None:
    line = Line()
    for _ in range(5):
        line.add(MIB, 2.0)
    assert line.seconds(MIB) == pytest.approx(2.0)
    assert line.seconds(MIB // 2) == pytest.approx(2.0)
    assert line.seconds(4 * MIB) == pytest.approx(8.0)


def test_a_line_forgets() -> None:
    line = Line()
    for factor in (100.0, 1.0):
        for number in range(300):
            nbytes = MIB * (1 + number % 8)
            line.add(nbytes, factor * (0.01 + nbytes / 1e9))
    assert line.seconds(20 * MIB) == pytest.approx(0.01 + 20 * MIB / 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged"),
        ("[]", "not a dictionary"),
        ('{"format": "other"}', "not a dictionary"),
        ('{"format": "fastensor dictionary", "version": 1}', "version 1, expected 2"),
        ('{"format": "fastensor dictionary", "version": 2}', "damaged"),
        ('{"format": "fastensor dictionary", "version": 2, "entries": 3}', "damaged"),
        ("[" * 100_000, "damaged"),
    ],
)
def test_what_is_no_dictionary_is_refused(text: str, message: str) -> None:
    with pytest.raises(DictionaryError, match=message):
        Dictionary.from_json(text)


@pytest.mark.parametrize("nbytes", [-1, 2**63 + 1, 10**400])
def test_sizes_that_no_file_has_are_refused(nbytes: int) -> None:
    found = json.loads(GOOD._dictionary.to_json())
    (sizes,) = found["entries"].values()
    sizes[str(nbytes)] = sizes[str(MIB)]
    with pytest.raises(DictionaryError, match=f"a size of {nbytes} bytes"):
        Dictionary.from_json(json.dumps(found))


@given(st.data())
def test_a_damaged_dictionary_is_refused_or_read(data: st.DataObject) -> None:
    text = bytearray(GOOD._dictionary.to_json().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 127))
    try:
        dictionary = Dictionary.from_json(text.decode())
    except DictionaryError:
        return
    Selector(dictionary, explore=False).choose(MIB, WRITE, ALL)
    dictionary.to_json()


# --- what a try may cost besides its time


def test_a_try_that_fails_late_is_paid_for() -> None:
    """In each new process it might be tried again."""
    dictionary = known(PRIOR_WINS, uses=1)
    for _ in range(40):
        selector = Selector(dictionary)
        for _ in range(3):
            choice = selector.choose(MIB, WRITE, ("direct", "new"), default=PRIOR)
            if choice.backend == "new":
                selector.failed(MIB, WRITE, "new", "late", 1.0, choice)
                choice = selector.choose(MIB, WRITE, ("direct",), default=PRIOR)
            selector.record(MIB, WRITE, "direct", 1.0, choice)
    assert dictionary.extra_seconds <= SHARE * dictionary.seconds + 1.0 + CREDIT_SECONDS
    assert dictionary.extra_seconds >= 1.0


def test_what_is_read_is_tried_at_the_risk_of_the_write() -> None:
    selector = Selector(mode="read")
    writes, reads = fixed(direct=1.0, numpy=2.0), fixed(direct=0.01, numpy=0.01)
    uses = 0
    while not (choice := selector.choose(MIB, WRITE, ("direct", "numpy"), default=PRIOR)).exploring:
        selector.record(MIB, WRITE, choice.backend, writes(choice.backend), choice)
        selector.record(MIB, READ, choice.backend, reads(choice.backend))
        uses += 1
    assert uses >= 15, "until 5 % of the writes cover another write"


def test_tries_under_way_count() -> None:
    selector = Selector()
    for size in range(16):
        run(selector, PRIOR_WINS, 5, MIB << size)
    tries = [selector.choose(MIB << size, WRITE, ALL, default=PRIOR) for size in range(16)]
    assert sum(choice.exploring for choice in tries) * 1.0 <= SHARE * 80 + 1


@pytest.mark.parametrize("what", ["samples", "seconds"])
@pytest.mark.parametrize("found", [1e200, 1e10, -1.0])
def test_absurd_times_in_a_file_are_refused(found: float, what: str) -> None:
    document = json.loads(known(PRIOR_WINS, uses=1).to_json())
    if what == "seconds":
        document["seconds"] = found
    else:
        (sizes,) = document["entries"].values()
        (entry,) = sizes.values()
        entry["timings"]["direct"]["samples"] = [found]
    with pytest.raises(DictionaryError, match="damaged"):
        Dictionary.from_json(json.dumps(document))
