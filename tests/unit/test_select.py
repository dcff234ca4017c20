"""Selection: scripted timings in, decisions out. No clock, no file."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.select.context import Context
from fastensor.select.dictionary import MOST_NBYTES, MOST_SAMPLES, Change, Dictionary, DictionaryError, Key, Timing
from fastensor.select.explore import MOST_TRIES, winners
from fastensor.select.selector import Selector
from fastensor.select.sizes import bucket_of, size_of

MIB = 1 << 20
WRITE, READ = Context("write"), Context("read")
ALL = ("direct", "gds", "numpy", "torch")


def run(
    selector: Selector,
    seconds: Callable[[str], float],
    uses: int,
    nbytes: int = MIB,
    context: Context = WRITE,
    candidates: Sequence[str] = ALL,
) -> list[str]:
    """The backends that are chosen, one after the other."""
    chosen = []
    for _ in range(uses):
        choice = selector.choose(nbytes, context, candidates)
        chosen.append(choice.backend)
        selector.record(nbytes, context, choice.backend, seconds(choice.backend))
    return chosen


def fixed(**seconds: float) -> Callable[[str], float]:
    return seconds.__getitem__


EQUAL = fixed(gds=1.0, numpy=1.01, torch=1.02, direct=1.03)
FAR = fixed(gds=1.9, numpy=1.0, torch=5.0, direct=1.2)


def test_the_papers_order_and_three_tries() -> None:
    assert run(Selector(), EQUAL, 14) == ["gds", "numpy", "torch", "direct"] * MOST_TRIES + ["gds"] * 2


def test_losers_are_tried_twice(caplog: pytest.LogCaptureFixture) -> None:
    selector = Selector()
    assert run(selector, FAR, 6) == ["gds", "numpy", "torch", "direct", "gds", "numpy"]
    choice = selector.choose(MIB, WRITE, ALL)
    assert choice.reason == "tried for up to 1 MiB, 2 of at most 3"
    selector.record(MIB, WRITE, "torch", 5.0)
    assert run(selector, FAR, 6) == ["direct", "numpy", "direct", "numpy", "numpy", "numpy"]
    told = "torch was tried for 1 MiB (write cpu durable), and took 5 s, 5.0 × as long as numpy"
    assert [record.message for record in caplog.records] == [told] * 2
    statistics = selector.statistics()
    assert (statistics.explored, statistics.exploited) == (10, 3)


@pytest.mark.parametrize("first", [3.0, 30.0])
def test_the_first_use_of_a_backend_may_be_slow(first: float) -> None:
    taken = iter([first])
    seconds = fixed(numpy=1.0, direct=1.1)
    chosen = run(Selector(), lambda name: next(taken, 0.3) if name == "gds" else seconds(name), 20, candidates=ALL[:3])
    assert chosen[-1] == "gds"


def test_concurrent_transfers_try_no_more_than_one_after_the_other() -> None:
    selector = Selector()
    begun = [selector.choose(MIB, WRITE, ALL).backend for _ in range(40)]
    assert begun[: MOST_TRIES * 4] == ["gds", "numpy", "torch", "direct"] * MOST_TRIES
    assert set(begun[MOST_TRIES * 4 :]) == {"gds"}  # nothing is known yet
    for name in begun:
        selector.record(MIB, WRITE, name, FAR(name))
    assert run(selector, FAR, 5) == ["numpy"] * 5
    assert selector.statistics().explored == MOST_TRIES * 4


def test_what_will_not_be_measured_tries_nothing() -> None:
    selector = Selector()
    for _ in range(5):
        choice = selector.choose(MIB, WRITE, ALL, default="direct", learn=False)
        assert (choice.backend, choice.exploring) == ("direct", False)
    run(selector, FAR, 20)
    assert selector.choose(MIB, WRITE, ALL, default="direct", learn=False).backend == "numpy"
    assert selector.choose(2 * MIB, WRITE, ALL, default="direct", learn=False).reason == "the fastest at 1 MiB"


def test_candidates_that_change_are_no_drift() -> None:
    """Files of different kinds are written by different backends."""
    selector = Selector()
    run(selector, FAR, 12)
    run(selector, FAR, 12, candidates=("torch", "direct"))
    for _ in range(20):
        assert run(selector, FAR, 1) == ["numpy"]
        assert run(selector, FAR, 1, candidates=("torch", "direct")) == ["direct"]
    assert selector.statistics().refreshed == 0
    assert selector.dictionary.of(WRITE, MIB).timings["numpy"].samples == (1.0,) * MOST_TRIES


def test_a_lock_that_is_held_when_the_process_forks() -> None:
    """In a process of its own: in this one, tests before may have left behind what no fork survives."""
    subprocess.run([sys.executable, "-c", FORK_WHILE_LOCKED], check=True, timeout=120)


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
with selector._lock, ThreadPoolExecutor(1) as pool:  # held, for the thread, by somebody else
    pool.submit(choose_in_a_child).result()
"""


