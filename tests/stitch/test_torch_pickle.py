"""Pickles are read symbolically: nothing of the process is changed by them, and no pickle takes forever."""

from __future__ import annotations

import collections
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch

from fastensor import CorruptCheckpointError
from fastensor.checkpoint.models import names
from fastensor.stitch import pickle_functions
from fastensor.stitch.pickle_records import PickledStorage, UnknownObject, storages_in
from fastensor.stitch.torch_pickle import read_program

PROTOCOL = b"\x80\x02"


def read(*opcodes: bytes) -> Any:
    return read_pickle(PROTOCOL + b"".join(opcodes) + b".")


def read_pickle(data: bytes) -> Any:
    return read_program(data, where="x").structure


def global_(name: str) -> bytes:
    module, _, own = name.rpartition(".")
    return b"c" + f"{module}\n{own}\n".encode()


@pytest.mark.parametrize(
    "name", ["torch._utils._rebuild_tensor_v2", "collections.Counter", "torch.Size", "collections.OrderedDict", "a.b"]
)
def test_a_state_for_what_is_not_of_the_file(name: str) -> None:
    before = dict(vars(pickle_functions.rebuild_tensor)), vars(collections.Counter).keys()
    state = b"}U\x08__dict__}U\x01aK\x01ssN\x86"  # ({...}, None), also as a tuple of dict state and slots
    for pushed in (b"}U\x0bmost_commonK\x01s", state):
        with pytest.raises(CorruptCheckpointError, match="x: the pickle is damaged"):
            read(global_(name), pushed, b"b")
    assert (dict(vars(pickle_functions.rebuild_tensor)), vars(collections.Counter).keys()) == before


def test_unknown_classes_are_neither_imported_nor_run() -> None:
    found = read(global_("os.system"), b"U\x04true", b"\x85", b"R")
    assert isinstance(found, UnknownObject)
    assert repr(found) == "<os.system>"


def test_tuples_as_keys_take_no_time_and_no_stack() -> None:
    doubled = b"K\x01K\x02\x86" + b"2\x86" * 60
    found = read(b"}", doubled, b"K\x01s")
    assert list(names.walk(found)) == [("<tuple of 2>", 1)]
    nested = b")" + b"\x85" * 400_000
    assert len(read(b"}", nested, b"K\x01s")) == 1
    assert len(read(b"c__builtin__\nset\n]", nested, b"a\x85R")) == 1


def test_memos_and_byte_arrays_of_absurd_sizes() -> None:
    assert read(b"K\x01", b"r\xff\xff\xff\xff") == 1
    with pytest.raises(CorruptCheckpointError, match="cut off"):
        read_pickle(b"\x80\x05\x96" + b"\xff" * 7 + b"\x00abc.")


@pytest.mark.parametrize(
    "arguments", [(-1, (2,), (1,)), (0, (2,), (1, 1)), (0, (1 << 62, 4), (1, 1)), (0, (True,), (1,)), (0, ("a",), (1,))]
)
def test_tensors_that_cannot_be(arguments: tuple[Any, ...]) -> None:
    storage = PickledStorage("0", torch.float32, "cpu")
    with pytest.raises(ValueError, match="a tensor"):
        pickle_functions.rebuild_tensor(storage, *arguments, False, None)


def test_plain_pickles_are_what_they_are() -> None:
    value = {"a": [1, 2.5, None, True, "text", b"bytes", b"", {3}], "b": {"c": (1, 2)}, "large": 10**50, "z": 1 - 2j}
    for protocol in range(6):
        found = read_pickle(pickle.dumps(value, protocol))
        assert found == value
        assert list(storages_in(found)) == []


HEAVY = (1, (2,)), (0,) * 11, frozenset({1}), 1 << 64, -1 << 64, 1j, "x" * 200_000, b"x" * 200_000, (1 << 64,)
LIGHT = (1, "x"), torch.Size([1]), 1 << 63, "x", b"x", 0.5, None, True, ()


