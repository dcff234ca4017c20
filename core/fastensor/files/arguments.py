"""Checking arguments where they are given. Messages say what was found, what was expected, and what is near."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from fastensor.files.words import nbytes_in

_C = TypeVar("_C", bound=Callable[..., Any])

_NEAR = 0.5
"""Least similarity of a suggested name to the unknown one, from 0 to 1."""


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
    if type(size) is int and size >= at_least:
        return size  # at once: transfers ask
    if isinstance(size, bool) or not isinstance(size, Integral | str):
        raise TypeError(f"{name} is a whole number of bytes, or a text such as '2GiB', found {size!r}")
    try:
        nbytes = nbytes_in(size) if isinstance(size, str) else int(size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if nbytes < at_least:
        raise ValueError(f"{name} is at least {at_least}, found {size!r}")
    return nbytes


def checks_keywords(target: _C) -> _C:
    """A function, or a class, that names the nearest keyword where a caller gives an unknown one.

    Of a class, these are the constructor and the public methods that override none of another class: a framework calls
    those. Functions with ``**keywords`` are left alone: :func:`checks_keywords_with` is for them. A class is changed
    and returned. Its ``_gone`` says by name what to use in place of a keyword that is no more. Signatures, names and
    docstrings stay.

    >>> @checks_keywords
    ... def save(obj, path, *, durable=True): ...
    >>> save(0, "x", durabel=False)
    Traceback (most recent call last):
    TypeError: save() got an unexpected keyword argument 'durabel'; did you mean 'durable'?
    """
    if not isinstance(target, type):
        return _checked(target, ())  # type: ignore[no-any-return]  # of the same type
    for name, member in list(vars(target).items()):
        kind = type(member) if isinstance(member, classmethod | staticmethod) else None
        function = member.__func__ if kind else member
        if inspect.isfunction(function) and _is_called_by_users(target, name):
            checked = _checked(function, (), vars(target).get("_gone", {}))
            if checked is not function:
                setattr(target, name, kind(checked) if kind else checked)
    return target


def checks_keywords_with(keywords: Collection[str]) -> Callable[[_C], _C]:
    """:func:`checks_keywords` for a function with ``**keywords``, which are these.

    >>> @checks_keywords_with(["durable"])
    ... def save(obj, **options): ...
    >>> save(0, durabel=False)
    Traceback (most recent call last):
    TypeError: save() got an unexpected keyword argument 'durabel'; did you mean 'durable'?
    """
    return lambda function: _checked(function, keywords)


def keywords_of(function: Callable[..., Any]) -> list[str]:
    """The names that callers may give as keywords; those of ``**keywords`` are not among them.

    >>> keywords_of(lambda one, /, two, *three, four, **five: 0)
    ['two', 'four']
    """
    code = inspect.unwrap(function).__code__
    names = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names if name not in ("self", "cls", "_cls")]


def _is_called_by_users(kind: type, name: str) -> bool:
    if name in ("__init__", "__new__"):
        return True
    return not name.startswith("_") and not any(name in vars(base) for base in kind.__mro__[1:])


def _checked(function: Any, more: Collection[str], gone: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The function behind a check of its keywords, which costs 0.1 to 0.2 µs; itself, if there is nothing to check.

    From Python 3.13 on the interpreter names the nearest keyword as well, but nothing where none is near.
    """
    own = keywords_of(function)
    takes_others = inspect.unwrap(function).__code__.co_flags & inspect.CO_VARKEYWORDS
    if not own or (takes_others and not more):
        return function
    known = [*own, *more]
    is_known = frozenset(known).issuperset

    @functools.wraps(function)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        if not is_known(keywords):
            _refuse(function, keywords, known, gone)
        return function(*arguments, **keywords)

    return checked


def _refuse(function: Any, found: Iterable[str], known: Sequence[str], gone: Mapping[str, str]) -> NoReturn:
    name = function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__").removesuffix(".__new__")
    wrong = next(keyword for keyword in found if keyword not in known)
    hint = f": {gone[wrong]}" if wrong in gone else nearest(wrong, [one for one in known if not one.startswith("_")])
    raise TypeError(f"{name}() got an unexpected keyword argument {wrong!r}{hint}")