def test_a_listener_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def listen(change: Change) -> None:
        raise ValueError("not now")

    selector = Selector(on_change=listen)
    assert run(selector, FAR, 20)[-1] == "numpy"
    assert "has raised" in caplog.text
    assert "not now" in caplog.text


def test_there_have_to_be_candidates() -> None:
    with pytest.raises(ValueError, match="no backend to choose"):
        Selector().choose(MIB, WRITE, ())


def test_a_new_backend_is_tried_when_it_comes() -> None:
    selector = Selector()
    run(selector, EQUAL, 20, candidates=("numpy", "direct"))
    loaded = Selector(Dictionary.from_json(selector._dictionary.to_json()))
    assert (
        run(loaded, fixed(numpy=1.0, direct=1.0, mine=0.5), 5, candidates=("numpy", "direct", "mine")) == ["mine"] * 5
    )


def test_a_backend_that_goes_is_not_chosen_any_more() -> None:
    selector = Selector()
    assert run(selector, FAR, 20)[-1] == "numpy"
    assert run(selector, FAR, 3, candidates=("direct", "torch"))[-1] == "direct"


def test_noise_does_not_decide() -> None:
    """It adds to what a backend takes, now and then by much."""
    noise = {"numpy": iter([1.4, 9.0, 1.3]), "direct": iter([9.0, 1.1, 7.0])}
    selector = Selector()
    chosen = run(selector, lambda backend: next(noise[backend], 2.0), 30, candidates=("numpy", "direct"))
    assert chosen[6:9] == ["direct"] * 3


def test_a_bad_time_for_all_deposes_nobody() -> None:
    """While the machine is busy, what is in use is slower than the others were before: they have to be tried again."""
    selector = Selector()
    run(selector, FAR, 40)
    for slower in (1.15, 1.45, 5.0, 1.0):
        chosen = run(selector, lambda backend, slower=slower: slower * FAR(backend), 200)  # type: ignore[misc]
        assert Counter(chosen).most_common(1)[0][0] == chosen[-1] == "numpy", slower
        assert Counter(chosen)["numpy"] >= 170, "it is found out once"
    assert selector.dictionary.of(WRITE, MIB).timings["numpy"].samples == (1.0,) * MOST_TRIES


def test_one_lucky_moment_decides_nothing_for_good() -> None:
    selector = Selector()
    lucky = iter([0.95])
    run(selector, lambda backend: next(lucky, 1.4) if backend == "numpy" else FAR(backend), 100)
    assert run(selector, lambda backend: 1.4 if backend == "numpy" else FAR(backend), 20)[-1] == "direct"


