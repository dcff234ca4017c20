"""Images tile a file, and any window of one can be asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.stitch.image import Header, Image, Payload


@st.composite
def images(draw: st.DrawFn) -> Image:
    segments: list[Header | Payload] = []
    position = index = 0
    for nbytes in draw(st.lists(st.integers(1, 50), min_size=1, max_size=12)):
        if draw(st.booleans()):
            blanks = ((0, index - 1),) if index and nbytes >= 4 else ()
            segments.append(Header(position, bytes(range(nbytes)), blanks))
        else:
            segments.append(Payload(position, nbytes, index))
            index += 1
        position += nbytes
    return Image(segments)


@given(image=images(), data=st.data())
def test_pieces_cover_a_window_once_and_in_order(image: Image, data: st.DataObject) -> None:
    begin = data.draw(st.integers(0, image.nbytes))
    end = data.draw(st.integers(begin, image.nbytes))
    position = 0
    for piece in image.pieces(begin, end):
        assert piece.position == position
        assert piece.nbytes > 0
        assert piece.segment.offset + piece.begin == begin + position
        assert piece.begin + piece.nbytes <= piece.segment.nbytes
        position += piece.nbytes
    assert position == end - begin


@given(image=images())
def test_sizes_add_up(image: Image) -> None:
    assert image.nbytes == sum(segment.nbytes for segment in image.segments)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Header(1, b"x")], "not 0"),
        ([Header(0, b"xy"), Payload(3, 1, 0)], "not 2"),
        ([Header(0, b"xy"), Payload(1, 1, 0)], "not 2"),
        ([Payload(0, 1, 0), Payload(1, 1, 0)], "occurs twice"),
        ([Header(0, b"xxxx", ((0, 0),)), Payload(4, 1, 0)], "before the storage"),
        ([Payload(0, 1, 0), Header(1, b"xxxx", ((1, 0),))], "not inside"),
    ],
)
def test_what_is_no_image(segments: list[Header | Payload], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Image(segments)


def test_nothing_is_an_image() -> None:
    assert (Image([]).nbytes, list(Image([]).pieces(0, 0))) == (0, [])
