"""``fastensor.convert``: from one container to the other. Bytes go from file to file, and no tensor is rebuilt."""

from __future__ import annotations

import math
import mmap
import os
import pickle
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, BinaryIO, Literal, cast

import torch

from fastensor.backends import registry
from fastensor.backends.fallback import Fallback
from fastensor.checkpoint.catalog import Catalog, Located, overlapping, read_catalog
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.location import Location, RemotePath, locate, name_of
from fastensor.checkpoint.names import nodes
from fastensor.checkpoint.opened import OpenedFile, opened
from fastensor.checkpoint.read_options import ReadOptions
from fastensor.checkpoint.reader import PartReader, extents_of
from fastensor.checkpoint.report import SaveReport, warn_unverified
from fastensor.checkpoint.save import DEFAULT_PROTOCOL, SavedContainer, choose_container
from fastensor.checkpoint.save_transaction import SaveTransaction
from fastensor.checkpoint.sharded import SHARD_NBYTES, write_sharded
from fastensor.checkpoint.verify import Progress
from fastensor.errors import LayoutError, UnsupportedContentError
from fastensor.files.arguments import as_nbytes, check_flags
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch import safetensors, torch_zip
from fastensor.stitch.pickle_records import PickledTensor
from fastensor.stitch.shape import row_major
from fastensor.stitch.source import Plan

_SHOWN = 5
OF_TORCH = {"format": "pt"}
"""The metadata by which transformers knows that the tensors of a safetensors file are torch's."""
MEMORY_NBYTES = 2 << 30
"""How much memory a conversion takes by default."""
MIN_MEMORY_NBYTES = 1 << 20
_MAP_NORESERVE = 0x4000
"""A flag of Linux that Python has no name for."""


