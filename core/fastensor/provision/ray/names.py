"""By what names the parts of a service are found in a cluster of Ray. Imports no torch."""

from __future__ import annotations

from typing import Any

import ray
from ray.experimental import internal_kv

NAMESPACE = "fastensor"
"""Namespace of named actors, and of what Ray's global control store keeps for them."""
_MOST_CALLS = 1 << 14
"""At the same time, by an actor. Those that wait for other servers must leave room for these servers' calls."""


def actor(kind: type, name: str, **options: Any) -> Any:
    """A class, to be called with the arguments of an actor of this name. It is started unless it runs, and Ray starts
    it again whenever it ends."""
    return ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,  # what else the user does in the cluster is not held up
        max_restarts=-1,
        max_concurrency=_MOST_CALLS,
        **options,
    )


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
    """Have Ray's global control store keep a value, in the memory of the head node."""
    internal_kv._internal_kv_put(key, value, namespace=NAMESPACE)


def kept(key: str) -> bytes | None:
    """Value under a key; None if there is none."""
    found: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    return found


def drop(key: str) -> None:
    """Have nothing kept under a key."""
    internal_kv._internal_kv_del(key, namespace=NAMESPACE)
