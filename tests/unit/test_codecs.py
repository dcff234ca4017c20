"""Codecs: what is decoded is what was encoded, whatever the bits; every device makes the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastensor.offload import codecs, device_codecs
from fastensor.offload.codecs import DamagedPieceError, Encoding, NotAsMeasuredError, decode, encode, measure

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


def round_trip(piece: torch.Tensor, encoding: Encoding, nbytes: int) -> torch.Tensor:
    encoded, found = torch.full((nbytes,), 0xA5, dtype=torch.uint8), torch.full_like(piece, 0x5A)
    encode(piece, encoding, encoded)
    decode(encoded, encoding, found)
    return found


@given(st.data())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_csr_keeps_every_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    (encoding,) = codecs.candidates(dtype, {"csr"})
    piece = data.draw(pieces(encoding.itemsize))
    ((nonzero, overflows),) = codecs._counts([piece], encoding)
    nbytes = encoding.encoded_nbytes(piece.numel(), nonzero)
    assert nbytes <= piece.numel()
    assert not overflows
    assert torch.equal(round_trip(piece, encoding, nbytes), piece)


@given(pieces(4))
@pytest.mark.parametrize("name", ["fp16", "bf16"])
@pytest.mark.parametrize("also", [set(), {"csr"}], ids=["dense", "csr"])
def test_rounding_is_that_of_torch(name: str, also: set[str], piece: torch.Tensor) -> None:
    encoding = codecs.candidates(torch.float32, {name} | also)[0]
    values = piece[: piece.numel() // 4 * 4].view(torch.float32)
    rounded = values.to(codecs.LOSSY[name]).to(torch.float32)
    ((nonzero, overflows),) = codecs._counts([piece], encoding)
    assert overflows == bool((rounded.isinf() & ~values.isinf()).any())
    nbytes = encoding.encoded_nbytes(piece.numel(), nonzero)
    if overflows:
        with pytest.raises(NotAsMeasuredError, match="do not fit"):
            round_trip(piece, encoding, encoding.dense_nbytes(piece.numel()))
        return
    found = round_trip(piece, encoding, nbytes)
    assert torch.equal(found[values.nbytes :], piece[values.nbytes :]), "the tail"
    found_values = found[: values.nbytes].view(torch.float32)
    assert torch.equal(found_values.isnan(), rounded.isnan())
    assert torch.equal(found_values.nan_to_num().view(torch.int32), rounded.nan_to_num().view(torch.int32)), "-0.0, too"


def on_devices() -> Iterator[Any]:
    yield pytest.param("cpu", id="torch")
    reason = "this machine has no CUDA device"
    marks = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)]
    yield pytest.param("cuda", id="cuda", marks=marks)


def triton_codecs() -> ModuleType:
    module = pytest.importorskip(
        "fastensor.offload.triton_codecs", reason="Triton is not installed", exc_type=ImportError
    )
    assert isinstance(module, ModuleType)
    return module


@given(st.data())
@pytest.mark.parametrize("device", on_devices())
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("narrow", [None, torch.float16, torch.bfloat16], ids=str)
def test_devices_make_the_same_bytes(device: str, itemsize: int, narrow: Any, data: st.DataObject) -> None:
    if narrow is not None and itemsize != 4:
        return
    encoding, piece = Encoding(itemsize, narrow, is_sparse=True), data.draw(pieces(itemsize))
    if narrow is not None:  # hardware differs in what it makes of a NaN's payload
        whole = piece[: piece.numel() // 4 * 4].view(torch.float32)
        whole.copy_(whole.nan_to_num(0.0, math.inf, -math.inf))
    ((nonzero, overflows),) = codecs._counts([piece], encoding)
    there = piece.to(device)
    assert device_codecs.count(there, itemsize, narrow)[1].bool().item() == overflows
    if overflows:
        return
    assert device_codecs.count(there, itemsize, narrow)[0].item() == nonzero
    nbytes = encoding.encoded_nbytes(piece.numel(), nonzero)
    is_sparse = nbytes < encoding.dense_nbytes(piece.numel())
    expected = torch.empty(nbytes, dtype=torch.uint8)
    encode(piece, encoding, expected)
    encoded, decoded = torch.empty(nbytes, dtype=torch.uint8, device=device), torch.empty_like(there)
    assert device_codecs.encode(there, itemsize, narrow, encoded, is_sparse=is_sparse)
    assert torch.equal(encoded.cpu(), expected)
    assert device_codecs.decode(encoded, itemsize, narrow, decoded, is_sparse=is_sparse)
    again = torch.empty_like(piece)
    decode(expected, encoding, again)
    assert torch.equal(decoded.cpu(), again)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_triton_packs_as_torch_does(itemsize: int) -> None:
    check_kernels(triton_codecs(), itemsize, "cuda")


def check_kernels(kernels: ModuleType, itemsize: int, device: str) -> None:
    """Kernels of Triton pack and unpack elements as torch does, and see that a bitmap does not fit."""
    random = np.random.default_rng(itemsize)
    for elements in (1, 127, 1024, 1025, 5000):
        for share in (0.0, 0.4, 1.0):
            bits = random.integers(1, 100, elements).astype(f"i{itemsize}") * (random.random(elements) < share)
            stored = torch.from_numpy(bits.astype(f"i{itemsize}")).to(device)
            bitmaps = torch.full((2, codecs.bitmap_nbytes(elements)), 0xA5, dtype=torch.uint8, device=device)
            values = torch.zeros((2, int(stored.count_nonzero())), dtype=stored.dtype, device=device)
            assert kernels.pack(stored, bitmaps[0], values[0])
            assert device_codecs._torch_pack(stored, bitmaps[1], values[1])
            assert torch.equal(bitmaps[0], bitmaps[1])
            assert torch.equal(values[0], values[1])
            again = torch.full_like(stored, 9)
            assert kernels.unpack(bitmaps[0], values[0], again)
            assert torch.equal(again, stored)
            more = torch.zeros(values.shape[1] + 1, dtype=stored.dtype, device=device)
            assert not kernels.pack(stored, bitmaps[0], more)
            assert not kernels.unpack(bitmaps[0], more, again)


@given(st.data())
@pytest.mark.parametrize("device", [True, False], ids=["as a device", "host"])
@pytest.mark.parametrize("narrow", [None, torch.float16], ids=str)
def test_a_damaged_bitmap_raises(device: bool, narrow: Any, data: st.DataObject) -> None:
    encoding = Encoding(4, narrow, is_sparse=True)
    values = torch.zeros(CHUNK + 500)
    values[:: data.draw(st.integers(3, 90))] = 1.5
    piece = values.view(torch.uint8)
    ((nonzero, _),) = codecs._counts([piece], encoding)
    encoded = torch.empty(encoding.encoded_nbytes(piece.numel(), nonzero), dtype=torch.uint8)
    encode(piece, encoding, encoded)
    bit = data.draw(st.integers(0, len(values) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    if device:
        assert not device_codecs.decode(encoded, 4, narrow, torch.empty_like(piece), is_sparse=True)
    else:
        with pytest.raises(DamagedPieceError, match="names another number of values"):
            decode(encoded, encoding, torch.empty_like(piece))


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


def test_memory_that_has_changed_is_not_encoded() -> None:
    encoding, piece = Encoding(4, is_sparse=True), torch.zeros(1000)
    piece[::2] = 1
    room = torch.empty(encoding.encoded_nbytes(4000, 500), dtype=torch.uint8)
    encode(piece.view(torch.uint8), encoding, room)
    for element, value in ((1, 1.0), (0, 0.0)):
        changed = piece.clone()
        changed[element] = value
        with pytest.raises(NotAsMeasuredError, match="4000 bytes do not fit 2128 bytes of csr any more"):
            encode(changed.view(torch.uint8), encoding, room)


def measured(values: torch.Tensor, *names: str) -> tuple[str, float] | None:
    found = measure([part.view(torch.uint8) for part in values.split(100_000)], values.dtype, set(names))
    return None if found is None else (found.encoding.name, round(values.nbytes / sum(found.sizes), 2))


def test_what_is_chosen() -> None:
    half_zero = torch.arange(1.0, 300_001.0) / 100_000 * (torch.arange(300_000) % 2)
    assert measured(half_zero, "csr") == ("csr", 1.88)
    assert measured(half_zero, "fp16") == ("fp16", 2.0)
    assert measured(half_zero, "bf16", "csr") == ("bf16+csr", 3.56)
    dense = half_zero + 1
    assert measured(dense, "csr") is None
    assert measured(dense, "csr", "fp16") == ("fp16+csr", 2.0)
    dense[7] = 7e4
    assert measured(dense, "fp16") is None, "FP16 has no 70000"
    assert measured(dense, "bf16") == ("bf16", 2.0)
    half_zero[8] = -7e4
    assert measured(half_zero, "fp16", "csr") == ("csr", 1.88), "what is left of the codecs"
    half_zero[8] = math.inf
    assert measured(half_zero, "fp16", "csr") == ("fp16+csr", 3.56), "infinity stays infinity"
    assert measured(half_zero.double(), "fp16") is None
    assert measured(half_zero.long(), "csr", "fp16") is not None
    assert measured(torch.zeros(300_032, dtype=torch.bool), "csr") == ("csr", 7.99)


def test_dense_pieces_of_a_sparse_tensor_stay_as_they_are() -> None:
    values = torch.cat([torch.ones(100_000), torch.zeros(100_000)])
    found = measure([part.view(torch.uint8) for part in values.split(100_000)], values.dtype, {"csr"})
    assert found is not None
    assert found.sizes == (400_000, codecs.bitmap_nbytes(100_000))


def test_samples_estimate_the_ratio() -> None:
    torch.manual_seed(0)
    relu = torch.randn(1 << 20).relu()
    exact = measured(relu, "csr")
    assert exact is not None
    assert codecs.sampled_ratio([relu.view(torch.uint8)], relu.dtype, {"csr"}) == pytest.approx(exact[1], rel=0.02)
    assert codecs.sampled_ratio([relu.view(torch.uint8)], relu.dtype, set()) == 1.0
    assert codecs.sampled_ratio([], relu.dtype, {"csr"}) == 1.0
