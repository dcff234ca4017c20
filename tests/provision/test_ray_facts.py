"""All processes of a service on Ray go by the facts of whoever has created it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray", reason="the engine on Ray needs it: pip install 'fastensor[ray]'")

from provision.conftest import wait_until
from provision.rays import local_ray

from fastensor.errors import ProvisionError
from fastensor.provision.engine import Cost, Facts
from fastensor.provision.making import UserObjects
from fastensor.provision.ray import names
from fastensor.provision.ray.calls import EncodedSamples, Service, contents_of, pickled_contents
from fastensor.provision.ray.client import RayEngine
from fastensor.provision.ray.cluster import _is_at
from fastensor.provision.ray.server import _in_order
from fastensor.provision.sources import as_source


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    with local_ray() as ray:
        yield ray


def part(samples: int) -> EncodedSamples:
    return EncodedSamples([np.zeros(64, np.uint8) for _ in range(samples)], Cost(0, 0, 0))


def test_a_server_that_sends_other_samples_than_it_keeps_is_an_error() -> None:
    positions = np.array([64, 0, 1])
    assert len(_in_order(positions, 1, {0: part(3)})) == 3
    for found in (2, 4):
        with pytest.raises(ProvisionError, match=f"server 0 keeps 3 samples of the batch, and has sent {found}"):
            _in_order(positions, 1, {0: part(found)})


def test_a_cluster_is_the_same_by_the_name_of_its_host() -> None:
    assert _is_at("localhost:6379", "127.0.0.1:6379")
    assert _is_at("127.0.0.1:6379", "127.0.0.1:6379")
    assert not _is_at("localhost:6380", "127.0.0.1:6379")
    assert not _is_at("127.0.0.2:6379", "127.0.0.1:6379")


def spec_of(samples: list[int], cache_nbytes: int) -> tuple[Facts, bytes]:
    source = as_source(samples)
    return Facts(4, "samples", cache_nbytes, workers=1), pickled_contents(UserObjects(source, None, None))


def kept() -> list[bytes]:
    """Under what Ray keeps something of services."""
    from ray.experimental import internal_kv

    found: list[bytes] = internal_kv._internal_kv_list("facts", namespace=names.NAMESPACE)
    return found


@pytest.mark.usefixtures("ray")
def test_the_facts_and_contents_of_whoever_was_first_count_until_the_service_ends() -> None:
    """Although another process has kept its own, and asked for the service to be started, at the same time."""
    first = RayEngine("facts", address="none", spec=spec_of([1, 2, 3, 4], 1 << 20))
    find = names.supervisor_of
    with pytest.MonkeyPatch.context() as patch:

        def not_yet(name: str) -> Any:
            patch.setattr(names, "supervisor_of", find)
            raise ValueError("there is none yet")

        patch.setattr(names, "supervisor_of", not_yet)
        second = RayEngine("facts", address="none", spec=spec_of([5, 6, 7, 8], 1 << 21))
    assert first.facts == second.facts == Facts(4, "samples", 1 << 20, workers=1)
    (key,) = kept()
    assert contents_of(Service("facts", first.facts, key.decode())).source.read([0, 1]) == [1, 2]
    first.close()
    assert len(kept()) == 1
    second.close()
    wait_until(lambda: not kept())
