"""Distributed checkpoints in one process: what our writer writes torch's reader reads, and the other way round."""

from __future__ import annotations

import copy
import io
import pickle
import zipfile
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, emptied, load, save, state_of_all_kinds
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
from states import DTYPES, random_bytes
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fastensor
from fastensor.backends.stream import write_stream
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.stitch import shards

WRITERS: dict[str, Any] = {"ours": FastensorStorageWriter, "torch": FileSystemWriter}
READERS: dict[str, Any] = {"ours": FastensorStorageReader, "torch": FileSystemReader}
PAIRS = [("ours", "ours"), ("ours", "torch"), ("torch", "ours")]


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"thread_count": 3}, {"sync_files": False}])
def test_all_kinds(tmp_path: Path, writer: str, reader: str, options: dict[str, Any]) -> None:
    state = state_of_all_kinds()
    save(state, WRITERS[writer](tmp_path, **options))
    assert_same(load(emptied(state), READERS[reader](tmp_path)), state)
    if reader == "ours":
        report = fastensor.verify(tmp_path)
        assert report.container == "dcp"
        assert report.complete == (writer == "ours" or report.uncompared == 0)


@pytest.mark.parametrize("thread_count", [1, 3])
def test_files_are_as_many_as_torchs(tmp_path: Path, thread_count: int) -> None:
    for single in (True, False):
        for name, writer in WRITERS.items():
            save(state_of_all_kinds(), writer(tmp_path / f"{name}{single}", single, thread_count=thread_count))
        counts = [len(list((tmp_path / f"{name}{single}").iterdir())) for name in WRITERS]
        assert counts[0] == counts[1]


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
    checksums = write_stream(plan, file.write)
    data = file.getvalue()
    by_torch = io.BytesIO()
    torch.save(shards.on_host(tensor), by_torch)
    for item in plan.items:
        assert item.crc32(checksums) == zlib.crc32(data[item.offset : item.offset + item.nbytes])
    for item in plan.items[1:]:
        assert without_id(data[item.offset : item.offset + item.nbytes]) == without_id(by_torch.getvalue())
    if tensor.stride() == torch.empty(tensor.shape).stride() and not (tensor.storage_offset() and 0 in tensor.shape):
        archive = shards.archive_of(dtype, tensor.shape)
        assert archive is not None
        assert data[plan.items[1].offset :].startswith(archive.head)
        assert archive.nbytes == plan.items[1].nbytes


def without_id(data: bytes) -> bytes:
    """A file of torch's without its serialization id, and without the CRC32s of the id."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(name for name in archive.namelist() if name.endswith("serialization_id"))
        crc32 = archive.getinfo(name).CRC.to_bytes(4, "little")
        return data.replace(archive.read(name), b"").replace(crc32, b"")


def test_large_tensors_are_not_copied_in_memory(tmp_path: Path) -> None:
    """They are written from where they are, and read to where they belong."""
    state = {"weight": torch.randn(1 << 20), "part": torch.randn(1 << 20)[5:-5]}
    plan = shards.plan(state.values())
    assert [storage.data_ptr() for storage in plan.storages] == [  # type: ignore[union-attr]
        one.untyped_storage().data_ptr() for one in state.values()
    ]
    save(state, FastensorStorageWriter(tmp_path))
    target = {"weight": torch.zeros(1 << 20), "part": torch.zeros(1 << 20)[5:-5]}
    version = target["weight"]._version
    kept = {key: one.data_ptr() for key, one in target.items()}
    assert_same(load(dict(target), FastensorStorageReader(tmp_path)), state)
    assert {key: one.data_ptr() for key, one in target.items()} == kept
    assert target["weight"]._version > version


def test_targets_that_need_a_copy(tmp_path: Path) -> None:
    """Another dtype, other strides, parts of what was saved."""
    saved = torch.randn(400, 300)
    save({"weight": saved, "small": saved[:3, :3].clone()}, FastensorStorageWriter(tmp_path))
    for target in (torch.zeros(400, 300, dtype=torch.float64), torch.zeros(300, 400).t()):
        found = load({"weight": target}, FastensorStorageReader(tmp_path))["weight"]
        assert torch.equal(found.float(), saved)
    with pytest.raises(dcp.api.CheckpointException, match=r"mismatch|shape|size"):
        load({"weight": torch.zeros(400, 299)}, FastensorStorageReader(tmp_path))


def test_reset_moves_reader_and_writer(tmp_path: Path) -> None:
    writer, reader = FastensorStorageWriter(tmp_path / "a"), FastensorStorageReader(tmp_path / "a")
    for number, name in enumerate("abc"):
        save({"x": torch.tensor(number)}, writer, checkpoint_id=str(tmp_path / name))
        assert writer.checkpoint_id == tmp_path / name
    for number, name in enumerate("abc"):
        found = load({"x": torch.tensor(-1)}, reader, checkpoint_id=tmp_path / name)
        assert found["x"] == number


def test_overwrite(tmp_path: Path) -> None:
    writer = FastensorStorageWriter(tmp_path)
    for number in range(3):
        save({"x": torch.tensor(number)}, writer)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert len(names) == 2
    with pytest.raises(dcp.api.CheckpointException, match="already exists"):
        save({"x": torch.tensor(9)}, FastensorStorageWriter(tmp_path, overwrite=False))
    assert load({"x": torch.tensor(-1)}, FastensorStorageReader(tmp_path))["x"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("replaced", ["ours", "torch"])
def test_files_of_the_replaced_checkpoint_are_removed(tmp_path: Path, replaced: str) -> None:
    save({"x": torch.arange(5), "step": 1}, WRITERS[replaced](tmp_path, single_file_per_rank=False))
    (tmp_path / "notes.txt").write_text("mine")
    save({"x": torch.arange(7)}, FastensorStorageWriter(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
    assert torch.equal(load({"x": torch.zeros(7, dtype=torch.int64)}, FileSystemReader(tmp_path))["x"], torch.arange(7))


@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize("parts", [slice(None), slice(1, 3)], ids=["tied", "overlapping"])
@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}], ids=["one file", "files"])
@pytest.mark.parametrize("writer", WRITERS)
def test_two_values_for_one_memory(
    tmp_path: Path, names: str, parts: slice, options: dict[str, Any], writer: str
) -> None:
    """The same one stays as with torch's reader, whatever the order of the file."""
    values = {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0)[parts], "c": torch.zeros(2)}
    save({name: values[name] for name in f"{names}c"}, WRITERS[writer](tmp_path, **options))
    found = {}
    for kind, reader in READERS.items():
        memory = torch.zeros(4)
        load({"a": memory, "b": memory[parts], "c": torch.ones(2)}, reader(tmp_path))
        found[kind] = memory.tolist()
    assert found["ours"] == found["torch"]


