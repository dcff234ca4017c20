"""Samples come back from shared memory as they were, as views of it; bytes that are no sample are refused."""

from __future__ import annotations

import contextlib
import gc
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
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fastensor.errors import CorruptSampleError, FastensorError, UnsupportedSampleError
from fastensor.provision.encoding import check, decode, encode


class Pair(NamedTuple):
    first: Any
    second: Any


def memory_of(value: Any) -> memoryview:
    """Writable memory with a value in it, and something behind it. It had been used before."""
    encoded = encode(value)
    memory = memoryview(bytearray(b"\xaa" * (encoded.nbytes + 9)))
    encoded.write_into(memory)
    assert bytes(memory[encoded.nbytes :]) == b"\xaa" * 9
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
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write_into(memory)
    assert_same(decode(memory), [torch.ones(3), np.full(3, 2.0)])
    with pytest.raises(ValueError, match=f"{encoded.nbytes} bytes, found memory of {encoded.nbytes - 1}"):
        encoded.write_into(memory[:-1])


def test_the_bytes_do_not_depend_on_what_was_there_before() -> None:
    encoded = encode({"a": torch.zeros(3), "b": b"xyz", "c": np.zeros(0)})
    memories = [memoryview(bytearray(bytes([fill]) * encoded.nbytes)) for fill in (0, 255)]
    for memory in memories:
        encoded.write_into(memory)
    assert memories[0] == memories[1]


def test_pinned_bytes() -> None:
    """The layout of the module's documentation, and nothing else."""
    description = b'["d","x",["t","int16",[2]],"y",["u",["b",0],7]]'
    checked = (192).to_bytes(8, "little") + len(description).to_bytes(8, "little") + description
    checked = checked.ljust(128 - 8, b"\0") + b"\1\0\2\0" + bytes(60)  # the bytes, which are none, begin at 192
    expected = b"FSV1" + zlib.crc32(checked).to_bytes(4, "little") + checked
    value = {"x": torch.tensor([1, 2], dtype=torch.int16), "y": (b"", 7)}
    assert bytes(memory_of(value)[: encode(value).nbytes]) == expected