def test_keys_that_take_long_to_hash_or_to_compare_are_records() -> None:
    """Records are equal to nothing but themselves."""
    for protocol in (4, 5):
        for container in ([dict.fromkeys(HEAVY, 1)], [set(HEAVY)], [frozenset(HEAVY)], [OrderedDict.fromkeys(HEAVY)]):
            (found,) = read_pickle(pickle.dumps(container, protocol))
            assert {type(key) for key in found} == {UnknownObject}
            assert sorted(str(key.parts[0]) for key in found) == sorted(map(str, HEAVY))


def test_other_keys_are_what_they_are() -> None:
    for protocol in range(6):
        assert read_pickle(pickle.dumps(dict.fromkeys(LIGHT, 1), protocol)) == dict.fromkeys(LIGHT, 1)


def test_storages_in_keys_are_found() -> None:
    assert len(list(storages_in(read(b"}", tensor_of(1), b"\x85", b"K\x01s")))) == 1


def test_bytes_without_contents_take_no_arguments() -> None:
    assert repr(read(global_("__builtin__.bytes"), b"K\x05", b"\x85", b"R")) == "<builtins.bytes>"


@pytest.mark.parametrize("opcode", [b"\x97", b"N\x98", b"\x96\1\0\0\0\0\0\0\0x\x98"])
def test_buffers_out_of_band_are_not_of_torch(opcode: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"x: the pickle is damaged.*buffer"):
        read(opcode)


@pytest.mark.parametrize("name", ["a" * 10_000, "\U0001f525" * 100, "\ud800" * 150])
def test_names_are_short(name: str) -> None:
    encoded = name.encode(errors="surrogatepass")
    with pytest.raises(CorruptCheckpointError, match="a global whose name has more than 300 bytes"):
        read(b"U\1aX", len(encoded).to_bytes(4, "little"), encoded, b"\x93")


def test_names_of_calls_of_calls_are_one() -> None:
    found = read(global_("a.b"), b")R)R)R")
    assert found.name is found.parts[0].name
    assert repr(found) == "<a.b>"


@pytest.mark.parametrize("opcodes", [b"c" + b"\xff" * 10_000 + b"\n", b"F" + b"x" * 10_000 + b"\n"])
def test_messages_are_short(opcodes: bytes) -> None:
    with pytest.raises(CorruptCheckpointError, match="x: the pickle is damaged") as caught:
        read(opcodes)
    assert len(str(caught.value)) < 500


def test_memory_that_is_wanting_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise MemoryError

    monkeypatch.setitem(pickle_functions._KNOWN, "a.b", fail)
    with pytest.raises(MemoryError):
        read(global_("a.b"), b")R")


def test_tensors_of_many_dimensions() -> None:
    for count in (100, 1000):
        assert len(read(tensor_of(count)).shape) == count
    once = b"(" + b"K\1" * 5000 + b"tq\1"
    with pytest.raises(CorruptCheckpointError, match="copy more than the file holds"):
        read(b"](", once, tensor_of_sizes(b"h\1") * 100, b"e")


def test_sparse_tensors_of_one_size() -> None:
    sparse = global_("torch._utils._rebuild_sparse_tensor") + b"(N(h\2h\2h\1ttR"
    size = global_("torch.Size") + b"((" + b"K\1" * 5000 + b"ttRq\1"
    assert read(b"](", size, tensor_of(1), b"q\2", sparse, b"e")[2].kind == "sparse"
    with pytest.raises(CorruptCheckpointError, match="copy more than the file holds"):
        read(b"](", size, tensor_of(1), b"q\2", sparse * 100, b"e")


def tensor_of(dimensions: int) -> bytes:
    return tensor_of_sizes(b"(" + b"K\1" * dimensions + b"t")


def tensor_of_sizes(ones: bytes) -> bytes:
    storage = b"(U\7storage" + global_("torch.FloatStorage") + b"U\x010U\3cpuK\1tQ"
    return global_("torch._utils._rebuild_tensor_v2") + b"(" + storage + b"K\0" + ones * 2 + b"\x89NtR"
