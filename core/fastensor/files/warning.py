"""Warnings that name the line of the program that has called Fastensor, however many calls of ours lie between."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_OURS = ("fastensor", "fastensor_lightning", "fastensor_accelerate")


def warn_caller(message: str, kind: type[Warning] = UserWarning) -> None:
    """Warn; the warning's place is the innermost line that is not in our packages.

    Args:
        message: the warning.
        kind: its category.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level - 1 if frame is None else level)
