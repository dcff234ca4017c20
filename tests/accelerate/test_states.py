"""``save_state`` and ``load_state`` with Fastensor do what Accelerate's own do: same files, same states, same words."""

from __future__ import annotations

import copy
import errno
import json
import logging
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import pytest
import safetensors
import torch
from accelerate import Accelerator, DistributedType, load_checkpoint_in_model
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DataLoaderConfiguration, fsdp_utils
from accelerators import (
    MODES,
    Seen,
    Tied,
    Training,
    assert_goes_on,
    begin_anew,
    by,
    files_in,
    random_numbers,
    tensor_files,
    training,
)
from disks import FullDisk, Gate
from packaging.version import Version
from states import assert_equal, assert_same_tensors

import fastensor
import fastensor_accelerate
from fastensor.errors import CheckpointWriteError, FastensorError
from fastensor.testing import failing_call
from fastensor_accelerate import FastensorAccelerator, FastensorConfig
from fastensor_accelerate.directories import StateDirectory, finish, states_in

modes = pytest.mark.parametrize("config", MODES)
ASYNCHRONOUS = FastensorConfig(asynchronous=True)
MOST_CALLS = 2000


def wait(found: Training) -> None:
    """Until what is pending is published."""
    found.accelerator._fastensor_saver.wait()


# --- files and states are those of Accelerate


@modes
@pytest.mark.parametrize("safe_serialization", [True, False])
@pytest.mark.parametrize("count", [1, 2])
def test_either_loads_what_the_other_has_saved(
    tmp_path: Path, seen: Seen, config: FastensorConfig, safe_serialization: bool, count: int
) -> None:
    found = training(models=count, custom=count)
    found.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    found.accelerator.scaler.scale(torch.ones(1))
    found.train(2)
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    found.accelerator.save_state(str(stock), safe_serialization=safe_serialization)
    assert not seen.saved
    with by(config):
        returned = found.accelerator.save_state(str(ours), safe_serialization)
        wait(found)
    assert returned == ours
    assert files_in(ours) == files_in(stock)
    assert seen.take("saved") == tensor_files(ours)
    at, numbers, scale = found.state(), random_numbers(), found.accelerator.scaler.state_dict()
    for folder, reader in ((ours, None), (stock, config), (ours, config)):
        found.train()
        found.accelerator.scaler.load_state_dict({**scale, "scale": 2.0})
        with by(reader):
            found.accelerator.load_state(folder)
            assert_goes_on(found, at, numbers)
            assert found.accelerator.scaler.state_dict() == scale
        assert seen.take("loaded") == (tensor_files(folder) if reader else [])


@modes
def test_a_model_has_checksums_and_accelerates_metadata(tmp_path: Path, config: FastensorConfig) -> None:
    found = training()
    with by(config):
        found.accelerator.save_state(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.metadata()) == {"format", "fastensor.crc32"}
        assert file.metadata()["format"] == "pt"
        assert set(file.keys()) == {"first.weight", "first.bias", "seen"}, "the tied weight is there once"


