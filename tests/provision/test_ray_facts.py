"""All processes of a service on Ray go by the facts of whoever has created it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="the engine on Ray needs it: pip install 'fastensor[ray]'")

from provision.rays import local_ray

from fastensor.errors import ProvisionError
from fastensor.provision.engine import Cost, Facts
from fastensor.provision.ray import names
from fastensor.provision.ray.calls import Part, contents_of, pickled, publish
from fastensor.provision.ray.cluster import _is_at
from fastensor.provision.ray.server import Latest, _in_order


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with local_ray() as ray:
        yield ray


def part(samples: int) -> Part:
    return Part(np.zeros(64 * samples, np.uint8), [64 * one for one in range(samples)], [8] * samples, Cost(0, 0, 0), 0)


def test_a_server_that_sends_other_samples_than_it_keeps_is_an_error() -> None:
    positions = np.array([64, 0, 1])
    assert len(_in_order(positions, 1, {0: part(3)})) == 3
    for found in (2, 4):
        with pytest.raises(ProvisionError, match=f"server 0 keeps 3 samples of the batch, and has sent {found}"):
            _in_order(positions, 1, {0: part(found)})


def test_of_those_that_have_gone_the_latest_are_known() -> None:
    gone = Latest(most=2)
    for name in "abb":
        gone.add(name)
    assert "a" in gone
    gone.add("c")
    assert [name in gone for name in "abc"] == [False, True, True]


def test_a_cluster_is_the_same_by_the_name_of_its_host() -> None:
    assert _is_at("localhost:6379", "127.0.0.1:6379")
    assert _is_at("127.0.0.1:6379", "127.0.0.1:6379")
    assert not _is_at("localhost:6380", "127.0.0.1:6379")
    assert not _is_at("127.0.0.2:6379", "127.0.0.1:6379")


@pytest.mark.usefixtures("ray")
def test_the_facts_of_whoever_was_first_count_until_the_service_ends() -> None:
    first, second = Facts(4, "samples", 1 << 20, workers=2, seed=1), Facts(4, "samples", 1 << 21, workers=3, seed=2)
    assert publish("facts", first, pickled("its contents", "")) == first
    assert publish("facts", second, pickled("other contents", "")) == first
    assert contents_of("facts") == "its contents"  # type: ignore[comparison-overlap]
    names.drop("facts")
    assert publish("facts", second, pickled("other contents", "")) == second
    names.drop("facts")


@pytest.mark.usefixtures("ray")
def test_facts_and_contents_are_of_the_same_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process publishes its own while this one does."""
    first, second = Facts(4, "samples", 1 << 20, workers=2), Facts(4, "samples", 1 << 21, workers=3)
    keep = names.keep

    def keep_beside_another(*what: Any) -> None:
        keep(*what)
        monkeypatch.setattr(names, "keep", keep)
        publish("both", second, pickled("other contents", ""))

    monkeypatch.setattr(names, "keep", keep_beside_another)
    assert publish("both", first, pickled("its contents", "")) == first
    assert contents_of("both") == "its contents"  # type: ignore[comparison-overlap]
    names.drop("both")
