"""A progress bar in the terminal of the process that has started a service, while the cache fills."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from fastensor.files.progress_bar import progress_bar
from fastensor.provision.engine import Engine, EngineLost

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
    if sys.stderr.isatty():
        arguments = weakref.ref(user), connect()
        threading.Thread(target=_run, args=arguments, name="fastensor-service-bar", daemon=True).start()


def _run(found: Callable[[], Left | None], observer: Engine) -> None:
    def is_left() -> bool:
        user = found()
        return user is None or user.is_left

    try:
        show(observer, is_left)
    except EngineLost:
        pass  # whoever needs the service starts it again
    finally:
        observer.close()


def show(observer: Engine, is_left: Callable[[], bool]) -> None:
    """Show the bar until the cache is filled.

    Args:
        is_left: whether to stop before.

    Raises:
        EngineLost: the service has ended.
    """
    with progress_bar("filling the cache") as tell:
        while not is_left():
            status = observer.health()
            if samples := status.get("cached_samples"):  # without a cache, or for no samples, nothing is said of it
                nbytes = status["cached_nbytes"]
                tell(nbytes, min(observer.facts.cache_nbytes, nbytes * observer.facts.samples // samples))
            if status["is_filled"]:
                return
            time.sleep(_SECONDS)
