"""The exceptions and warnings that Fastensor raises.

Every exception is a :class:`FastensorError` and also the built-in that fits. Where ``torch.save`` and ``torch.load``
raise an exception, ours is an instance of its type, too (:func:`caught_as`), so code that handles it keeps working.
There are two exceptions to that. Damage that our checksums and checks of the directory find before torch would meet it
is a :class:`CorruptCheckpointError`, whatever torch would raise later. And Python can make no exception of some pairs
of types. A missing file is the built-in ``FileNotFoundError``.
"""

from __future__ import annotations

import pickle
from concurrent.futures import CancelledError
from functools import lru_cache
from typing import Any, TypeVar

_E = TypeVar("_E", bound=Exception)


class FastensorError(Exception):
    """Base of everything that Fastensor raises on purpose."""

    overwritten: tuple[str, ...] = ()
    """The names of the tensors whose old values are gone, if a load into existing tensors has failed. All others are as
    they were."""


class CheckpointWriteError(FastensorError, OSError, RuntimeError):
    """A save failed. The message says whether the old file is kept: it is unless only the sync of the new name failed.
    ``torch.save`` raises ``RuntimeError`` where it cannot write a path, so this is one too.

    Raised by :func:`fastensor.save` with the ``errno`` of the failing call and the target's path; the cause is chained.
    """


class ReplicaMismatchError(FastensorError, ValueError):
    """Ranks that are to save a file together hold different states; the message names a rank and the first difference.

    Nothing has been written.
    """


class CheckpointReadError(FastensorError, OSError):
    """The operating system failed to deliver bytes of a checkpoint; ``errno`` and ``filename`` say which."""


class CorruptCheckpointError(FastensorError, RuntimeError, pickle.UnpicklingError):
    """A file was damaged or cut off: it contradicts itself, or its bytes do not match their CRC32.

    ``torch.load`` raises ``RuntimeError`` or ``UnpicklingError`` for most defects that it notices, so this is both.
    """


class NotACheckpointError(FastensorError, RuntimeError, pickle.UnpicklingError, ValueError):
    """A file is something else than a checkpoint, and nothing says that it is damaged. The message says what it is: a
    page that a server sent in place of a file, a Git LFS pointer, an array of NumPy, a compressed file.
    """


class EmptyCheckpointError(CorruptCheckpointError, EOFError):
    """A file is empty, or an open file is at its end, so there is nothing to load.

    ``torch.load`` raises ``EOFError``, by which a loop over objects in one file ends, so this is one too.
    """


class UnsafeCheckpointError(FastensorError, pickle.UnpicklingError):
    """``weights_only=True`` met a global that is not allow-listed; the message names it and the ways out."""


class UnsupportedContentError(FastensorError, ValueError):
    """A container cannot hold the object that is to be saved, or this torch cannot hold the contents of a file.

    Raised by :func:`fastensor.save` before anything is written, for objects that ``safetensors`` refuses as well:
    tensors that share memory or are not contiguous, dtypes that the format does not have, anything but a dict of
    tensors.
    """


class PlacementError(FastensorError, RuntimeError):
    """torch cannot put tensors on the device that ``map_location``, or otherwise the file, names."""


class StateMismatchError(FastensorError, RuntimeError):
    """The tensors of a file are not those of the model, or of the dict, that they are to be loaded into: names are
    missing or unexpected, or shapes differ. ``load_state_dict`` raises ``RuntimeError``, too.

    Unless the message says something else, nothing has been overwritten.
    """


class SaveDroppedError(FastensorError, CancelledError):
    """A save was cancelled, or dropped for another one, and has not touched its path."""


class StateChangedError(FastensorError, RuntimeError):
    """A storage was resized while it was being saved; or it has changed, and ``share_unchanged="trust"`` took it for
    unchanged. The old file is kept."""


class UnknownKeyError(FastensorError, KeyError):
    """A checkpoint has no entry of the given name or pattern, or a dataset has no such key."""

    def __str__(self) -> str:  # KeyError would show the message as a literal
        return str(self.args[0]) if self.args else ""


