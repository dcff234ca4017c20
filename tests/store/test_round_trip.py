"""What is put comes back, bit by bit, and others can read the files."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import states
import torch
from hypothesis import given
from hypothesis import strategies as st
from programs import run
from torch import Tensor

import fastensor
from fastensor import TensorRef, TensorStore
from fastensor.backends import registry
from fastensor.backends.registry import available_names
from fastensor.stitch.shape import is_dense

TOOLS = [registry.AUTO, *available_names()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def path_of(store: TensorStore, ref: TensorRef) -> Path:
    return Path(store.directory) / ref.file


def bits(tensor: Tensor) -> bytes:
    if not tensor.numel():
        return b""
    values = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return values.reshape(-1).view(torch.uint8).numpy().tobytes()


def laid_out(tensor: Tensor, how: str) -> Tensor:
    """A tensor of the same kind, whose elements lie otherwise."""
    match how:
        case "transposed":
            return tensor.permute(tuple(reversed(range(tensor.dim()))))
        case "channels_last" if tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        case "rolled" if tensor.dim() > 2:
            return tensor.permute((1, 2, 0, *range(3, tensor.dim())))
        case "every other" if tensor.dim():
            return tensor[::2]
        case "expanded":
            return tensor.expand(2, *tensor.shape)
        case "part" if tensor.dim():
            return tensor[1:]
        case "conjugate" if tensor.is_complex():
            return tensor.conj()
        case "negative" if tensor.is_complex():
            return tensor.conj().imag
    return tensor


LAYOUTS = [
    "as it is",
    "transposed",
    "channels_last",
    "rolled",
    "every other",
    "expanded",
    "part",
    "conjugate",
    "negative",
]


def assert_comes_back(found: Tensor, tensor: Tensor) -> None:
    assert type(found) is type(tensor)
    assert (found.dtype, found.shape, found.device) == (tensor.dtype, tensor.shape, tensor.device)
    assert found.requires_grad == tensor.requires_grad
    assert found.is_leaf
    assert bits(found) == bits(tensor)
    kept = tensor.numel() and is_dense(tensor.shape, tensor.stride())
    assert found.stride() == (tensor.stride() if kept else torch.empty(tensor.shape).stride())


@given(
    tensor=states.dense(),
    how=st.sampled_from(LAYOUTS),
    kind=st.sampled_from(["plain", "with grad", "parameter"]),
    tool=st.sampled_from(TOOLS),
    mode=st.sampled_from(["write", "read", "write_read"]),
)
def test_tensors_come_back(
    folder: Path, tensor: Tensor, how: str, kind: str, tool: str, mode: Any, tally: Counter[str]
) -> None:
    tensor = laid_out(tensor, how)
    with_grad = tensor.is_floating_point() or tensor.is_complex()
    if kind == "parameter" and not (tensor.is_conj() or tensor.is_neg()):
        tensor = torch.nn.Parameter(tensor, requires_grad=with_grad)
    elif kind == "with grad" and with_grad and tensor.is_leaf:
        tensor = tensor.detach().requires_grad_()
    store = TensorStore(folder, backend=tool, mode=mode)
    ref = store.put(tensor)
    tally[f"tensors stored by {ref.backend}"] += 1
    assert_comes_back(store.get(ref), tensor)
    path = path_of(store, ref)
    assert path.suffix == f".{ref.format}" == (".pt" if ref.backend == "torch" else ".npy")
    if ref.format == "npy":
        array = np.load(path)
        assert array.shape == tensor.shape
        assert array.tobytes() == bits(tensor)
    else:
        loaded = torch.load(path)
        assert (loaded.dtype, loaded.shape, bits(loaded)) == (tensor.dtype, tensor.shape, bits(tensor))
    assert path.stat().st_size < tensor.nbytes + 8192
    store.delete(ref)
    assert not path.exists()


@given(states.special(), st.sampled_from(TOOLS))
def test_special_tensors_come_back_or_are_refused(folder: Path, value: Any, tool: str) -> None:
    store = TensorStore(folder, backend=tool)
    if not isinstance(value, Tensor):
        with pytest.raises(TypeError, match="expected a tensor, found"):
            store.put(value)
        return
    if value.is_nested or value.device.type == "meta":
        with pytest.raises(fastensor.UnsupportedContentError, match=r"\.values\(\)|no values"):
            store.put(value)
        return
    ref = store.put(value)
    if value.layout != torch.strided or value.is_quantized or isinstance(value, states.Scaled):
        assert (ref.format, ref.backend, ref.plain) == ("pt", "torch", False)
        with torch.serialization.safe_globals([states.Scaled]):
            states.assert_equal(store.get(ref), value)
    else:
        assert_comes_back(store.get(ref), value)


def test_what_numpy_cannot_hold_is_for_torch_which_is_logged_once(tmp_path: Path, caplog: Any) -> None:
    store = TensorStore(tmp_path, backend="direct")
    for _ in range(2):
        ref = store.put(torch.eye(3).to_sparse())
    assert (ref.kind, ref.format, ref.backend) == ("sparse_coo", "pt", "torch")
    (record,) = caplog.records
    assert record.message == "direct is not used: a .npy file cannot hold a tensor that is not dense"
    assert store.statistics().fallbacks == {"direct": "a .npy file cannot hold a tensor that is not dense"}


def test_a_tensor_of_many_dimensions_comes_back(tmp_path: Path) -> None:
    store = TensorStore(tmp_path, backend="numpy")
    tensor = torch.arange(4.0).reshape([1] * 40 + [2, 2]).transpose(-1, -2)
    ref = store.put(tensor)
    assert (ref.format, ref.kind) == ("pt", "Tensor")
    assert_comes_back(store.get(ref), tensor)


def test_a_class_that_torch_does_not_know_has_to_be_allowed(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    ref = store.put(torch.ones(3).as_subclass(states.Scaled))
    with pytest.raises(fastensor.UnsafeCheckpointError, match=r"does not allow .*\(Scaled\).*add_safe_globals"):
        store.get(ref)


DENSE = {
    value for name, value in vars(torch).items() if isinstance(value, torch.dtype) and name[:2] not in ("qi", "qu")
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@pytest.mark.parametrize("dtype", sorted(DENSE, key=str), ids=str)
@pytest.mark.parametrize("tool", TOOLS)
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype, tool: str) -> None:
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 255)
    tensor = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (2, 3))
    store = TensorStore(tmp_path, backend=tool)
    for one in (tensor, tensor.t(), tensor[:, ::2], tensor[1, 2]):
        found = store.get(store.put(one))
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        assert bits(found.view(INTEGERS[dtype.itemsize])) == bits(one.view(INTEGERS[dtype.itemsize]))


def test_attributes_hooks_and_the_graph_are_not_stored(tmp_path: Path) -> None:
    for tool in ("numpy", "torch"):
        store = TensorStore(tmp_path, backend=tool)
        tensor = torch.ones(3, requires_grad=True) * 2
        tensor.note = "mine"  # type: ignore[attr-defined]
        tensor.register_hook(lambda grad: grad)
        found = store.get(store.put(tensor))
        assert found.requires_grad
        assert found.grad_fn is None
        assert not hasattr(found, "note")
        assert tensor.note == "mine"  # type: ignore[attr-defined]


def test_it_works_in_every_mode_of_torch(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    tensor = torch.randn(3, 4, dtype=torch.bfloat16)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for one in (tensor, tensor[:, 1:], tensor * 2):
                assert torch.equal(store.get(store.put(one)), one)
    with torch.device("meta"):  # the default for new tensors
        for tool in ("numpy", "torch"):
            other = TensorStore(tmp_path, backend=tool)
            assert torch.equal(other.get(other.put(tensor)), tensor)


def test_what_comes_back_is_the_callers(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    tensor = torch.ones(1000)
    ref = store.put(tensor)
    store.get(ref).zero_()
    tensor.zero_()
    assert store.get(ref).sum() == 1000


def test_a_view_of_a_large_storage_is_a_small_file(tmp_path: Path) -> None:
    large = torch.arange(1 << 20)
    for tool in TOOLS:
        store = TensorStore(tmp_path, backend=tool)
        for part in (large[77:80], large[80:80]):
            ref = store.put(part)
            assert path_of(store, ref).stat().st_size < 8192
            assert store.get(ref).tolist() == part.tolist()


def test_freed_storages_are_refused(tmp_path: Path) -> None:
    tensor = torch.ones(100, 100)
    tensor.untyped_storage().resize_(4000)
    for tool in TOOLS:
        with pytest.raises(fastensor.UnsupportedContentError, match="freed"):
            TensorStore(tmp_path, backend=tool).put(tensor)
    assert not list(tmp_path.iterdir())


def test_refs_go_to_other_processes(tmp_path: Path) -> None:
    tensors = [
        torch.randn(5, 4).t(),
        torch.tensor(3.5, dtype=torch.bfloat16, requires_grad=True),
        torch.eye(3).to_sparse(),
    ]
    with TensorStore(tmp_path / "a" / "b") as store:
        refs = store.put_many(iter(tensors))
    for ref in refs:
        assert pickle.loads(pickle.dumps(ref)) == ref
        assert TensorRef(**json.loads(json.dumps(asdict(ref)))) == ref
    (tmp_path / "refs").write_bytes(pickle.dumps(refs))
    code = (
        "import pickle, sys, torch, fastensor\n"
        "refs = pickle.load(open(sys.argv[1] + '/refs', 'rb'))\n"
        "with fastensor.TensorStore(sys.argv[1] + '/a/b') as store:\n"
        "    torch.save(store.get_many(refs), sys.argv[1] + '/found')\n"
        "    store.delete_many(refs)\n"
    )
    run("-c", code, tmp_path)
    for found, tensor in zip(torch.load(tmp_path / "found"), tensors, strict=True):
        states.assert_equal(found, tensor)
    assert not list((tmp_path / "a" / "b").iterdir())


def good_ref() -> dict[str, Any]:
    return asdict(
        TensorRef("0" * 32 + ".npy", "npy", "Tensor", "float32", (2, 3), (1, 2), "cpu", False, 24, 1, "numpy")
    )


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../../etc/passwd"},
        {"file": "/etc/" + "0" * 27 + ".npy"},
        {"file": "0" * 32 + ".pt"},
        {"file": "0" * 32 + ".npy\n"},
        {"format": "exe"},
        {"shape": (2, -3)},
        {"shape": (2.0, 3)},
        {"shape": (True, 6)},
        {"shape": (1 << 62, 1 << 62), "stride": None},
        {"shape": (1 << 40,), "stride": None},
        {"stride": (1,)},
        {"stride": (3, 0)},
        {"stride": (1 << 40, 1)},
        {"stride": (-1, 2)},
        {"nbytes": 1 << 50},
        {"nbytes": 23},
        {"nbytes": 23, "kind": "sparse_coo"},
        {"shape": (1000,), "stride": None, "kind": "sparse_coo"},
        {"dtype": "float64"},
    ],
)
def test_refs_that_contradict_themselves_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a ref of a tensor"):
        TensorRef(**(good_ref() | change))


@pytest.mark.parametrize("dtype", ["float3", "nn", "", "load"])
def test_a_dtype_of_another_torch_is_named(dtype: str) -> None:
    with pytest.raises(fastensor.UnsupportedContentError, match=repr(dtype)):
        TensorRef(**(good_ref() | {"dtype": dtype}))


def test_another_device_can_be_asked_for(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    ref = store.put(torch.ones(3))
    assert store.get(ref, "cpu").device.type == "cpu"
    assert store.get(ref, torch.device("cpu")).device.type == "cpu"
    there_is_none = TensorRef(**(asdict(ref) | {"device": "xpu"}))
    for bad, device in ((ref, "xpu"), (there_is_none, None), (ref, "warp")):
        with pytest.raises(fastensor.PlacementError, match="device='cpu' always works"):
            store.get(bad, device)
    assert torch.equal(store.get(there_is_none, "cpu"), torch.ones(3))