@modes
def test_a_damaged_file_is_not_loaded(tmp_path: Path, config: FastensorConfig) -> None:
    found = training()
    with by(config):
        found.accelerator.save_state(tmp_path)
        wait(found)
        content = bytearray((tmp_path / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(fastensor.CorruptCheckpointError):
            found.accelerator.load_state(tmp_path)


@modes
@pytest.mark.parametrize("safe_serialization", [True, False])
def test_a_sharded_model(tmp_path: Path, seen: Seen, config: FastensorConfig, safe_serialization: bool) -> None:
    found = training()
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    options = {"max_shard_size": 80, "safe_serialization": safe_serialization}
    found.accelerator.save_model(found.models[0], stock, **options)
    with by(config):
        found.accelerator.save_model(found.models[0], ours, **options)
    assert files_in(ours) == files_in(stock)
    assert seen.take("saved") == tensor_files(ours)
    assert len(tensor_files(ours)) > 1
    for index in ours.glob("*.json"):
        assert json.loads(index.read_text()) == json.loads((stock / index.name).read_text())
    for folder in (stock, ours):
        model = Tied()
        load_checkpoint_in_model(model, folder)
        assert_same_tensors(dict(model.state_dict()), dict(found.models[0].state_dict()))


@modes
@pytest.mark.parametrize("kind", ["seedable", "stateful"])
def test_a_training_goes_on_in_the_middle_of_an_epoch(
    tmp_path: Path, seen: Seen, config: FastensorConfig, kind: str
) -> None:
    """The same batches follow, whoever has saved and whoever loads."""
    if kind == "stateful":
        pytest.importorskip("torchdata")
    loaders = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=kind == "stateful")

    def batches(loader: Any) -> list[Any]:
        return [batch[0].tolist() for batch in loader]

    def resumed(folder: Path, reader: FastensorConfig | None) -> list[Any]:
        begin_anew()
        found = training(loaders=loaders)
        with by(reader):
            found.accelerator.load_state(folder)
        loader = found.loader
        if kind == "seedable":
            loader = found.accelerator.skip_first_batches(found.loader, 5)
        return batches(loader) + batches(found.loader)[:2]

    found = training(loaders=loaders)
    rest: list[Any] = []
    for number, batch in enumerate(found.loader):
        if number == 4:
            found.accelerator.save_state(tmp_path / "stock")
            with by(config):
                found.accelerator.save_state(tmp_path / "ours")
        elif number > 4:
            rest.append(batch[0].tolist())
    assert ("dl_state_dict.bin" in files_in(tmp_path / "ours")) == (kind == "stateful")
    assert seen.take("saved") == tensor_files(tmp_path / "ours")
    expected = resumed(tmp_path / "stock", None)
    assert expected[: len(rest)] == rest
    for folder, reader in (("ours", None), ("stock", config), ("ours", config)):
        assert resumed(tmp_path / folder, reader) == expected


@modes
def test_options_of_loading(tmp_path: Path, seen: Seen, config: FastensorConfig) -> None:
    found = training()
    found.train()
    with by(config):
        found.accelerator.save_state(tmp_path)
        at, numbers = found.state(), random_numbers()
        for options in (
            {"map_location": "on_device"}, {"map_location": "cpu"}, {"load_kwargs": {"weights_only": False}},
            {"load_kwargs": {"mmap": True}}, {"strict": False},
        ):  # fmt: skip
            found.train()
            found.accelerator.load_state(tmp_path, **options)  # type: ignore[arg-type]
            assert_goes_on(found, at, numbers)
            assert seen.take("loaded") == tensor_files(tmp_path)
        found.models[0].register_buffer("more", torch.zeros(1))
        with pytest.raises(RuntimeError, match="more"):
            found.accelerator.load_state(tmp_path)
        found.accelerator.load_state(tmp_path, strict=False)
        with pytest.raises(TypeError, match="map location"):
            found.accelerator.load_state(tmp_path, map_location="meta")


@pytest.mark.parametrize("output_dir", ["str", "path", "relative"])
@modes
def test_what_is_returned_for_a_directory_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: FastensorConfig, output_dir: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given: Any = {"str": str(tmp_path / "x"), "path": tmp_path / "x", "relative": "x"}[output_dir]
    found = training()
    returned = found.accelerator.save_state(given)
    with by(config):
        again = found.accelerator.save_state(given)
    assert (type(again), again) == (type(returned), returned)


# --- states that Accelerate names


@modes
@pytest.mark.parametrize("total_limit", [None, 1, 2])
def test_names_and_rotation(
    tmp_path: Path, config: FastensorConfig, total_limit: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    def run(folder: Path, reader: FastensorConfig | None) -> tuple[list[str], list[Any], list[str], int]:
        begin_anew()
        found = training(folder, total_limit=total_limit)
        caplog.clear()
        returned = []
        with by(reader):
            for _ in range(12):  # 10 comes behind 9
                found.train()
                returned.append(found.accelerator.save_state().relative_to(folder))
            at, numbers = found.state(), random_numbers()
            found.train()
            found.accelerator.load_state()
            assert_goes_on(found, at, numbers)
        said = [record.getMessage() for record in caplog.records if "make room" in record.getMessage()]
        return files_in(folder / "checkpoints"), returned, said, found.accelerator.save_iteration

    stock, ours = run(tmp_path / "stock", None), run(tmp_path / "ours", config)
    if Version(accelerate.__version__) < Version("1.13"):  # it does not say which process speaks
        stock = (*stock[:2], [f"[RANK 0] {text}" for text in stock[2]], stock[3])
    assert ours[0] == stock[0]
    assert len(states_in(str(tmp_path / "ours" / "checkpoints"))) == (total_limit or 12)
    if not config.asynchronous:
        assert ours[1:] == stock[1:]
        assert os.listdir(tmp_path / "ours") == os.listdir(tmp_path / "stock") == ["checkpoints"]
    else:
        assert ours[2:] == stock[2:]
        assert [path.name for path in ours[1]] == [path.name for path in stock[1]]
        left = total_limit or 12
        assert sorted(os.listdir(tmp_path / "ours" / "checkpoints.saving")) == sorted(
            os.listdir(tmp_path / "ours" / "checkpoints")
        )
        assert len(os.listdir(tmp_path / "ours" / "checkpoints.saving")) == left


@modes
@pytest.mark.parametrize(("limit", "saves_again"), [(1, 3), (2, 1), (3, 1)])
def test_a_resumed_job_saves_in_the_place_of_a_state_that_is_too_old(
    tmp_path: Path, config: FastensorConfig, limit: int, saves_again: int
) -> None:
    """Its numbers begin at 0 again. Accelerate removes the oldest state, and then looks whether the name is free."""

    def job(folder: Path, saves: int, resumes: bool) -> list[Any]:
        found = training(folder, total_limit=limit)
        if resumes:
            found.accelerator.load_state()
        steps = []
        for _ in range(saves):
            found.train()
            steps.append(found.state()["step"])
            found.accelerator.save_state()
        return steps

    def run(folder: Path, reader: FastensorConfig | None) -> list[Any]:
        begin_anew()
        with by(reader):  # the second Accelerator loads what the first one has pending
            steps = [job(folder, limit, resumes=False), job(folder, saves_again, resumes=True)]
        reread = training(folder)
        held = []
        for state in states_in(str(folder / "checkpoints")):
            reread.accelerator.load_state(state)
            held.append(reread.state())
        return [steps, files_in(folder / "checkpoints"), held]

    stock, ours = run(tmp_path / "stock", None), run(tmp_path / "ours", config)
    assert_equal(ours, stock)
    assert len(ours[2]) == limit
    left = [f"checkpoint_{number}" for number in range(limit)] if limit > 1 else ["checkpoint_2"]
    saving = tmp_path / "ours" / "checkpoints.saving"
    assert sorted(os.listdir(saving) if saving.exists() else []) == (left if config.asynchronous else [])


@modes
def test_a_state_is_replaced_when_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: FastensorConfig
) -> None:
    found = training(tmp_path, total_limit=1)
    with by(config):
        found.train()
        found.accelerator.save_state()
        at, numbers = found.state(), random_numbers()
        wait(found)
        again = training(tmp_path, total_limit=1)
        with monkeypatch.context() as patches:
            FullDisk(patches).full = True
            with pytest.raises(CheckpointWriteError, match="No space left"):  # noqa: PT012  # by either call
                again.accelerator.save_state()
                wait(again)
        found.train()
        found.accelerator.load_state()
        assert_goes_on(found, at, numbers)


@modes
def test_a_state_that_is_not_too_old_is_not_replaced(tmp_path: Path, config: FastensorConfig) -> None:
    """Accelerate raises the same, but has removed the state that the resumed job has saved before."""
    with by(config):
        found = training(tmp_path, total_limit=2)
        for _ in range(2):
            found.accelerator.save_state()
        again = training(tmp_path, total_limit=2)
        again.accelerator.save_state()
        with pytest.raises(ValueError, match="already exists"):
            again.accelerator.save_state()
        wait(again)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_0", "checkpoint_1"]


@modes
@pytest.mark.parametrize("total_limit", [None, 1])
def test_a_job_was_killed_between_two_renames_and_the_next_one_does_not_load(
    tmp_path: Path, config: FastensorConfig, total_limit: int | None
) -> None:
    """Where the filesystem cannot exchange two names."""
    path = tmp_path / "checkpoints" / "checkpoint_0"
    saving = tmp_path / "checkpoints.saving"
    with by(config):
        found = training(tmp_path)
        found.train()
        found.accelerator.save_state()
        wait(found)
        old, numbers = found.state(), random_numbers()
        (saving / "checkpoint_0").unlink(missing_ok=True)
        (saving / "checkpoint_0").mkdir(parents=True)
        path.rename(saving / "checkpoint_0.fastensor-replaced")
        again = training(tmp_path, total_limit=total_limit)
        at = again.state()
        if total_limit is None:
            with pytest.raises(ValueError, match="already exists"):
                again.accelerator.save_state()
            found.accelerator.load_state()
            assert_goes_on(found, old, numbers)
        else:
            again.accelerator.save_state()
            again.accelerator.load_state()
            assert_equal(again.state(), at)


@modes
def test_no_state_is_removed_for_a_directory_that_is_none(tmp_path: Path, config: FastensorConfig) -> None:
    """A script that knew the name has made it, and was killed before the state was published."""
    with by(config):
        found = training(tmp_path, total_limit=1)
        found.accelerator.save_state()
        wait(found)
        (tmp_path / "checkpoints" / "checkpoint_1").mkdir()
        (tmp_path / "checkpoints" / "checkpoint_1" / "note").touch()
        found.accelerator.project_configuration.iteration = 2
        seen = []
        found.accelerator.register_save_state_pre_hook(lambda *_: seen.extend(os.listdir(tmp_path / "checkpoints")))
        found.accelerator.save_state()
        wait(found)
    assert sorted(seen) == ["checkpoint_0", "checkpoint_1"]
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_2"]


@modes
def test_relative_project_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: FastensorConfig) -> None:
    monkeypatch.chdir(tmp_path)
    found = training(Path("project"))
    with by(config):
        returned = found.accelerator.save_state()
        wait(found)
        assert returned.name == "checkpoint_0"
        if not config.asynchronous:
            assert returned == Path("project/checkpoints/checkpoint_0")
        found.accelerator.load_state(returned)
        found.accelerator.load_state(str(returned))
    assert os.listdir("project/checkpoints") == ["checkpoint_0"]


