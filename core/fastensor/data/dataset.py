"""A database as a map-style dataset of PyTorch."""

from __future__ import annotations

import copy
import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, Self, TypeVar, cast

import numpy as np
from torch.utils.data import Dataset

from fastensor.data import snapshot as snapshots
from fastensor.data.coalescing import Extents, Merging, mean_of_some
from fastensor.data.engines.base import Value
from fastensor.data.engines.choice import EngineOrAuto, Strategy
from fastensor.data.index import LmdbIndex
from fastensor.data.node.lease import NodeReader
from fastensor.data.plan import Positions
from fastensor.data.reading import READ_AHEAD_NBYTES, ValueReader
from fastensor.data.samplers import AnnouncedBatch
from fastensor.data.staggering import Staggering
from fastensor.data.worker_errors import sendable_errors
from fastensor.errors import UnknownKeyError
from fastensor.files import posix
from fastensor.files.arguments import as_nbytes, check_function, check_word, checks_keywords
from fastensor.files.shown import shown
from fastensor.files.words import counted

T = TypeVar("T", covariant=True)

_SAMPLES = 16
_SAMPLE_NBYTES = 4096
_TOGETHER_NBYTES = 1 << 20
"""An iteration reads so many bytes at once. The kernel reads ahead of them."""
_MOST = 4
"""Largest ratio of the file's values to a dataset's with which the dataset wants most of the file."""


