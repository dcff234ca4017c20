"""Samples come back from shared memory as they were, as views of it; nothing but plain data is passed on."""

from __future__ import annotations

import gc
import os
import pickle
import warnings
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fastensor.errors import CorruptSampleError, UnsupportedSampleError
from fastensor.provision.encoding import Encoder, check, decode, encode


class Pair(NamedTuple):
    first: Any
    second: Any


def memory_of(value: Any) -> memoryview:
    """Writable memory with a value in it, and something behind it. It had been used before."""
    encoded = encode(value)
    memory = memoryview(bytearray(b"\xaa" * (encoded.nbytes + 9)))
    encoded.write_into(memory)
    assert bytes(memory[encoded.nbytes :]) == b"\xaa" * 9
    unchecked = bytes(memory[: encoded.nbytes])
    memory[: encoded.nbytes] = encoded.copied()
    assert unchecked == bytes(memory[:4]) + bytes(4) + bytes(memory[8 : encoded.nbytes])
    check(memory)
    return memory


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is (np.ndarray if isinstance(expected, np.memmap) else type(expected))
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert bits_of(found) == bits_of(expected)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(found.items()), list(expected.items()))
    else:
        assert found == expected or (found != found and expected != expected)
        assert repr(found) == repr(expected)  # -0.0 is 0.0


def bits_of(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.resolve_conj().resolve_neg().contiguous().unsqueeze(-1).view(torch.uint8).numpy().tobytes()


TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    | st.sampled_from([np.float32(1.5), np.int64(-3), np.str_("ä"), np.bytes_(b"x"), np.datetime64("2026-01-01")])
)  # fmt: skip
ARRAYS = arrays_of.arrays(
    arrays_of.scalar_dtypes().filter(lambda dtype: dtype.itemsize > 0),
    arrays_of.array_shapes(min_dims=0, min_side=0, max_side=4),
)
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.binary() | st.tuples(st.text(), st.integers())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Some with strides, or shared memory between their elements."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    data = draw(st.binary(min_size=(count := int(np.prod(shape))) * dtype.itemsize, max_size=count * dtype.itemsize))
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda tensor: tensor,
        lambda tensor: tensor.mT if tensor.dim() >= 2 else tensor,
        lambda tensor: tensor[::2] if tensor.dim() else tensor,
        lambda tensor: tensor.expand(3, *tensor.shape),
        lambda tensor: tensor.conj() if tensor.is_complex() else tensor,
    ]
    return draw(st.sampled_from(changes))(tensor)


