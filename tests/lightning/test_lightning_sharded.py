"""Trainers of several processes that hold parts of a model: what they save and load goes through the plugin."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import counted_calls, load, shard_writers
from disks import FullDisk, Gate, SlowDisk
from programs import Program, free_port, run_ranks
from sharded_trainers import (
    Rank,
    fit,
    fsdp_on_cpus,
    loader,
    make_module,
    make_trainer,
    start,
    values_of,
)
from sharing import SharingDisk
from torch.distributed.checkpoint import FileSystemReader

import fastensor
from fastensor.checkpoint.asynchronous.for_adapters import in_turn
from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO
from fastensor_lightning.sharded import UnknownLightningError

OURS_WRITER, OURS_READER = "FastensorStorageWriter", "FastensorStorageReader"


def run(program: Rank, folder: Path, *, world: int = 2, brand: str = "lightning.pytorch") -> list[Any]:
    """What each rank returns."""
    pytest.importorskip(brand)
    run_ranks(start, world, program, world, brand, free_port(), folder)
    return [json.loads((folder / f"{program.__name__}-{rank}.json").read_text()) for rank in range(world)]


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def train(pl: Any, rank: int, folder: Path) -> Any:
    """Three epochs of two steps, saved after each; then from checkpoints of both kinds, by both kinds of Trainers."""
    seen: dict[str, Any] = {}
    with counted_calls() as calls:
        saver = pl.callbacks.ModelCheckpoint(
            folder / "c", save_top_k=2, monitor="step_number", mode="max", save_last=True,
            filename="{step}",
        )  # fmt: skip
        plugin = FastensorCheckpointIO()
        trainer, module = fit(pl, folder, plugin, callbacks=[saver, CheckpointMonitor()])
        seen["saved"] = calls.since()
        expected = values_of(trainer, module)
        seen["names"] = names_in(folder / "c")
        seen["report"] = None if plugin.last_save is None else [plugin.last_save.path, plugin.last_save.nbytes]
        trainer.save_checkpoint(folder / "weights", weights_only=True, storage_options={"durable": False})
        seen["weights"] = calls.since()
        stock, module = fit(pl, folder, None, callbacks=[pl.callbacks.ModelCheckpoint(folder / "stock")])
        stock.save_checkpoint(folder / "stock.ckpt")
        assert values_of(stock, module) == expected
        seen["stock saved"] = calls.since()
        for name in ("c/step=4.ckpt", "c/last.ckpt", "stock.ckpt"):
            for plugin in (FastensorCheckpointIO(), None):
                found = fit(pl, folder, plugin, folder / name, enable_checkpointing=False)
                assert values_of(*found) == expected, name
                seen[f"{name} {plugin is None}"] = calls.since()
        trainer = make_trainer(pl, folder, FastensorCheckpointIO(), enable_checkpointing=False)
        scores = [
            trainer.validate(make_module(pl), loader(), ckpt_path=folder / name, verbose=False)
            for name in ("c/last.ckpt", "weights", "stock.ckpt")
        ]
        seen["validated"] = calls.since()
        assert scores[0] == scores[1] == scores[2]
    return seen, expected


def share(pl: Any, rank: int, folder: Path) -> Any:
    """A checkpoint is saved twice where files can share blocks. What this rank shares, and what is said."""
    disk = SharingDisk(pytest.MonkeyPatch())
    plugin = FastensorCheckpointIO()
    trainer = make_trainer(pl, folder, plugin, enable_checkpointing=False, max_epochs=1)
    trainer.fit(make_module(pl, width=100_000), loader())
    said = []
    for number in range(2):
        trainer.save_checkpoint(folder / str(number))
        if plugin.last_save is not None:
            said.append([plugin.last_save.nbytes, plugin.last_save.shared_nbytes])
    return disk.nbytes, said


def on_one_rank(pl: Any, rank: int, folder: Path) -> Any:
    """What two ranks have saved; and a checkpoint for two ranks."""
    found = fit(pl, folder, FastensorCheckpointIO(), folder / "c" / "last.ckpt", enable_checkpointing=False)
    found[0].save_checkpoint(folder / "one")
    return values_of(*found)


def full_and_damaged(pl: Any, rank: int, folder: Path) -> Any:
    """What one rank has saved; full checkpoints; what fails."""
    plugin = FastensorCheckpointIO()
    path = folder / "x"
    with counted_calls() as calls:
        trainer, module = fit(pl, folder, plugin, folder / "one", full=True, enable_checkpointing=False)
        expected = values_of(trainer, module)
        assert calls.since() == {OURS_READER: 2}
        if rank == 0:
            path.symlink_to("one")
            shutil.copytree(folder / "one", folder / "full")
        trainer.strategy.barrier()
        trainer.save_checkpoint(path)
        trainer.save_checkpoint(folder / "full")
        trainer.strategy.barrier()
        assert path.is_file(), "it has replaced the link"
        assert (folder / "full").is_file(), "it has replaced the shards"
        assert (plugin.last_save is not None) == (rank == 0)
        found = fit(pl, folder, FastensorCheckpointIO(), path, full=True, enable_checkpointing=False)
        assert values_of(*found) == expected
        trainer, module = fit(pl, folder, plugin, path, enable_checkpointing=False)
        assert values_of(trainer, module) == expected
        assert calls.since() == {}, "Lightning reads full checkpoints itself"
        check_damage(pl, folder, trainer, path, by_all=False)
        trainer.save_checkpoint(path)
        assert path.is_dir(), "it has replaced the file"
        assert calls.since() == {OURS_WRITER: 1}
    check_failures(pl, rank, folder, trainer)
    check_two_machines(folder, trainer)
    for name in ("meta.pt", "distcp"):
        file = next(one for one in sorted(path.iterdir()) if one.name.endswith(name))
        check_damage(pl, folder, trainer, file, by_all=name == "distcp")
        trainer.save_checkpoint(path)
    first_fsdp(pl, rank, folder, folder / "full")
    assert not [name for name in names_in(folder) if ".fastensor" in name]
    return expected


def first_fsdp(pl: Any, rank: int, folder: Path, full: Path) -> Any:
    """FSDP 1: what is saved is loaded again, also by Lightning alone. Full checkpoints of others are loaded."""
    with fsdp_on_cpus(pl, state_dict_type="sharded") as strategy, counted_calls() as calls:
        options = {"enable_checkpointing": False}
        plugin = FastensorCheckpointIO()
        trainer, module = fit(pl, folder, plugin, strategy=strategy(), **options)
        trainer.save_checkpoint(folder / "fsdp", storage_options={"backend": "numpy"})
        assert calls.since() == {OURS_WRITER: 1}
        expected = values_of(trainer, module)
        assert expected
        for plugin in (FastensorCheckpointIO(), None):
            found = fit(pl, folder, plugin, folder / "fsdp", strategy=strategy(), **options)
            assert values_of(*found) == expected
            assert calls.since() == {OURS_READER if plugin else "FileSystemReader": 2}
        scores = []
        for plugin in (FastensorCheckpointIO(), None):
            trainer = make_trainer(pl, folder, plugin, strategy=strategy(), **options)
            scores.append(trainer.validate(make_module(pl), loader(), ckpt_path=full, verbose=False))
        assert scores[0] == scores[1]
        assert calls.since() == {}
        check_damage(pl, folder, trainer, full, by_all=False, path=full, strategy=strategy())


def damage(path: Path) -> None:
    """Flip a bit of each byte in the middle of a file."""
    data = bytearray(path.read_bytes())
    for number in range(len(data) // 3, len(data) * 2 // 3):
        data[number] ^= 1
    path.write_bytes(data)


def check_damage(
    pl: Any, folder: Path, trainer: Any, file: Path, *, by_all: bool, path: Path | None = None, **options: Any
) -> None:
    """All ranks raise when they load a checkpoint, by default ``folder / "x"``, whose file is damaged. The rank that
    has found it says so."""
    rank = trainer.global_rank
    if rank == 0:
        damage(file)
    trainer.strategy.barrier()
    with pytest.raises(fastensor.CorruptCheckpointError if by_all or rank == 0 else fastensor.CheckpointReadError):
        fit(pl, folder, FastensorCheckpointIO(), path or folder / "x", enable_checkpointing=False, **options)


def check_failures(pl: Any, rank: int, folder: Path, trainer: Any) -> None:
    """A save that fails on one rank fails on all, and leaves what was there."""
    path = folder / "x"
    before = {name: (path / name).stat().st_ino for name in names_in(path)}
    for failing in (0, 1):
        with pytest.MonkeyPatch.context() as patches:
            FullDisk(patches).full = rank == failing
            with pytest.raises(fastensor.CheckpointWriteError, match="No space left"):
                trainer.save_checkpoint(path)
    with pytest.raises(TypeError, match="keys among"):
        trainer.save_checkpoint(path, storage_options={"unknown": 1})
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(f"{pl.__name__}.strategies.model_parallel._distributed_checkpoint_save", lambda *_: None)
        with pytest.raises(UnknownLightningError, match="saves sharded checkpoints in a way that is not known"):
            trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    assert {name: (path / name).stat().st_ino for name in names_in(path)} == before


def check_two_machines(folder: Path, trainer: Any) -> None:
    """Two ranks that are the first of their machines publish a checkpoint once, where they share a filesystem."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(type(trainer.strategy), "local_rank", 0)
        for _ in range(5):
            trainer.save_checkpoint(folder / "x")
            assert len(names_in(folder / "x")) == 4
            trainer.strategy.barrier()