def test_processes_that_do_little_notice_drift_together() -> None:
    """Each loads once. Something becomes slow, and something else is chosen in the end."""
    dictionary = Dictionary()
    chosen = []
    for number in range(120):
        selector = Selector(dictionary)
        slow = {"numpy": 10.0} if number >= 40 else {}
        chosen += run(selector, lambda backend, slow=slow: slow.get(backend, FAR(backend)), 1)  # type: ignore[misc]
        dictionary = Dictionary.from_json(selector.dictionary.to_json())
    assert Counter(chosen[20:40]) == {"numpy": 20}
    assert Counter(chosen[100:]) == {"direct": 20}


def test_a_latecomers_first_use_may_be_slow_too() -> None:
    """It is tried once in the first process, and again in the next."""
    first = Selector()
    run(first, FAR, 20)
    candidates = (*ALL, "mine")
    assert run(first, lambda backend: 30.0 if backend == "mine" else FAR(backend), 1, candidates=candidates) == ["mine"]
    second = Selector(first.dictionary)
    mine = run(second, lambda backend: 0.3 if backend == "mine" else FAR(backend), 20, candidates=candidates)
    assert mine == ["mine"] * 20


def test_what_is_known_to_be_hopeless_is_never_tried_first() -> None:
    slow_torch = fixed(gds=1.9, numpy=1.2, torch=5.0, direct=1.0)
    selector = Selector(refresh_every=20)
    first, explored = [], True
    for _ in range(200):
        choice = selector.choose(MIB, WRITE, ALL)
        if choice.exploring and not explored:
            first.append(choice.backend)
        explored = choice.exploring
        selector.record(MIB, WRITE, choice.backend, slow_torch(choice.backend))
    assert len(first) >= 4
    assert set(first) == {"direct"}, "what was the best before"
    for nbytes in (2 * MIB, 3 * MIB, 4 * MIB):
        assert run(Selector(selector.dictionary), slow_torch, 3, nbytes=nbytes).count("torch") == 0


def test_backends_that_are_gone_do_not_make_the_others_hopeless() -> None:
    selector = Selector()
    run(selector, fixed(gds=0.1, numpy=1.0, torch=1.3, direct=0.9), 20)
    chosen = run(selector, FAR, 20, nbytes=2 * MIB, candidates=("direct", "numpy", "torch"))
    assert set(chosen[:2]) == {"direct", "numpy"}


def test_a_clock_that_does_not_move() -> None:
    selector = Selector()
    assert set(run(selector, lambda backend: 0.0, 100)) == set(ALL)
    assert selector.statistics().refreshed == 0


def test_tries_that_were_withdrawn_are_made_again() -> None:
    selector = Selector()
    begun = [selector.choose(MIB, WRITE, ALL) for _ in range(MOST_TRIES * 4 + 1)]
    assert not begun[-1].exploring
    for choice in begun[:-1]:
        selector.withdrawn(MIB, WRITE, choice.backend)
    assert selector.choose(MIB, WRITE, ALL).exploring


@pytest.mark.parametrize("warm_reads", [4, 1000])
def test_reads_that_are_usual_count(warm_reads: int) -> None:
    """After a restart, some were cold."""
    selector = Selector(mode="read")
    for name in ("direct", "numpy"):
        for _ in range(3):
            selector.record(MIB, WRITE, name, 1.0)
            selector.record(MIB, READ, name, {"direct": 2.0, "numpy": 3.0}[name])
    for _ in range(warm_reads):
        selector.record(MIB, Context("read", warm=True), "numpy", 0.5)
    assert selector.choose(MIB, WRITE, ("direct", "numpy")).backend == "numpy"


def test_reads_on_the_own_device_count_alone_if_there_are_any() -> None:
    dictionary = Dictionary()
    from_gpu, to_gpu = Context("write", "cuda"), Context("read", "cuda")
    for context, name, seconds in [
        (from_gpu, "numpy", 1.0), (from_gpu, "direct", 1.1), (READ, "numpy", 0.5), (READ, "direct", 0.6),
        (to_gpu, "numpy", 20.0),
    ]:  # fmt: skip
        for _ in range(3):
            dictionary.apply(Change(context, MIB, name, seconds))
    selector = Selector(dictionary, mode="read")
    choice = selector.choose(MIB, from_gpu, ("direct", "numpy"))
    assert (choice.backend, choice.exploring) == ("direct", True), "to learn how fast it is read there"
    selector.record(MIB, from_gpu, "direct", 1.1)
    selector.record(MIB, to_gpu, "direct", 1.0)
    assert selector.choose(MIB, from_gpu, ("direct", "numpy")).backend == "direct"


