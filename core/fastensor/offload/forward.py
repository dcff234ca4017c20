"""One forward pass: the ranges that it has saved, and the order in which its backward pass will need them: that of the
last backward pass of the same form, or the reverse of the forward pass."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, takewhile

import torch

from fastensor.offload.planner import BlockRecord, PassRecord, SavedTensor
from fastensor.offload.saved import SavedBytes
from fastensor.offload.swapper import Swapper

_MOST_AHEAD = 64
"""The most ranges that are read ahead."""
_LOOK_AGAIN_AFTER = 4
"""A backward pass looks at what comes next when it has taken one in so many of the ranges that were in memory or being
read at the last look. So reader threads are woken for several ranges at once, and most tensors cost less."""
_MOST_FORMS = 16
"""Forms of forward passes whose order is remembered: the latest."""
_INPUTS, _ALL = 0, 1
"""What a block saves."""
_SLACK = 8
"""Places by which a node of the graph may come later than in the last backward pass, and is still expected."""


class PrefetchSchedules:
    """The orders of recent backward passes, by the form of the forward pass. Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[int, list[int]] = OrderedDict()

    def begin(self, form: int, saved: Sequence[int]) -> PrefetchSchedule:
        """The schedule of a backward pass that begins.

        Args:
            form: a hash of what the forward pass has saved.
            saved: positions of saved tensors, in the order in which nodes have saved them. Several nodes may save the
                same position.
        """
        with self._lock:
            schedule = PrefetchSchedule(complete(self._known.pop(form, []), saved))
            self._known[form] = schedule.taken
            if len(self._known) > _MOST_FORMS:
                self._known.popitem(last=False)
            return schedule


def complete(known: Sequence[int], saved: Sequence[int]) -> list[int]:
    """The expected order of everything that was saved: the known part first, then the rest in reverse.

    >>> complete([], [0, 1, 0, 2]), complete([0, 2, 0], [0, 1, 0, 2, 3])
    ([2, 0, 1, 0], [0, 2, 0, 3, 1])
    """
    there = set(saved)
    first = [position for position in known if position in there]
    known_now = set(first)
    return first + [position for position in reversed(saved) if position not in known_now]


