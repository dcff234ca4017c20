"""Names of packages that are imported on their first use: torch takes seconds, and a process may never need it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562).

    Args:
        package: its name.
        homes: the modules of the package that are names of it, and for each the names that it has.
    """
    home_of = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        if f"{package}.{name}" in homes:
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
