"""The version of Fastensor, and the lowest one of torch that it works with."""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

VERSION = "0.1.0"
LOWEST_TORCH = (2, 10)
"""As pyproject.toml says. Before it, a weak reference that brings back a storage could crash the interpreter."""


def check_torch() -> None:
    """Compare the version of torch, which is imported or is the one that would be. It is not imported here.

    Raises:
        ImportError: torch is too old. A torch that is not found is left to whoever imports it.
    """
    found = _torch_version()
    numbers = tuple(int(number) for number in found.split(".")[:2] if number.isdecimal())
    if len(numbers) == 2 and numbers < LOWEST_TORCH:
        lowest = ".".join(map(str, LOWEST_TORCH))
        raise ImportError(f"fastensor needs torch {lowest} or later (pip install -U torch), found {found}")


def _torch_version() -> str:
    """The version as torch says it; empty if there is none."""
    if version := getattr(sys.modules.get("torch"), "__version__", ""):
        return str(version)
    spec = PathFinder.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition("=")
        if name.strip() == "__version__":
            return value.strip(" '\"")
    return ""