@modes
def test_it_says_what_accelerate_says(tmp_path: Path, config: FastensorConfig) -> None:
    def failures(folder: Path, reader: FastensorConfig | None) -> list[tuple[type[BaseException], str]]:
        begin_anew()
        found = training(folder)
        plain = training(automatic_checkpoint_naming=False)
        raised = []

        def note(function: Callable[..., Any], *args: Any, **options: Any) -> None:
            with pytest.raises(Exception) as caught:  # noqa: PT011
                function(*args, **options)
            raised.append((caught.type, str(caught.value).replace(str(folder), "FOLDER")))

        with by(reader):
            note(plain.accelerator.save_state)
            note(plain.accelerator.load_state)
            note(plain.accelerator.load_state, folder / "missing")
            note(found.accelerator.load_state)
            found.accelerator.save_state()
            found.accelerator.load_state()
            note(training(folder).accelerator.save_state)
            found.accelerator.load_state()
            (folder / "empty").mkdir()
            note(found.accelerator.load_state, folder / "empty")
            found.accelerator.register_for_checkpointing(copy.deepcopy(found.custom[0]))
            note(found.accelerator.load_state)
        assert os.listdir(folder / "checkpoints") == ["checkpoint_0"]
        return raised

    stock, ours = failures(tmp_path / "stock", None), failures(tmp_path / "ours", config)
    assert len(stock) == 7
    assert [(kind.__name__, text) for kind, text in ours] == [(kind.__name__, text) for kind, text in stock]


