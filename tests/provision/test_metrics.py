"""Statistics add up, and people read them."""

from __future__ import annotations

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


def test_rates_of_what_was_served() -> None:
    served = Served(batches=2, samples=20, hits=15, seconds=4.0, waits=waits_of([0.5, 1.5]))
    assert served.hit_rate == 0.75
    assert served.waiting == 0.5
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
