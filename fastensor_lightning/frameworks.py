"""The framework's base classes and its log, from ``lightning`` and from ``pytorch_lightning``.

The two packages hold copies of the same classes, and each one's Trainer rejects the other's. A class that inherits
from every installed copy is accepted by both.
"""

from __future__ import annotations

import importlib
import logging
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
            "fastensor_lightning needs Lightning, which is not installed: install Fastensor with its extra lightning"
        )
    return tuple(getattr(importlib.import_module(module), name) for module in installed)


def say(trainer: Any, text: str) -> None:
    """Say something to the user, on rank 0 alone.

    It goes where Lightning's own messages go ("`Trainer.fit` stopped: ..."), whose level and handlers decide.
    """
    if trainer.is_global_zero:
        logging.getLogger(f"{package_of(trainer)}.utilities.rank_zero").info("fastensor: %s", text)


def of_rank(trainer: Any) -> str:
    """Words for the rank that a message is about, where there are several.

    >>> from types import SimpleNamespace
    >>> of_rank(SimpleNamespace(world_size=2, global_rank=0)), of_rank(SimpleNamespace(world_size=1, global_rank=0))
    (' on rank 0', '')
    """
    return f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""


def package_of(trainer: Any) -> str:
    """The package that a Trainer is from, or the Trainer that its class inherits from."""
    names = {base.__module__.partition(".")[0] for base in type(trainer).__mro__}
    return "pytorch_lightning" if "pytorch_lightning" in names else "lightning.pytorch"
