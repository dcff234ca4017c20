"""Importing late and seldom: names of packages on their first use, since torch takes seconds and a process may never
need it; and entry points of installed packages, found fast.

``importlib.metadata.entry_points`` reads and parses what every installed package says about itself, which takes longer
than loading a small checkpoint. Here the files are only searched for the name of the group; they are parsed if one of
them mentions it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastensor.files.garbage import without_collection

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_METADATA = ("dist-info", "egg-info")


def on_first_use(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562).

    Args:
        package: its name.
        homes: the modules of the package that are names of it, and for each the names that it has.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if f"{package}.{name}" in homes:
            return imported(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(imported(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find


def imported(module: str) -> ModuleType:
    """A module. While it is imported, the garbage collector pauses: nearly all that an import makes stays, and where
    torch has been imported, looking through everything takes longer than importing what saves a checkpoint."""
    with nullcontext() if module in sys.modules else without_collection():
        return import_module(module)


def entry_points_of(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group, as ``importlib.metadata.entry_points(group=group)`` has them.

    Raises:
        Exception: the metadata of a package is damaged.
    """
    # Packages may also be where no folder shows them.
    elsewhere = any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path)
    if not (elsewhere or _is_mentioned_in_one_of(tuple(dict.fromkeys(sys.path)), group.encode())):
        return ()
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


@cache
def _is_mentioned_in_one_of(folders: tuple[str, ...], group: bytes) -> bool:
    """False if no package in these folders has entry points of the group. Remembered as long as ``sys.path`` is the
    same."""
    return any(_is_mentioned_in(folder, group) for folder in folders)


def _is_mentioned_in(folder: str, group: bytes) -> bool:
    try:
        with os.scandir(folder or ".") as entries:
            packages = [entry.path for entry in entries if entry.name.lower().endswith(_METADATA)]
    except NotADirectoryError:
        return True  # an archive
    except OSError:
        return False  # Python finds no package there either
    return any(group in content_of(f"{package}/entry_points.txt") for package in packages)


def content_of(path: str) -> bytes:
    """The bytes of a small file; none if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""
