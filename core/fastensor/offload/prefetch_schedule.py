"""The order in which a backward pass needs saved tensors: the order of the last backward pass of the same form, or the
reverse of the forward pass."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

_MOST_FORMS = 16
"""Forms of forward passes that are remembered: the latest."""
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
        self._expected = expected
        self._places: dict[int, list[int]] = {}
        """By position, its places in the order that have not been taken; the nearest place is the last in the list."""
        for place in reversed(range(len(expected))):
            self._places.setdefault(expected[place], []).append(place)
        self._end = len(expected)
        self._after = [*range(1, self._end + 1), 0]
        """A circular linked list of the places that are not struck out: the next one by place. The end is between the
        last and the first."""
        self._before = [self._end, *range(self._end)]
        self._struck_out: set[int] = set()
        self._next = 0
        """The place that is expected next."""
        self._seen: set[int] = set()
        self.taken: list[int] = []
        """Positions in the order in which they were taken."""

    def take(self, position: int) -> bool:
        """Note that a position is needed now.

        Returns:
            Whether that was expected, or the position was taken before. If not, the schedule goes on behind it.
        """
        seen = position in self._seen
        self._seen.add(position)
        self.taken.append(position)
        places = self._places.get(position)
        if not places:
            return seen
        place = places.pop()
        expected = 0 <= place - self._next <= _SLACK
        self._strike_out(place)
        if not expected:
            self._next = self._after[place]
            while self._next in self._struck_out:
                self._next = self._after[self._next]
        return expected

    def upcoming(self, is_there: Callable[[int], bool] = lambda position: True) -> Iterator[int]:
        """The positions that are expected next, in order.

        Args:
            is_there: whether a graph still holds a position. A position that no graph holds is struck out, and not
            asked about again.

        >>> schedule = PrefetchSchedule([2, 1, 2, 0])
        >>> schedule.take(2), list(schedule.upcoming()), list(schedule.upcoming(lambda position: position != 2))
        (True, [1, 2, 0], [1, 0])
        """
        place = self._next
        while place < self._end:
            if is_there(self._expected[place]):
                yield self._expected[place]
            else:
                self._strike_out(place)
            place = self._after[place]

    def _strike_out(self, place: int) -> None:
        if place in self._struck_out:  # it stayed in memory, and had to leave later
            return
        self._struck_out.add(place)
        before, after = self._before[place], self._after[place]
        self._after[before], self._before[after] = after, before
        if place == self._next:
            self._next = after