def test_one_outlier_of_the_best_does_not_depose_it() -> None:
    selector = Selector()
    run(selector, FAR, 50)
    outliers = iter([10.0, 1.0, 1.0, 12.0, 1.0] * 20)
    assert run(selector, lambda backend: next(outliers), 100) == ["numpy"] * 100
    assert selector.statistics().refreshed == 0


def test_ties_are_not_fought_over() -> None:
    selector = Selector()
    run(selector, EQUAL, 12)
    assert run(selector, lambda backend: 1.02, 100) == ["gds"] * 100
    assert selector.statistics().refreshed == 0


def test_when_everything_becomes_faster_the_best_is_found_again() -> None:
    selector = Selector()
    run(selector, fixed(gds=5.0, numpy=4.9, torch=5.2, direct=5.1), 20)  # the machine is busy
    now = fixed(gds=1.1, numpy=1.0, torch=0.4, direct=0.5)
    assert run(selector, now, 60)[-20:] == ["torch"] * 20
    assert selector.statistics().refreshed == 1


def test_noise_is_not_explored_for_ever() -> None:
    noise = random.Random(0)
    selector = Selector()
    run(selector, lambda backend: FAR(backend) * 10 ** noise.uniform(-1, 1), 2000)
    statistics = selector.statistics()
    assert statistics.refreshed > 2
    assert statistics.explored < 0.1 * 2000


def test_drifts_that_change_nothing_are_looked_into_ever_less() -> None:
    selector = Selector()
    found = []
    for number in range(20):  # the machine is slow now and then; numpy is the fastest all the time
        run(selector, lambda backend, number=number: FAR(backend) * (1 + number % 2), 40)
        found.append(selector.statistics().refreshed)
    assert found[3] >= 2
    assert found[-1] <= 5
    assert selector.statistics().explored < 60
    run(selector, fixed(gds=1.0, numpy=5.0, torch=5.0, direct=5.0), 300)  # but they are
    assert selector.choose(MIB, WRITE, ALL).backend == "gds"


@pytest.mark.parametrize("change", [3.0, 0.2])
def test_drift_is_noticed(change: float) -> None:
    selector = Selector()
    run(selector, FAR, 40)

    def drifted(backend: str) -> float:
        return FAR(backend) * (change if backend == "numpy" else 1.0)

    chosen = run(selector, drifted, 30)
    assert chosen[:2] == ["numpy"] * 2
    assert selector.statistics().refreshed == 1
    assert chosen[-1] == ("direct" if change > 1 else "numpy")


def test_what_becomes_slower_by_a_little_gives_way_when_all_is_explored_anew() -> None:
    selector = Selector(refresh_every=20)
    run(selector, FAR, 20)
    chosen = run(selector, lambda backend: 1.25 if backend == "numpy" else FAR(backend), 60)
    assert chosen[:11] == ["numpy"] * 11
    assert selector.explain(MIB, WRITE, ALL).timings["numpy"].seconds == 1.25
    assert Counter(chosen[-20:]).most_common(1)[0][0] == "direct"


