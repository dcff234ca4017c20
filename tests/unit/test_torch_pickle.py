"""Pickles are read symbolically: nothing of the process is changed by them, and no pickle takes forever."""

from __future__ import annotations

import collections
import pickle
from typing import Any

import pytest
import torch

from fastensor import CorruptCheckpointError
from fastensor.checkpoint import names
from fastensor.stitch import torch_pickle
from fastensor.stitch.torch_pickle import Opaque, read_structure, storages_in

PROTOCOL = b"\x80\x02"


def read(*opcodes: bytes) -> Any:
    return read_structure(PROTOCOL + b"".join(opcodes) + b".", where="x")


def global_(name: str) -> bytes:
    module, _, own = name.rpartition(".")
    return b"c" + f"{module}\n{own}\n".encode()


@pytest.mark.parametrize(
    "name", ["torch._utils._rebuild_tensor_v2", "collections.Counter", "torch.Size", "collections.OrderedDict", "a.b"]
)
def test_a_state_for_what_is_not_of_the_file(name: str) -> None:
    before = dict(vars(torch_pickle._rebuild_tensor)), vars(collections.Counter).keys()
    state = b"}U\x08__dict__}U\x01aK\x01ssN\x86"  # ({...}, None), also as a tuple of dict state and slots
    for pushed in (b"}U\x0bmost_commonK\x01s", state):
        with pytest.raises(CorruptCheckpointError, match="x: the pickle is damaged"):
            read(global_(name), pushed, b"b")
    assert (dict(vars(torch_pickle._rebuild_tensor)), vars(collections.Counter).keys()) == before


def test_unknown_classes_are_neither_imported_nor_run() -> None:
    found = read(global_("os.system"), b"U\x04true", b"\x85", b"R")
    assert isinstance(found, Opaque)
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
        read_structure(b"\x80\x05\x96" + b"\xff" * 7 + b"\x00abc.", where="x")


@pytest.mark.parametrize(
    "arguments", [(-1, (2,), (1,)), (0, (2,), (1, 1)), (0, (1 << 62, 4), (1, 1)), (0, (True,), (1,)), (0, ("a",), (1,))]
)
def test_tensors_that_cannot_be(arguments: tuple[Any, ...]) -> None:
    storage = torch_pickle.StorageRef("0", torch.float32, "cpu")
    with pytest.raises(ValueError, match="a tensor"):
        torch_pickle._rebuild_tensor(storage, *arguments, False, None)


def test_plain_pickles_are_what_they_are() -> None:
    value = {"a": [1, 2.5, None, True, "text", b"bytes", 10**50, {3}], "b": {"c": (1, 2)}}
    for protocol in range(2, 6):
        found = read_structure(pickle.dumps(value, protocol), where="x")
        assert found["a"] == value["a"]
        assert list(found["b"]["c"]) == [1, 2]
        assert list(storages_in(found)) == []
