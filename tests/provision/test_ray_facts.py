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
from fastensor.provision.ray.calls import EncodedSamples, contents_of, facts_of, pickled, publish, withdraw
from fastensor.provision.ray.cluster import _is_at
from fastensor.provision.ray.server import Latest, _in_order


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with local_ray() as ray:
        yield ray


def part(samples: int) -> EncodedSamples:
    return EncodedSamples(
        np.zeros(64 * samples, np.uint8), [64 * one for one in range(samples)], [8] * samples, Cost(0, 0, 0), 0
    )


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
    withdraw("facts")
    withdraw("facts")
    assert publish("facts", second, pickled("other contents", "")) == second
    assert contents_of("facts") == "other contents"  # type: ignore[comparison-overlap]
    withdraw("facts")


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("before_contents", [True, False])
def test_facts_and_contents_are_of_the_same_process(monkeypatch: pytest.MonkeyPatch, *, before_contents: bool) -> None:
    """Another process publishes its own before this one keeps its contents, or its facts."""
    first, second = Facts(4, "samples", 1 << 20, workers=2), Facts(4, "samples", 1 << 21, workers=3)
    keep = names.keep

    def keep_after_another(key: str, value: bytes) -> None:
        if key.startswith("both/") is before_contents:
            monkeypatch.setattr(names, "keep", keep)
            publish("both", second, pickled("other contents", ""))
        keep(key, value)

    monkeypatch.setattr(names, "keep", keep_after_another)
    assert publish("both", first, pickled("its contents", "")) == second
    assert contents_of("both") == "other contents"  # type: ignore[comparison-overlap]
    assert len(keys("both")) == 2
    withdraw("both")
    assert not keys("both")


def keys(name: str) -> list[bytes]:
    """Under what Ray keeps something of a service."""
    from ray.experimental import internal_kv

    found: list[bytes] = internal_kv._internal_kv_list(name, namespace=names.NAMESPACE)
    return found


@pytest.mark.usefixtures("ray")
def test_a_service_may_end_while_the_same_is_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, contents = Facts(4, "samples", 1 << 20, workers=2), pickled("its contents", "")
    publish("again", facts, contents)
    drop = names.drop

    def drop_and_publish(key: str) -> None:
        drop(key)
        monkeypatch.setattr(names, "drop", drop)
        publish("again", facts, contents)

    monkeypatch.setattr(names, "drop", drop_and_publish)
    withdraw("again")
    assert contents_of("again") == "its contents"  # type: ignore[comparison-overlap]
    assert len(keys("again")) == 2
    withdraw("again")


@pytest.mark.usefixtures("ray")
def test_who_joins_does_not_fetch_the_contents(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(4, "samples", 1 << 20, workers=2)
    publish("long", facts, pickled(bytes(1 << 20), ""))
    fetched = []
    kept = names.kept

    def measured(key: str) -> bytes | None:
        found = kept(key)
        fetched.append(len(found or b""))
        return found

    monkeypatch.setattr(names, "kept", measured)
    assert facts_of("long") == publish("long", facts, b"") == facts
    assert max(fetched) < 1 << 16
    withdraw("long")