def test_refreshing() -> None:
    selector = Selector(refresh_every=5)
    run(selector, FAR, 10)
    assert run(selector, FAR, 5) == ["numpy"] * 5
    choice = selector.choose(MIB, WRITE, ALL)
    assert choice.reason == "tried for up to 1 MiB, 1 of at most 3; 1.00 × the best before"
    selector.record(MIB, WRITE, choice.backend, FAR(choice.backend))
    again = [choice.backend, *run(selector, FAR, 9)]
    assert again == ["numpy", "gds", "torch", "direct", "gds", "numpy", "torch", "direct", "numpy", "direct"]
    assert selector.statistics().refreshed == 1
    selector.refresh_every = None
    assert run(selector, FAR, 20) == ["numpy"] * 20
    never = Selector()
    run(never, FAR, 10)
    assert run(never, FAR, 1000) == ["numpy"] * 1000
    with pytest.raises(ValueError, match="at least 1 or None, found 0"):
        Selector(refresh_every=0)


def test_what_was_the_best_before_a_refresh_is_not_given_up_in_a_bad_moment() -> None:
    selector = Selector(refresh_every=10)
    run(selector, FAR, 20)
    assert selector.statistics().refreshed == 1
    selector.refresh_every = None
    seen: Counter[str] = Counter()

    def seconds(backend: str) -> float:
        seen[backend] += 1
        return FAR(backend) * (8.0 if backend == "numpy" and seen[backend] <= 2 else 1.0)

    assert run(selector, seconds, 20)[-5:] == ["numpy"] * 5


def test_a_change_for_good_outweighs_what_was_known_before_a_refresh() -> None:
    selector = Selector(refresh_every=10)
    run(selector, FAR, 20)
    assert selector.statistics().refreshed == 1
    selector.refresh_every = None
    assert run(selector, fixed(gds=1.2, numpy=1.0, torch=0.2, direct=1.1), 20)[-5:] == ["torch"] * 5


def test_a_backend_that_fails_is_excluded_until_the_next_refresh() -> None:
    selector = Selector(refresh_every=4)
    assert selector.choose(MIB, WRITE, ALL).backend == "gds"
    selector.failed(MIB, WRITE, "gds", "no driver")
    assert "gds" not in run(selector, EQUAL, 12)
    assert "gds: not possible (no driver)" in str(selector.explain(MIB, WRITE, ALL))
    assert selector.statistics().failed == 1
    assert "gds" in run(selector, EQUAL, 12)
    selector.failed(MIB, WRITE, "gds", "the driver is busy")
    loaded = Selector(Dictionary.from_json(selector._dictionary.to_json()))
    assert "gds" in run(loaded, EQUAL, 12)  # it may be another day


def test_a_backend_that_fails_is_left_alone_without_exploration_too() -> None:
    learned = Selector()
    run(learned, FAR, 20)
    selector = Selector(learned.dictionary, explore=False)
    selector.failed(MIB, WRITE, "numpy", "no")
    assert run(selector, FAR, 3) == ["direct"] * 3
    for name in ALL:
        selector.failed(MIB, WRITE, name, "no")
    assert selector.choose(MIB, WRITE, ALL).backend in ALL


def test_the_best_one_fails() -> None:
    selector = Selector()
    run(selector, FAR, 20)
    selector.failed(MIB, WRITE, "numpy", "the disk was replaced")
    assert run(selector, FAR, 3)[-1] == "direct"


def test_an_unseen_size_begins_as_its_neighbour_and_tries_nothing_hopeless() -> None:
    selector = Selector()
    run(selector, FAR, 20)
    choice = selector.choose(2 * MIB, WRITE, ALL)
    assert (choice.backend, choice.exploring) == ("numpy", True)
    assert "1.00 × the best at 1 MiB" in choice.reason
    assert "torch" not in run(selector, FAR, 20, nbytes=2 * MIB)
    assert run(selector, FAR, 4, nbytes=64 * MIB) == ["gds", "numpy", "torch", "direct"]  # too far away


def test_sizes_in_one_bucket_are_compared_by_speed() -> None:
    selector = Selector(refresh_every=None)
    small, large = size_of(bucket_of(MIB) - 1) + 1, MIB
    for backend, nbytes, seconds in (("numpy", small, 0.8), ("direct", large, 1.0)):
        selector.record(nbytes, WRITE, backend, seconds)
    assert selector._dictionary.of(WRITE, MIB).best == "direct"  # 0.8 s for 0.71 MiB is slower


