"""Translating exceptions of ``torch.load`` into our errors."""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, cast

import torch

from fastensor.checkpoint.reading.archive import read_archive, read_catalog
from fastensor.checkpoint.reading.opened import FileView, OpenedFile, read_exactly
from fastensor.checkpoint.reading.placement import check_destination, is_users, refusal_to_place
from fastensor.checkpoint.reading.request import FORCED, LoadRequest
from fastensor.errors import (
    CorruptCheckpointError,
    FastensorError,
    PlacementError,
    UnsafeCheckpointError,
    UnsupportedContentError,
    caught_as,
)
from fastensor.files.os_errors import read_error
from fastensor.stitch.signatures import SNIFFED_NBYTES, is_safetensors_name, is_tar
from fastensor.stitch.torch_records import TorchArchive
from fastensor.stitch.zip_directory import has_end

if TYPE_CHECKING:
    from fastensor.stitch.pickle_records import PickledStorage

_GLOBAL_REFUSED = re.compile(r"GLOBAL (\S+) was not an allowed global|whose module (\S+) is blocked")
_OPERAND = re.compile(r"Unsupported operand (\d+)")
_OPCODES = frozenset(ord(one.code) for one in pickletools.opcodes)
_READER = "PytorchStreamReader"
_NOT_THE_USERS = frozenset(("torch", "fastensor", "numpy", "sympy"))
"""Packages, beside Python's own, whose code every load runs."""
_LOADERS = ("torch.serialization", "torch._weights_only_unpickler")
"""torch's modules that call functions that a file names."""
_HOST = "cpu"
_ASKED_NBYTES = 4096
"""Bytes of a file that is no checkpoint that torch is given to find out what it raises."""
_LONGEST_REASON = 500
"""Characters of torch's error that a message shows."""


def is_refused_global(error: Exception) -> bool:
    """True if torch's restricted unpickler has met a class or function that is not allow-listed."""
    return isinstance(error, pickle.UnpicklingError) and _GLOBAL_REFUSED.search(str(error)) is not None


def explain(
    error: Exception, file: OpenedFile, request: LoadRequest, *, rebuild_on_host: Callable[[], object] | None = None
) -> None:
    """Raise our error, which is an instance of the type of torch's, too. Return if torch's is to be passed on as it is.

    torch's error is the cause of ours; of a :class:`PlacementError`, which says all that it says, only the context.

    Errors of the user's own code (allow-listed classes, a callable ``map_location``) are passed on. torch's error is
    the device's fault if torch refuses to put an empty storage there for the same reason. It is the file's fault if the
    pickle, read without running it, contradicts itself or the archive. Otherwise nothing is damaged.

    Args:
        error: raised by ``torch.load``.
        file: the file that was loaded.
        request: the arguments of the load.
        rebuild_on_host: loads the object to the host. Given for files that are not zip archives: any of their bytes may
            be taken for a pickle, which cannot be read without running it.
    """
    if (hidden := _hidden_by_torch(error)) is not None:
        raise hidden
    ours = _translate(error, file, request, rebuild_on_host)
    if ours is not error:
        raise caught_as(ours, type(error)) from None if isinstance(ours, PlacementError) else error


def _hidden_by_torch(error: Exception) -> FastensorError | None:
    """Our error in whose place torch has raised another one ``from None``, because ours is an UnpicklingError, too. The
    context of other errors may be whatever the caller is handling."""
    if isinstance(error, FastensorError) or not isinstance(error, pickle.UnpicklingError):
        return None
    hidden = error.__context__ if error.__suppress_context__ else None
    return hidden if isinstance(hidden, FastensorError) else None


