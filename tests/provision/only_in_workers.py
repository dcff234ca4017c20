"""A class that only workers import: trainers cannot decode its objects."""

from typing import NamedTuple


class Foreign(NamedTuple):
    """A batch."""

    numbers: list[int]