def test_contexts_are_kept_apart() -> None:
    selector = Selector()
    run(selector, FAR, 20)
    for context in (READ, Context("write", "cuda"), Context("write", warm=True)):
        assert run(selector, EQUAL, 1, context=context) == ["gds"]


def test_without_exploration_choices_depend_on_the_dictionary_only() -> None:
    learned = Selector()
    run(learned, FAR, 20)
    text = learned._dictionary.to_json()
    selector = Selector(Dictionary.from_json(text), explore=False)
    assert run(selector, EQUAL, 10) == ["numpy"] * 10
    assert run(selector, EQUAL, 2, nbytes=2 * MIB) == ["numpy"] * 2
    assert selector._dictionary.to_json() == text
    assert selector.choose(1 << 30, WRITE, ALL, default="direct").backend == "direct"
    assert selector.statistics().explored == 0


@pytest.mark.parametrize(("mode", "expected"), [("write", "gds"), ("read", "numpy"), ("write_read", "torch")])
def test_the_three_dictionaries(mode: Any, expected: str) -> None:
    writes, reads = fixed(gds=1.0, numpy=1.9, torch=1.4, direct=1.8), fixed(gds=3.0, numpy=0.5, torch=0.6, direct=2.0)
    selector = Selector()
    for _ in range(MOST_TRIES * 4):
        choice = selector.choose(MIB, WRITE, ALL, mode)
        selector.record(MIB, WRITE, choice.backend, writes(choice.backend))
        selector.record(MIB, READ, choice.backend, reads(choice.backend))
    choice = selector.choose(MIB, WRITE, ALL, mode)
    assert choice.backend == expected
    assert selector.explain(MIB, WRITE, ALL, mode).choice == choice


def test_what_a_backend_reads_is_in_the_page_cache_or_not_as_it_has_written_it() -> None:
    writes, reads = fixed(numpy=1.0, direct=0.9), fixed(numpy=0.5, direct=2.0)
    selector = Selector()
    for _ in range(MOST_TRIES * 2):
        choice = selector.choose(MIB, WRITE, ("direct", "numpy"), "write_read")
        selector.record(MIB, WRITE, choice.backend, writes(choice.backend))
        context = Context("read", warm=choice.backend == "numpy")
        selector.record(MIB, context, choice.backend, reads(choice.backend))
    selector.record(MIB, READ, "numpy", 9.0)
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


def test_what_could_not_be_done_is_forgotten_only_with_what_was_explored_anew() -> None:
    selector = Selector()
    selector.failed(MIB, WRITE, "direct", "not on this disk")
    selector.adopt(Dictionary())
    assert selector.choose(MIB, WRITE, ("direct", "numpy")).backend == "numpy"
    assert "not on this disk" in str(selector.explain(MIB, WRITE))
    selector.adopt(Dictionary(), anew=True)
    assert selector.explain(MIB, WRITE, ("direct", "numpy")).failed == {}


@pytest.mark.parametrize("batch", [3, 30])
def test_reads_that_become_slow_are_noticed_where_they_decide_what_to_write_with(batch: int) -> None:
    """Tensors are written, many of a size, and then read: as activations are."""
    writes, reads = fixed(numpy=1.0, torch=1.3, direct=1.2), fixed(numpy=0.5, torch=0.6, direct=0.5)
    slow = fixed(numpy=20.0, torch=0.6, direct=0.5)
    selector = Selector(mode="write_read")
    candidates = ("direct", "numpy", "torch")
    used: Counter[str] = Counter()
    for number in range(40):
        written = [selector.choose(MIB, WRITE, candidates).backend for _ in range(batch)]
        for backend in written:
            selector.record(MIB, WRITE, backend, writes(backend))
        for backend in written:
            selector.record(MIB, READ, backend, (reads if number < 15 else slow)(backend))
        if number in (14, 39):
            used[written[-1]] += 1
    assert used == {"numpy": 1, "direct": 1}


