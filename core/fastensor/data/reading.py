"""Values of one file by their positions, read ahead in the order that was announced."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import numpy as np

from fastensor.data.coalescing import STREAM_GAPS, Extents, is_stream, mean_of_some
from fastensor.data.engines.base import Engine, Fetch, Value
from fastensor.data.engines.choice import LARGE_NBYTES, EngineName, Strategy, choose_engine, open_engine
from fastensor.data.node.engine import NodeEngine
from fastensor.data.node.lease import NodeReader
from fastensor.data.node.protocol import Opening
from fastensor.data.plan import Positions
from fastensor.data.sweeping import Sweep, begin_sweep
from fastensor.files import posix

READ_AHEAD_NBYTES = 32 << 20
_LEAST_RING_NBYTES = 1 << 20
_LEAST_BROUGHT_NBYTES = 4 << 10
"""Least bytes that a value brings: pages are read as a whole, and kept until their values are taken."""
_CHOICES_PER_PASS = 8
_LEAST_VALUES_PER_CHOICE = 1024
_FIRST_CHOICE_SOONER = 2
"""The first choice after the file was opened is due this many times sooner: by then it is likely that the rest of the
values will be wanted, and a sweep can begin."""


@dataclass(slots=True)
class _Announced:
    """A batch that will be read: values ``begin`` to before ``end`` of a fetch, if an engine has begun to bring it."""

    key: bytes
    """The positions as bytes, which are quick to compare."""
    nbytes: int = 0
    """Bytes that are brought for the batch; 0 before it was begun."""
    fetch: Fetch | None = None
    begin: int = 0
    end: int = 0


class ValueReader:
    """Reads values of an open file in one process. Any thread may call any method; one works at a time.

    Args:
        fd: open for reading. The caller keeps ownership, and keeps it open.
        extents: where each value is, by position.
        strategy: how values are read. The engine ``"auto"`` is chosen anew several times while all values are read
            once, so an epoch that has brought the file into the page cache is followed by one that maps it. A node
            reader chooses it once.
        sweeps: whether most values of the file are wanted. If the engine is ``"auto"``, a file that fits into memory is
            then swept into the page cache (:mod:`fastensor.data.sweeping`).
        read_ahead_nbytes: about this many bytes at most, or one batch, are being brought, or are there and not taken
            yet. A small value counts for a page.
        node: the process that reads for this one; None if this one reads for itself.

    Raises:
        BackendUnavailableError: the engine cannot read this file, or cannot work on this machine.
        NodeReaderError: the node reader cannot be reached.
        OSError: the store for staggering cannot be reached.
    """

    def __init__(
        self,
        fd: int,
        extents: Extents,
        strategy: Strategy,
        *,
        sweeps: bool = False,
        read_ahead_nbytes: int,
        node: NodeReader | None = None,
    ) -> None:
        self._fd = fd
        self._extents = extents
        self._strategy = strategy
        self._read_ahead_nbytes = read_ahead_nbytes
        self._node = node
        self._chooses = strategy.engine == "auto" and node is None
        self._until_choice = self._values_per_choice // _FIRST_CHOICE_SOONER
        self._mean_nbytes = mean_of_some(extents.lengths)
        self._sweep: Sweep | None = None
        small = self._mean_nbytes < LARGE_NBYTES  # others are read at the speed of the disk in any order
        self._sweeps = sweeps and small and self._chooses and strategy.staggering is None
        self._engine = self._open()
        self._interrupted = False
        """True if an interrupt, or want of memory, has cut the engine short, so that its next values may be lost."""
        self._expected: deque[_Announced] = deque()
        """Batches that were announced, and not read yet."""
        self._begun = 0
        """Number of those that were begun: the first ones."""
        self.begun_nbytes = 0
        """Bytes that are being brought, or are there and not taken yet."""
        self._lock = threading.Lock()

    @property
    def engine(self) -> str:
        """The name of the engine that is in use."""
        return self._engine.name

    @property
    def reads_ahead(self) -> bool:
        """True if announced batches are read ahead, by the engine that is in use, or by one that may be chosen
        later."""
        return self._engine.reads_ahead or self._chooses

    def expect(self, batches: Iterable[Positions]) -> None:
        """Announce batches that will be read, in this order, after those announced before.

        Reading a batch cancels those that were announced before it. Until then, a batch that is never read takes the
        memory of its values.
        """
        with self._lock:
            self._expected.extend(_Announced(positions.tobytes()) for positions in batches if len(positions))

    def read(self, positions: Positions, *, copied: bool = False) -> Sequence[Value]:
        """The values at positions, in their order; as ``bytes`` if ``copied``, but tensors stay tensors. Positions may
        repeat.

        Raises:
            OSError: the file cannot be read.
            fastensor.files.posix.EndOfFile: the file ends before a value does.
        """
        if not len(positions):
            return []
        with self._lock:
            try:
                self._choose_anew(positions)
                fetch, begin, end = self._fetch_of(positions)
                self._begin_expected()
                return fetch.take(begin, end, copied=copied)
            except BaseException as error:
                self._give_up(error)
                raise

    def read_one(self, position: int, *, copied: bool = False) -> Value:
        """The value at a position from 0 on, quickly and without regard to what was announced. See :meth:`read`."""
        extents = self._extents.at(slice(position, position + 1))
        with self._lock:
            try:
                self._choose_anew(np.array([position]))
                return self._engine.fetch(extents).take(0, 1, copied=copied)[0]
            except BaseException as error:
                self._give_up(error)
                raise

    def close(self) -> None:
        """Give up what was announced, and the engine. In a forked child, only the child's own resources."""
        self._take_announced(len(self._expected))
        if self._sweep is not None:
            self._sweep.stop()
        self._engine.close()

    def _fetch_of(self, positions: Positions) -> tuple[Fetch, int, int]:
        """Fetch of these values, already begun if they were announced."""
        key = positions.tobytes()
        place = next((place for place, one in enumerate(self._expected) if one.key == key), None)
        batch = None if place is None else self._take_announced(place + 1)
        if batch is None or batch.fetch is None:
            return self._engine.fetch(self._extents.at(positions)), 0, len(positions)
        return batch.fetch, batch.begin, batch.end

    def _take_announced(self, count: int) -> _Announced | None:
        """Take the first batches off those that were announced. Returns the last one."""
        batch = None
        for _ in range(count):
            batch = self._expected.popleft()
            self.begun_nbytes -= batch.nbytes
        self._begun = max(self._begun - count, 0)
        return batch

    def _begin_expected(self) -> None:
        """Begin to bring the next batches that were announced, as many as memory allows, if less than half is begun."""
        if not self._engine.reads_ahead or self.begun_nbytes > self._read_ahead_nbytes // 2:
            return
        before, end = self._begun, 0
        parts: list[Positions] = []
        for batch in islice(self._expected, before, None):
            positions = np.frombuffer(batch.key, np.int64)
            nbytes = int(np.maximum(self._extents.lengths[positions], _LEAST_BROUGHT_NBYTES).sum())
            if self.begun_nbytes + nbytes > self._read_ahead_nbytes and self._begun:
                break
            batch.nbytes, batch.begin, batch.end = nbytes, end, end + len(positions)
            end = batch.end
            parts.append(positions)
            self._begun += 1
            self.begun_nbytes += nbytes
        if parts:
            fetch = self._engine.fetch(self._extents.at(np.concatenate(parts)))
            for batch in islice(self._expected, before, self._begun):
                batch.fetch = fetch

    def _choose_anew(self, wanted: Positions) -> None:
        """Choose the engine again now and then, if it is ours to choose; and open another one after an interrupt."""
        self._until_choice -= len(wanted)
        if self._chooses and (self._until_choice <= 0 or (self._sweep is not None and self._sweep.is_over)):
            self._until_choice = self._values_per_choice
            if self._wanted_engine(self._extents.at(wanted)) != self._engine.name:
                for batch in islice(self._expected, self._begun):
                    batch.nbytes, batch.fetch = 0, None
                self._begun = self.begun_nbytes = 0
                self._replace_engine()
        if self._interrupted:
            self._replace_engine()

    def _wanted_engine(self, wanted: Extents) -> EngineName:
        """The engine that is the fastest now. Begins a sweep if it pays. In the order of the file, reads need none."""
        name = choose_engine(self._fd, self._mean_nbytes)
        if self._sweep is not None and self._sweep.is_over:
            self._sweep = None
        gap_nbytes = STREAM_GAPS * self._strategy.merging.gap_nbytes
        if self._sweeps and name == "willneed" and not is_stream(wanted, int(wanted.offsets[0]), gap_nbytes):
            nbytes = os.fstat(self._fd).st_size
            missing = nbytes * (1 - posix.resident_fraction(self._fd, nbytes))
            with suppress(OSError, RuntimeError):  # no descriptor or thread for it: values are read all the same
                self._sweep = begin_sweep(self._fd, nbytes, missing)
            if self._sweep is not None:
                weakref.finalize(self, self._sweep.stop).atexit = False
                self._sweeps = False  # once: what has left the page cache since would leave it again
        return name if self._sweep is None else "pread"  # advice would be for reads in the way of the sweep

    def _replace_engine(self) -> None:
        replaced, self._engine = self._engine, self._open()
        self._interrupted = False
        replaced.close()

    def _open(self) -> Engine:
        if self._sweep is not None:
            return open_engine("pread", self._fd, self._strategy.merging)
        if self._node is None:
            return self._strategy.open(self._fd, self._mean_nbytes)
        ring_nbytes = max(self._read_ahead_nbytes, _LEAST_RING_NBYTES)
        return NodeEngine(self._node, self._fd, Opening(self._strategy, self._mean_nbytes, ring_nbytes))

    @property
    def _values_per_choice(self) -> int:
        return max(len(self._extents) // _CHOICES_PER_PASS, _LEAST_VALUES_PER_CHOICE)

    def _give_up(self, error: BaseException) -> None:
        """Forget what was begun: batches may share the read that has failed, or that an interrupt has cut short."""
        self._take_announced(self._begun)
        self._interrupted |= isinstance(error, MemoryError) or not isinstance(error, Exception)
