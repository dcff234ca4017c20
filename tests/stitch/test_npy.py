"""The ``.npy`` container: what is planned, and what NumPy makes of it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import states
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fastensor.backends.stream import write_stream
from fastensor.errors import UnsupportedContentError
from fastensor.stitch.npy import DATA_BEGIN, NpyHeader, descr_of, plan
from fastensor.stitch.shape import is_dense, is_same_layout, row_major


def file_of(tensor: torch.Tensor) -> bytes:
    parts: list[bytes] = []
    write_stream(plan(tensor), lambda view: parts.append(bytes(view)))
    return b"".join(parts)


def saved_by_numpy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, (1, 0))
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
    assert data[:DATA_BEGIN] == NpyHeader.of(tensor.dtype, tensor.shape, tensor.stride()).encode()
    assert len(data) == DATA_BEGIN + tensor.nbytes


@given(states.dense())
def test_it_is_what_numpy_saves_but_for_the_padding(tensor: torch.Tensor) -> None:
    try:
        array = tensor.numpy()
    except TypeError:  # NumPy does not have the dtype
        assume(False)
    ours, theirs = file_of(tensor), saved_by_numpy(array)
    begin = len(theirs) - tensor.nbytes
    assert ours[DATA_BEGIN:] == theirs[begin:]
    assert ours[10:DATA_BEGIN].rstrip() == theirs[10:begin].rstrip()


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
