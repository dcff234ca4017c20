"""``verify``, ``inspect``, ``diff`` and ``convert`` for distributed checkpoints."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import assert_same, emptied, join, load, save, sharded, state_of_all_kinds
from programs import command_line, run, run_ranks
from safetensors import safe_open
from states import assert_equal
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import GPT2Config, GPT2LMHeadModel

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.cli.main import main

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
    assert "intact" in out
    assert "dcp" in out
    status, out, _ = command_line(capsys, "inspect", tmp_path / "a")
    assert status == 0
    assert "1 tensor of 156 KiB, 20 thousand parameters, 156 KiB in memory; 1 other value" in out
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


def test_directories_where_files_are_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "state" / "model"
    save({"a": torch.ones(3)}, FastensorStorageWriter(path))
    with pytest.raises(fastensor.CheckpointReadError, match="distributed checkpoint; load it by torch"):
        fastensor.load(path)
    for command in ("verify", "inspect"):
        assert command_line(capsys, command, path.parent)[0] == 0, "it is found in the folder"
    (tmp_path / "empty").mkdir()
    for command in ("verify", "inspect"):
        code, out, err = command_line(capsys, command, tmp_path / "empty")
        assert code == 1
        assert "it has no .metadata); name what is in it" in out + err


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


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float32])
def test_differences_that_are_no_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    for name, value in (("a", 0), ("b", 255)):
        save({"w": torch.full((8,), value, dtype=torch.uint8).view(dtype)}, FastensorStorageWriter(tmp_path / name))
    (tensor,) = fastensor.diff(tmp_path / "a", tmp_path / "b").tensors
    assert tensor.elements == 8 // dtype.itemsize
    assert math.isnan(tensor.largest)
    _, out, _ = command_line(capsys, "diff", "--json", tmp_path / "a", tmp_path / "b")
    found = json.loads(out, parse_constant=pytest.fail)
    assert found["tensors"][0]["largest"] is None


@pytest.mark.parametrize("writer", WRITERS)
def test_diff_of_objects(tmp_path: Path, writer: Any) -> None:
    """Whatever they are: no code of theirs is run."""

    class Raw(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return io.BytesIO(b"raw") if write_item.index.fqn == "raw" else super().resolve_data(write_item)

    state = {"w": torch.zeros(3), "number": Decimal(3), "list": [1, [2]], "raw": 0, "step": 1}
    save(state, writer(tmp_path / "a"), planner=Raw())
    save({**state, "number": 3, "step": 2}, writer(tmp_path / "b"), planner=Raw())
    assert fastensor.diff(tmp_path / "a", tmp_path / "a").is_empty
    found = fastensor.diff(tmp_path / "a", tmp_path / "b")
    assert found.others == {"number": ("<decimal.Decimal>", "3"), "step": ("1", "2")}
    with pytest.raises(fastensor.UnsafeCheckpointError, match=r"'number': .*decimal\.Decimal"):
        fastensor.convert(tmp_path / "a", tmp_path / "x.pt")


def test_several_files_have_one_progress(tmp_path: Path) -> None:
    fastensor.save_sharded({name: torch.ones(300) for name in "abc"}, tmp_path / "model", shard_nbytes=2000)
    sizes = [path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors")]
    seen: list[tuple[int, int]] = []
    fastensor.convert(tmp_path / "model", tmp_path / "dcp", container="dcp", progress=lambda *now: seen.append(now))
    assert len(sizes) == 3
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {sum(sizes)}
    assert seen[-1] == (sum(sizes),) * 2


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


@pytest.mark.parametrize("root", [None, "trained"])
def test_optimizers_find_their_states_in_a_converted_file(tmp_path: Path, root: str | None) -> None:
    """Their keys are numbers, of which ``torch.distributed.checkpoint`` makes strings."""
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(12)]
    expected = torch.optim.AdamW(weights, lr=0.5)
    sum(weight.sum() for weight in weights[1:]).backward()
    expected.step()
    state = {"optimizers": [expected.state_dict()], "by number": {"3": 4}}
    save({"trained": state}, FastensorStorageWriter(tmp_path / "dcp"))
    fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt", root=root)
    found = torch.load(tmp_path / "x.pt")
    found = found["trained"] if root is None else found
    assert_equal(found, state)
    optimizer = torch.optim.AdamW(weights, lr=0.5)
    optimizer.load_state_dict(found["optimizers"][0])
    assert_equal(optimizer.state_dict(), expected.state_dict())


@pytest.mark.parametrize("params", [3, None, "ab", {"0": 1}, ["0"], [[0]], [True]], ids=repr)
def test_a_dict_that_only_looks_like_the_state_of_an_optimizer_stays(tmp_path: Path, params: Any) -> None:
    state = {"x": {"state": {"0": 1, "True": 2}, "param_groups": [{"params": params}, {"params": [0]}]}}
    save(state, FastensorStorageWriter(tmp_path / "dcp"))
    fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt")
    assert fastensor.load(tmp_path / "x.pt") == state


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
    with pytest.raises(fastensor.UnsupportedContentError, match="expected a dict of tensors called 'step', found none"):
        fastensor.convert(tmp_path / "x.ckpt", tmp_path / "dcp", container="dcp", root="step")
    fastensor.save(state["model"], tmp_path / "x.safetensors")
    fastensor.convert(tmp_path / "x.safetensors", tmp_path / "dcp", container="dcp")
    assert fastensor.diff(tmp_path / "dcp", tmp_path / "x.safetensors").is_empty


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no folder in memory")
def test_a_report_of_what_is_in_memory(tmp_path: Path) -> None:
    fastensor.save({"w": torch.ones(3)}, tmp_path / "x.ckpt")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert not fastensor.convert(tmp_path / "x.ckpt", folder, container="dcp").durable
        assert not fastensor.convert(folder, f"{folder}/x.ckpt").durable
    assert fastensor.convert(tmp_path / "x.ckpt", tmp_path / "dcp", container="dcp").durable
    assert not fastensor.convert(tmp_path / "x.ckpt", tmp_path / "dcp", container="dcp", durable=False).durable


def test_a_file_without_checksums_is_said(tmp_path: Path) -> None:
    fastensor.save({"w": torch.ones(3)}, tmp_path / "x.safetensors", checksums=False)
    with pytest.warns(fastensor.UnverifiedCheckpointWarning, match=r"x.safetensors: the file carries no") as warned:
        fastensor.convert(tmp_path / "x.safetensors", tmp_path / "dcp", container="dcp")
    assert [one.filename for one in warned] == [__file__]


def test_an_empty_folder_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no weights: expected \*\.index\.json or model\.safetensors"):
        fastensor.convert(tmp_path / "empty", tmp_path / "dcp", container="dcp")


def test_a_distributed_checkpoint_beside_weights_comes_first(tmp_path: Path) -> None:
    """Whatever reads a folder takes it for the same thing."""
    fastensor.save({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, tmp_path / "model.safetensors")
    save({"weight": torch.zeros(1, 1)}, FastensorStorageWriter(tmp_path))
    assert fastensor.inspect(tmp_path).container == "dcp"
    assert fastensor.verify(tmp_path).container == "dcp"
    with pytest.raises(fastensor.CheckpointReadError, match="the directory of a distributed checkpoint"):
        fastensor.load_model(torch.nn.Linear(1, 1), tmp_path)
    with pytest.raises(fastensor.CheckpointReadError, match="the directory of a distributed checkpoint"):
        fastensor.load_sharded(tmp_path)


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
    for use in (
        lambda: fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt"),
        lambda: fastensor.diff(tmp_path / "dcp", tmp_path / "dcp"),
    ):
        with pytest.raises(fastensor.UnsupportedContentError, match="each rank has saved without the others"):
            use()


def _save_alone(rank: int, folder: Path) -> None:
    join(folder, rank, 2)
    save({"x": torch.full((5,), rank)}, FastensorStorageWriter(folder / "dcp"), no_dist=False, use_collectives=False)
    state = {"x": torch.zeros(5, dtype=torch.int64)}
    dcp.load(state, storage_reader=FastensorStorageReader(folder / "dcp"))
    assert state["x"].tolist() == [rank] * 5
    torch.distributed.destroy_process_group()


WEIGHTS = {
    "a": torch.arange(3000.0).view(30, 100),
    "b": torch.arange(7, dtype=torch.int64),
    "c.d": torch.arange(5000.0).view(50, 100).to(torch.bfloat16),
    "e": torch.tensor(2.5),
    "f": torch.empty(0, 4),
}


@pytest.mark.parametrize("kind", ["dcp", "ckpt", "safetensors"])
def test_convert_to_a_model_in_several_files_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    source = tmp_path / f"x.{kind}"
    if kind == "dcp":
        save({"model": WEIGHTS, "step": 3}, FastensorStorageWriter(source))
    else:
        fastensor.save({"model": WEIGHTS} if kind == "ckpt" else WEIGHTS, source)
    root = () if kind == "safetensors" else ("--root", "model", "--drop")
    folder = tmp_path / "out"
    status, *_ = command_line(capsys, "convert", source, f"{folder}/", *root, "--shard-size", "12kB")
    assert status == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in WEIGHTS.values())}
    assert sorted(path.name for path in folder.iterdir()) == [*sorted(set(index["weight_map"].values())), *[
        "model.safetensors.index.json"
    ]]  # fmt: skip
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert_same(opened.get_tensor(name), WEIGHTS[name])
    assert {path.stat().st_size < 13_000 for path in folder.glob("*.safetensors")} == {True}
    for number, model in enumerate((folder, folder / "model.safetensors.index.json")):
        fastensor.convert(model, tmp_path / f"again-{number}", container="dcp")
        assert_same(load(emptied(WEIGHTS), FastensorStorageReader(tmp_path / f"again-{number}")), WEIGHTS)
    status, _, errors = command_line(capsys, "convert", source, folder, *root)
    assert status == 1
    assert "holds a model already" in errors


def test_convert_to_a_model_in_one_file(tmp_path: Path) -> None:
    save(WEIGHTS, FastensorStorageWriter(tmp_path / "dcp"))
    report = fastensor.convert(tmp_path / "dcp", tmp_path / "out", container="huggingface")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert_same(fastensor.load(tmp_path / "out" / "model.safetensors"), WEIGHTS)
    assert report.nbytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    fastensor.convert(tmp_path / "out", tmp_path / "again", container="dcp")
    assert fastensor.diff(tmp_path / "dcp", tmp_path / "again").is_empty


def test_models_in_several_files_at_urls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fastensor.save(WEIGHTS, tmp_path / "x.safetensors")
    status, _, errors = command_line(capsys, "convert", tmp_path / "x.safetensors", "memory://fastensor-model/")
    assert status == 1
    assert "into a directory of this machine, found a URL" in errors


def test_transformers_reads_converted_models(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=16, tie_word_embeddings=False)
    model = GPT2LMHeadModel(config)
    save(model.state_dict(), FastensorStorageWriter(tmp_path / "dcp"))
    fastensor.convert(tmp_path / "dcp", tmp_path / "out", container="huggingface", shard_nbytes=40_000)
    config.save_pretrained(tmp_path / "out")
    found = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert_same(found.state_dict(), dict(model.state_dict()))


def test_bad_indices(tmp_path: Path) -> None:
    fastensor.save(WEIGHTS, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weights, message in (
        ({"a": "../a.safetensors"}, "files in its folder"),
        ({"a": "/a.safetensors"}, "files in its folder"),
        ({"nosuch": "a.safetensors"}, "'nosuch' is not in it"),
        ({"a": 1}, "weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(fastensor.CorruptCheckpointError, match=message):
            fastensor.convert(index, tmp_path / "dcp", container="dcp")
    index.write_text("[" * 100_000)
    with pytest.raises(fastensor.CorruptCheckpointError, match="not JSON"):
        fastensor.convert(index, tmp_path / "dcp", container="dcp")


def test_keys_that_become_the_same(tmp_path: Path) -> None:
    save({"a": torch.zeros(1), "b": torch.ones(1)}, FileSystemWriter(tmp_path / "dcp"))
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    metadata.planner_data = {"a": ("a", "b.c"), "b": ("a.b", "c")}
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(fastensor.UnsupportedContentError, match=r"would both be called 'a\.b\.c'"):
        fastensor.convert(tmp_path / "dcp", tmp_path / "x.safetensors")


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("target", ["x.pt", "x.safetensors", "memory://fastensor-pieces/x.safetensors"])
def test_chunks_become_whole_tensors(tmp_path: Path, writer: Any, target: str) -> None:
    run_ranks(_save_large, 2, tmp_path, writer)
    target = target if "://" in target else str(tmp_path / target)
    seen: list[tuple[int, int]] = []
    fastensor.convert(
        tmp_path / "dcp", target, memory_nbytes="4MiB", progress=lambda done, total: seen.append((done, total))
    )
    expected = {name: large(*shape) for name, shape in LARGE.items()}
    assert_same(fastensor.load(target), expected)
    assert seen[-1] == (sum(tensor.nbytes for tensor in expected.values()),) * 2


@pytest.mark.parametrize("shape", [(300, 1000), (1, 300_000), (2, 3, 50_000), (300_000,)])
def test_damage_is_found_by_a_conversion(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save({"w": large(*shape)}, FastensorStorageWriter(tmp_path / "dcp"))
    (path,) = (tmp_path / "dcp").glob("*.distcp")
    fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt")
    assert torch.equal(torch.load(tmp_path / "x.pt")["w"], large(*shape))
    sound = path.read_bytes()
    for at in (200, 1000, len(sound) // 2, len(sound) - 300):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(fastensor.CorruptCheckpointError, match="item 'w'"):
            fastensor.convert(tmp_path / "dcp", tmp_path / "y.pt")
        assert not (tmp_path / "y.pt").exists()


def test_tensors_that_take_too_much_memory_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save({"w": large(1000, 300).t(), "b": torch.zeros(3)}, FastensorStorageWriter(tmp_path / "dcp"))
    with pytest.raises(fastensor.UnsupportedContentError, match=r"'w' takes 2\.29 MiB .* 1 MiB may be used"):
        fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt", memory_nbytes=1 << 20)
    assert main(["convert", str(tmp_path / "dcp"), str(tmp_path / "x.pt"), "--memory", "1MiB"]) == 1
    assert "pass --memory of at least 24" in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()
    fastensor.convert(tmp_path / "dcp", tmp_path / "x.pt", memory_nbytes=3 << 20)
    assert torch.equal(torch.load(tmp_path / "x.pt")["w"], large(1000, 300).t())


TENSOR_BY_TENSOR = """
import re, sys
from pathlib import Path
from fastensor.checkpoint.dcp.catalog import read_contents
from fastensor.checkpoint.dcp.tensors import DirectoryTensors, tensor_bytes

