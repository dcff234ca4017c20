"""Codecs: what is decoded is what was encoded, whatever the bits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastensor.offload import codecs
from fastensor.offload.codecs import DamagedPieceError, Encoding, decode, encode

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip
SPECIAL = {
    8: [0, -(2**63), 1, 0x7FF0000000000000, 0x7FF8DEADBEEF0001, -1],
    4: [0, -(2**31), 1, 0x7F800000, 0x7FC0BEEF, 0x7F800001, -1, 0x00000080, 0x3F800000],
    2: [0, -(2**15), 1, 0x7C00, 0x7E11, -1],
    1: [0, -128, 1, 127, -1],
}
"""Bits of 0, -0.0, the smallest denormal, infinity, NaNs with payloads, and others, by size."""
CHUNK = codecs._CHUNK_ELEMENTS


@st.composite
def pieces(draw: st.DrawFn, itemsize: int) -> torch.Tensor:
    """A piece with special values, all zero or without zeros, of odd sizes, with the tail of an element."""
    elements = draw(st.integers(0, 300) | st.sampled_from([127, 128, 129, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77]))
    share = draw(st.sampled_from([0.0, 0.02, 0.5, 0.97, 1.0]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    kind = np.dtype(f"i{itemsize}")
    bits = np.frombuffer(random.bytes(elements * itemsize), dtype=kind).copy()
    special = np.array(draw(st.lists(st.sampled_from(SPECIAL[itemsize]), max_size=9)), dtype=kind)
    bits[: len(special)] = special[:elements]
    bits[random.random(elements) >= share] = 0
    tail = random.bytes(draw(st.integers(0, itemsize - 1)))
    return torch.frombuffer(bytearray(bits.tobytes() + tail) or bytearray(1), dtype=torch.uint8)[
        : bits.nbytes + len(tail)
    ]


def encoded(piece: torch.Tensor, dtype: torch.dtype, *names: str) -> tuple[Encoding, torch.Tensor] | None:
    out = torch.full_like(piece, 0xA5)
    found = encode(piece, dtype, set(names), out)
    return None if found is None else (found[0], out[: found[1]])


@given(st.data())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_csr_keeps_every_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    (encoding,) = codecs.candidates(dtype, {"csr"})
    piece = data.draw(pieces(encoding.itemsize))
    elements = piece.numel() // encoding.itemsize
    nonzero = int(piece[: elements * encoding.itemsize].view(-1, encoding.itemsize).any(1).sum())
    nbytes = codecs.bitmap_nbytes(elements) + nonzero * encoding.itemsize + piece.numel() % encoding.itemsize
    found = encoded(piece, dtype, "csr")
    assert (None if found is None else found[1].numel()) == (nbytes if nbytes < piece.numel() else None)
    if found is not None:
        again = torch.full_like(piece, 0x5A)
        decode(found[1], found[0], again)
        assert torch.equal(again, piece)


@given(pieces(4))
@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("also", [[], ["csr"]], ids=["dense", "csr"])
def test_rounding_is_that_of_torch(name: str, also: list[str], piece: torch.Tensor) -> None:
    values = piece[: piece.numel() // 4 * 4].view(torch.float32)
    rounded = values.to(codecs.LOSSY[name]).to(torch.float32)
    overflows = bool((rounded.isinf() & ~values.isinf()).any())
    found = encoded(piece, torch.float32, name, *also)
    if overflows or not len(values):
        assert found is None or found[0].narrow is None, "what is left of the codecs"
        return
    assert found is not None
    assert found[1].numel() <= values.nbytes // 2 + piece.numel() % 4
    again = torch.full_like(piece, 0x5A)
    decode(found[1], found[0], again)
    assert torch.equal(again[values.nbytes :], piece[values.nbytes :]), "the tail"
    found_values = again[: values.nbytes].view(torch.float32)
    assert torch.equal(found_values.isnan(), rounded.isnan())
    assert torch.equal(found_values.nan_to_num().view(torch.int32), rounded.nan_to_num().view(torch.int32)), "-0.0, too"


@given(st.data())
@pytest.mark.parametrize("name", ["csr", "fp16"])
def test_a_damaged_bitmap_raises(name: str, data: st.DataObject) -> None:
    values = torch.zeros(CHUNK + 500)
    values[:: data.draw(st.integers(3, 90))] = 1.5
    piece = values.view(torch.uint8)
    found = encoded(piece, torch.float32, *{"csr", name})
    assert found is not None
    bit = data.draw(st.integers(0, len(values) - 1))
    found[1][bit // 8] ^= 1 << bit % 8
    with pytest.raises(DamagedPieceError, match="names another number of values"):
        decode(found[1], found[0], torch.empty_like(piece))


@given(st.integers(0, 700), st.binary(max_size=700), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_any_bytes_decode_or_raise(nbytes: int, encoded: bytes, itemsize: int, narrow: bool) -> None:
    encoding = Encoding(itemsize, torch.float16 if narrow and itemsize == 4 else None, is_sparse=True)
    data = torch.frombuffer(bytearray(encoded) or bytearray(1), dtype=torch.uint8)[: len(encoded)]
    memory = torch.full((nbytes + 64,), 0x77, dtype=torch.uint8)
    try:
        decode(data, encoding, memory[:nbytes])
    except DamagedPieceError as error:
        assert str(nbytes) in str(error)
    assert (memory[nbytes:] == 0x77).all(), "nothing is written behind the piece"


def ratio(values: torch.Tensor, *names: str) -> tuple[str, float] | None:
    """The codecs of the first part of a tensor that gets smaller, and how many times smaller all parts get."""
    parts = [part.view(torch.uint8) for part in values.split(100_000)]
    found = [encoded(part, values.dtype, *names) for part in parts]
    kinds = [one[0].name for one in found if one is not None]
    sizes = [part.numel() if one is None else one[1].numel() for part, one in zip(parts, found, strict=True)]
    return (kinds[0], round(values.nbytes / sum(sizes), 2)) if kinds else None


def test_what_is_chosen() -> None:
    half_zero = torch.arange(1.0, 300_001.0) / 100_000 * (torch.arange(300_000) % 2)
    assert ratio(half_zero, "csr") == ("csr", 1.88)
    assert ratio(half_zero, "fp16") == ("fp16", 2.0)
    assert ratio(half_zero, "bf16", "csr") == ("bf16+csr", 3.56)
    dense = half_zero + 1
    assert ratio(dense, "csr") is None
    assert ratio(dense, "csr", "fp16") == ("fp16+csr", 2.0)
    dense[7] = 7e4
    assert encoded(dense.view(torch.uint8), torch.float32, "fp16") is None, "FP16 has no 70000"
    assert ratio(dense, "fp16") == ("fp16", 1.5), "the parts in which there is none"
    assert ratio(dense, "bf16") == ("bf16", 2.0)
    half_zero[8] = -7e4
    assert ratio(half_zero[:100_000], "fp16", "csr") == ("csr", 1.88), "what is left of the codecs"
    half_zero[8] = math.inf
    assert ratio(half_zero, "fp16", "csr") == ("fp16+csr", 3.56), "infinity stays infinity"
    assert ratio(half_zero.double(), "fp16") is None
    assert ratio(half_zero.long(), "csr", "fp16") is not None
    assert ratio(torch.zeros(300_032, dtype=torch.bool), "csr") == ("csr", 7.99)


def test_dense_pieces_of_a_sparse_tensor_stay_as_they_are() -> None:
    assert encoded(torch.ones(100_000).view(torch.uint8), torch.float32, "csr") is None
    found = encoded(torch.zeros(100_000).view(torch.uint8), torch.float32, "csr")
    assert found is not None
    assert found[1].numel() == codecs.bitmap_nbytes(100_000)


def test_samples_estimate_the_ratio() -> None:
    torch.manual_seed(0)
    relu = torch.randn(1 << 20).relu()
    exact = ratio(relu, "csr")
    assert exact is not None
    assert codecs.sampled_ratio([relu.view(torch.uint8)], relu.dtype, {"csr"}) == pytest.approx(exact[1], rel=0.02)
    assert codecs.sampled_ratio([relu.view(torch.uint8)], relu.dtype, set()) == 1.0
    assert codecs.sampled_ratio([], relu.dtype, {"csr"}) == 1.0