@modes
def test_a_folder_that_is_no_state_does_not_disturb(tmp_path: Path, config: FastensorConfig) -> None:
    """Accelerate's rotation raises IndexError then."""
    found = training(tmp_path, total_limit=1)
    (tmp_path / "checkpoints" / "notes").mkdir(parents=True)
    with by(config):
        for _ in range(3):
            found.accelerator.save_state()
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "notes"]


# --- hooks


@modes
@pytest.mark.parametrize("named", [True, False])
def test_hooks_in_the_style_of_diffusers(tmp_path: Path, seen: Seen, config: FastensorConfig, named: bool) -> None:
    """They write models into directories of their own, and pop the weights; loading pops the models."""

    def run(folder: Path, reader: FastensorConfig | None) -> tuple[list[str], list[str]]:
        begin_anew()
        found = training(folder if named else None, models=2)
        found.train()
        called: list[str] = []

        def save_hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
            assert [type(model) for model in models] == [Tied, Tied]
            assert os.path.isdir(output_dir)
            while weights:
                called.append(f"save {len(weights)} {os.path.basename(output_dir)}")
                os.makedirs(os.path.join(output_dir, f"unet_{len(weights)}"))
                torch.save(weights.pop(), os.path.join(output_dir, f"unet_{len(weights) + 1}", "adapter.bin"))
            Path(output_dir, "pytorch_model.bin").write_text("a file with a name of Accelerate's")

        def load_hook(models: list[Any], input_dir: str) -> None:
            while models:
                called.append(f"load {len(models)} {os.path.basename(input_dir)}")
                name = os.path.join(input_dir, f"unet_{len(models)}", "adapter.bin")
                models.pop().load_state_dict(torch.load(name, weights_only=True))

        found.accelerator.register_save_state_pre_hook(lambda *_: called.append("first"))
        found.accelerator.register_save_state_pre_hook(save_hook)
        found.accelerator.register_load_state_pre_hook(load_hook)
        output_dir = None if named else str(folder / "checkpoint_0")
        with by(reader):
            for _ in range(2 if named else 1):
                found.accelerator.save_state(output_dir)
            at, numbers = found.state(), random_numbers()
            found.train()
            found.accelerator.load_state(output_dir)
            assert_goes_on(found, at, numbers)
        if named:
            folder /= "checkpoints"
        return files_in(folder), called

    stock, ours = run(tmp_path / "stock", None), run(tmp_path / "ours", config)
    assert ours == stock
    assert "optimizer.bin" in seen.take("saved")


@modes
@pytest.mark.parametrize("named", [True, False])
def test_a_hook_that_raises(tmp_path: Path, config: FastensorConfig, named: bool) -> None:
    """What it raises is raised, once; the state before is kept, and the next save has the number of the failed one."""
    found = training(tmp_path if named else None)
    output_dir = None if named else str(tmp_path / "x")
    with by(config):
        found.accelerator.save_state(output_dir)
        at, numbers = found.state(), random_numbers()
        wait(found)
        before = files_in(tmp_path)

        def fail(*arguments: object) -> None:
            raise ZeroDivisionError("the hook's")

        found.train()
        handle = found.accelerator.register_save_state_pre_hook(fail)
        with pytest.raises(ZeroDivisionError, match="the hook's"):
            found.accelerator.save_state(output_dir)
        handle.remove()
        found.accelerator.load_state(output_dir)
        assert_goes_on(found, at, numbers)
        assert files_in(tmp_path) == before
        assert not found.accelerator._save_model_state_pre_hook
        assert found.accelerator.project_configuration.automatic_checkpoint_naming == named
        found.accelerator.save_state(output_dir)


