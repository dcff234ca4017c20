"""Callbacks of modules and objects in a forked child, where the parent's threads do not exist.

Those of modules come first: they put the parent's memory aside, and objects then drop what they have of it. A module
may be imported when objects exist already, so the order of the registrations says nothing.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_acts_of_modules: list[Callable[[], object]] = []
_acts: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def first_in_children(act: Callable[[], object]) -> None:
    """Call ``act()`` in each forked child, before the acts of objects. For the state of a module."""
    _acts_of_modules.append(act)


def in_children(owner: T, act: Callable[[T], object]) -> None:
    """Call ``act(owner)`` in each forked child, as long as the owner lives. One act for each owner."""
    _acts[owner] = act


def lock_of(owner: Any) -> threading.RLock:
    """Reentrant lock for the attribute ``_lock`` of an object or a module, which gets a new one in forked children."""
    in_children(owner, lambda one: setattr(one, "_lock", threading.RLock()))
    return threading.RLock()


def _act_all() -> None:
    """Call all, and raise the first error, which Python prints: without the others, locks would never be released."""
    of_objects: list[Callable[[], object]] = [partial(act, owner) for owner, act in tuple(_acts.items())]
    errors = []
    for act in _acts_of_modules + of_objects:
        try:
            act()
        except BaseException as error:  # noqa: BLE001  # raised at the end
            errors.append(error)
    if errors:
        raise errors[0]


os.register_at_fork(after_in_child=_act_all)
