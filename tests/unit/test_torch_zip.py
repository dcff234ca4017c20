"""Planning, and what happens when torch does not do what the planner knows."""

from __future__ import annotations

import gc
import logging
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import states
import torch
from hypothesis import given

import fastensor
from fastensor.errors import LayoutError
from fastensor.stitch import torch_layout, torch_zip
from fastensor.stitch.image import Header, Payload

STATE = {"w": torch.arange(100), "b": torch.ones(3), "empty": torch.empty(0)}


def plan(obj: object) -> torch_zip.TorchZip:
    return torch_zip.plan(obj, pickle_module=pickle, pickle_protocol=2)


def test_payload_segments_are_the_storages_in_the_order_of_the_pickle() -> None:
    source = plan(STATE)
    payload = [segment for segment in source.image.segments if isinstance(segment, Payload)]
    assert [source.storages[p.index].data_ptr() for p in payload] == [STATE["w"].data_ptr(), STATE["b"].data_ptr()]
    assert [p.nbytes for p in payload] == [800, 12]
    assert all(p.offset % 64 == 0 for p in payload)


def test_every_storage_has_two_blanks() -> None:
    headers = [segment for segment in plan(STATE).image.segments if isinstance(segment, Header)]
    assert sorted(blank.storage for header in headers for blank in header.blanks) == [0, 0, 1, 1]


@pytest.mark.parametrize(("sizes", "expected"), [([], 64), ([0], 64), ([409_601], 4096), ([409_600], 64), ([100], 64)])
def test_alignment(sizes: list[int], expected: int) -> None:
    assert torch_zip.choose_alignment(sizes) == expected


def test_what_was_planned_before_makes_no_difference() -> None:
    small, large = {"w": torch.arange(100)}, {"w": torch.arange(100_000)}
    first = [plan(state) for state in (small, small, large, large)]
    again = [plan(state) for state in (large, small, large, small)]
    assert [one.alignment for one in first] == [64, 64, 4096, 4096]
    assert first[0].image.segments == first[1].image.segments == again[1].image.segments
    assert first[2].image.segments == again[0].image.segments == again[2].image.segments


@pytest.fixture
def written_by_torch(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Grows when torch writes a skeleton, and not only pickles."""
    calls: list[bool] = []
    write = torch_layout.Layout.of
    monkeypatch.setattr(torch_layout.Layout, "of", lambda *args: calls.append(True) or write(*args))
    monkeypatch.setattr(torch_zip, "_likely_layout", None)
    return calls


def test_a_state_of_the_structure_of_the_last_one_is_laid_out_as_if_there_had_been_none(
    written_by_torch: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(step: int) -> Any:
        return {"w": torch.full((100_000,), step), "step": step, "loss": step / 7, "text": f"step {step}"}

    plan(state(11))
    quick = plan(state(23))
    assert len(written_by_torch) == 1
    monkeypatch.setattr(torch_zip, "_likely_layout", None)
    assert plan(state(23)).image.segments == quick.image.segments
    assert plan(state(11)).image.segments != quick.image.segments
    assert plan(state(1000)).recording.structure != quick.recording.structure
    assert len(written_by_torch) == 3


@given(before=states.trees(), after=states.trees())
def test_what_was_laid_out_before_makes_no_difference_to_any_state(before: Any, after: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_zip._likely_layout = None
        alone = plan(after)
        for state in (before, after, after):
            again = plan(state)
    assert again.image.segments == alone.image.segments


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.arange(101), "b": torch.ones(3)},
        {"w": torch.arange(100), "b": torch.ones(4)},
        {"w": torch.arange(100), "c": torch.ones(3), "d": torch.ones(1)},
        {"w": torch.arange(100)},
        {},
    ],
)
def test_another_structure_is_laid_out_anew(written_by_torch: list[bool], other: Any) -> None:
    for state in (STATE, other, STATE):
        source = plan(state)
    assert len(written_by_torch) == 3
    assert sum(isinstance(segment, Payload) for segment in source.image.segments) == 2


def test_a_large_layout_is_not_kept(written_by_torch: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "_MOST_KEPT_NBYTES", 1000)
    for _ in range(2):
        plan(STATE)
    assert len(written_by_torch) == 2


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
    finally:
        gc.enable()


def test_a_torch_that_puts_the_pickle_elsewhere_is_noticed() -> None:
    structure = torch_layout.Structure(5, (), (), 64)
    skeleton = torch_layout.Skeleton()
    with torch.serialization.skip_data():
        torch.save(None, skeleton)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="expected a pickle of 5 bytes, found Record"):
        torch_layout.Layout.of(skeleton, structure)
    with pytest.raises(LayoutError, match="end-of-directory"):
        torch_layout.Layout.of(torch_layout.Skeleton(), structure)


def test_a_torch_that_pickles_otherwise_is_noticed() -> None:
    with mock.patch.object(torch_zip, "_save"), pytest.raises(LayoutError, match="did not pickle"):
        plan(STATE)


def test_a_torch_that_leaves_other_holes_is_noticed() -> None:
    with (
        mock.patch.object(torch_layout, "DESCRIPTOR_SIGNATURE", b"PK\x09\x09"),
        pytest.raises(LayoutError, match="descript"),
    ):
        plan(STATE)
    with mock.patch.object(torch_layout, "_ARCHIVE", "other"), pytest.raises(LayoutError, match="expected a pickle"):
        plan(STATE)
    shifted = mock.patch.object(torch_layout, "Payload", lambda offset, *rest: Payload(offset + 1, *rest))
    with shifted, pytest.raises(LayoutError, match="not at offset"):
        plan(STATE)
    with mock.patch.object(torch_layout, "LOCAL_SIGNATURE", b"XX"), pytest.raises(LayoutError, match="local header"):
        plan(STATE)
    sink = torch_layout.Skeleton()
    with pytest.raises(LayoutError, match="seeked"):
        sink.seek(0)


def test_a_save_that_cannot_be_planned_is_torchs_own_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(torch_layout, "_ARCHIVE", "other"), caplog.at_level(logging.WARNING, "fastensor"):
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