# --- whole or not at all


@modes
@pytest.mark.parametrize("named", [True, False])
def test_what_cannot_be_pickled_leaves_the_state_before(tmp_path: Path, config: FastensorConfig, named: bool) -> None:
    found = training(tmp_path if named else None)
    output_dir = None if named else str(tmp_path / "x")
    with by(config):
        found.accelerator.save_state(output_dir)
        at, numbers = found.state(), random_numbers()
        found.train()
        last = SimpleNamespace(state_dict=lambda: {"lock": threading.Lock()}, load_state_dict=lambda state: None)
        found.accelerator._custom_objects.append(last)
        with pytest.raises(Exception, match="lock"):
            found.accelerator.save_state(output_dir)
        found.accelerator._custom_objects.remove(last)
        found.accelerator.load_state(output_dir)
        assert_goes_on(found, at, numbers)


@modes
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.torture)])
def test_a_save_whose_nth_call_fails(
    tmp_path: Path, config: FastensorConfig, named: bool, step: int, tally: Any
) -> None:
    """Whatever comes of it: every directory in ``checkpoints`` is a whole state, and so is that of the script."""
    found = training(tmp_path / "p" if named else None, total_limit=1 if named else None)
    checkpoints, explicit = tmp_path / "p" / "checkpoints", tmp_path / "x"
    output_dir = None if named else str(explicit)
    explicit.mkdir()
    (explicit / "mine.txt").write_text("foreign")
    failures = 0
    with by(config):
        found.train()
        found.accelerator.save_state(output_dir)
        wait(found)
        before = found.state()
        history = {before["step"]: before}
        for number in range(1, MOST_CALLS, step):
            found.train()
            after, failure = found.state(), None
            history[after["step"]] = after
            with failing_call(number, errno.EIO) as fault:
                try:
                    found.accelerator.save_state(output_dir)
                    wait(found)
                except (OSError, FastensorError) as error:
                    failure = error
            tally["calls of save_state failed"] += 1
            failures += failure is not None
            if named:  # one that was to be removed may still be there
                states = states_in(str(checkpoints))
                assert len(states) <= 3, "they do not add up"
                for state in states:
                    found.accelerator.load_state(state)
                    assert_equal(found.state(), history[found.accelerator.step])
            found.accelerator.load_state(output_dir)
            at = found.state()
            assert at["step"] in ([after["step"]] if failure is None else [before["step"], after["step"]]), fault
            assert_equal(at, history[at["step"]])
            before = at
            assert (explicit / "mine.txt").read_text() == "foreign"
            if not fault.fired:
                break
        else:
            pytest.fail(f"a save takes more than {MOST_CALLS} calls")
    assert failures > 3
    if not named:
        assert not [name for name in os.listdir(explicit) if name.startswith(".fastensor")]


@pytest.mark.parametrize("call", ["save_state", "load_state", "end_training", "disable"])
def test_a_pending_save_that_fails_is_raised_once_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    found = training(tmp_path, total_limit=1)
    with by(ASYNCHRONOUS):
        found.accelerator.save_state()
        at, numbers = found.state(), random_numbers()
        wait(found)
        found.train()
        with monkeypatch.context() as patches:
            FullDisk(patches).full = True
            gate = Gate(patches)
            found.accelerator.save_state()
            gate.open()
            function = fastensor_accelerate.disable if call == "disable" else getattr(found.accelerator, call)
            with pytest.raises(CheckpointWriteError, match=r"checkpoint_1 was not saved: .*No space left"):
                function()
        fastensor_accelerate.enable(ASYNCHRONOUS)
        assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]
        found.accelerator.load_state()
        assert_goes_on(found, at, numbers)
        found.accelerator.save_state()
        wait(found)
        assert len(os.listdir(tmp_path / "checkpoints")) == 1, "the number of the failed one may be skipped"


def test_a_save_of_which_all_files_fail_at_once_is_raised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = training(tmp_path)
    with by(ASYNCHRONOUS):
        with monkeypatch.context() as patches:
            FullDisk(patches).full = True
            with pytest.raises(CheckpointWriteError):  # noqa: PT012  # by either call, as fast as the disk is
                found.accelerator.save_state()
                wait(found)
        wait(found)


# --- directories of the script


@modes
def test_foreign_files_are_kept(tmp_path: Path, config: FastensorConfig) -> None:
    found = training(models=2)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "mine").write_text("foreign")
    with by(config):
        for _ in range(2):
            found.train()
            found.accelerator.save_state(tmp_path)
        at, numbers = found.state(), random_numbers()
        found.train()
        found.accelerator.load_state(tmp_path)
        assert_goes_on(found, at, numbers)
        found.accelerator.load_state(tmp_path)
    assert {*files_in(tmp_path)} - {*tensor_files(tmp_path)} == {"deep/mine"}


