"""Metadata of anybody's that lie about items: bounded time and memory, and an error that says what is wrong."""

from __future__ import annotations

import io
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import load, save
from torch import Size
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.checkpoint.dcp.metadata import read_metadata

pytestmark = pytest.mark.hostile

WRITERS: Any = [FastensorStorageWriter, FileSystemWriter]
READERS: Any = [FastensorStorageReader, FileSystemReader]
MANY = 20_000
ALLOWED_SECONDS = 15
"""Enough for a slow machine, and for nothing that takes quadratic time."""


def checkpoint(folder: Path, sizes: list[int], chunks: list[tuple[int, int]], places: list[tuple[int, int]]) -> Path:
    """A checkpoint of one tensor, whose items are at these places (offset and length) of a file of 5 bytes."""
    properties = TensorProperties(torch.float32)
    made = [ChunkStorageMetadata(Size([begin]), Size([size])) for begin, size in chunks]
    infos = {
        MetadataIndex("x", [begin]): _StorageInfo("__0_0.distcp", *place)
        for (begin, _), place in zip(chunks, places, strict=True)
    }
    metadata = Metadata({"x": TensorStorageMetadata(properties, Size(sizes), made)}, {}, infos)
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").write_bytes(b"abcde")
    return folder


@pytest.mark.parametrize("size", [1 << 40, 1 << 60])
def test_tensors_that_no_memory_holds(tmp_path: Path, size: int) -> None:
    folder = checkpoint(tmp_path / "x", [size], [(0, size)], [(0, 5)])
    for use in (lambda: fastensor.convert(folder, tmp_path / "x.pt"), lambda: fastensor.diff(folder, folder)):
        with pytest.raises(fastensor.CorruptCheckpointError, match="item 'x'"):
            use()


def test_chunks_beyond_their_tensor(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "x", [4], [(100, 4)], [(0, 5)])
    with pytest.raises(fastensor.CorruptCheckpointError, match="a chunk that reaches beyond its tensor"):
        fastensor.convert(folder, tmp_path / "x.pt")


def test_many_chunks_without_numbers(tmp_path: Path) -> None:
    """The time is in proportion to the chunks."""
    chunks = [(number, 1) for number in range(MANY)]
    folder = checkpoint(tmp_path / "x", [MANY], chunks, [(0, 5)] * MANY)
    started = time.process_time()
    fastensor.inspect(folder)
    assert time.process_time() - started < ALLOWED_SECONDS


def shared_chunks() -> Metadata:
    """Every tensor has the same list of chunks, which stands in the file once."""
    chunks = [ChunkStorageMetadata(Size([0]), Size([0]))] * MANY
    properties = TensorProperties(torch.float32)
    return Metadata({str(one): TensorStorageMetadata(properties, Size([0]), chunks) for one in range(MANY)}, {}, {})


def shared_transforms() -> Metadata:
    """Every item has the same list of transforms, which stands in the file once."""
    transforms = ["x"] * MANY
    return Metadata({}, {}, {MetadataIndex(str(one)): _StorageInfo("x", one, 1, transforms) for one in range(MANY)})


@pytest.mark.parametrize("make", [shared_chunks, shared_transforms])
def test_parts_that_stand_in_the_file_once(make: Any) -> None:
    data = pickle.dumps(make())
    started = time.process_time()
    with pytest.raises(fastensor.CorruptCheckpointError, match="lists of more than the file holds"):
        read_metadata(data, where="x")
    assert time.process_time() - started < ALLOWED_SECONDS


def test_items_that_overlap(tmp_path: Path) -> None:
    """A small file may otherwise be read a million times."""
    folder = checkpoint(tmp_path / "x", [4], [(0, 2), (2, 2)], [(0, 5), (3, 2)])
    with pytest.raises(fastensor.CorruptCheckpointError, match=r"begins before the item in front of it ends at 5"):
        fastensor.verify(folder)
    with pytest.raises(dcp.api.CheckpointException, match=r"begins before the item in front of it"):
        load({"x": torch.zeros(4)}, FastensorStorageReader(folder))