VALUES = st.recursive(
    SCALARS | ARRAYS | tensors(),
    lambda values: (
        st.lists(values, max_size=4)
        | st.tuples(values, values)
        | st.builds(Pair, values, values)
        | st.dictionaries(KEYS, values, max_size=4)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_come_back(value: Any) -> None:
    memory = memory_of(value)
    assert_same(decode(memory), value)
    assert_same(decode(memory.toreadonly()), value)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    whole = torch.arange(64, dtype=torch.uint8).view(dtype)
    for tensor in (whole, whole[0], whole[:0], whole.reshape(2, -1).mT, whole[1::2]):
        assert_same(decode(memory_of([tensor])), [tensor])


@pytest.mark.parametrize("value", ["\ud800", "\ud83d\ude00", "\0", 10**4000, float("nan"), -0.0, 5e-324], ids=ascii)
def test_text_and_numbers_that_are_easily_lost(value: Any) -> None:
    assert_same(decode(memory_of([value, (value,)])), [value, (value,)])


def test_tensors_and_arrays_are_aligned_views_of_writable_memory() -> None:
    memory = memory_of({"tensor": torch.zeros(5, dtype=torch.bfloat16), "array": np.zeros(3, ">f8"), "text": "x"})
    whole = np.frombuffer(memory, np.uint8)
    begin = whole.__array_interface__["data"][0]
    found = decode(memory)
    for address in (found["tensor"].data_ptr(), found["array"].__array_interface__["data"][0]):
        assert (address - begin) % 64 == 0
        assert begin < address < begin + len(whole)
    before = bytes(memory)
    found["tensor"].fill_(1)
    found["array"][:] = 1
    assert bytes(memory) != before
    with pytest.raises(CorruptSampleError, match="CRC32"):
        check(memory)


def test_read_only_memory_gives_tensors_of_their_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decode(memory_of((torch.zeros(5), np.zeros(3))).toreadonly())
    found[0].fill_(1)
    with pytest.raises(ValueError, match="read-only"):
        found[1][:] = 1


@pytest.mark.parametrize("value", [torch.zeros(3), np.zeros(3)], ids=["tensor", "array"])
def test_views_keep_the_memory_alive(value: Any) -> None:
    array = np.zeros(4096, np.uint8)
    dropped = weakref.ref(array)
    memory = array.data
    encode({"x": value}).write_into(memory)
    found = decode(memory)["x"][1:]
    del array, memory
    gc.collect()
    assert dropped() is not None
    del found
    gc.collect()
    assert dropped() is None


def test_nothing_is_copied_before_it_is_written() -> None:
    tensor, array = torch.zeros(3), np.zeros(3)
    encoded = encode([tensor, array])
    tensor.fill_(1)
    array[:] = 2
    copied = encoded.copied()
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write_into(memory)
    assert_same(decode(memory), [torch.ones(3), np.full(3, 2.0)])
    array[:] = 3
    assert_same(decode(copied), [torch.ones(3), np.full(3, 2.0)])
    check(copied)
    with pytest.raises(ValueError, match=f"{encoded.nbytes} bytes, found memory of {encoded.nbytes - 1}"):
        encoded.write_into(memory[:-1])


def test_a_value_without_a_checksum_comes_back_and_is_not_taken_for_a_checked_one() -> None:
    value = {"a": torch.arange(3), "b": b"xyz"}
    encoded = encode(value)
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write_into(memory)
    assert_same(decode(memory), value)
    with pytest.raises(CorruptSampleError, match="CRC32"):
        check(memory)


def test_the_bytes_do_not_depend_on_what_was_there_before() -> None:
    encoded = encode({"a": torch.zeros(3), "b": b"xyz", "c": np.zeros(0)})
    memories = [memoryview(bytearray(bytes([fill]) * encoded.nbytes)) for fill in (0, 255)]
    for memory in memories:
        encoded.write_into(memory)
    assert memories[0] == memories[1]


def test_pinned_bytes() -> None:
    """The layout of the module's documentation, and nothing else."""
    value = {"x": torch.tensor([1, 2], dtype=torch.int16), "y": np.zeros(0), "z": np.array([3], np.uint8)}
    encoded = encode(value)
    lengths = b"".join(nbytes.to_bytes(8, "little") for nbytes in (4, 0, 1))
    assert encoded.description[:24] == lengths
    begin = -(-(32 + len(encoded.description)) // 64) * 64
    head = b"".join(number.to_bytes(8, "little") for number in (begin + 65, len(encoded.description), 3))
    checked = (head + encoded.description).ljust(begin - 8, b"\0") + b"\1\0\2\0" + bytes(60) + b"\3"
    expected = b"FSV3" + zlib.crc32(checked).to_bytes(4, "little") + checked
    assert bytes(memory_of(value)[: encoded.nbytes]) == expected


def test_equal_values_have_equal_bytes() -> None:
    """Whether parts of them are the same object or not. The fingerprints of datasets rely on it."""
    text = "".join(["a", "b"])
    assert encode([text, text, {"x": text}]) == encode(["".join(["a", "b"]), "ab", {"x": "ab"}])


@given(st.lists(VALUES, max_size=4))
def test_values_that_are_encoded_one_after_the_other_have_the_same_bytes(values: list[Any]) -> None:
    """Also after one that was refused: in the middle, or within so many lists that the pickler looks for cycles."""
    encoder, deep = Encoder(), [1, set[int]()]
    for _ in range(60):
        deep = [deep]
    for value in values:
        assert encoder.encode(value) == encode(value)
        for refused in ([value, set[int]()], deep):
            with pytest.raises(UnsupportedSampleError, match="set"):
                encoder.encode(refused)


OTHERS: list[tuple[Any, str]] = [
    ([1, {"x": {1, 2}}], "the sample has an object of the type builtins.set"),
    ({PurePosixPath("a"): 1}, f"the sample has an object of the type {PurePosixPath.__module__}.PurePosixPath"),
    (OrderedDict(a=torch.ones(2)), "collections.OrderedDict"),
    ((torch.ones(2, requires_grad=True),), r"the sample has a torch.Tensor .*requires_grad"),
    (torch.ones(2).to_sparse(), "sparse"),
    (torch.nn.Parameter(torch.ones(2)), "Parameter"),
    (torch.ones(2, device="meta"), "meta"),
    (np.array([None]), "an array of object"),
    (np.zeros(2, [("x", "f4")]), "an array of"),
    (np.ma.masked_array([1, 2], [True, False]), "array"),
    (bytearray(b"x"), "builtins.bytearray"),
    (torch.float32, "torch.dtype"),
]


@pytest.mark.parametrize(("value", "message"), OTHERS, ids=range(len(OTHERS)))
def test_other_objects_are_refused(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedSampleError, match=message):
        encode(value)


def test_what_cannot_be_encoded_at_all() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for value, message in [
        (endless, "contains itself"),
        (deep, "nested too deeply"),
        ({"x": lambda: 0}, "an object of the type builtins.function"),
    ]:
        with pytest.raises(UnsupportedSampleError, match=message):
            encode(value)


def test_deep_values_come_back() -> None:
    value: Any = b"x"
    for _ in range(99):
        value = [value]
    assert_same(decode(memory_of(value)), value)


def test_named_tuples_are_of_modules_that_are_there() -> None:
    memory = bytearray(memory_of(Pair(1, 2)))
    module = Pair.__module__.encode()
    with pytest.raises(UnsupportedSampleError, match="import nothing"):
        decode(memoryview(bytearray(memory.replace(module, b"nothing".ljust(len(module), b"_")))))
    with pytest.raises(UnsupportedSampleError, match="Dict, and found None"):
        decode(memoryview(bytearray(memory.replace(b"\x04Pair", b"\x04Dict"))))


def test_nothing_of_a_sample_is_called() -> None:
    description = pickle.dumps(os.getpid)
    begin = 32 + len(description)
    head = b"FSV3" + bytes(4) + b"".join(number.to_bytes(8, "little") for number in (begin, len(description), 0))
    with pytest.raises(CorruptSampleError, match=r"refers to posix\.getpid"):
        decode(memoryview(bytearray(head + description)))


@pytest.mark.parametrize(
    ("begin", "data"),
    [
        (0, b"FSV1"), (8, bytes(8)), (8, b"\xff" * 8), (16, b"\xff" * 8), (16, b"\xff\xff\0\0\0\0\0\0"),
        (24, b"\xff" * 8), (24, b"\xff\0\0\0\0\0\0\0"),
    ],
)  # fmt: skip
def test_a_wrong_head_is_refused(begin: int, data: bytes) -> None:
    memory = memory_of([torch.zeros(3), "x"])
    memory[begin : begin + len(data)] = data
    for refuse in (check, decode):
        with pytest.raises(CorruptSampleError, match="expected b'FSV3'"):
            refuse(memory)
        with pytest.raises(CorruptSampleError, match="head of 32 bytes"):
            refuse(memory[:31])


def test_memory_has_to_be_aligned() -> None:
    encoded = encode(torch.zeros(3))
    memory = memoryview(bytearray(encoded.nbytes + 1))[1:]
    encoded.write_into(memory)
    with pytest.raises(ValueError, match="multiple of 16"):
        decode(memory)


def test_one_value_of_a_strided_tensor() -> None:
    """The stride of a dimension with one element may be any."""
    value = torch.arange(8, dtype=torch.int16)[3::2][:1]
    assert value.stride() == (2,)
    assert_same(decode(memory_of({"x": value})), {"x": value})


@given(VALUES, st.data())
def test_each_changed_byte_is_noticed(value: Any, data: st.DataObject) -> None:
    nbytes = encode(value).nbytes
    memory = memory_of(value)[:nbytes]
    memory[data.draw(st.integers(0, nbytes - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptSampleError):
        check(memory)


def test_errors_are_found_by_their_bases() -> None:
    assert issubclass(CorruptSampleError, RuntimeError)
    assert issubclass(UnsupportedSampleError, TypeError)