@modes
def test_a_format_that_would_not_be_read_is_refused(tmp_path: Path, config: FastensorConfig) -> None:
    """Accelerate reads a model in safetensors first, and says nothing of the newer one."""
    found = training()
    with by(config):
        found.accelerator.save_state(tmp_path)
        wait(found)
        at, before = found.state(), files_in(tmp_path)
        found.train()
        with pytest.raises(CheckpointWriteError, match=r"load_state would read this model.*model\.safetensors"):
            found.accelerator.save_state(tmp_path, safe_serialization=False)
        assert files_in(tmp_path) == before
        found.accelerator.load_state(tmp_path)
        assert_equal(found.state(), at)
        found.accelerator.save_state(tmp_path / "other", safe_serialization=False)
        found.accelerator.save_state(tmp_path / "other")
        found.accelerator.load_state(tmp_path / "other")
        assert_equal(found.state(), at)


@modes
@pytest.mark.parametrize("call", ["load_state", "save_state"])
def test_a_commit_that_was_interrupted_is_finished(tmp_path: Path, config: FastensorConfig, call: str) -> None:
    found = training()
    with by(config):
        found.accelerator.save_state(tmp_path)
        found.train()
        found.accelerator.save_state(tmp_path / "newer")
        wait(found)
        at, numbers = found.state(), random_numbers()
        os.rename(tmp_path / "newer", tmp_path / ".fastensor-saved")  # as a killed process leaves it
        os.rename(tmp_path / ".fastensor-saved" / "optimizer.bin", tmp_path / "optimizer.bin")
        found.train()
        if call == "save_state":
            handle = found.accelerator.register_save_state_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                found.accelerator.save_state(tmp_path)
            handle.remove()
            assert ".fastensor-saved" not in os.listdir(tmp_path)
        found.accelerator.load_state(tmp_path)
        assert_goes_on(found, at, numbers)
        assert not finish(tmp_path)


# --- asynchronous saves


def test_what_a_script_writes_to_the_returned_path(tmp_path: Path, gate: Gate) -> None:
    found = training(tmp_path, total_limit=1)
    with by(ASYNCHRONOUS):
        path = found.accelerator.save_state()
        (path / "before.json").write_text("{}")
        (path / "deep").mkdir()
        (path / "deep" / "before").write_text("1")
        known = tmp_path / "checkpoints" / "checkpoint_0"
        known.mkdir()  # a script may know the name
        (known / "known").write_text("2")
        (known / "deep").mkdir()
        (known / "deep" / "known").write_text("3")
        gate.open()
        wait(found)
        (path / "after").write_text("4")
        assert {"before.json", "deep/before", "known", "deep/known", "after", "model.safetensors"} <= {*files_in(known)}
        found.accelerator.load_state(path)
        found.accelerator.load_state(str(path))
        for _ in range(2):
            newer = found.accelerator.save_state()
        wait(found)
        assert not os.path.lexists(path), "its link went with the state"
        assert (newer / "model.safetensors").exists()


@pytest.mark.parametrize("reset_partial_state", [False, True])
@pytest.mark.parametrize("named", [True, False])
def test_accelerates_state_is_reset_while_a_save_is_pending(
    tmp_path: Path, gate: Gate, named: bool, reset_partial_state: bool
) -> None:
    """As ``TrainingArguments`` does. Nothing that is pending asks the Accelerator."""
    found = training(tmp_path if named else None, total_limit=1 if named else None)
    output_dir = None if named else str(tmp_path / "x")
    fastensor_accelerate.enable(ASYNCHRONOUS)
    found.accelerator.save_state(output_dir)
    found.train()
    gate.open()
    wait(found)
    gate.close()
    found.accelerator.save_state(output_dir)
    at, numbers = found.state(), random_numbers()
    found.accelerator.project_configuration.total_limit = None
    AcceleratorState._reset_state(reset_partial_state)
    gate.open()
    fastensor_accelerate.disable()
    begin_anew()
    if named:
        assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_1"]
    again = training(tmp_path if named else None)
    again.accelerator.load_state(output_dir)
    assert_goes_on(again, at, numbers)


def test_a_script_writes_to_its_own_directory(tmp_path: Path, gate: Gate) -> None:
    found = training()
    with by(ASYNCHRONOUS):
        path = found.accelerator.save_state(tmp_path / "x")
        (path / "before").write_text("1")
        gate.open()
        wait(found)
        (path / "after").write_text("2")
    assert {"before", "after", "model.safetensors"} <= {*files_in(tmp_path / "x")}


