"""Replacing methods of Lightning's objects while a Trainer runs, where Lightning has no hook."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one object. Returns a function that restores the object's own method."""
    before = owner.__dict__.get(name)
    setattr(owner, name, method)

    def undo() -> None:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def call_after(owner: Any, name: str, then: Callable[[], object]) -> Callable[[], None]:
    """Call ``then`` whenever a method of one object has returned. Returns a function that ends that."""
    original = getattr(owner, name)

    def method(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        then()
        return result

    return replace_method(owner, name, method)


def call_once_after(owner: Any, name: str, then: Callable[[], object]) -> Callable[[], None]:
    """Call ``then`` when a method of one object has returned for the first time. Returns a function that gives that up.

    Then the object has its own method again, so that it can be pickled.
    """
    until_called = ExitStack()

    def once() -> None:
        until_called.close()
        then()

    until_called.callback(call_after(owner, name, once))
    return until_called.close
