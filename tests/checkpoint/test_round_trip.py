"""What comes back is what torch would have brought back, for anything that torch takes."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import states
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor.backends.registry import available_names


def through_torch(obj: object) -> Any:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@given(tree=states.trees(), backend=st.sampled_from(available_names()))
def test_any_state_comes_back_as_torch_would_bring_it(tree: Any, backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = os.path.join(folder, "x.pt")
        report = fastensor.save(tree, path, backend=backend)
        assert not report.fallbacks or report.fallbacks[0].backend == "direct"
        expected = through_torch(tree)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
        for found in (torch.load(path, weights_only=False), fastensor.load(path, weights_only=False, backend=backend)):
            states.assert_equal(found, expected)
            assert states.pattern(states.storages_of(found)) == states.pattern(states.storages_of(expected))


@given(tree=states.trees())
def test_the_file_is_the_one_of_torch_but_for_the_serialization_id(tree: Any) -> None:
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = os.path.join(folder, "x.pt")
        fastensor.save(tree, path)
        with zipfile.ZipFile(path) as archive:
            alignment = int(archive.read("archive/.storage_alignment"))
        with torch.utils.serialization.config.patch({"save.storage_alignment": alignment}):
            torch.save(tree, buffer)
        ours, theirs = Path(path).read_bytes(), buffer.getvalue()
    differing = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    with zipfile.ZipFile(io.BytesIO(ours)) as archive:
        record = archive.getinfo("archive/.data/serialization_id")
        begin, directory = record.header_offset, archive.start_dir
    descriptor_end = begin + 30 + len(record.filename) + 64 + 40 + 16
    assert all(begin < i < descriptor_end or directory <= i for i in differing)
    assert len([i for i in differing if i >= directory]) <= 4


def test_large_states_are_aligned_to_pages(tmp_path: Path) -> None:
    fastensor.save({"a": torch.zeros(1 << 20), "b": torch.ones(1 << 20)}, tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    with zipfile.ZipFile(tmp_path / "x") as archive:
        for key in "01":
            info = archive.getinfo(f"archive/data/{key}")
            name, extra = (int.from_bytes(data[info.header_offset + at :][:2], "little") for at in (26, 28))
            assert (info.header_offset + 30 + name + extra) % 4096 == 0


class Savers:
    """An object that saves within being saved."""

    def __reduce__(self) -> Any:
        inner = io.BytesIO()
        torch.save({"w": torch.arange(100)}, inner)
        return bytes, (inner.getvalue(),)


class FastensorSavers:
    """The same with Fastensor."""

    def __reduce__(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            fastensor.save({"w": torch.arange(100)}, os.path.join(folder, "x"))
            return bytes, (Path(folder, "x").read_bytes(),)


@pytest.mark.parametrize("kind", [Savers, FastensorSavers])
def test_saves_within_a_save_stay_whole(tmp_path: Path, kind: Any) -> None:
    fastensor.save({"inner": kind(), "own": torch.ones(3)}, tmp_path / "x")
    inner = fastensor.load(tmp_path / "x", weights_only=False)["inner"]
    assert torch.equal(torch.load(io.BytesIO(inner))["w"], torch.arange(100))


class Counted:
    """Counts how often it is pickled."""

    times = 0

    def __reduce__(self) -> Any:
        Counted.times += 1
        return str, ()


@pytest.mark.parametrize("backend", available_names())
@pytest.mark.parametrize("numel", [10, 1 << 22])
def test_an_object_is_pickled_exactly_once(tmp_path: Path, backend: str, numel: int) -> None:
    Counted.times = 0
    fastensor.save([Counted(), torch.zeros(numel)], tmp_path / "x", backend=backend)
    assert Counted.times == 1


def test_user_pickle_modules_and_protocols_are_used(tmp_path: Path) -> None:
    fastensor.save({"f": lambda x: x + 1}, tmp_path / "x", pickle_module=cloudpickle, pickle_protocol=4)
    assert fastensor.load(tmp_path / "x", weights_only=False)["f"](1) == 2
    with zipfile.ZipFile(tmp_path / "x") as archive:
        assert archive.read("archive/data.pkl")[:2] == b"\x80\x04"


def test_what_torch_refuses_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    storage = torch.zeros(4)
    with pytest.raises(RuntimeError, match="different types"):
        fastensor.save([storage, storage.view(torch.int32)], tmp_path / "x")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        fastensor.save(lambda: 0, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_crc32s_are_written_whatever_the_user_chose_for_torch(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        for backend in available_names():
            fastensor.save({"a": torch.ones(5)}, tmp_path / backend, backend=backend)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    for backend in available_names():
        with zipfile.ZipFile(tmp_path / backend) as archive:
            assert archive.testzip() is None
            assert all(info.CRC for info in archive.infolist() if info.file_size)


def test_numpy_arrays_and_python_objects(tmp_path: Path) -> None:
    state = {"array": np.arange(5), "path": Path("x"), "big": 1 << 400}
    fastensor.save(state, tmp_path / "x")
    loaded = fastensor.load(tmp_path / "x", weights_only=False)
    assert np.array_equal(loaded["array"], state["array"])
    assert (loaded["path"], loaded["big"]) == (state["path"], state["big"])


def test_storages_are_not_kept_alive_by_a_save(tmp_path: Path) -> None:
    import gc
    import weakref

    gc.collect()
    gc.disable()
    try:
        storage = torch.zeros(1000).untyped_storage()
        watched = weakref.ref(storage)
        fastensor.save({"a": storage}, tmp_path / "x")
        del storage
        assert watched() is None
    finally:
        gc.enable()


def test_records_over_four_gibibytes(tmp_path: Path) -> None:
    """The image of a 4 GiB storage, written sparsely: only headers, and the CRC32 of that many zeros."""
    from isal import isal_zlib

    from fastensor.stitch.image import Header
    from fastensor.stitch.torch_zip import plan

    nbytes = (4 << 30) + 5
    sparse = tmp_path / "zeros"
    with sparse.open("wb") as file:
        file.truncate(nbytes)
    storage = torch.UntypedStorage.from_file(str(sparse), shared=False, nbytes=nbytes)
    source = plan({"big": storage, "small": torch.arange(3)}, pickle_module=pickle, pickle_protocol=2)
    crc32, block = 0, isal_zlib.crc32(bytes(1 << 20))
    for _ in range(nbytes >> 20):
        crc32 = isal_zlib.crc32_combine(crc32, block, 1 << 20)
    crc32 = isal_zlib.crc32_combine(crc32, isal_zlib.crc32(bytes(5)), 5)
    small = torch.arange(3).numpy().tobytes()
    checksums = [crc32, isal_zlib.crc32(small)]
    path = tmp_path / "x.pt"
    with path.open("wb") as file:
        for segment in source.image.segments:
            file.seek(segment.offset)
            if isinstance(segment, Header):
                data = bytearray(segment.data)
                for position, index in segment.blanks:
                    data[position : position + 4] = checksums[index].to_bytes(4, "little")
                file.write(data)
            elif segment.storage == 1:
                file.write(small)
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("archive/data/0").file_size == nbytes
    found = fastensor.load(path)
    assert found["big"].nbytes() == nbytes
    assert torch.equal(found["small"], torch.arange(3))
    assert not torch.empty(0, dtype=torch.uint8).set_(found["big"])[:: 1 << 20].any()