def test_two_ranks_save_and_resume(tmp_path: Path) -> None:
    (seen, values), (others, others_values) = run(train, tmp_path)
    assert values == others_values
    report, no_report = seen.pop("report"), others.pop("report")
    assert no_report is None
    assert seen == others
    last = tmp_path / "c" / "last.ckpt"
    assert report == [str(last), sum(path.stat().st_size for path in last.iterdir())]
    assert seen["saved"] == {OURS_WRITER: 6}
    assert seen["names"] == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert seen["weights"] == {OURS_WRITER: 1}
    assert set(seen["stock saved"]) == {"FileSystemWriter"}
    for name in ("c/step=4.ckpt", "c/last.ckpt", "stock.ckpt"):
        assert seen[f"{name} False"] == {OURS_READER: 2}
        assert seen[f"{name} True"] == {"FileSystemReader": 2}
    assert seen["validated"] == {OURS_READER: 3}
    assert run(on_one_rank, tmp_path, world=1) == [values]
    assert run(full_and_damaged, tmp_path) == [values, values]
    check_tools(last, values)


def check_tools(path: Path, values: dict[str, list[float]]) -> None:
    """The tools read the directory, and Lightning's own tool, too."""
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    assert fastensor.verify(path).complete
    names = {one.name for one in fastensor.inspect(path).tensors}
    assert "state_dict.layers.0.weight" in names
    fastensor.convert(path, path.with_suffix(".one"), container="torch")
    weights = fastensor.load(path.with_suffix(".one"))["state_dict"]["layers.0.weight"]
    assert weights.flatten().tolist() == values["layers.0.weight"]
    merged = _load_distributed_checkpoint(path)
    assert merged["state_dict"]["layers.0.weight"].flatten().tolist() == values["layers.0.weight"]
    assert merged["global_step"] == 6
    damage(path / "meta.pt")
    with pytest.raises(fastensor.CorruptCheckpointError, match=r"meta\.pt"):
        fastensor.verify(path)


