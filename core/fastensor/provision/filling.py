"""A progress bar in the terminal of the process that has started a service, while the cache fills."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from fastensor.files.words import human_size
from fastensor.provision.engine import Engine, EngineLost

if TYPE_CHECKING:
    from rich.console import Console

_SECONDS = 0.2
"""Between two looks at the cache."""


class Left(Protocol):
    """Whoever uses a service, and may stop to do so."""

    @property
    def is_left(self) -> bool:
        """True once it has left."""


def show_in_thread(user: Left, connect: Callable[[], Engine]) -> None:
    """Show the bar, if the error output is a terminal.

    Args:
        user: the bar ends when it has left the service, or is gone.
        connect: makes a client of the service for the thread, which closes it.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return
    arguments = weakref.ref(user), connect(), console
    threading.Thread(target=_run, args=arguments, name="fastensor-service-bar", daemon=True).start()


def _run(found: Callable[[], Left | None], observer: Engine, console: Console) -> None:
    def is_left() -> bool:
        user = found()
        return user is None or user.is_left

    try:
        show(observer, console, is_left)
    except EngineLost:
        pass  # whoever needs the service starts it again
    finally:
        observer.close()


def show(observer: Engine, console: Console, is_left: Callable[[], bool]) -> None:
    """Show the bar from the first sample in the cache on, until the cache is filled.

    Args:
        is_left: whether to stop before.

    Raises:
        EngineLost: the service has ended.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}")
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        bar = progress.add_task("filling the cache", visible=False, words="")
        began, first_nbytes = time.monotonic(), None
        while not is_left():
            status = observer.health()
            if status.get("cached_samples"):  # without a cache, or for no samples, nothing is said of it
                if first_nbytes is None:
                    began, first_nbytes = time.monotonic(), status["cached_nbytes"]
                rate = (status["cached_nbytes"] - first_nbytes) / max(time.monotonic() - began, 1e-3)
                total = expected_samples(status, observer.facts.samples, observer.facts.cache_nbytes)
                text = words(status, total, rate)
                progress.update(bar, completed=status["cached_samples"], total=total, visible=True, words=text)
                progress.refresh()
            if status["is_filled"]:
                return
            time.sleep(_SECONDS)


def expected_samples(status: dict[str, Any], samples: int, cache_nbytes: int) -> int:
    """Number of samples that the cache will hold, if the others are as large as those that it has.

    >>> expected_samples({"cached_samples": 10, "cached_nbytes": 5000}, 1000, 100_000)
    200
    """
    mean_nbytes = status["cached_nbytes"] / status["cached_samples"]
    return min(samples, int(cache_nbytes / mean_nbytes))


def words(status: dict[str, Any], total: int, bytes_per_second: float) -> str:
    """Words beside the bar.

    >>> words({"cached_samples": 10, "cached_nbytes": 5 << 20}, 200, 2 << 20)
    '10 of 200 samples, 5 MiB, 2 MiB/s'
    """
    size = human_size(status["cached_nbytes"])
    return f"{status['cached_samples']} of {total} samples, {size}, {human_size(bytes_per_second)}/s"
