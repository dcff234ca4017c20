"""The ``.npy`` container: what is planned, what NumPy makes of it, and what the reader refuses."""

from __future__ import annotations

import io
import math
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import states
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fastensor.backends.stream import write_stream
from fastensor.errors import CorruptCheckpointError, FastensorError, UnsupportedContentError
from fastensor.stitch import npy
from fastensor.stitch.npy import DATA_BEGIN, NpyHeader, descr_of, header_nbytes, parse_header, plan
from fastensor.stitch.shape import is_dense, is_same_layout, row_major


def file_of(tensor: torch.Tensor) -> bytes:
    parts: list[bytes] = []
    write_stream(plan(tensor), lambda view: parts.append(bytes(view)))
    return b"".join(parts)


def parse(data: bytes) -> NpyHeader:
    begin = header_nbytes(data[: npy.PREFIX_NBYTES], len(data), "x.npy")
    return parse_header(data[:begin], len(data), where="x.npy")


def saved_by_numpy(array: Any, version: tuple[int, int] = (1, 0)) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version)
    return buffer.getvalue()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@given(states.dense(), st.booleans())
def test_numpy_reads_what_is_planned(tensor: torch.Tensor, transposed: bool) -> None:
    if transposed:
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    data = file_of(tensor)
    array = np.load(io.BytesIO(data))
    assert array.shape == tensor.shape
    assert array.tobytes() == bits(tensor)
    try:
        assert array.dtype == torch.empty(0, dtype=tensor.dtype).numpy().dtype
    except TypeError:  # NumPy does not have the dtype
        assert (array.dtype.kind, array.dtype.itemsize) == ("u", tensor.itemsize)
    header = parse(data)
    assert header == NpyHeader.of(tensor.dtype, tensor.shape, tensor.stride())
    assert len(data) == DATA_BEGIN + tensor.nbytes


@given(states.dense())
def test_it_is_what_numpy_saves_but_for_the_padding(tensor: torch.Tensor) -> None:
    try:
        array = tensor.numpy()
    except TypeError:  # NumPy does not have the dtype
        assume(False)
    ours, theirs = file_of(tensor), saved_by_numpy(array)
    begin = header_nbytes(theirs, len(theirs), "x")
    assert ours[DATA_BEGIN:] == theirs[begin:]
    assert ours[10:DATA_BEGIN].rstrip() == theirs[10:begin].rstrip()
    assert parse(theirs) == parse(ours)


def test_every_byte_of_a_small_file() -> None:
    text = b"{'descr': '<i2', 'fortran_order': False, 'shape': (3,), }"
    expected = b"\x93NUMPY\x01\x00\xf6\x0f" + text + b" " * (4096 - 11 - len(text)) + b"\n" + b"\1\0\2\0\xff\xff"
    assert file_of(torch.tensor([1, 2, -1], dtype=torch.int16)) == expected


def test_a_view_is_stored_without_the_rest() -> None:
    data = file_of(torch.arange(1000, dtype=torch.int64)[500:503])
    assert np.load(io.BytesIO(data)).tolist() == [500, 501, 502]
    assert len(data) == DATA_BEGIN + 24


def test_transposed_tensors_are_not_copied() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    planned = plan(tensor)
    assert planned.storages[0].data_ptr() == tensor.data_ptr()  # type: ignore[union-attr]
    assert np.load(io.BytesIO(file_of(tensor))).flags.f_contiguous


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(6, 6)[::2], "not contiguous"),
        (torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), "not contiguous"),
        (torch.zeros(2, 2, dtype=torch.complex64).conj(), "conjugate"),
        (torch.eye(2).to_sparse(), "not dense"),
        (torch.eye(2).to_sparse_csr(), "not dense"),
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "not dense"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
        (torch.empty(3, device="meta"), "no values"),
        (torch.zeros([1] * 33), "33 dimensions"),
    ],
)
def test_what_the_container_cannot_hold_is_refused(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(UnsupportedContentError, match=reason):
        plan(tensor)


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
@pytest.mark.parametrize(
    "array", [np.float64(3.5), np.zeros((0, 3), np.int8), np.asfortranarray(np.ones((2, 3), "<c16"))]
)
def test_what_numpy_saves_is_read(array: Any, version: tuple[int, int]) -> None:
    found = parse(saved_by_numpy(np.asanyarray(array), version))
    assert (found.shape, found.descr) == (array.shape, array.dtype.str)
    assert found.fortran_order == (array.flags.f_contiguous and not array.flags.c_contiguous)


def crafted(text: bytes, data: bytes = b"", version: bytes = b"\1\0", claimed: int | None = None) -> bytes:
    text += b"\n"
    length = struct.pack("<H" if version[:1] == b"\1" else "<I", len(text) if claimed is None else claimed)
    return b"\x93NUMPY" + version + length + text + data


def described(descr: str = "<f4", order: str = "False", shape: str = "(1,)") -> bytes:
    return f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}".encode()


