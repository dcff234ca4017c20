"""Sources of samples: datasets of PyTorch, of Hugging Face and of Ray Data, LMDB databases, and files.

All that a data service needs of a source is to read many samples by their positions, and to know it again.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from fastensor.checkpoint.location import RemotePath, locate
from fastensor.errors import DatasetChangedError, UnsupportedSampleError
from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import shown
from fastensor.files.words import counted
from fastensor.provision.encoding import encode

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_SAMPLES = 8
"""Number of samples that identify a dataset that says nothing about itself."""


@runtime_checkable
class Source(Protocol):
    """Samples with positions from 0 on. Can be pickled: servers and workers get copies. Each copy is used by one thread
    of one process at a time.
    """

    def __len__(self) -> int:
        """The number of samples. It never changes."""
        ...

    def fingerprint(self) -> str:
        """Identifies the samples and their order, in every process. Another one for other samples.

        Raises:
            ValueError: it cannot be told; the message says what to do.
        """
        ...

    def read(self, positions: Sequence[int]) -> list[Any]:
        """The samples at these positions, in this order. They belong to the caller.

        Whatever it raises, the trainer gets, with a note on where it was raised.
        """
        ...


@checks_keywords
def as_source(data: Any, *, fingerprint: str = "") -> Source:
    """A source of what users have.

    Args:
        data: a source; a map-style dataset, such as an :class:`~fastensor.data.LmdbDataset` or a ``datasets.Dataset``;
            a ``ray.data.Dataset``, whose rows are computed now, and kept by Ray; or a pattern of paths, or of URLs that
            ``fsspec`` knows, such as ``"s3://bucket/train/*.jpg"``.
        fingerprint: identifies the samples of a dataset. By default see :func:`fingerprint_of`.

    Raises:
        TypeError: it is none of these.
        FileNotFoundError: no file matches.
        UnknownFilesystemError: ``fsspec`` does not know the protocol of the URL.
    """
    if isinstance(data, Source):
        return data
    if is_of_ray_data(data):
        data = import_module("fastensor.provision.ray.rows").Rows.of(data)
    if isinstance(data, str | os.PathLike):
        return FileSource.matching(data)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise TypeError(
            f"expected a dataset with __len__ and __getitem__ (map-style), or a pattern of paths, found "
            f"{type(data).__module__}.{type(data).__qualname__}: an iterable dataset has no order that can be resumed"
        )
    return DatasetSource(data, fingerprint)


def is_of_ray_data(data: Any) -> bool:
    """True for a ``ray.data.Dataset``. Imports no Ray."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == "ray.data.dataset.Dataset" for kind in type(data).__mro__)


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """The samples of a map-style dataset. See :class:`Source`."""

    dataset: Any
    """With ``__len__``, ``__getitem__`` and perhaps ``__getitems__``, as PyTorch has them."""
    given: str = ""
    """Identifies the dataset, if it is not to be found out."""

    def __len__(self) -> int:
        return len(self.dataset)

    def fingerprint(self) -> str:
        return self.given or fingerprint_of(self.dataset)

    def read(self, positions: Sequence[int]) -> list[Any]:
        numbers = [int(position) for position in positions]  # datasets may not take NumPy's
        read_many = getattr(self.dataset, "__getitems__", None)
        if read_many is None:
            return list(self._one_by_one(numbers))
        samples = list(read_many(numbers))
        if len(samples) != len(numbers):
            raise ValueError(
                f"{type(self.dataset).__name__}.__getitems__ gave {len(samples)} samples of {len(numbers)}"
            )
        return samples

    def _one_by_one(self, positions: Iterable[int]) -> Iterator[Any]:
        for position in positions:
            try:
                yield self.dataset[position]
            except Exception as error:
                error.add_note(f"This was sample {position} of {type(self.dataset).__name__}")
                raise


class File(NamedTuple):
    """A sample of a :class:`FileSource`."""

    path: str
    """In its filesystem."""
    data: bytes


