"""Telling whether two locations are one file, or one is a part of the other."""

from __future__ import annotations

import os
from pathlib import Path

from fastensor.checkpoint.location import Location, RemotePath, locate


def is_same_file(source: Location, target: Location) -> bool:
    """True if source and target are one file, which may have several names."""
    one, other = _identity_of(source), _identity_of(target)
    return one is not None and one == other


def is_inside(target: Location, source: Location) -> bool:
    """True if the target is there, in the directory of the source: one of its parts."""
    inner, outer = locate(target), locate(source)
    if not (isinstance(inner, str) and isinstance(outer, str) and os.path.isdir(outer) and os.path.exists(inner)):
        return False
    return Path(outer).resolve() in Path(inner).resolve().parents


def _identity_of(location: Location) -> object:
    """A value that is equal for two locations of one file; None if there is no file yet."""
    found = locate(location)
    if isinstance(found, RemotePath):
        return found.filesystem, found.path
    try:
        status = os.stat(found if isinstance(found, str) else found.fileno())
    except (OSError, AttributeError):  # it is not there; or an open file that is not the operating system's
        return None if isinstance(found, str) else id(found)
    return status.st_dev, status.st_ino
