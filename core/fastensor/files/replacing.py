"""Other packages' modules, classes and objects get other attributes for a while, where they have no hook."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_lock = threading.RLock()


def replace_attribute(owner: Any, name: str, value: object) -> Callable[[], None]:
    """Replace an attribute of a module, a class or one object.

    Returns:
        A function that undoes it: the owner's own attribute is back, or it has none of its own again, as an object that
        has the method of its class. Calling it again does nothing. Undo the last of several replacements first.
    """
    undo = ExitStack()
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)
    return undo.close


def wrap_method(owner: Any, name: str, method: Callable[..., Any]) -> Callable[[], None]:
    """:func:`replace_attribute` for a function or method. The new one gets the original, and then the arguments.

    An object whose method is wrapped can be pickled if ``method`` can.
    """
    original = getattr(owner, name)
    call = functools.partial(method, original)

    def bound(*arguments: Any, **options: Any) -> Any:
        return call(*arguments, **options)

    new = bound if isinstance(owner, type) else call  # the instances of a class are passed to functions alone
    return replace_attribute(owner, name, functools.update_wrapper(new, original))


@contextmanager
def replacing() -> Iterator[ExitStack]:
    """Block in which attributes that all threads see are replaced. Blocks of several threads follow one another, so
    that each of them puts back what was there before.

    Yields:
        What undoes at the end of the block: ``undo.callback(replace_attribute(module, "save", save))``.
    """
    with _lock, ExitStack() as undo:
        yield undo
