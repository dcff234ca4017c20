"""``fastensor.open``: a checkpoint whose tensors are read one by one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch

from fastensor.backends import registry
from fastensor.backends.base import Extent
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.reading.opened import LocalFile, OpenedFile, ReadOptions, opened
from fastensor.checkpoint.reading.placement import MapLocation, check_destination, check_map_location, filled, place
from fastensor.checkpoint.reading.reader import PartReader
from fastensor.checkpoint.report import warn_unverified
from fastensor.checkpoint.tools.catalog import Catalog, Located, TensorInfo, read_catalog
from fastensor.errors import UnknownKeyError, UnsupportedContentError
from fastensor.files.arguments import check_flags, checks_keywords
from fastensor.files.os_errors import read_errors
from fastensor.files.shown import shown
from fastensor.files.words import counted
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch.parts import Part

_LARGE_NBYTES = 8 << 20
Index: TypeAlias = Any
"""An int, a slice, None, an Ellipsis, or a tuple of these."""


@checks_keywords
def open(  # users write fastensor.open
    path: Location,
    map_location: MapLocation = None,
    *,
    mmap: bool = False,
    verify: bool = True,
    verify_again: bool = True,
    backend: BackendChoice = registry.AUTO,
) -> LazyCheckpoint:
    """Open a checkpoint to read single tensors of it.

    Args:
        path: a file of torch or of safetensors, as for :func:`fastensor.load`. The position of an open file is
            undefined until this is closed, and then what it was.
        map_location: where tensors go, as for ``torch.load``. None means the host.
        mmap: tensors are the pages of the page cache, mapped privately, which takes no copy: what is written to them
            stays in this process. For files of this machine. While tensors are in use, the file must not be written
            to: that would change them, and cutting it off would end this process.
        verify: compare tensors with the CRC32s in the file. Verifying a slice takes reading the whole tensor, in
            bounded memory, when its first slice is read. With False, only the slice is read.
        verify_again: compare a tensor each time that it is read. With False, or ``mmap``, it is compared the first
            time.
        backend: as for :func:`fastensor.load`; used for large tensors.

    Returns:
        A mapping from names to tensors, to be closed, or used in a ``with`` block.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptCheckpointError: the file is damaged or cut off.
        NotACheckpointError: the file is something else than a checkpoint; the message says what.
        UnsupportedContentError: the file can only be loaded whole (files of torch before 1.6, TorchScript).
        CheckpointReadError: the operating system, or the remote filesystem, failed to deliver the bytes.
        PlacementError: torch cannot put tensors where ``map_location`` says.
        ValueError: ``mmap`` is for files of this machine.

    No code of the file is run and none of its classes is imported: this is safe for any file.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
    >>> _ = fastensor.save({"model": {"weight": torch.arange(6).reshape(3, 2)}, "epoch": 3}, path)
    >>> with fastensor.open(path) as checkpoint:
    ...     print(list(checkpoint), checkpoint.info["model.weight"].shape, checkpoint.others)
    ...     print(checkpoint["model.weight"], checkpoint["model.weight", 1:])
    ['model.weight'] (3, 2) {'epoch': 3}
    tensor([[0, 1],
            [2, 3],
            [4, 5]]) tensor([[2, 3],
            [4, 5]])
    """
    check_choice(backend)
    check_flags(mmap=mmap, verify=verify, verify_again=verify_again)
    check_map_location(map_location)
    with ExitStack() as stack:
        file = stack.enter_context(opened(path))
        catalog = read_catalog(file, verify=verify)
        if verify and not catalog.checked:
            warn_unverified(file.where, catalog.unchecked)
        check_destination("cpu", map_location, file.where)
        if mmap and not isinstance(file, LocalFile):
            raise ValueError(f"mmap=True needs the path of a local file, found {file.where}")
        how = _Reading(map_location, mmap, verify, verify_again and not mmap, backend)
        return LazyCheckpoint(file, catalog, stack.pop_all(), how)


def lazily(file: OpenedFile, catalog: Catalog, stack: ExitStack, backend: BackendChoice) -> LazyCheckpoint:
    """:func:`open` for a file that is open already. Its owner closes it, after ``stack``."""
    if not catalog.checked:
        warn_unverified(file.where, catalog.unchecked)
    resources = stack.enter_context(ExitStack())
    return LazyCheckpoint(file, catalog, resources, _Reading(None, False, True, True, backend))


@dataclass(frozen=True, slots=True)
class _Reading:
    """Arguments of :func:`open`, by which the tensors of a checkpoint are read."""

    map_location: MapLocation
    mmap: bool
    verify: bool
    verify_again: bool
    backend: BackendChoice


class LazyCheckpoint(Mapping[str, torch.Tensor]):
    """A mapping from names to tensors, each of which is read when it is asked for. Made by :func:`fastensor.open`.

    ``checkpoint[name]`` gives a tensor with memory of its own; ties are not kept, and a parameter or another subclass
    comes as a plain tensor. With ``mmap``, its memory is that of the page cache. ``checkpoint[name, 10:20]``, with any
    index that makes a view (ints, slices, None, Ellipsis), reads no more than the range of bytes that the result lies
    in, and gives a contiguous tensor, unless it is an expanded one.

    For one thread at a time.
    """

    def __init__(self, file: OpenedFile, catalog: Catalog, resources: ExitStack, how: _Reading) -> None:
        self._file = file
        self._catalog = catalog
        self._close = weakref.finalize(self, resources.close)
        self._how = how
        self._reader = resources.enter_context(PartReader(file, (), ReadOptions("numpy"), verify=how.verify))

    @property
    def container(self) -> str:
        """``torch`` or ``safetensors``."""
        return self._catalog.container

    @property
    def info(self) -> Mapping[str, TensorInfo]:
        """A description of each tensor. Nothing is read."""
        return self._catalog.tensors

    @property
    def others(self) -> Mapping[str, Any]:
        """Everything in the file that is not a tensor, by name: numbers, texts, lists of these and so on as they are.
        An object whose making would run code is not made: a record that prints as ``<its class>`` takes its place."""
        return self._catalog.values

    @property
    def others_in_words(self) -> Mapping[str, str]:
        """The same as short texts, as :func:`fastensor.inspect` shows them."""
        return self._catalog.others

    @property
    def metadata(self) -> Mapping[str, str]:
        """The ``__metadata__`` of a safetensors file, without our checksums."""
        return self._catalog.metadata

    @property
    def verified(self) -> bool:
        """True if tensors are compared with checksums: ``verify`` is not False, and the file carries checksums."""
        return self._how.verify and self._catalog.checked

    @property
    def ties(self) -> Mapping[str, str]:
        """Names of tensors that are the same view of the same storage as an earlier one, and the name of that one."""
        first: dict[Any, str] = {}
        names: dict[str, str] = {}
        for name, one in self._catalog.located.items():
            geometry = (one.part.name, one.offset, one.stride, one.info.shape, one.info.dtype)
            names[name] = first.setdefault(geometry, name)
        return {name: earlier for name, earlier in names.items() if name != earlier}

    def __getitem__(self, key: str | tuple[Any, ...]) -> torch.Tensor:
        """A tensor, or a slice of one.

        Raises:
            UnknownKeyError: there is no tensor of that name.
            IndexError, TypeError: the index does not fit, or would need a copy.
            UnsupportedContentError: the tensor is not a dense one; :func:`fastensor.load` with ``keys`` gives it.
            CorruptCheckpointError: the tensor does not match its checksum.
            CheckpointReadError: the operating system failed to deliver the bytes; or tensors are not compared again,
                and the file was written to after it was opened.
        """
        self._check_open()
        name, index = (key[0], key[1:]) if isinstance(key, tuple) else (key, None)
        located = self._find(name)
        whole = located.on_meta()
        view = whole if index is None else _index(whole, index, name)
        tensor = self._read(located.part, view)
        expanded = tensor.nbytes > tensor.untyped_storage().nbytes()
        return tensor if index is None or expanded else tensor.contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._catalog.tensors)

    def __len__(self) -> int:
        return len(self._catalog.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._catalog.tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} is an open file; open it again in each process")

    def close(self) -> None:
        """Close the file, unless it was given open. Calling it again does nothing."""
        self._close()

    @shown
    def __repr__(self) -> str:
        closed = "" if self._close.alive else ", closed"
        return f" {self._file.where!r}: {counted(len(self), 'tensors')}{closed}"

    def _check_open(self) -> None:
        if not self._close.alive:
            raise ValueError(f"{self._file.where} is closed")
        if isinstance(self._file, LocalFile) and not self._how.verify_again:
            self._file.check_unchanged()

    def _find(self, name: str) -> Located:
        if name in self._catalog.located:
            return self._catalog.located[name]
        if name in self._catalog.tensors:
            kind = self._catalog.tensors[name].kind
            raise UnsupportedContentError(
                f"{self._file.where}: {name!r} ({kind}) is more than its bytes; fastensor.load(..., keys=[{name!r}]) "
                f"gives it"
            )
        raise UnknownKeyError(f"{self._file.where}: no tensor in it is called {name!r}; list() of this gives the names")

    def _read(self, part: Part, view: torch.Tensor) -> torch.Tensor:
        """Read the tensor with the geometry of ``view``, which is on the meta device. The storage of it is the part."""
        offset = int(view.storage_offset()) * view.dtype.itemsize
        steps = zip(view.shape, view.stride(), strict=True)
        numel = sum((size - 1) * step for size, step in steps) + 1 if view.numel() else 0

        def fill(storage: torch.UntypedStorage) -> None:
            self._fill(part, offset, storage)

        nbytes = numel * view.dtype.itemsize
        if self._how.mmap and (self._reader.data_begin(part) + offset) % view.dtype.itemsize == 0:
            placed = place(self._map(part, offset, nbytes), "cpu", self._how.map_location)
        else:
            placed = filled(nbytes, "cpu", self._how.map_location, fill)
        empty = torch.empty(0, dtype=view.dtype, device=placed.device)
        return empty.set_(placed, 0, view.shape, view.stride())

    def _map(self, part: Part, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Map a range of a part. The whole part is verified, once."""
        assert isinstance(self._file, LocalFile)
        if nbytes < part.nbytes:
            self._reader.check(part)
        begin = self._reader.data_begin(part) + offset
        compare = self._reader.must_check(part)
        with read_errors(self._file.where):
            storage, crc32 = self._file.map(begin, nbytes, checksum=compare)
        if compare:
            self._reader.check_read(part, crc32)
        return storage

    def _fill(self, part: Part, offset: int, storage: torch.UntypedStorage) -> None:
        """Read a range of a part. If the range is not the whole part, the whole part is verified first, once."""
        nbytes = storage.nbytes()
        if nbytes < part.nbytes:
            self._reader.check(part)
        begin = self._reader.data_begin(part) + offset
        again = self._how.verify and self._how.verify_again and part.crc32 is not None
        compare = nbytes == part.nbytes and (again or self._reader.must_check(part))
        with self._reader_for(Extent(begin, begin + nbytes)) as reader:
            crc32 = reader.read_range(part, offset, storage, checksum=compare)
            if compare:
                self._reader.check_read(part, crc32)

    @contextmanager
    def _reader_for(self, extent: Extent) -> Iterator[PartReader]:
        """The reader for a range. A large one has a reader of its own, which has several transfers in flight."""
        if self._how.backend == registry.AUTO and extent.end - extent.begin < _LARGE_NBYTES:
            yield self._reader
            return
        with PartReader(self._file, [extent], ReadOptions(self._how.backend), verify=self._how.verify) as reader:
            yield reader


def _index(whole: torch.Tensor, index: Index, name: str) -> torch.Tensor:
    view = whole[index]
    if view.untyped_storage()._cdata != whole.untyped_storage()._cdata:
        raise TypeError(
            f"{name!r}: an index of ints, slices, None and Ellipsis is expected, found {index!r}; read the tensor "
            f"whole for others"
        )
    return view
