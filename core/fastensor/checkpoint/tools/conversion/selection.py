"""Choosing and naming the tensors of a source that are converted. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from fastensor.checkpoint.models.names import nodes
from fastensor.checkpoint.tools.catalog import Catalog, Located, branches_of, check_root, dict_in, roots_in_words
from fastensor.errors import UnknownKeyError, UnsupportedContentError
from fastensor.stitch.pickle_records import PickledTensor


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a file that is converted."""

    tensors: Mapping[str, Located]
    """By the names that they have in the dict."""
    left_out: tuple[str, ...]
    """Names of everything else in the file."""


def select(catalog: Catalog, root: str | None, *, drop: bool, where: str) -> Selection:
    """Choose the tensors of a file.

    Args:
        catalog: the contents of the file.
        root: the name of the dict of tensors; None if the whole file is one.
        drop: leave out what is no dense tensor in that dict.
        where: the file's name, for messages.

    Raises:
        UnsupportedContentError: there is no such dict; or without ``drop``, it holds something else.
    """
    check_root(catalog, root, where)
    tree = catalog.structure
    branch = dict_in(tree, root, where)
    found: dict[str, Located] = {}
    dropped = []
    for key, value in branch.items():
        name = f"{root}.{key}" if root else key
        if isinstance(key, str) and id(value) in catalog.by_identity:
            found[key] = catalog.by_identity[id(value)]
        elif drop:
            dropped.append(str(name))
        else:
            advice = roots_in_words(branches_of(tree, where))
            raise UnsupportedContentError(
                f"{where}: only a dict from names to dense tensors can be converted, but {name!r} in it is "
                f"{_kind(key, value)}; {advice}"
            )
    if dropped and not found:
        advice = roots_in_words(branches_of(tree, where))
        what = "its outermost dict" if root is None else f"{root!r} in it"
        raise UnsupportedContentError(f"{where}: {what} holds no dense tensors; {advice}")
    aside = () if root is None else beside((node.name for node in nodes(tree, where)), root)
    return Selection(found, (*aside, *dropped))


def _kind(key: Any, value: Any) -> str:
    if not isinstance(key, str):
        return f"called by a key of type {type(key).__name__}"
    return "a tensor that is more than its bytes" if isinstance(value, PickledTensor) else "no tensor"


def beside(names: Iterable[str], root: str) -> tuple[str, ...]:
    """The names that are not in a branch, nor lead to it. What is in one of them is not listed again.

    Args:
        names: of branches and leaves, each branch before what is in it.
        root: the name of the branch.

    >>> beside(["epoch", "model", "model.w", "optimizer", "optimizer.state"], "model")
    ('epoch', 'optimizer')
    """
    found: list[str] = []
    for name in names:
        leads = name == root or root.startswith(f"{name}.")
        known = bool(found) and name.startswith(f"{found[-1]}.")
        if not (leads or known or name.startswith(f"{root}.")):
            found.append(name)
    return tuple(found)


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
