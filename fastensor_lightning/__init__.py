"""Fastensor in Lightning: ``Trainer(plugins=[FastensorCheckpointIO()], callbacks=[SSDActivationOffload()])``."""

from fastensor_lightning.checkpoint_io import FastensorCheckpointIO
from fastensor_lightning.checkpoint_monitor import CheckpointMonitor
from fastensor_lightning.data_module import FastensorDataModule
from fastensor_lightning.data_wait_monitor import DataWaitMonitor
from fastensor_lightning.offload_callback import SSDActivationOffload

__all__ = [
    "CheckpointMonitor",
    "DataWaitMonitor",
    "FastensorCheckpointIO",
    "FastensorDataModule",
    "SSDActivationOffload",
]
