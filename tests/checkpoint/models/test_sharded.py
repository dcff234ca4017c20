"""``fastensor.save_sharded`` and ``fastensor.load_sharded``: files that transformers writes and reads, crash-safe."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import tempfile
import zipfile
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from killer import Killer
from programs import command_line
from states import assert_equal
from torch import Tensor

import fastensor
from fastensor import (
    CheckpointWriteError,
    CorruptCheckpointError,
    DamagedCheckpointError,
    StateMismatchError,
    UnknownKeyError,
    UnverifiedCheckpointWarning,
)
from fastensor.checkpoint.models.sharded import split
from fastensor.cli.output import UNCHECKED
from fastensor.stitch.plain_tensors import skips_values
from fastensor.testing.calls import Call, intercepted
from fastensor.testing.faults import failing_call

INDEX = "model.safetensors.index.json"


def state_of(step: int, tensors: int = 3) -> dict[str, Tensor]:
    return {f"layer.{number}": torch.full((300,), step * 10.0 + number) for number in range(tensors)}


def save(folder: Path, step: int, tensors: int = 3, **options: Any) -> None:
    fastensor.save_sharded(state_of(step, tensors), folder, shard_nbytes=2000, **options)


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_new_folder_is_as_durable_as_what_is_in_it(tmp_path: Path) -> None:
    folder, synced = tmp_path / "new" / "model", set()

    def note(call: Call) -> Any:
        if call.name == "fsync":
            synced.add(os.readlink(f"/proc/self/fd/{call.arguments[0]}"))
        return call.perform()

    with intercepted(note):
        save(folder, 1, durable=False)
    assert not synced
    with intercepted(note):
        save(tmp_path / "other" / "model", 1)
    assert {str(tmp_path), str(tmp_path / "other"), str(tmp_path / "other" / "model")} <= synced


def test_shards_and_index(tmp_path: Path) -> None:
    report = fastensor.save_sharded(state_of(1), tmp_path / "new", shard_nbytes="2KiB")
    index = json.loads((tmp_path / "new" / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": 3600},
        "weight_map": {f"layer.{number}": f"model-0000{number + 1}-of-00003.safetensors" for number in range(3)},
    }
    assert report.atomic
    assert report.nbytes == sum(path.stat().st_size for path in (tmp_path / "new").glob("*.safetensors"))
    assert_equal(fastensor.load_sharded(tmp_path / "new"), state_of(1))
    assert_equal(fastensor.load_sharded(tmp_path / "new" / INDEX), state_of(1))


def test_one_file_is_enough_for_few(tmp_path: Path) -> None:
    fastensor.save_sharded(state_of(1), tmp_path)
    assert names_in(tmp_path) == ["model.safetensors"]
    assert_equal(fastensor.load_sharded(tmp_path), state_of(1))
    assert_equal(fastensor.load_sharded(tmp_path / "model.safetensors"), state_of(1))
    fastensor.save_sharded({}, tmp_path)
    assert fastensor.load_sharded(tmp_path) == {}


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 12))
def test_shards_are_split_as_by_hugging_face(sizes: list[int], most: int) -> None:
    hub = pytest.importorskip("huggingface_hub")
    state = {f"{number:02}": torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    theirs = hub.split_torch_state_dict_into_shards(state, max_shard_size=most)
    assert split({name: one.nbytes for name, one in state.items()}, most) == [*theirs.filename_to_tensors.values()]


def test_a_part_of_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    found = fastensor.load_sharded(tmp_path, keys=["layer.0", "*.1"])
    assert_equal(found, {name: one for name, one in state_of(1).items() if name != "layer.2"})
    with pytest.raises(UnknownKeyError, match=r"matches 'layer.7'"):
        fastensor.load_sharded(tmp_path, keys=["layer.7"])
    with pytest.raises(FileNotFoundError):
        fastensor.load_sharded(tmp_path)


def test_into_tensors_and_models(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 100))
    model[1].weight = torch.nn.Parameter(model[0].weight.t())
    fastensor.save_sharded(model, tmp_path, shard_nbytes=20_000)
    assert len(names_in(tmp_path)) > 1
    index = tmp_path / INDEX
    assert not index.exists() or json.loads(index.read_text())["metadata"]["total_parameters"] == 10_150
    other = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 100))
    other[1].weight = torch.nn.Parameter(other[0].weight.t())
    into = other.state_dict()
    assert fastensor.load_sharded(tmp_path, into=into) is into
    assert_equal({**other.state_dict()}, {**model.state_dict()})
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    fastensor.load_model(other, tmp_path)
    assert_equal({**other.state_dict()}, {**model.state_dict()})
    with pytest.raises(StateMismatchError, match="'more' not in it; nothing was overwritten"):
        fastensor.load_sharded(tmp_path, into={**into, "more": torch.ones(1)})


def test_nothing_is_overwritten_before_all_files_are_known_to_fit(tmp_path: Path) -> None:
    save(tmp_path, 1)
    into = {name: torch.zeros_like(one) for name, one in state_of(1).items()}
    with pytest.raises(StateMismatchError, match=r"'layer.2': the file has the shape \[300\], it has \[2\]"):
        fastensor.load_sharded(tmp_path, into={**into, "layer.2": torch.zeros(2)})
    data = bytearray((tmp_path / "model-00003-of-00003.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model-00003-of-00003.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        fastensor.load_sharded(tmp_path, into=into, verify="first")
    assert not any(one.any() for one in into.values())
    with pytest.raises(CorruptCheckpointError, match="2 tensors had been overwritten") as caught:
        fastensor.load_sharded(tmp_path, into=into)
    assert caught.value.overwritten == ("layer.0", "layer.1")


def test_an_index_of_other_files(tmp_path: Path) -> None:
    save(tmp_path, 1)
    safetensors.torch.save_file({"other": torch.ones(1)}, tmp_path / "model-00002-of-00003.safetensors")
    for use in (
        lambda: fastensor.load_sharded(tmp_path, verify=False),
        lambda: fastensor.load_sharded(tmp_path, into={"layer.1": torch.zeros(300)}, verify=False),
        lambda: fastensor.load_model(torch.nn.Linear(1, 1), tmp_path, verify=False),
    ):
        with pytest.raises(CorruptCheckpointError, match=r"00002-of-00003.*'layer.1' is not in it"):
            use()


def test_a_shard_that_lacks_what_is_asked_of_it(tmp_path: Path) -> None:
    fastensor.save_sharded(state_of(1, 4), tmp_path, shard_nbytes=2500)
    safetensors.torch.save_file({"other": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"the index and the file are of different checkpoints"):
        fastensor.load_sharded(tmp_path, keys=["layer.1"], verify=False)


@pytest.mark.parametrize("tensors", [1, 3])
@pytest.mark.parametrize("name", ["pytorch_model.bin.index.json", "model.fp16.safetensors.index.json"])
def test_what_was_saved_last_is_loaded_from_a_folder_with_another_index(
    tmp_path: Path, name: str, tensors: int
) -> None:
    (tmp_path / name).write_text(json.dumps({"weight_map": {"w": "gone"}}))
    save(tmp_path, 1, tensors)
    assert_equal(fastensor.load_sharded(tmp_path), state_of(1, tensors))


def test_an_index_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CorruptCheckpointError, match="expected 'weight_map'"):
        fastensor.load_model(torch.nn.Linear(1, 1), tmp_path)


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    save(tmp_path, 1, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3600, 3600)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    total = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    seen.clear()
    fastensor.load_sharded(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    seen.clear()
    fastensor.load_sharded(tmp_path, into=state_of(2), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(TypeError, match="weights_only"):
        fastensor.load_sharded(tmp_path, into=state_of(2), weights_only="no")


CHANGES = [(3, 3), (3, 2), (3, 1), (1, 3), (1, 1)]
changes = pytest.mark.parametrize(("before", "after"), CHANGES)


@changes
def test_a_model_is_replaced_and_other_files_stay(tmp_path: Path, before: int, after: int) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.fp16-00001-of-00002.safetensors").write_text("of another variant")
    for step, tensors in enumerate((before, after, before, after)):
        save(tmp_path, step, tensors)
        assert_equal(fastensor.load_sharded(tmp_path), state_of(step, tensors))
        count_of_shards = tensors if tensors > 1 else 0
        assert len([name for name in names_in(tmp_path) if "-of-" in name]) == count_of_shards + 1
        assert (tmp_path / "model.safetensors").exists() == (tensors == 1)
        assert (tmp_path / INDEX).exists() == (tensors > 1)
    assert (tmp_path / "config.json").exists()


def step_in(folder: Path) -> int:
    """The step that the folder holds, whole, for us and for those who look for a whole file first."""
    if (folder / "model.safetensors").exists():
        state = safetensors.torch.load_file(folder / "model.safetensors")
        assert_equal(state, state_of(int(state["layer.0"][0]) // 10, len(state)))
    state = fastensor.load_sharded(folder)
    step = int(state["layer.0"][0]) // 10
    assert_equal(state, state_of(step, len(state)))
    return step


@changes
def test_killed_before_the_nth_call(tmp_path: Path, before: int, after: int) -> None:
    """What was there before can be read until the new one can."""
    found = []
    for fatal in count(1):
        folder = tmp_path / str(fatal)
        save(folder, 1, before, durable=False)
        pid = os.fork()
        if pid == 0:
            with intercepted(Killer(fatal, ("pwrite", "rename", "link", "unlink", "fsync", "fallocate64"))):
                save(folder, 2, after)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        found.append(step_in(folder))
        save(folder, 3, after, durable=False)
        assert step_in(folder) == 3
        assert not [name for name in names_in(folder) if name.startswith("model-") and name not in in_index(folder)]
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found == sorted(found)
    assert {*found} == {1, 2}


def in_index(folder: Path) -> str:
    return (folder / INDEX).read_text() if (folder / INDEX).exists() else ""


@pytest.mark.parametrize(("before", "after"), CHANGES[1:4])
def test_a_save_whose_nth_call_fails(tmp_path: Path, before: int, after: int) -> None:
    save(tmp_path, 1, before)
    for number in count(1):
        failure: Any = None
        with failing_call(number) as fault:
            try:
                save(tmp_path, 2, after)
            except CheckpointWriteError as error:
                failure = error
        if failure is not None:
            is_new = "new model is there" in str(failure)
            assert step_in(tmp_path) == 1 or is_new or "power failure" in str(failure)
        elif not fault.fired:
            break
        save(tmp_path, 1, before, durable=False)
    assert number > 20
    assert step_in(tmp_path) == 2


def test_two_writers(tmp_path: Path) -> None:
    def save_another(done: int, total: int) -> None:
        save(tmp_path, 2)

    with pytest.raises(CheckpointWriteError, match="a model is being saved there"):
        save(tmp_path, 1, progress=save_another)
    save(tmp_path, 1)


# transformers


def language_model(*, seed: int = 0, tied: bool = True) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("most", [10_000, 10**9])
def test_files_are_byte_for_byte_those_of_transformers(tmp_path: Path, tied: bool, most: int) -> None:
    transformers = pytest.importorskip("transformers")
    model = language_model(tied=tied)
    model.save_pretrained(tmp_path / "theirs", max_shard_size=most)
    fastensor.save_sharded(model, tmp_path / "ours", shard_nbytes=most, checksums=False)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "theirs").glob("model*")}
    found = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    if INDEX in expected and transformers.__version__.startswith("4.") and b"total_parameters" not in expected[INDEX]:
        found[INDEX] = re.sub(rb' *"total_parameters": \d+,\n', b"", found[INDEX])  # newer releases write it
    assert found == expected
    assert len(expected) == 1 or most == 10_000


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_reads_what_replaced_its_own_files(tmp_path: Path, tied: bool) -> None:
    language_model(tied=tied).save_pretrained(tmp_path, max_shard_size=10_000)
    model = language_model(seed=1, tied=tied)
    fastensor.save_sharded(model, tmp_path, shard_nbytes=10_000)
    assert (tmp_path / "model-2-00001-of-00008.safetensors").exists() or "model-2-" in in_index(tmp_path)
    found = type(model).from_pretrained(tmp_path)
    assert_equal({**found.state_dict()}, {**model.state_dict()})
    again = language_model(seed=2, tied=tied)
    fastensor.load_model(again, tmp_path)
    assert_equal({**again.state_dict()}, {**model.state_dict()})
    model.save_pretrained(tmp_path, max_shard_size=10_000)
    assert "model-2-" not in in_index(tmp_path)
    assert not [name for name in names_in(tmp_path) if name.startswith("model-2-")]


# verifying


def test_a_model_is_verified_as_a_whole(tmp_path: Path) -> None:
    save(tmp_path, 1)
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    for path in (tmp_path, tmp_path / INDEX):
        seen: list[tuple[int, int]] = []
        report = fastensor.verify(path, progress=lambda *now: seen.append(now))  # noqa: B023
        assert (report.path, report.container, report.nbytes) == (
            str(tmp_path / INDEX),
            "huggingface",
            sum(sizes.values()),
        )
        assert (report.complete, report.compared, report.damage, report.code) == (True, 6, (), ())
        assert seen[-1] == (sum(sizes.values()),) * 2
        assert seen == sorted(seen)
    fastensor.save_sharded(state_of(1), tmp_path / "one")
    assert fastensor.verify(tmp_path / "one").path == str(tmp_path / "one" / "model.safetensors")


def test_a_dtype_that_torch_lacks_is_verified(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (path,) = tmp_path.glob("model-00002-of-00003.safetensors")
    names = [one.name for one in fastensor.inspect(path).tensors]
    entries = {
        name: {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [3 * at, 3 * at + 3]} for at, name in enumerate(names)
    }
    head = json.dumps(entries).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(3 * len(names)))
    report = fastensor.verify(tmp_path)
    assert (report.damage, report.not_compared) == ((), (path.name, INDEX))


def test_all_damage_of_a_model_is_listed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for number in (1, 3):
        with (tmp_path / f"model-0000{number}-of-00003.safetensors").open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\xff")
    with pytest.raises(DamagedCheckpointError) as caught:
        fastensor.verify(tmp_path)
    assert caught.value.report.nbytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert [one.part for one in caught.value.report.damage] == [
        "model-00001-of-00003.safetensors: tensor 'layer.0'",
        "model-00003-of-00003.safetensors: tensor 'layer.2'",
    ]


def test_a_file_that_cannot_be_read_hides_no_damage_of_others(tmp_path: Path) -> None:
    save(tmp_path, 1)
    first, second, third = sorted(tmp_path.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(b"no checkpoint")
    seen: list[tuple[int, int]] = []
    with pytest.raises(FileNotFoundError) as missing:
        fastensor.verify(tmp_path, progress=lambda *now: seen.append(now))
    (note,) = missing.value.__notes__
    assert note.startswith("another file of the model could not be verified: ")
    assert second.name in note
    assert seen == sorted(seen)
    assert seen[-1] == (second.stat().st_size + third.stat().st_size,) * 2
    with third.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff")
    with pytest.raises(DamagedCheckpointError) as damaged:
        fastensor.verify(tmp_path)
    assert [one.part for one in damaged.value.report.damage] == [f"{third.name}: tensor 'layer.2'"]
    assert [name in note for name, note in zip((first.name, second.name), damaged.value.__notes__, strict=True)] == [
        True,
        True,
    ]


def test_a_callback_ends_the_verification_of_a_model(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "model-00001-of-00003.safetensors").write_bytes(b"no checkpoint")
    calls: list[int] = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        raise OSError("of the callback")

    with pytest.raises(OSError, match="of the callback"):
        fastensor.verify(tmp_path, progress=stop)
    assert len(calls) == 1


def test_a_model_in_legacy_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight_map = {}
    for name, one in state_of(1, 2).items():
        weight_map[name] = f"pytorch_model-{name}.bin"
        torch.save({name: one}, tmp_path / weight_map[name], _use_new_zipfile_serialization=False)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    report = fastensor.verify(tmp_path)
    assert (report.container, report.compared, report.uncompared, report.complete) == ("huggingface", 0, 2, False)
    assert command_line(capsys, "verify", tmp_path)[0] == UNCHECKED
    status, out, _ = command_line(capsys, "verify", "--allow-unchecked", tmp_path)
    assert (status, out.count("no checksums")) == (0, 2)


def test_a_model_in_a_compressed_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All its bytes are compared. That it lacks what the index expects is not known, so it is not called intact."""
    torch.save(state_of(1, 2), tmp_path / "model.tmp")
    with (
        zipfile.ZipFile(tmp_path / "model.tmp") as old,
        zipfile.ZipFile(tmp_path / "pytorch_model-1.bin", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for record in old.namelist():
            new.writestr(record, old.read(record))
    (tmp_path / "model.tmp").unlink()
    index = json.dumps({"weight_map": {"missing": "pytorch_model-1.bin"}})
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    report = fastensor.verify(tmp_path)
    assert (report.container, report.compared > 0, report.uncompared) == ("huggingface", True, 1)
    assert not report.complete
    assert "pytorch_model-1.bin" in report.not_compared
    status, out, _ = command_line(capsys, "verify", tmp_path)
    assert (status, "partly checked" in out) == (UNCHECKED, True)


def test_a_model_of_more_files_than_may_be_open_is_listed(tmp_path: Path) -> None:
    save(tmp_path, 1, tensors=40, durable=False)
    lowest, limits = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 20, limits[1]))
    try:
        found = [fastensor.inspect(tmp_path), fastensor.inspect(tmp_path / INDEX)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [(one.container, len(one.tensors)) for one in found] == [("huggingface", 40)] * 2


def test_an_index_of_a_variant(tmp_path: Path) -> None:
    """``save_pretrained(variant="fp16")`` puts the variant between ``index`` and ``json``."""
    save(tmp_path, 1)
    index = (tmp_path / INDEX).rename(tmp_path / "model.safetensors.index.fp16.json")
    assert_equal(fastensor.load_sharded(index), state_of(1))
    assert fastensor.verify(index).complete
    assert len(fastensor.inspect(index).tensors) == 3
    fastensor.convert(index, tmp_path / "whole.safetensors")
    assert_equal(fastensor.load(tmp_path / "whole.safetensors"), state_of(1))
    with pytest.raises(FileNotFoundError, match="no weights"):
        fastensor.load_sharded(tmp_path)  # the variant is chosen by its name


def legacy(folder: Path, step: int = 1) -> Path:
    """A model in files as torch wrote them before 1.6."""
    folder.mkdir()
    weight_map = {}
    for name, one in state_of(step, 2).items():
        weight_map[name] = f"pytorch_model-{name}.bin"
        torch.save({name: one}, folder / weight_map[name], _use_new_zipfile_serialization=False)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.filterwarnings("ignore::fastensor.errors.UnverifiedCheckpointWarning")
@pytest.mark.parametrize("container", ["torch", "safetensors", "huggingface", "dcp"])
def test_a_model_in_legacy_files_is_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], container: Any
) -> None:
    """Whatever ``load_sharded`` reads, ``convert`` reads."""
    folder = legacy(tmp_path / "model")
    fastensor.convert(folder, tmp_path / "new", container=container)
    assert fastensor.verify(tmp_path / "new").complete
    whole = tmp_path / "new.safetensors" if container == "dcp" else tmp_path / "new"
    if container == "dcp":
        fastensor.convert(tmp_path / "new", whole)
    assert_equal(fastensor.load_sharded(whole), state_of(1, 2))
    command = ["convert", folder, tmp_path / "again", "--container", container, "--json"]
    status, out, _ = command_line(capsys, *command)
    found = json.loads(out)
    assert (status, found["container"], found["left_out"]) == (0, container, [])


