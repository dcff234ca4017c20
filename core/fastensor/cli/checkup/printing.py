"""Arguments and tables that ``doctor`` and ``tune`` share."""

from __future__ import annotations

import argparse
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastensor.cli.checkup.measurement import LEAST_NBYTES, MOST_NBYTES, Chosen, Speed
from fastensor.cli.output import print_table
from fastensor.files.words import human_size

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_sizes(text: str) -> tuple[int, ...]:
    """The sizes in an argument of the command line.

    >>> parse_sizes("5000,64k,1.5MiB")
    (5000, 65536, 1572864)
    """
    found = [re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]?)(?:i?B)?", one.strip(), re.IGNORECASE) for one in text.split(",")]
    sizes = tuple(round(float(one[1]) * _UNITS[one[2].upper()]) for one in found if one is not None)
    if None in found or not all(LEAST_NBYTES <= size <= MOST_NBYTES for size in sizes):
        expected = f"sizes from {human_size(LEAST_NBYTES)} to {human_size(MOST_NBYTES)}, such as 64K,64M"
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
    return sizes


def print_speeds(speeds: Sequence[Speed]) -> None:
    """Print the table of speeds."""
    rows = [
        [
            speed.backend,
            human_size(speed.nbytes),
            _rate(speed.write_bytes_per_second),
            _rate(speed.cold_read_bytes_per_second),
            _rate(speed.warm_read_bytes_per_second),
            speed.reason,
        ]
        for speed in speeds
    ]
    print_table(["MB/s", "size", "durable write", "cold read", "warm read", ""], rows, right=(1, 2, 3, 4))


def _rate(bytes_per_second: float | None) -> str:
    """
    >>> _rate(123_456_789.0), _rate(1_234_567.0), _rate(None)
    ('123', '1.2', '–')
    """
    if bytes_per_second is None:
        return "–"
    return f"{bytes_per_second / 1e6:.{0 if bytes_per_second >= 1e7 else 1}f}"


def print_choices(choices: Sequence[Chosen]) -> None:
    """Print the table of what ``backend="auto"`` would do next."""
    rows = [[one.context, human_size(one.nbytes), one.backend, one.reason] for one in choices]
    print_table(["auto", "size", "takes", "because"], rows, right=(1,))


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program as an exception does, so that files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
