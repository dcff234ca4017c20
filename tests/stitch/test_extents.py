"""Cutting images into extents."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fastensor.stitch.extents import UNIT_NBYTES, cut, extents_of
from fastensor.stitch.image import Header, Image, Payload


@given(st.integers(0, 50 * UNIT_NBYTES), st.integers(1, 20))
def test_extents_tile_the_file_in_about_equal_parts(nbytes: int, count: int) -> None:
    extents = extents_of(nbytes, count)
    assert len(extents) == count
    assert extents[0][0] == 0
    assert extents[-1][1] == nbytes
    for (_, end), (begin, _) in pairwise(extents):
        assert begin == end
        assert begin % UNIT_NBYTES == 0 or begin == nbytes
    assert max(end - begin for begin, end in extents) <= nbytes / count + UNIT_NBYTES


SIZES = st.lists(st.integers(1, 3 * UNIT_NBYTES) | st.integers(1, 40), max_size=8)


def image_of(sizes: list[int]) -> Image:
    """As in a zip archive: a header with a blank behind each payload, and blanks for all of them at the end."""
    segments: list[Header | Payload] = [Header(0, b"head")]
    at = 4
    for storage, nbytes in enumerate(sizes):
        segments += [Payload(at, nbytes, storage, 5, 7), Header(at + nbytes, bytes(9), ((3, storage),))]
        at += nbytes + 9
    blanks = tuple((4 * storage, storage) for storage in range(len(sizes)))
    return Image([*segments, Header(at, bytes(4 * len(sizes) + 1), blanks)])


@given(SIZES, st.integers(1, 5), st.sets(st.integers(0, 7)))
def test_every_byte_and_blank_is_in_one_part(sizes: list[int], count: int, only_first: set[int]) -> None:
    image = image_of(sizes)
    pieces = cut(image, count, only_first)
    covered = dict.fromkeys(range(len(sizes)), 5)
    blanks = sum(len(one.blanks) for one in pieces.unfilled)
    for number, ((begin, end), part) in enumerate(zip(pieces.extents, pieces.parts, strict=True)):
        assert Image(part).nbytes == end - begin  # which checks that blanks stand behind whole storages of the part
        for segment in part:
            if isinstance(segment, Payload):
                assert segment.storage_nbytes == sizes[segment.storage] + 12
                assert segment.before == covered[segment.storage]
                covered[segment.storage] += segment.nbytes
            else:
                blanks += len(segment.blanks)
                assert not number or not only_first.intersection(storage for _, storage in segment.blanks)
    assert covered == {storage: nbytes + 5 for storage, nbytes in enumerate(sizes)}
    assert blanks == 2 * len(sizes)
    if count == 1:
        assert not pieces.unfilled


def test_a_header_is_filled() -> None:
    assert Header(9, b"ab\0\0\0\0c", ((2, 1),)).filled([7, 0x01020304]) == b"ab\x04\x03\x02\x01c"