@pytest.mark.parametrize("named", [True, False])
def test_the_state_is_that_of_the_call_and_nothing_is_seen_before_it_is_whole(
    tmp_path: Path, gate: Gate, seen: Seen, named: bool
) -> None:
    found = training(tmp_path if named else None)
    output_dir = None if named else str(tmp_path / "x")
    with by(ASYNCHRONOUS):
        found.train()
        found.accelerator.save_state(output_dir)
        at, numbers = found.state(), random_numbers()
        found.train(3)
        assert not files_in(tmp_path / "checkpoints")[1:] if named else not list((tmp_path / "x").glob("*.bin"))
        threading.Timer(0.05, gate.open).start()
        found.accelerator.load_state(output_dir)  # waits
        assert_goes_on(found, at, numbers)


def test_the_process_goes_elsewhere_while_a_save_is_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    plain, named = training(), training(Path("project"))
    with by(ASYNCHRONOUS):
        assert plain.accelerator.save_state("x") == Path("x")
        named.accelerator.save_state()
        monkeypatch.chdir(tmp_path / "elsewhere")
        gate.open()
        wait(plain)
        wait(named)
        assert not os.listdir()
        monkeypatch.chdir(tmp_path)
        plain.accelerator.load_state("x")
        named.accelerator.load_state()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_another_accelerator_loads_a_pending_state_by_the_path_that_was_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool, fails: bool
) -> None:
    published, may_publish, publish = threading.Event(), threading.Event(), StateDirectory.publish

    def publish_late(self: StateDirectory, **options: Any) -> None:
        assert may_publish.wait(60)
        if fails:
            raise OSError(errno.EIO, "the disk")
        publish(self, **options)
        published.set()

    with by(ASYNCHRONOUS):
        found, other = (training(tmp_path if named else None, seed=seed) for seed in range(2))
        monkeypatch.setattr(StateDirectory, "publish", publish_late)
        at = found.state()
        path = found.accelerator.save_state(None if named else str(tmp_path / "x"))
        other.accelerator.register_load_state_pre_hook(lambda models, folder: published.wait(0) or pytest.fail(folder))
        threading.Timer(0.05, may_publish.set).start()
        if fails:
            with pytest.raises(OSError, match="the disk"):
                other.accelerator.load_state(path)
        else:
            other.accelerator.load_state(path)
            assert_equal(other.state(), at)
        wait(found)  # no failure is raised twice


def test_disabling_publishes_what_is_pending(tmp_path: Path, gate: Gate) -> None:
    found = training(tmp_path)
    fastensor_accelerate.enable(ASYNCHRONOUS)
    found.accelerator.save_state()
    threading.Timer(0.05, gate.open).start()
    fastensor_accelerate.disable()
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


# --- switching on and off


def test_enabling_twice_and_disabling(tmp_path: Path, seen: Seen) -> None:
    before = {name: getattr(Accelerator, name) for name in dir(Accelerator) if not name.startswith("__")}
    init = Accelerator.__init__
    for _ in range(2):
        fastensor_accelerate.enable()
    assert fastensor_accelerate.is_enabled()
    assert Accelerator.save_state is not before["save_state"]
    found = training()
    found.accelerator.save_state(tmp_path / "x")
    assert seen.take("saved")
    for _ in range(2):
        fastensor_accelerate.disable()
    assert not fastensor_accelerate.is_enabled()
    assert {name: getattr(Accelerator, name) for name in before} == before
    assert Accelerator.__init__ is init
    found.accelerator.save_state(tmp_path / "y")
    found.accelerator.load_state(tmp_path / "x")
    assert not seen.saved
    assert not seen.loaded


@pytest.mark.parametrize("enabled", [False, True])
@modes
def test_one_accelerator_alone(tmp_path: Path, seen: Seen, config: FastensorConfig, enabled: bool) -> None:
    def kind(**options: Any) -> FastensorAccelerator:
        return FastensorAccelerator(fastensor_config=config, **options)

    with by(FastensorConfig() if enabled else None):
        found = training(tmp_path, kind=kind)  # type: ignore[arg-type]
        found.train()
        returned = found.accelerator.save_state()
        assert (returned.parent.name == "checkpoints.saving") == config.asynchronous
        at, numbers = found.state(), random_numbers()
        found.train()
        found.accelerator.load_state()
        assert_goes_on(found, at, numbers)
        assert seen.take("saved") == seen.take("loaded") == tensor_files(tmp_path / "checkpoints")
        other = training()
        other.accelerator.save_state(tmp_path / "x")
        assert bool(seen.saved) == enabled


@modes
def test_accelerators_are_copied_and_pickled_as_before(tmp_path: Path, config: FastensorConfig) -> None:
    def attempt(accelerator: Any) -> list[Any]:
        found: list[Any] = []
        for function in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            try:
                found.append(type(function(accelerator)).__name__)
            except Exception as error:  # noqa: BLE001
                found.append(type(error).__name__)
        return found

    stock = attempt(Accelerator(cpu=True))
    with by(config):
        accelerator = Accelerator(cpu=True)
        accelerator.save_state(tmp_path / "x")
        assert attempt(accelerator) == stock


