"""Callbacks of objects in a forked child, where the parent's threads do not exist."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_acts: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def in_children(owner: T, act: Callable[[T], object]) -> None:
    """Call ``act(owner)`` in each forked child, as long as the owner lives. One act for each owner."""
    _acts[owner] = act


def lock_of(owner: Any) -> threading.RLock:
    """Reentrant lock for the attribute ``_lock`` of an object or a module, which gets a new one in forked children."""
    in_children(owner, lambda one: setattr(one, "_lock", threading.RLock()))
    return threading.RLock()


def _act_all() -> None:
    for owner, act in tuple(_acts.items()):
        act(owner)


os.register_at_fork(after_in_child=_act_all)
