"""What an exception of ``torch.load`` says about the file, in our terms."""

from __future__ import annotations

import pickle
import re
import sys
import traceback
from collections.abc import Callable
from itertools import dropwhile
from typing import Any, cast

import torch

from fastensor.checkpoint.archive import read_archive
from fastensor.checkpoint.catalog import read_catalog
from fastensor.checkpoint.opened import FileView, OpenedFile
from fastensor.checkpoint.placement import check_destination
from fastensor.checkpoint.request import FORCED, LoadRequest
from fastensor.errors import (
    CorruptCheckpointError,
    FastensorError,
    PlacementError,
    UnsafeCheckpointError,
    UnsupportedContentError,
)
from fastensor.files.os_errors import read_error
from fastensor.stitch.torch_pickle import StorageRef, storages_in
from fastensor.stitch.torch_records import TorchArchive

_GLOBAL_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global|whose module (\S+) is blocked")
_READER = "PytorchStreamReader"
_NOT_THE_USERS = frozenset(("torch", "fastensor", "numpy", "sympy"))
"""Packages whose code runs whatever the file holds, Python's own apart."""
_LOADERS = ("torch.serialization", "torch._weights_only_unpickler")
"""Modules of torch's that call what a file holds."""
_HOST = "cpu"
_LONGEST_REASON = 500
"""In characters."""


def is_refused_global(error: Exception) -> bool:
    """Whether torch's restricted unpickler has met a class or function that is not allow-listed."""
    return isinstance(error, pickle.UnpicklingError) and _GLOBAL_REFUSED.search(str(error)) is not None


def explain(
    error: Exception, file: OpenedFile, request: LoadRequest, *, rebuild_on_host: Callable[[], object] | None = None
) -> None:
    """Raise ours, with torch's as its cause, or return if the error is to be passed on as it is.

    What the user's own code raises is passed on: that of allow-listed classes, and of a callable ``map_location``. What
    torch raises is the device's fault if torch refuses to put nothing there for the same reason, and the file's if its
    pickle, read without running it, contradicts itself or the archive. Else nothing is damaged.

    Args:
        error: raised by ``torch.load``.
        file: what was loaded.
        request: how.
        rebuild_on_host: loads the object to the host. Given for files that are no zip archives: any bytes may be taken
            for a pickle in them, and it cannot be read without running it.
    """
    ours = _translate(error, file, request, rebuild_on_host)
    if ours is not error:
        raise ours from error


def _translate(
    error: Exception, file: OpenedFile, request: LoadRequest, rebuild_on_host: Callable[[], object] | None
) -> Exception:
    if isinstance(error, FastensorError | MemoryError | torch.OutOfMemoryError) or _is_users(error):
        return error
    restricted, is_zip = request.restricted, rebuild_on_host is None
    if isinstance(error, OSError) and restricted:
        return read_error(error, file.where)
    if isinstance(error, pickle.UnpicklingError):
        if restricted and (is_zip or _GLOBAL_REFUSED.search(str(error))):
            return _refusal(error, file, request)
        return CorruptCheckpointError(f"{file.where}: its pickle is damaged or not one of torch's: {error}")
    if isinstance(error, RuntimeError) and _READER in str(error):
        return CorruptCheckpointError(f"{file.where}: {error}")
    if rebuild_on_host is None:
        return _judge(error, file, request)
    return _refused_place(error, {_HOST}, file, request) or _judge_legacy(error, file, request, rebuild_on_host)


def _is_users(error: Exception) -> bool:
    """Whether it came through code that is neither torch's, nor ours, nor Python's, and that torch has called.

    What stands before is of whoever has wrapped ``torch.load``, unless torch was never called.
    """
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = list(dropwhile(lambda name: name not in _LOADERS, modules)) or modules
    roots = {name.partition(".")[0] for name in called}
    return not roots <= _NOT_THE_USERS | sys.stdlib_module_names


