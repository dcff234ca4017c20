"""State trees for tests, and what it means that two are equal."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


class Scaled(Tensor):
    """A subclass with an attribute."""


def random_bytes(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


def dense() -> st.SearchStrategy[Tensor]:
    shapes = st.lists(st.integers(0, 7), max_size=4) | st.just([3000]) | st.just([40, 41])
    return st.builds(random_bytes, st.sampled_from(DTYPES), shapes, st.integers(0, 99))


def special_of(kind: str, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(6, 8, generator=generator)
    match kind:
        case "transposed":
            return base.t()
        case "strided":
            return base[::2, 1::3]
        case "expanded":
            return base[:1].expand(5, 8)
        case "parameter":
            return torch.nn.Parameter(base, requires_grad=bool(seed % 2))
        case "subclass":
            return base.as_subclass(Scaled)
        case "sparse_coo":
            return base.relu().to_sparse()
        case "sparse_csr":
            return base.relu().to_sparse_csr()
        case "quantized":
            return torch.quantize_per_tensor(base, 0.1, 3, torch.qint8)
        case "quantized_per_channel":
            return torch.quantize_per_channel(base, torch.rand(6) + 0.1, torch.zeros(6), 0, torch.quint8)
        case "nested":
            return torch.nested.nested_tensor([base[0], base[1, :3]], layout=torch.jagged)
        case "untyped_storage":
            return base.untyped_storage()
        case "meta":
            return torch.empty(3, device="meta")
        case "conjugate":
            return torch.view_as_complex(base.reshape(6, 4, 2)).conj()
        case "ties":
            return {"whole": base, "again": base, "view": base[1:3], "row": base[4]}
    raise AssertionError(kind)


SPECIAL = [
    "transposed", "strided", "expanded", "parameter", "subclass", "sparse_coo", "sparse_csr", "quantized",
    "quantized_per_channel", "nested", "untyped_storage", "meta", "conjugate", "ties",
]  # fmt: skip


def special() -> st.SearchStrategy[Any]:
    return st.builds(special_of, st.sampled_from(SPECIAL), st.integers(0, 5))


def plain() -> st.SearchStrategy[Any]:
    return (
        st.none()
        | st.booleans()
        | st.integers(-(2**200), 2**200)
        | st.floats(allow_nan=False)
        | st.text(max_size=20)
        | st.binary(max_size=20)
        | st.frozensets(st.integers(), max_size=3).map(set)
        | st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3]), Counter("abca")])
    )


def trees() -> st.SearchStrategy[Any]:
    leaves = dense() | special() | plain()
    keys = st.text(min_size=1, max_size=8) | st.integers(0, 1000)
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.tuples(inner, inner)
            | st.dictionaries(keys, inner, max_size=5)
            | st.dictionaries(keys, inner, max_size=5).map(OrderedDict)
        ),
        max_leaves=12,
    )


def assert_equal(found: Any, expected: Any) -> None:
    """Equal in type, value, layout and, for tensors, every byte that the storage holds."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        _assert_equal_tensors(found, expected)
    elif isinstance(expected, torch.UntypedStorage | torch.storage.TypedStorage):
        assert list(found) == list(expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, (list, tuple)) and not isinstance(expected, torch.Size):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Equal in names, in any order, and in dtypes, shapes and bytes."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))


def _assert_equal_tensors(found: Tensor, expected: Tensor) -> None:
    for attribute in ("dtype", "device", "layout", "requires_grad", "is_nested", "is_quantized"):
        assert getattr(found, attribute) == getattr(expected, attribute)
    if expected.is_nested:
        for one, other in zip(found.unbind(), expected.unbind(), strict=True):
            _assert_equal_tensors(one, other)
        return
    assert found.shape == expected.shape
    if expected.layout != torch.strided:
        assert torch.equal(found.to_dense(), expected.to_dense())
        return
    assert found.stride() == expected.stride()
    if expected.device.type == "meta":
        return
    if expected.is_quantized:
        assert torch.equal(found.int_repr(), expected.int_repr())
        assert found.qscheme() == expected.qscheme()
        return
    assert found.is_conj() == expected.is_conj()
    assert found.storage_offset() == expected.storage_offset()
    one, other = _bytes_of(found.untyped_storage()), _bytes_of(expected.untyped_storage())
    assert torch.equal(one, other) or torch.equal(found, expected)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def storages_of(value: Any) -> list[int]:
    """Addresses of the storages of all dense tensors of a tree, in order: equal patterns mean equal ties."""
    if isinstance(value, Tensor):
        dense_storage = value.layout == torch.strided and not value.is_nested and value.device.type != "meta"
        return [value.untyped_storage().data_ptr()] if dense_storage and value.numel() else []
    if isinstance(value, dict):
        return [address for inner in value.values() for address in storages_of(inner)]
    if isinstance(value, (list, tuple)):
        return [address for inner in value for address in storages_of(inner)]
    return []


def pattern(addresses: list[int]) -> list[int]:
    """Which of them are the same: positions of first occurrences."""
    return [addresses.index(address) for address in addresses]


def has_names_of_its_own(value: Any) -> bool:
    """Whether no two keys of a dict in it look the same: then they would be numbered."""
    if type(value) in (dict, OrderedDict):
        return len({str(key) for key in value}) == len(value) and all(map(has_names_of_its_own, value.values()))
    return all(map(has_names_of_its_own, value)) if type(value) in (list, tuple) else True


def names_of(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree by the names that ``keys`` has for them."""
    if isinstance(value, Tensor):
        yield name, value
    items = (
        value.items()
        if type(value) in (dict, OrderedDict)
        else enumerate(value)
        if type(value) in (list, tuple)
        else ()
    )
    for key, inner in items:
        yield from names_of(inner, f"{name}.{key}" if name else str(key))
