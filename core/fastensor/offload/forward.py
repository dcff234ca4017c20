"""One forward pass: what it saves, what is different from one to the next, and what its backward pass will want."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeAlias

import torch

from fastensor.offload.cell import Cell
from fastensor.offload.mover import Mover
from fastensor.offload.order import Course

_MOST_AHEAD = 64
"""Activations that are read ahead, at most."""
BeginCourse: TypeAlias = Callable[[int, Sequence[int]], Course]
"""See :meth:`fastensor.offload.order.Orders.begin`. Called by several threads."""


class ForwardPass:
    """What is saved in a row, before any of it is wanted back. Cells are noted by one thread, and wanted by any.

    It lives as long as the graph needs anything of it, and holds no cells.

    Args:
        mover: of the cells.
        begin_course: knows the order from the last forward pass of the same form.
    """

    def __init__(self, mover: Mover, begin_course: BeginCourse) -> None:
        self.mover = mover
        self._begin_course = begin_course
        self._lock = threading.Lock()
        self._cells: list[Callable[[], Cell | None]] = []
        """By position."""
        self._saved: list[int] = []
        """Positions, in the order in which nodes have saved them."""
        self._form = 0
        self._course: Course | None = None
        self._ahead: list[int] = []
        """Positions that were expected next when a cell was wanted last."""

    @property
    def next_position(self) -> int:
        return len(self._cells)

    def mark(self, nbytes: int, dtype: torch.dtype) -> int:
        """A number for a tensor that is saved now: the same in other forward passes that have saved the same before."""
        self._form = hash((self._form, nbytes, dtype))
        return self._form

    def add(self, cell: Cell | None) -> None:
        """A tensor is saved. None if it stays in memory: positions are the same in passes in which it does not."""
        with self._lock:
            self._saved.append(len(self._cells))
            self._cells.append(_no_cell if cell is None else weakref.ref(cell))

    def add_again(self, cell: Cell) -> int:
        """Another node saves what a cell holds, which may be of an earlier forward pass. Returns its position here."""
        position = cell.position
        if not (position < len(self._cells) and self._cells[position]() is cell):
            position = len(self._cells)
            self.add(cell)
        else:
            self._saved.append(position)
        self._form = hash((self._form, position))
        return position

    def look_ahead(self, wanted: Cell, position: int) -> None:
        """A cell is wanted: have those read that will be next, and let go of those that will not be after all."""
        with self._lock:
            if self._course is None:
                self._course = self._begin_course(self._form, self._saved)
            course = self._course
            expected = not wanted.unread or course.take(position)  # backward passes may be repeated
            before, self._ahead = self._ahead, list(islice(course.upcoming(self._is_there), _MOST_AHEAD))
            ahead = self._ahead
        if not expected:
            self.mover.drop(self._there(set(before).difference(ahead)))
        self.mover.prefetch(self._there(ahead), wanted)

    def _is_there(self, position: int) -> bool:
        return self._cells[position]() is not None

    def _there(self, positions: Iterable[int]) -> list[Cell]:
        """The cells at these positions that a graph still holds."""
        return [cell for cell in (self._cells[position]() for position in positions) if cell is not None]


def _no_cell() -> None:
    """Stands for the cell of a tensor that is kept in memory, which has none."""
