"""Fastensor in Lightning: ``Trainer(plugins=[FastensorCheckpointIO()], callbacks=[SSDActivationOffload()])``. Begin
with ``checkpoint_io.py``, the plugin; ``sharded.py`` is its part for FSDP, ``offload_callback.py`` the callback,
``data_module.py`` gives a Trainer its data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastensor.offload.config import OffloadConfig
    from fastensor_lightning.checkpoint_io import FastensorCheckpointIO
    from fastensor_lightning.checkpoint_monitor import CheckpointMonitor
    from fastensor_lightning.data_module import FastensorDataModule
    from fastensor_lightning.data_wait_monitor import DataWaitMonitor
    from fastensor_lightning.left_out import add_left_out
    from fastensor_lightning.offload_callback import SSDActivationOffload
else:
    # Names are imported on their first use (PEP 562): Lightning imports this package in every program for its entry
    # point, where it is to cost nothing.
    _HOMES = {
        "CheckpointMonitor": "fastensor_lightning.checkpoint_monitor",
        "DataWaitMonitor": "fastensor_lightning.data_wait_monitor",
        "FastensorCheckpointIO": "fastensor_lightning.checkpoint_io",
        "FastensorDataModule": "fastensor_lightning.data_module",
        "OffloadConfig": "fastensor.offload.config",
        "SSDActivationOffload": "fastensor_lightning.offload_callback",
        "add_left_out": "fastensor_lightning.left_out",
    }

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "CheckpointMonitor",
    "DataWaitMonitor",
    "FastensorCheckpointIO",
    "FastensorDataModule",
    "OffloadConfig",
    "SSDActivationOffload",
    "add_left_out",
]
