"""One forward pass: the ranges that it has saved, and in which order its backward pass will need them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeAlias

import torch

from fastensor.offload.planner import PassRecord, SavedTensor
from fastensor.offload.prefetch_schedule import PrefetchSchedule
from fastensor.offload.saved import SavedBytes
from fastensor.offload.swapper import Swapper

_MOST_AHEAD = 64
"""The most ranges that are read ahead."""
_LOOK_AGAIN_AFTER = 4
"""A backward pass looks at what comes next when it has taken one in so many of the ranges that were in memory or being
read at the last look. So reader threads are woken for several ranges at once, and most tensors cost less."""
BeginSchedule: TypeAlias = Callable[[int, Sequence[int]], PrefetchSchedule]
"""See :meth:`fastensor.offload.prefetch_schedule.PrefetchSchedules.begin`. Called by several threads."""


class ForwardPass:
    """The ranges that were saved in a row, before any of them was needed again.

    One thread adds ranges; any thread asks for them. The graph keeps the object alive; the object keeps no range alive.

    Args:
        swapper: moves the ranges.
        begin_schedule: looks up the order of the last backward pass of the same form.
        record: what planners want to know of the pass.
    """

    def __init__(self, swapper: Swapper, begin_schedule: BeginSchedule, record: PassRecord) -> None:
        self.swapper = swapper
        self._begin_schedule = begin_schedule
        self._lock = threading.Lock()
        self._ranges: list[Callable[[], SavedBytes | None]] = []
        """By position."""
        self._saved: list[int] = []
        """Positions, in the order in which nodes have saved them."""
        self.record = record
        self._schedule: PrefetchSchedule | None = None
        self._upcoming: list[int] = []
        """Positions that were expected next when that was looked at last."""
        self._expected_takes = 0
        """Ranges that may be needed before the schedule is looked at again, if they come as expected."""

    @property
    def next_position(self) -> int:
        return len(self._ranges)

    def mark(self, nbytes: int, dtype: torch.dtype, device: torch.device) -> int:
        """A number for the tensor that is saved now: the same one in each forward pass that has saved the same so
        far."""
        self.record.form = hash((self.record.form, nbytes, dtype, device))
        return self.record.form

    def note_needed(self, position: int, clock: float, saved: SavedBytes | None = None) -> None:
        """Note when a tensor is needed first, and whether its range was written until then."""
        tensor = self.record.tensors[position]
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
        self.record.form = hash((self.record.form, position))
        return position

    def look_ahead(self, needed: SavedBytes, position: int) -> tuple[list[SavedBytes], list[SavedBytes]]:
        """Note that a range is needed now.

        Returns:
            The ranges that will be needed next, in order; and those that were expected next before, and are no more.
            Nothing if all is as expected, and most of what :meth:`note_read_ahead` has counted is still to come.
        """
        with self._lock:
            if self._schedule is None:
                self._schedule = self._begin_schedule(self.record.form, self._saved)
            schedule = self._schedule
            expected = not needed.unread or schedule.take(position)  # backward passes may be repeated
            if expected and self._expected_takes and not needed.is_to_be_read:
                self._expected_takes -= 1
                return [], []
            before, self._upcoming = self._upcoming, list(islice(schedule.upcoming(self._is_there), _MOST_AHEAD))
            unexpected = set() if expected else set(before).difference(self._upcoming, [position])
            return self._there(self._upcoming), self._there(unexpected)

    def note_read_ahead(self, count: int) -> None:
        """Note how many of the ranges that will be needed next will not have to be waited for long: see
        :meth:`fastensor.offload.swapper.Swapper.read_ahead`."""
        with self._lock:
            self._expected_takes = count // _LOOK_AGAIN_AFTER

    def _is_there(self, position: int) -> bool:
        return self._ranges[position]() is not None

    def _there(self, positions: Iterable[int]) -> list[SavedBytes]:
        """The ranges at these positions that a graph still holds."""
        return [saved for saved in (self._ranges[position]() for position in positions) if saved is not None]


def _no_range() -> None:
    """Stands for the weak reference of a tensor that stays in memory."""
