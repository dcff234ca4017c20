"""``fastensor.convert``: from one container to the other. Bytes go from file to file, and no tensor is rebuilt."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch

from fastensor.backends import registry
from fastensor.checkpoint.containers import directory_container
from fastensor.checkpoint.location import Location, RemotePath, locate, name_of
from fastensor.checkpoint.models.sharded import SHARD_NBYTES, write_sharded
from fastensor.checkpoint.progress import Progress, reporting
from fastensor.checkpoint.report import warn_unverified
from fastensor.checkpoint.tools.conversion.copying import cast_bytes
from fastensor.checkpoint.tools.conversion.settings import ConvertSettings, WrittenContainer
from fastensor.checkpoint.tools.conversion.sources import ConversionSource, open_source, what_shares_memory
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.checkpoint.writing.save import SavedContainer, SaveSettings
from fastensor.checkpoint.writing.save_transaction import SaveTransaction
from fastensor.errors import UnsupportedContentError
from fastensor.files.arguments import as_nbytes, checks_keywords
from fastensor.select.transfer import BackendChoice
from fastensor.stitch.shape import row_major
from fastensor.stitch.source import FileBytes, Plan

_IS_SOURCE = "{}: the target is the source, or one of its files; choose another target"


@checks_keywords
def convert(
    source: Location,
    target: Location,
    *,
    root: str | None = None,
    metadata: Mapping[str, str] | None = None,
    checksums: bool = True,
    copy_ties: bool = False,
    container: WrittenContainer | None = None,
    verify: bool = True,
    backend: BackendChoice = registry.AUTO,
    durable: bool = True,
    shard_nbytes: int | str = SHARD_NBYTES,
    memory_nbytes: int | str | None = None,
    dtype: torch.dtype | None = None,
    rename: Mapping[str, str] | None = None,
    drop: bool = False,
    progress: Progress | None = None,
) -> SaveReport:
    """Write the tensors of one checkpoint as another, between ``.ckpt``, ``.pt``, ``.safetensors``, models of Hugging
    Face in several files, and directories of ``torch.distributed.checkpoint``.

    Tensors are compared with the checksums of the source, and the new file carries checksums, so this also adds them to
    files of other tools. Bytes go through bounded memory. The target is replaced as by :func:`fastensor.save`: if
    anything fails, it is not touched, unless it is an open file.

    Args:
        source: a file that holds a dict from names to dense tensors; or ``*.index.json`` of a model in several files,
            or its folder; or the directory of a distributed checkpoint, of which a torch file also gets the other
            objects, if ``weights_only=True`` allows them. A file that torch wrote before 1.6 is loaded whole, if
            ``weights_only=True`` allows that, and copied to ``$TMPDIR`` first; other files are read by their tensors.
        target: as for :func:`fastensor.save`; or, for the last two containers, a directory.
        root: the name of the dict within the source, such as ``state_dict`` of a Lightning checkpoint; what is beside
            it is left out. None means all of the source.
        metadata: texts for a safetensors target. None keeps those of a safetensors source; a torch file has no room
            for them.
        checksums: as for :func:`fastensor.save`.
        copy_ties: write tensors that share memory once for each name, where a safetensors file would refuse them. In a
            torch file they would be separate tensors, too.
        container: as for :func:`fastensor.save`; ``"dcp"`` for a distributed checkpoint, which holds everything that
            the source does, and for which the source is loaded by ``mmap``; ``"huggingface"`` for
            ``model-00001-of-0000N.safetensors`` and their index, or ``model.safetensors`` if one is enough, in a
            directory that holds no model yet.
        verify: whether to compare tensors with the checksums of the source.
        backend: how bytes are moved on both sides.
        durable: as for :func:`fastensor.save`.
        shard_nbytes: for ``"huggingface"``: the most bytes of tensors in a file, unless one tensor has more.
        memory_nbytes: the most bytes, at least 1 MiB, that one tensor of a distributed checkpoint may take, with its
            largest chunk: it is put together in memory. None means half of what is available. Buffers of the
            backend, tables of names and other objects than tensors come on top.
        dtype: float64, float32, float16 or bfloat16: what tensors of these dtypes become. All others keep theirs.
        rename: new names of tensors by old ones, in which ``*`` stands for anything, as in
            ``{"model.*": "encoder.*"}``. Of several old names that match, the first counts.
        drop: leave out what is no dense tensor in the dict of tensors. Without this, it is an error.
        progress: called after every few MiB with the bytes done and the bytes to do.

    Raises:
        FileNotFoundError: there is no such source.
        CorruptCheckpointError: the source is damaged; the target is untouched.
        NotACheckpointError: the source is something else than a checkpoint.
        UnsupportedContentError: the source holds something else than a dict of tensors, or the target cannot hold it;
            or a value is too large for ``dtype``, or a tensor for ``memory_nbytes``; or the target is the source, or
            one of its files.
        UnknownKeyError: ``rename`` names what is not there.
        ValueError: arguments do not fit each other, or ``rename`` gives two tensors one name.
        CheckpointReadError, CheckpointWriteError: the operating system failed to read or to write.

    No code of the source is run. Parameters become plain tensors; ``requires_grad`` is not kept.

    >>> import os, tempfile, torch, fastensor
    >>> folder = tempfile.mkdtemp()
    >>> _ = fastensor.save({"state_dict": {"weight": torch.ones(2)}, "epoch": 3}, f"{folder}/a.ckpt")
    >>> _ = fastensor.convert(f"{folder}/a.ckpt", f"{folder}/a.safetensors", root="state_dict")
    >>> fastensor.load(f"{folder}/a.safetensors")
    {'weight': tensor([1., 1.])}
    """
    settings = ConvertSettings(
        root=root,
        metadata=metadata,
        checksums=checksums,
        copy_ties=copy_ties,
        container=container,
        verify=verify,
        backend=backend,
        durable=durable,
        shard_nbytes=as_nbytes(shard_nbytes, "shard_nbytes"),
        memory_nbytes=None if memory_nbytes is None else as_nbytes(memory_nbytes, "memory_nbytes"),
        dtype=dtype,
        rename=rename or {},
        drop=drop,
    )
    with reporting(progress) as tell:
        return convert_by(source, target, settings.checked(target), tell)


def convert_by(
    source: Location,
    target: Location,
    settings: ConvertSettings,
    progress: Progress,
    *,
    check: Callable[[Sequence[str], Mapping[str, Sequence[Sequence[str]]]], None] | None = None,
) -> SaveReport:
    """:func:`convert` with its keywords as a record.

    Args:
        source, target, progress: as there.
        settings: have been checked.
        check: called before anything is written, with the names of what is left out, and of tensors that share
            memory by file; what it raises ends the conversion. Needs settings with ``drop``.
    """
    if _is_same_file(source, target) or _is_inside(target, source):
        raise UnsupportedContentError(_IS_SOURCE.format(name_of(source)))
    if container := directory_container(settings.container):
        if check is not None:
            check(container.left_out(source, settings), {})
        return container.write(source, target, settings, progress)
    with ExitStack() as stack:
        found = open_source(source, settings, stack)
        if check is not None:
            check(found.left_out, found.ties)
        if found.ties and not settings.copy_ties:
            raise UnsupportedContentError(what_shares_memory(found.ties))
        for where, why in found.unchecked.items() if settings.verify else ():
            warn_unverified(where, why)
        return _Conversion(found, settings, progress).run(target)


class _Conversion:
    """The conversion of an open source.

    Args:
        source: what is converted.
        settings: how.
        progress: gets the bytes of all tensors.
    """

    def __init__(self, source: ConversionSource, settings: ConvertSettings, progress: Progress) -> None:
        self._source = source
        self._settings = settings
        self._progress = progress
        self._texts = None if settings.container == "torch" else settings.texts(source.metadata)
        self._total = sum(one.nbytes for one in source.tensors.values())
        self._begun = 0
        """The bytes of the tensors of all files that have been begun."""

    def run(self, target: Location) -> SaveReport:
        """Write the file or files."""
        settings, tensors = self._settings, self._source.tensors
        if settings.container == "huggingface":
            return write_sharded(
                cast(str, target),
                {name: math.prod(one.shape) * settings.cast(one.dtype).itemsize for name, one in tensors.items()},
                settings.shard_nbytes,
                lambda path, names: self._write(path, names, "safetensors"),
                durable=settings.durable,
            )
        if any(_is_same_file(path, target) for path in self._source.paths):
            raise UnsupportedContentError(_IS_SOURCE.format(self._source.where))
        return self._write(target, [*tensors], cast(SavedContainer, settings.container))

    def _write(self, path: Location, names: Sequence[str], kind: SavedContainer) -> SaveReport:
        """Write the tensors of these names into one file."""
        settings = self._settings
        transaction = SaveTransaction(path, backend=settings.backend, durable=settings.durable, follow_symlinks=True)
        before = self._begun
        self._begun += sum(self._source.tensors[name].nbytes for name in names)
        return transaction.run(lambda fallbacks: self._plan(names, kind, before))

    def _plan(self, names: Sequence[str], kind: SavedContainer, before: int) -> Plan:
        """The layout of a file, whose bytes come from those of the source. Stand-ins take the places of tensors while
        it is planned: their memory is never touched, only their sizes count."""
        settings, source = self._settings, self._source
        stand_ins = {
            name: _untouched(settings.cast(source.tensors[name].dtype), source.tensors[name].shape) for name in names
        }
        planned = SaveSettings(self._texts, settings.checksums).plan(source.build(stand_ins), kind)
        names_of = {_identity(one.untyped_storage()): name for name, one in stand_ins.items()}
        owners = [names_of.get(_identity(storage)) for storage in planned.storages]
        order = [name for name in owners if name is not None]
        found = source.read(order, lambda done, of_file: self._progress(before + done, self._total))
        wanted = {name: self._cast(name, one) for name, one in zip(order, found, strict=True)}
        return planned.with_storages(
            [storage if name is None else wanted[name] for name, storage in zip(owners, planned.storages, strict=True)]
        )

    def _cast(self, name: str, found: FileBytes) -> FileBytes:
        """The bytes of a tensor in the dtype that it gets."""
        dtype = self._source.tensors[name].dtype
        wanted = self._settings.cast(dtype)
        where = self._source.files.get(name, self._source.where)
        return found if wanted == dtype else cast_bytes(found, dtype, wanted, f"{where}: {name!r}")


_MAP_NORESERVE = 0x4000
"""A flag of Linux that Python has no name for."""


def _identity(storage: Any) -> int:
    identity: int = storage._cdata
    return identity


def _untouched(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor that takes no memory until it is touched: it may be larger than the machine's."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(memory.untyped_storage(), 0, shape, row_major(shape))


def _is_same_file(source: Location, target: Location) -> bool:
    """True if source and target are one file, which may have several names."""
    one, other = _identity_of(source), _identity_of(target)
    return one is not None and one == other


def _is_inside(target: Location, source: Location) -> bool:
    """True if the target is there, in the directory of the source: one of its parts."""
    inner, outer = locate(target), locate(source)
    if not (isinstance(inner, str) and isinstance(outer, str) and os.path.isdir(outer) and os.path.exists(inner)):
        return False
    return Path(outer).resolve() in Path(inner).resolve().parents


def _identity_of(location: Location) -> object:
    """A value that is equal for two locations of one file; None if there is no file yet."""
    found = locate(location)
    if isinstance(found, RemotePath):
        return found.filesystem, found.path
    try:
        status = os.stat(found if isinstance(found, str) else found.fileno())
    except (OSError, AttributeError):  # it is not there; or an open file that is not the operating system's
        return None if isinstance(found, str) else id(found)
    return status.st_dev, status.st_ino
