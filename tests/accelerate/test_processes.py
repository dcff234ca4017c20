"""Jobs of two processes: they publish a state together or not at all, and say who has failed."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerators import MODES, by, files_in, training
from data.databases import make
from packaging.version import Version
from programs import Program, free_port

import fastensor
from fastensor_accelerate import FastensorConfig

RANKS = Path(__file__).with_name("ranks.py")
FILES = [
    "custom_checkpoint_0.pkl", "model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl",
    "scheduler.bin",
]  # fmt: skip
modes = pytest.mark.parametrize("config", MODES)
loads_shards = pytest.mark.skipif(
    Version(accelerate.__version__) < Version("1.13"),
    reason="Accelerate before 1.13 asks for other names than it has saved, for optimizers of FSDP2",
)
COOPERATIVE = FastensorConfig(cooperative=True)
all_modes = pytest.mark.parametrize("config", [*MODES, pytest.param(COOPERATIVE, id="cooperative")])


def start(name: str, config: FastensorConfig, folder: Path, **variables: str) -> list[Program]:
    port = free_port()
    mode = "cooperative" if config.cooperative else "asynchronous" if config.asynchronous else "synchronous"
    return [
        Program(
            RANKS, name, mode, folder, accelerate=True, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true",
            **{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", **variables},
        )
        for rank in range(2)
    ]  # fmt: skip


def run(name: str, config: FastensorConfig, folder: Path, dies: int | None = None, **variables: str) -> list[Any]:
    """What each process returns, and what it has written to its standard error; None if it dies."""
    programs = start(name, config, folder, **variables)
    with ThreadPoolExecutor(2) as threads:
        outputs = [*threads.map(lambda program: program.communicate(), programs)]
    found = []
    said = "\n".join(f"process {rank}: {out}{err}" for rank, (out, err) in enumerate(outputs))
    for rank, (program, (out, err)) in enumerate(zip(programs, outputs, strict=True)):
        if rank == dies:
            assert program.returncode == -signal.SIGKILL
            found.append(None)
            continue
        assert program.returncode == 0, said
        found.append((json.loads(out.splitlines()[-1]), err))
    return found


@all_modes
def test_two_processes_save_and_one_loads_and_the_other_way_round(tmp_path: Path, config: FastensorConfig) -> None:
    single = training()
    single.train(3)
    with by(config):
        single.accelerator.save_state(tmp_path / "single")
    for name in ("random_states_0.pkl",):  # stock Accelerate has no random numbers for the other process either
        assert (tmp_path / "single" / name).exists()
    (main, _), (other, _) = run("save_and_load", config, tmp_path)
    assert main == other
    named, plain, alone, (iteration, files) = main
    assert iteration == 2
    expected = {f"project/checkpoints/checkpoint_1/{name}" for name in FILES} | {f"x/{name}" for name in FILES}
    links = {f"project/checkpoints.saving/checkpoint_1/{name}" for name in FILES} if config.asynchronous else set()
    assert {name for name in files if not name.startswith("single")} == expected | links
    state = single.state()
    assert alone[0] == [state["models"][0]["first.weight"].double().sum().item()]
    assert alone[2:] == [[3], 3]
    for reader in (None, config):
        for folder, saved in ((tmp_path / "project" / "checkpoints" / "checkpoint_1", named), (tmp_path / "x", plain)):
            with by(reader):
                single.accelerator.load_state(folder)
            state = single.state()
            assert [state["models"][0]["first.weight"].double().sum().item()] == saved[0]
            assert [state["custom"], state["step"]] == saved[2:]


@all_modes
def test_the_process_that_fails_is_named_and_nothing_is_published(tmp_path: Path, config: FastensorConfig) -> None:
    ((main, files, iteration), _), ((other, others_files, others_iteration), _) = run("fail", config, tmp_path)
    assert files == others_files
    assert iteration == others_iteration
    folder = f"checkpoint_{iteration - 1}"
    assert files == [f"{folder}/{name}" for name in FILES]
    (in_hook, at_disk), (in_own_hook, at_others_disk) = main, other
    assert in_own_hook == ["ZeroDivisionError", "the hook's"]
    assert in_hook[0] == "CheckpointWriteError"
    assert "was not saved: process 1: ZeroDivisionError: the hook's" in in_hook[1]
    assert at_disk[0] == at_others_disk[0] == "CheckpointWriteError"
    assert "No space left" in at_disk[1]
    said = "failed: rank 0: " if config.cooperative else "was not saved: process 0: CheckpointWriteError"
    assert said in at_others_disk[1]
    assert "No space left" in at_others_disk[1]


def test_a_killed_process_leaves_the_state_before_and_the_other_raises(tmp_path: Path) -> None:
    (said, _), _ = run("die", FastensorConfig(asynchronous=True), tmp_path, dies=1)
    assert all("was not saved: a process cannot be reached" in text for text in said)
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]
    found = training(tmp_path)
    with by(FastensorConfig()):
        found.accelerator.load_state()
    assert found.state()["step"] == 1


def test_a_killed_process_that_was_to_write_its_part(tmp_path: Path) -> None:
    (said, _), _ = run("die", COOPERATIVE, tmp_path, dies=1)
    assert "rank 1 did not come within 3 s" in said[0]
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_0"]


def test_all_processes_write_what_they_hold_alike(tmp_path: Path) -> None:
    (main, _), (other, _) = run("cooperate", COOPERATIVE, tmp_path)
    assert main == other == ["model.safetensors", "optimizer.bin"]


@all_modes
def test_the_main_process_saves_alone(tmp_path: Path, config: FastensorConfig) -> None:
    ((states, files), err), ((others, others_files), others_err) = run("main_alone", config, tmp_path)
    assert states[0] == states[1] == others[0]
    assert others[1] == [*states[1][:-1], 4], "the step is in each one's own file"
    own = [name for name in FILES if name != "random_states_1.pkl"]
    folders = [f"checkpoint-{number}/{name}" for number in range(3) for name in own]
    assert files == others_files == [f"all/{name}" for name in FILES] + folders
    assert err.count("by the main process alone") == 1
    assert "alone" not in others_err


@modes
def test_an_epoch_of_lmdb_data_is_resumed(tmp_path: Path, config: FastensorConfig) -> None:
    """The ranks divide the samples by themselves, and all have the same state."""
    make(tmp_path / "db", [(b"%06d" % number, number.to_bytes(8, "little")) for number in range(103)])
    (main, _), (other, _) = run("resume_lmdb", config, tmp_path)
    assert len(main) == len(other) == 6
    assert sorted(number for batch in main + other for number in batch) == list(range(103))


@all_modes
def test_machines_with_one_filesystem(tmp_path: Path, config: FastensorConfig) -> None:
    (main, _), (other, _) = run("on_two_machines", config, tmp_path, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert main == other
    assert main == [[f"checkpoint_4/{name}" for name in FILES], FILES]


@modes
def test_processes_choose_by_what_the_main_process_has_learned(tmp_path: Path, config: FastensorConfig) -> None:
    ((known, explored, explores, explores_alone), _), (other, _) = run(
        "share", config, tmp_path, FASTENSOR_EXPLORE="true"
    )
    assert explored > 0
    assert other[1] == 0
    assert (explores, other[2]) == (True, False)
    assert (explores_alone, other[3]) == (True, True)
    assert known[0]
    for before, after in zip(known, other[0][1:], strict=False):
        assert {*before} <= {*after}, "what was known before the next save"


def test_the_exit_publishes_what_is_pending(tmp_path: Path) -> None:
    run("leave", FastensorConfig(asynchronous=True), tmp_path)
    assert files_in(tmp_path / "checkpoints") == [f"checkpoint_0/{name}" for name in FILES]


def test_without_its_process_group_a_job_publishes_what_all_have_or_nothing(tmp_path: Path) -> None:
    (found, _), (others, _) = run("leave_group", FastensorConfig(asynchronous=True), tmp_path)
    if torch.__version__ >= "2.14":  # whoever holds a group that was destroyed still reaches the others by it
        assert found == others == ["", ["checkpoint_0", "checkpoint_1"]]
        return
    errors = [error for error, _ in (found, others)]
    assert all("checkpoint_1 was not saved" in error for error in errors)
    assert any("a process cannot be reached" in error for error in errors)  # the other may still write, to what is gone
    assert found[1] == others[1] == ["checkpoint_0"]


def test_activations_of_a_job_are_offloaded_and_it_trains_alike(tmp_path: Path) -> None:
    ((plain, offloaded, moved), err), ((others_plain, others_offloaded, others_moved), others_err) = run(
        "offload", FastensorConfig(), tmp_path
    )
    assert plain == others_plain == offloaded == others_offloaded
    assert min(moved, others_moved) > 0
    assert "activation offload of DistributedDataParallel: activations took at most " in err
    assert "activation offload" not in others_err


@modes
def test_shards_say_what_all_processes_share(tmp_path: Path, config: FastensorConfig) -> None:
    ((shared, ((_, nothing), (nbytes, said))), _), _ = run("share_shards", config, tmp_path)
    assert nothing == 0
    assert said == sum(shared) <= nbytes
    if config.asynchronous:  # copies are new each time
        assert shared == [0, 0]
    else:
        assert min(shared) > 500_000
        assert said > 0.8 * nbytes


def test_models_of_ddp_are_linked(tmp_path: Path) -> None:
    (main, _), (other, _) = run("link_models", FastensorConfig(), tmp_path)
    assert main == other
    assert [count for _, count in main] in ([1, 3], [3, 1])


@loads_shards
@modes
def test_shards_of_fsdp(tmp_path: Path, config: FastensorConfig) -> None:
    (seen, _), (others, _) = run("shard", config, tmp_path)
    assert seen == others
    ours, stock = {"FastensorStorageReader": 2}, {"FileSystemReader": 2}
    kind = "SHARDED_STATE_DICT"
    assert seen[kind] == {"FastensorStorageWriter": 10, "FastensorStorageReader": 4}
    assert seen[f"{kind} stock"] == {"FileSystemWriter": 2}
    assert seen["FULL_STATE_DICT"] == {}
    for name in ("checkpoints/checkpoint_2", "own", "stock"):
        assert seen[f"{kind} {name} False"] == ours
        assert seen[f"{kind} {name} True"] == stock
        assert seen[f"FULL_STATE_DICT {name} False"] == {}
    assert sorted(os.listdir(tmp_path / kind / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    for name in ("checkpoints/checkpoint_2", "own"):
        for part in ("pytorch_model_fsdp_0", "optimizer_0"):
            path = tmp_path / kind / name / part
            assert len(list(path.iterdir())) == 3, "nothing is left of what was replaced"
            assert fastensor.verify(path).complete
    full = tmp_path / "FULL_STATE_DICT" / "own"
    assert {"pytorch_model_fsdp.bin", "optimizer.bin"} < {*os.listdir(full)}
    assert fastensor.verify(full / "optimizer.bin").complete


@loads_shards
@modes
def test_a_process_that_falls_behind_finds_shards_published(tmp_path: Path, config: FastensorConfig) -> None:
    run("shard_and_fall_behind", config, tmp_path)
    assert fastensor.verify(tmp_path / "state" / "optimizer_0").complete


@loads_shards
@modes
def test_a_process_that_fails_to_write_its_shards_fails_all(tmp_path: Path, config: FastensorConfig) -> None:
    (said, _), (others, _) = run("fail_to_shard", config, tmp_path)
    for first, second in (said[:2], others[:2]):
        assert "No space left" in first[1]
        assert "No space left" in second[1]
    assert "in a way that is not known" in said[2][1]
    assert said[3][0] == "CheckpointWriteError"
    assert others[3] == ["ZeroDivisionError", "the hook's"]


@modes
def test_a_main_process_that_fails_to_write_a_full_state_fails_all(tmp_path: Path, config: FastensorConfig) -> None:
    for said, states in (one for one, _ in run("fail_in_full", config, tmp_path)):
        assert "No space left" in said
        assert len(states) == 1
