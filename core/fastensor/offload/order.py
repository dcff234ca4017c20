"""In which order activations of a forward pass will be wanted: as those of the last one of the same form, or the other
way round."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

_MOST_FORMS = 16
"""So many kinds of forward passes are remembered, those that were seen last."""
_SLACK = 8
"""Places. What others are wanted before is still expected: nodes may change places."""


class Orders:
    """What was wanted in which order, by the form of the forward pass. Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, list[int]] = OrderedDict()

    def begin(self, form: int, saved: Sequence[int]) -> Course:
        """The course of a forward pass of that form, which begins to be unpacked.

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
    """How far the unpacking of one forward pass is, and what is expected next. What several nodes of the graph have
    saved is wanted several times."""

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = expected
        self._places: dict[int, list[int]] = {}
        """Where in the order each position is, and has not been wanted yet; the first is the last."""
        for place in reversed(range(len(expected))):
            self._places.setdefault(expected[place], []).append(place)
        self._end = len(expected)
        self._after = [*range(1, self._end + 1), 0]
        """By place, the next one that is not struck out. Behind the last is the end, and behind that the first."""
        self._before = [self._end, *range(self._end)]
        self._next = 0
        """The first place that is expected."""
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
        expected = 0 <= place - self._next <= _SLACK
        self._strike_out(place)
        if not expected:
            self._next = self._after[place]
        return expected

    def upcoming(self, is_there: Callable[[int], bool] = lambda position: True) -> Iterator[int]:
        """What is expected next, in order.

        Args:
            is_there: whether a position may still be wanted. One that may not is struck out: it is asked about once.

        >>> course = Course([2, 1, 2, 0])
        >>> course.take(2), list(course.upcoming()), list(course.upcoming(lambda position: position != 2))
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
        before, after = self._before[place], self._after[place]
        self._after[before], self._before[after] = after, before
        if place == self._next:
            self._next = after
