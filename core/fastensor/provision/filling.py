"""A progress bar in the terminal of the process that has started a service, while the cache fills."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable

from fastensor.files.progress_bar import progress_bar
from fastensor.provision.embedded.client import EmbeddedEngine
from fastensor.provision.engine import EngineLost, ServiceEngine

_SECONDS = 0.2
"""Between two looks at the cache."""


def show_in_thread(engine: EmbeddedEngine) -> None:
    """Show the bar, if the error output is a terminal, until the engine is gone, or has left the service."""
    if sys.stderr.isatty():
        arguments = weakref.ref(engine), EmbeddedEngine(engine.address)
        threading.Thread(target=_run, args=arguments, name="fastensor-service-bar", daemon=True).start()


def _run(found: Callable[[], EmbeddedEngine | None], observer: ServiceEngine) -> None:
    try:
        show(observer, lambda: (engine := found()) is None or engine.is_left)
    except EngineLost:
        pass  # whoever needs the service starts it again
    finally:
        observer.close()


def show(observer: ServiceEngine, is_left: Callable[[], bool]) -> None:
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