def peak_memory_nbytes():  # the most resident memory since the last call
    found = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")
    return int(found[1]) << 10

def read(name):
    found, buffer = tensor_bytes(tensors, name, lambda done: None), memoryview(bytearray(1 << 20))
    for begin in range(0, found.nbytes(), buffer.nbytes):
        found.readinto(begin, buffer)

with DirectoryTensors(read_contents(Path(sys.argv[1])), "numpy", verify=True) as tensors:
    read("small")
    peak_memory_nbytes()
    before = peak_memory_nbytes()
    for number in range(4):
        read(f"w{number}")
    print(peak_memory_nbytes() - before)
"""


def test_memory_of_a_conversion(tmp_path: Path) -> None:
    """One tensor is in memory at a time. The C library keeps no freed memory, which would be counted."""
    nbytes = 16 << 20
    state = {f"w{number}": torch.zeros(nbytes // 4) for number in range(4)}
    save({**state, "small": torch.zeros(1 << 18)}, FastensorStorageWriter(tmp_path / "dcp"))
    done = run("-c", TENSOR_BY_TENSOR, tmp_path / "dcp", cold=True, MALLOC_MMAP_THRESHOLD_="65536")
    assert int(done.stdout) < 1.5 * nbytes


LARGE = {"rows": (301, 1000), "columns": (9, 50_000), "flat": (400_000,), "first": (2, 3, 60_000), "small": (5, 5)}


def large(*shape: int) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).view(shape)


def _save_large(rank: int, folder: Path, writer: Any) -> None:
    mesh = join(folder, rank, 2)
    dims = {"rows": 0, "columns": 1, "flat": 0, "first": 2, "small": 0}
    state = {name: distribute_tensor(large(*shape), mesh, [Shard(dims[name])]) for name, shape in LARGE.items()}
    save(state, writer(folder / "dcp"), no_dist=False)
    torch.distributed.destroy_process_group()
