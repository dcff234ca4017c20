"""``verify``, ``inspect``, ``diff`` and ``convert`` for distributed checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, emptied, join, load, save, sharded, state_of_all_kinds
from programs import command_line, run_ranks
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter

WRITERS: Any = [FastensorStorageWriter, FileSystemWriter]


@pytest.mark.parametrize("writer", WRITERS)
def test_inspect(tmp_path: Path, writer: Any) -> None:
    save({"a": {"w": torch.zeros(3, 4, dtype=torch.bfloat16)}, "step": 3}, writer(tmp_path))
    found = fastensor.inspect(tmp_path)
    (tensor,) = found.tensors
    assert (tensor.name, tensor.dtype, tensor.shape) == ("a.w", torch.bfloat16, (3, 4))
    assert tensor.part in {path.name for path in tmp_path.iterdir()}
    assert list(found.others) == ["step"]
    assert found.container == "dcp"
    assert found.checked == (writer is FastensorStorageWriter)
    assert found.nbytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert found.metadata["files"] == "1"


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"w": torch.arange(20_000), "step": 3}, FastensorStorageWriter(tmp_path / "a"))
    save({"w": torch.arange(20_000) * 2, "step": 4, "more": 1}, FastensorStorageWriter(tmp_path / "b"))
    status, out, _ = command_line(capsys, "verify", tmp_path / "a")
    assert status == 0
    assert "sound" in out
    assert "dcp" in out
    status, out, _ = command_line(capsys, "inspect", tmp_path / "a")
    assert status == 0
    assert "1 tensors of 156 KiB, 1 other values" in out
    status, out, _ = command_line(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "19999 elements of int64 20000, by 19999 at most" in out
    assert "3 in A, 4 in B" in out
    assert "3 differences, 0 the same" in out
    status, out, _ = command_line(capsys, "diff", "--json", tmp_path / "a", tmp_path / "a")
    assert status == 0
    (path,) = (tmp_path / "a").glob("*.distcp")
    with path.open("r+b") as file:
        file.seek(70_000)
        file.write(b"\xff")
    status, out, _ = command_line(capsys, "verify", tmp_path / "a")
    assert status == 1
    assert f"{path.name}: item 'w'" in out


def test_diff_across_kinds(tmp_path: Path) -> None:
    state = {"w": torch.randn(30, 40), "b": torch.tensor([1.0, float("nan")]), "i": torch.arange(5)}
    save(state, FastensorStorageWriter(tmp_path / "dcp"))
    fastensor.save(state, tmp_path / "x.ckpt")
    fastensor.save(state, tmp_path / "x.safetensors")
    for name in ("x.ckpt", "x.safetensors", "dcp"):
        assert fastensor.diff(tmp_path / "dcp", tmp_path / name).is_empty
    state["w"][3, 4] += 1
    state["i"] = torch.arange(6)
    fastensor.save({**state, "new": torch.zeros(1)}, tmp_path / "y.ckpt")
    found = fastensor.diff(tmp_path / "dcp", tmp_path / "y.ckpt")
    assert [(one.name, one.elements) for one in found.tensors] == [("i", 0), ("w", 1)]
    assert found.tensors[1].largest == pytest.approx(1)
    assert (found.only_first, found.only_second, found.same) == ((), ("new",), 1)


@pytest.mark.parametrize("writer", WRITERS)
def test_convert_to_files(tmp_path: Path, writer: Any) -> None:
    state = state_of_all_kinds()
    save(state, writer(tmp_path / "dcp"))
    seen = []
    fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt", progress=lambda done, total: seen.append((done, total)))
    assert_same(torch.load(tmp_path / "x.pt"), {**state, "parameter": state["parameter"].data})
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(fastensor.UnsupportedContentError, match="tensors only, but 'step' is another object"):
        fastensor.convert(tmp_path / "dcp", tmp_path / "x.safetensors")
    fastensor.convert(tmp_path / "dcp", tmp_path / "x.safetensors", root="plain")
    assert_same(fastensor.load(tmp_path / "x.safetensors"), state["plain"])
    with pytest.raises(fastensor.UnsupportedContentError, match="no dict called 'nosuch'; found dtypes, plain"):
        fastensor.convert(tmp_path / "dcp", tmp_path / "x.safetensors", root="nosuch")


def test_convert_sharded(tmp_path: Path) -> None:
    run_ranks(_save_sharded, 2, tmp_path)
    fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt")
    assert found["step"] == 5
    for name, shape in (("rows", (37, 50)), ("columns", (8, 300)), ("large", (1000, 70)), ("replicated", (9, 9))):
        numel = shape[0] * shape[1]
        assert torch.equal(found[name], torch.arange(float(numel)).view(shape) + 5000)
    assert fastensor.diff(tmp_path / "dcp", tmp_path / "x.pt").is_empty


def _save_sharded(rank: int, folder: Path) -> None:
    mesh = join(folder, rank, 2)
    save(sharded(mesh, 5), FastensorStorageWriter(folder / "dcp"), no_dist=False)
    torch.distributed.destroy_process_group()


def test_convert_to_a_distributed_checkpoint(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(300, 40), "b": torch.randn(3)}, "step": 3}
    fastensor.save(state, tmp_path / "x.ckpt")
    report = fastensor.convert(tmp_path / "x.ckpt", tmp_path / "dcp", container="dcp")
    assert report.nbytes == sum(path.stat().st_size for path in (tmp_path / "dcp").glob("*.distcp"))
    for reader in (FastensorStorageReader, FileSystemReader):
        assert_same(load(emptied(state), reader(tmp_path / "dcp")), state)
    fastensor.convert(tmp_path / "x.ckpt", tmp_path / "dcp", container="dcp", root="model")
    assert_same(load(emptied(state["model"]), FastensorStorageReader(tmp_path / "dcp")), state["model"])
    fastensor.save(state["model"], tmp_path / "x.safetensors")
    fastensor.convert(tmp_path / "x.safetensors", tmp_path / "dcp", container="dcp")
    assert fastensor.diff(tmp_path / "dcp", tmp_path / "x.safetensors").is_empty


def test_damage_stops_a_conversion(tmp_path: Path) -> None:
    save({"w": torch.arange(20_000)}, FastensorStorageWriter(tmp_path / "dcp"))
    (path,) = (tmp_path / "dcp").glob("*.distcp")
    with path.open("r+b") as file:
        file.seek(70_000)
        file.write(b"\xff")
    with pytest.raises(fastensor.CorruptCheckpointError, match="item 'w'"):
        fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_ranks_with_metadata_of_their_own(tmp_path: Path) -> None:
    run_ranks(_save_alone, 2, tmp_path)
    assert fastensor.verify(tmp_path / "dcp").complete
    with pytest.raises(fastensor.UnsupportedContentError, match="each rank has saved without the others"):
        fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt")


def _save_alone(rank: int, folder: Path) -> None:
    join(folder, rank, 2)
    save({"x": torch.full((5,), rank)}, FastensorStorageWriter(folder / "dcp"), no_dist=False, use_collectives=False)
    state = {"x": torch.zeros(5, dtype=torch.int64)}
    dcp.load(state, storage_reader=FastensorStorageReader(folder / "dcp"))
    assert state["x"].tolist() == [rank] * 5
    torch.distributed.destroy_process_group()
