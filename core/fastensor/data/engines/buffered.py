"""The engines ``pread`` and ``willneed``: explicit reads through the page cache."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np

from fastensor.data.coalescing import STREAM_GAPS, Extents, Merging, coalesce, ends_before, is_stream, spans
from fastensor.data.engines.base import Fetch, ReadsFetch
from fastensor.files import posix

_STREAM_NBYTES = 1 << 20
"""Size of reads in the order of the file, of small values. If the kernel reads as far ahead of them, they need no
advice: large folios take a fifth of the time of the pages that advice brings, one by one. By Linux's usual 128 KiB each
of these reads would wait for the disk: it is told to bring all pages of the stream."""
_COPIED_GAP_NBYTES = 4 << 10
"""A stream is read with its gaps if most are not larger: to copy a page that nobody wants takes less time than another
read. Otherwise the kernel is told, too, and values are read one by one. Other processes that take every n-th value,
too, find theirs in the page cache."""
_FAR = 4
"""But only if it is known for more than so many spans: of what comes later, the kernel would not be told in time, and
it reads ahead by itself of large reads only."""
_NOWHERE = -1 << 62
_READ_NBYTES = 64 << 10
"""With advice, reads are merged up to this size only. Larger ones are no faster, since many are under way. And a value
that is larger has a read of its own then, which is the value without a copy; in the order of the file, too."""


class BufferedEngine:
    """Reads with ``pread``. See :class:`fastensor.data.engines.base.Engine`.

    Args:
        fd: open for reading. The caller keeps ownership.
        merging: what is read together.
        advise: tell the kernel ahead what will be read (``posix_fadvise``, POSIX_FADV_WILLNEED), unless it reads ahead
            of that by itself. The kernel then reads into the page cache, with many reads in flight, while the caller
            goes on.
    """

    reads_ahead = True

    def __init__(self, fd: int, merging: Merging, *, advise: bool) -> None:
        self.name = "willneed" if advise else "pread"
        self._fd = fd
        self._advise = advise
        gap_nbytes, read_nbytes = merging.gap_nbytes, merging.read_nbytes
        self._merging = Merging(gap_nbytes, min(read_nbytes, _READ_NBYTES)) if advise else merging
        self._stream = Merging(STREAM_GAPS * gap_nbytes, min(read_nbytes, _STREAM_NBYTES))
        self._copied = replace(self._merging, gap_nbytes=min(gap_nbytes, _COPIED_GAP_NBYTES))
        self._kernel_streams = posix.read_ahead_nbytes(fd) >= _STREAM_NBYTES
        self._end = _NOWHERE
        """Where the last value ends that was fetched."""

    def fetch(self, extents: Extents) -> Fetch:
        streams = self._advise and is_stream(extents, self._end, self._stream.gap_nbytes)
        small = streams and extents.lengths.mean() < _READ_NBYTES
        far = extents.offsets[-1] - extents.offsets[0] > _FAR * self._stream.read_nbytes
        copied = self._kernel_streams and is_stream(extents, self._end, self._copied.gap_nbytes)
        told = small and far and not copied
        merging = self._copied if told else self._stream if small else self._merging
        reads = coalesce(extents, merging)
        if told:
            advice = spans(reads, self._stream)
        else:
            gaps = reads.offsets - ends_before(reads.offsets, reads.lengths, self._end)
            follows = streams & (gaps >= 0) & (gaps <= self._stream.gap_nbytes)
            advice = Extents(reads.offsets, np.where(follows, 0, reads.lengths))
        self._end = int(extents.offsets[-1] + extents.lengths[-1])
        offsets, lengths = reads.offsets.tolist(), reads.lengths.tolist()
        advised_offsets, advised_lengths = advice.offsets.tolist(), advice.lengths.tolist()

        def begin(read: int) -> None:
            if self._advise and (nbytes := advised_lengths[read]):
                posix.will_need(self._fd, advised_offsets[read], nbytes)

        def finish(read: int) -> bytes:
            return read_up_to(self._fd, offsets[read], lengths[read])

        return ReadsFetch(extents, reads, begin, finish)

    def close(self) -> None:
        pass


def read_up_to(fd: int, offset: int, nbytes: int) -> bytes:
    """``nbytes`` bytes of a file from ``offset`` on; fewer where the file ends."""
    data = os.pread(fd, nbytes, offset)
    if len(data) == nbytes:
        return data
    whole = memoryview(bytearray(nbytes))
    return bytes(whole[: posix.read_fully(fd, whole, offset)])
