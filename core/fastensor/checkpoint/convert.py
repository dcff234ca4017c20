"""``fastensor.convert``: from one container to the other, the tensors' bytes going from file to file."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, BinaryIO

import torch

from fastensor.backends import registry
from fastensor.backends.base import Extent, Reader
from fastensor.checkpoint.catalog import Catalog, Located, read_catalog
from fastensor.checkpoint.checksums import Checked, checksum_of
from fastensor.checkpoint.deliver import deliver
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.names import find
from fastensor.checkpoint.opened import OpenedFile, explained, opened
from fastensor.checkpoint.report import Fallback, SaveReport
from fastensor.checkpoint.save import DEFAULT_PROTOCOL, SavedContainer, choose_container
from fastensor.checkpoint.verify import Progress
from fastensor.errors import LayoutError, UnsupportedContentError
from fastensor.stitch import safetensors, torch_zip
from fastensor.stitch.source import Source
from fastensor.stitch.torch_pickle import TensorRef

_SHOWN = 5


def convert(
    source: Location,
    target: Location,
    *,
    root: str | None = None,
    metadata: Mapping[str, str] | None = None,
    checksums: bool = True,
    copy_ties: bool = False,
    container: SavedContainer | None = None,
    verify: bool = True,
    backend: str = registry.AUTO,
    durable: bool = True,
    progress: Progress | None = None,
) -> SaveReport:
    """Write the tensors of one checkpoint as another, between ``.ckpt``, ``.pt`` and ``.safetensors``.

    What is read is compared with its checksums, and the new file carries them, so this also adds them to files of other
    tools. Bytes go through bounded memory; the target is replaced atomically, and not touched if anything fails.

    Args:
        source: a file that holds a dict from names to dense tensors, in any container but torch's of before 1.6.
        target: as for :func:`fastensor.save`.
        root: the name of the dict within the source, such as ``state_dict`` of a Lightning checkpoint. None means all
            of it.
        metadata: texts for a safetensors target. None keeps those of a safetensors source; a torch file has no room
            for them.
        checksums: as for :func:`fastensor.save`.
        copy_ties: write tensors that share memory once for each name, where a safetensors file would refuse them. In a
            torch file they would be separate tensors, too.
        container: as for :func:`fastensor.save`.
        verify: whether to compare what is read with its checksums.
        backend: how bytes are moved on both sides.
        durable: as for :func:`fastensor.save`.
        progress: called now and then with the bytes done and those to do.

    Raises:
        FileNotFoundError: there is no such source.
        CorruptCheckpointError: the source is damaged; the target is untouched.
        UnsupportedContentError: the source holds something else than a dict of tensors, or the target cannot hold it.
        CheckpointReadError, CheckpointWriteError: the operating system refused something.

    No code of the source is run. Parameters become plain tensors; ``requires_grad`` is not kept.

    >>> import os, tempfile, torch, fastensor
    >>> folder = tempfile.mkdtemp()
    >>> _ = fastensor.save({"state_dict": {"weight": torch.ones(2)}, "epoch": 3}, f"{folder}/a.ckpt")
    >>> _ = fastensor.convert(f"{folder}/a.ckpt", f"{folder}/a.safetensors", root="state_dict")
    >>> fastensor.load(f"{folder}/a.safetensors")
    {'weight': tensor([1., 1.])}
    """
    kind = choose_container(container, name_of(target), metadata, checksums)
    with ExitStack() as stack:
        file = stack.enter_context(opened(source))
        catalog = read_catalog(file, verify=verify)
        tensors = _tensors_of(catalog, root, file.where)
        if not copy_ties:
            _check_ties(tensors, file.where)
        texts = catalog.metadata or None if metadata is None and kind == "safetensors" else metadata

        def plan(fallbacks: list[Fallback]) -> Source:
            # Their memory is never touched: only sizes count.
            stand_ins = {name: _stand_in(name, one, file.where) for name, one in tensors.items()}
            if kind == "safetensors":
                planned: Source = safetensors.plan(stand_ins, metadata=texts, checksums=checksums)
            else:
                whole = torch_zip.plan(stand_ins, pickle_module=pickle, pickle_protocol=DEFAULT_PROTOCOL)
                planned = Source(whole.image, whole.storages)  # torch could only write the memory of the stand-ins
            names = {stand_in.untyped_storage()._cdata: name for name, stand_in in stand_ins.items()}
            order = [tensors[names[_identity(storage)]] for storage in planned.storages]
            reading = _Reading(file, catalog, order, verify, backend, progress or (lambda done, total: None))
            stack.callback(reading.close)
            return replace(planned, storages=reading.parts)

        return deliver(target, plan, _refuse, backend=backend, durable=durable, follow_symlinks=True)


def _refuse(file: BinaryIO) -> None:
    raise LayoutError("torch cannot write a file whose tensors are in another file")


def _identity(storage: Any) -> int:
    identity: int = storage._cdata
    return identity


def _tensors_of(catalog: Catalog, root: str | None, where: str) -> dict[str, Located]:
    """The dict of tensors that is to be converted.

    Raises:
        UnsupportedContentError: it is not one.
    """
    if catalog.container == "safetensors":
        if root is not None:
            raise UnsupportedContentError(f"{where}: a safetensors file has no inner dicts, so leave root={root!r} out")
        return dict(catalog.located)
    branch = catalog.structure if root is None else find(catalog.structure, root)
    if not isinstance(branch, dict):
        raise UnsupportedContentError(
            f"{where}: expected a dict of tensors {'in it' if root is None else f'called {root!r}'}, found "
            f"{type(branch).__name__}; {_roots_of(catalog)}"
        )
    found = {}
    for key, value in branch.items():
        name = f"{root}.{key}" if root else str(key)
        if not isinstance(key, str) or not isinstance(value, TensorRef) or name not in catalog.located:
            raise UnsupportedContentError(
                f"{where}: only a dict from names to dense tensors can be converted, but {name!r} in it is something "
                f"else; {_roots_of(catalog)}"
            )
        found[key] = catalog.located[name]
    return found


def _roots_of(catalog: Catalog) -> str:
    """Advice: which dicts of tensors a checkpoint holds."""
    inner = catalog.structure.items() if isinstance(catalog.structure, dict) else ()
    roots = [
        repr(key)
        for key, value in inner
        if isinstance(value, dict) and value and all(isinstance(one, TensorRef) for one in value.values())
    ]
    return f"choose one of its dicts of tensors with root: {', '.join(roots)}" if roots else "it holds no such dict"


def _check_ties(tensors: Mapping[str, Located], where: str) -> None:
    by_part: dict[str, list[str]] = {}
    for name, one in tensors.items():
        if one.info.nbytes:
            by_part.setdefault(one.part.name, []).append(name)
    ties = [names for names in by_part.values() if len(names) > 1]
    if ties:
        raise UnsupportedContentError(
            f"{where}: tensors share memory, which would be lost: {ties[:_SHOWN]}; pass copy_ties=True "
            f"(--copy-ties) to write each of them by itself"
        )


def _stand_in(name: str, one: Located, where: str) -> torch.Tensor:
    if not one.on_meta().is_contiguous():
        raise UnsupportedContentError(
            f"{where}: {name!r} is not contiguous, so its bytes cannot be copied as they are; load it, and save "
            f".contiguous()"
        )
    return torch.empty(one.info.shape, dtype=one.info.dtype)


class _Reading:
    """The bytes of the source, read in the order in which the target needs them."""

    def __init__(
        self,
        file: OpenedFile,
        catalog: Catalog,
        order: Sequence[Located],
        verify: bool,
        backend: str,
        progress: Progress,
    ) -> None:
        self._file = file
        self._progress = progress
        self._done = 0
        self._total = sum(one.info.nbytes for one in order)
        with explained(file.where):
            self.parts = tuple(self._part(one, catalog, verify) for one in order)
            extents = [Extent(part.begin, part.begin + part.nbytes()) for part in self.parts if part.nbytes()]
            self._reader: Reader
            _, self._reader = file.open_reader(extents, backend, [])

    def readinto(self, offset: int, buffer: memoryview) -> int:
        with explained(self._file.where):
            crc32 = self._reader.readinto(offset, buffer, checksum=True)
        self._done += buffer.nbytes
        self._progress(min(self._done, self._total), self._total)
        return crc32

    def close(self) -> None:
        self._reader.close()

    def _part(self, one: Located, catalog: Catalog, verify: bool) -> _TensorBytes:
        begin = catalog.begin_of(one.part, self._file)
        checked = one.part.checked(begin) if verify else None
        if checked is not None and 0 < one.info.nbytes < one.part.nbytes:
            checked.compare(checksum_of(self._file, begin, one.part.nbytes), self._file.where)
            checked = None
        begin += one.offset * one.info.dtype.itemsize
        return _TensorBytes(self, begin, one.info.nbytes, checked, self._file.where)


class _TensorBytes:
    """See :class:`fastensor.stitch.source.FileBytes`."""

    def __init__(self, reading: _Reading, begin: int, nbytes: int, checked: Checked | None, where: str) -> None:
        self.begin = begin
        self._reading = reading
        self._nbytes = nbytes
        self._checked = checked
        self._where = where

    def nbytes(self) -> int:
        return self._nbytes

    def readinto(self, begin: int, buffer: memoryview) -> int:
        return self._reading.readinto(self.begin + begin, buffer)

    def check(self, crc32: int) -> None:
        if self._checked is not None:
            self._checked.compare(crc32, self._where)