class UnknownFilesystemError(FastensorError, ValueError):
    """``fsspec`` does not know the protocol of a URL, or a package that the protocol needs is not installed."""


class UnknownBackendError(FastensorError, ValueError):
    """No backend of the name is registered; the message lists the registered names."""


class BackendUnavailableError(FastensorError, RuntimeError):
    """A backend cannot work on this file or machine; the message is the reason.

    Raised by a backend before it has moved a byte, or after a failed first transfer. The caller of the backend falls
    back to another one and reports the reason.
    """


class LayoutError(FastensorError, RuntimeError):
    """torch laid out a file in a way that the planner does not understand (an unknown torch version, say).

    :func:`fastensor.save` then lets ``torch.save`` write the file and reports the reason.
    """


class UnverifiedCheckpointWarning(UserWarning):
    """A file carries no checksums, so the loaded object could not be verified."""


class OffloadError(FastensorError, RuntimeError):
    """Activations cannot be offloaded, or an offloaded activation cannot be read."""


class CorruptActivationError(OffloadError):
    """An offloaded activation was read with other bytes than were written."""


class CorruptDatasetError(FastensorError, RuntimeError):
    """A file of a dataset is not what it claims to be: it is truncated, damaged, or of another format."""


class UnsupportedDatasetError(FastensorError, ValueError):
    """A file of a dataset may be sound, but is of a version or byte order that is not read here, or encrypted."""


class DatasetChangedError(FastensorError, RuntimeError):
    """A file of a dataset was written to while it was read, or since it was indexed."""


class NodeReaderError(FastensorError, RuntimeError):
    """The process that reads for all others of a machine could not be started or reached, or has ended."""


class CorruptSampleError(FastensorError, RuntimeError):
    """The bytes of a sample or batch in memory are not what was encoded."""


class UnsupportedSampleError(FastensorError, TypeError):
    """A sample or batch has a part that is neither a tensor, an array nor plain data, and pickling it is not allowed.

    The message says where in the sample it is, and of which type.
    """


class ProvisionError(FastensorError, RuntimeError):
    """A data service cannot be started, reached, or used in this way; or a worker of it has failed.

    The message has the worker's traceback then.
    """


class BatchError(ProvisionError):
    """A data service could not make a batch, or not in time. The loader goes on with the next one."""


def caught_as(error: _E, kind: type[Exception]) -> _E:
    """An exception like ``error`` that handlers of another type catch, too: those of what torch raises in its place.

    Its name, message, attributes and notes are those of ``error``. It is ``error`` itself if that is of the type
    already. If Python can make no exception of both (an ``OSError`` that is a ``UnicodeDecodeError``, say), it is not.

    >>> error = caught_as(CorruptCheckpointError("x.pt: cut off"), KeyError)
    >>> isinstance(error, KeyError), isinstance(error, CorruptCheckpointError), type(error).__name__, str(error)
    (True, True, 'CorruptCheckpointError', 'x.pt: cut off')
    """
    if isinstance(error, kind):
        return error
    ours: type[_E] = type(error)
    reduced: Any = error.__reduce__()
    made: _E = _made(ours, kind, reduced[1])
    made.__dict__.update(error.__dict__)
    made.__cause__ = error.__cause__
    return made


def _made(ours: Any, kind: Any, args: tuple[Any, ...]) -> Any:
    return _of_both(ours, kind)(*args)


@lru_cache(maxsize=256)
def _of_both(ours: Any, kind: Any) -> Any:
    """A class of exceptions that are of both types, and look like ``ours``."""

    def reduce(error: Exception) -> tuple[Any, ...]:
        reduced = ours.__reduce__(error)
        return _made, (ours, kind, reduced[1]), error.__dict__

    looks = {name: getattr(ours, name) for name in ("__module__", "__qualname__", "__doc__", "__init__", "__str__")}
    try:
        return type(ours.__name__, (ours, kind), {**looks, "__reduce__": reduce})
    except TypeError:  # their instances are laid out differently
        return ours
