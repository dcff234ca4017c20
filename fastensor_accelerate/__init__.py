"""Fastensor for Accelerate: ``save_state`` and ``load_state`` at the speed of the disk, durable and verified. Begin
with ``enable.py``, which replaces methods of Accelerate and transformers. ``config.py`` and ``launcher.py`` are the
flag, ``activation_offload.py`` offloads prepared models, and ``checkpoint_mapping.py`` runs models that are larger than
memory."""

from importlib.util import find_spec

if find_spec("accelerate") is None:
    raise ImportError(
        "fastensor_accelerate needs Accelerate, which is not installed: install Fastensor with its extra accelerate"
    )

import accelerate
from packaging.version import Version

if Version(accelerate.__version__) < Version("1.10"):  # as the extra `accelerate` says
    raise ImportError(
        "fastensor_accelerate needs Accelerate 1.10 or later (pip install -U accelerate), found "
        f"{accelerate.__version__}"
    )

from fastensor_accelerate.activation_offload import ActivationOffloadHook, attach, detach
from fastensor_accelerate.checkpoint_mapping import CheckpointMapping
from fastensor_accelerate.config import ConfigError, FastensorConfig
from fastensor_accelerate.enable import FastensorAccelerator, disable, enable, is_enabled
from fastensor_accelerate.loader import PreparedLoader, prepare_loader

__all__ = [
    "ActivationOffloadHook",
    "CheckpointMapping",
    "ConfigError",
    "FastensorAccelerator",
    "FastensorConfig",
    "PreparedLoader",
    "attach",
    "detach",
    "disable",
    "enable",
    "is_enabled",
    "prepare_loader",
]
