"""New names for tensors, by patterns. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import count

from fastensor.errors import UnknownKeyError


def renamed(names: Iterable[str], rules: Mapping[str, str], where: str) -> dict[str, str]:
    """The new name of each name.

    Args:
        names: all names.
        rules: new names by old ones. The first rule that a name matches counts. A ``*`` in the old name stands for
            anything, as little as possible; the first ``*`` in the new name for what the first one stood for, and so
            on.
        where: the name of the checkpoint, for messages.

    Raises:
        UnknownKeyError: a rule matches nothing.
        ValueError: two names would be the same, or a new name has another number of ``*`` than the old one.

    >>> renamed(["model.w", "model.b", "head"], {"model.*": "encoder.*"}, "x")
    {'model.w': 'encoder.w', 'model.b': 'encoder.b', 'head': 'head'}
    """
    patterns = {old: _pattern(old, new) for old, new in rules.items()}
    used: set[str] = set()
    found: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        rule, match = next(
            ((old, match) for old, pattern in patterns.items() if (match := pattern.fullmatch(name))), (None, None)
        )
        new = name if rule is None or match is None else _filled(rules[rule], match)
        if new in taken:
            raise ValueError(f"{where}: {taken[new]!r} and {name!r} would both be called {new!r}; rename one of them")
        used |= {rule} if rule is not None else set()
        found[name] = new
        taken[new] = name
    if unused := [old for old in rules if old not in used]:
        raise UnknownKeyError(f"{where}: nothing in it can be renamed by {', '.join(map(repr, unused))}")
    return found


def _pattern(old: str, new: str) -> re.Pattern[str]:
    if not old or not new or old.count("*") != new.count("*"):
        raise ValueError(f"a new name has as many * as the old one, found {old!r} and {new!r}")
    return re.compile("(.*?)".join(map(re.escape, old.split("*"))), re.DOTALL)


def _filled(new: str, match: re.Match[str]) -> str:
    numbers = count(1)
    return re.sub(r"\*", lambda _: match[next(numbers)], new)
