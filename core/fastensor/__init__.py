"""Fastensor: PyTorch checkpoints at the speed of the disk, atomic, durable and verified, in standard files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastensor.version import VERSION, check_torch

check_torch()

if TYPE_CHECKING:
    from fastensor.backends.registry import Fallback
    from fastensor.checkpoint.asynchronous.handle import SaveHandle
    from fastensor.checkpoint.asynchronous.statistics import WriterStatistics
    from fastensor.checkpoint.asynchronous.writer import AsyncWriter
    from fastensor.checkpoint.models.huggingface import load_sharded, save_sharded
    from fastensor.checkpoint.models.modules import load_model, save_model
    from fastensor.checkpoint.reading.lazy import LazyCheckpoint, open
    from fastensor.checkpoint.reading.load import load, load_with_report
    from fastensor.checkpoint.report import LoadReport
    from fastensor.checkpoint.tools.catalog import Inspection, TensorInfo
    from fastensor.checkpoint.tools.comparing import DamagedCheckpointError, VerifyReport
    from fastensor.checkpoint.tools.convert import convert
    from fastensor.checkpoint.tools.diff import Difference, TensorDifference, diff
    from fastensor.checkpoint.tools.inspect import inspect
    from fastensor.checkpoint.tools.verify import verify
    from fastensor.checkpoint.writing.report import SaveReport
    from fastensor.checkpoint.writing.save import save
    from fastensor.errors import (
        BackendUnavailableError,
        CheckpointReadError,
        CheckpointWriteError,
        CorruptCheckpointError,
        EmptyCheckpointError,
        FastensorError,
        LayoutError,
        NotACheckpointError,
        PlacementError,
        ReplicaMismatchError,
        SaveDroppedError,
        StateChangedError,
        StateMismatchError,
        UnknownBackendError,
        UnknownFilesystemError,
        UnknownKeyError,
        UnsafeCheckpointError,
        UnsupportedContentError,
        UnverifiedCheckpointWarning,
    )
    from fastensor.select.choice import Explanation, SelectorStatistics
    from fastensor.select.context import Choice, Context
    from fastensor.select.current import current_selector, use_selector
    from fastensor.select.dictionary import Change, Dictionary, DictionaryError
    from fastensor.select.selector import Selector
    from fastensor.stitch.damage import Damage
    from fastensor.store.ref import TensorRef
    from fastensor.store.tensor_store import TensorStore
    from fastensor.store.tools import StoreStatistics
else:
    from fastensor.files.importing import on_first_use

    _HOMES = {
        "fastensor.backends": (),
        "fastensor.checkpoint": (),
        "fastensor.files": (),
        "fastensor.select": (),
        "fastensor.stitch": (),
        "fastensor.store": (),
        "fastensor.backends.registry": ("Fallback",),
        "fastensor.checkpoint.asynchronous.handle": ("SaveHandle",),
        "fastensor.checkpoint.asynchronous.statistics": ("WriterStatistics",),
        "fastensor.checkpoint.asynchronous.writer": ("AsyncWriter",),
        "fastensor.checkpoint.tools.catalog": ("Inspection", "TensorInfo"),
        "fastensor.checkpoint.tools.comparing": ("DamagedCheckpointError", "VerifyReport"),
        "fastensor.checkpoint.tools.convert": ("convert",),
        "fastensor.checkpoint.tools.diff": ("Difference", "TensorDifference", "diff"),
        "fastensor.checkpoint.models.huggingface": ("load_sharded", "save_sharded"),
        "fastensor.checkpoint.tools.inspect": ("inspect",),
        "fastensor.checkpoint.reading.lazy": ("LazyCheckpoint", "open"),
        "fastensor.checkpoint.reading.load": ("load", "load_with_report"),
        "fastensor.checkpoint.models.modules": ("load_model", "save_model"),
        "fastensor.checkpoint.report": ("LoadReport",),
        "fastensor.checkpoint.writing.report": ("SaveReport",),
        "fastensor.checkpoint.writing.save": ("save",),
        "fastensor.checkpoint.tools.verify": ("verify",),
        "fastensor.errors": (
            "BackendUnavailableError",
            "CheckpointReadError",
            "CheckpointWriteError",
            "CorruptCheckpointError",
            "EmptyCheckpointError",
            "FastensorError",
            "LayoutError",
            "NotACheckpointError",
            "PlacementError",
            "ReplicaMismatchError",
            "SaveDroppedError",
            "StateChangedError",
            "StateMismatchError",
            "UnknownBackendError",
            "UnknownFilesystemError",
            "UnknownKeyError",
            "UnsafeCheckpointError",
            "UnsupportedContentError",
            "UnverifiedCheckpointWarning",
        ),
        "fastensor.select.choice": ("Explanation", "SelectorStatistics"),
        "fastensor.select.context": ("Choice", "Context"),
        "fastensor.select.current": ("current_selector", "use_selector"),
        "fastensor.select.dictionary": ("Change", "Dictionary", "DictionaryError"),
        "fastensor.select.selector": ("Selector",),
        "fastensor.stitch.damage": ("Damage",),
        "fastensor.store.ref": ("TensorRef",),
        "fastensor.store.tensor_store": ("TensorStore",),
        "fastensor.store.tools": ("StoreStatistics",),
    }
    __getattr__ = on_first_use(__name__, _HOMES)

    def __dir__():
        return sorted({*globals(), *__all__, *(home.split(".")[1] for home in _HOMES)})


__version__ = VERSION

__all__ = [
    # saving and loading
    "save",
    "load",
    "load_with_report",
    "save_model",
    "load_model",
    "save_sharded",
    "load_sharded",
    "open",
    "LazyCheckpoint",
    "TensorInfo",
    # saving while the program goes on
    "AsyncWriter",
    "SaveHandle",
    "WriterStatistics",
    # looking inside
    "verify",
    "VerifyReport",
    "Damage",
    "inspect",
    "Inspection",
    "diff",
    "Difference",
    "TensorDifference",
    "convert",
    # single tensors
    "TensorStore",
    "TensorRef",
    "StoreStatistics",
    # how it is chosen what moves bytes
    "Selector",
    "Context",
    "Dictionary",
    "Change",
    "Choice",
    "Explanation",
    "SelectorStatistics",
    "current_selector",
    "use_selector",
    # what was done
    "SaveReport",
    "LoadReport",
    "Fallback",
    # errors
    "FastensorError",
    "CheckpointWriteError",
    "CheckpointReadError",
    "CorruptCheckpointError",
    "EmptyCheckpointError",
    "NotACheckpointError",
    "DamagedCheckpointError",
    "UnsafeCheckpointError",
    "UnsupportedContentError",
    "PlacementError",
    "ReplicaMismatchError",
    "SaveDroppedError",
    "StateChangedError",
    "StateMismatchError",
    "UnknownKeyError",
    "UnknownFilesystemError",
    "UnknownBackendError",
    "BackendUnavailableError",
    "LayoutError",
    "DictionaryError",
    "UnverifiedCheckpointWarning",
    "__version__",
]