def asynchronously(pl: Any, rank: int, folder: Path) -> Any:
    """Saves that are pending while the next step begins; what reads, removes and links them waits."""
    log = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger(folder)
    told: list[Any] = []
    log.after_save_checkpoint = lambda callback: told.append(
        [(Path(path).name, os.path.isfile(os.path.join(path, "meta.pt"))) for path in callback.best_k_models]
    )
    with counted_calls() as calls, pytest.MonkeyPatch.context() as patches:
        SlowDisk(patches, 0.01)
        plugin = FastensorCheckpointIO(asynchronous=True)
        saver = pl.callbacks.ModelCheckpoint(
            folder / "a", every_n_train_steps=1, save_top_k=2, monitor="step_number", mode="max", save_last="link",
            filename="{step}",
        )  # fmt: skip
        trainer, module = fit(pl, folder, plugin, callbacks=[saver, CheckpointMonitor()], logger=log)
        assert calls.since() == {OURS_WRITER: 6}
        assert shard_writers() == [], "memory for copies is given back"
        expected = values_of(trainer, module)
        assert names_in(folder / "a") == ["last.ckpt", "step=5.ckpt", "step=6.ckpt"]
        assert os.readlink(folder / "a" / "last.ckpt") == "step=6.ckpt"
        assert [one for names in told for one in names if not one[1]] == []
        assert len(told) == (6 if rank == 0 else 0)
        assert [names[-1][0] for names in told[-1:]] == ["step=6.ckpt"] * (rank == 0)
        found = fit(pl, folder, plugin, folder / "a" / "last.ckpt", enable_checkpointing=False)
        assert values_of(*found) == expected
        check_pending(pl, rank, folder, plugin)
        check_asynchronous_failures(pl, rank, folder)
    return expected