# --- what is reported


class Notes(GeneralTracker):  # type: ignore[misc]
    name = "notes"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> list[Any]:
        return self.logged

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.logged.append((values, step))


@modes
def test_trackers_and_the_last_line(
    tmp_path: Path, config: FastensorConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = Notes()
    found = training(tmp_path, log_with=[notes])
    with by(config):
        found.accelerator.init_trackers("project")
        for step in (3, 7):
            found.accelerator.log({"loss": 0.5}, step=step)
            found.accelerator.save_state()
            wait(found)
        found.accelerator.load_state()
        capsys.readouterr()
        found.accelerator.end_training()
    metrics = [(values, step) for values, step in notes.logged if "loss" not in values]
    assert [step for _, step in metrics] == [3, 7]
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoints" / "checkpoint_0").iterdir())
    for values, _ in metrics:
        assert set(values) == {
            "checkpoint/stall_seconds", "checkpoint/save_seconds", "checkpoint/save_bytes", "checkpoint/shared_bytes",
            "checkpoint/save_bytes_per_second",
        }  # fmt: skip
        assert values["checkpoint/save_bytes"] == pytest.approx(size, rel=0.01)
        assert 0 < values["checkpoint/stall_seconds"] <= values["checkpoint/save_seconds"]
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("fastensor: saved 2 states") and "loaded" in line] == lines


# --- other engines


class Engine:
    """What DeepSpeed prepares."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.calls.append(("save", *arguments))

    def load_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.calls.append(("load", *arguments))


def test_deepspeed_is_left_alone_and_that_is_said_once(
    tmp_path: Path, seen: Seen, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = training()
    engine = Engine()
    monkeypatch.setattr(found.accelerator, "_models", [engine])
    monkeypatch.setattr(found.accelerator, "_schedulers", [])
    monkeypatch.setattr(found.accelerator.state, "distributed_type", DistributedType.DEEPSPEED)
    with by(FastensorConfig()), caplog.at_level(logging.WARNING, "fastensor"):
        for _ in range(2):
            found.accelerator.save_state(str(tmp_path))
            found.accelerator.load_state(str(tmp_path))
    assert engine.calls == [("save", str(tmp_path), "pytorch_model"), ("load", str(tmp_path), "pytorch_model")] * 2
    assert [record.getMessage() for record in caplog.records if record.name == "fastensor"] == [
        "states of DEEPSPEED are saved and loaded by its own engine, not by Fastensor"
    ]
    assert not seen.saved
    assert not seen.loaded


@modes
def test_fsdp_with_full_state_dicts(tmp_path: Path, seen: Seen, config: FastensorConfig) -> None:
    """Accelerate has FSDP on accelerators only: its functions for a whole state dict are called as it calls them."""
    from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

    plugin = SimpleNamespace(
        fsdp_version=2,
        state_dict_type=StateDictType.FULL_STATE_DICT,
        state_dict_config=FullStateDictConfig(),
        optim_state_dict_config=FullOptimStateDictConfig(),
    )
    found = training()
    found.train()
    accelerator, (model,), (optimizer,) = found.accelerator, found.models, found.optimizers
    optimizer = optimizer.optimizer
    accelerator._optimizers.clear()  # as save_state does with FSDP: it would write the file again

    def save(models: Any, weights: list[Any], folder: str) -> None:
        weights.clear()
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)

    def load(models: list[Any], folder: str) -> None:
        models.clear()
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    with by(config):
        accelerator.save_state(tmp_path)
        at = found.state()
        saved = seen.take("saved")
        found.train()
        accelerator.load_state(tmp_path)
    assert {"pytorch_model_fsdp.bin", "optimizer.bin"} <= {*saved}
    assert {"pytorch_model_fsdp.bin", "optimizer.bin"} <= {*seen.take("loaded")}
    assert_equal(found.state(), at)


@pytest.mark.parametrize("config", MODES)
def test_damaged_random_states_are_an_error(tmp_path: Path, config: FastensorConfig) -> None:
    """Accelerate goes on without them, and says so in its log only."""
    with by(config):
        ours = training()
        ours.accelerator.save_state(str(tmp_path / "x"))
        ours.accelerator.end_training()
        path = tmp_path / "x" / "random_states_0.pkl"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(fastensor.CorruptCheckpointError, match="random_states_0"):
            ours.accelerator.load_state(str(tmp_path / "x"))


def test_enabled_again_with_other_options(tmp_path: Path) -> None:
    with by(FastensorConfig(asynchronous=True)):
        ours = training(tmp_path)
        assert "checkpoints.saving" in str(ours.accelerator.save_state())
    with by(FastensorConfig()):
        assert "checkpoints.saving" not in str(ours.accelerator.save_state())


def test_an_empty_name_is_refused_as_by_stock() -> None:
    with by(FastensorConfig()), pytest.raises(ValueError, match="folder does not exist"):
        training().accelerator.load_state("")
