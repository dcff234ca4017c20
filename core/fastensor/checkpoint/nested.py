"""Calls of Fastensor from inside its own work: by a signal handler that interrupts it, or by a callback of a save.

Python runs a signal handler between two instructions of the main thread. What the handler interrupts may hold any lock,
be about to start a thread, or be about to replace a file. So a nested save shares nothing with it: the save runs at
once in the thread of the caller, by the backend ``numpy``, which needs no thread, with a buffer of its own, without
selectors, and waits neither for pending saves nor for disk space. Nested calls wait for no pending work at all.
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
_BETWEEN = ("contextlib", "functools")
"""Modules by which Fastensor calls itself."""


def is_nested() -> bool:
    """True if this call of Fastensor came from code that Fastensor called, or that interrupted it, in this thread.

    The stack shows it: a frame of Fastensor lies below the frame that has called Fastensor.
    """
    frame: FrameType | None = sys._getframe()
    left = False
    while frame is not None:
        module = _module_of(frame)
        if isinstance(module, str) and module.startswith("fastensor.") and not module.startswith(_CALLERS):
            if left:
                return True
        elif module not in _BETWEEN:
            left = True
        frame = frame.f_back
    return False


def _module_of(frame: FrameType) -> object:
    """The module whose code the frame runs; that of a check of keywords is the module of the function behind it."""
    module = frame.f_globals.get("__name__")
    if module == arguments.__name__:
        return getattr(frame.f_locals.get("function"), "__module__", module)
    return module
