"""The engines ``pread`` and ``willneed``: explicit reads through the page cache."""

from __future__ import annotations

import os

from fastensor.data.coalescing import STREAM_GAPS, Extents, Merging, coalesce, is_stream
from fastensor.data.engines.base import Fetch, ReadsFetch
from fastensor.files import posix

_STREAM_NBYTES = 1 << 20
"""Size of reads in the order of the file, of small values."""
_COPIED_GAP_NBYTES = 4 << 10
"""In the order of the file, gaps up to this are read, too: to copy a page that nobody wants takes less time than
another read."""
_NOWHERE = -1 << 62
_READ_NBYTES = 64 << 10
"""With advice, reads are merged up to this size only. Larger ones are no faster, since many are under way. And a value
that is larger has a read of its own then, which is the value without a copy; in the order of the file, too."""


class BufferedEngine:
    """Reads with ``pread``. See :class:`fastensor.data.engines.base.Engine`.

    Args:
        fd: open for reading. The caller keeps ownership.
        merging: what is read together.
        advise: tell the kernel ahead what will be read (``posix_fadvise``, POSIX_FADV_WILLNEED). The kernel then reads
            into the page cache, with many reads in flight, while the caller goes on. In the order of the file, it is
            not told: its own read-ahead brings large folios, which takes a fifth of the time of the pages that advice
            brings, one by one. And it goes on where another process is that reads every n-th value, too.
    """

    reads_ahead = True

    def __init__(self, fd: int, merging: Merging, *, advise: bool) -> None:
        self.name = "willneed" if advise else "pread"
        self._fd = fd
        self._advise = advise
        gap_nbytes, read_nbytes = merging.gap_nbytes, merging.read_nbytes
        self._merging = Merging(gap_nbytes, min(read_nbytes, _READ_NBYTES)) if advise else merging
        self._stream = Merging(min(gap_nbytes, _COPIED_GAP_NBYTES), min(read_nbytes, _STREAM_NBYTES))
        self._stream_gap_nbytes = STREAM_GAPS * gap_nbytes
        self._end = _NOWHERE
        """Where the last value ends that was fetched."""

    def fetch(self, extents: Extents) -> Fetch:
        streams = self._advise and is_stream(extents, self._end, self._stream_gap_nbytes)
        small = extents.lengths.mean() < _READ_NBYTES
        reads = coalesce(extents, self._stream if streams and small else self._merging)
        advises = self._advise and not streams
        self._end = int(extents.offsets[-1] + extents.lengths[-1])
        offsets, lengths = reads.offsets.tolist(), reads.lengths.tolist()

        def begin(read: int) -> None:
            if advises:
                posix.will_need(self._fd, offsets[read], lengths[read])

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
