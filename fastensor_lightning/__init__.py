"""Fastensor in Lightning: ``Trainer(plugins=[FastensorCheckpointIO()], callbacks=[CheckpointMonitor()])``."""

from fastensor_lightning.checkpoint_io import FastensorCheckpointIO
from fastensor_lightning.checkpoint_monitor import CheckpointMonitor

__all__ = ["CheckpointMonitor", "FastensorCheckpointIO"]
