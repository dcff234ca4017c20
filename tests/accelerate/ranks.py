"""What one of several processes of a job does. Run by ``test_processes.py``, which reads the JSON that it prints.

Arguments: the name of a function of this module, ``asynchronous`` or ``synchronous``, and a folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import ProjectConfiguration
from accelerators import Training, begin_anew, files_in, random_numbers, training
from checkpoints import counted_calls, shard_writers
from disks import FullDisk, Gate
from sharing import SharingDisk
from states import assert_equal

import fastensor
import fastensor_accelerate
from fastensor.checkpoint import cooperative
from fastensor.data import LmdbDataset, LmdbLoader, decoders
from fastensor.files.posix import TEMPORARY_SUFFIX
from fastensor.testing.calls import Call, intercepted
from fastensor_accelerate import FastensorConfig, saving

PATIENCE_SECONDS = 3.0


def numbers_of(found: Training) -> list[Any]:
    """What tells one state from another."""
    state = found.state()
    weights = [model["first.weight"].double().sum().item() for model in state["models"]]
    moments = [optimizer["state"][0]["exp_avg"].double().sum().item() for optimizer in state["optimizers"]]
    return [weights, moments, state["custom"], state["step"]]


def begin(folder: Path | None, rank: int, **options: Any) -> Training:
    found = training(folder, **options)
    torch.manual_seed(rank)
    return found


def save_and_load(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """States that Accelerate names, and one of the script's, by all; and the one that a single process has saved."""
    found = begin(folder / "project", rank, total_limit=1)
    plain = begin(None, rank)
    seen = []
    found.train(2)
    fastensor_accelerate.enable(config)
    for _ in range(2):
        found.train()
        found.accelerator.save_state()
    expected = numbers_of(found), random_numbers()
    plain.train()
    plain.accelerator.save_state(folder / "x")
    expected_of_plain = numbers_of(plain), random_numbers()
    for enabled in (True, False):
        if not enabled:
            fastensor_accelerate.disable()
        found.train()
        found.accelerator.load_state()
        assert (numbers_of(found), random_numbers()) == expected
        plain.train()
        plain.accelerator.load_state(folder / "x")
        assert (numbers_of(plain), random_numbers()) == expected_of_plain
        seen.append([found.accelerator.save_iteration, files_in(folder)])
    assert seen[0] == seen[1]
    for enabled in (False, True):
        if enabled:
            fastensor_accelerate.enable(config)
        plain.train()
        plain.accelerator.load_state(folder / "single")
        alone = numbers_of(plain)
    return expected[0], expected_of_plain[0], alone, seen[0]


def fail(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """One process fails: in a hook, and then at the disk."""
    fastensor_accelerate.enable(config)
    found = begin(folder, rank, total_limit=1)
    said = []

    def save_in_vain() -> None:
        before = sorted(os.listdir(folder / "checkpoints"))
        with pytest.raises(Exception) as caught:  # noqa: PT011, PT012  # an asynchronous one raises later
            found.accelerator.save_state()
            found.accelerator.load_state()
        assert sorted(os.listdir(folder / "checkpoints")) == before
        said.append([type(caught.value).__name__, str(caught.value)])
        dist.barrier()

    found.train()
    found.accelerator.save_state()
    found.accelerator.load_state()
    at = numbers_of(found)
    found.train()

    def hook(*arguments: object) -> None:
        raise ZeroDivisionError("the hook's")

    if rank == 1:
        handle = found.accelerator.register_save_state_pre_hook(hook)
    save_in_vain()
    if rank == 1:
        handle.remove()
    with pytest.MonkeyPatch.context() as patches:
        FullDisk(patches).full = rank == 0
        save_in_vain()
    found.accelerator.load_state()
    assert numbers_of(found) == at
    found.train()
    found.accelerator.save_state()
    found.accelerator.load_state()
    assert numbers_of(found) != at
    return said, files_in(folder / "checkpoints"), found.accelerator.save_iteration


def die(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """One process is killed while its files are not durable, or before it has saved."""
    fastensor_accelerate.enable(config)
    found = begin(folder, rank, total_limit=1)
    found.train()
    found.accelerator.save_state()
    found.accelerator.load_state()
    dist.barrier()
    said: list[str] = []
    if config.cooperative:
        if rank == 1:
            pytest.MonkeyPatch().setattr(cooperative, "save", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(fastensor.CheckpointWriteError) as caught:
            found.accelerator.save_state()
        return [str(caught.value)]
    if rank == 1:
        Gate(pytest.MonkeyPatch())
    found.accelerator.save_state()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(fastensor.CheckpointWriteError) as caught:
            found.accelerator.save_state()
        said.append(str(caught.value))
    return said


def cooperate(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """A model whose buffers differ, large enough for every process to write a part. Returns the files of all."""
    accelerator = Accelerator(cpu=True, project_dir=folder)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 200_000), torch.nn.BatchNorm1d(200_000))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    torch.manual_seed(rank)
    accelerator.backward(model(torch.randn(8, 4)).square().mean())
    optimizer.step()
    accelerator.save_state(folder / "stock")
    fastensor_accelerate.enable(config)
    written = set[str]()

    def note(call: Call) -> Any:
        name = os.readlink(f"/proc/self/fd/{call.arguments[0]}") if call.name == "pwrite" else ""
        if TEMPORARY_SUFFIX in name:
            written.add(name)
        return call.perform()

    with intercepted(note):
        accelerator.save_state(folder / "ours")
    dist.barrier()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = ["model.safetensors", "optimizer.bin"]
    for name in names:
        one, two = (fastensor.load(folder / kind / name) for kind in ("stock", "ours"))
        assert_equal(two, one)
        fastensor.verify(folder / "ours" / name)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, len(written))
    assert both[1] == 2, "the other process has written parts of two files"
    accelerator.load_state(folder / "ours")
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if "running" not in name)
    means = [torch.empty(200_000) for _ in range(2)]
    dist.all_gather(means, after["module.1.running_mean"])
    assert torch.equal(*means)
    return names