def _translate(
    error: Exception, file: OpenedFile, request: LoadRequest, rebuild_on_host: Callable[[], object] | None
) -> Exception:
    if isinstance(error, FastensorError | MemoryError | torch.OutOfMemoryError) or _is_users(error):
        return error
    restricted, is_zip = request.restricted, rebuild_on_host is None
    if isinstance(error, OSError) and restricted:
        return read_error(error, file.where)
    if isinstance(error, pickle.UnpicklingError):
        if not is_zip and _ends_in_a_name(error, file):
            return CorruptCheckpointError(f"{file.where}: its pickle ends within a name; the file was cut off")
        operand = _OPERAND.search(str(error))  # pickles of Python 2 and of other protocols have some that torch refuses
        if restricted and (is_zip or _GLOBAL_REFUSED.search(str(error)) or (operand and int(operand[1]) in _OPCODES)):
            return _refusal(error, file, request, _WITHOUT_RUNNING if is_zip else "")
        return CorruptCheckpointError(f"{file.where}: its pickle is damaged or not one of torch's: {error}")
    if isinstance(error, RuntimeError) and _READER in str(error):
        return CorruptCheckpointError(f"{file.where}: {error}")
    if rebuild_on_host is None:
        return _judge(error, file, request)
    return _refused_place(error, {_HOST}, file, request) or _judge_legacy(error, file, request, rebuild_on_host)


def _ends_in_a_name(error: Exception, file: OpenedFile) -> bool:
    """True if a global that was refused is the end of the file. A name in a pickle ends with a newline, for which
    torch's unpickler takes the last character."""
    found = _GLOBAL_REFUSED.search(str(error))
    if found is None:
        return False
    name = (found[1] or found[2]).rstrip(".").encode()
    nbytes = min(len(name) + 1, file.nbytes)
    end = read_exactly(file, file.nbytes - nbytes, nbytes)[:-1]
    return end.endswith(name.rpartition(b".")[2])


def _is_users(error: Exception) -> bool:
    """True if an error came through code that torch called, and that is neither torch's, nor ours, nor Python's.

    Frames before torch's belong to libraries that have wrapped ``torch.load``. If torch was never called, all count.
    """
    modules = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = list(dropwhile(lambda name: name not in _LOADERS, modules)) or modules
    roots = {name.partition(".")[0] for name in called}
    return not roots <= _NOT_THE_USERS | sys.stdlib_module_names


def _judge(error: Exception, file: OpenedFile, request: LoadRequest) -> Exception:
    """The error to raise where torch cannot rebuild a zip archive: by whose fault that is."""
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
            f"load it with weights_only=False{unless_forced(request)}"
        )
    if defect is None and is_users(request.map_location) and isinstance(error, TypeError):
        return error  # the callable takes or gives something else than torch expects
    return defect or UnsupportedContentError(
        f"{file.where}: torch {torch.__version__} cannot rebuild what the file holds, although what its pickle says is "
        f"sound: {_shortened(error)}"
    )


def _read_soberly(file: OpenedFile, archive: TorchArchive) -> tuple[list[PickledStorage], FastensorError | None]:
    """The storages that the pickle names, read without running it, and the defect of the file, if it has one."""
    from fastensor.stitch.pickle_records import storages_in  # a load that does not fail needs nothing of it

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
    """An error in words. torch may list all its kernels."""
    text = repr(error)
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 3]}..."


def _judge_legacy(
    error: Exception, file: OpenedFile, request: LoadRequest, rebuild_on_host: Callable[[], object]
) -> Exception:
    if not request.restricted:
        return error
    if reason := _why_not_damaged(error):
        return UnsupportedContentError(f"{file.where}: {reason}: {_shortened(error)}")
    try:
        rebuild_on_host()
    except Exception:  # noqa: BLE001  # any error means that the file is damaged
        return CorruptCheckpointError(
            f"{file.where}: torch cannot rebuild what the file holds ({_shortened(error)}); it was damaged, or "
            f"is not a checkpoint"
        )
    return refusal_to_place(error, file.where)