@checks_keywords
class LmdbDataset(Dataset[T], Generic[T]):
    """The values of an LMDB database, decoded, in the order of their keys. The file is only read.

    A dataset can be pickled, and used in forked and spawned processes: each opens what it needs when it first reads.
    Any thread may use it. ``dataset[i]`` reads one sample. A ``DataLoader`` calls ``__getitems__``, which reads a whole
    batch at once. Together with a :class:`~fastensor.data.ReadAheadSampler` or an :class:`~fastensor.data.LmdbLoader`,
    which know the order of an epoch, it also reads ahead.

    Args:
        source: the directory of an environment, its data file, or an index.
        db: the name of a database in the environment; None for the main one.
        decode: makes a sample of a value, a read-only memoryview of its bytes; see :mod:`fastensor.data.decoders`. With
            the engine ``"kvikio"``, the value is a tensor of uint8 on a GPU. By default, samples are ``bytes``, or that
            tensor.
        engine: how values are read:

            - ``"auto"``: ``"mapped"`` while the page cache has the file; otherwise ``"direct"`` if values are large and
              the file larger than memory, or else ``"willneed"``. If values are small, and the file fits into half of
              the memory that is available, together with others that the process has treated so, a thread reads it into
              the page cache from its begin to its end, once a process has read 512 of the values and one in 16; not for
              a selection of less than a quarter of them, nor in the order of the file, nor with ``staggering`` or
              ``reader="node"``
            - ``"mapped"``: the file is mapped; if it is truncated meanwhile, the kernel ends the process
            - ``"pread"``: explicit reads
            - ``"willneed"``: explicit reads that the kernel is told about ahead, unless it reads ahead by itself
            - ``"direct"``: threads read past the page cache
            - ``"kvikio"``: explicit reads to the memory of the current GPU

        read_ahead_nbytes: how many bytes each process reads ahead at most (``"64MiB"``), or one batch if that is more.
            A value of less than 4 KiB counts as 4 KiB, for the page that it is read with.
        merging: what is read together.
        reader: which process reads. ``"process"``: each one for itself. ``"node"``: a process that reads for all ranks
            and workers of the job on this machine (LMM in the paper); this call starts it if it does not run yet. Each
            rank and worker has a ring of ``read_ahead_nbytes`` in shared memory, and decoders get views of it: a sample
            that is a view, and that a forked process has inherited, is valid while the parent keeps it, too. See
            :class:`fastensor.data.node.lease.NodeReader`.
        staggering: how many of the processes that read may do so at a time (STAG in the paper). By default, all.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptDatasetError: the file is damaged, or no LMDB file.
        UnsupportedDatasetError: its version, byte order or encryption is not supported.
        UnknownKeyError: there is no database of that name.
        DatasetChangedError: the file is being written to.
        ValueError: there is no such engine or reader; ``db`` is given with an index; or the engine is ``"kvikio"`` and
            the reader ``"node"``.
        BackendUnavailableError: raised by the first read: the engine cannot be used.
        NodeReaderError: the node reader cannot be started or reached; or, raised by any read, it has ended.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | LmdbIndex,
        db: str | bytes | None = None,
        *,
        decode: Callable[[Any], T] | None = None,
        engine: EngineOrAuto = "auto",
        read_ahead_nbytes: int | str = READ_AHEAD_NBYTES,
        merging: Merging | None = None,
        reader: Literal["process", "node"] = "process",
        staggering: Staggering | None = None,
    ) -> None:
        if isinstance(source, LmdbIndex) and db is not None:
            raise ValueError(f"db= goes with a path: an index is of one database, found an index and db={db!r}")
        check_function(decode, "decode")
        read_ahead_nbytes = as_nbytes(read_ahead_nbytes, "read_ahead_nbytes")
        check_word(reader, "reader", ("process", "node"))
        if reader == "node" and engine == "kvikio":
            raise ValueError("a node reader reads to memory that processes share, not to a GPU: use another engine")
        self._strategy = Strategy(engine, merging or Merging(), staggering)
        self.index = source if isinstance(source, LmdbIndex) else LmdbIndex.open(source, db)
        """Index of the records."""
        self.decode = decode
        self.read_ahead_nbytes = read_ahead_nbytes
        self._node = NodeReader() if reader == "node" else None
        """The reader process runs as long as this handle, or a copy of it in this process."""
        self._positions: Positions | None = None
        """The records of the index that are the samples, if not all are."""
        self._reader: ValueReader | None = None
        self._process = 0
        """The process that has opened the reader."""

    @shown
    def __repr__(self) -> str:
        node = "" if self._node is None else ", reader 'node'"
        return f" of {counted(len(self), 'samples')} in {self.index.path!r}: engine {self._strategy.engine!r}{node}"

    def __len__(self) -> int:
        return len(self.index) if self._positions is None else len(self._positions)

    def __iter__(self) -> Iterator[T]:
        """All samples, in their order, read in batches of 1 MiB at most. Each is decoded when it is asked for. If one
        raises an error, ``next`` goes on behind it."""
        if type(self).__getitem__ is not LmdbDataset.__getitem__:
            return map(self.__getitem__, range(len(self)))  # by itself, Python would take IndexError for the end
        return _InOrder(self)

    def __getitem__(self, position: int) -> T:
        """One sample. Negative positions count from the end.

        Raises:
            IndexError: there is no such sample.
            TypeError: the position is no integer.
            CorruptDatasetError: the file was cut off.
            DatasetChangedError: the file was written to since it was indexed.
            OSError: the file cannot be read.
            ValueError: the index is closed.
        """
        count, position = len(self), operator.index(position)  # integers of NumPy overflow
        if not -count <= position < count:
            raise self._no_sample(position)
        in_index = position % count if self._positions is None else int(self._positions[position])
        with snapshots.naming(self.index.path):
            value = self._opened().read_one(in_index, copied=self.decode is None)
        return self._sample(value, position)

    def __getitems__(self, positions: Sequence[int] | Positions) -> list[T]:
        """The samples of a batch, in its order. See :meth:`__getitem__`."""
        reader = self._opened()
        if reader.reads_ahead and isinstance(positions, AnnouncedBatch) and positions.upcoming:
            reader.expect([self._in_index(batch) for batch in positions.upcoming])
        with snapshots.naming(self.index.path):
            values = reader.read(self._in_index(_integers(positions)), copied=self.decode is None)
        samples = self._decoded(values, positions)
        self.index.check_unchanged()
        return samples

    def read_ahead(self, batches: Iterable[Sequence[int] | Positions]) -> None:
        """Announce batches that this process will ask for next, by ``__getitems__`` and in this order.

        A ``DataLoader`` with a :class:`~fastensor.data.ReadAheadSampler` does this in each worker.

        Raises:
            IndexError: there is no such sample.
        """
        self._opened().expect([self._in_index(_integers(batch)) for batch in batches])

    def get(self, key: bytes) -> T:
        """The sample of a key; the first one, if the key has several. Takes some reads of the file to find it.

        Raises:
            TypeError: the key is no bytes.
            UnknownKeyError: there is no such key, or it is not one of the samples.
        """
        return self[int(self.positions_of([key])[0])]

    def positions_of(self, keys: Iterable[bytes]) -> Positions:
        """The positions of the samples that have these keys, in their order. A key may have several.

        Raises:
            TypeError: a key is no bytes.
            UnknownKeyError: there is no such key, or it is not one of the samples.
        """
        return np.concatenate([np.zeros(0, np.int64), *map(self._positions_of, keys)])

    def select(self, positions: Sequence[int] | Positions) -> Self:
        """A dataset of some of the samples, in this order. Unlike ``torch.utils.data.Subset`` it still reads ahead.

        Raises:
            IndexError: there is no such sample.
            TypeError: positions are no integers. A mask is made into positions by ``numpy.flatnonzero``.
        """
        selected = copy.copy(self)
        selected._positions = self._in_index(_integers(positions)).copy()
        return selected

    @property
    def mean_nbytes(self) -> float:
        """The mean length of the bytes of a sample, estimated from some; 0 without samples."""
        return mean_of_some(self.index.lengths if self._positions is None else self.index.lengths[self._positions])

    @property
    def reading_by(self) -> str:
        """The name of the engine that reads in this process now."""
        return self._opened().engine

    def content_id(self) -> str:
        """Identifies the samples, by their number, and the lengths and first bytes of a few. A copy of the file has the
        same. Reads some pages of the file.
        """
        places = np.linspace(0, len(self) - 1, min(_SAMPLES, len(self))).astype(np.int64)
        positions = self._in_index(places)
        digest = hashlib.blake2b(str(len(self)).encode(), digest_size=16)
        for offset, nbytes in zip(self.index.offsets[positions], self.index.lengths[positions], strict=True):
            digest.update(f",{nbytes}:".encode())
            with snapshots.naming(self.index.path):
                head = posix.read_exactly(self.index.fileno(), int(offset), min(int(nbytes), _SAMPLE_NBYTES))
            digest.update(head)
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    def __copy__(self) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__getstate__())
        return other

    def _together(self, positions: range) -> Iterator[T]:
        """Samples that are read at once, and decoded one by one."""
        try:
            in_index = self._in_index(np.arange(positions.start, positions.stop))
            with snapshots.naming(self.index.path):
                values = self._opened().read(in_index, copied=self.decode is None)
            self.index.check_unchanged()
        except Exception:  # noqa: BLE001  # whatever it is, the samples that have it raise it again
            return map(self.__getitem__, positions)  # those that can be read, and an error for each of the others
        return cast("Iterator[T]", iter(values)) if self.decode is None else map(self._sample, values, positions)

    def _sample(self, value: Value, position: int) -> T:
        sample = self._decoded([value], [position])[0]
        self.index.check_unchanged()
        return sample

    def _decoded(self, values: Sequence[Value], positions: Sequence[int] | Positions) -> list[T]:
        if self.decode is None:
            return cast("list[T]", values)
        decode, samples = self.decode, list[T]()
        try:
            with sendable_errors():
                for value in values:
                    samples.append(decode(value))
        except Exception as error:
            self.index.check_unchanged()
            error.add_note(f"This was sample {positions[len(samples)]} of {self.index.path}")
            if isinstance(error, StopIteration):
                raise RuntimeError("the decoder has raised StopIteration") from error  # it would be taken for the end
            raise
        return samples

    def _opened(self) -> ValueReader:
        """The reader of this process."""
        fd = self.index.fileno()
        if self._reader is None or self._process != os.getpid():
            self._reader = ValueReader(
                fd,
                Extents(self.index.offsets, self.index.lengths),
                self._strategy,
                sweeps=len(self) * _MOST >= len(self.index),
                read_ahead_nbytes=self.read_ahead_nbytes,
                node=self._node,
            )
            self._process = os.getpid()
        return self._reader

    def _positions_of(self, key: bytes) -> Positions:
        found = self.index.find(key)
        if self._positions is None:
            return np.arange(found.start, found.stop)
        positions = np.flatnonzero((self._positions >= found.start) & (self._positions < found.stop))
        if not len(positions):
            raise UnknownKeyError(f"{self.index.path}: the record of the key {key!r} is not one of the samples")
        return positions

    def _no_sample(self, position: int) -> IndexError:
        return IndexError(f"{self.index.path}: it has {counted(len(self), 'samples')}, found position {position}")

    def _in_index(self, positions: Positions) -> Positions:
        """The positions in the index of samples. May be the array itself."""
        count = len(self)
        if not (positions.view(np.uint64) < count).all():  # one comparison: there, negative numbers are large ones
            wrong = (positions < -count) | (positions >= count)
            if wrong.any():
                raise self._no_sample(positions[wrong][0])
            positions = np.where(positions < 0, positions + count, positions)
        return positions if self._positions is None else self._positions[positions]


class _InOrder(Generic[T]):
    """All samples of a dataset. No generator: that would end with the first error."""

    def __init__(self, dataset: LmdbDataset[T]) -> None:
        self._dataset = dataset
        self._count = len(dataset)
        self._nbytes = min(_TOGETHER_NBYTES, dataset.read_ahead_nbytes)
        self._most = max(int(self._nbytes / max(dataset.mean_nbytes, 1)), 1)
        """Samples of a batch at most. It has fewer where they are longer than elsewhere."""
        self._end = 0
        self._batch: Iterator[T] = iter(())
        """The samples before number ``_end`` that were not given yet."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        while True:
            for sample in self._batch:
                return sample
            if self._end == self._count:
                raise StopIteration
            positions = np.arange(self._end, min(self._end + self._most, self._count))
            nbytes = np.cumsum(self._dataset.index.lengths[self._dataset._in_index(positions)])
            end = self._end + max(int(np.searchsorted(nbytes, self._nbytes, side="right")), 1)
            self._batch, self._end = self._dataset._together(range(self._end, end)), end


def _integers(positions: Sequence[int] | Positions) -> Positions:
    found = np.asarray(positions)
    if found.dtype.kind not in "iu" and len(found):
        instead = ": use numpy.flatnonzero(mask)" if found.dtype.kind == "b" else ""
        raise TypeError(f"positions are integers, found {found.dtype}{instead}")
    return found.astype(np.int64, copy=False)
