"""The paper's form of its dictionaries (Figure 4), as CSV. Pure.

The row of a size has the size in MB, and a speed list, ``[[seconds, 'tool'], ..., 'best tool']``. The form has neither
counts nor contexts: a file holds one operation in one context, and does not say which.
"""

from __future__ import annotations

import ast
import csv
import io
from typing import Any, Literal, NamedTuple, TypeAlias

from fastensor.backends.registry import PAPER_NAMES
from fastensor.select.choice import in_order
from fastensor.select.context import Context, size_of
from fastensor.select.dictionary import Change, Dictionary, DictionaryError

Which: TypeAlias = Literal["WDic", "RDic", "WRDic"]
"""The paper's dictionaries: times of writes, times of reads, and the sums of both."""

_MB = 1 << 20
_MOST_SECONDS = 1e12
_NAMES = {name: paper for paper, name in PAPER_NAMES.items()}


def to_csv(
    dictionary: Dictionary, which: Which, device: str = "cpu", *, unsynced: bool = False, resident: bool = False
) -> str:
    """One of the paper's dictionaries, as CSV. Tools that the paper does not know have our names.

    Args:
        dictionary: the timings.
        which: the paper's dictionary.
        device: type of the device that bytes come from or go to.
        unsynced: whether the writes are those that need not be durable.
        resident: whether the reads are those from the page cache.
    """
    contexts = {
        "WDic": [Context("write", device, unsynced)],
        "RDic": [Context("read", device, resident)],
        "WRDic": [Context("write", device, unsynced), Context("read", device, resident)],
    }[which]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for key, _ in dictionary:
        if key.context == contexts[0]:
            entries = [dictionary.of(context, size_of(key.bucket)) for context in contexts]
            common = in_order(sorted(set.intersection(*(set(entry.timings) for entry in entries))))
            if seconds := {name: sum(entry.timings[name].seconds for entry in entries) for name in common}:
                writer.writerow([size_of(key.bucket) / _MB, _speed_list(seconds)])
    return text.getvalue()


def from_csv(text: str, context: Context) -> Dictionary:
    """The timings of one context, from a dictionary of the paper's.

    Args:
        text: a WDic or an RDic. A WRDic does not say the parts of its sums.
        context: the context of the timings.

    Raises:
        DictionaryError: the text has another form; the message says what was found, in which line and column.
    """
    dictionary = Dictionary()
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    try:
        for row in filter(None, rows):
            if len(row) != 2:
                raise DictionaryError(f"line {rows.line_num}: expected 2 columns, found {len(row)}")
            nbytes = _parse_size(row[0], f"line {rows.line_num}, column 1")
            for method in _parse_speed_list(row[1], f"line {rows.line_num}, column 2"):
                dictionary.apply(Change(context, nbytes, method.backend, method.seconds))
    except csv.Error as error:
        raise DictionaryError(f"line {rows.line_num}: {error}") from error
    return dictionary


class _Method(NamedTuple):
    seconds: float
    backend: str


def _speed_list(seconds: dict[str, float]) -> str:
    """
    >>> _speed_list({"gds": 0.0192, "numpy": 0.0213, "mine": 1.0})
    "[[0.0192, 'cpy'], [0.0213, 'npy'], [1.0, 'mine'], 'cpy']"
    """
    methods = [[float(f"{taken:.4g}"), _NAMES.get(name, name)] for name, taken in seconds.items()]
    best = min(seconds, key=seconds.__getitem__)
    return repr([*methods, _NAMES.get(best, best)])


def _parse_size(text: str, where: str) -> int:
    try:
        nbytes = float(text) * _MB
    except ValueError:
        nbytes = -1.0
    if not 0 <= nbytes <= 1 << 62:
        raise DictionaryError(f"{where}: expected a size in MB, found {text!r}")
    return round(nbytes)


def _parse_speed_list(text: str, where: str) -> list[_Method]:
    try:
        found = ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, list) or not found:
        raise DictionaryError(f"{where}: expected [[seconds, 'tool'], ..., 'best tool'], found {_short(text)}")
    best: str | None = found.pop() if isinstance(found[-1], str) else None  # missing until all tools are known
    methods = [_parse_method(one, f"{where}, item {number}") for number, one in enumerate(found, 1)]
    seconds = {method.backend: method.seconds for method in methods}
    if len(seconds) < len(methods):
        raise DictionaryError(f"{where}: a tool occurs twice")
    if best is not None:
        _check_best(PAPER_NAMES.get(best, best), seconds, where)
    return methods


def _parse_method(found: Any, where: str) -> _Method:
    match found:
        case [bool(), _]:
            pass
        case [int() | float() as seconds, str() as tool] if tool and 0 <= seconds <= _MOST_SECONDS:
            return _Method(float(seconds), PAPER_NAMES.get(tool, tool))
    raise DictionaryError(f"{where}: expected [seconds, 'tool'], found {_short(repr(found))}")


def _check_best(best: str, seconds: dict[str, float], where: str) -> None:
    if best not in seconds:
        raise DictionaryError(f"{where}: the best tool, {best}, is none of those before it")
    fastest = min(seconds, key=seconds.__getitem__)
    if seconds[fastest] < seconds[best]:
        raise DictionaryError(
            f"{where}: the best tool is said to be {best}, but {fastest} takes less time, which decides"
        )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