def _why_not_damaged(error: Exception) -> str:
    """Reason for which the failure to rebuild a file that is no zip archive says nothing of damage; empty if it may be
    damage."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, NotImplementedError):
        return f"torch {torch.__version__} cannot rebuild what the file holds"
    if any(frame.f_code.co_name == "_validate_loaded_sparse_tensors" for frame in frames):
        return "torch was told to check sparse tensors, and refuses one of the file"
    unpickling = (one for one in reversed(frames) if one.f_globals.get("__name__") == "torch._weights_only_unpickler")
    key = next((frame.f_locals.get("key") for frame in unpickling), None)
    if isinstance(error, UnicodeDecodeError) and key == pickle.SHORT_BINSTRING:
        return (
            "Python 2 wrote a text into the file that is not UTF-8; if you trust the file, "
            "torch.load(..., encoding='latin1', weights_only=False) loads it, and torch.save saves it anew"
        )
    return ""


def _refused_place(
    error: Exception, locations: set[str], file: OpenedFile, request: LoadRequest
) -> PlacementError | None:
    """The error for a device that torch refuses; None if torch puts an empty storage there, or refuses otherwise."""
    for location in sorted(locations):
        try:
            check_destination(location, request.map_location, file.where)
        except PlacementError as refused:
            cause = refused.__context__
            if type(cause) is type(error) and str(cause) == str(error):
                return refused
    return None


_WITHOUT_RUNNING = (
    ". fastensor.open reads its tensors, and fastensor.load with into= copies them into others, without any of that"
)


def _refusal(
    error: pickle.UnpicklingError, file: OpenedFile, request: LoadRequest, otherwise: str
) -> UnsafeCheckpointError:
    """The error for a file that torch's restricted unpickler refuses. It says what to do; ``otherwise`` is its end."""
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, FileView(file)))
    except Exception:  # noqa: BLE001  # a pickle that cannot be scanned: torch's message has to do
        unsafe = []
    unsafe = unsafe or [name for groups in _GLOBAL_REFUSED.findall(str(error)) for name in groups if name]
    forced = unless_forced(request)
    if not unsafe:
        return UnsafeCheckpointError(
            f"{file.where}: weights_only=True refuses the file's pickle ({error}). If you trust the file, load it with "
            f"weights_only=False, which lets it run any code{forced}{otherwise}"
        )
    names = ", ".join(unsafe)
    return UnsafeCheckpointError(
        f"{file.where}: weights_only=True does not allow {names}, which the file contains. If you trust the file, "
        f"either allow them (torch.serialization.add_safe_globals([{names}]), or the context manager "
        f"torch.serialization.safe_globals), or load with weights_only=False, which lets the file run any code{forced}"
        f"{otherwise}"
    )


def unless_forced(request: LoadRequest) -> str:
    """The end of a message: an environment variable has overruled the caller's ``weights_only=False``."""
    if request.weights_only is not False:
        return ""
    return f"; that was asked for, but the environment variable {FORCED} overrules it: unset it"


def refusal_by_torch(file: OpenedFile, request: LoadRequest) -> type[Exception]:
    """The type of what ``torch.load`` raises for a file that begins like no checkpoint.

    torch is asked if its restricted unpickler would read the file: that depends on what opcodes the bytes happen to be.
    It gets the first bytes only, because a pickle that is nothing but marks, say, takes 80 times its size.
    """
    if is_safetensors_name(file.where):
        from safetensors import SafetensorError  # takes milliseconds, and only failures need it

        return SafetensorError
    if request.mmap:
        return RuntimeError
    start = read_exactly(file, 0, min(_ASKED_NBYTES, file.nbytes))
    if not request.restricted:  # the file might run any code
        taken_for_tar = is_tar(start) or not any(start[:SNIFFED_NBYTES])  # torch misses its members
        return KeyError if taken_for_tar else pickle.UnpicklingError
    given = io.BytesIO(start)
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.load(given, _HOST, weights_only=True)
    except MemoryError:  # a length in the file, which has nothing to do with the memory that there is
        return pickle.UnpicklingError
    except Exception as error:  # noqa: BLE001  # its type is what is asked for
        reached_end = given.tell() == len(start) < file.nbytes
        return pickle.UnpicklingError if reached_end else type(error)
    return pickle.UnpicklingError


def refusal_of_archive(file: OpenedFile) -> type[Exception]:
    """The type of what torch's reader of archives raises for an archive whose directory is damaged.

    torch is asked if the end of the directory is missing: then it reads nothing but the end of the file, and it is
    noted where torch stops in a file that the caller has opened. Otherwise torch would read records, some of which may
    be compressed, whatever size they have then.
    """
    if has_end(partial(read_exactly, file), file.nbytes):
        return RuntimeError
    private: Any = torch
    try:
        with nullcontext(FileView(file)) if file.borrowed is None else file.borrowed.lent_to_torch() as given:
            private._C.PyTorchFileReader(given)
    except Exception as error:  # noqa: BLE001  # its type is what is asked for
        return type(error)
    return RuntimeError
