"""``.metadata`` is a pickle of anybody's: it is read as torch would read it, and nothing of it is run."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections import Counter
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import fails_to_load, load, save, state_of_all_kinds
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.checkpoint.dcp.metadata import read_metadata


def metadata_of(folder: Path, writer: Any = FileSystemWriter) -> bytes:
    save(state_of_all_kinds(), writer(folder))
    return (folder / ".metadata").read_bytes()


@pytest.mark.parametrize("writer", [FastensorStorageWriter, FileSystemWriter])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_are_those_that_pickle_reads(tmp_path: Path, writer: Any, protocol: int) -> None:
    data = metadata_of(tmp_path, writer)
    expected = pickle.loads(data)
    expected.state_dict_metadata["large"].properties.memory_format = torch.channels_last
    found = read_metadata(pickle.dumps(expected, protocol) if writer is FileSystemWriter else data, where="x")
    if writer is FastensorStorageWriter:
        expected = pickle.loads(data)
    expected.storage_meta.checkpoint_id = str(expected.storage_meta.checkpoint_id)
    assert found == expected
    crc32s = [[getattr(one, "crc32", None) for one in some.storage_data.values()] for some in (found, expected)]
    assert crc32s[0] == crc32s[1]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("by_name", [True, False])
def test_memory_formats_as_each_version_of_python_writes_them(tmp_path: Path, protocol: int, by_name: bool) -> None:
    """Python 3.11.0 to 3.11.3 write a call of ``getattr`` for a member of an enum."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, Enum):
                return (getattr, (type(value), value.name)) if by_name else (type(value), (value.value,))
            return NotImplemented

    expected = pickle.loads(metadata_of(tmp_path))
    expected.state_dict_metadata["large"].properties.memory_format = torch.channels_last
    file = io.BytesIO()
    Pickler(file, protocol).dump(expected)
    expected.storage_meta.checkpoint_id = str(expected.storage_meta.checkpoint_id)
    assert read_metadata(file.getvalue(), where="x") == expected


@pytest.mark.parametrize("more", [(), (None,), ((3, 1),)])
def test_properties_as_each_version_of_torch_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[Any, ...]
) -> None:
    """Before torch 2.15 they end with ``pin_memory``; since then they have strides, or None, behind it."""
    expected = pickle.loads(metadata_of(tmp_path))
    own = TensorProperties.__getstate__
    with monkeypatch.context() as patch:
        patch.setattr(TensorProperties, "__getstate__", lambda properties: own(properties)[:5] + more)
        data = pickle.dumps(expected)
    for entry in expected.state_dict_metadata.values():
        if hasattr(entry, "properties") and hasattr(entry.properties, "strides"):
            entry.properties.strides = more[0] if more else None
    expected.storage_meta.checkpoint_id = str(expected.storage_meta.checkpoint_id)
    assert read_metadata(data, where="x") == expected


@pytest.mark.parametrize("more", [(7,), ((-1,),), ((1 << 63,),), (("1",),), ((1,) * 65,), (None, None)])
def test_properties_of_no_version(monkeypatch: pytest.MonkeyPatch, more: tuple[Any, ...]) -> None:
    metadata = Metadata({"x": TensorStorageMetadata(TensorProperties(), torch.Size([]), [])}, {}, {})
    own = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda properties: own(properties)[:5] + more)
    with pytest.raises(fastensor.CorruptCheckpointError, match=r"^where: "):
        read_metadata(pickle.dumps(metadata), where="where")


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


def test_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = pickle.loads(metadata_of(tmp_path))
    trap = tmp_path / "trap"
    for place in ("planner_data", "storage_meta", "state_dict_metadata", "storage_data", "version"):
        hostile = pickle.loads(pickle.dumps(metadata))
        setattr(hostile, place, Evil(trap))
        (tmp_path / ".metadata").write_bytes(pickle.dumps(hostile))
        with pytest.raises(dcp.api.CheckpointException):
            load({"scalar": torch.zeros(())}, FastensorStorageReader(tmp_path))
        for attempt in (fastensor.verify, fastensor.inspect):
            if place != "planner_data":  # these do not use it
                with pytest.raises(fastensor.CorruptCheckpointError):
                    attempt(tmp_path)
        assert not trap.exists()


