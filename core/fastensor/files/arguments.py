"""Checking arguments where they are given. Messages say what was found, what was expected, and what is near."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral, Real

from fastensor.files.words import nbytes_in

_NEAR = 0.5
"""How similar a known name must be to an unknown one to be suggested, from 0 to 1."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the one that it looks like, or all that there are.

    >>> nearest("bakend", ["backend", "durable"]), nearest("x", ["backend", "durable"])
    ("; did you mean 'backend'?", '; there are backend, durable')
    """
    known = list(known)
    return did_you_mean(name, known) or f"; there are {', '.join(known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the one that it looks like; empty if there is none."""
    near = difflib.get_close_matches(name, list(known), 1, _NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""


def check_flags(**flags: object) -> None:
    """
    Raises:
        TypeError: a value is neither True nor False.

    >>> check_flags(durable=True, verify="no")
    Traceback (most recent call last):
    TypeError: verify is True or False, found 'no'
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is True or False, found {value!r}")


def check_optional_flags(**flags: object) -> None:
    """
    Raises:
        TypeError: a value is neither True nor False nor None.
    """
    for name, value in flags.items():
        if not (value is None or isinstance(value, bool)):
            raise TypeError(f"{name} is True, False or None, found {value!r}")


def check_word(value: object, name: str, words: Iterable[str]) -> None:
    """
    Raises:
        ValueError: the value is none of the words.
    """
    words = tuple(words)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} is one of {words}, found {value!r}{nearest(str(value), words)}")


def check_function(value: object, name: str) -> None:
    """
    Raises:
        TypeError: the value cannot be called, and is not None.
    """
    if value is not None and not callable(value):
        raise TypeError(f"{name} is a function, found {value!r}")


def check_whole(value: object, name: str, *, at_least: int) -> None:
    """
    Raises:
        TypeError: the value is no whole number.
        ValueError: it is less than ``at_least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is a whole number, found {value!r}")
    if value < at_least:
        raise ValueError(f"{name} is at least {at_least}, found {value}")


def check_seconds(value: object, name: str, *, zero: bool = False, optional: bool = False) -> None:
    """
    Args:
        value: the argument.
        name: its name.
        zero: whether it may be 0.
        optional: whether it may be None.

    Raises:
        TypeError: the value is no number.
        ValueError: it is negative, or 0, or NaN.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a number of seconds{' or None' * optional}, found {value!r}")
    if not (float(value) >= 0 if zero else float(value) > 0):  # NaN is neither
        raise ValueError(f"{name} is a number of seconds{', 0 or more' if zero else ' above 0'}, found {value!r}")


def as_nbytes(size: int | str, name: str, *, at_least: int = 0) -> int:
    """The bytes that an argument says, as a number or as people write it.

    Args:
        size: the argument.
        name: its name, for messages.
        at_least: the least that makes sense.

    Raises:
        TypeError: it is neither a whole number nor a text.
        ValueError: the text is no size, or the size is less than ``at_least``.

    >>> as_nbytes("2GiB", "capacity"), as_nbytes(4096, "capacity")
    (2147483648, 4096)
    """
    if isinstance(size, bool) or not isinstance(size, Integral | str):
        raise TypeError(f"{name} is a whole number of bytes, or a text such as '2GiB', found {size!r}")
    try:
        nbytes = nbytes_in(size) if isinstance(size, str) else int(size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if nbytes < at_least:
        raise ValueError(f"{name} is at least {at_least}, found {size!r}")
    return nbytes
