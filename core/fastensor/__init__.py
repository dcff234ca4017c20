"""Fastensor: PyTorch checkpoints at the speed of the disk, atomic, durable and verified, in standard files."""

from fastensor.checkpoint.catalog import TensorInfo
from fastensor.checkpoint.lazy import LazyCheckpoint, open
from fastensor.checkpoint.load import load, load_with_report
from fastensor.checkpoint.report import Fallback, LoadReport, SaveReport
from fastensor.checkpoint.save import save
from fastensor.errors import (
    BackendUnavailableError,
    CheckpointReadError,
    CheckpointWriteError,
    CorruptCheckpointError,
    FastensorError,
    LayoutError,
    UnknownBackendError,
    UnknownFilesystemError,
    UnknownKeyError,
    UnsafeCheckpointError,
    UnsupportedContentError,
    UnverifiedCheckpointWarning,
)

__version__ = "0.1.0"

__all__ = [
    # saving and loading
    "save",
    "load",
    "load_with_report",
    "open",
    "LazyCheckpoint",
    "TensorInfo",
    "SaveReport",
    "LoadReport",
    "Fallback",
    # errors
    "FastensorError",
    "CheckpointWriteError",
    "CheckpointReadError",
    "CorruptCheckpointError",
    "UnsafeCheckpointError",
    "UnsupportedContentError",
    "UnknownKeyError",
    "UnknownFilesystemError",
    "UnknownBackendError",
    "BackendUnavailableError",
    "LayoutError",
    "UnverifiedCheckpointWarning",
    "__version__",
]
