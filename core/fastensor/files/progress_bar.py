"""A progress bar for terminals."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fastensor.files.words import human_size

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE_SECONDS = 1.0
"""Seconds without a progress bar: shorter work is done before anyone has read one."""
_REFRESH_SECONDS = 0.1
_TITLE_CHARACTERS = 30


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for the bytes done and the bytes in all. It shows a bar on a terminal when a second has gone by.

    Args:
        title: printable. Of a long one, the end is shown, so that there is room for the numbers.
    """
    began = time.perf_counter()
    short = title if len(title) <= _TITLE_CHARACTERS else f"…{title[1 - _TITLE_CHARACTERS :]}"
    bar: Progress | None = None
    refreshed = 0.0

    def show(done: int, total: int) -> None:
        nonlocal bar, refreshed
        now = time.perf_counter()
        if bar is None:
            if now - began < _PATIENCE_SECONDS or not sys.stderr.isatty():
                return
            bar = _new_bar()
            bar.add_task(short, total=total, rate="")
            bar.start()
        if now - refreshed >= _REFRESH_SECONDS or done == total:
            refreshed = now
            rate = f"{human_size(done / (now - began))}/s"
            bar.update(bar.task_ids[0], completed=done, total=total, rate=rate, refresh=True)

    try:
        yield show
    finally:
        if bar is not None:
            bar.stop()


def _new_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,  # it may be a pipe
    )
