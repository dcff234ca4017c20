"""``fastensor.verify`` answers for all that is in a state of Accelerate, or in a folder of ``transformers.Trainer``."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType
from accelerators import by, training
from flipped import assert_answers_for_all, files_below, flipped
from programs import command_line, free_port, run_ranks

import fastensor
from fastensor.cli.output import FAILED, FOREIGN_CODE, OK, UNCHECKED
from fastensor_accelerate import FastensorConfig

OURS = FastensorConfig()
SCALER = "scaler.pt"


def state(folder: Path, config: FastensorConfig | None, **options: Any) -> set[str]:
    """Save a state with several models, schedulers, samplers, custom objects and a scaler. Returns its files."""
    with by(config):
        loaders = DataLoaderConfiguration(use_stateful_dataloader=find_spec("torchdata") is not None)
        found = training(models=2, custom=2, loaders=loaders)
        found.accelerator.scaler = torch.amp.GradScaler("cpu")
        found.train(2)
        found.accelerator.save_state(folder, **options)
    return {path.name for path in files_below(folder)}


@pytest.mark.parametrize("safetensors", [True, False])
def test_a_state_of_ours_has_checksums_in_every_file(tmp_path: Path, capsys: Any, safetensors: bool) -> None:
    names = state(tmp_path, OURS, safe_serialization=safetensors)
    models = (
        {"model.safetensors", "model_1.safetensors"} if safetensors else {"pytorch_model.bin", "pytorch_model_1.bin"}
    )
    others = {"optimizer.bin", "optimizer_1.bin", "scheduler.bin", "scheduler_1.bin", SCALER}
    if find_spec("torchdata") is not None:
        others.add("dl_state_dict.bin")
    assert names == {*models, *others, "random_states_0.pkl", "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl"}
    (tmp_path / "random_states_1.pkl").write_bytes((tmp_path / "random_states_0.pkl").read_bytes())  # of another rank
    report = assert_answers_for_all(tmp_path, not_compared=set())
    assert (report.container, report.complete) == ("folder", True)
    assert command_line(capsys, "verify", tmp_path)[0] == FOREIGN_CODE, "random states hold arrays of NumPy"
    assert command_line(capsys, "verify", tmp_path, "--allow-code")[0] == OK
    with flipped(tmp_path / "optimizer.bin", (tmp_path / "optimizer.bin").stat().st_size // 2):
        status, out, _ = command_line(capsys, "verify", tmp_path, "--allow-code")
    assert (status, "damaged" in out) == (FAILED, True)


def test_an_asynchronous_state(tmp_path: Path) -> None:
    with by(FastensorConfig(asynchronous=True)):
        found = training()
        found.train()
        found.accelerator.save_state(tmp_path / "state")
        assert fastensor.verify(tmp_path / "state").complete, "the save is waited for, which makes the folder"
        assert len(fastensor.inspect(tmp_path / "state").files) == 5
    assert_answers_for_all(tmp_path / "state", not_compared=set())


def test_a_state_of_accelerate_alone(tmp_path: Path, capsys: Any) -> None:
    """Its archives have CRC32s as well; its safetensors have none."""
    state(tmp_path, None)
    report = assert_answers_for_all(tmp_path, not_compared={"model.safetensors", "model_1.safetensors"})
    assert not report.complete
    status, out, _ = command_line(capsys, "verify", tmp_path, "--allow-code")
    assert (status, out.count("no checksums")) == (UNCHECKED, 2)


def test_a_sharded_model_beside_its_optimizer(tmp_path: Path) -> None:
    """As ``save_model`` with ``max_shard_size`` and ``save_state`` leave them in one folder."""
    with by(OURS):
        found = training()
        found.train()
        found.accelerator.save_state(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        found.accelerator.save_model(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))), tmp_path, 400)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 1
    report = assert_answers_for_all(tmp_path, not_compared={"model.safetensors.index.json"})
    assert report.complete


def _save_shards(rank: int, folder: Path, port: int) -> None:
    torch.set_num_threads(1)
    number = str(rank)
    os.environ |= {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, config in (("ours", OURS), ("stock", None)):
        with by(config):
            PartialState._reset_state()
            AcceleratorState._reset_state()
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False,
                auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"],
            )  # fmt: skip
            accelerator: Any = Accelerator(cpu=True, fsdp_plugin=plugin)
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            accelerator.state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
            model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
            accelerator.backward(model(torch.rand(4, 5)).square().mean())
            optimizer.step()
            accelerator.save_state(folder / name)
    dist.destroy_process_group()


def test_states_of_fsdp(tmp_path: Path, capsys: Any) -> None:
    """The state of two processes has shards in folders of their own, and random states of each process."""
    run_ranks(_save_shards, 2, tmp_path, free_port())
    for name in ("ours", "stock"):
        found = {str(path.relative_to(tmp_path / name)) for path in files_below(tmp_path / name)}
        assert {"random_states_0.pkl", "random_states_1.pkl", "optimizer_0/.metadata"} < found
        assert len([one for one in found if one.endswith(".distcp")]) == 4
    assert_answers_for_all(tmp_path / "ours", not_compared=set())
    metadata = {"optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata"}
    assert_answers_for_all(tmp_path / "stock", not_compared=metadata)
    status, out, _ = command_line(capsys, "verify", tmp_path / "ours", "--allow-code")
    assert (status, out.count("intact"), out.count("dcp")) == (OK, 4, 2)


@pytest.mark.parametrize("config", [OURS, None], ids=["ours", "stock"])
def test_folders_of_a_trainer(tmp_path: Path, capsys: Any, config: FastensorConfig | None) -> None:
    transformers = pytest.importorskip("transformers")
    with by(config):
        transformers.set_seed(0)
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8)
        )
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, save_steps=1, per_device_train_batch_size=1, use_cpu=True,
            report_to="none", disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        )  # fmt: skip
        data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
        transformers.Trainer(model=model, args=args, train_dataset=data).train()
    texts = {"config.json", "generation_config.json", "trainer_state.json"}
    without = texts if config is not None else {*texts, "model.safetensors"}
    folder = tmp_path / "checkpoint-2"
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"} < {
        p.name for p in files_below(folder)
    }
    report = assert_answers_for_all(folder, not_compared=without)
    assert report.complete == (config is not None)
    above = fastensor.verify(tmp_path)
    assert {*above.not_compared} == {f"checkpoint-{step}/{name}" for step in (1, 2) for name in without}
    expected = OK if config is not None else UNCHECKED
    assert command_line(capsys, "verify", tmp_path, "--allow-code")[0] == expected
