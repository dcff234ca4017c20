"""``fastensor.load``: torch rebuilds the object, our reader brings it the bytes and checks them.

torch's restricted unpickler rebuilds the object of an ordinary file from storages that a backend reads ahead
(``storages.py``). Every other file ``torch.load`` reads through a file object of ours, asking for every record's bytes
with one ``readinto`` straight into the memory of the future storage (``checked_file.py``). The CRC32 of a record is
checked before its storage reaches the unpickler. So every rule of ``torch.load`` (``map_location``, safe globals, ties,
subclasses, byte order) is torch's own and holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from fastensor.backends import registry
from fastensor.checkpoint.containers import container_in
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.reading.opened import OpenedFile, opened
from fastensor.checkpoint.reading.placement import MapLocation, begin_to_use
from fastensor.checkpoint.reading.request import Loaded, LoadRequest, check_arguments, is_restricted, listed
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, caught_as
from fastensor.files.arguments import checks_keywords
from fastensor.select.transfer import BackendChoice, check_choice

if TYPE_CHECKING:
    from fastensor.checkpoint.progress import Meter, Progress
    from fastensor.checkpoint.report import LoadReport
else:
    Progress = LoadReport = Any  # for get_type_hints; the modules are imported when they are needed


@checks_keywords
def load(
    path: Location,
    map_location: MapLocation = None,
    *,
    keys: Iterable[str] | None = None,
    into: Mapping[str, Any] | None = None,
    weights_only: bool | None = None,
    mmap: bool = False,
    verify: bool | Literal["first"] | None = None,
    backend: BackendChoice = registry.AUTO,
    progress: Progress | None = None,
) -> Any:
    """Load a checkpoint as ``torch.load`` does, at the speed of the disk or of the page cache, and verify it.

    Args:
        path: a file that :func:`fastensor.save`, ``torch.save`` (any version of torch) or ``safetensors`` wrote; which
            of them is seen from its first bytes. A path, a URL that ``fsspec`` knows, or an open binary file that can
            seek, whose checkpoint begins at its position. An archive of torch, or a safetensors file, ends where the
            open file ends. A file that is no checkpoint, or whose directory is there and is damaged, is left at its
            end, so that no loop meets it again. Otherwise the position is left where ``torch.load`` leaves it, also by
            a failure: behind a file that torch wrote before 1.6, so that several of them may stand in one open file;
            somewhere within an archive; and at the end of what torch does not read. What a server sends only whole is
            downloaded to a file in ``$TMPDIR`` first.
        map_location: as for ``torch.load``, in all its forms.
        keys: names of what to load, such as ``state_dict.layer.weight``: keys of dicts and positions in lists, joined
            by dots. They may be glob patterns (a star also stands for dots), and may name whole branches
            (``state_dict``). Only the tensors in it are read, and objects of other classes beside it are not made,
            unless the file's pickle cannot be read without running it, as in files of before torch 1.6. The
            result is the same object with nothing else in it; of a list, only what was chosen is left. A list of
            nothing but plain values is one value. None loads everything.
        into: a dict of tensors, such as ``model.state_dict()``, which may be nested as the file is. Each tensor gets
            the values that the file has under its name, straight into its memory on whatever device, converted to its
            dtype if that keeps them; nothing else is read. It is returned. A damaged tensor is noticed when its old
            values are gone: the error names all that have been overwritten, also in its ``overwritten``.
        weights_only: as for ``torch.load``. None means True, unless ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` is set in the
            environment; ``TORCH_FORCE_WEIGHTS_ONLY_LOAD`` makes it True whatever is given. With False a crafted file
            can run any code; with True it is as safe as torch's restricted unpickler. A safetensors file runs none.
        mmap: as for ``torch.load``: map the file instead of reading it. A file that torch would map wrongly is read, as
            the report of :func:`load_with_report` says then.
        verify: compare everything that is loaded with the CRC32s in the file. None means True, but False with
            ``mmap``, which reads nothing that could be compared. A file without checksums is loaded with an
            :class:`~fastensor.errors.UnverifiedCheckpointWarning`. ``"first"`` compares everything before anything of
            ``into`` is overwritten, which reads the file twice.
        backend: ``"auto"`` for the one that was fastest for such files on this machine, the name of a backend, or a
            :class:`~fastensor.Selector` that chooses. One that cannot, on this file or machine, is replaced by another,
            which is logged.
        progress: called after every few MiB with the bytes that have been read and the bytes to read. What it raises
            ends the load.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: the file is damaged or cut off.
        EmptyCheckpointError: the file is empty, or the position of an open file is at its end.
        NotACheckpointError: the file is something else than a checkpoint; the message says what.
        UnknownKeyError: a name or pattern in ``keys`` chooses nothing.
        StateMismatchError: a tensor of ``into`` is not in the file, or its shape differs, or it shares memory with
            another one that has other values in the file. Nothing is overwritten.
        UnsafeCheckpointError: ``weights_only=True`` met a global that is not allow-listed.
        PlacementError: torch cannot put tensors where ``map_location``, or else the file, says.
        UnsupportedContentError: the file is sound, but this torch cannot rebuild what it holds, such as a dtype that it
            does not have. With ``weights_only=False``, what torch raises is passed on.
        Exception: what the user's own code raises, which an allow-listed class or a callable ``map_location`` is.
        UnknownFilesystemError: ``fsspec`` cannot reach the URL.
        CheckpointReadError: the operating system, or the remote filesystem, failed to deliver the bytes.

    Memory beyond the object: a ring of 32 MiB. When loading to a device, one tensor on the host, or, if several are
    read at a time from the page cache, 128 MiB of them. Tensors of up to
    64 KiB that are neighbours in the file share memory of up to 1 MiB, the first of them with the file's pickle if that
    is as small; it goes with the last of them. Tensors of
    ``into`` that share memory, if the file has each of them, are compared on the host before. The backend
    ``direct`` leaves the page cache alone; the others fill it. While a thousand tensors or more are made, the garbage
    collector of Python pauses in all threads.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
    >>> _ = fastensor.save({"model": {"weight": torch.arange(3), "bias": torch.ones(1)}, "epoch": 3}, path)
    >>> fastensor.load(path)
    {'model': {'weight': tensor([0, 1, 2]), 'bias': tensor([1.])}, 'epoch': 3}
    >>> fastensor.load(path, keys=["*.bias"])
    {'model': {'bias': tensor([1.])}}
    >>> weight = torch.zeros(3)
    >>> _ = fastensor.load(path, into={"model": {"weight": weight}})
    >>> weight
    tensor([0., 1., 2.])
    """
    return _load(
        path,
        map_location,
        keys=keys,
        into=into,
        weights_only=weights_only,
        mmap=mmap,
        verify=verify,
        backend=backend,
        progress=progress,
    )[0]


@checks_keywords
def load_with_report(
    path: Location,
    map_location: MapLocation = None,
    *,
    keys: Iterable[str] | None = None,
    into: Mapping[str, Any] | None = None,
    weights_only: bool | None = None,
    mmap: bool = False,
    verify: bool | Literal["first"] | None = None,
    backend: BackendChoice = registry.AUTO,
    progress: Progress | None = None,
) -> tuple[Any, LoadReport]:
    """:func:`load`, and what it did."""
    from fastensor.checkpoint.report import LoadReport  # a load whose report nobody wants needs nothing of it

    started = time.perf_counter()
    result, file, request, loaded = _load(
        path,
        map_location,
        keys=keys,
        into=into,
        weights_only=weights_only,
        mmap=mmap,
        verify=verify,
        backend=backend,
        progress=progress,
    )
    return result, LoadReport(
        path=file.where,
        nbytes=file.nbytes,
        backend=loaded.backend,
        reason=loaded.reason,
        verified=loaded.verified,
        resident_fraction=file.resident_fraction,
        seconds=time.perf_counter() - started,
        fallbacks=tuple(request.fallbacks),
    )


def _load(
    path: Location,
    map_location: MapLocation,
    *,
    keys: Iterable[str] | None,
    into: Mapping[str, Any] | None,
    weights_only: bool | None,
    mmap: bool,
    verify: bool | Literal["first"] | None,
    backend: BackendChoice,
    progress: Progress | None,
) -> tuple[Any, OpenedFile, LoadRequest, Loaded]:
    """:func:`load`; and the file, which is closed, how it was to be loaded, and how it was."""
    check_arguments(map_location, keys, into, mmap=mmap, verify=verify)
    check_choice(backend)
    is_restricted(weights_only)  # raises where the environment says what cannot be
    names = listed(keys)
    with _bringing(into, verify) as bring, _metering(progress) as meter:
        checked = verify is not False and not mmap
        request = LoadRequest([], map_location, names, weights_only, mmap, checked, backend, meter=meter)
        begin_to_use(map_location)
        with opened(path) as file, _leaving_the_position(file):
            if mmap and file.path is None:
                raise ValueError(f"mmap=True needs the path of a local file, found {file.where}")
            load_file = _loader_of(file, request)
            loaded = bring(file, request, load_file)
            if meter is not None:
                meter.finish(file.nbytes)
    if request.checked and not loaded.verified:
        from fastensor.checkpoint.report import warn_unverified

        warn_unverified(file.where, loaded.unchecked)
    return loaded.result if into is None else into, file, request, loaded


Loader: TypeAlias = Callable[[OpenedFile, LoadRequest], Loaded]


def _bringing(
    into: Mapping[str, Any] | None, verify: bool | Literal["first"] | None
) -> AbstractContextManager[Callable[[OpenedFile, LoadRequest, Loader], Loaded]]:
    """A function that loads a file by the loader of its container, or fills ``into`` with what is in it."""
    if into is None:
        return nullcontext(lambda file, request, load_file: load_file(file, request))
    from fastensor.checkpoint.models.into import filling  # most loads need nothing of it

    return filling(into, verify_first=verify == "first")


@contextmanager
def _metering(progress: Progress | None) -> Iterator[Meter | None]:
    """What counts the bytes that the block reads; None if nobody wants to know."""
    if progress is None:
        yield None
        return
    from fastensor.checkpoint.progress import Meter, reporting

    with reporting(progress) as tell:
        yield Meter(tell)


@contextmanager
def _leaving_the_position(file: OpenedFile) -> Iterator[None]:
    """Have a file that the caller has opened left where ``torch.load`` leaves it; or, if torch has no part in the load,
    at its end, so that no loop reads the same again and again."""
    try:
        yield
    except (CorruptCheckpointError, NotACheckpointError):
        _end_unless_torch_stopped(file)
        raise
    _end_unless_torch_stopped(file)


def _end_unless_torch_stopped(file: OpenedFile) -> None:
    if file.borrowed is not None and file.borrowed.stopped_at is None:
        file.borrowed.stopped_at = file.nbytes


def _loader_of(file: OpenedFile, request: LoadRequest) -> Loader:
    """
    Raises:
        CorruptCheckpointError, NotACheckpointError: the file is no checkpoint. The error is of the type that torch
            raises for the file, too.
    """
    try:
        return container_in(file).load
    except (CorruptCheckpointError, NotACheckpointError) as error:
        from fastensor.checkpoint.reading.torch_errors import refusal_by_torch  # only a refusal needs what it imports

        raise caught_as(error, refusal_by_torch(file, request)) from error.__cause__
