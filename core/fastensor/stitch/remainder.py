"""What is left to be written of a planned file that has some of its bytes already. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fastensor.stitch.extents import Extent
from fastensor.stitch.image import CHECKSUM_NBYTES, Blank, Header, Image, Payload, Segment
from fastensor.stitch.source import FileBytes, Plan


class Place(NamedTuple):
    """Where a part of the remainder belongs."""

    begin: int
    """Offset in the remainder."""
    offset: int
    """Offset in the whole file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Remainder(Plan):
    """The parts of a planned file that are to be written, one behind the other: a plan of its own."""

    whole: Plan
    """The plan of the whole file, without its storages."""
    places: tuple[Place, ...]
    """In order. They tile the remainder."""
    known: Mapping[int, int]
    """The CRC32s of the storages that the file has, by their numbers in the whole plan."""
    numbers: Mapping[int, int]
    """By the number of a storage in the whole plan, its number here. A storage without one is in the file, or empty."""
    whole_count: int
    """How many storages the whole plan has."""

    @property
    def shared_nbytes(self) -> int:
        """Bytes that the file has already."""
        return self.whole.nbytes - self.nbytes

    @property
    def throttled(self) -> bool:
        return True  # its parts are moved to their places as well

    @property
    def checksums_first(self) -> bool:
        return self.whole.checksums_first

    def released(self) -> Remainder:
        segments = [
            one if isinstance(one, Payload) else one._replace(data=b"", forgotten_nbytes=one.nbytes)
            for one in self.image.segments
        ]
        return replace(self, image=Image(segments), storages=())

    def head(self, checksums: Sequence[int]) -> bytes:
        return self.whole.head(self.all_checksums(checksums))

    def all_checksums(self, checksums: Sequence[int]) -> Sequence[int]:
        """The CRC32 of each storage of the whole plan.

        Args:
            checksums: those of the remainder's storages; none if the backend has returned none. Then this is empty.
        """
        if not checksums and self.numbers:
            return ()
        written = {number: checksums[here] for number, here in self.numbers.items()}
        return [self.known.get(number, written.get(number, 0)) for number in range(self.whole_count)]


def remainder(plan: Plan, shared: Sequence[Extent], known: Mapping[int, int]) -> Remainder:
    """What is left of a planned file.

    Args:
        plan: the whole file.
        shared: the extents that the file has, in order: parts of the storages in ``known``, one of each.
        known: the CRC32s of these storages, by their numbers.
    """
    places: list[Place] = []
    segments: list[Segment] = []
    storages: list[torch.UntypedStorage | FileBytes] = []
    numbers: dict[int, int] = {}
    begin, tell, total = 0, plan.progress, plan.nbytes
    for start, end in _between(shared, total):
        places.append(Place(begin, start, end - start))
        for segment, at, nbytes, position in plan.image.pieces(start, end):
            offset = begin + position
            if isinstance(segment, Header):
                segments.append(_with_known(segment._replace(offset=offset), known, numbers))
                continue
            if segment.storage not in known:
                numbers[segment.storage] = len(storages)
            before, behind = segment.before + at, segment.behind + segment.nbytes - at - nbytes
            segments.append(Payload(offset, nbytes, len(storages), before, behind))
            storages.append(plan.storages[segment.storage])
        begin += end - start
    return Remainder(
        Image(segments), tuple(storages), plan.released(), tuple(places), dict(known), numbers, len(plan.storages),
        progress=lambda done: tell(total - begin + done),
    )  # fmt: skip


def _between(extents: Sequence[Extent], nbytes: int) -> Iterator[Extent]:
    """The extents of a file between others."""
    at = 0
    for begin, end in (*extents, (nbytes, nbytes)):
        if at < begin:
            yield at, begin
        at = end


def _with_known(header: Header, known: Mapping[int, int], numbers: Mapping[int, int]) -> Header:
    """A header whose blanks have the known CRC32s, and refer to the others by their storages' new numbers."""
    if not header.blanks:
        return header
    data = bytearray(header.data)
    left: list[Blank] = []
    for at, storage in header.blanks:
        if storage in known:
            data[at : at + CHECKSUM_NBYTES] = known[storage].to_bytes(CHECKSUM_NBYTES, "little")
        else:
            left.append((at, numbers[storage]))
    return header._replace(data=bytes(data), blanks=tuple(left))
