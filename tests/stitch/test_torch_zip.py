"""Planning, and what happens when torch does not do what the planner knows."""

from __future__ import annotations

import copyreg
import gc
import io
import logging
import pickle
import warnings
import weakref
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import states
import torch
from hypothesis import given

import fastensor
from fastensor.errors import LayoutError
from fastensor.files import posix
from fastensor.stitch import plain_tensors, torch_layout, torch_zip
from fastensor.stitch.image import Header, Image, Payload
from fastensor.stitch.parts import likely_begin
from fastensor.stitch.zip_directory import parse_directory

STATE = {"w": torch.arange(100), "b": torch.ones(3), "empty": torch.empty(0)}


def plan(obj: object) -> torch_zip.TorchZip:
    return torch_zip.plan(obj, pickle_module=pickle, pickle_protocol=2)


def test_payload_segments_are_the_storages_in_the_order_of_the_pickle() -> None:
    source = plan(STATE)
    payload = [segment for segment in source.image.segments if isinstance(segment, Payload)]
    assert [source.storages[p.storage].data_ptr() for p in payload] == [STATE["w"].data_ptr(), STATE["b"].data_ptr()]
    assert [p.nbytes for p in payload] == [800, 12]
    assert all(p.offset % 64 == 0 for p in payload)


def test_every_storage_has_two_blanks() -> None:
    headers = [segment for segment in plan(STATE).image.segments if isinstance(segment, Header)]
    assert sorted(storage for header in headers for _, storage in header.blanks) == [0, 0, 1, 1]


@pytest.mark.parametrize(("sizes", "expected"), [([], 64), ([0], 64), ([409_601], 4096), ([409_600], 64), ([100], 64)])
def test_alignment(sizes: list[int], expected: int) -> None:
    assert torch_zip.choose_alignment(sizes) == expected


def test_segments_can_be_looked_at_in_any_way() -> None:
    segments = plan(STATE).image.segments
    listed = list(segments)
    assert [segments[number] for number in range(len(segments))] == listed
    assert segments[-1] == listed[-1]
    assert segments[1:3] == listed[1:3]
    assert Image(listed).nbytes == plan(STATE).image.nbytes  # they tile the file
    with pytest.raises(IndexError):
        segments[len(segments)]


GIB = 1 << 30


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [5, 0, 7],
        [4 * GIB - 2],
        [4 * GIB - 1],
        [4 * GIB, 3],
        [4 * GIB - 400, 0, 5, 6],
        [2 * GIB, 2 * GIB, 1, 0, 2 * GIB + 7],
        [5 * GIB, 5 * GIB, 0, 3],
        [1] * 66_000,
    ],
    ids=lambda sizes: str(sizes)[:40],
)
def test_files_are_laid_out_as_by_torchs_writer(tmp_path: Path, sizes: list[int], alignment: int) -> None:
    """With records, and offsets, beyond 32 bits, and more records than 16 bits count. torch's file is sparse."""
    before = [torch_layout.SmallRecord("data.pkl", b"pickle"), torch_layout.SmallRecord("byteorder", b"little")]
    path = tmp_path / "archive"
    writer = torch._C.PyTorchFileWriter(str(path), True, alignment)
    for record in before:
        writer.write_record(record.name, record.data, len(record.data))
    for number, nbytes in enumerate(sizes):
        writer.write_record_metadata(torch_layout.storage_name(number), nbytes)
    writer.write_end_of_file()
    behind = [torch_layout.SmallRecord("version", b"3\n")]
    behind.append(torch_layout.SmallRecord(".data/serialization_id", writer.serialization_id().encode()))
    image = torch_layout.lay_out(before, sizes, behind, alignment)
    assert image.nbytes == path.stat().st_size
    payload = [segment for segment in image.segments if isinstance(segment, Payload)]
    assert [(one.nbytes, one.storage) for one in payload] == [(n, i) for i, n in enumerate(sizes) if n]
    with path.open("rb") as file:
        for segment in image.segments:
            if isinstance(segment, Header):
                file.seek(segment.offset)
                assert file.read(segment.nbytes) == segment.data  # CRC32s of sparse records are 0, as are blanks
        found = parse_directory(partial(posix.read_exactly, file.fileno()), image.nbytes, where="x").parts
    storages = [part for part in found if "/data/" in part.name and part.nbytes]
    assert [likely_begin(part) for part in storages] == [one.offset for one in payload]
    assert torch_zip.hash_of_names(("data.pkl", "byteorder"), len(sizes)) == behind[1].data[:20]