def convert(
    source: Location,
    target: Location,
    *,
    root: str | None = None,
    metadata: Mapping[str, str] | None = None,
    checksums: bool = True,
    copy_ties: bool = False,
    container: SavedContainer | Literal["dcp", "huggingface"] | None = None,
    verify: bool = True,
    backend: BackendChoice = registry.AUTO,
    durable: bool = True,
    shard_nbytes: int | str = SHARD_NBYTES,
    memory_nbytes: int | str = MEMORY_NBYTES,
    progress: Progress | None = None,
) -> SaveReport:
    """Write the tensors of one checkpoint as another, between ``.ckpt``, ``.pt``, ``.safetensors``, models of Hugging
    Face in several files, and directories of ``torch.distributed.checkpoint``.

    Tensors are compared with the checksums of the source, and the new file carries checksums, so this also adds them to
    files of other tools. Bytes go through bounded memory. The target is replaced as by :func:`fastensor.save`: if
    anything fails, it is not touched, unless it is an open file. It may be the source, if nothing in that is lost.

    Args:
        source: a file that holds a dict from names to dense tensors, in any container but that of torch before 1.6; or
            the directory of a distributed checkpoint, of which a torch file also gets the other objects, if
            ``weights_only=True`` allows them; or, for ``container="dcp"``, also ``*.index.json`` of a model in several
            files, or its folder.
        target: as for :func:`fastensor.save`; or, for the last two containers, a directory.
        root: the name of the dict within the source, such as ``state_dict`` of a Lightning checkpoint. None means all
            of it.
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
        memory_nbytes: how many bytes of a distributed checkpoint may be in memory at a time, at least 1 MiB. Tensors
            are put together of their chunks in one half of it, in pieces if they are larger than that. Buffers of the
            backend, tables of names and other objects than tensors come on top.
        progress: called after every few MiB with the bytes done and the bytes to do.

    Raises:
        FileNotFoundError: there is no such source.
        CorruptCheckpointError: the source is damaged; the target is untouched.
        UnsupportedContentError: the source holds something else than a dict of tensors, or the target cannot hold it;
            or the target is the source, and would lose something: values beside ``root``, ties, metadata, parameters,
            or attributes of the dict.
        CheckpointReadError, CheckpointWriteError: the operating system failed to read or to write.

    No code of the source is run. Parameters become plain tensors; ``requires_grad`` is not kept.

    >>> import os, tempfile, torch, fastensor
    >>> folder = tempfile.mkdtemp()
    >>> _ = fastensor.save({"state_dict": {"weight": torch.ones(2)}, "epoch": 3}, f"{folder}/a.ckpt")
    >>> _ = fastensor.convert(f"{folder}/a.ckpt", f"{folder}/a.safetensors", root="state_dict")
    >>> fastensor.load(f"{folder}/a.safetensors")
    {'weight': tensor([1., 1.])}
    """
    shard_nbytes = as_nbytes(shard_nbytes, "shard_nbytes", at_least=1)
    memory_nbytes = as_nbytes(memory_nbytes, "memory_nbytes", at_least=MIN_MEMORY_NBYTES)
    check_choice(backend)
    check_flags(checksums=checksums, copy_ties=copy_ties, verify=verify, durable=durable)
    if container in ("dcp", "huggingface") and not isinstance(target, str | os.PathLike):
        raise UnsupportedContentError(f"{name_of(target)}: expected the path of a directory, found an open file")
    if container == "huggingface" and isinstance(locate(target), RemotePath):
        raise UnsupportedContentError(
            f"{name_of(target)}: a model in several files can only be written into a directory of this machine, found "
            f"a URL; convert into a directory, and copy it"
        )
    progress = progress or (lambda done, total: None)
    if container == "dcp" or metadata_names(source):
        from fastensor.checkpoint.dcp import convert as of_directories  # loads torch.distributed.checkpoint

        if container == "dcp":
            if metadata is not None or not checksums:
                raise ValueError("metadata and checksums=False are for safetensors, not for a distributed checkpoint")
            return of_directories.to_directory(source, target, root, verify=verify, backend=backend, durable=durable)
        settings = of_directories.Settings(
            root, metadata, checksums, container, verify, backend, durable, shard_nbytes, memory_nbytes
        )
        return of_directories.from_directory(source, target, settings, progress)
    kind: SavedContainer = "safetensors"
    if container != "huggingface":
        kind = choose_container(container, name_of(target), metadata, checksums)
    with ExitStack() as stack:
        file = stack.enter_context(opened(source))
        catalog = read_catalog(file, verify=verify)
        if verify and not catalog.checked:
            warn_unverified(file.where, catalog.unchecked, stacklevel=2)
        tensors = _tensors_of(catalog, root, file.where)
        if not copy_ties:
            _check_ties(tensors, file.where)
        texts = catalog.metadata or None if metadata is None and kind == "safetensors" else metadata
        if _is_same_file(source, target):
            _check_nothing_is_lost(catalog, root, tensors, texts or {}, file.where)
        total = sum(one.info.nbytes for one in tensors.values())
        written = 0

        def write(path: Location, names: Sequence[str]) -> SaveReport:
            nonlocal written
            some = {name: tensors[name] for name in names}
            before = written
            written += sum(one.info.nbytes for one in some.values())

            def plan(fallbacks: list[Fallback]) -> Plan:
                planned, order = _plan_without_values(some, kind, texts, checksums, file.where)
                source_tensors = _SourceTensors(
                    file, order, verify, backend, lambda done, of_file: progress(before + done, total)
                )
                stack.callback(source_tensors.close)
                return replace(planned, storages=tuple(_TensorBytes(source_tensors, one) for one in order))

            return SaveTransaction(path, _refuse, backend=backend, durable=durable, follow_symlinks=True).run(plan)

        if container == "huggingface":
            texts = texts or OF_TORCH
            sizes = {name: one.info.nbytes for name, one in tensors.items()}
            return write_sharded(cast(str, target), sizes, shard_nbytes, write, durable=durable)
        return write(target, [*tensors])


def _plan_without_values(
    tensors: Mapping[str, Located],
    kind: SavedContainer,
    texts: Mapping[str, str] | None,
    checksums: bool,
    where: str,
) -> tuple[Plan, list[Located]]:
    """Lay out the target by stand-ins for the tensors.

    Returns:
        The plan, whose storages are to be replaced; and the tensors in the order of its storages.
    """
    stand_ins = {name: _stand_in(name, one, where) for name, one in tensors.items()}
    planned, names = plan_stand_ins(stand_ins, stand_ins, kind, texts, checksums)
    return planned, [tensors[name] for name in names if name is not None]