def test_tries_that_come_to_nothing_do_not_count() -> None:
    selector = Selector()
    chosen = []
    for _ in range(20):  # the disk is full
        choice = selector.choose(MIB, WRITE, ALL)
        chosen.append(choice.backend)
        selector.withdrawn(MIB, WRITE, choice.backend)
    assert Counter(chosen) == dict.fromkeys(ALL, 5), "if one of them is to blame, another one can"
    assert selector.statistics().explored == 0
    run(selector, FAR, 11)
    assert selector.statistics().explored == 10
    assert run(selector, FAR, 20) == ["numpy"] * 20


@pytest.mark.parametrize("mode", ["read", "write_read"])
def test_what_was_learned_for_writing_serves_reading_once_it_was_read(mode: Any) -> None:
    writes, reads = fixed(numpy=1.0, torch=1.2, direct=1.1), fixed(numpy=3.0, torch=0.1, direct=3.0)
    first = Selector()
    assert run(first, writes, 30, candidates=ALL[::-1][:2] + ALL[:1])[-1] == "numpy"
    selector = Selector(first.dictionary, mode=mode)
    chosen = []
    for _ in range(12):
        choice = selector.choose(MIB, WRITE, ("direct", "numpy", "torch"))
        selector.record(MIB, WRITE, choice.backend, writes(choice.backend))
        selector.record(MIB, READ, choice.backend, reads(choice.backend))
        chosen.append(choice.backend)
    assert chosen == ["numpy", "torch", "direct"] + ["torch"] * 9
    assert selector.statistics().explored >= 3
    unread = Selector(first.dictionary, mode=mode)
    chosen = [unread.choose(MIB, WRITE, ("direct", "numpy", "torch")).backend for _ in range(20)]
    assert chosen == ["numpy", "torch", "direct"] * MOST_TRIES + ["numpy"] * 11  # nobody reads anything


def test_until_reads_are_known_writes_decide() -> None:
    selector = Selector()
    assert run(selector, FAR, 20)[-1] == "numpy"
    assert selector.choose(MIB, READ, ALL, "read").exploring
    selector.explore = False
    assert selector.choose(MIB, WRITE, ALL, "read").backend == "numpy"
    with pytest.raises(ValueError, match="mode is one of"):
        selector.choose(MIB, WRITE, ALL, "fast")  # type: ignore[arg-type]


def test_the_second_run_explores_nothing_after_a_refresh() -> None:
    first = Selector(refresh_every=20)
    run(first, FAR, 41)
    assert first.statistics().refreshed >= 1
    first.refresh_every = None
    run(first, FAR, 10)
    second = Selector(first.dictionary)
    assert run(second, FAR, 20) == ["numpy"] * 20


def test_the_second_run_explores_nothing() -> None:
    first = Selector()
    for nbytes in (3000, MIB, 100 * MIB):
        run(first, FAR, 12, nbytes=nbytes)
    second = Selector(Dictionary.from_json(first._dictionary.to_json()))
    for nbytes in (3000, MIB, 100 * MIB):
        assert run(second, FAR, 3, nbytes=nbytes) == ["numpy"] * 3
    assert second.statistics().explored == 0


def test_what_is_explained_is_about_those_that_could_the_last_time() -> None:
    selector = Selector()
    with pytest.raises(ValueError, match="there is no backend"):
        selector.explain(MIB, WRITE)
    run(selector, FAR, 20, candidates=("torch", "direct"))
    assert selector.explain(MIB, WRITE).choice.backend == "direct"
    run(selector, FAR, 20)
    assert selector.explain(MIB, WRITE).choice.backend == "numpy"
    later = Selector(selector.dictionary)
    assert later.explain(MIB, WRITE).choice == selector.explain(MIB, WRITE).choice