def test_the_same_structure_is_laid_out_once(tmp_path: Path) -> None:
    """What is not a tensor may have changed, without that any size has."""
    path, expected = tmp_path / "ours", tmp_path / "torchs"
    plan(STATE)  # torch has shown how it lays out files
    torch_layout._laid_out.cache_clear()
    for step in (7, 8, 9):
        state = {"w": torch.full((100,), float(step)), "step": step, "text": "abc" * (step < 9)}
        fastensor.save(state, path)
        assert torch_layout._laid_out.cache_info().misses == (2 if step == 9 else 1)
        with torch.utils.serialization.config.patch({"save.storage_alignment": 64}):
            torch.save(state, expected)
        assert_same_records(path, expected)


def assert_same_records(path: Path, expected: Path) -> None:
    """All is the same, but for the names of the folder and of the serialization id."""
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(expected) as theirs:
        assert ours.testzip() is None
        for one, other in zip(ours.infolist(), theirs.infolist(), strict=True):
            assert one.filename.partition("/")[2] == other.filename.partition("/")[2]
            if "serialization_id" not in one.filename:
                assert ours.read(one) == theirs.read(other)
                assert one.CRC == other.CRC


class Subclass(torch.Tensor):
    """Not plain."""


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


def with_hook() -> torch.Tensor:
    tensor = torch.ones(3, requires_grad=True)
    tensor.register_hook(lambda grad: grad)
    return tensor


TENSORS = {
    **{str(dtype): torch.empty(3, dtype=dtype) for dtype in states.DTYPES},
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "view": torch.arange(10)[2:8:2],
    "transposed": torch.ones(3, 4).t(),
    "needs gradients": torch.ones(3, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "not a leaf": torch.ones(3, requires_grad=True) * 2,
    "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
    "negated": torch.ones(3, dtype=torch.complex64).conj().imag,
    "sparse": torch.eye(3).to_sparse(),
    "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": torch.ones(3, device="meta"),
    "subclass": torch.ones(3).as_subclass(Subclass),
    "attribute": with_attribute(),
    "hook": with_hook(),
    "typed storage": torch.ones(3)._typed_storage(),
    "storage": torch.ones(3).untyped_storage(),
    "dict of hooks": OrderedDict(),
    "ordered dict": OrderedDict(a=torch.ones(1)),
}


def pickle_of_torch(obj: object, protocol: int) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(obj, file, pickle_protocol=protocol)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("name", TENSORS)
def test_every_kind_of_tensor_is_pickled_as_by_torch(name: str, protocol: int) -> None:
    tensor = TENSORS[name]
    state = {"one": tensor, "again": tensor, "both": [tensor, torch.ones(2)]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        planned = torch_zip.plan(state, pickle_module=pickle, pickle_protocol=protocol)
    assert planned.recording.data == pickle_of_torch(state, protocol)


@given(state=states.trees())
def test_any_state_is_pickled_as_by_torch(state: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert plan(state).recording.data == pickle_of_torch(state, 2)


@pytest.mark.parametrize("state", [TENSORS["conjugated"], TENSORS["view"], TENSORS["typed storage"], STATE])
def test_with_an_unknown_torch_torch_itself_is_asked(monkeypatch: pytest.MonkeyPatch, state: Any) -> None:
    expected = plan(state)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    monkeypatch.setattr(plain_tensors, "reduce_plain", mock.Mock(side_effect=AssertionError("was called")))
    assert plan(state).recording.data == expected.recording.data


def test_an_unknown_torch_that_names_storages_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "torch_is_known", lambda: False)
    monkeypatch.setattr(torch.serialization, "location_tag", mock.Mock(side_effect=["cpu", "elsewhere"]))
    with pytest.raises(LayoutError, match="names a storage"):
        plan(STATE)


def test_a_known_torch_need_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plan(STATE)
    monkeypatch.setattr(torch_zip, "_save", mock.Mock(side_effect=AssertionError("was called")))
    assert plan(STATE).recording.data == expected.recording.data


class OwnPickler(pickle.Pickler):
    """A user's."""

    def reducer_override(self, obj: Any) -> Any:
        return (str, ("by the user",)) if isinstance(obj, complex) else NotImplemented


def test_a_pickle_module_of_the_users_is_run_by_torch() -> None:
    module = SimpleNamespace(__name__="users", Pickler=OwnPickler)
    planned = torch_zip.plan([1j, torch.ones(3)], pickle_module=module, pickle_protocol=2)
    assert b"by the user" in planned.recording.data
    assert len(planned.storages) == 1


def test_what_others_make_of_tensors_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (str, ("reduced",)))
    assert b"reduced" in plan([torch.ones(3)]).recording.data


def test_storages_that_are_viewed_as_two_dtypes_are_refused_as_by_torch() -> None:
    tensor = torch.ones(4)
    state = [tensor, tensor.view(torch.int32)]
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        torch.save(state, io.BytesIO())
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        plan(state)


def test_what_was_planned_before_makes_no_difference() -> None:
    small, large = {"w": torch.arange(100)}, {"w": torch.arange(100_000)}
    first = [plan(state) for state in (small, small, large, large)]
    again = [plan(state) for state in (large, small, large, small)]
    assert [one.alignment for one in first] == [64, 64, 4096, 4096]
    assert list(first[0].image.segments) == list(first[1].image.segments) == list(again[1].image.segments)
    assert list(first[2].image.segments) == list(again[0].image.segments) == list(again[2].image.segments)


def test_planning_keeps_nothing_alive() -> None:
    """Not even until the garbage collector comes: that may be long after the state should have gone. Nor if the
    alignment is another one than that of the last file, so that torch is run twice."""
    large = {"w": torch.zeros(1 << 20)}
    assert plan(large).alignment != plan({"w": torch.arange(100)}).alignment
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            storage = torch.arange(100).untyped_storage()
            alive = weakref.ref(storage)
            plan({"w": storage})
            del storage
            assert alive() is None
            plan(large)
            storage = torch.arange(100).untyped_storage()
            alive = weakref.ref(storage)
            with pytest.raises((pickle.PicklingError, AttributeError)):
                torch_zip.plan(
                    {"w": storage, "x": lambda: 1},
                    pickle_module=SimpleNamespace(__name__="users", Pickler=OwnPickler),
                    pickle_protocol=2,
                )
            del storage
            assert alive() is None
    finally:
        gc.enable()


def test_a_torch_that_pickles_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "torch_is_known", lambda: False)
    with mock.patch.object(torch_zip, "_save"), pytest.raises(LayoutError, match="did not pickle"):
        plan(STATE)


