"""Killing a process before one of its system calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from itertools import count
from typing import Any

from fastensor.testing.calls import Call


class Killer:
    """An interceptor that kills this process before a call.

    Args:
        fatal: the number of the call, from 1. No call has a lower number.
        names: the calls that are counted; None means all.
    """

    def __init__(self, fatal: int, names: Collection[str] | None = None) -> None:
        self._fatal = fatal
        self._names = names
        self._calls = count(1)

    def __call__(self, call: Call) -> Any:
        if (self._names is None or call.name in self._names) and next(self._calls) == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return call.perform()
