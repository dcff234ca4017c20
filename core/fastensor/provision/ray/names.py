"""By what names the parts of a service are found in a cluster of Ray. Imports no torch."""

from __future__ import annotations

from typing import Any

import ray
from ray.experimental import internal_kv

NAMESPACE = "fastensor"
"""Namespace of named actors, and of their records in Ray's global control store."""


def supervisor_of(name: str) -> Any:
    """The supervisor of a service.

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


def once(method: Any) -> Any:
    """A method of an actor that Ray does not call again if the actor ends meanwhile, and so does not say on the
    terminal that it will."""
    return method.options(max_task_retries=0)


def keep(key: str, value: bytes) -> None:
    """Have Ray's global control store keep a value, in the memory of the head node, unless it keeps one under that key
    already."""
    internal_kv._internal_kv_put(key, value, overwrite=False, namespace=NAMESPACE)


def kept(key: str) -> bytes | None:
    """Value under a key; None if there is none."""
    found: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    return found


def drop(key: str) -> None:
    """Have nothing kept under a key."""
    internal_kv._internal_kv_del(key, namespace=NAMESPACE)