def test_what_is_adopted_makes_nothing_possible_that_is_not() -> None:
    selector = Selector()
    selector.failed(MIB, WRITE, "numpy", "no")
    other = Selector()
    run(other, FAR, 20)
    selector.adopt(other.dictionary)
    assert selector.choose(MIB, WRITE, ALL).backend == "direct"


def test_what_is_explained_is_what_is_chosen_when_nothing_is_known() -> None:
    selector = Selector(explore=False)
    explained = selector.explain(MIB, WRITE, ALL, default="direct").choice
    assert explained == selector.choose(MIB, WRITE, ALL, default="direct")
    assert explained.backend == "direct"


def test_what_nobody_had_to_choose_counts_as_tried() -> None:
    """A file is read by the kind of tool that wrote it: nobody asks which."""
    selector = Selector()
    for _ in range(MOST_TRIES):
        selector.record(MIB, READ, "numpy", 1.0)
    assert (selector.statistics().explored, selector.statistics().exploited) == (0, MOST_TRIES)
    assert selector.choose(MIB, READ, ["numpy", "direct"]).backend == "direct"


def test_what_nobody_had_to_choose_has_not_drifted_because_its_first_use_took_long() -> None:
    selector = Selector()
    for seconds in (10.0, *[1.0] * 20):
        selector.record(MIB, READ, "numpy", seconds)
    assert selector.statistics().refreshed == 0


@given(st.data())
def test_what_is_explained_is_what_is_chosen(data: st.DataObject) -> None:
    selector = Selector(refresh_every=data.draw(st.sampled_from([None, 3])), explore=data.draw(st.booleans()))
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
        told = data.draw(st.sampled_from(["record", "failed", "nothing"]))
        if told == "record":
            selector.record(*question[:2], explained.backend, data.draw(st.floats(0, 10)))
        elif told == "failed":
            selector.failed(*question[:2], explained.backend, "no")


def test_explaining_changes_nothing() -> None:
    selector = Selector()
    run(selector, FAR, 2)
    text = selector._dictionary.to_json()
    for _ in range(5):
        assert selector.explain(MIB, WRITE, ALL).choice.backend == "torch"
        assert "gds: 1.9 s (+ 0 ms), measured 1 times" in str(selector.explain(MIB, WRITE, ALL))
        selector.explain(MIB * 64, WRITE, ALL)
    assert selector._dictionary.to_json() == text
    assert run(selector, FAR, 1) == ["torch"]


def test_everything_that_is_learned_is_told() -> None:
    changes: list[Change] = []
    selector = Selector(on_change=changes.append)
    run(selector, FAR, 12)
    selector.failed(MIB, WRITE, "direct", "gone")
    copy = Dictionary()
    for change in changes:
        copy.apply(change)
    assert copy.to_json() == selector._dictionary.to_json()


names = st.sampled_from([*ALL, "mine"])
changes = st.builds(
    Change,
    st.builds(Context, st.sampled_from(["write", "read"]), st.sampled_from(["cpu", "cuda"]), st.booleans()),
    st.integers(0, 1 << 42),
    names,
    st.one_of(st.none(), st.floats(0, 1e6)),
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
    assert (timing.seconds, round(timing.spread, 6)) == (0.9, 0.2)
    dictionary = Dictionary()
    for number in range(100):
        dictionary.apply(Change(WRITE, MIB, "numpy", float(number)))
    assert dictionary.of(WRITE, MIB).timings["numpy"].samples == (95.0, 96.0, 97.0, 98.0, 99.0)
    assert dictionary.of(WRITE, MIB).timings["numpy"].count == 100
    assert MOST_SAMPLES == 5


GOOD = Selector()
run(GOOD, FAR, 12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged"),
        ("[]", "not a dictionary"),
        ('{"format": "other"}', "not a dictionary"),
        ('{"format": "fastensor dictionary", "version": 2}', "version 2, expected 1"),
        ('{"format": "fastensor dictionary", "version": 1}', "damaged"),
        ('{"format": "fastensor dictionary", "version": 1, "entries": 3}', "damaged"),
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
