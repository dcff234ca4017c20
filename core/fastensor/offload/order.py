"""In which order a step's activations will be wanted: as in the last step of the same form, or the other way round."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

_MOST_FORMS = 16
"""So many kinds of steps are remembered, those that were seen last."""
_SLACK = 8
"""Places. What others are wanted before is still expected: nodes may change places."""


class Orders:
    """What was wanted in which order, by the form of the step. Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, list[int]] = OrderedDict()

    def begin(self, form: int, saved: Sequence[int]) -> Course:
        """The course of a step of that form, which begins to be unpacked.

        Args:
            saved: positions of activations in the order in which nodes have saved them; several may save the same.
        """
        known = self._known.pop(form, [])
        course = Course(complete(known, saved))
        self._known[form] = course.taken
        if len(self._known) > _MOST_FORMS:
            self._known.popitem(last=False)
        return course


def complete(known: Sequence[int], saved: Sequence[int]) -> list[int]:
    """An order of all that was saved: what is known first, and the rest the other way round.

    >>> complete([], [0, 1, 0, 2]), complete([0, 2, 0], [0, 1, 0, 2, 3])
    ([2, 0, 1, 0], [0, 2, 0, 3, 1])
    """
    there = set(saved)
    first = [position for position in known if position in there]
    known_now = set(first)
    return first + [position for position in reversed(saved) if position not in known_now]


class Course:
    """How far the unpacking of one step is, and what is expected next. What several nodes of the graph have saved is
    wanted several times."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = expected
        self._places: dict[int, list[int]] = {}
        """Where in the order each position is, and has not been wanted yet; the first is the last."""
        for place in reversed(range(len(expected))):
            self._places.setdefault(expected[place], []).append(place)
        self._next = 0
        """The first place that is expected."""
        self._past: set[int] = set()
        """Places."""
        self._seen: set[int] = set()
        self.taken: list[int] = []
        """In which order they were wanted."""

    def take(self, position: int) -> bool:
        """An activation is wanted. Whether that was to be expected about now; or it has been before, and nobody knew
        how often it would be. If not, what is expected next is what comes behind it."""
        seen = position in self._seen
        self._seen.add(position)
        self.taken.append(position)
        places = self._places.get(position)
        if not places:
            return seen
        place = places.pop()
        self._past.add(place)
        expected = 0 <= place - self._next <= _SLACK
        if not expected:
            self._next = place + 1
        while self._next in self._past:
            self._next += 1
        return expected

    def upcoming(self) -> Iterator[int]:
        """What is expected next, in order.

        >>> course = Course([2, 1, 2, 0])
        >>> course.take(2), list(course.upcoming())
        (True, [1, 2, 0])
        """
        return (self._expected[place] for place in range(self._next, len(self._expected)) if place not in self._past)
