"""What an exception of ``torch.load`` says about the file, in our terms."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any, cast

import torch

from fastensor.checkpoint.opened import FileView, OpenedFile, as_read_error
from fastensor.checkpoint.request import LoadRequest
from fastensor.errors import CorruptCheckpointError, FastensorError, PlacementError, UnsafeCheckpointError

_GLOBAL_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global|whose module (\S+) is blocked")
_READER = "PytorchStreamReader"


def explain(
    error: Exception, file: OpenedFile, request: LoadRequest, *, is_zip: bool, rebuild: Callable[[], object]
) -> None:
    """Raise ours, with torch's as its cause, or return if the error is to be passed on as it is.

    With ``weights_only=False`` user code runs, and so does a callable ``map_location``: what it raises is passed on.
    Else an error is the file's fault if the object cannot be rebuilt on the host either; if it can, it was the
    device's.

    Args:
        error: raised by ``torch.load``.
        file: what was loaded.
        request: how.
        is_zip: whether it is a zip archive. In other files, any bytes may be taken for a pickle.
        rebuild: loads the object on the host again, its values apart.
    """
    ours = _translate(error, file, request, is_zip, rebuild)
    if ours is not error:
        raise ours from error


def _translate(
    error: Exception, file: OpenedFile, request: LoadRequest, is_zip: bool, rebuild: Callable[[], object]
) -> Exception:
    weights_only = request.weights_only
    if isinstance(error, FastensorError | MemoryError | torch.OutOfMemoryError):
        return error
    if isinstance(error, OSError) and weights_only is not False:
        return as_read_error(error, file.where)
    if isinstance(error, pickle.UnpicklingError):
        if weights_only is not False and (is_zip or _GLOBAL_REFUSED.search(str(error))):
            return _refusal(error, file)
        return CorruptCheckpointError(f"{file.where}: its pickle is damaged or not one of torch's: {error}")
    if isinstance(error, RuntimeError) and _READER in str(error):
        return CorruptCheckpointError(f"{file.where}: {error}")
    if weights_only is False:
        return error
    if _succeeds(rebuild):
        if callable(request.map_location) and not isinstance(request.map_location, torch.device):
            return error
        return PlacementError(f"{file.where}: {error}. map_location='cpu' loads it to the host")
    return CorruptCheckpointError(
        f"{file.where}: torch cannot rebuild what the file holds ({error!r}); it was damaged, or is not a checkpoint"
    )


def _succeeds(action: Callable[[], object]) -> bool:
    try:
        action()
    except Exception:  # noqa: BLE001  # whatever it is, it is the answer
        return False
    return True


def _refusal(error: pickle.UnpicklingError, file: OpenedFile) -> UnsafeCheckpointError:
    """What torch's restricted unpickler refused, and what to do about it."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, FileView(file)))
    except Exception:  # noqa: BLE001  # a pickle that cannot be scanned: torch's message has to do
        unsafe = []
    unsafe = unsafe or [name for groups in _GLOBAL_REFUSED.findall(str(error)) for name in groups if name]
    if not unsafe:
        return UnsafeCheckpointError(
            f"{file.where}: weights_only=True refuses the file's pickle ({error}). If you trust the file, load it with "
            f"weights_only=False, which lets it run any code"
        )
    names = ", ".join(unsafe)
    return UnsafeCheckpointError(
        f"{file.where}: weights_only=True does not allow {names}, which the file contains. If you trust the file, "
        f"either allow them (torch.serialization.add_safe_globals([{names}]), or the context manager "
        f"torch.serialization.safe_globals), or load with weights_only=False, which lets the file run any code"
    )