@pytest.mark.filterwarnings("ignore::fastensor.errors.UnverifiedCheckpointWarning")
def test_a_model_in_legacy_files_is_loaded_into_tensors(tmp_path: Path) -> None:
    folder = legacy(tmp_path / "model")
    into = {name: torch.zeros_like(one) for name, one in state_of(1, 2).items()}
    assert fastensor.load_sharded(folder, into=into) is into
    assert_equal(into, state_of(1, 2))
    with pytest.raises(StateMismatchError):
        fastensor.load_sharded(folder, into={"layer.0": torch.zeros(2)})


@pytest.mark.filterwarnings("ignore::fastensor.errors.UnverifiedCheckpointWarning")
@pytest.mark.parametrize("container", ["torch", "safetensors", "huggingface"])
def test_the_command_loads_each_legacy_file_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, container: str
) -> None:
    folder = legacy(tmp_path / "model")
    loaded = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **options: (loaded.append(args), load(*args, **options))[1])
    status, *_ = command_line(capsys, "convert", folder, tmp_path / "new", "--container", container)
    assert (status, len(loaded)) == (0, 2)


def saves_halves(obj: Any, *args: Any, **options: Any) -> None:
    """What a library puts in the place of ``torch.save``."""
    torch.serialization.save({name: one.half() for name, one in obj.items()}, *args, **options)