OTHERS: list[tuple[Any, str]] = [
    ([1, {"x": {1, 2}}], r"the sample\[1\]\['x'\] is of the type builtins.set"),
    ({PurePosixPath("a"): 1}, f"a key of the sample is of the type {PurePosixPath.__module__}.PurePosixPath"),
    (OrderedDict(a=torch.ones(2)), "collections.OrderedDict"),
    ((torch.ones(2, requires_grad=True),), r"the sample\[0\] is a torch.Tensor .*requires_grad"),
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
    for value, message in [
        (endless, "contains itself"),
        ({"x": lambda: 0}, r"the sample\['x'\] is of the type builtins.function"),
        ([10**5000], "digits"),
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
    for found, message in [(b"nothing".ljust(len(module), b"_"), "import nothing")]:
        with pytest.raises(UnsupportedSampleError, match=message):
            decode(memoryview(bytearray(memory.replace(module, found))))
    with pytest.raises(UnsupportedSampleError, match=r"os\.getpid, but <built-in"):
        decode(described(b'["m","os","getpid"]'))
    with pytest.raises(UnsupportedSampleError, match=r"builtins\.tuple"):
        decode(described(b'["m","builtins","tuple",1]'))


def described(description: bytes, buffers: bytes = b"") -> memoryview:
    """Memory that claims to hold a value."""
    begin = 24 + len(description)
    nbytes = (-(-begin // 64) * 64 + len(buffers)) if buffers else begin
    head = b"FSV1" + bytes(4) + nbytes.to_bytes(8, "little") + len(description).to_bytes(8, "little")
    return memoryview(bytearray((head + description).ljust(nbytes - len(buffers), b"\0") + buffers))


HOSTILE = [
    b"", b"{}", b"[]", b"[[]]", b'["x"]', b'["t"]', b'["t","float32",[1]]', b'["t","float32",[-1]]', b"\xff",
    b'["t","float32",[9223372036854775807,9223372036854775807]]', b'["t","float32",[0,9223372036854775807,2,3]]',
    b'["t","strided",[1]]', b'["t",["float32"],[1]]', b'["t","qint8",[0]]', b'["a","O",[0]]', b'["a","<f3",[0]]',
    b'["a","<V0",[9223372036854775807]]', b'["a","<f4,<f4",[0]]', b'["a","<f4",[0,9223372036854775807,2,3]]',
    b'["a","<f4",[true]]', b'["a","<f4",[' + b",".join([b"0"] * 65) + b"]]", b'["a",7,[0]]', b'["b",1]', b'["b",-1]',
    b'["b",0.0]', b'["b",1e400]', b'["d",1]', b'["d",["l"],1]', b'["L",[[]]]', b'["L",{}]', b'["L"]',
    b'["n","<f4","abc"]',
    b'["n","<f4","\xe2\x82\xac"]', b'["n","<f4",4]', b'["m"]', b'["m",1,2]', b'["m","os",2]', b'["m",[],"a"]',
    b'["p",["t","float32",[1]],0]', b"[" * 100_000, b'["l",' * 102 + b"1" + b"]" * 102, b"9" * 5000, b'["u",{}]',
]  # fmt: skip


@pytest.mark.parametrize("description", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_descriptions_are_refused(description: bytes) -> None:
    with pytest.raises((CorruptSampleError, UnsupportedSampleError)):
        decode(described(description))


def test_a_buffer_is_used_once() -> None:
    """A small description cannot ask for the same large buffer again and again."""
    big = bytes(1 << 20)
    assert decode(described(b'["b",1048576]', big)) == big
    with pytest.raises(CorruptSampleError, match="leaves"):
        decode(described(b'["l",["b",1048576],["b",1048576]]', big))
    with pytest.raises(CorruptSampleError, match="its buffers end at"):
        decode(described(b'["l",["b",1048575]]', big))


@pytest.mark.parametrize(
    ("begin", "data"), [(0, b"FSV2"), (8, bytes(8)), (8, b"\xff" * 8), (16, b"\xff" * 8), (16, b"\xff\0\0\0\0\0\0\0")]
)
def test_a_wrong_head_is_refused(begin: int, data: bytes) -> None:
    memory = memory_of([torch.zeros(3), "x"])
    memory[begin : begin + len(data)] = data
    for refuse in (check, decode):
        with pytest.raises(CorruptSampleError, match="expected b'FSV1'"):
            refuse(memory)
        with pytest.raises(CorruptSampleError, match="head of 24 bytes"):
            refuse(memory[:23])


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
    decode_or_refuse(memory)


@settings(max_examples=300)
@given(st.data())
def test_mutated_descriptions_are_decoded_or_refused(data: st.DataObject) -> None:
    start = data.draw(st.sampled_from([bytes(memory_of(value)) for value in MUTATED]))
    changed = bytearray(start[24:])
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(changed)))
        end = data.draw(st.integers(begin, min(begin + 4, len(changed))))
        changed[begin:end] = data.draw(st.binary(max_size=4) | st.sampled_from([b"[", b'"l"', b"{}", b"1e999", b"-1"]))
    lengths = st.integers(0, len(changed) + 30)
    head = b"FSV1" + bytes(4) + data.draw(lengths).to_bytes(8, "little") + data.draw(lengths).to_bytes(8, "little")
    decode_or_refuse(memoryview(bytearray(head + changed)))


MUTATED = [
    {"x": torch.arange(3), "y": [1.5, None, "text"], "z": (b"bytes", np.arange(4.0))},
    Pair(np.float32(3), {"a": {"b": [True, np.datetime64("2026-01-01")]}}),
]


def decode_or_refuse(memory: memoryview) -> None:
    for view in (memory, memory.toreadonly()):
        with contextlib.suppress(FastensorError):
            decode(view)


def test_errors_are_found_by_their_bases() -> None:
    assert issubclass(CorruptSampleError, RuntimeError)
    assert issubclass(UnsupportedSampleError, TypeError)