class PrefetchSchedule:
    """Positions that one backward pass has taken, and those that it is expected to take next. A position that several
    nodes have saved is taken several times."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._left = OrderedDict(enumerate(expected))
        """The positions that are still to come, by their places in the order."""
        self._passed = OrderedDict[int, int]()
        """Positions that were passed over: later ones were taken before them. They are expected last."""
        self._places: dict[int, list[int]] = {}
        """By position, its places, the nearest one last."""
        for place in reversed(self._left):
            self._places.setdefault(expected[place], []).append(place)
        self.taken: list[int] = []
        """Positions in the order in which they were taken."""
        self._seen: set[int] = set()

    def take(self, position: int) -> bool:
        """Note that a position is needed now. What it is taken far in front of is expected last.

        Returns:
            Whether that was expected, or the position was taken as often as it was expected.
        """
        seen = position in self._seen
        self._seen.add(position)
        self.taken.append(position)
        places = self._places.get(position, [])
        while places and places[-1] not in self._left and places[-1] not in self._passed:
            places.pop()
        if not places:
            return seen
        place = places.pop()
        among = self._left if place in self._left else self._passed
        first = next(iter(among))
        del among[place]
        if place - first <= _SLACK:
            return True
        if among is self._left:
            for passed in list(takewhile(lambda one: one < place, self._left)):
                self._passed[passed] = self._left.pop(passed)
        return False

    def upcoming(self, is_there: Callable[[int], bool] = lambda position: True) -> Iterator[int]:
        """The positions that are expected next, in order.

        Args:
            is_there: whether a graph still holds a position. A position that no graph holds is struck out, and not
            asked about again.

        >>> schedule = PrefetchSchedule([2, 1, 2, 0])
        >>> schedule.take(2), list(schedule.upcoming()), list(schedule.upcoming(lambda position: position != 2))
        (True, [1, 2, 0], [1, 0])
        """
        gone = []
        try:
            for place, position in chain(self._left.items(), self._passed.items()):
                if is_there(position):
                    yield position
                else:
                    gone.append(place)
        finally:
            for place in gone:
                self._left.pop(place, None)
                self._passed.pop(place, None)


class ForwardPass:
    """The ranges that were saved in a row, before any of them was needed again.

    One thread adds ranges; any thread asks for them. The graph keeps the object alive; the object keeps no range alive.

    Args:
        swapper: moves the ranges.
        schedules: the orders of the last backward passes.
        record: what planners want to know of the pass.
    """

    def __init__(self, swapper: Swapper, schedules: PrefetchSchedules, record: PassRecord) -> None:
        self.swapper = swapper
        self._schedules = schedules
        self._lock = threading.Lock()
        self._ranges: list[Callable[[], SavedBytes | None]] = []
        """By position."""
        self._saved: list[int] = []
        """Positions, in the order in which nodes have saved them."""
        self.record = record
        self._scope = record.form
        """A hash of what was saved so far in the block that runs, or outside of blocks."""
        self._outside = 0
        """The same, outside of the block that runs."""
        self._block: int | None = None
        """The block that runs."""
        self._schedule: PrefetchSchedule | None = None
        self._expected_takes = 0
        """Ranges that may be needed before the schedule is looked at again, if they come as expected."""

    @property
    def next_position(self) -> int:
        return len(self._ranges)

    def mark(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> int:
        """A number for the tensor that is saved now: the same one in each forward pass that has saved the same so far
        in the block, or outside of blocks. So it is the same if other blocks save their inputs only."""
        self._scope = hash((self._scope, nbytes, dtype, device))
        self.record.form = hash((self.record.form, self._scope))
        return self._scope

    def begin_block(
        self, name: str, inputs: Sequence[tuple[int, torch.dtype, torch.device, bool]], *, is_pure: bool
    ) -> BlockRecord:
        """Note that a block of the model is about to begin.

        Args:
            name: of the block.
            inputs: bytes, dtypes and devices of what would be saved of its inputs; and whether the bytes count: those
                that several blocks get count once.
            is_pure: see :class:`BlockRecord`.
        """
        record, number = self.record, len(self.record.blocks)
        if not number:
            record.opening = hash((self._scope, *inputs))
        self._outside, self._block = self._scope, number
        self._scope = hash((number, _INPUTS, record.opening))
        marks = [(self.mark(nbytes, dtype, device), nbytes * counts) for nbytes, dtype, device, counts in inputs]
        record.blocks.append(block := BlockRecord(name, inputs=marks, is_pure=is_pure))
        return block

    def run_block(self, clock: float, can_be_recomputed: Callable[[], bool]) -> bool:
        """Note that the block runs.

        Args:
            clock: the time.
            can_be_recomputed: says whether nothing forbids it.

        Returns:
            Whether it saves its inputs only, as was planned.
        """
        assert self._block is not None
        self.record.blocks[self._block].begun_at = clock
        saves_inputs = self._block in self.record.recomputed and can_be_recomputed()
        self._scope = hash((self._block, _INPUTS if saves_inputs else _ALL, self.record.opening))
        return saves_inputs

    def end_block(self, clock: float) -> None:
        """Note that the block ends."""
        if self._block is not None:
            block = self.record.blocks[self._block]
            block.seconds = clock - block.begun_at
            self._scope, self._block = self._outside, None

    def note_needed(self, position: int, clock: float, saved: SavedBytes | None = None) -> None:
        """Note when a tensor is needed, and whether its range was written until it is needed first."""
        tensor = self.record.tensors[position]
        tensor.last_needed_at = clock
        tensor.holders -= 1
        if tensor.needed_at is None:
            tensor.needed_at = clock
            if saved is not None and saved.source is None and (stored := saved.stored) is not None:
                self.record.moved_nbytes += stored.nbytes

    def add(self, saved: SavedBytes | None, tensor: SavedTensor) -> None:
        """Note a saved tensor.

        Args:
            saved: its range; None if it stays in memory, so that positions are the same in each pass.
            tensor: what planners want to know of it.
        """
        tensor.block = self._block
        with self._lock:
            self.record.tensors.append(tensor)
            self._saved.append(len(self._ranges))
            self._ranges.append(_no_range if saved is None else weakref.ref(saved))

    def add_again(self, position: int | None, saved: SavedBytes | None, clock: float) -> int:
        """Note that another node saves bytes that were saved before.

        Args:
            position: where they were saved in this pass; None if that was in an earlier one.
            saved: their range; None if they stay in memory.
            clock: the time.

        Returns:
            Their position in this pass.
        """
        if position is None:
            position = len(self._ranges)
            self.add(saved, self.record.nothing(clock))
        else:
            self._saved.append(position)
            self.record.tensors[position].holders += 1
        self.record.form = hash((self.record.form, position))
        return position

    def look_ahead(self, needed: SavedBytes, position: int) -> list[SavedBytes]:
        """Note that a range is needed now.

        Returns:
            The ranges that will be needed next, in order. None of them if all is as expected, and most of what
            :meth:`note_read_ahead` has counted is still to come.
        """
        with self._lock:
            if self._schedule is None:
                self._schedule = self._schedules.begin(self.record.form, self._saved)
            expected = not needed.unread or self._schedule.take(position)  # backward passes may be repeated
            if expected and self._expected_takes and not needed.is_to_be_read:
                self._expected_takes -= 1
                return []
            upcoming = self._schedule.upcoming(lambda position: self._ranges[position]() is not None)
            ranges = [self._ranges[position]() for position in islice(upcoming, _MOST_AHEAD)]
            return [saved for saved in ranges if saved is not None]

    def note_read_ahead(self, count: int) -> None:
        """Note how many of the ranges that will be needed next will not have to be waited for long: see
        :meth:`fastensor.offload.swapper.Swapper.read_ahead`."""
        with self._lock:
            self._expected_takes = count // _LOOK_AGAIN_AFTER


def _no_range() -> None:
    """Stands for the weak reference of a tensor that stays in memory."""