HOSTILE = {
    "nothing": b"",
    "less than a magic string": b"\x93NUM",
    "no length": b"\x93NUMPY\1\0",
    "half a length": b"\x93NUMPY\2\0\1\0",
    "another magic string": b"\x93NUMPX\1\0" + bytes(100),
    "a zip": b"PK\3\4" + bytes(100),
    "version 0": crafted(described(), bytes(4), b"\0\0"),
    "version 3": crafted(described(), bytes(4), b"\3\0"),
    "version 1.1": crafted(described(), bytes(4), b"\1\1"),
    "a header longer than the file": crafted(described(), bytes(4), claimed=60_000),
    "a header of 4 GiB": crafted(described(), bytes(4), b"\2\0", claimed=(1 << 32) - 1),
    "a header of nothing": crafted(described(), bytes(4), claimed=0),
    "petabytes": crafted(described(shape=f"({1 << 50},)"), bytes(4)),
    "more elements than there are numbers": crafted(described(shape=f"({1 << 62}, {1 << 62}, 0)")),
    "a size of 5000 digits": crafted(described(shape="(" + "9" * 5000 + ",)"), bytes(4)),
    "a size of 19 digits": crafted(described(shape="(" + "9" * 19 + ",)"), bytes(4)),
    "a negative size": crafted(described(shape="(-1,)"), bytes(4)),
    "a size that is a text": crafted(described(shape="('a',)"), bytes(4)),
    "no tuple": crafted(described(shape="(1)"), bytes(4)),
    "a number": crafted(described(shape="1"), bytes(4)),
    "too little data": crafted(described(shape="(2,)"), bytes(7)),
    "too much data": crafted(described(shape="(2,)"), bytes(9)),
    "no data": crafted(described(shape="(2,)")),
    "pickled objects": crafted(described("|O"), bytes(4)),
    "texts": crafted(described("<U1"), bytes(4)),
    "the other byte order": crafted(described(">f4"), bytes(4)),
    "records": crafted(b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", bytes(4)),
    "code": crafted(b"{'descr': '<f4', 'fortran_order': False, 'shape': (exit(),), }", bytes(4)),
    "another key": crafted(described()[:-1] + b"'x': 1, }", bytes(4)),
    "deep nesting": crafted(b"(" * 60_000),
    "many commas": crafted(described(shape="(" + "1, " * 15_000 + ")"), bytes(4)),
    "bytes": crafted(bytes(range(256)) * 200),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_at_no_cost(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FastensorError) as caught:
            parse(HOSTILE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(caught.value, CorruptCheckpointError | UnsupportedContentError)
    assert "x.npy" in str(caught.value)
    assert peak < 1 << 20


@given(st.data())
def test_a_damaged_header_is_refused_or_fits_the_file(data: st.DataObject) -> None:
    whole = bytearray(saved_by_numpy(np.zeros((3, 5), np.float32)))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, 127))] = data.draw(st.integers(0, 255))
    try:
        found = parse(bytes(whole))
    except FastensorError:
        return
    begin = header_nbytes(bytes(whole[:12]), len(whole), "x")
    assert begin + math.prod(found.shape) * int(found.descr[2:]) == len(whole)


@given(st.lists(st.integers(0, 5), max_size=5), st.randoms())
def test_strides_are_as_torch_has_them(shape: list[int], random: Any) -> None:
    tensor = torch.empty(shape)
    assert row_major(shape) == tensor.stride()
    order = list(range(len(shape)))
    random.shuffle(order)
    permuted = tensor.permute(order)
    if tensor.numel():
        assert is_dense(permuted.shape, permuted.stride())
        assert not is_dense([*permuted.shape, 2], [*permuted.stride(), 0])
        assert not is_dense([*permuted.shape, 2], [*permuted.stride(), tensor.numel() + 1])
        assert permuted.is_contiguous() == is_same_layout(permuted.shape, permuted.stride(), row_major(permuted.shape))


def test_dtypes_are_described() -> None:
    for dtype in states.DTYPES:
        assert np.dtype(descr_of(dtype)).itemsize == dtype.itemsize
