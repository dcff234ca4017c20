"""In which order a step's activations will be wanted: as in the last step of the same form, or the other way round."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

_MOST_FORMS = 16
"""So many kinds of steps are remembered, those that were seen last."""


class Orders:
    """What was wanted in which order, by the form of the step. Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, list[int]] = OrderedDict()

    def begin(self, form: int, count: int) -> Course:
        """The course of a step of that form, with so many activations, which begins to be unpacked."""
        known = self._known.pop(form, [])
        course = Course(complete(known, count))
        self._known[form] = course.taken
        if len(self._known) > _MOST_FORMS:
            self._known.popitem(last=False)
        return course


def complete(known: Sequence[int], count: int) -> list[int]:
    """An order of all of ``count`` positions: those that are known first, and the others backwards.

    >>> complete([], 3), complete([0, 2], 4)
    ([2, 1, 0], [0, 2, 3, 1])
    """
    first = [position for position in dict.fromkeys(known) if position < count]
    missing = set(range(count)).difference(first)
    return first + sorted(missing, reverse=True)


class Course:
    """How far the unpacking of one step is, and what is expected next."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = expected
        self._index = {position: index for index, position in enumerate(expected)}
        self._next = 0
        self.taken: list[int] = []
        """In which order they were wanted, each for the first time."""
        self._seen: set[int] = set()

    def take(self, position: int) -> bool:
        """An activation is wanted. Whether that was to be expected now, or it has been before."""
        if position in self._seen:
            return True
        self._seen.add(position)
        self.taken.append(position)
        index = self._index.get(position)
        if index is None:
            return False
        expected = index == self._next
        self._next = index + 1
        while self._next < len(self._expected) and self._expected[self._next] in self._seen:
            self._next += 1
        return expected

    def upcoming(self) -> Iterator[int]:
        """What is expected next, in order.

        >>> course = Course([2, 1, 0])
        >>> course.take(2), list(course.upcoming())
        (True, [1, 0])
        """
        return (position for position in self._expected[self._next :] if position not in self._seen)
