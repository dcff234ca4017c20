"""By what names the parts of a service are found in a cluster of Ray. Imports no torch."""

from __future__ import annotations

from typing import Any

import ray
from ray.experimental import internal_kv

NAMESPACE = "fastensor"
"""Of named actors, and of what Ray's global control store keeps for them."""


def manager_of(name: str) -> Any:
    """The manager of a service.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name, namespace=NAMESPACE)


def name_of_server(name: str, number: int) -> str:
    """The name of one of the servers of a service."""
    return f"{name}/{number}"


def server_of(name: str, number: int) -> Any:
    """One of the servers of a service.

    Raises:
        ValueError: there is none.
    """
    return ray.get_actor(name_of_server(name, number), namespace=NAMESPACE)


def keep(name: str, value: bytes) -> None:
    """Have Ray's global control store keep what a service serves, in the memory of the head node, unless it keeps that
    already."""
    internal_kv._internal_kv_put(name, value, overwrite=False, namespace=NAMESPACE)


def kept(name: str) -> bytes | None:
    """What is kept of a service; None if nothing is."""
    found: bytes | None = internal_kv._internal_kv_get(name, namespace=NAMESPACE)
    return found


def drop(name: str) -> None:
    """Have nothing kept of a service."""
    internal_kv._internal_kv_del(name, namespace=NAMESPACE)