def sample(**changes: bytes) -> bytes:
    """A small file of torch's, in which some bytes are others of the same length."""
    file = io.BytesIO()
    torch.save([torch.arange(count, dtype=torch.uint8).untyped_storage() for count in (3, 0, 70)], file)
    data = file.getvalue()
    for old, new in changes.items():
        assert len(old) == len(new)
        data = data.replace(old.encode(), new)
    return data


CONTENTS = [bytes(range(count)) for count in (3, 0, 70)]


def test_the_sample_is_as_expected() -> None:
    found = torch_zip._found_in(sample(), CONTENTS, 64)
    assert [record.name for record in found.before] == [".format_version", ".storage_alignment", "byteorder"]
    assert [record.name for record in found.behind] == ["version", ".data/serialization_id"]


@pytest.mark.parametrize(
    "changes",
    [
        {"archive": b"another"},
        {"data.pkl": b"pickled_"},
        {"data/1": b"data/9"},
        {"version": b"verzion"},
        {"ZZZZ": b"YYYY"},
        {"little": b"middle"},
    ],
)
def test_a_torch_that_lays_out_otherwise_is_noticed(changes: dict[str, bytes]) -> None:
    with pytest.raises(LayoutError, match="otherwise than expected"):
        torch_zip._found_in(sample(**changes), CONTENTS, 64)


def test_a_torch_that_writes_no_archive_is_noticed() -> None:
    torch_zip.small_records_of_torch.cache_clear()
    with (
        mock.patch.object(torch_zip, "_save", lambda obj, file: file.write(b"something else")),
        pytest.raises(LayoutError, match="no zip archive"),
    ):
        torch_zip.small_records_of_torch(64)


def test_a_torch_without_that_writer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "PyTorchFileWriter")
    torch_zip.hash_of_names.cache_clear()
    with pytest.raises(LayoutError, match="cannot be asked"):
        torch_zip.hash_of_names(("data.pkl",), 3)


def test_a_save_that_cannot_be_planned_is_torchs_own_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = mock.patch.object(torch_zip, "small_records_of_torch", side_effect=LayoutError("unknown"))
    with unknown, caplog.at_level(logging.WARNING, "fastensor"):
        report = fastensor.save(STATE, tmp_path / "x")
    assert report.backend == "torch"
    assert [fallback.backend for fallback in report.fallbacks] == ["stitching"]
    assert len(caplog.records) == 1
    assert torch.equal(fastensor.load(tmp_path / "x")["w"], STATE["w"])
    assert report.nbytes == (tmp_path / "x").stat().st_size


def test_a_meta_storage_is_refused_as_by_torch(tmp_path: Path) -> None:
    storage = torch.empty(3, device="meta").untyped_storage()
    with pytest.raises((RuntimeError, NotImplementedError)):
        fastensor.save(storage, tmp_path / "x")
    assert not list(tmp_path.iterdir())
