"""Calls of Fastensor from inside its own work: by a signal handler that interrupts it, or by a callback of a save.

Python runs a signal handler between two instructions of the main thread. What the handler interrupts may hold a lock
that the caller or another thread needs, be about to start a thread, or be staging a save that a writer waits for. So a
nested save shares nothing with it: the save runs at once in the thread of the caller, by the backend ``numpy``, which
needs no thread, without selectors, and waits neither for pending saves nor for disk space. Nested calls wait for no
pending work at all. What they have interrupted goes on afterwards.
"""

from __future__ import annotations

import sys
from types import FrameType

from fastensor.files import arguments

_CALLERS = (
    "fastensor.cli", "fastensor.testing", "fastensor.checkpoint.asynchronous.exits", "fastensor.files.afterwards",
    "fastensor.files.replacing",
    "fastensor.checkpoint.agreement", "fastensor.checkpoint.dcp.redirect", "fastensor.data", "fastensor.provision",
)  # fmt: skip
"""Modules that call the rest of Fastensor, or functions that they were given, as any program does."""
_BETWEEN = ("contextlib", "functools", arguments.__name__)
"""Modules by which Fastensor is called, by itself or by others."""


def is_nested() -> bool:
    """True if this call of Fastensor came from code that Fastensor called, or that interrupted it, in this thread.

    The stack shows it: a frame of Fastensor lies below the frame that has called Fastensor. So there is no mark to
    forget at any of the functions that hold something, and none is left behind when an interrupt leaves one.
    """
    frame: FrameType | None = sys._getframe()
    left = False
    while frame is not None:
        module = frame.f_globals.get("__name__")
        if module not in _BETWEEN:
            is_own = str(module).startswith("fastensor.") and not str(module).startswith(_CALLERS)
            if is_own and left:
                return True
            left = left or not is_own
        frame = frame.f_back
    return False
