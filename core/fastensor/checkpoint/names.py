"""The names of what a checkpoint holds, and choosing by them. Pure.

The name of a value is the way to it: keys of dicts and positions in lists and tuples, joined by dots, such as
``state_dict.layer.weight`` or ``optimizer_states.0.lr``. Anything else is a leaf, and so is a list of nothing but plain
values (the permutation of a sampler, say).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from fastensor.errors import UnknownKeyError, UnsupportedContentError

MOST_NAMES = 1_000_000
"""A crafted file of a kilobyte can hold a list of lists with 2^100 values."""
_DEEPEST = 200
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_NOTHING: Any = object()
_SHOWN = 10


class KeyPatterns:
    """Names and glob patterns (``*``, ``?``, ``[...]``; a star also stands for dots), and which of them were met."""

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"keys is a list of names and patterns, found {patterns!r}")
        self.patterns = tuple(patterns)
        self._met: set[str] = set()

    def __call__(self, name: str) -> bool:
        """Whether a name is chosen."""
        met = {pattern for pattern in self.patterns if name == pattern or fnmatchcase(name, pattern)}
        self._met |= met
        return bool(met)

    def check_all_met(self, names: Iterable[str], where: str) -> None:
        """Raise if a pattern chose nothing.

        Raises:
            UnknownKeyError: and the message shows some names that there are.
        """
        missing = [pattern for pattern in self.patterns if pattern not in self._met]
        if missing:
            shown = list(names)
            more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
            raise UnknownKeyError(
                f"{where}: nothing in it is called or matches {', '.join(map(repr, missing))}; "
                f"there are {', '.join(shown[:_SHOWN]) or 'no names at all'}{more}"
            )


def walk(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their names, in order.

    Raises:
        UnsupportedContentError: there are more than a million.

    >>> dict(walk({"a": {"b": 1, "c": [{"e"}, {}]}, "order": [2, 0, 1]}))
    {'a.b': 1, 'a.c.0': {'e'}, 'a.c.1': {}, 'order': [2, 0, 1]}
    """
    count = 0
    stack: list[tuple[str, Any, tuple[int, ...]]] = [("", tree, ())]
    while stack:
        name, value, above = stack.pop()
        inner = _children(value, above)
        if inner is None:
            count += 1
            yield name, value
        else:
            count += len(inner)
            stack += reversed([(_join(name, key), child, (*above, id(value))) for key, child in inner])
        if count > MOST_NAMES:
            raise UnsupportedContentError(f"it holds more than {MOST_NAMES} values; load it whole")


def find(tree: Any, name: str) -> Any:
    """The branch or leaf of that name; None if there is none.

    >>> find({"a": {"b.c": {"d": 1}}}, "a.b.c")
    {'d': 1}
    """
    stack: list[tuple[str, Any, tuple[int, ...]]] = [("", tree, ())]
    while stack:
        at, value, above = stack.pop()
        if at == name:
            return value
        for key, child in _children(value, above) or ():
            inner = _join(at, key)
            if name == inner or name.startswith(f"{inner}."):
                stack.append((inner, child, (*above, id(value))))
    return None


def select(tree: Any, keys: KeyPatterns, where: str) -> Any:
    """:func:`choose`, if every pattern chooses something.

    Raises:
        UnknownKeyError: one does not.
        UnsupportedContentError: the tree has too many leaves.
    """
    names = [name for name, _ in walk(tree)]
    chosen = choose(tree, keys)
    keys.check_all_met(names, where)
    return chosen


def choose(tree: Any, chosen: Callable[[str], bool]) -> Any:
    """The same tree with only those leaves, and whole branches, whose names are chosen; None if there are none.

    Dicts and lists on the way are copies: of a list, only the chosen elements are left.

    >>> choose({"a": {"b": 1, "c": 2}, "d": [3, {"e": 4}]}, {"a.c", "d.1"}.__contains__)
    {'a': {'c': 2}, 'd': [{'e': 4}]}
    """
    kept = _choose(tree, "", chosen, ())
    return None if kept is _NOTHING else kept


def _choose(value: Any, name: str, chosen: Callable[[str], bool], above: tuple[int, ...]) -> Any:
    if name and chosen(name):
        return value
    inner = _children(value, above)
    if inner is None:
        return _NOTHING
    within = (*above, id(value))
    kept = [(key, _choose(child, _join(name, key), chosen, within)) for key, child in inner]
    kept = [(key, child) for key, child in kept if child is not _NOTHING]
    if not kept:
        return _NOTHING
    if isinstance(value, dict):  # with the attributes that state dicts have
        result = copy.copy(value)
        result.clear()
        result.update(kept)
        return result
    return type(value)(child for _, child in kept)


def _children(value: Any, above: tuple[int, ...]) -> list[tuple[Any, Any]] | None:
    """Keys and values of a branch; None for a leaf. ``above`` are the branches that it is in: they may be itself."""
    if len(above) > _DEEPEST or id(value) in above:
        return None
    if type(value) in (dict, OrderedDict) and value:
        return list(value.items())
    if type(value) in (list, tuple) and not all(isinstance(child, _PLAIN) for child in value):
        return list(enumerate(value))
    return None


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