@pytest.mark.filterwarnings("ignore::fastensor.errors.UnverifiedCheckpointWarning")
@pytest.mark.parametrize("replaced", ["skip_data", saves_halves, lambda *args, **options: None])
def test_the_copy_of_a_legacy_file_has_its_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: Any
) -> None:
    """What is asked of ``torch.save`` concerns what users save."""
    folder = legacy(tmp_path / "model")
    into = {name: torch.full_like(one, 7) for name, one in state_of(1, 2).items()}
    skipping = torch.serialization.skip_data() if replaced == "skip_data" else nullcontext()
    if replaced != "skip_data":
        monkeypatch.setattr(torch, "save", replaced)
    with skipping:
        fastensor.load_sharded(folder, into=into)
        fastensor.convert(folder, tmp_path / "new.safetensors")
        assert skips_values() == (replaced == "skip_data")
    assert_equal(into, state_of(1, 2))
    assert_equal(fastensor.load(tmp_path / "new.safetensors"), state_of(1, 2))


@pytest.mark.filterwarnings("ignore::fastensor.errors.UnverifiedCheckpointWarning")
@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}], ids=["zip", "legacy"])
def test_values_reach_existing_tensors_under_skip_data(tmp_path: Path, options: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 3)
    torch.save(model.state_dict(), tmp_path / "x.pt", **options)
    for load in (
        lambda other: fastensor.load_model(other, tmp_path / "x.pt"),
        lambda other: fastensor.load(tmp_path / "x.pt", into=other.state_dict()),
    ):
        other = torch.nn.Linear(2, 3)
        with torch.serialization.skip_data():
            load(other)  # type: ignore[no-untyped-call]  # mypy knows no lambda in a tuple
        assert_equal(other.state_dict(), model.state_dict())


def test_converting_legacy_files_warns_of_each_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = legacy(tmp_path / "model")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.warns(UnverifiedCheckpointWarning) as caught:
        fastensor.convert(folder, tmp_path / "new.safetensors")
    names = ["layer.0.bin", "layer.1.bin"]
    assert sorted(name for one in caught for name in names if name in str(one.message)) == names
    assert len(caught) == 2
    assert not os.listdir(tmp_path / "temporary")


def test_a_model_without_a_tensor_of_its_index_is_not_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path, 1)
    fastensor.save({"other": torch.ones(3)}, tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"00002-of-00003.*'layer.1' is not in it"):
        fastensor.verify(tmp_path)
    status, out, _ = command_line(capsys, "verify", tmp_path)
    assert (status, out.count("intact"), "'layer.1' is not in it" in out) == (1, 2, True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        fastensor.verify(tmp_path)