def _judge(error: Exception, file: OpenedFile, request: LoadRequest) -> Exception:
    """Whose fault it is that torch cannot rebuild a zip archive."""
    archive = read_archive(file)
    storages, defect = ([], None) if archive.why_torch else _read_soberly(file, archive)
    locations = {_HOST, *(storage.location for storage in storages)}
    if refused := _refused_place(error, locations, file, request):
        return refused
    if not request.restricted:
        return error
    if "TorchScript" in archive.why_torch:
        return UnsafeCheckpointError(
            f"{file.where}: {archive.why_torch}, and weights_only=True does not allow that. If you trust the file, "
            f"load it with weights_only=False{_unless_forced(request)}"
        )
    return defect or UnsupportedContentError(
        f"{file.where}: torch {torch.__version__} cannot rebuild what the file holds, although what its pickle says is "
        f"sound: {_shortened(error)}"
    )


def _read_soberly(file: OpenedFile, archive: TorchArchive) -> tuple[list[StorageRef], FastensorError | None]:
    """The storages that the pickle names, without running it, and what is wrong with it."""
    try:
        storages = list(storages_in(read_catalog(file, verify=False).structure))
    except (CorruptCheckpointError, UnsupportedContentError) as defect:
        return [], defect
    for storage in storages:
        nbytes = archive.storages[storage.key].nbytes if storage.key in archive.storages else 0
        if nbytes != storage.nbytes:
            return storages, CorruptCheckpointError(
                f"{file.where}: torch cannot rebuild what the file holds: its pickle says that storage {storage.key!r} "
                f"has {storage.nbytes} bytes, and it has {nbytes}; the file was damaged, or is not one of torch's"
            )
    return storages, None


def _shortened(error: Exception) -> str:
    """torch may list all its kernels."""
    text = repr(error)
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


def _judge_legacy(
    error: Exception, file: OpenedFile, request: LoadRequest, rebuild_on_host: Callable[[], object]
) -> Exception:
    if not request.restricted:
        return error
    try:
        rebuild_on_host()
    except Exception:  # noqa: BLE001  # whatever it is, it is the answer
        return CorruptCheckpointError(
            f"{file.where}: torch cannot rebuild what the file holds ({_shortened(error)}); it was damaged, or "
            f"is not a checkpoint"
        )
    return PlacementError(f"{file.where}: {error}. map_location='cpu' loads it to the host")


def _refused_place(
    error: Exception, locations: set[str], file: OpenedFile, request: LoadRequest
) -> PlacementError | None:
    """What torch says of an empty storage, if it says the same."""
    for location in sorted(locations):
        try:
            check_destination(location, request.map_location, file.where)
        except PlacementError as refused:
            cause = refused.__cause__
            if type(cause) is type(error) and str(cause) == str(error):
                return refused
    return None


def _refusal(error: pickle.UnpicklingError, file: OpenedFile, request: LoadRequest) -> UnsafeCheckpointError:
    """What torch's restricted unpickler refused, and what to do about it."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, FileView(file)))
    except Exception:  # noqa: BLE001  # a pickle that cannot be scanned: torch's message has to do
        unsafe = []
    unsafe = unsafe or [name for groups in _GLOBAL_REFUSED.findall(str(error)) for name in groups if name]
    forced = _unless_forced(request)
    if not unsafe:
        return UnsafeCheckpointError(
            f"{file.where}: weights_only=True refuses the file's pickle ({error}). If you trust the file, load it with "
            f"weights_only=False, which lets it run any code{forced}"
        )
    names = ", ".join(unsafe)
    return UnsafeCheckpointError(
        f"{file.where}: weights_only=True does not allow {names}, which the file contains. If you trust the file, "
        f"either allow them (torch.serialization.add_safe_globals([{names}]), or the context manager "
        f"torch.serialization.safe_globals), or load with weights_only=False, which lets the file run any code{forced}"
    )


def _unless_forced(request: LoadRequest) -> str:
    """What else is to be done, if an environment variable has overruled the caller."""
    if request.weights_only is not False:
        return ""
    return f"; that was asked for, but the environment variable {FORCED} overrules it: unset it"