def plan_stand_ins(
    state: Any,
    stand_ins: Mapping[str, torch.Tensor],
    kind: SavedContainer,
    texts: Mapping[str, str] | None,
    checksums: bool,
) -> tuple[Plan, list[str | None]]:
    """Lay out a file in which some tensors are stand-ins, whose memory is never touched: only their sizes count.

    Args:
        state: what is saved; a dict of tensors for safetensors.
        stand_ins: the stand-ins in it, by names.
        kind: the container.
        texts: for the metadata of safetensors.
        checksums: as for :func:`fastensor.save`.

    Returns:
        The plan; and for each of its storages the name of the stand-in whose it is, or None.
    """
    if kind == "safetensors":
        planned: Plan = safetensors.plan(state, metadata=texts, checksums=checksums)
    else:
        whole = torch_zip.plan(state, pickle_module=pickle, pickle_protocol=DEFAULT_PROTOCOL)
        planned = Plan(whole.image, whole.storages)  # torch could only write the memory of the stand-ins
    names = {stand_in.untyped_storage()._cdata: name for name, stand_in in stand_ins.items()}
    return planned, [names.get(_identity(storage)) for storage in planned.storages]


def _is_same_file(source: Location, target: Location) -> bool:
    """Whether source and target are one file, which may have several names.

    Raises:
        UnsupportedContentError: they are, and the file would be written while it is read.
    """
    one, other = _identity_of_file(source), _identity_of_file(target)
    if one is None or one != other:
        return False
    if not isinstance(target, str | os.PathLike):
        raise UnsupportedContentError(
            f"{name_of(target)}: the target is the file that is to be read, which would be written over before that; "
            f"give its path, which is replaced when all is written, or another target"
        )
    return True


def _identity_of_file(location: Location) -> object:
    """A value that is equal for two locations of one file; None if there is no file yet."""
    found = locate(location)
    if isinstance(found, RemotePath):
        return found.filesystem, found.path
    try:
        status = os.stat(found if isinstance(found, str) else found.fileno())
    except (OSError, AttributeError):  # it is not there; or an open file that is not the operating system's
        return None if isinstance(found, str) else id(found)
    return status.st_dev, status.st_ino


def _check_nothing_is_lost(
    catalog: Catalog, root: str | None, tensors: Mapping[str, Located], texts: Mapping[str, str], where: str
) -> None:
    """Refuse to replace the source by a file that holds less.

    Raises:
        UnsupportedContentError: the source holds more than the new file will.
    """
    losses = {
        f"everything beside {root!r}": root is not None,
        "which tensors share memory": bool(overlapping(tensors)),
        "metadata": not catalog.metadata.keys() <= texts.keys(),
        "which tensors are parameters": any(one.info.kind != "Tensor" for one in tensors.values()),
        "attributes of the dict": bool(getattr(catalog.structure, "__dict__", {})),
    }
    if lost := [what for what, is_lost in losses.items() if is_lost]:
        raise UnsupportedContentError(
            f"{where}: the target is the source, of which this would be lost: {', '.join(lost)}; choose another target"
        )


def _refuse(file: BinaryIO) -> None:
    raise LayoutError("torch cannot write a file whose tensors are in another file")


def _identity(storage: Any) -> int:
    identity: int = storage._cdata
    return identity


def _tensors_of(catalog: Catalog, root: str | None, where: str) -> dict[str, Located]:
    """The tensors to convert, by name.

    Raises:
        UnsupportedContentError: the source, or its ``root``, is not a dict of dense tensors.
    """
    if catalog.container == "safetensors":
        if root is not None:
            raise UnsupportedContentError(f"{where}: a safetensors file has no inner dicts, so leave root={root!r} out")
        return dict(catalog.located)
    branches = {node.name: node.value for node in nodes(catalog.structure, where) if isinstance(node.value, dict)}
    branch = catalog.structure if root is None else branches.get(root)
    if not isinstance(branch, dict):
        what = "a dict of tensors" if root is None else f"a dict of tensors called {root!r}"
        raise UnsupportedContentError(f"{where}: expected {what}, found none; {_advice(branches)}")
    found = {}
    for key, value in branch.items():
        if not isinstance(key, str) or id(value) not in catalog.by_identity:
            name = f"{root}.{key}" if root else key
            kind = "a tensor that is more than its bytes" if isinstance(value, PickledTensor) else "no tensor"
            kind = kind if isinstance(key, str) else f"called by a key of type {type(key).__name__}"
            raise UnsupportedContentError(
                f"{where}: only a dict from names to dense tensors can be converted, but {name!r} in it is {kind}; "
                f"{_advice(branches)}"
            )
        found[key] = catalog.by_identity[id(value)]
    return found


