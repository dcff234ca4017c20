"""``repr`` of our objects: short and exact, without the secrets that a URL may carry."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

_USER = r"://[^/\s'\"]*@"
_QUERY = r"(://[^?#\s'\"]*)[?#][^\s'\"]+"
_WHOLE_ITEMS, _WHOLE_LETTERS = 8, 120
"""A collection is shown whole if it has no more."""


def shown(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    """A ``__repr__``, made of what a function says after the name of the class. The function has to go by attributes
    only: it reads no file, and waits for nothing.

    An object whose constructor has not come so far, which debuggers and tracebacks show, says that.

    >>> class Store:
    ...     @shown
    ...     def __repr__(self) -> str:
    ...         return f" of {self.path!r}"
    >>> store = Store()
    >>> store
    <Store, not made yet>
    >>> store.path = "ftp://me:secret@host/model.ckpt"
    >>> store
    <Store of 'ftp://***@host/model.ckpt'>
    """

    @functools.wraps(describe)
    def __repr__(self: Any) -> str:
        try:
            what = describe(self)
        except AttributeError as error:
            what = f", {error}" if getattr(self, "__dict__", None) else ", not made yet"  # slots have no __dict__
        return without_secrets(f"<{type(self).__name__}{what}>")

    return __repr__


def record_repr(record: Any) -> str:
    """The ``__repr__`` of a dataclass: fields that are not as by default, and of large collections how many they hold.

    >>> @dataclasses.dataclass
    ... class Report:
    ...     path: str
    ...     seconds: float
    ...     names: tuple[str, ...] = ()
    ...     __repr__ = record_repr
    >>> Report("x.ckpt", 0.1), Report("x.ckpt", 0.1, ("weight",) * 100)
    (Report(path='x.ckpt', seconds=0.1), Report(path='x.ckpt', seconds=0.1, names=<100 of them>))
    """
    return without_secrets(f"{type(record).__name__}({', '.join(given(record))})")


def given(record: Any) -> list[str]:
    """The fields of a dataclass that are not as by default, as they are written in its constructor."""
    return [
        f"{one.name}={_in_short(value)}"
        for one in dataclasses.fields(record)
        if one.repr and not _is_default(one, value := getattr(record, one.name))
    ]


def without_secrets(text: str) -> str:
    """A text without the users and passwords of URLs in it, and without what stands behind their paths, which may be
    signatures.

    >>> without_secrets("s3://bucket/x.pt, ftp://me:1234@host/x.pt, https://host/x.pt?signature=1234")
    's3://bucket/x.pt, ftp://***@host/x.pt, https://host/x.pt?***'
    """
    if "://" not in text:
        return text
    return re.sub(_QUERY, r"\1?***", re.sub(_USER, "://***@", text))


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and type(value) is type(field.default) and value == field.default


def _in_short(value: object) -> str:
    if not isinstance(value, Mapping | tuple | list) or hasattr(value, "_fields"):  # a NamedTuple is a record
        return repr(value)
    text = repr(value) if len(value) <= _WHOLE_ITEMS else ""
    return text if text and len(text) <= _WHOLE_LETTERS else f"<{len(value)} of them>"
