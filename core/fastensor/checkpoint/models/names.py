"""The names of the values in a checkpoint, and choosing values by name. Pure.

The name of a value is the way to it: keys of dicts and positions in lists and tuples, joined by dots, such as
``state_dict.layer.weight`` or ``optimizer_states.0.lr``. Dicts, lists and tuples are branches, all other values leaves.
A list of nothing but plain values (the permutation of a sampler, say) is a leaf, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from fastensor.errors import UnknownKeyError, UnsupportedContentError
from fastensor.files.words import some_of

MOST_NAMES = 1_000_000
"""A crafted file of a kilobyte can hold a list of lists with 2^100 values."""
MOST_CHARACTERS = 100_000_000
"""A crafted file of a megabyte can hold one long name that thousands of names begin with."""
_DEEPEST = 200
_BRANCHES = frozenset((dict, OrderedDict, list, tuple))
_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_NOTHING: Any = object()
_SHOWN = 10
_SHOWN_CHARACTERS = 100
"""Characters of a name that a message shows."""
_MOST_BITS = 256


class Node(NamedTuple):
    """A value and its name."""

    name: str
    value: Any
    is_leaf: bool


def nodes(tree: Any, where: str = "the object") -> Iterator[Node]:
    """Yield the branches and leaves of a tree, each branch before what is in it. A tree that is a branch is left out.

    Raises:
        UnsupportedContentError: there are more than a million, or their names are too long.
    """
    count = characters = 0
    plain: set[int] = set()
    inner = _children(tree, (), plain)
    if inner is None:
        yield Node("", tree, True)
    stack: list[tuple[str, Iterator[tuple[Any, Any]], tuple[int, ...]]] = [("", iter(inner or ()), (id(tree),))]
    while stack:
        name, items, above = stack[-1]
        for key, child in items:
            joined = _join(name, key)
            count += 1
            characters += len(joined)
            if count > MOST_NAMES or characters > MOST_CHARACTERS:
                raise UnsupportedContentError(
                    f"{where} holds more than {MOST_NAMES} values, or names of more than {MOST_CHARACTERS} characters; "
                    f"load it whole"
                )
            inner = _children(child, above, plain)
            yield Node(joined, child, inner is None)
            if inner is not None:
                stack.append((joined, iter(inner), (*above, id(child))))
                break
        else:
            stack.pop()


def walk(tree: Any, where: str = "the object") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their names, in order.

    Raises:
        UnsupportedContentError: as :func:`nodes`.

    >>> dict(walk({"a": {"b": 1, "c": [{"e"}, {}]}, "order": [2, 0, 1]}))
    {'a.b': 1, 'a.c.0': {'e'}, 'a.c.1': {}, 'order': [2, 0, 1]}
    """
    return ((node.name, node.value) for node in nodes(tree, where) if node.is_leaf)


def resolve(keys: Iterable[str], names: Collection[str], where: str) -> set[str]:
    """The names that ``keys`` chooses: those that it gives, and those that match one of its patterns.

    Args:
        keys: names, or glob patterns with ``*``, ``?`` and ``[...]``; a star also stands for dots. A key that is one of
            the names is not used as a pattern.
        names: all names, those of branches included.
        where: the file's name, for messages.

    Raises:
        TypeError, ValueError: ``keys`` is not a list of names, or it is empty.
        UnknownKeyError: a key chooses nothing.

    >>> sorted(resolve(["a[0]", "b.*"], {"a[0]", "a0", "b", "b.c"}, "x"))
    ['a[0]', 'b.c']
    """
    wanted = (keys,) if isinstance(keys, str) else tuple(keys)
    if isinstance(keys, str) or not all(isinstance(key, str) for key in wanted):
        raise TypeError(f"keys is a list of names and patterns, found {keys!r}")
    if not wanted:
        raise ValueError("keys is empty, so nothing would be loaded; leave it out to load everything")
    known = set(names)
    meant = {key: {key} if key in known else {name for name in known if fnmatchcase(name, key)} for key in wanted}
    missing = [key for key, found in meant.items() if not found]
    if missing:
        shown = some_of(list(names), _SHOWN, _shortened) or "no names at all"
        raise UnknownKeyError(
            f"{where}: nothing in it is called or matches {', '.join(map(repr, missing))}; there are {shown}"
        )
    return set().union(*meant.values())


def _shortened(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARACTERS else f"{name[: _SHOWN_CHARACTERS - 3]}..."


def choose(tree: Any, chosen: Callable[[str], bool]) -> Any:
    """The tree with only the chosen leaves, and whole branches, in it; None if none is chosen.

    The dicts and lists that lead to them are copies. A copy of a list has only the elements that lead to a chosen one.

    >>> choose({"a": {"b": 1, "c": 2}, "d": [3, {"e": 4}]}, {"a.c", "d.1"}.__contains__)
    {'a': {'c': 2}, 'd': [{'e': 4}]}
    """
    kept = _choose(tree, "", chosen, (), set())
    return None if kept is _NOTHING else kept


def _choose(value: Any, name: str, chosen: Callable[[str], bool], above: tuple[int, ...], plain: set[int]) -> Any:
    if name and chosen(name):
        return value
    inner = _children(value, above, plain)
    if inner is None:
        return _NOTHING
    within = (*above, id(value))
    kept = [(key, _choose(child, _join(name, key), chosen, within, plain)) for key, child in inner]
    kept = [(key, child) for key, child in kept if child is not _NOTHING]
    if not kept:
        return _NOTHING
    if isinstance(value, dict):
        result = type(value)(kept)
        if isinstance(value, OrderedDict):  # state dicts have attributes
            vars(result).update(vars(value))
        return result
    return [child for _, child in kept] if isinstance(value, list) else tuple(child for _, child in kept)


def _children(value: Any, above: tuple[int, ...], plain: set[int]) -> list[tuple[Any, Any]] | None:
    """Keys and values of a branch; None for a leaf.

    Args:
        value: the branch or leaf.
        above: identities of the branches that it is in. A branch may be in itself.
        plain: identities of the lists that were found to be leaves. A file may hold a long one once, and refer to it
            often.
    """
    if type(value) not in _BRANCHES or len(above) > _DEEPEST or id(value) in above:
        return None
    if type(value) is dict and value:
        return list(value.items())
    if type(value) is OrderedDict and value:
        return list(OrderedDict.items(value))  # an attribute of it may be called items
    if isinstance(value, list | tuple) and id(value) not in plain:
        if not all(isinstance(child, _PLAIN) for child in value):
            return list(enumerate(value))
        plain.add(id(value))
    return None


def _join(name: str, key: Any) -> str:
    text = key if isinstance(key, str) else _text(key)
    return f"{name}.{text}" if name else text


def _text(key: Any) -> str:
    """A key in words. Only the elements of short, plain tuples are shown: a key may be nested a million times."""
    if isinstance(key, int) and key.bit_length() > _MOST_BITS:
        return f"<int of {key.bit_length()} bits>"
    if isinstance(key, tuple) and not (len(key) <= _SHOWN and all(isinstance(part, _PLAIN) for part in key)):
        return f"<tuple of {len(key)}>"
    if isinstance(key, frozenset):
        return f"<frozenset of {len(key)}>"
    return str(tuple(key) if isinstance(key, tuple) else key)
