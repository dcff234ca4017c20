"""Values of one file by their positions, read ahead in the order that was announced."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from fastensor.data.coalescing import Extents, Integers, Merging, mean_of_some
from fastensor.data.engines.base import Engine, Fetch, Value
from fastensor.data.engines.choice import EngineName, choose_engine, open_chosen, open_engine
from fastensor.data.node.engine import NodeEngine
from fastensor.data.node.lease import NodeReader
from fastensor.data.plan import Positions
from fastensor.data.staggering import StaggeredEngine, Staggering

EngineOrAuto: TypeAlias = EngineName | Literal["auto"]
"""A way to read a file, or that the fastest is to be chosen."""
READ_AHEAD_NBYTES = 32 << 20
_LEAST_RING_NBYTES = 1 << 20
_CHOICES_PER_PASS = 8
_LEAST_VALUES_PER_CHOICE = 4096


class _Begun(NamedTuple):
    """A batch that an engine has begun to bring: values ``begin`` to before ``end`` of a fetch."""

    key: bytes
    """The positions as bytes, which are quick to compare."""
    positions: Positions
    nbytes: int
    fetch: Fetch
    begin: int
    end: int


class ValueReader:
    """Reads values of an open file in one process. Any thread may call any method; one works at a time.

    Args:
        fd: open for reading. The caller keeps ownership, and keeps it open.
        extents: where each value is, by position.
        engine: the way to read. With ``"auto"`` the choice is made anew several times while all values are read once:
            an epoch that has brought the file into the page cache is followed by one that maps it.
        read_ahead_nbytes: values of at most this many bytes, or one batch, are being brought, and not taken yet.
        merging: what is read together.
        node: the process that reads for this one; None if this one reads for itself. The node reader chooses the engine
            when a process begins to read.
        staggering: when files may be read.

    Raises:
        BackendUnavailableError: the engine cannot read this file, or cannot work on this machine.
        NodeReaderError: the node reader cannot be reached.
        OSError: the store for staggering cannot be reached.
        ValueError: there is no such engine.
    """

    def __init__(
        self,
        fd: int,
        extents: Extents,
        *,
        engine: EngineOrAuto,
        read_ahead_nbytes: int,
        merging: Merging,
        node: NodeReader | None = None,
        staggering: Staggering | None = None,
    ) -> None:
        self._fd = fd
        self._extents = extents
        self._merging = merging
        self._read_ahead_nbytes = read_ahead_nbytes
        self._node = node
        self._staggering = staggering
        self._name: EngineOrAuto = engine
        self._chooses = engine == "auto" and node is None
        self._until_choice = self._values_per_choice
        self._mean_nbytes = mean_of_some(extents.lengths)
        self._engine = self._open()
        self._expected: deque[tuple[bytes, Positions]] = deque()
        """Batches that were announced and not begun, by keys as in ``_Begun``."""
        self._begun: deque[_Begun] = deque()
        self._begun_nbytes = 0
        self._lock = threading.Lock()

    @property
    def engine(self) -> str:
        """The name of the engine that is in use."""
        return self._engine.name

    @property
    def begun_nbytes(self) -> int:
        """Bytes of the values that are being brought, and not taken yet."""
        return self._begun_nbytes

    def expect(self, batches: Iterable[Positions]) -> None:
        """Announce batches that will be read, in this order, after those announced before.

        A batch that is read earlier than batches before it cancels those. A batch that is never read costs the memory
        of its values until then.
        """
        with self._lock:
            self._expected.extend((positions.tobytes(), positions) for positions in batches)

    def read(self, positions: Positions) -> Sequence[Value]:
        """The values at positions, in their order. Positions may repeat.

        Raises:
            OSError: the file cannot be read.
            fastensor.files.posix.EndOfFile: the file ends before a value does.
        """
        if not len(positions):
            return []
        with self._lock:
            try:
                self._choose_anew(len(positions))
                fetch, begin, end = self._fetch_of(positions)
                self._begin_expected()
                return fetch.take(begin, end)
            except BaseException:
                self._forget_begun()  # a read that has failed, or whose bytes are lost, may be shared by other batches
                raise

    def read_one(self, position: int) -> Value:
        """The value at a position from 0 on, quickly and without regard to what was announced. See :meth:`read`."""
        here = slice(position, position + 1)
        with self._lock:
            self._choose_anew(1)
            return self._engine.fetch(Extents(self._extents.offsets[here], self._extents.lengths[here])).take(0, 1)[0]

    def close(self) -> None:
        """Give up what was announced, and the engine. In a forked child, only the child's own resources."""
        self._expected.clear()
        self._begun.clear()
        self._engine.close()

    def _fetch_of(self, positions: Positions) -> tuple[Fetch, int, int]:
        """What brings these values: a fetch that has begun, if they were announced."""
        key = positions.tobytes()
        for number, begun in enumerate(self._begun):
            if begun.key == key:
                for _ in range(number + 1):
                    self._begun_nbytes -= self._begun.popleft().nbytes
                return begun.fetch, begun.begin, begun.end
        for number, (expected, _) in enumerate(self._expected):
            if expected == key:
                self._forget_begun()
                for _ in range(number + 1):
                    self._expected.popleft()
                break
        return self._engine.fetch(self._extents_of(positions)), 0, len(positions)

    def _begin_expected(self) -> None:
        """Begin to bring the next batches that were announced, as many as memory allows, if less than half is begun."""
        if not self._engine.reads_ahead or self._begun_nbytes > self._read_ahead_nbytes // 2:
            return
        room = self._read_ahead_nbytes - self._begun_nbytes
        batches: list[tuple[bytes, Positions, int]] = []
        while self._expected:
            key, positions = self._expected[0]
            nbytes = int(self._extents.lengths[positions].sum())
            if nbytes > room and (batches or self._begun):
                break
            room -= nbytes
            batches.append((key, positions, nbytes))
            self._expected.popleft()
        if not batches:
            return
        fetch = self._engine.fetch(self._extents_of(np.concatenate([positions for _, positions, _ in batches])))
        begin = 0
        for key, positions, nbytes in batches:
            self._begun.append(_Begun(key, positions, nbytes, fetch, begin, begin + len(positions)))
            self._begun_nbytes += nbytes
            begin += len(positions)

    def _choose_anew(self, count: int) -> None:
        """Choose the engine again now and then, if it is ours to choose."""
        self._until_choice -= count
        if not self._chooses or self._until_choice > 0:
            return
        self._until_choice = self._values_per_choice
        if choose_engine(self._fd, self._mean_nbytes) != self._engine.name:
            self._expected.extendleft((begun.key, begun.positions) for begun in reversed(self._begun))
            self._forget_begun()
            self._engine.close()
            self._engine = self._open()

    def _open(self) -> Engine:
        if self._node is not None:
            return NodeEngine(
                self._node,
                self._fd,
                engine=self._name,
                merging=self._merging,
                ring_nbytes=max(self._read_ahead_nbytes, _LEAST_RING_NBYTES),
                mean_nbytes=self._mean_nbytes,
                staggering=self._staggering,
            )
        engine: Engine = (
            open_chosen(self._fd, self._mean_nbytes, self._merging)
            if self._name == "auto"
            else open_engine(self._name, self._fd, self._merging)
        )
        return engine if self._staggering is None else StaggeredEngine(engine, self._staggering)

    @property
    def _values_per_choice(self) -> int:
        return max(len(self._extents) // _CHOICES_PER_PASS, _LEAST_VALUES_PER_CHOICE)

    def _forget_begun(self) -> None:
        self._begun.clear()
        self._begun_nbytes = 0

    def _extents_of(self, positions: Positions) -> Extents:
        return Extents(_taken(self._extents.offsets, positions), _taken(self._extents.lengths, positions))


def _taken(numbers: Integers, positions: Positions) -> Integers:
    return np.asarray(numbers[positions])
