"""Planning, and what happens when torch does not do what the planner knows."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch

import fastensor
from fastensor.errors import LayoutError
from fastensor.stitch import torch_zip
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
    assert first[0].image.segments[1:] == first[1].image.segments[1:] == again[1].image.segments[1:]
    assert first[2].image.segments[1:-1] == again[0].image.segments[1:-1] == again[2].image.segments[1:-1]


def test_a_torch_that_pickles_otherwise_is_noticed() -> None:
    with mock.patch.object(torch, "save"), pytest.raises(LayoutError, match="did not pickle"):
        plan(STATE)


def test_a_torch_that_leaves_other_holes_is_noticed() -> None:
    with (
        mock.patch.object(torch_zip, "DESCRIPTOR_SIGNATURE", b"PK\x09\x09"),
        pytest.raises(LayoutError, match="descript"),
    ):
        plan(STATE)
    with mock.patch.object(torch_zip, "_ARCHIVE", "other"), pytest.raises(LayoutError, match="not at offset"):
        plan(STATE)
    with mock.patch.object(torch_zip, "LOCAL_SIGNATURE", b"XX"), pytest.raises(LayoutError, match="local header"):
        plan(STATE)
    sink = torch_zip._Skeleton()
    with pytest.raises(LayoutError, match="seeked"):
        sink.seek(0)


def test_a_save_that_cannot_be_planned_is_torchs_own_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fastensor.checkpoint.report.announce.cache_clear()
    with mock.patch.object(torch_zip, "_ARCHIVE", "other"), caplog.at_level(logging.WARNING, "fastensor"):
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
