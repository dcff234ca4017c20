"""``link_unchanged``: weights that do not train are hard links, in checkpoints of a Trainer and by ``save_model``."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator, load_checkpoint_in_model
from killer import Killer
from states import assert_equal

import fastensor
import fastensor_accelerate
from fastensor.checkpoint.models import sharded
from fastensor.checkpoint.writing import save_transaction
from fastensor.testing.calls import intercepted
from fastensor_accelerate import FastensorConfig
from fastensor_accelerate.attached import saver_of
from fastensor_accelerate.config import ConfigError

pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

pytestmark = pytest.mark.skipif(
    tuple(map(int, safetensors.__version__.split(".")[:2])) < (0, 8), reason="links need safetensors 0.8"
)
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
both = pytest.mark.parametrize("asynchronous", [False, True])


@contextmanager
def linking(**options: Any) -> Iterator[None]:
    fastensor_accelerate.enable(FastensorConfig(**{"link_unchanged": True, **options}))
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


def model(frozen: bool = True) -> Any:
    """A model of which only the last block trains. The tied embeddings do not."""
    transformers.set_seed(0)
    made = GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    )
    made.requires_grad_(not frozen)
    made.transformer.h[1].requires_grad_(True)
    return made


def trainer_of(folder: Path, made: Any = None, **others: Any) -> Any:
    args = TrainingArguments(
        **{
            "output_dir": str(folder), "max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 2,
            "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_strategy": "no",
            "save_strategy": "steps", "dataloader_pin_memory": False, "lr_scheduler_type": "constant", **others,
        }
    )  # fmt: skip
    return Trainer(model() if made is None else made, args, train_dataset=Numbers(), eval_dataset=Numbers())


def train(folder: Path, made: Any = None, *, resume: Any = None, **others: Any) -> Any:
    trainer = trainer_of(folder, made, **others)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in sorted(made.state_dict().items())}


def step(made: Any) -> None:
    with torch.no_grad():
        made.transformer.h[1].ln_1.bias += 1


def stock(folder: Path) -> dict[str, torch.Tensor]:
    """What transformers itself loads, with Fastensor switched off."""
    return weights(GPT2LMHeadModel.from_pretrained(folder))


def frozen_file(folder: Path) -> Path:
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / str(next(file for name, file in places.items() if name.endswith("wte.weight")))


def is_link(one: Path, other: Path) -> bool:
    return os.path.samestat(frozen_file(one).lstat(), frozen_file(other).lstat())


def model_files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name.startswith(("model", "."))}


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@both
def test_checkpoints_of_a_trainer(tmp_path: Path, asynchronous: bool, capsys: pytest.CaptureFixture[str]) -> None:
    alone = train(tmp_path / "stock")
    with linking(asynchronous=asynchronous):
        ours = train(tmp_path / "ours")
    assert "unchanged and shared" in capsys.readouterr().err
    assert_equal(weights(ours.model), weights(alone.model))
    folders = [tmp_path / "ours" / name for name in ("checkpoint-2", "checkpoint-4", "checkpoint-6")]
    assert is_link(folders[0], folders[1])
    assert is_link(folders[1], folders[2])
    assert frozen_file(folders[0]).stat().st_nlink == 3
    for folder in folders:
        assert_equal(stock(folder), stock(tmp_path / "stock" / folder.name))
        assert len(model_files(folder)) == 3
        for file in folder.glob("model-*.safetensors"):
            assert fastensor.verify(file).complete
            assert safetensors.safe_open(file, "pt").metadata()["format"] == "pt"


@both
def test_a_rotation_leaves_the_new_checkpoint_whole_and_a_training_goes_on(tmp_path: Path, asynchronous: bool) -> None:
    alone = train(tmp_path / "stock")
    with linking(asynchronous=asynchronous):
        train(tmp_path / "ours", save_total_limit=1, max_steps=4)
        assert checkpoints(tmp_path / "ours") == ["checkpoint-4"]
        assert frozen_file(tmp_path / "ours" / "checkpoint-4").stat().st_nlink == 1
        resumed = train(tmp_path / "ours", resume=True, max_steps=8)
    assert is_link(tmp_path / "ours" / "checkpoint-6", tmp_path / "ours" / "checkpoint-8")
    assert_equal(stock(tmp_path / "ours" / "checkpoint-6"), weights(alone.model))
    assert_equal(stock(tmp_path / "ours" / "checkpoint-8"), weights(resumed.model))


def test_a_checkpoint_is_loaded_by_a_trainer_without_fastensor(tmp_path: Path) -> None:
    alone = train(tmp_path / "stock")
    with linking():
        train(tmp_path / "ours", max_steps=4)
    assert_equal(weights(train(tmp_path / "ours", resume=True).model), weights(alone.model))


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    best = {
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
        "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1,
    }  # fmt: skip
    alone = train(tmp_path / "stock", **best)
    with linking():
        ours = train(tmp_path / "ours", **best)
    assert_equal(weights(ours.model), weights(alone.model))


@both
def test_a_folder_that_has_a_model_in_one_file(tmp_path: Path, asynchronous: bool) -> None:
    """A run without the option has left it, and readers prefer it to an index."""
    train(tmp_path, learning_rate=1.0)
    with linking(asynchronous=asynchronous):
        trainer = train(tmp_path)
    assert WHOLE not in model_files(tmp_path / "checkpoint-6")
    assert_equal(stock(tmp_path / "checkpoint-6"), weights(trainer.model))


@both
def test_a_folder_that_has_a_model_in_several_files(tmp_path: Path, asynchronous: bool) -> None:
    """Nothing of it is left when all of the new model trains: other readers would prefer its index."""
    with linking(asynchronous=asynchronous):
        train(tmp_path, learning_rate=1.0)
        trainer = train(tmp_path, model(frozen=False))
    assert model_files(tmp_path / "checkpoint-6") == {WHOLE}
    assert_equal(stock(tmp_path / "checkpoint-6"), weights(trainer.model))
    assert (
        fastensor.load_sharded(tmp_path / "checkpoint-6").keys()
        == safetensors.torch.load_file(tmp_path / "checkpoint-6" / WHOLE).keys()
    )


def test_without_the_option_nothing_is_replaced_split_or_removed(tmp_path: Path) -> None:
    with linking():
        train(tmp_path / "linked").save_model(str(tmp_path / "model"))
    before = model_files(tmp_path / "model")
    assert len(before) == 3
    names = ("huggingface_hub", "transformers.modeling_utils")
    own = [sys.modules[name].split_torch_state_dict_into_shards for name in names]
    with linking(link_unchanged=False):
        accelerator = Accelerator(cpu=True)
        with saver_of(accelerator).saving():
            assert [sys.modules[name].split_torch_state_dict_into_shards for name in names] == own
        train(tmp_path / "plain")
        accelerator.save_model(model(), str(tmp_path / "model"))
    assert (tmp_path / "plain" / "checkpoint-6" / WHOLE).stat().st_nlink == 1
    assert model_files(tmp_path / "plain" / "checkpoint-6") == {WHOLE}
    assert model_files(tmp_path / "model") == before | {WHOLE}, "as Accelerate leaves it"


def test_save_model_of_an_accelerator(tmp_path: Path) -> None:
    with linking():
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(model())
        for number in (1, 2, 2):
            accelerator.save_model(prepared, str(tmp_path / f"{number}"))
            step(prepared)
            if number == 1:
                first = frozen_file(tmp_path / "1").stat().st_ino
        step(prepared)
        accelerator.save_model(prepared, str(tmp_path / "2"), max_shard_size="1KB")
    assert frozen_file(tmp_path / "1").stat().st_ino == first
    assert len(model_files(tmp_path / "2")) > 4
    loaded = model()
    load_checkpoint_in_model(loaded, str(tmp_path / "2"))
    loaded.tie_weights()
    assert_equal(weights(loaded), weights(prepared))
    assert {*json.loads((tmp_path / "2" / INDEX).read_text())["weight_map"].values()} | {INDEX} == model_files(
        tmp_path / "2"
    )


def test_a_state_of_save_state_takes_no_part(tmp_path: Path) -> None:
    with linking():
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(model())
        accelerator.save_model(prepared, str(tmp_path / "model"))
        for number in "12":
            accelerator.save_state(str(tmp_path / number))
    for number in "12":
        assert model_files(tmp_path / number) == {WHOLE}
        assert (tmp_path / number / WHOLE).stat().st_nlink == 1
    assert frozen_file(tmp_path / "model").stat().st_nlink == 1


def test_names_of_a_teacher_that_are_those_of_its_student(tmp_path: Path) -> None:
    """What trains in one of the models is no frozen weight of the other."""
    with linking():
        accelerator = Accelerator(cpu=True)
        teacher, student = accelerator.prepare(model().requires_grad_(False), model(frozen=False))
        for number in "12":
            accelerator.save_model(student, str(tmp_path / "student" / number))
            accelerator.save_model(teacher, str(tmp_path / "teacher" / number))
            with torch.no_grad():
                student.transformer.wte.weight += 1
    assert model_files(tmp_path / "student" / "2") == {WHOLE}
    assert (tmp_path / "student" / "2" / WHOLE).stat().st_nlink == 1
    assert (tmp_path / "teacher" / "2" / WHOLE).stat().st_nlink == 2
    with torch.no_grad():
        student.transformer.wte.weight -= 1
    assert_equal(stock_values(tmp_path / "student" / "2"), stock_values(tmp_path / "student" / "1", 1))


def stock_values(folder: Path, more: int = 0) -> torch.Tensor:
    found: torch.Tensor = safetensors.torch.load_file(folder / WHOLE)["transformer.wte.weight"]
    return found + more


class WithText(torch.nn.Linear):
    """A module whose state has a text, as those of bitsandbytes."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "kind": "nf4"}


