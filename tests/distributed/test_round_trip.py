"""Distributed checkpoints in one process: what our writer writes torch's reader reads, and the other way round."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from states import DTYPES, random_bytes
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import Metadata

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.checkpoint.dcp.metadata import read_metadata
from fastensor.stitch import shards

WRITERS: dict[str, Any] = {"ours": FastensorStorageWriter, "torch": FileSystemWriter}
READERS: dict[str, Any] = {"ours": FastensorStorageReader, "torch": FileSystemReader}
PAIRS = [("ours", "ours"), ("ours", "torch"), ("torch", "ours")]


def save(state: dict[str, Any], writer: Any, **options: Any) -> Metadata:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcp.save(state, storage_writer=writer, no_dist=True, **options)


def load(state: dict[str, Any], reader: Any, **options: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=reader, no_dist=True, **options)
    return state


def state_of_all_kinds() -> dict[str, Any]:
    """Tensors of all dtypes and layouts, large and small; other objects; nested."""
    base = torch.randn(300, 500)
    return {
        "dtypes": {str(dtype): random_bytes(dtype, [3, 5], 7) for dtype in DTYPES},
        "large": base,
        "transposed": base.t(),
        "rows": base[100:200],
        "columns": base[:, 3:7],
        "strided": base[::2],
        "bits": random_bytes(torch.bool, [400, 500], 3),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "expanded": torch.arange(3.0).expand(4, 3),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "step": 7,
        "text": ["a", {"b": None}],
    }


def emptied(value: Any) -> Any:
    """A state of the same structure, to load into."""
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    if isinstance(value, Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    return [emptied(one) for one in value] if isinstance(value, list) else None


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        same = [one.detach().resolve_conj().contiguous().view(-1).view(torch.uint8) for one in (found, expected)]
        assert torch.equal(*same)
    else:
        assert found == expected


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}, {"sync_files": False}])
def test_all_kinds(tmp_path: Path, writer: str, reader: str, options: dict[str, Any]) -> None:
    state = state_of_all_kinds()
    save(state, WRITERS[writer](tmp_path, **options))
    assert_same(load(emptied(state), READERS[reader](tmp_path)), state)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 9), max_size=4),
    order=st.permutations(range(4)),
    cuts=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_items_are_those_of_torch(dtype: torch.dtype, shape: list[int], order: list[int], cuts: list[int]) -> None:
    tensor = random_bytes(dtype, shape, 5).permute([one for one in order if one < len(shape)])
    tensor = tensor[tuple(slice(cut, None) for cut in cuts[: len(shape)])]
    plan = shards.plan([b"before", tensor, tensor])
    file = io.BytesIO()
    from fastensor.backends.stream import write_stream  # noqa: PLC0415

    checksums = write_stream(plan, file.write)
    data = file.getvalue()
    by_torch = io.BytesIO()
    torch.save(shards.on_host(tensor), by_torch)
    for item in plan.items[1:]:
        found = data[item.offset : item.offset + item.nbytes]
        assert item.crc32(checksums) == __import__("zlib").crc32(found)
        assert without_id(found) == without_id(by_torch.getvalue())


def without_id(data: bytes) -> bytes:
    """A file of torch's without its serialization id, and without the CRC32s of the id."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("serialization_id"))
        crc32 = archive.getinfo(name).CRC.to_bytes(4, "little")
        return data.replace(archive.read(name), b"").replace(crc32, b"")
