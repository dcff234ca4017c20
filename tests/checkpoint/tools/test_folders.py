"""``verify``, ``inspect`` and ``diff`` answer for all that is in a folder.

States of Accelerate are in ``tests/accelerate/test_verifying.py``."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy
import pytest
import torch
from checkpoints import save
from flipped import assert_answers_for_all, flipped
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning_models import fit
from programs import command_line
from torch.distributed.checkpoint import FileSystemWriter

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageWriter
from fastensor.checkpoint.tools.folders import entries_at
from fastensor.cli.output import FAILED, FOREIGN_CODE, OK, UNCHECKED
from fastensor.errors import (
    CheckpointReadError,
    CorruptCheckpointError,
    FastensorError,
    NotACheckpointError,
    UnsupportedContentError,
)
from fastensor_lightning import FastensorCheckpointIO

WEIGHTS = {"a": torch.arange(300.0), "b": torch.ones(5)}
CODE_IS_FINE = "--allow-code"


def statuses(capsys: Any, folder: Path, *flags: str) -> tuple[int, dict[str, str]]:
    """The exit status of ``verify``, and what it says of each file."""
    status, out, _ = command_line(capsys, "verify", "--json", *flags, folder)
    return status, {os.path.relpath(one["path"], folder): one["result"] for one in json.loads(out)}


# kinds of folders


def test_a_folder_of_several_checkpoints(tmp_path: Path, capsys: Any) -> None:
    for name in ("epoch=0.ckpt", "epoch=1.ckpt", "deeper/last.ckpt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        fastensor.save({"state_dict": WEIGHTS, "epoch": 1, "text": name}, tmp_path / name)
    (tmp_path / "hparams.yaml").write_text("lr: 0.1\n")
    report = assert_answers_for_all(tmp_path, not_compared={"hparams.yaml"})
    assert (report.container, report.path, report.complete) == ("folder", str(tmp_path), True)
    assert report.nbytes == sum(path.stat().st_size for path in tmp_path.rglob("*.ckpt"))
    assert statuses(capsys, tmp_path) == (
        OK,
        dict.fromkeys(("epoch=0.ckpt", "epoch=1.ckpt", "deeper/last.ckpt"), "intact")
        | {"hparams.yaml": "not compared"},
    )
    with flipped(tmp_path / "epoch=1.ckpt", 0):
        status, found = statuses(capsys, tmp_path)
        assert (status, found["epoch=1.ckpt"], found["epoch=0.ckpt"]) == (FAILED, "unreadable", "intact")


@pytest.mark.parametrize("plugin", [FastensorCheckpointIO(), None], ids=["ours", "stock"])
def test_a_folder_of_lightning(tmp_path: Path, capsys: Any, plugin: Any) -> None:
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, save_last="link")
    logger = CSVLogger(tmp_path, name="", version="")
    fit(lightning.pytorch, tmp_path, plugin, callbacks=[checkpoints], logger=logger)
    texts = {"hparams.yaml", "metrics.csv"}
    report = assert_answers_for_all(tmp_path, not_compared=texts)
    assert report.complete
    status, found = statuses(capsys, tmp_path, CODE_IS_FINE)
    assert (status, {name for name, result in found.items() if result != "intact"}) == (OK, texts)
    assert len(found) == 2 + 3, "two epochs, and the link"


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_of_hugging_face(tmp_path: Path, capsys: Any, shards: int) -> None:
    fastensor.save_sharded({f"w{number}": torch.randn(100) for number in range(shards)}, tmp_path, shard_nbytes=400)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "merges.txt").write_text("Ġ t\n" * 500)
    index = {"model.safetensors.index.json"} if shards > 1 else set()
    report = assert_answers_for_all(tmp_path, not_compared={"config.json", "merges.txt", *index})
    assert report.complete
    assert statuses(capsys, tmp_path)[0] == OK, "texts are not the reason for a failure"


@pytest.mark.parametrize("writer", [FastensorStorageWriter, FileSystemWriter])
def test_a_distributed_checkpoint(tmp_path: Path, capsys: Any, writer: Any) -> None:
    save({"w": torch.arange(300.0), "step": 3}, writer(tmp_path))
    of_torch = writer is FileSystemWriter
    report = assert_answers_for_all(tmp_path, not_compared={".metadata"} if of_torch else set())
    assert (report.container, report.complete) == ("dcp", not of_torch)
    assert statuses(capsys, tmp_path)[0] == (UNCHECKED if of_torch else OK)


def test_files_beside_the_shards(tmp_path: Path, capsys: Any) -> None:
    save({"w": torch.arange(300.0)}, FastensorStorageWriter(tmp_path))
    fastensor.save({"epoch": 1}, tmp_path / "meta.pt")
    fastensor.save(WEIGHTS, tmp_path / "ema.pt")
    shutil.copy(next(tmp_path.glob("*.distcp")), tmp_path / "__9_9.distcp")  # of a replaced checkpoint
    assert_answers_for_all(tmp_path, not_compared={"__9_9.distcp"})
    status, found = statuses(capsys, tmp_path)
    assert (status, found) == (UNCHECKED, {".": "intact", "ema.pt": "intact", "__9_9.distcp": "not compared"})


def test_shards_without_metadata_are_no_checkpoint(tmp_path: Path, capsys: Any) -> None:
    save({"w": torch.arange(300.0)}, FastensorStorageWriter(tmp_path / "model"))
    fastensor.save(WEIGHTS, tmp_path / "optimizer.bin")
    (tmp_path / "model" / ".metadata").unlink()
    with pytest.raises(CheckpointReadError, match=r"it has no \.metadata\); name what is in it: .*model"):
        fastensor.verify(tmp_path)
    assert statuses(capsys, tmp_path) == (FAILED, {"model": "unreadable", "optimizer.bin": "intact"})


# kinds of files


def test_every_kind_of_file_is_named(tmp_path: Path, capsys: Any) -> None:
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    fastensor.save(WEIGHTS, tmp_path / "of_any_name")
    torch.save(WEIGHTS, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    with (tmp_path / "plain.bin").open("wb") as file:
        pickle.dump({"a": 1}, file)
    (tmp_path / "compressed.pkl").write_bytes(gzip.compress(pickle.dumps(1)))
    numpy.savez(tmp_path / "arrays.npz", a=numpy.arange(3))
    (tmp_path / "events.out.tfevents.1").write_bytes(b"\x18\0\0\0\0\0\0\0\xa3\x7f\x4b\x22" * 9)
    (tmp_path / "{}.json").write_text("{}")
    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / ".0123456789abcdef.0.fastensor-tmp").write_bytes((tmp_path / "sound.pt").read_bytes()[:99])
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_bytes(b"x\x9c\0")
    status, found = statuses(capsys, tmp_path)
    compared = {"sound.pt": "intact", "of_any_name": "intact", "legacy.pt": "no checksums"}
    assert (status, found) == (
        UNCHECKED,
        compared
        | dict.fromkeys(
            (
                "plain.bin",
                "compressed.pkl",
                "arrays.npz",
                "events.out.tfevents.1",
                "{}.json",
                "empty",
                "pipe",
                ".git",
                ".0123456789abcdef.0.fastensor-tmp",
            ),
            "not compared",
        ),
    )
    assert statuses(capsys, tmp_path, "--allow-unchecked")[0] == OK
    report = fastensor.verify(tmp_path)
    assert set(report.not_compared) == found.keys() - {"sound.pt", "of_any_name"}
    assert (report.uncompared, report.complete) == (8, False), "texts and what is empty do not count"
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("model.ckpt", b"<!DOCTYPE html><html>Not found</html>", NotACheckpointError),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", NotACheckpointError),
        ("optimizer.bin", bytes(1000), CorruptCheckpointError),
        ("random_states_0.pkl", bytes(1000), CorruptCheckpointError),
        ("random_states_1.pkl", b"", CorruptCheckpointError),
    ],
)
def test_what_should_be_a_checkpoint_by_its_name(
    tmp_path: Path, capsys: Any, name: str, content: bytes, error: type[Exception]
) -> None:
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=name):
        fastensor.verify(tmp_path)
    assert statuses(capsys, tmp_path, "--allow-unchecked") == (FAILED, {"sound.pt": "intact", name: "unreadable"})


def test_shards_of_a_model_may_lie_deeper(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "deeper").mkdir()
    for name in "ab":
        fastensor.save({name: WEIGHTS[name]}, tmp_path / "deeper" / f"{name}.safetensors")
    index = {"weight_map": {name: f"deeper/{name}.safetensors" for name in "ab"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    fastensor.save(WEIGHTS, tmp_path / "deeper" / "c.safetensors")
    _, found = statuses(capsys, tmp_path)
    assert found == {f"deeper/{name}.safetensors": "intact" for name in "abc"} | {
        "model.safetensors.index.json": "not compared"
    }
    assert {*fastensor.inspect(tmp_path).files} == {"model.safetensors.index.json", "deeper/c.safetensors"}


def test_what_a_killed_save_has_left_is_not_the_state(tmp_path: Path, capsys: Any) -> None:
    """Nor is what is being saved."""
    fastensor.save(WEIGHTS, tmp_path / "model.safetensors")
    save({"w": torch.arange(300.0)}, FastensorStorageWriter(tmp_path / ".fastensor-saving" / "optimizer_0"))
    (tmp_path / ".fastensor-saving" / "optimizer_0" / ".metadata").unlink()
    assert statuses(capsys, tmp_path) == (
        UNCHECKED,
        {"model.safetensors": "intact", ".fastensor-saving": "not compared"},
    )


def test_links(tmp_path: Path, capsys: Any) -> None:
    fastensor.save(WEIGHTS, tmp_path / "elsewhere.ckpt")
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    (folder / "linked.ckpt").symlink_to(tmp_path / "elsewhere.ckpt")
    (folder / "deeper" / "above").symlink_to(folder)
    found = {"linked.ckpt": "intact", "deeper/above": "not compared"}
    assert statuses(capsys, folder) == (OK, found), "a circle ends, and what it leads to is compared"
    (folder / "proc").symlink_to("/proc/self")
    found["proc"] = "not compared"
    assert statuses(capsys, folder) == (UNCHECKED, found), "no other folder is searched"
    (folder / "gone.ckpt").symlink_to(tmp_path / "gone")
    assert statuses(capsys, folder) == (FAILED, {**found, "gone.ckpt": "unreadable"})


def test_links_do_not_multiply_what_is_searched(tmp_path: Path) -> None:
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    for number in range(13):
        (tmp_path / str(number)).mkdir()
        for name in "ab":
            (tmp_path / str(number) / name).symlink_to(tmp_path / str((number + 1) % 13))
    assert len(fastensor.verify(tmp_path).not_compared) == 2 * 13


def test_folders_may_be_deep(tmp_path: Path) -> None:
    deepest = tmp_path
    for _ in range(1100):
        deepest /= "d"
        deepest.mkdir()
    fastensor.save(WEIGHTS, deepest / "x.ckpt")
    try:
        assert fastensor.verify(tmp_path).complete
    finally:  # so many are too many for the clean-up of pytest
        (deepest / "x.ckpt").unlink()
        for _ in range(1100):
            deepest.rmdir()
            deepest = deepest.parent


def test_a_folder_without_checkpoints_is_an_error(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    for tool in (fastensor.verify, fastensor.inspect):
        with pytest.raises(CheckpointReadError, match="name what is in it"):
            tool(tmp_path)
    assert statuses(capsys, tmp_path) == (FAILED, {".": "unreadable"})


def test_code_in_a_folder(tmp_path: Path, capsys: Any) -> None:
    torch.save({"path": Path("x")}, tmp_path / "args.bin")
    fastensor.save(WEIGHTS, tmp_path / "model.pt")
    assert statuses(capsys, tmp_path)[0] == FOREIGN_CODE
    assert statuses(capsys, tmp_path, CODE_IS_FINE)[0] == OK
    assert fastensor.verify(tmp_path).code


def test_a_broken_index_hides_no_file(tmp_path: Path, capsys: Any) -> None:
    fastensor.save_sharded({f"w{number}": torch.randn(100) for number in range(2)}, tmp_path, shard_nbytes=400)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    status, found = statuses(capsys, tmp_path)
    assert (status, found[index.name], sorted(found.values())) == (
        FAILED,
        "unreadable",
        ["intact", "intact", "unreadable"],
    )
    with pytest.raises(CorruptCheckpointError, match="the index is not JSON"):
        fastensor.verify(tmp_path)


def write_index(path: Path, files: dict[str, str]) -> None:
    path.write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("of", [["m"], ["m", "n"]])
def test_an_index_claims_no_index(tmp_path: Path, of: list[str]) -> None:
    fastensor.save(WEIGHTS, tmp_path / "x.safetensors")
    fastensor.save(WEIGHTS, tmp_path / "other.pt")
    for one, two in zip(of, reversed(of), strict=True):
        write_index(tmp_path / f"{one}.index.json", {"a": "x.safetensors", "q": f"{two}.index.json"})
    with pytest.raises(FastensorError, match=r"index\.json"):
        fastensor.verify(tmp_path)
    data = (tmp_path / "x.safetensors").stat().st_size - 1
    with (
        flipped(tmp_path / "x.safetensors", data),
        pytest.raises(fastensor.DamagedCheckpointError, match=r"x\.safetensors: "),
    ):
        fastensor.verify(tmp_path)


def test_an_index_claims_no_directory(tmp_path: Path, capsys: Any) -> None:
    save({"w": torch.arange(300.0)}, FastensorStorageWriter(tmp_path / "c"))
    (tmp_path / "c" / "ema.pt").write_bytes(bytes(1000))
    write_index(tmp_path / "m.index.json", {"zz": "c"})
    status, found = statuses(capsys, tmp_path)
    assert (status, found) == (FAILED, {"c": "unreadable", "c/ema.pt": "unreadable", "m.index.json": "not compared"})


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "", "."])
def test_an_index_of_impossible_names_hides_no_file(tmp_path: Path, capsys: Any, name: str) -> None:
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    write_index(tmp_path / "m.index.json", {"a": name})
    assert statuses(capsys, tmp_path) == (FAILED, {"m.index.json": "unreadable", "sound.pt": "intact"})
    for tool in (fastensor.verify, fastensor.inspect):
        with pytest.raises(CorruptCheckpointError, match="expected names of files in its folder"):
            tool(tmp_path)


def test_what_is_no_index_of_a_model_is_a_text(tmp_path: Path, capsys: Any) -> None:
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    (tmp_path / "search.index.json").write_text('{"docs": []}')
    assert statuses(capsys, tmp_path) == (OK, {"search.index.json": "not compared", "sound.pt": "intact"})
    assert fastensor.verify(tmp_path).container == "folder"
    assert fastensor.inspect(tmp_path).files["search.index.json"].container == "text"


def test_two_indexes_of_the_same_files(tmp_path: Path) -> None:
    fastensor.save_sharded({f"w{number}": torch.randn(100) for number in range(2)}, tmp_path, shard_nbytes=400)
    alone, listed = fastensor.verify(tmp_path), fastensor.inspect(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shutil.copy(index, tmp_path / "model.safetensors.index.fp16.json")
    report = fastensor.verify(tmp_path)
    assert (report.nbytes, report.compared) == (alone.nbytes, alone.compared)
    found = fastensor.inspect(tmp_path)
    assert (found.tensors, found.nbytes, found.memory_bytes) == (listed.tensors, listed.nbytes, listed.memory_bytes)
    (tmp_path / "model.safetensors.index.fp16.json").unlink()
    write_index(tmp_path / "some.index.json", {"w0": "model-00001-of-00002.safetensors"})
    assert fastensor.verify(tmp_path).compared == alone.compared, "each file is read once"


@pytest.mark.parametrize("name", [".metadata", "__0.metadata", "m.index.json"])
def test_pipes_and_devices_are_not_read(tmp_path: Path, capsys: Any, name: str) -> None:
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    os.mkfifo(tmp_path / name)
    (tmp_path / "n.index.json").symlink_to("/dev/zero")
    found = {name: "not compared", "n.index.json": "not compared", "sound.pt": "intact"}
    assert statuses(capsys, tmp_path) == (UNCHECKED, found)
    assert fastensor.inspect(tmp_path).files.keys() == found.keys()
    with pytest.raises(NotACheckpointError, match="found a pipe, a socket or a device"):
        fastensor.verify(tmp_path / "n.index.json")


def test_metadata_that_cannot_be_reached_are_metadata(tmp_path: Path, capsys: Any) -> None:
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    (tmp_path / ".metadata").symlink_to("gone")
    status, found = statuses(capsys, tmp_path)
    assert (status, found["."], found["sound.pt"]) == (FAILED, "unreadable", "intact")


def test_the_size_of_an_index_is_bounded(tmp_path: Path, capsys: Any) -> None:
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    with (tmp_path / "m.index.json").open("wb") as file:
        file.truncate(1 << 40)
    assert statuses(capsys, tmp_path) == (FAILED, {"m.index.json": "unreadable", "sound.pt": "intact"})


def test_shards_are_told_by_their_whole_names(tmp_path: Path, capsys: Any) -> None:
    save({"w": torch.arange(300.0)}, FastensorStorageWriter(tmp_path))
    shutil.copy(next(tmp_path.glob("*.distcp")), tmp_path / "0.distcp")
    assert statuses(capsys, tmp_path) == (UNCHECKED, {".": "intact", "0.distcp": "not compared"})


def test_what_a_save_has_left_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    left = [tmp_path / f".{name}.fastensor-{kind}" for name in "ab" for kind in ("tmp", "replaced")]
    for path in left:
        path.write_bytes(b"x")
    listed = os.listdir

    def list_and_remove(path: Any) -> list[str]:
        names = listed(path)
        for one in left[:2]:
            one.unlink(missing_ok=True)
        return names

    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", list_and_remove)
        entries = entries_at(tmp_path)
    for path in left[2:]:
        path.unlink()
    for tool in ("tools.inspect", "tools.verify"):
        monkeypatch.setattr(f"fastensor.checkpoint.{tool}.entries_at", lambda path: entries)
    assert set(fastensor.verify(tmp_path).not_compared) == {path.name for path in left[2:]}
    assert len(fastensor.inspect(tmp_path).files) == 3


def test_names_of_files_do_not_reach_the_terminal(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "\x1b]0;title\x07.pt").write_bytes(bytes(100))
    fastensor.save(WEIGHTS, tmp_path / "sound.pt")
    for command in ("inspect", "verify"):
        status, out, err = command_line(capsys, command, tmp_path)
        assert (status, "\x1b" in out + err, "title" in out + err) == (FAILED, False, True)


def test_a_pending_save_into_the_folder_is_waited_for(tmp_path: Path) -> None:
    with fastensor.AsyncWriter() as writer:
        writer.save({"a": torch.arange(100_000)}, tmp_path / "model.ckpt")
        assert fastensor.verify(tmp_path).complete


# inspect


def model_and_more(folder: Path, scale: float = 1.0) -> Path:
    """A model, its optimizer in a folder of its own, and files that are no checkpoints."""
    (folder / "deeper").mkdir(parents=True)
    fastensor.save({name: one * scale for name, one in WEIGHTS.items()}, folder / "model.safetensors")
    fastensor.save({"state": {"step": torch.tensor(scale)}, "lr": 0.1}, folder / "deeper" / "optimizer.bin")
    save({"w": torch.arange(30.0) * scale, "step": 3}, FastensorStorageWriter(folder / "shards"))
    torch.save(WEIGHTS, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    (folder / "config.json").write_text("{}")
    (folder / "plain.pkl").write_bytes(pickle.dumps(1))
    return folder


def test_all_files_of_a_folder_are_listed(tmp_path: Path, capsys: Any) -> None:
    model_and_more(tmp_path)
    found = fastensor.inspect(tmp_path)
    assert (found.path, found.container, found.checked) == (str(tmp_path), "folder", False), "the legacy one has none"
    assert {one.name for one in found.tensors} == {"a", "b", "deeper/optimizer.bin: state.step", "shards: w"}
    assert found.others == {"deeper/optimizer.bin: lr": "0.1", "shards: step": found.others["shards: step"]}
    kinds = {name: one.container for name, one in found.files.items()}
    assert kinds == {
        "model.safetensors": "safetensors", "deeper/optimizer.bin": "torch", "shards": "dcp", "legacy.pt": "legacy",
        "config.json": "text", "plain.pkl": "pickle",
    }  # fmt: skip
    assert found.nbytes == sum(found.files[name].nbytes for name in kinds if kinds[name] not in ("text", "pickle"))
    assert "not listed" in found.files["legacy.pt"].metadata
    assert [one.name for one in found.files["deeper/optimizer.bin"].tensors] == ["state.step"]
    assert pickle.loads(pickle.dumps(found)) == found
    status, out, _ = command_line(capsys, "inspect", tmp_path)
    assert status == OK
    for text in (*kinds, "deeper/optimizer.bin: state.step", "4 tensors of "):
        assert text in out
    status, out, _ = command_line(capsys, "inspect", "--json", tmp_path, "--key", "shards: *")
    shown = json.loads(out)
    assert (status, [one["name"] for one in shown["tensors"]]) == (OK, ["shards: w"])
    assert {one["path"]: one["container"] for one in shown["files"]} == kinds
    assert next(one for one in shown["files"] if one["path"] == "model.safetensors")["totals"]["tensors"] == 2


def test_a_model_beside_its_configuration_is_listed_as_itself(tmp_path: Path) -> None:
    fastensor.save(WEIGHTS, tmp_path / "model.safetensors")
    alone = fastensor.inspect(tmp_path)
    assert (alone.container, alone.files) == ("safetensors", {})
    (tmp_path / "config.json").write_text("{}")
    beside = fastensor.inspect(tmp_path)
    assert {*beside.files} == {"model.safetensors", "config.json"}
    assert (beside.path, beside.container, beside.tensors) == (alone.path, alone.container, alone.tensors)


def test_a_damaged_file_hides_no_other_one(tmp_path: Path, capsys: Any) -> None:
    model_and_more(tmp_path)
    with flipped(tmp_path / "deeper" / "optimizer.bin", 0):
        with pytest.raises(CorruptCheckpointError, match=r"optimizer\.bin"):
            fastensor.inspect(tmp_path)
        status, out, err = command_line(capsys, "inspect", tmp_path)
        assert (status, "optimizer.bin" in err, "shards: w" in out, "optimizer" in out) == (FAILED, True, True, False)
        status, out, err = command_line(capsys, "inspect", "--json", tmp_path)
        assert (status, len(json.loads(out)["files"])) == (FAILED, 5)
        assert "optimizer.bin" in json.loads(out)["errors"][0]


def test_the_file_beside_the_shards_is_listed_and_compared(tmp_path: Path) -> None:
    for name, epoch in (("a", 1), ("b", 2)):
        save({"w": torch.arange(30.0)}, FastensorStorageWriter(tmp_path / name))
        fastensor.save({"epoch": epoch}, tmp_path / name / "meta.pt")
    found = fastensor.inspect(tmp_path / "a")
    assert (found.container, [one.name for one in found.tensors]) == ("dcp", ["w"])
    assert found.others == {"meta.pt: epoch": "1"}
    differing = fastensor.diff(tmp_path / "a", tmp_path / "b")
    assert (differing.others, differing.same) == ({"meta.pt: epoch": ("1", "2")}, 1)


def test_values_of_shards_of_one_name(tmp_path: Path) -> None:
    for folder, epoch in (("a", 1), ("b", 5)):
        for number, name in ((epoch, "p"), (2, "q")):
            (tmp_path / folder / name).mkdir(parents=True)
            fastensor.save({name: torch.ones(1), "epoch": number}, tmp_path / folder / name / "s.bin")
        write_index(tmp_path / folder / "pytorch_model.bin.index.json", {name: f"{name}/s.bin" for name in "pq"})
    found = fastensor.inspect(tmp_path / "a")
    assert found.others == {"p/s.bin: epoch": "1", "q/s.bin: epoch": "2"}
    assert {one.part for one in found.tensors} == {"p/s.bin", "q/s.bin"}
    assert fastensor.diff(tmp_path / "a", tmp_path / "b").others == {"p/s.bin: epoch": ("1", "5")}


def test_what_cannot_be_listed_hides_no_file(tmp_path: Path) -> None:
    model_and_more(tmp_path)
    (tmp_path / "legacy").mkdir()
    legacy_shards(tmp_path / "legacy", 1.0)
    found = fastensor.inspect(tmp_path)
    index = found.files["legacy/pytorch_model.bin.index.json"]
    assert (index.container, "not listed" in index.metadata) == ("huggingface", True)
    assert index.nbytes == sum(path.stat().st_size for path in (tmp_path / "legacy").glob("*.bin"))


# diff


def sharded_by_rank(folder: Path, scale: float) -> None:
    """A checkpoint that can only be loaded whole, by as many ranks."""
    save({"w": torch.ones(3) * scale}, FastensorStorageWriter(folder))
    (folder / ".metadata").rename(folder / "__0.metadata")
    shutil.copy(folder / "__0.metadata", folder / "__1.metadata")


def legacy_shards(folder: Path, scale: float) -> None:
    for name in "ab":
        shard = folder / f"{name}.bin"
        torch.save({name: torch.ones(3) * scale}, shard, _use_new_zipfile_serialization=False)
    write_index(folder / "pytorch_model.bin.index.json", {name: f"{name}.bin" for name in "ab"})


@pytest.mark.parametrize("save_whole", [legacy_shards, sharded_by_rank])
def test_what_is_in_several_files_and_loaded_whole_is_not_called_the_same(tmp_path: Path, save_whole: Any) -> None:
    for name, scale in (("a", 1.0), ("b", 2.0)):
        (tmp_path / name / "deeper").mkdir(parents=True)
        save_whole(tmp_path / name / "deeper", scale)
        fastensor.save(WEIGHTS, tmp_path / name / "x.pt")
    with pytest.raises(UnsupportedContentError):
        fastensor.diff(tmp_path / "a", tmp_path / "b")


def test_what_is_no_file_is_not_compared(tmp_path: Path, capsys: Any) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        fastensor.save(WEIGHTS, tmp_path / name / "model.safetensors")
        for directory in (".git", "x.fastensor-saving"):
            (tmp_path / name / directory).mkdir()
            (tmp_path / name / directory / "x").write_text(name)
        os.mkfifo(tmp_path / name / "pipe")
        (tmp_path / name / "latest").symlink_to(tmp_path / name)
    found = fastensor.diff(tmp_path / "a", tmp_path / "b")
    names = (".git", "latest", "pipe", "x.fastensor-saving")
    assert (found.is_empty, found.same, found.not_compared) == (True, 2, names)
    status, out, _ = command_line(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert (status, all(f"not compared: {name}" in out for name in names)) == (OK, True)
    (tmp_path / "a" / "pipe").unlink()
    (tmp_path / "a" / "pipe").write_text("")
    assert {*fastensor.diff(tmp_path / "a", tmp_path / "b").others} == {"pipe"}


def test_files_are_compared_byte_by_byte(tmp_path: Path) -> None:
    """These two have the same size and the same CRC32."""
    contents = {"a": b"\xff\xfeone\0\0\0\0", "b": with_crc32_of(b"\xff\xfeone\0\0\0\0", b"\xff\xfetwo")}
    assert len({zlib.crc32(content) for content in contents.values()}) == 1
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        fastensor.save(WEIGHTS, tmp_path / name / "model.safetensors")
        (tmp_path / name / "extra.dat").write_bytes(content)
    assert {*fastensor.diff(tmp_path / "a", tmp_path / "b").others} == {"extra.dat"}


def with_crc32_of(content: bytes, start: bytes) -> bytes:
    """Bytes that begin otherwise, with the CRC32 of others: CRC32 is linear, so four bytes solve 32 equations."""
    basis: dict[int, tuple[int, int]] = {}
    zero = zlib.crc32(start + bytes(4))
    for bit in range(32):
        value, chosen = zlib.crc32(start + (1 << bit).to_bytes(4, "little")) ^ zero, 1 << bit
        while value and (top := value.bit_length()) in basis:
            value, chosen = value ^ basis[top][0], chosen ^ basis[top][1]
        basis[value.bit_length()] = value, chosen
    wanted, found = zlib.crc32(content) ^ zero, 0
    while wanted:
        value, chosen = basis[wanted.bit_length()]
        wanted, found = wanted ^ value, found ^ chosen
    return start + found.to_bytes(4, "little")


def test_names_that_look_like_those_of_another_file(tmp_path: Path) -> None:
    for folder, scale in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        fastensor.save({"z.pt: w": torch.ones(3) * scale}, tmp_path / folder / "model.safetensors")
        fastensor.save({"w": torch.ones(3)}, tmp_path / folder / "z.pt")
    found = fastensor.diff(tmp_path / "a", tmp_path / "b")
    assert ([one.name for one in found.tensors], found.same) == (["z.pt: w"], 1)


def test_paths_come_before_models(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        fastensor.save(WEIGHTS, tmp_path / name / "a.ckpt")
    fastensor.save({"q": torch.ones(1)}, tmp_path / "b" / "model.safetensors")
    found = fastensor.diff(tmp_path / "a", tmp_path / "b")
    assert (found.only_first, found.only_second, found.same) == ((), ("model.safetensors",), 2)


def test_a_file_is_compared_with_the_model_whatever_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    fastensor.save(WEIGHTS, "a.ckpt")
    fastensor.save({"q": torch.ones(1)}, "folder/a.ckpt")
    fastensor.save(WEIGHTS, "folder/model.safetensors")
    found = fastensor.diff("a.ckpt", "folder")
    assert (found.only_first, found.only_second, found.same) == ((), ("a.ckpt",), 2)


def test_two_folders_are_compared_file_by_file(tmp_path: Path, capsys: Any) -> None:
    one, two = (model_and_more(tmp_path / name) for name in "ab")
    found = fastensor.diff(one, two)
    assert (found.is_empty, found.same, found.not_compared) == (True, 9, ())
    two = model_and_more(tmp_path / "c", 2.0)
    (two / "config.json").write_text("[]")
    (one / "model.safetensors").rename(one / "pytorch_model.bin")  # it stays the model of its folder
    (one / "first.pt").write_bytes((one / "deeper" / "optimizer.bin").read_bytes())
    (two / "README.md").write_text("# Second")
    torch.save(2, two / "legacy.pt", _use_new_zipfile_serialization=False)
    found = fastensor.diff(one, two)
    assert [one.name for one in found.tensors] == ["a", "b", "deeper/optimizer.bin: state.step", "shards: w"]
    assert (found.only_first, found.only_second) == (("first.pt",), ("README.md",))
    assert {*found.others} == {"config.json", "legacy.pt"}
    assert found.others["config.json"][0].startswith("<text of 2 bytes with SHA-256 ")
    assert found.same == 3, "the learning rate, the step and a pickle"
    status, out, _ = command_line(capsys, "diff", one, two)
    assert (status, "8 differences, 3 the same" in out) == (FAILED, True)
    found = fastensor.diff(one, two, values=False)
    assert (found.tensors, {*found.others}) == ((), {"legacy.pt"}), "sizes are compared"


def test_a_folder_and_a_single_checkpoint(tmp_path: Path, capsys: Any) -> None:
    folder = model_and_more(tmp_path / "folder")
    fastensor.save(WEIGHTS, tmp_path / "model.ckpt")
    for sides in ((folder, tmp_path / "model.ckpt"), (tmp_path / "model.ckpt", folder)):
        found = fastensor.diff(*sides)
        alone = {*found.only_first, *found.only_second}
        assert alone == {"deeper/optimizer.bin", "shards", "legacy.pt"}
        assert ({*found.not_compared}, found.same) == ({"config.json", "plain.pkl"}, 2)
    for path in ("deeper", "shards"):
        shutil.rmtree(folder / path)
    (folder / "legacy.pt").unlink()
    status, out, _ = command_line(capsys, "diff", folder, tmp_path / "model.ckpt")
    assert (status, "not compared: config.json" in out, "0 differences, 2 the same" in out) == (OK, True, True)


def test_folders_without_a_model(tmp_path: Path) -> None:
    for name, epoch in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        for step in range(2):
            fastensor.save({"w": torch.ones(3), "epoch": epoch}, tmp_path / name / f"step={step}.ckpt")
    found = fastensor.diff(tmp_path / "a", tmp_path / "b")
    assert found.others == {f"step={step}.ckpt: epoch": ("1", "2") for step in range(2)}
    assert (found.same, found.only_first, found.only_second) == (2, (), ())
