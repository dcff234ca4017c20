"""Overlaps of ranges of bytes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Area(NamedTuple):
    """Bytes that lie next to each other. There is at least one."""

    within: str
    """Space that they are a part of: the memory of a device, or a record of a file."""
    begin: int
    end: int

    def contains(self, other: Area) -> bool:
        return self.within == other.within and self.begin <= other.begin and other.end <= self.end


def overlapping(areas: Mapping[str, Area]) -> list[list[str]]:
    """Groups of two names or more whose areas overlap, in the order of the areas. The names of a group are in the order
    of their areas, too.

    >>> overlapping({"a": Area("cpu", 4, 8), "b": Area("cpu", 0, 6), "c": Area("cpu", 8, 9), "d": Area("cuda", 0, 9)})
    [['b', 'a']]
    """
    groups: list[list[str]] = []
    reached = Area("", 0, 0)
    for name, area in sorted(areas.items(), key=lambda item: item[1]):
        if area.within == reached.within and area.begin < reached.end:
            groups[-1].append(name)
            reached = reached._replace(end=max(reached.end, area.end))
        else:
            groups.append([name])
            reached = area
    return [names for names in groups if len(names) > 1]