def test_planner_data_of_others(tmp_path: Path) -> None:
    """On request, the file may run code."""

    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: Any) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            metadata.planner_data = Path  # any class that is none of torch's
            return plans, metadata

    save({"x": torch.ones(3)}, FastensorStorageWriter(tmp_path), planner=Planner())
    why = r"pathlib\.\S*Path.*pass weights_only=False"
    fails_to_load({"x": torch.zeros(3)}, FastensorStorageReader(tmp_path), why)
    assert load({"x": torch.zeros(3)}, FastensorStorageReader(tmp_path, weights_only=False))["x"].tolist() == [1] * 3
    assert fastensor.verify(tmp_path).complete


def lies() -> dict[str, Any]:
    index = MetadataIndex("x", [0])

    def with_info(**changes: Any) -> Metadata:
        info = _StorageInfo("__0_0.distcp", 0, 5)
        vars(info).update(changes)
        return Metadata({}, storage_data={index: info})

    return {
        "no metadata": {"a": 1},
        "path above": with_info(relative_path="../secret"),
        "path elsewhere": with_info(relative_path="/etc/passwd"),
        "path of nothing": with_info(relative_path=""),
        "path that is none": with_info(relative_path=7),
        "negative offset": with_info(offset=-1),
        "endless": with_info(length=1 << 63),
        "offset of a float": with_info(offset=1.5),
        "CRC32 of 33 bits": with_info(crc32=1 << 32),
        "transforms": with_info(transform_descriptors=[7]),
        "items": Metadata({}, storage_data={"x": 1}),
        "no items": Metadata({}),
        "dimensions": Metadata({}, storage_data={MetadataIndex("x", [0] * 65): _StorageInfo("__0_0.distcp", 0, 5)}),
        "entries": Metadata({"x": 1}, storage_data={}),
        "names": Metadata({1: TensorProperties()}, storage_data={}),  # type: ignore[dict-item]
        "version": Metadata({}, storage_data={}, version=1.0),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("name", lies())
def test_lies(name: str) -> None:
    with pytest.raises(fastensor.CorruptCheckpointError, match=r"^where: "):
        read_metadata(pickle.dumps(lies()[name]), where="where")


def test_files_that_are_no_pickles(tmp_path: Path) -> None:
    for data in (b"", b"x", b"\x80\x04.", b"\x80\x04N.", pickle.dumps(None)[:-1], b"r\xff\xff\xff\xff"):
        with pytest.raises(fastensor.CorruptCheckpointError):
            read_metadata(data, where="x")


def test_damaged_pickles(tmp_path: Path, tally: Counter[str]) -> None:
    damaged_pickles(metadata_of(tmp_path), 150, tally)


@pytest.mark.torture
def test_many_damaged_pickles(tmp_path: Path, tally: Counter[str]) -> None:
    damaged_pickles(metadata_of(tmp_path), 20_000, tally)


def damaged_pickles(sound: bytes, times: int, tally: Counter[str]) -> None:
    """Whatever is changed, the result is metadata or our error."""
    moments = random.Random(5)
    for _ in range(times):
        data = bytearray(sound)
        for _ in range(moments.randrange(1, 4)):
            at = moments.randrange(len(data))
            match moments.randrange(3):
                case 0:
                    data[at] = moments.randrange(256)
                case 1:
                    del data[at : at + moments.randrange(9)]
                case 2:
                    data[at:at] = data[moments.randrange(len(data)) :][: moments.randrange(40)]
        tally["pickles damaged"] += 1
        try:
            found = read_metadata(bytes(data), where="x")
        except fastensor.CorruptCheckpointError:
            continue
        assert isinstance(found, Metadata)