def test_items_of_no_chunk(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "x", [0], [(0, 0)], [(0, 5)])
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["x"].chunks.clear()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(fastensor.CorruptCheckpointError, match=r"item 'x' .* is of no chunk of its tensor"):
        fastensor.diff(folder, folder)


@pytest.mark.parametrize("writer", WRITERS)
def test_quantized_tensors(tmp_path: Path, writer: Any) -> None:
    quantized = torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, torch.quint8)
    save({"x": quantized, "y": torch.ones(3)}, writer(tmp_path))
    assert fastensor.verify(tmp_path).compared
    assert {tensor.dtype for tensor in fastensor.inspect(tmp_path).tensors} == {torch.quint8, torch.float32}
    for reader in READERS:
        place = torch.quantize_per_tensor(torch.zeros(6), 0.5, 1, torch.quint8)
        found = load({"x": place, "y": torch.zeros(3)}, reader(tmp_path))
        assert torch.equal(found["x"], quantized)
        assert found["y"].tolist() == [1] * 3


def test_objects_without_items(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"x": BytesStorageMetadata()}, {}, {})))
    with pytest.raises(fastensor.CorruptCheckpointError, match="'x' is an object of 0 items"):
        fastensor.convert(tmp_path, tmp_path / "x.pt")


class Empty(DefaultSavePlanner):
    """Saves nothing of the object ``b``."""

    def resolve_data(self, write_item: Any) -> Any:
        return io.BytesIO() if write_item.index.fqn == "b" else super().resolve_data(write_item)


class Sizes(DefaultLoadPlanner):
    """Notes how many bytes objects have."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, int] = {}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.sizes[read_item.dest_index.fqn] = len(value.getvalue())


@pytest.mark.parametrize("writer", WRITERS)
def test_items_without_bytes(tmp_path: Path, writer: Any) -> None:
    """Such an item begins where the next one does."""
    save({"a": 1, "b": 2, "c": 3}, writer(tmp_path), planner=Empty())
    found = []
    for reader in READERS:
        planner = Sizes()
        load({"a": 0, "b": 0, "c": 0}, reader(tmp_path), planner=planner)
        found.append(planner.sizes)
    assert found[0] == found[1]
    assert (found[0]["b"], found[0]["a"] > 0, found[0]["c"] > 0) == (0, True, True)
    assert sorted(fastensor.inspect(tmp_path).others) == ["a", "b", "c"]


def test_metadata_of_torch_before_2_3(tmp_path: Path) -> None:
    save({"x": torch.arange(3)}, FileSystemWriter(tmp_path))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["x"].properties = OldProperties(torch.int64)
    del metadata.storage_meta, metadata.version
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    for reader in READERS:
        assert load({"x": torch.zeros(3, dtype=torch.int64)}, reader(tmp_path))["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("count", [1, 2])
def test_files_of_safetensors(tmp_path: Path, writer: Any, count: int) -> None:
    state = {f"x{number}": torch.randn(50) for number in range(count)}
    save(state, writer(tmp_path, serialization_format=SerializationFormat.SAFETENSORS))
    report = fastensor.verify(tmp_path)
    of_ours = writer is FastensorStorageWriter
    assert (report.compared, report.uncompared) == ((count + 1, 0) if of_ours else (0, count + 2)), (
        "torch's metadata carry none"
    )
    assert all(tensor.part.endswith(".distcp") for tensor in fastensor.inspect(tmp_path).tensors)
    with pytest.raises(dcp.api.CheckpointException, match=r"SAFETENSORS.*load it by itself"):
        load(state, FastensorStorageReader(tmp_path))
    (path,) = tmp_path.glob("*.distcp")
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    if of_ours:
        with pytest.raises(fastensor.DamagedCheckpointError, match=r"\.distcp: tensor 'x"):
            fastensor.verify(tmp_path)
