"""The selector on timings that were measured on a busy machine: recorded, so that nothing here depends on a clock."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from fastensor import Context, Selector
from fastensor.select.context import by_rule

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "tensor_io-mixes.json"
MIXES = [f"{mix}, {way}" for mix in ("BERT", "ViT") for way in ("in the page cache", "durable and cold")]
OVERRUNS = 6
"""What may be lost beside the share: one try that disappoints, at each of up to 16 sizes."""
BACKENDS = ("direct", "numpy", "torch")
WRITE = Context("write")
ITERATIONS = 300

Timings = dict[str, list[float]]
"""The time of each iteration, by backend."""


def recorded(mix: str) -> dict[int, Timings]:
    """By size."""
    document = json.loads(RECORDED.read_text())
    found: dict[int, Timings] = defaultdict(lambda: defaultdict(list))
    for row in document["measurements"]:
        one = dict(zip(document["columns"], row, strict=True))
        if one["table"] == mix and one["way"] in BACKENDS:
            found[one["nbytes"]][one["way"]].append(one["seconds"])
    return found


class Use(NamedTuple):
    """One transfer."""

    nbytes: int
    backend: str
    exploring: bool
    seconds: float
    prior_seconds: float
    """What the rule's backend would have taken."""


def replay(data: dict[int, Timings], start: int, rule: Callable[[int], str]) -> list[Use]:
    """What is chosen. The iterations come again and again, in their order."""
    selector = Selector()
    found = []
    for number in range(start, start + ITERATIONS):
        for nbytes, timings in data.items():
            prior = rule(nbytes)
            choice = selector.choose(nbytes, WRITE, BACKENDS, default=prior)
            seconds = {name: timings[name][number % len(timings[name])] for name in BACKENDS}
            selector.record(nbytes, WRITE, choice.backend, seconds[choice.backend], choice)
            found.append(Use(nbytes, choice.backend, choice.exploring, seconds[choice.backend], seconds[prior]))
    return found


RULES: dict[str, tuple[Callable[[int], str], float]] = {
    "the rule": (lambda nbytes: by_rule(WRITE, nbytes), 1.25),
    "direct": (lambda nbytes: "direct", 1.5),
    "numpy": (lambda nbytes: "numpy", 1.25),
}
"""Priors, and within which factor of the best backends choices are in the end: where the prior is wrong, by up to ten
times, the budget of all sizes pays for what is tried at each, and one spike of the machine may have used it up."""


@pytest.mark.parametrize(
    "prior",
    ["the rule", pytest.param("direct", marks=pytest.mark.torture), pytest.param("numpy", marks=pytest.mark.torture)],
)
@pytest.mark.parametrize("mix", MIXES)
def test_what_it_chooses_on_a_busy_machine(mix: str, prior: str) -> None:
    """Wherever it begins, on average, in the second half of the uses nearly as fast as the best backend of each size;
    and at no moment much slower than the prior."""
    rule, enough = RULES[prior]
    data = recorded(mix)
    starts = range(0, 20, 4)
    usual = best = 0.0
    for start in starts:
        uses = replay(data, start, rule)
        taken = alone = overrun = 0.0
        for use in uses:
            taken, alone = taken + use.seconds, alone + use.prior_seconds
            overrun = max(overrun, use.seconds - use.prior_seconds)
            assert taken <= 1.05 * alone + OVERRUNS * overrun
        later = [use for use in uses[len(uses) // 2 :] if not use.exploring]
        assert len(later) > 0.85 * len(uses) / 2, "it seldom explores"
        usual += sum(median(data[use.nbytes][use.backend]) for use in later)
        best += sum(min(map(median, data[use.nbytes].values())) for use in later)
    assert usual <= enough * best
