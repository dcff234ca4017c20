"""The engine ``mapped``: values are views of the file's pages in the page cache. Nothing is copied."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

from fastensor.data.coalescing import Extents
from fastensor.data.engines.base import Value, copies_of_parts
from fastensor.files import posix


class MappedEngine:
    """Maps the file. See :class:`fastensor.data.engines.base.Engine`.

    Fastest for files that are in the page cache. For others, each page that is touched is read by itself, while the
    process waits. If the file is truncated while a value is in use, the kernel ends the process (SIGBUS).

    Args:
        fd: open for reading, of a file that is not empty. May be closed afterwards.
    """

    name = "mapped"
    reads_ahead = False

    def __init__(self, fd: int) -> None:
        mapping = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
        with suppress(OSError):  # advice only
            mapping.madvise(mmap.MADV_RANDOM)
        self._mapping: mmap.mmap | bytes = mapping  # the last view unmaps the file

    def fetch(self, extents: Extents) -> MappedFetch:
        return MappedFetch(self._mapping, extents)

    def close(self) -> None:
        self._mapping = b""


class MappedFetch:
    """See :class:`fastensor.data.engines.base.Fetch`."""

    def __init__(self, mapping: mmap.mmap | bytes, extents: Extents) -> None:
        self._mapping = mapping
        self._extents = extents

    def take(self, begin: int, end: int, *, copied: bool = False) -> list[Value]:
        offsets, lengths = self._extents.offsets[begin:end], self._extents.lengths[begin:end]
        ends = offsets + lengths
        if len(ends) and (last := int(ends.max())) > len(self._mapping):
            raise posix.EndOfFile(f"the file ends before offset {last}")
        if copied:
            return copies_of_parts(self._mapping, offsets, lengths)
        memory = memoryview(self._mapping)
        return [memory[begin:end] for begin, end in zip(offsets.tolist(), ends.tolist(), strict=True)]
