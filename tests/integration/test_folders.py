"""``verify``, ``inspect`` and ``diff`` answer for all that is in a folder.

States of Accelerate are in ``tests/accelerate/test_verifying.py``."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch
import numpy
import pytest
import torch
from checkpoints import save
from flipped import assert_answers_for_all, flipped
from integration.lightning_models import fit
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from programs import command_line
from torch.distributed.checkpoint import FileSystemWriter

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageWriter
from fastensor.cli.output import FAILED, FOREIGN_CODE, OK, UNCHECKED
from fastensor.errors import CheckpointReadError, CorruptCheckpointError, NotACheckpointError
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
    assert statuses(capsys, folder) == (OK, {"linked.ckpt": "intact"}), "a circle ends"
    (folder / "gone.ckpt").symlink_to(tmp_path / "gone")
    assert statuses(capsys, folder) == (FAILED, {"linked.ckpt": "intact", "gone.ckpt": "unreadable"})


def test_a_folder_without_checkpoints_is_an_error(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointReadError, match="name what is in it"):
        fastensor.verify(tmp_path)
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


# diff


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
    assert found.others["config.json"][0].startswith("<text of 2 bytes with CRC32 ")
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
