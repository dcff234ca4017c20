"""The framework's base classes, from ``lightning`` and from ``pytorch_lightning``.

The two packages hold copies of the same classes, and each one's Trainer rejects the other's. A class that inherits
from every installed copy is accepted by both.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any


def load_classes(name: str, *modules: str) -> tuple[type[Any], ...]:
    """The class of that name from each of the modules whose package is installed, at least one.

    Raises:
        ImportError: none is installed.
    """
    installed = [module for module in modules if find_spec(module.partition(".")[0]) is not None]
    if not installed:
        raise ImportError(
            "fastensor_lightning needs Lightning, which is not installed: pip install 'fastensor[lightning]'"
        )
    return tuple(getattr(importlib.import_module(module), name) for module in installed)
