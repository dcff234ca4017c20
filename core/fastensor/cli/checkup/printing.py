"""Tables and the measurement that ``doctor`` and ``tune`` share."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastensor.cli.checkup.measurement import Chosen, Rounds, Speed, measure_rounds
from fastensor.cli.output import print_table
from fastensor.files.progress_bar import progress_bar
from fastensor.files.words import MIB, human_size


def print_speeds(speeds: Sequence[Speed]) -> None:
    """Print a table of speeds."""
    rows = [
        [
            one.backend,
            human_size(one.nbytes),
            _rate(one.write_bytes_per_second),
            _rate(one.cold_read_bytes_per_second),
            _rate(one.warm_read_bytes_per_second),
            one.reason,
        ]
        for one in speeds
    ]
    print_table(["MiB/s", "size", "durable write", "cold read", "warm read", ""], rows, right=(1, 2, 3, 4))


def _rate(bytes_per_second: float | None) -> str:
    """
    >>> _rate(123 * 2**20), _rate(1.23 * 2**20), _rate(None)
    ('123', '1.2', '–')
    """
    if bytes_per_second is None:
        return "–"
    rate = bytes_per_second / MIB
    return f"{rate:.{0 if rate >= 10 else 1}f}"


def print_choices(choices: Sequence[Chosen]) -> None:
    """Print the table of what ``backend="auto"`` would do next."""
    rows = [[one.context, human_size(one.nbytes), one.backend, one.reason] for one in choices]
    print_table(["auto", "size", "takes", "because"], rows, right=(1,))


def measured(path: str, nbytes: int, names: Sequence[str]) -> list[Rounds]:
    """Measure one size, with a progress bar."""
    with progress_bar(f"measuring {human_size(nbytes)}") as progress:
        return measure_rounds(path, nbytes, names, progress)


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
