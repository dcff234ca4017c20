"""Objects of Lightning's are given other methods while a Trainer runs, where it has no hook.

The caller gets a function that takes them away again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace_method(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """Give one object another method; returns what takes it away again."""
    before = owner.__dict__.get(name)
    setattr(owner, name, method)

    def undo() -> None:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    return undo


def call_after(owner: Any, name: str, then: Callable[[], object]) -> Callable[[], None]:
    """Have ``then`` called whenever a method of one object has returned; returns what ends that."""
    original = getattr(owner, name)

    def method(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        then()
        return result

    return replace_method(owner, name, method)
