"""Sizes and times in words, the same everywhere: in tables, in reasons and in the log."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_ALL_WORTH_A_LINE = 10
MIB = 1 << 20
"""Speeds whose unit stands in the head of a column are in MiB/s. Elsewhere a size in words comes before "/s"."""


def human_size(nbytes: float) -> str:
    """A size to three significant digits.

    >>> human_size(999), human_size(2048), human_size(1482910), human_size(1065353216), human_size(5 << 50)
    ('999 B', '2 KiB', '1.41 MiB', '1016 MiB', '5120 TiB')
    """
    unit = "B"
    for larger in _UNITS:
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    return f"{_three_digits(nbytes)} {unit}"


def nbytes_in(text: str) -> int:
    """The bytes in a size as people write it: ``KB`` and ``MB`` are powers of 1000, ``KiB`` and ``MiB`` of 1024, and so
    are ``K`` and ``M``, as in GNU's tools.

    Raises:
        ValueError: the text is none.

    >>> nbytes_in("5GB"), nbytes_in("1.5 MiB"), nbytes_in("64K"), nbytes_in("4096")
    (5000000000, 1572864, 65536, 4096)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?B)?|B?)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"expected a size such as 5GB or 2GiB, found {text!r}")
    number, unit, ending = found.groups()
    power = " KMGT".index(unit.upper()) if unit else 0
    return round(float(number) * (1000.0 if ending in ("B", "b") else 1024.0) ** power)


def unended(error: object) -> str:
    """Message of an error without its full stop, so that words of ours can follow.

    >>> unended(RuntimeError("size mismatch for weight.")), unended(RuntimeError("no device"))
    ('size mismatch for weight', 'no device')
    """
    return str(error).rstrip(".")


def human_count(count: int) -> str:
    """A number of things to three significant digits.

    >>> human_count(999), human_count(1536), human_count(124_439_808), human_count(7_241_732_096)
    ('999', '1.54 thousand', '124 million', '7.24 billion')
    """
    number, word = float(count), ""
    for larger in ("thousand", "million", "billion", "trillion"):
        if number < 1000:
            break
        number, word = number / 1000, f" {larger}"
    return f"{_three_digits(number)}{word}"


def counted(count: int, things: str, in_words: Callable[[int], str] = str, *, one: str = "") -> str:
    """A number of things, in the singular if it is one.

    Args:
        count: the number.
        things: what they are, in the plural.
        in_words: how the number is written.
        one: what it is, in the singular. By default the plural without its ``s``.

    >>> counted(0, "other values"), counted(1, "other values"), counted(1, "batches", one="batch")
    ('0 other values', '1 other value', '1 batch')
    """
    return f"{in_words(count)} {(one or things[:-1]) if count == 1 else things}"


def human_seconds(seconds: float) -> str:
    """A time to three significant digits.

    >>> human_seconds(0.0000123), human_seconds(0.0123), human_seconds(0.25), human_seconds(1234), human_seconds(0)
    ('12.3 µs', '12.3 ms', '250 ms', '1234 s', '0 s')
    """
    if seconds >= 1 or not seconds:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{_three_digits(seconds * 1e6)} µs"


def some_of(names: Sequence[str], most: int, show: Callable[[str], str] = str) -> str:
    """The first names of many, each as ``show`` gives it.

    >>> some_of(["a", "b"], 2), some_of(["a", "b", "c"], 2, repr)
    ('a, b', "'a', 'b' and 1 more")
    """
    return ", ".join(map(show, names[:most])) + (f" and {len(names) - most} more" if len(names) > most else "")


def human_rate(nbytes: float, seconds: float) -> str:
    """Bandwidth in words; empty if the time is too short to be measured.

    >>> human_rate(1 << 20, 0.5), human_rate(5, 0)
    ('2 MiB/s', '')
    """
    return f"{human_size(nbytes / seconds)}/s" if seconds > 0 else ""


def _three_digits(amount: float) -> str:
    """The number without trailing zeros, and never with an exponent."""
    text = f"{amount:.{2 if amount < 10 else 1 if amount < 100 else 0}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def is_worth_a_line(count: int) -> bool:
    """True if the log names this event: each of the first ten of its kind, then those whose number is a power of 2.

    Args:
        count: how many there were, with this one.

    >>> [count for count in range(1, 100) if is_worth_a_line(count)]
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 32, 64]
    """
    return count <= _ALL_WORTH_A_LINE or count.bit_count() == 1
