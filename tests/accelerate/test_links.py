"""``link_unchanged``: weights that do not train are hard links, in checkpoints of a Trainer and by ``save_model``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from states import assert_equal

import fastensor
import fastensor_accelerate
from fastensor.checkpoint.models import links
from fastensor_accelerate import FastensorConfig

pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a new process, which remembers no file."""
    monkeypatch.setattr(links, "_intact", {})


@contextmanager
def linking(**options: Any) -> Iterator[None]:
    fastensor_accelerate.enable(FastensorConfig(link_unchanged=True, **options))
    try:
        yield
    finally:
        fastensor_accelerate.disable()


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * (index + 1)) % 64
        return {"input_ids": ids, "labels": ids}


def model() -> Any:
    """A model of which only the last block trains. The tied embeddings do not."""
    transformers.set_seed(0)
    made = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    )
    made.requires_grad_(False)
    made.transformer.h[1].requires_grad_(True)
    return made


def train(folder: Path, *, resume: Any = None, **others: Any) -> Any:
    args = TrainingArguments(
        **{
            "output_dir": str(folder), "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2,
            "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no",
            "save_strategy": "steps", "dataloader_pin_memory": False, "lr_scheduler_type": "constant", **others,
        }
    )  # fmt: skip
    trainer = Trainer(model(), args, train_dataset=Numbers(), eval_dataset=Numbers())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in sorted(trainer.model.state_dict().items())}


def frozen_file(folder: Path) -> Path:
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / str(next(file for name, file in places.items() if name.endswith("wte.weight")))


def is_link(one: Path, other: Path) -> bool:
    return os.path.samestat(frozen_file(one).lstat(), frozen_file(other).lstat())


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_checkpoints_of_a_trainer(tmp_path: Path, asynchronous: bool) -> None:
    stock = train(tmp_path / "stock")
    with linking(asynchronous=asynchronous):
        ours = train(tmp_path / "ours")
    assert_equal(weights(ours), weights(stock))
    folders = [tmp_path / "ours" / name for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6")]
    assert is_link(folders[0], folders[1])
    assert is_link(folders[1], folders[2])
    assert frozen_file(folders[0]).stat().st_nlink == 3
    for folder in folders:
        assert_equal(
            dict(sorted(GPT2LMHeadModel.from_pretrained(folder).state_dict().items())),
            dict(sorted(GPT2LMHeadModel.from_pretrained(tmp_path / "stock" / folder.name).state_dict().items())),
        )
        assert len(list(folder.glob("model-*.safetensors"))) == 2
        for file in folder.glob("model-*.safetensors"):
            assert fastensor.verify(file).complete


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rotation_leaves_the_new_checkpoint_whole_and_a_training_goes_on(tmp_path: Path, asynchronous: bool) -> None:
    stock = train(tmp_path / "stock")
    with linking(asynchronous=asynchronous):
        train(tmp_path / "ours", save_total_limit=1, max_steps=4)
        assert checkpoints(tmp_path / "ours") == ["checkpoint-4"]
        links._intact.clear()  # the process has ended
        resumed = train(tmp_path / "ours", resume=True)
    assert_equal(weights(resumed), weights(stock))
    assert is_link(tmp_path / "ours" / "checkpoint-4", tmp_path / "ours" / "checkpoint-6")


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    best = {
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
        "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1,
    }  # fmt: skip
    stock = train(tmp_path / "stock", **best)
    with linking():
        ours = train(tmp_path / "ours", **best)
    assert_equal(weights(ours), weights(stock))


def test_a_model_in_one_file_does_not_hide_the_new_one(tmp_path: Path) -> None:
    """A run without the option has left ``model.safetensors``, which readers prefer to an index."""
    train(tmp_path, learning_rate=1.0)
    with linking():
        trainer = train(tmp_path)
    assert not (tmp_path / "checkpoint-6" / "model.safetensors").exists()
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-6").state_dict()
    assert_equal(dict(sorted(loaded.items())), weights(trainer))


def test_without_the_option_a_checkpoint_is_one_file(tmp_path: Path) -> None:
    fastensor_accelerate.enable()
    try:
        train(tmp_path)
    finally:
        fastensor_accelerate.disable()
    assert (tmp_path / "checkpoint-6" / "model.safetensors").stat().st_nlink == 1
    assert not (tmp_path / "checkpoint-6" / INDEX).exists()


def test_save_model_of_an_accelerator(tmp_path: Path) -> None:
    with linking():
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(model())
        for step in (1, 2, 2):
            accelerator.save_model(prepared, str(tmp_path / f"{step}"))
            with torch.no_grad():
                prepared.transformer.h[1].ln_1.bias += step == 1
    assert is_link(tmp_path / "1", tmp_path / "2")
    assert frozen_file(tmp_path / "2").stat().st_nlink == 2
    loaded = model()
    load_checkpoint_in_model(loaded, str(tmp_path / "2"))
    loaded.tie_weights()
    assert_equal(dict(sorted(loaded.state_dict().items())), dict(sorted(prepared.state_dict().items())))


def test_adapters_stay_in_one_file(tmp_path: Path) -> None:
    """A PEFT model saves its adapter alone, with the option as without it."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=1, per_device_train_batch_size=2, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="steps", dataloader_pin_memory=False,
    )  # fmt: skip
    adapted = peft.get_peft_model(model(), config)
    with linking():
        Trainer(adapted, args, train_dataset=Numbers()).train()
    for name in ("checkpoint-1", "checkpoint-2"):
        files = {path.name for path in (tmp_path / name).glob("*.safetensors")}
        assert files == {"adapter_model.safetensors"}
        saved = fastensor.load(tmp_path / name / "adapter_model.safetensors")
        assert saved
        assert all("lora_" in weight for weight in saved)
        whole = sum(one.nbytes for one in adapted.state_dict().values())
        assert (tmp_path / name / "adapter_model.safetensors").stat().st_size < whole / 4
    again = peft.PeftModel.from_pretrained(model(), tmp_path / "checkpoint-2")
    assert_equal(dict(sorted(again.state_dict().items())), dict(sorted(adapted.state_dict().items())))