@checks_keywords
@dataclass(frozen=True, slots=True)
class FileSource:
    """Files as samples, in the order of their paths. See :class:`Source`."""

    filesystem: AbstractFileSystem
    paths: tuple[str, ...]
    sizes: tuple[int | None, ...]
    """Bytes of each file; None if the filesystem does not say."""

    @shown
    def __repr__(self) -> str:
        return f" of {counted(len(self), 'files')} of {type(self.filesystem).__name__}"

    @classmethod
    def matching(cls, pattern: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Self:
        """The files that match a pattern.

        Args:
            pattern: a path or URL with ``*``, ``**``, ``?`` or ``[…]``, as ``fsspec`` takes it.
            storage_options: what ``fsspec`` needs besides a URL, such as an account.

        Raises:
            FileNotFoundError: there are none.
            UnknownFilesystemError: ``fsspec`` does not know the URL's protocol, or lacks the package for it.
        """
        filesystem, path = _resolved(pattern, storage_options)
        found = filesystem.glob(path, detail=True)
        files = {path: found[path].get("size") for path in sorted(found) if found[path]["type"] == "file"}
        if not files:
            raise FileNotFoundError(f"no file matches {os.fspath(pattern)!r}")
        return cls(filesystem, tuple(files), tuple(files.values()))

    def __len__(self) -> int:
        return len(self.paths)

    def fingerprint(self) -> str:
        """Fingerprint of the names, below the folder that all are in, and of the sizes. So a copy has the same."""
        folder = posixpath.commonpath([posixpath.dirname(path) for path in self.paths])
        names = (posixpath.relpath(path, folder) for path in self.paths)
        return _digest(f"{name}\0{size}".encode() for name, size in zip(names, self.sizes, strict=True))

    def read(self, positions: Sequence[int]) -> list[File]:
        """All at once, if the filesystem can do that.

        Raises:
            DatasetChangedError: a file is no longer as long as it was.
        """
        paths = [self.paths[position] for position in positions]
        sizes = [self.sizes[position] for position in positions]
        data = self.filesystem.cat_ranges(paths, None, None, on_error="raise")
        for path, size, found in zip(paths, sizes, data, strict=True):
            if size not in (None, len(found)):
                raise DatasetChangedError(f"{path} had {size} bytes, now {len(found)}: begin anew")
        return list(map(File, paths, data))


def fingerprint_of(dataset: Any) -> str:
    """Identifies the samples of a dataset: by what it says about itself (``fingerprint``, the ``content_id()`` of LMDB
    databases, the ``_fingerprint`` of Hugging Face), by its parts (``Subset``, ``ConcatDataset``), or else by its
    length and a few samples.

    Raises:
        ValueError: samples are not the same when they are read again, or are no tensors, arrays, images or plain data.
    """
    for name in ("fingerprint", "content_id", "_fingerprint"):
        said = getattr(dataset, name, None)
        said = said() if callable(said) else said
        if isinstance(said, str) and said:
            return said
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices, np.int64)
        return _digest([b"subset", fingerprint_of(dataset.dataset).encode(), indices.tobytes()])
    if isinstance(dataset, ConcatDataset):
        return _digest([b"concatenated", *(fingerprint_of(part).encode() for part in dataset.datasets)])
    return _digest([str(len(dataset)).encode(), *_some_samples(dataset)])


def _some_samples(dataset: Any) -> Iterator[bytes]:
    for position in sorted(set(np.linspace(0, len(dataset) - 1, min(_SAMPLES, len(dataset))).astype(int).tolist())):
        found = _bytes_of(dataset, position)
        if found != _bytes_of(dataset, position):
            raise ValueError(
                f"sample {position} of {type(dataset).__name__} differs when it is read again, so the dataset cannot "
                f"be identified: put random transforms into after_cache, or pass fingerprint='a name and a version'"
            )
        yield found


def _bytes_of(dataset: Any, position: int) -> bytes:
    try:
        encoded = encode(_with_arrays(dataset[position]))
    except UnsupportedSampleError as error:
        raise ValueError(
            f"{type(dataset).__name__} cannot be identified by its samples, pass fingerprint='a name and a version': "
            f"{error}"
        ) from error
    return _digest([encoded.description, *encoded.buffers]).encode()


def _with_arrays(value: Any) -> Any:
    """The value with arrays in place of images."""
    if isinstance(value, dict):
        return {key: _with_arrays(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_with_arrays(part) for part in value]
    return np.asarray(value) if hasattr(value, "__array_interface__") else value


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _resolved(
    pattern: str | os.PathLike[str], storage_options: Mapping[str, Any] | None
) -> tuple[AbstractFileSystem, str]:
    location = locate(pattern, storage_options)
    if isinstance(location, RemotePath):
        return location.filesystem, location.path
    from fsspec.implementations.local import LocalFileSystem

    assert isinstance(location, str)
    return LocalFileSystem(), os.path.abspath(location)
