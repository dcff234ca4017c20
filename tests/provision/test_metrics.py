"""Statistics add up, and people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.provision.metrics import BOUNDS, Served, Waits, table

WAITS = st.lists(st.floats(0, 1000), max_size=50)


def waits_of(seconds: list[float]) -> Waits:
    waits = Waits()
    for wait in seconds:
        waits = waits.with_wait(wait)
    return waits


@given(WAITS, st.floats(0.01, 1))
def test_quantiles_are_close(seconds: list[float], part: float) -> None:
    found = waits_of(seconds).quantile(part)
    if not seconds:
        assert found == 0
        return
    exact = sorted(seconds)[max(-(-part * len(seconds) // 1), 1).__int__() - 1]
    assert exact <= found * (1 + 1e-9)
    assert found <= max(exact * 1.16, 1e-6) or exact > BOUNDS[-1]
    assert found <= max(seconds)


@given(WAITS, WAITS)
def test_waits_of_two_clients_add_up(one: list[float], other: list[float]) -> None:
    together, added = waits_of(one + other), waits_of(one) + waits_of(other)
    assert (together.counts, together.longest) == (added.counts, added.longest)
    assert together.seconds == pytest.approx(added.seconds)
    assert together.count == len(one) + len(other)


def test_served_adds_up() -> None:
    one = Served(batches=1, samples=10, nbytes=100, hits=5, read_nbytes=50, seconds=2.0, waits=waits_of([0.5]))
    both = one + Served(batches=1, samples=10, hits=10, seconds=2.0, waits=waits_of([1.5]))
    assert both.hit_rate == 0.75
    assert both.waiting == 0.5
    assert (both.batches, both.samples, both.nbytes, both.read_nbytes) == (2, 20, 100, 50)
    assert (Served().hit_rate, Served().waiting) == (0, 0)


def test_the_table_is_aligned() -> None:
    served = Served(
        batches=30,
        samples=3000,
        nbytes=1 << 30,
        hits=2990,
        read_nbytes=1 << 20,
        seconds=10.0,
        waits=waits_of([0.1] * 9),
    )
    assert table({"rank 0": served, "rank 10": Served()}).splitlines() == [
        "         batches  samples  given  in cache   read  wait p50     p99  waiting",
        "rank 0        30     3000  1 GiB     100 %  1 MiB    100 ms  100 ms      9 %",
        "rank 10        0        0    0 B       0 %    0 B       0 s     0 s      0 %",
    ]
