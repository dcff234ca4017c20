"""Credits on simulated clients: a slow one has few batches ahead, a bursty one its bursts, and all get their share."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.provision.credits import CONGESTION, FIRST, REMEMBERED, ClientPace, most_within, turn


@dataclass
class Client:
    """Computes for ``compute(step)`` seconds behind each batch."""

    compute: Callable[[int], float]
    pace: ClientPace = field(default_factory=ClientPace)
    ahead: int = 0
    """Batches in the making, or waiting."""
    ready: int = 0
    steps: int = 0
    idle_since: float | None = 0.0
    waits: list[float] = field(default_factory=list)
    most_ahead: int = 0
    served: int = 0

    def take(self, now: float) -> float:
        """Take a batch. Returns when the next one is wanted."""
        waited = 0.0 if self.idle_since is None else now - self.idle_since
        self.idle_since = None
        self.waits.append(waited)
        self.pace = self.pace.taken(at=now, waited=waited)
        self.ready -= 1
        self.ahead -= 1
        self.steps += 1
        return now + self.compute(self.steps)


def simulate(
    clients: Sequence[Client], *, workers: int, work: Callable[[int], float], limit: int, until: float
) -> None:
    """Workers make one batch at a time, for the client whose turn it is when they are free. No client has more than
    ``limit`` batches ahead."""
    now, made, free = 0.0, 0, workers
    numbers = count()
    events: list[tuple[float, int, Callable[[], None]]] = []

    def at(time: float, action: Callable[[], None]) -> None:
        heapq.heappush(events, (time, next(numbers), action))

    def want(client: Client) -> None:
        client.idle_since = now
        if client.ready:
            at(client.take(now), lambda: want(client))

    def arrive(client: Client, decided: float) -> None:
        nonlocal free
        free += 1
        client.ready += 1
        client.pace = client.pace.made(seconds=now - decided)
        if client.idle_since is not None:
            at(client.take(now), lambda: want(client))

    while now < until:
        while free and (wanting := [client for client in clients if client.ahead < limit]):
            client = min(wanting, key=lambda client: turn(client.ahead, client.pace.needed(), client.served))
            client.ahead += 1
            client.most_ahead = max(client.most_ahead, client.ahead)
            free -= 1
            client.served = made = made + 1
            at(now + work(made), lambda client=client, decided=now: arrive(client, decided))  # type: ignore[misc]
        now, _, action = heapq.heappop(events)
        action()


def test_a_slow_client_needs_two_batches_ahead_however_long_they_take() -> None:
    client = Client(lambda _: 1.0)
    simulate([client], workers=8, work=lambda _: 0.9, limit=100, until=100)
    assert client.pace.needed() == 2
    assert max(client.waits[1:]) == 0


def test_a_quick_client_needs_as_many_ahead_as_hide_the_latency() -> None:
    client = Client(lambda _: 0.1)
    simulate([client], workers=16, work=lambda _: 1.0, limit=100, until=100)
    assert 10 <= client.pace.needed() <= 13
    assert max(client.waits[len(client.waits) // 2 :]) == pytest.approx(0, abs=1e-9)


def test_a_bursty_client_gets_its_bursts() -> None:
    """Eight batches at once, then a second of computing, as with gradients that are accumulated."""
    client = Client(lambda step: 0.0 if step % 8 else 1.0)
    simulate([client], workers=8, work=lambda _: 0.5, limit=100, until=100)
    assert client.pace.needed() == 9
    assert max(client.waits[40:]) == pytest.approx(0, abs=1e-9)


def test_times_that_vary_cost_no_waits() -> None:
    client = Client(lambda _: 0.1)
    simulate([client], workers=16, work=lambda made: 0.5 if made % 7 else 1.0, limit=100, until=100)
    late = client.waits[100:]
    assert sum(late) < 0.05 * 0.1 * len(late)


def test_a_slow_and_a_bursty_one_leave_the_quick_one_its_share() -> None:
    slow, bursty, quick = Client(lambda _: 1.0), Client(lambda step: 0.0 if step % 8 else 1.0), Client(lambda _: 0.05)
    simulate([slow, bursty, quick], workers=12, work=lambda _: 0.2, limit=8, until=100)
    assert slow.pace.needed() <= 3
    for client in (slow, bursty, quick):
        late = client.waits[len(client.waits) // 2 :]
        assert max(late) == pytest.approx(0, abs=1e-9)


def test_an_overloaded_service_is_shared_and_its_queue_is_bounded() -> None:
    """Two workers make 20 batches a second; four clients would take 400."""
    clients = [Client(lambda _: 0.01) for _ in range(4)]
    simulate(clients, workers=2, work=lambda _: 0.1, limit=8, until=100)
    steps = [client.steps for client in clients]
    assert sum(steps) == pytest.approx(2000, rel=0.02)
    assert max(steps) - min(steps) <= 20
    assert max(client.most_ahead for client in clients) <= FIRST


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 50), st.integers(0)), min_size=1))
def test_who_lacks_batches_comes_first_and_among_them_who_has_least(clients: list[tuple[int, int, int]]) -> None:
    ahead, needed, _ = min(clients, key=lambda one: turn(*one))
    lacking = [one for one in clients if one[0] < one[1]]
    if lacking:
        assert ahead < needed
        assert ahead == min(one[0] for one in lacking)


def test_a_slow_client_does_not_hold_up_others_of_an_overloaded_service() -> None:
    slow, greedy = Client(lambda _: 2.0), Client(lambda _: 0.0)
    simulate([slow, greedy], workers=2, work=lambda _: 0.1, limit=8, until=100)
    assert sum(slow.waits[1:]) < 0.05 * 100
    assert greedy.steps > 0.95 * 2000 - slow.steps


def test_what_waits_for_workers_does_not_count_as_work() -> None:
    pace = ClientPace().made(seconds=0.1)
    for _ in range(20):
        pace = pace.made(seconds=10.0)
    assert pace.seconds == pytest.approx(0.1 * CONGESTION)


def test_old_measurements_are_forgotten() -> None:
    pace = ClientPace().made(seconds=1e-6).taken(at=0.0)
    for step in range(REMEMBERED):
        pace = pace.made(seconds=0.5).taken(at=1.0 + step)
    assert pace.seconds == 0.5
    assert len(pace.times) == REMEMBERED


def test_nothing_is_known_at_first() -> None:
    assert ClientPace().needed() == ClientPace().taken(at=1.0).needed() == FIRST
    assert ClientPace().made(seconds=100.0).needed() == FIRST
    assert ClientPace().seconds == 0


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.floats(0.001, 200))
def test_the_most_within_an_interval_is_that_of_all_intervals(times: list[float], seconds: float) -> None:
    ordered = tuple(sorted(times))
    expected = max(
        sum(begin <= time and time - begin < seconds for time in ordered[first:]) for first, begin in enumerate(ordered)
    )
    assert most_within(ordered, seconds) == expected