def test_urls(tmp_path: Path) -> None:
    state = state_of_all_kinds()
    for url in ("memory://fastensor-dcp/v1.0", f"file://{tmp_path}/step"):
        for writer, reader in ((FastensorStorageWriter, FsspecReader), (FsspecWriter, FastensorStorageReader)):
            for _ in range(2):  # the second one replaces the first
                save(state, writer(url))
            assert_same(load(emptied(state), reader(url)), state)
            assert_same(load(emptied(state), FastensorStorageReader(url)), state)
            assert fastensor.verify(url).compared


def test_states_without_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Object stores have no directories: where there is no file, there is nothing to list."""
    monkeypatch.setattr(MemoryFileSystem, "makedirs", lambda *args, **options: None)
    for place in (tmp_path / "x", "memory://fastensor-dcp-empty/x"):
        for _ in range(2):
            save({}, FastensorStorageWriter(place))
        assert load({}, FastensorStorageReader(place)) == {}


def test_checkpoint_ids() -> None:
    for one in (FastensorStorageWriter, FastensorStorageReader):
        assert one.validate_checkpoint_id("relative/path")
        assert one.validate_checkpoint_id(Path("/tmp/x"))
        assert one.validate_checkpoint_id("memory://x")
        assert not one.validate_checkpoint_id("nosuch://x")


class InvertedWriter(io.RawIOBase):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def write(self, data: Any) -> int:
        self._output.write(bytes(255 - byte for byte in bytes(data)))
        return len(memoryview(data).cast("B"))


class Inverted(StreamTransformExtension):
    """Inverts all bits."""

    @staticmethod
    def registry_name() -> str:
        return "stream.inverted"

    @staticmethod
    def from_descriptor(version: str) -> Inverted:
        return Inverted()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: Any) -> Any:
        return InvertedWriter(output)

    def transform_from(self, input: Any) -> Any:
        return io.BytesIO(bytes(255 - byte for byte in input.read()))


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_extensions(tmp_path: Path, writer: str, reader: str) -> None:
    registry = ExtensionRegistry()
    registry.register(Inverted)
    state = {"x": torch.randn(50), "view": torch.randn(9, 9)[::2], "step": 3}
    save(state, WRITERS[writer](tmp_path, _extensions=[Inverted()]))
    assert_same(load(emptied(state), READERS[reader](tmp_path, registry)), state)


def test_safetensors_files_are_torchs(tmp_path: Path) -> None:
    state = {"a": torch.randn(5, 7), "b": torch.arange(3)}
    metadata = []
    for name, writer in WRITERS.items():
        save(state, writer(tmp_path / name, serialization_format=SerializationFormat.SAFETENSORS))
        (path,) = (tmp_path / name).glob("*.distcp")
        assert_same(fastensor.load(path), state)
        found = FileSystemReader(tmp_path / name).read_metadata()
        metadata.append({index: (info.offset, info.length) for index, info in found.storage_data.items()})
    assert metadata[0] == metadata[1]
    with pytest.raises(dcp.api.CheckpointException, match="tensors only, found 'step'"):
        save({"step": 3}, FastensorStorageWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS))


def test_plan_caching(tmp_path: Path) -> None:
    """Cached plans name the files of the first save, whose names must not be used again."""
    writer = FastensorStorageWriter(tmp_path)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    for number in range(3):
        save({"x": torch.full((9,), number)}, writer, planner=planner)
        assert (
            load({"x": torch.zeros(9, dtype=torch.int64)}, FastensorStorageReader(tmp_path))["x"].tolist()
            == [number] * 9
        )


def test_tools_of_torch(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.randn(5)}, "step": 3}
    save(state, FastensorStorageWriter(tmp_path / "dcp"))
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "file.pt")
    assert_same(torch.load(tmp_path / "file.pt", weights_only=False), state)


def test_writers_can_be_pickled(tmp_path: Path) -> None:
    writer = FastensorStorageWriter(tmp_path, thread_count=2, backend="numpy")
    state = {"x": torch.arange(4)}
    writer.stage(state)
    save(state, pickle.loads(pickle.dumps(writer)))
    assert_same(load(emptied(state), FastensorStorageReader(tmp_path)), state)


def test_staging_reuses_memory_that_no_save_uses(tmp_path: Path) -> None:
    state = {"x": torch.zeros(1000), "step": 0}
    writer = FastensorStorageWriter(tmp_path)
    first = writer.stage(state)
    state["x"] += 1
    second = writer.stage(state)  # the first one is still in use
    assert first["x"].data_ptr() != second["x"].data_ptr()
    assert (first["x"][0], second["x"][0]) == (0, 1)
    address = second["x"].data_ptr()
    del first, second
    assert writer.stage(state)["x"].data_ptr() == address


@pytest.mark.parametrize("change", [
    lambda state: state["a"].update(more=torch.ones(2)),
    lambda state: state.update(a={"y": state["a"]["y"], "x": state["a"]["x"]}),
    lambda state: state["a"].update(x=torch.ones(3)),
    lambda state: state["a"].update(x=torch.ones(2, dtype=torch.float64)),
    lambda state: state["a"].update(x=torch.ones(2, 2).t()),
    lambda state: state["a"].update(x=torch.ones(1).expand(2)),
    lambda state: state["a"].update(x=torch.nn.Parameter(torch.ones(2))),
    lambda state: state["list"].append(torch.ones(1)),
    lambda state: state.update(step={"of": torch.ones(2)}),
    lambda state: state.update(object=Counter(a=7)),
    lambda state: None,
])  # fmt: skip
def test_states_that_are_staged_one_after_the_other(tmp_path: Path, change: Any) -> None:
    """Whether or not they are built alike: what is staged is the new state, and shares nothing with it."""
    state: dict[str, Any] = {
        "a": {"x": torch.zeros(2), "y": torch.arange(6.0).view(2, 3).t()},
        "list": [torch.zeros(1), (torch.ones(1), 2.0)],
        "step": 1,
        "object": Counter(a=1),
    }
    writer = FastensorStorageWriter(tmp_path)
    writer.stage(state)
    state["a"]["x"] += 1
    state["a"]["y"] *= 2
    state["list"][1][0].zero_()
    state["step"] = 2
    change(state)
    expected = copy.deepcopy(state)
    staged = writer.stage(state)
    for tensor in (state["a"]["y"], state["list"][0], state["list"][1][0]):
        tensor.fill_(77)
    assert_same(staged, expected)
    assert staged["a"]["y"].stride() == expected["a"]["y"].stride()


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(fastensor.UnknownBackendError):
        FastensorStorageWriter(tmp_path, backend="nosuch")
    with pytest.raises(fastensor.UnknownBackendError):
        FastensorStorageReader(tmp_path, backend="nosuch")
    with pytest.raises(ValueError, match="thread_count is at least 1, found 0"):
        FastensorStorageWriter(tmp_path, thread_count=0)
    with pytest.raises(fastensor.UnknownFilesystemError):
        FastensorStorageWriter("nosuch://x")
    with pytest.raises(TypeError, match="expected str"):
        FastensorStorageReader(io.BytesIO())  # type: ignore[arg-type]