class During:
    """Makes a callback of a Trainer that calls a function at a step."""

    def __init__(self, pl: Any, step: int, function: Callable[[Any], None]) -> None:
        class Callback(pl.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == step:
                    function(trainer)

        self.callback = Callback()


def check_pending(pl: Any, rank: int, folder: Path, plugin: FastensorCheckpointIO) -> None:
    """A save returns before its shards are durable, and does not see what training changes afterwards."""
    gate: list[Gate] = []
    path = folder / "pending"
    saved: list[Any] = []

    def save(trainer: Any) -> None:
        saved.append(values_of(trainer, trainer.lightning_module))
        with pytest.MonkeyPatch.context() as patches:
            gate.append(Gate(patches))
            trainer.save_checkpoint(path)
            assert plugin._latest is not None
            assert plugin._latest.stage == "writing"
            assert not path.exists()
            for parameter in trainer.lightning_module.parameters():
                parameter.data.mul_(0)
            gate[0].open()
            trainer.strategy.load_checkpoint(path)  # waits
        assert values_of(trainer, trainer.lightning_module) == saved[0]
        trainer.strategy.remove_checkpoint(path)
        trainer.save_checkpoint(path)
        trainer.save_checkpoint(path, storage_options={"asynchronous": False})
        assert path.is_dir()

    options = {"callbacks": [CheckpointMonitor(), During(pl, 3, save).callback], "enable_checkpointing": False}
    fit(pl, folder, plugin, **options)
    trainer = make_trainer(pl, folder, FastensorCheckpointIO(), enable_checkpointing=False)
    module = make_module(pl)
    trainer.validate(module, loader(), ckpt_path=path, verbose=False)
    assert values_of(trainer, module).items() <= saved[0].items()


def fail() -> None:
    raise ZeroDivisionError


def check_asynchronous_failures(pl: Any, rank: int, folder: Path) -> None:
    """The next call raises what has failed, on all ranks; the old checkpoint is there, and is not removed."""
    plugin = FastensorCheckpointIO(asynchronous=True)

    def save(trainer: Any) -> None:
        trainer.save_checkpoint(folder / "old")
        for failing in (0, 1):
            trainer.strategy.load_checkpoint(folder / "old")  # waits
            with pytest.MonkeyPatch.context() as patches:
                FullDisk(patches).full = rank == failing
                trainer.save_checkpoint(folder / "new")
                trainer.strategy.remove_checkpoint(folder / "old")
                with pytest.raises(fastensor.CheckpointWriteError, match="No space left"):
                    trainer.save_checkpoint(folder / "new")
        assert not (folder / "new").exists()
        trainer.strategy.load_checkpoint(folder / "old")
        for failing in (0, 1):  # one rank alone has something else that has failed
            if rank == failing:
                in_turn(plugin._open_writer(), fail, str(folder / "other"), "failing")
            with pytest.raises(ZeroDivisionError if rank == failing else fastensor.CheckpointWriteError):
                trainer.save_checkpoint(folder / "new")
        trainer.save_checkpoint(folder / "new")
        trainer.strategy.load_checkpoint(folder / "new")

    options = {"callbacks": [CheckpointMonitor(), During(pl, 3, save).callback], "enable_checkpointing": False}
    fit(pl, folder, plugin, **options)


def test_reports_say_what_all_ranks_share(tmp_path: Path) -> None:
    (shared, said), (others, _) = run(share, tmp_path)
    assert min(shared, others) > 1_000_000
    ((_, nothing), (nbytes, found)) = said
    assert nothing == 0
    assert 0.9 * nbytes < found == shared + others <= nbytes


def test_two_ranks_save_asynchronously(tmp_path: Path) -> None:
    values, others = run(asynchronously, tmp_path, brand="pytorch_lightning")
    assert values == others
    assert not [name for name in names_in(tmp_path) + names_in(tmp_path / "a") if ".fastensor" in name]
    assert fastensor.verify(tmp_path / "a" / "last.ckpt").complete


def on_a_mesh(pl: Any, rank: int, folder: Path) -> Any:
    """Two by two ranks, which hold rows of columns, and four in a line."""
    with counted_calls() as calls:
        trainer, module = fit(pl, folder, FastensorCheckpointIO(), tensor=2, enable_checkpointing=False)
        trainer.save_checkpoint(folder / "ours")
        assert calls.since() == {OURS_WRITER: 1}
        expected = values_of(trainer, module)
        for name, plugin, tensor in (
            ("ours", FastensorCheckpointIO(), 1), ("ours", None, 2), ("torch", FastensorCheckpointIO(), 2),
        ):  # fmt: skip
            trainer, module = fit(pl, folder, plugin, folder / name, tensor=tensor, enable_checkpointing=False)
            assert values_of(trainer, module) == expected
            assert calls.since() == {"FileSystemReader" if plugin is None else OURS_READER: 2}
            if plugin is None:
                trainer.save_checkpoint(folder / "torch")
                assert calls.since() == {"FileSystemWriter": 1}
    return expected


def test_meshes_of_two_dimensions(tmp_path: Path) -> None:
    values = run(on_a_mesh, tmp_path, world=4)
    assert values == [values[0]] * 4
    assert len(list((tmp_path / "ours").glob("*.distcp"))) == 4


MOST_CALLS = 70
"""About as many as a rank makes in three saves."""


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_some_ranks_are_killed(mode: str, tmp_path: Path, tally: Counter[str]) -> None:
    kill_ranks(tmp_path / "last.ckpt", mode, 3, tally)


@pytest.mark.torture
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_many_ranks_are_killed(mode: str, tmp_path: Path, tally: Counter[str]) -> None:
    kill_ranks(tmp_path / "last.ckpt", mode, 60, tally)


def kill_ranks(path: Path, mode: str, times: int, tally: Counter[str]) -> None:
    """After each kill, all of the checkpoint is of one step."""
    moments = random.Random(f"{mode}{times}")
    step = 0
    gained = Counter[int]()
    with Program(Path(__file__).with_name("sharded_saver.py"), path, lightning=True) as saver:
        for number in range(times):
            port = free_port()
            call = moments.randrange(1, MOST_CALLS) if number else 10**6
            print(port, step, moments.randrange(2), call, mode, file=saver.stdin, flush=True)
            word, code = saver.stdout.readline().split()
            assert word == "dead"
            assert int(code) in (0, -9)
            tally["ranks killed"] += code == "-9"
            found = step_in(path)
            assert step <= found <= step + 3
            assert number or found == 3
            gained[found - step] += 1
            step = found
    assert sum(gained.values()) == times
    assert len(gained) > 1


def step_in(path: Path) -> int:
    """The step of which all of a checkpoint is."""
    assert fastensor.verify(path).complete
    state = {"state_dict": {"layers.0.weight": torch.zeros(14, 5), "layers.3.bias": torch.zeros(3)}}
    load(state, FileSystemReader(path))
    values = {float(one) for tensor in state["state_dict"].values() for one in tensor.flatten()}
    (step,) = values | {float(torch.load(path / "meta.pt", weights_only=False)["stamp"])}
    return int(step)