def main_alone(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """As in scripts of diffusers; later the other process saves, too."""
    patience, saving._ARRIVAL_SECONDS = saving._ARRIVAL_SECONDS, 0.2
    fastensor_accelerate.enable(config)
    found = begin(None, rank)
    states = []
    for number in range(3):
        found.train()
        if found.accelerator.is_main_process:
            found.accelerator.save_state(folder / f"checkpoint-{number}")
        found.accelerator.wait_for_everyone()
    states.append(numbers_of(found))
    fastensor_accelerate.disable()  # publishes what is pending
    found.accelerator.wait_for_everyone()
    saving._ARRIVAL_SECONDS = patience
    fastensor_accelerate.enable(config)
    found.train()
    found.accelerator.load_state(folder / "checkpoint-2")
    states.append(numbers_of(found))
    found.accelerator.save_state(folder / "all")
    fastensor_accelerate.disable()
    found.accelerator.wait_for_everyone()
    return states, files_in(folder)


def on_two_machines(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """Each process is the first of its machine, and both have the same filesystem."""
    fastensor_accelerate.enable(config)
    found = begin(folder / "project", rank, total_limit=1, save_on_each_node=True)
    plain = begin(None, rank)
    assert found.accelerator.is_local_main_process
    for _ in range(5):
        found.train()
        found.accelerator.save_state()
        plain.accelerator.save_state(folder / "x")
    at = numbers_of(found)
    found.train()
    found.accelerator.load_state()
    plain.accelerator.load_state(folder / "x")
    assert numbers_of(found) == at
    return files_in(folder / "project" / "checkpoints"), files_in(folder / "x")


def share(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """The other process learns nothing by itself, and knows what the main process has learned."""
    selector = fastensor.Selector(paper=True)
    fastensor.use_selector(selector)
    fastensor_accelerate.enable(config)
    found = begin(folder, rank)
    known = []
    for _ in range(3):
        found.accelerator.save_state()
        found.accelerator._fastensor_saver.wait()
        dist.barrier()
        known.append(sorted(str(key) for key, _ in selector.dictionary))
    explores = selector.explore
    found.accelerator.end_training()
    return known, selector.statistics().explored, explores, selector.explore


def leave(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """Without a word: the exit of the process publishes what is pending."""
    fastensor_accelerate.enable(config)
    found = begin(folder, rank)
    found.train()
    found.accelerator.save_state()
    return []


def leave_group(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """What became of a save that was pending when the process group was destroyed: its error, what was published."""
    fastensor_accelerate.enable(config)
    found = begin(folder, rank)
    found.accelerator.save_state()
    found.accelerator.load_state()
    gate = Gate(pytest.MonkeyPatch())
    found.accelerator.save_state()
    dist.barrier()
    dist.destroy_process_group()
    gate.open()
    error = ""
    try:
        found.accelerator.load_state()
    except fastensor.CheckpointWriteError as raised:
        error = str(raised)
    return error, sorted(os.listdir(folder / "checkpoints"))


def offload(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """The CRC32 of the weights after a training without, and with offloading; and what was moved."""

    def train() -> tuple[int, int]:
        accelerator = Accelerator(cpu=True, project_dir=folder)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Sigmoid(), torch.nn.Linear(64, 64))
        prepared, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        for step in range(3):
            torch.manual_seed(2 * step + rank)
            accelerator.backward(prepared(torch.randn(128, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        moved = fastensor_accelerate.attach(prepared).statistics().offloaded if fastensor_accelerate.is_enabled() else 0
        if moved:
            accelerator.end_training()
        return zlib.crc32(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())), moved

    plain, _ = train()
    fastensor_accelerate.enable(
        dataclasses.replace(config, offload=True, offload_schedule="all", offload_min_bytes=4096)
    )
    return plain, *train()


class Sharded:
    """A training by FSDP 2 on CPUs, which Accelerate itself chooses on GPUs only."""

    def __init__(
        self, config: FastensorConfig | None, folder: Path | None, kind: str, width: int = 7, **project: Any
    ) -> None:
        begin_anew()
        if config is not None:
            fastensor_accelerate.enable(config)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=kind, cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"],
        )  # fmt: skip
        if folder is not None:
            project = {"project_dir": str(folder), "automatic_checkpoint_naming": True, **project}
        self.accelerator: Any = Accelerator(
            cpu=True, fsdp_plugin=plugin, project_config=ProjectConfiguration(**project)
        )
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = plugin
        torch.manual_seed(7)
        model = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.accelerator.backward(self.model(torch.rand(4, 5)).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def values(self) -> list[Any]:
        """All numbers of model and optimizer, on all ranks alike."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        values = [*self.model.state_dict().values(), *moments]
        return [(one.full_tensor() if hasattr(one, "full_tensor") else one).flatten().tolist() for one in values]


def shard_and_fall_behind(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """All have written their shards, and process 0 publishes the state before process 1 goes on."""
    from fastensor_accelerate.saving import StateSave

    found = Sharded(config, None, "SHARDED_STATE_DICT")
    together = StateSave.together

    def fall_behind(saving: Any, do: Any, what: str = "") -> None:
        together(saving, do, what)
        if rank == 1 and getattr(do, "__func__", None) is StateSave.check_written:
            while not (folder / "state" / "optimizer_0").exists():
                os.sched_yield()

    pytest.MonkeyPatch().setattr(StateSave, "together", fall_behind)
    found.accelerator.save_state(folder / "state")
    found.accelerator.wait_for_everyone()
    found.accelerator.load_state(folder / "state")
    return None


def shard(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """States of FSDP 2, sharded and full, by both and by Accelerate alone."""
    seen: dict[str, Any] = {}
    with counted_calls() as calls:
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            found = Sharded(config, folder / kind, kind, total_limit=2)
            for _ in range(3):
                found.train()
                found.accelerator.save_state()
            expected = found.values()
            found.accelerator.load_state()
            assert found.values() == expected
            own = Sharded(config, None, kind)
            for number in range(2):  # the second one replaces the first
                own.train()
                if number:
                    own.accelerator.load_state(folder / kind / "checkpoints" / "checkpoint_2")
                own.accelerator.save_state(folder / kind / "own")
            fastensor_accelerate.disable()
            assert shard_writers() == [], "memory for copies is given back"
            seen[kind] = calls.since()
            own.accelerator.save_state(folder / kind / "stock")
            seen[f"{kind} stock"] = calls.since()
            for name in ("checkpoints/checkpoint_2", "own", "stock"):
                for by in (config, None):
                    found = Sharded(by, None, kind)
                    found.train()
                    assert found.values() != expected
                    found.accelerator.load_state(folder / kind / name)
                    assert found.values() == expected
                    seen[f"{kind} {name} {by is None}"] = calls.since()
            dist.barrier()
    return seen


def share_shards(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """A state is saved twice where files can share blocks. How much is shared, and is said to be."""
    disk = SharingDisk(pytest.MonkeyPatch())
    found = Sharded(config, None, "SHARDED_STATE_DICT", width=100_000)
    found.train()
    for number in range(2):
        found.accelerator.save_state(folder / str(number))
    saver = found.accelerator._fastensor_saver
    saver.wait()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, disk.nbytes)
    return everyone, [[one.nbytes, one.shared_nbytes] for one in saver._saved]


def link_models(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """A model of DDP, part of which does not train, saved by ``save_model`` in all processes."""
    fastensor_accelerate.enable(dataclasses.replace(config, link_unchanged=True))
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
    model[0].requires_grad_(False)
    model = accelerator.prepare(model)
    for number in (0, 1, 2, 2):
        with torch.no_grad():
            accelerator.unwrap_model(model)[1].weight.add_(1)
        accelerator.save_model(model, folder / str(number))
        accelerator.wait_for_everyone()
        assert_equal(
            dict(sorted(fastensor.load_sharded(folder / str(number)).items())),
            dict(sorted(accelerator.unwrap_model(model).state_dict().items())),
        )
    return sorted((one.name, one.stat().st_nlink) for one in (folder / "2").glob("*.safetensors"))


def fail_to_shard(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """A process that fails, in its shard or elsewhere, fails all; so does a version of Accelerate that is not known."""
    found = Sharded(config, folder, "SHARDED_STATE_DICT")
    found.train()
    found.accelerator.save_state()
    found.accelerator.load_state()
    expected = found.values()
    said = []

    def save_in_vain() -> None:
        found.train()
        with pytest.raises(Exception) as caught:  # noqa: PT011, PT012  # an asynchronous one raises later
            found.accelerator.save_state()
            found.accelerator.load_state()
        assert sorted(os.listdir(folder / "checkpoints")) == ["checkpoint_0"]
        said.append([type(caught.value).__name__, str(caught.value)])
        dist.barrier()

    for failing in (0, 1):
        with pytest.MonkeyPatch.context() as patches:
            FullDisk(patches).full = rank == failing
            save_in_vain()
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("accelerate.accelerator.save_fsdp_model", lambda *_, **__: None)
        patches.setattr("accelerate.accelerator.save_fsdp_optimizer", lambda *_, **__: None)
        save_in_vain()

    def hook(*arguments: object) -> None:
        raise ZeroDivisionError("the hook's")

    if rank == 1:
        handle = found.accelerator.register_save_state_pre_hook(hook)
    save_in_vain()
    if rank == 1:
        handle.remove()
    found.accelerator.load_state()
    assert found.values() == expected
    shard = next((folder / "checkpoints" / "checkpoint_0" / "optimizer_0").glob("*.distcp"))
    if rank == 0:
        data = bytearray(shard.read_bytes())
        for number in range(len(data) // 2, len(data)):
            data[number] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    with pytest.raises(fastensor.CorruptCheckpointError):
        found.accelerator.load_state()
    return said


def fail_in_full(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """The main process fails to write a full state of FSDP. The other one, with which it gathers the rest, does not
    wait for it."""
    found = Sharded(config, folder, "FULL_STATE_DICT")
    found.train()
    with pytest.MonkeyPatch.context() as patches:
        FullDisk(patches).full = rank == 0
        with pytest.raises(fastensor.CheckpointWriteError) as caught:  # noqa: PT012  # an asynchronous one raises later
            found.accelerator.save_state()
            found.accelerator.load_state()
    found.accelerator.save_state()
    found.accelerator.load_state()
    return str(caught.value), sorted(os.listdir(folder / "checkpoints"))


def resume_lmdb(config: FastensorConfig, folder: Path, rank: int) -> Any:
    """An epoch of LMDB data, interrupted by a state that Fastensor saves and stock Accelerate loads."""

    def resumable() -> tuple[Accelerator, LmdbLoader]:
        accelerator = Accelerator()
        dataset = LmdbDataset(folder / "db", decode=decoders.Array("<i8"))
        loader = accelerator.prepare(LmdbLoader(dataset, 10, collate_fn=np.concatenate, num_workers=1))
        accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    fastensor_accelerate.enable(config)
    accelerator, loader = resumable()
    batches = iter(loader)
    taken = [next(batches).tolist() for _ in range(2)]
    accelerator.save_state(folder / "state")
    taken_in_vain = next(batches).tolist()
    fastensor_accelerate.disable()
    accelerator, loader = resumable()
    accelerator.load_state(folder / "state")
    rest = [batch.tolist() for batch in loader]
    assert rest[0] == taken_in_vain
    assert loader.progress.epoch == 0
    return taken + rest


def main() -> None:
    name, mode, folder = sys.argv[1:]
    rank = int(os.environ["RANK"])
    config = FastensorConfig(asynchronous=mode == "asynchronous", cooperative=mode == "cooperative")
    if name == "die":
        config = dataclasses.replace(config, cooperative_timeout=PATIENCE_SECONDS)
    result = globals()[name](config, Path(folder), rank)
    print(json.dumps(result), flush=True)
    if name != "leave":
        fastensor_accelerate.disable()
        if dist.is_initialized() and name != "die":
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