def _advice(branches: Mapping[str, Any]) -> str:
    """The end of a message: which dicts of tensors the source has."""
    roots = [
        repr(name)
        for name, value in branches.items()
        if value and all(isinstance(one, PickledTensor) for one in value.values())
    ]
    return (
        f"choose one of its dicts of tensors with root: {', '.join(roots[:_SHOWN])}"
        if roots
        else "it holds no such dict"
    )


def _check_ties(tensors: Mapping[str, Located], where: str) -> None:
    if ties := overlapping(tensors):
        raise UnsupportedContentError(
            f"{where}: tensors share memory, which would be lost: {[group[:_SHOWN] for group in ties[:_SHOWN]]}; pass "
            f"copy_ties=True (--copy-ties) to write each of them by itself"
        )


def _stand_in(name: str, one: Located, where: str) -> torch.Tensor:
    if not one.on_meta().is_contiguous():
        raise UnsupportedContentError(
            f"{where}: {name!r} is not contiguous, so its bytes cannot be copied as they are; load it, and save "
            f".contiguous()"
        )
    return untouched(one.info.dtype, one.info.shape)


def untouched(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A contiguous tensor that takes no memory until it is touched: it may be larger than the machine's."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = torch.frombuffer(mmap.mmap(-1, nbytes, flags=flags), dtype=torch.uint8)
    empty = torch.empty(0, dtype=dtype, device="cpu")
    return empty.set_(memory.untyped_storage(), 0, shape, row_major(shape))


class _SourceTensors:
    """Reads the tensors of the source in the order in which the target needs them.

    A target whose checksums come first is gone through twice, once for the checksums. Reading starts anew whenever the
    first tensor is begun.
    """

    def __init__(
        self,
        file: OpenedFile,
        order: Sequence[Located],
        verify: bool,
        backend: BackendChoice,
        progress: Progress,
    ) -> None:
        self._file = file
        self._order = extents_of(dict.fromkeys(one.part for one in order if one.part.nbytes))
        self._verify = verify
        self._options = ReadOptions(backend)
        self._progress = progress
        self._first = next((one for one in order if one.info.nbytes), None)
        self._total = sum(one.info.nbytes for one in order)
        self._done = 0
        self._reader: PartReader | None = None

    def readinto(self, one: Located, begin: int, buffer: memoryview) -> int:
        """Read a range of a tensor. Returns the CRC32 of the range."""
        if one is self._first and begin == 0:
            self.close()
            self._reader = PartReader(self._file, self._order, self._options, verify=self._verify)
            self._done = 0
        assert self._reader is not None
        if one.info.nbytes < one.part.nbytes:
            self._reader.check(one.part)
        crc32 = self._reader.read_range(one.part, one.span[0] + begin, buffer)
        self._done += buffer.nbytes
        self._progress(self._done, self._total)
        return crc32

    def check(self, one: Located, crc32: int) -> None:
        """Compare a tensor that was read whole. The record of a tensor that is a part of it was compared before."""
        assert self._reader is not None
        if one.info.nbytes == one.part.nbytes:
            self._reader.check_read(one.part, crc32)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class _TensorBytes:
    """The bytes of one tensor of the source: a :class:`fastensor.stitch.source.FileBytes`."""

    def __init__(self, source: _SourceTensors, one: Located) -> None:
        self._source = source
        self._one = one

    def nbytes(self) -> int:
        return self._one.info.nbytes

    def readinto(self, begin: int, buffer: memoryview) -> int:
        return self._source.readinto(self._one, begin, buffer)

    def check(self, crc32: int) -> None:
        self._source.check(self._one, crc32)