@pytest.mark.parametrize("link_unchanged", [False, True])
def test_what_is_no_tensor_is_left_to_accelerate(tmp_path: Path, link_unchanged: bool) -> None:
    try:
        Accelerator(cpu=True).save_model(WithText(3, 3), str(tmp_path / "stock"))
    except ValueError as error:
        pytest.skip(f"this huggingface_hub saves tensors only: {error}")
    with linking(link_unchanged=link_unchanged):
        accelerator = Accelerator(cpu=True)
        module = accelerator.prepare(WithText(3, 3).requires_grad_(False))
        for number in "12":
            accelerator.save_model(module, str(tmp_path / number))
    assert (tmp_path / "2" / WHOLE).stat().st_nlink == 1
    assert_equal(safetensors.torch.load_file(tmp_path / "2" / WHOLE)["weight"], module.weight.detach())


def test_adapters_stay_in_one_file(tmp_path: Path) -> None:
    """A PEFT model saves its adapter alone, with the option as without it."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(model(), config)
    with linking():
        train(tmp_path, adapted, max_steps=4)
    for name in ("checkpoint-2", "checkpoint-4"):
        assert {path.name for path in (tmp_path / name).glob("*.safetensors")} == {"adapter_model.safetensors"}
        assert (tmp_path / name / "adapter_model.safetensors").stat().st_nlink == 1
        saved = fastensor.load(tmp_path / name / "adapter_model.safetensors")
        assert saved
        assert all("lora_" in weight for weight in saved)
    again = peft.PeftModel.from_pretrained(model(), tmp_path / "checkpoint-4")
    assert_equal(weights(again), weights(adapted))


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ("adapter_model{suffix}.safetensors", torch.ones(3)),
        ("pytorch_model{suffix}.bin", torch.ones(3)),
        ("model.fp16{suffix}.safetensors", torch.ones(3)),
        ("model{suffix}.safetensors", "nf4"),
        ("model{suffix}.safetensors", torch.ones(3, device="meta")),
    ],
)
def test_other_files_are_split_as_without_the_option(pattern: str, value: Any) -> None:
    state = {"a": torch.ones(300), "b": value, "c": torch.ones(300)}
    options: dict[str, Any] = {"filename_pattern": pattern, "max_shard_size": 1250}
    expected = huggingface_hub.split_torch_state_dict_into_shards(state, **options)
    with linking():
        saver = saver_of(Accelerator(cpu=True))
        with saver.saving():
            assert huggingface_hub.split_torch_state_dict_into_shards(state, **options) == expected
            assert not saver._max_shard_sizes


def test_a_safetensors_that_overwrites_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_transaction, "version", lambda name: "0.7.0")
    FastensorConfig()
    with pytest.raises(ConfigError, match=r"needs safetensors 0\.8, found 0\.7\.0"):
        FastensorConfig(link_unchanged=True)


# --- a new model in the place of another one


def other_model(frozen: bool) -> Any:
    made = model(frozen)
    with torch.no_grad():
        for one in made.parameters():
            one.add_(1)
    return made


one, several, long = "one file", "several files", pytest.mark.torture


@pytest.mark.crash
@pytest.mark.parametrize(
    ("by", "before", "after"),
    [
        ("Trainer", several, several),
        ("Accelerator", several, one),
        ("Accelerator", one, several),
        pytest.param("Trainer", several, one, marks=long),
        pytest.param("Trainer", one, several, marks=long),
        pytest.param("Trainer", one, one, marks=long),
        pytest.param("Accelerator", several, several, marks=long),
        pytest.param("Accelerator", one, one, marks=long),
    ],
)
def test_killed_before_the_nth_call(tmp_path: Path, by: str, before: str, after: str) -> None:
    """For transformers and for us, the model that was there is whole until the new one is. So is another one, which has
    the same files. The next save is whole, whatever was left."""
    old, new = model(before == "several files"), other_model(after == "several files")
    expected = [weights(old), weights(new)]
    seen = []
    with linking():
        accelerator = Accelerator(cpu=True)
        old = accelerator.prepare(old)
        trainer = trainer_of(tmp_path / "trainer", new)
        trainer.accelerator.prepare(new)
        for fatal in count(1):
            folder, other = tmp_path / f"{fatal}", tmp_path / f"{fatal}-other"
            for one in (other, folder):
                accelerator.save_model(old, str(one))
                old.config.save_pretrained(one)
            pid = os.fork()
            if pid == 0:
                with intercepted(Killer(fatal, ("rename", "link", "unlink", "fsync"))):
                    save_by(by, trainer, new, folder)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            seen.append(whole_in(folder, expected))
            assert whole_in(other, expected) == (0, 0)
            save_by(by, trainer, new, folder)
            assert whole_in(folder, expected) == (1, 1)
            assert {INDEX, WHOLE} & model_files(folder) == {WHOLE if after == "one file" else INDEX}
            assert len(model_files(folder)) == (1 if after == "one file" else 3)
            if code == 0:
                break
            assert code == -signal.SIGKILL
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == ((0, 0), (1, 1))


def test_what_a_trainer_saves_by_hand_is_no_link(tmp_path: Path) -> None:
    """A Trainer that pushes copies checkpoints over it, in place. Nor is it linked to by a checkpoint."""
    with linking():
        trainer = trainer_of(tmp_path, model())
        trainer.train()
        trainer.save_model()
        trainer.state.global_step += 1
        trainer._save_checkpoint(trainer.model, None)
        by_hand = [path for path in tmp_path.iterdir() if path.suffix == ".safetensors"]
        assert len(by_hand) > 1
        assert {path.stat().st_nlink for path in by_hand} == {1}
        checkpoints = list(tmp_path.rglob("checkpoint-*/model*.safetensors"))
        assert max(path.stat().st_nlink for path in checkpoints) > 1


@pytest.mark.parametrize("pushes", [False, True])
def test_checkpoints_that_are_pushed_are_saved_as_without_links(tmp_path: Path, pushes: bool) -> None:
    with linking():
        trainer = train(tmp_path, model(), max_steps=1, save_strategy="no")
        trainer.args.push_to_hub = pushes
        trainer._push_from_checkpoint = lambda folder: None
        trainer._save_checkpoint(trainer.model, None)
    names = {path.name for path in tmp_path.rglob("checkpoint-*/model*")}
    assert (names == {"model.safetensors"}) == pushes


def test_a_folder_that_another_writer_has_locked(tmp_path: Path) -> None:
    """Files of both would get the same names."""
    with linking():
        accelerator = Accelerator(cpu=True)
        made = accelerator.prepare(model())
        accelerator.save_model(made, str(tmp_path))
        before = {name: (tmp_path / name).read_bytes() for name in model_files(tmp_path)}
        with sharded.alone_in(str(tmp_path)), pytest.raises(OSError, match="a model is being saved there"):
            accelerator.save_model(made, str(tmp_path))
        assert {name: (tmp_path / name).read_bytes() for name in model_files(tmp_path)} == before
        accelerator.save_model(made, str(tmp_path))


def test_the_option_is_turned_off_again(tmp_path: Path) -> None:
    """Accelerate leaves the index of the earlier model beside the new file, which is what everybody loads."""
    old, new = model(), other_model(True)
    with linking():
        accelerator = Accelerator(cpu=True)
        accelerator.save_model(accelerator.prepare(old), str(tmp_path))
    Accelerator(cpu=True).save_model(new, str(tmp_path))
    new.config.save_pretrained(tmp_path)
    assert {INDEX, WHOLE} <= model_files(tmp_path)
    assert whole_in(tmp_path, [weights(old), weights(new)]) == (1, 1)


def save_by(by: str, trainer: Any, made: Any, folder: Path) -> None:
    if by == "Trainer":
        trainer.save_model(str(folder))
    else:
        trainer.accelerator.save_model(made, str(folder))


def whole_in(folder: Path, expected: list[dict[str, torch.Tensor]]) -> tuple[int, int]:
    """The number of the model that transformers loads from a folder, and of the one that we load."""
    ours = model()
    fastensor.load_model(ours, folder, strict=False)
    ours.tie_weights()
    found = []
    for state in (stock(folder), weights(ours)):
        number = int(torch.equal(state["transformer.wte.weight"], expected[1]["transformer.wte.weight"]))
        assert_equal(state, expected[number])
        found.append(number)
    return found[0], found[1]


@both
def test_an_index_that_cannot_be_written(tmp_path: Path, asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old model is there, whole, and no checkpoint is removed for the one that failed."""
    old = train(tmp_path, learning_rate=1.0)

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.EIO, "the disk has failed")

    with linking(asynchronous=asynchronous):
        trainer = trainer_of(tmp_path, save_total_limit=1)
        monkeypatch.setattr(sharded, "_write_index", fail)
        with pytest.raises(OSError, match="the disk has failed"):
            trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert_equal(stock(tmp_path / "checkpoint-6"), weights(old.model))
    assert (tmp_path / "checkpoint-2" / WHOLE).exists()
