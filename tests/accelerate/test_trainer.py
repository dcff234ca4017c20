"""``transformers.Trainer`` and TRL's: their files are stock's, their trainings go on bit for bit, nothing is lost."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from disks import FullDisk, SlowDisk
from programs import run
from states import assert_equal
from torch.utils._pytree import tree_map

import fastensor
import fastensor_accelerate
from fastensor.backends.registry import announce
from fastensor.errors import CheckpointWriteError
from fastensor.files import posix
from fastensor_accelerate import FastensorConfig, transformers_trainer
from fastensor_accelerate.attached import saver_of
from fastensor_accelerate.seam import _SEAMS, missing_seams, replaced
from fastensor_accelerate.state_files import StateFiles

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from transformers.integrations.integration_utils import WandbLogModel  # noqa: E402

TENSOR_FILES = (".safetensors", ".bin", ".pt", ".pth")
SYNCHRONOUS = FastensorConfig()
ASYNCHRONOUS = FastensorConfig(asynchronous=True)
MODES = [pytest.param(SYNCHRONOUS, id="synchronous"), pytest.param(ASYNCHRONOUS, id="asynchronous")]


class Seen:
    """The files that Fastensor has saved and loaded."""

    def __init__(self) -> None:
        self.saved: list[str] = []
        self.loaded: list[str] = []

    def of(self, paths: list[str], folder: Path) -> set[str]:
        return {str(Path(path).relative_to(folder)) for path in paths if Path(path).is_relative_to(folder)}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Records what goes through Fastensor, which does it as ever."""
    found = Seen()
    save, save_later, load = fastensor.save, fastensor.AsyncWriter.save, fastensor.load_with_report

    def noting(function: Callable[..., Any], paths: list[str], at: int) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            paths.append(os.fspath(args[at]))
            return function(*args, **options)

        return note

    monkeypatch.setattr(fastensor, "save", noting(save, found.saved, 1))
    monkeypatch.setattr(fastensor.AsyncWriter, "save", noting(save_later, found.saved, 2))
    monkeypatch.setattr(fastensor, "load_with_report", noting(load, found.loaded, 0))
    return found


@contextmanager
def by(config: FastensorConfig | None) -> Iterator[None]:
    """Trainings in the block save and load by Fastensor; by themselves if there are no options."""
    if config is None:
        yield
        return
    fastensor_accelerate.enable(config)
    try:
        yield
    finally:
        fastensor_accelerate.disable()
        gc.collect()


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of numbers."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(8) * (index + 1)) % 64
        return {"input_ids": ids, "labels": ids}


def model() -> Any:
    transformers.set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    )


def options(folder: Path, **others: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "save_strategy": "steps",
        "dataloader_pin_memory": False, **others,
    }  # fmt: skip


def trainer(folder: Path, *callbacks: Any, **others: Any) -> Any:
    args = TrainingArguments(**options(folder, **others))
    data = Numbers()
    return Trainer(model=model(), args=args, train_dataset=data, eval_dataset=data, callbacks=list(callbacks))


def tensor_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith(TENSOR_FILES)}


def all_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def stock_content(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    loaded = torch.load(path, weights_only=False)
    return tree_map(lambda leaf: leaf.tolist() if isinstance(leaf, np.ndarray) else leaf, loaded)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def weights(trained: Any) -> dict[str, torch.Tensor]:
    return dict(trained.model.state_dict())


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights after four steps without any checkpoint."""
    trained = trainer(tmp_path_factory.mktemp("uninterrupted"), save_strategy="no")
    trained.train()
    return weights(trained)


# --- files


@pytest.mark.parametrize("config", MODES)
def test_files_have_the_names_and_contents_of_stocks(tmp_path: Path, seen: Seen, config: FastensorConfig) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    trainer(stock).train()
    assert not seen.saved
    with by(config):
        trainer(ours).train()
    assert all_files(ours) == all_files(stock)
    assert checkpoints(ours) == ["checkpoint-2", "checkpoint-4"]
    assert seen.of(seen.saved, ours) == tensor_files(ours)
    assert {Path(name).name for name in tensor_files(ours)} == {
        "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin",
    }  # fmt: skip
    for name in sorted(tensor_files(ours)):
        fastensor.verify(ours / name)
        if not name.endswith("training_args.bin"):  # holds the names of the folders
            assert_equal(stock_content(ours / name), stock_content(stock / name))
        if name.endswith(".safetensors"):
            assert fastensor.inspect(ours / name).checked
            assert fastensor.inspect(ours / name).metadata == fastensor.inspect(stock / name).metadata
    assert type(stock_content(ours / "checkpoint-4/training_args.bin")) is TrainingArguments


def test_a_model_that_the_script_saves_is_saved_by_fastensor(tmp_path: Path, seen: Seen) -> None:
    with by(ASYNCHRONOUS):
        trained = trainer(tmp_path / "out")
        trained.save_model(str(tmp_path / "model"))
        assert seen.of(seen.saved, tmp_path / "model") == tensor_files(tmp_path / "model")
        assert GPT2LMHeadModel.from_pretrained(tmp_path / "model").config.n_embd == 32
        assert_equal(stock_content(tmp_path / "model/model.safetensors").keys(), weights_of_file(trained))


def weights_of_file(trained: Any) -> Any:
    """The names of the tensors that are not tied to others."""
    return {name: None for name in weights(trained) if name != "lm_head.weight"}.keys()


def test_the_summary_counts_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with by(SYNCHRONOUS):
        trainer(tmp_path).train()
    assert "fastensor: saved 2 states (" in capsys.readouterr().err


def test_a_model_that_is_none_of_transformers(tmp_path: Path, seen: Seen) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(64, 64)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.table(input_ids)
            return {"loss": torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}

    def plain() -> Any:
        args = TrainingArguments(**options(tmp_path))
        transformers.set_seed(0)
        return Trainer(model=Plain(), args=args, train_dataset=Numbers())

    with by(SYNCHRONOUS):
        first = plain()
        first.train()
        shutil.rmtree(tmp_path / "checkpoint-4")
        second = plain()
        second.train(resume_from_checkpoint=True)
    assert seen.of(seen.saved, tmp_path) == tensor_files(tmp_path)
    assert "checkpoint-2/model.safetensors" in seen.of(seen.loaded, tmp_path)
    assert_equal(weights(second), weights(first))


# --- resuming


@pytest.mark.parametrize("resumes", [None, *MODES])
@pytest.mark.parametrize("saves", [None, *MODES])
def test_a_training_goes_on_bit_for_bit(
    tmp_path: Path,
    seen: Seen,
    uninterrupted: dict[str, torch.Tensor],
    saves: FastensorConfig | None,
    resumes: FastensorConfig | None,
) -> None:
    with by(saves):
        trainer(tmp_path).train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    with by(resumes):
        resumed = trainer(tmp_path)
        resumed.train(resume_from_checkpoint=True)
    assert_equal(weights(resumed), uninterrupted)
    loaded = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} if resumes else set()
    assert seen.of(seen.loaded, tmp_path / "checkpoint-2") == loaded


def test_shards_are_saved_and_loaded_by_fastensor(
    tmp_path: Path, seen: Seen, uninterrupted: dict[str, torch.Tensor]
) -> None:
    def sharded() -> Any:
        made = trainer(tmp_path)
        made.model.save_pretrained = functools.partial(made.model.save_pretrained, max_shard_size="20KB")
        return made

    with by(ASYNCHRONOUS):
        sharded().train()
        shutil.rmtree(tmp_path / "checkpoint-4")
        shards = {name for name in tensor_files(tmp_path / "checkpoint-2") if name.startswith("model-")}
        assert len(shards) > 2
        resumed = sharded()
        resumed.train(resume_from_checkpoint=True)
    assert seen.of(seen.saved, tmp_path) == tensor_files(tmp_path)
    assert shards <= seen.of(seen.loaded, tmp_path / "checkpoint-2")
    assert_equal(weights(resumed), uninterrupted)


@pytest.mark.parametrize("config", MODES)
def test_the_best_model_is_loaded_at_the_end(
    tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch, config: FastensorConfig
) -> None:
    best = {
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True,
        "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1, "max_steps": 6,
    }  # fmt: skip
    SlowDisk(monkeypatch, 0.02)
    stock = trainer(tmp_path / "stock", **best)
    stock.train()
    with by(config):
        ours = trainer(tmp_path / "ours", **best)
        ours.train()
    assert_equal(weights(ours), weights(stock))
    assert checkpoints(tmp_path / "ours") == checkpoints(tmp_path / "stock") == ["checkpoint-2"]
    assert seen.of(seen.loaded, tmp_path / "ours") == {"checkpoint-2/model.safetensors"}


def test_a_checkpoint_that_is_removed_at_the_end_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``save_total_limit=1`` the Trainer removes all but the best, also the one that is pending."""
    SlowDisk(monkeypatch, 0.1)
    with by(ASYNCHRONOUS):
        trainer(
            tmp_path, metric_for_best_model="loss", greater_is_better=True, eval_strategy="steps", eval_steps=2,
            save_total_limit=1,
        ).train()  # fmt: skip
    assert checkpoints(tmp_path) == ["checkpoint-2"]


# --- old checkpoints


def wait_for_pending(training: Any) -> None:
    saver_of(training.accelerator).wait()


class Gate:
    """Files are durable only while it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        sync = posix.sync_file

        def wait_and_sync(fd: int) -> None:
            assert self.open.wait(60)
            sync(fd)

        monkeypatch.setattr(posix, "sync_file", wait_and_sync)


def test_an_old_checkpoint_is_removed_when_the_new_one_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()
    there: list[list[str]] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 2:
                wait_for_pending(training)
                there.append(checkpoints(tmp_path))
                gate.open.clear()
            if state.global_step == 4:  # a callback with on_save would have the save wait
                there.append(checkpoints(tmp_path))
                gate.open.set()

    with by(ASYNCHRONOUS):
        training = trainer(tmp_path, Watch(), save_total_limit=1, max_steps=6)
        training.train()
    assert there == [["checkpoint-2"], ["checkpoint-2", "checkpoint-4"]]
    assert checkpoints(tmp_path) == ["checkpoint-6"]


class Fills(TrainerCallback):  # type: ignore[misc]
    """The disk is full from a step on, up to another one."""

    def __init__(self, disk: FullDisk, first: int, last: int) -> None:
        self.disk, self.first, self.last = disk, first, last
        self.steps = 0
        self.training: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.steps = state.global_step + 1
        if self.steps == self.first:
            wait_for_pending(self.training)
        self.disk.full = self.first <= self.steps <= self.last


@pytest.mark.parametrize(
    ("config", "max_steps", "steps"),
    [
        pytest.param(SYNCHRONOUS, 8, {4}, id="synchronous, at once"),
        pytest.param(ASYNCHRONOUS, 8, {4, 6}, id="asynchronous, at the next file or save"),
        pytest.param(ASYNCHRONOUS, 4, {4}, id="asynchronous, at the end"),
    ],
)
def test_a_failed_save_is_raised_and_removes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uninterrupted: dict[str, torch.Tensor],
    config: FastensorConfig,
    max_steps: int,
    steps: set[int],
) -> None:
    disk = FullDisk(monkeypatch)
    fills = Fills(disk, 4, 5)
    with by(config):
        training = fills.training = trainer(tmp_path, fills, save_total_limit=1, max_steps=max_steps)
        with pytest.raises(CheckpointWriteError) as raised:
            training.train()
        assert "checkpoint-4" in str(raised.value)
        assert fills.steps in steps
        disk.full = False
        for path in tensor_files(tmp_path / "checkpoint-2"):
            fastensor.verify(tmp_path / "checkpoint-2" / path)
        resumed = trainer(tmp_path, save_total_limit=1)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # nothing is raised twice
    if max_steps == 4:
        assert_equal(weights(resumed), uninterrupted)
    assert checkpoints(tmp_path) == ["checkpoint-4"]


def test_what_is_pushed_was_written_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[set[str]] = []
    monkeypatch.setattr(
        Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append(tensor_files(Path(folder)))
    )
    SlowDisk(monkeypatch, 0.05)
    with by(ASYNCHRONOUS):
        training = trainer(tmp_path, max_steps=2)
        training.args.push_to_hub = True
        training.train()
    assert pushed == [tensor_files(tmp_path / "checkpoint-2")]


# --- who reads a checkpoint as soon as it is saved


class Reads:
    """Looks at the newest checkpoint, or at what is there of it, as an upload would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: list[Any] = []

    def look(self) -> None:
        newest = max(self.folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        model = newest / "model.safetensors"
        self.found.append([newest.name, sorted(os.listdir(newest)), stock_content(model) if model.exists() else None])


class ReadsInCallback(Reads, TrainerCallback):  # type: ignore[misc]
    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.look()


def reading(kind: str, reads: Any) -> Any:
    """A training in which somebody reads each checkpoint."""
    if kind == "callback":
        return trainer(reads.folder, reads)

    def looks_afterwards(method: Callable[..., Any]) -> Callable[..., Any]:
        def overriding(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            reads.look()
            return result

        return overriding

    made = trainer(reads.folder)
    if kind == "save_pretrained":
        overridden = {kind: looks_afterwards(type(made.model).save_pretrained)}
        made.model.__class__ = type("OfUser", (type(made.model),), overridden)
    elif kind == "instance":
        made.save_model = looks_afterwards(made.save_model)
    else:
        made.__class__ = type("OfUser", (Trainer,), {kind: looks_afterwards(getattr(Trainer, kind))})
    return made


@pytest.mark.parametrize("kind", ["callback", "_save_checkpoint", "save_model", "_save", "instance", "save_pretrained"])
def test_what_reads_a_checkpoint_that_is_just_saved_finds_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    SlowDisk(monkeypatch, 0.02)
    announce.cache_clear()
    stock, ours = ReadsInCallback(tmp_path / "stock"), ReadsInCallback(tmp_path / "ours")
    reading(kind, stock).train()
    with by(ASYNCHRONOUS):
        reading(kind, ours).train()
    assert [found[0] for found in ours.found] == ["checkpoint-2", "checkpoint-4"]
    assert_equal(ours.found, stock.found)
    said = [record.getMessage() for record in caplog.records if "asynchronously is not used" in record.getMessage()]
    assert len(said) == 1, "once"
    assert ("ReadsInCallback" if kind == "callback" else "OfUser" if kind != "instance" else "Trainer") in said[0]


@pytest.mark.parametrize(
    ("name", "attribute", "value", "reads"),
    [
        ("WandbCallback", "_log_model", WandbLogModel.CHECKPOINT, True),
        ("WandbCallback", "_log_model", WandbLogModel.END, False),
        ("WandbCallback", "_log_model", WandbLogModel.FALSE, False),
        ("WandbCallback", "renamed", WandbLogModel.FALSE, True),
        ("MLflowCallback", "_log_artifacts", True, True),
        ("MLflowCallback", "_log_artifacts", False, False),
        ("DagsHubCallback", "_log_artifacts", True, True),
        ("DagsHubCallback", "_log_artifacts", False, False),
        ("DVCLiveCallback", "_log_model", None, True),
        ("TensorBoardCallback", "tb_writer", None, False),
    ],
)
def test_callbacks_that_only_log_let_training_go_on(
    tmp_path: Path, name: str, attribute: str, value: object, reads: bool
) -> None:
    kind = getattr(transformers.integrations, name)
    callback = kind.__new__(kind)  # its package need not be installed
    callback._auto_end_run = False  # asked by the finalizer of MLflow's
    setattr(callback, attribute, value)
    training = trainer(tmp_path)
    assert transformers_trainer.reader_of(training) is None
    training.callback_handler.callbacks.append(callback)
    assert transformers_trainer.reader_of(training) == (f"on_save of {name}" if reads else None)
    training.callback_handler.callbacks.clear()
    training.args.push_to_hub = True
    assert transformers_trainer.reader_of(training) == "what pushes it to the Hub"


class Forwards(torch.nn.Module):
    """A model in another one, which passes on what it lacks, as FullyShardedDataParallel does."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


@pytest.mark.parametrize("config", MODES)
@pytest.mark.parametrize("wrap", [functools.partial(torch.compile, backend="eager"), Forwards])
def test_a_model_that_passes_on_what_it_lacks(tmp_path: Path, config: FastensorConfig, wrap: Any) -> None:
    with by(config):
        args = TrainingArguments(**options(tmp_path, remove_unused_columns=False))
        untied = model()
        untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().clone())
        training = Trainer(wrap(untied), args, train_dataset=Numbers())
        training.train()
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert transformers_trainer.reader_of(training) is None


def test_a_method_of_unknown_origin_may_read(tmp_path: Path) -> None:
    training = trainer(tmp_path)
    training.model.save_pretrained = functools.partial(type(training.model).save_pretrained, training.model)
    training.model = Forwards(training.model)
    assert transformers_trainer.reader_of(training) == "save_pretrained of Forwards"


# --- TRL


def sft(folder: Path, **others: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[EOS]", *(f"w{number}" for number in range(62))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [" ".join(f"w{(index * step) % 62}" for step in range(8)) for index in range(32)]
    return trl.SFTTrainer(
        model=model(),
        args=trl.SFTConfig(**options(folder, max_length=16, bf16=False, gradient_checkpointing=False, **others)),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]"
        ),
    )


def test_trl(tmp_path: Path, seen: Seen) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    whole = sft(stock)
    whole.train()
    with by(ASYNCHRONOUS):
        saved = sft(ours)
        assert transformers_trainer.reader_of(saved) is None
        saved.train()
        assert all_files(ours) == all_files(stock)
        assert seen.of(seen.saved, ours) == tensor_files(ours)
        shutil.rmtree(ours / "checkpoint-4")
        resumed = sft(ours)
        resumed.train(resume_from_checkpoint=True)
    assert_equal(weights(resumed), weights(whole))
    assert "model.safetensors" in seen.of(seen.loaded, ours / "checkpoint-2")
    shutil.rmtree(ours / "checkpoint-4")
    back = sft(ours)
    back.train(resume_from_checkpoint=True)
    assert_equal(weights(back), weights(whole))


# --- PEFT


def lora(folder: Path, **others: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    data = Numbers()
    return Trainer(
        model=peft.get_peft_model(model(), config),
        args=TrainingArguments(**options(folder, label_names=["labels"], **others)),
        train_dataset=data,
        eval_dataset=data,
    )


@pytest.mark.parametrize("config", MODES)
def test_adapters_are_saved_and_loaded_by_fastensor(tmp_path: Path, seen: Seen, config: FastensorConfig) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    whole = lora(stock, **best)
    whole.train()
    with by(config):
        saved = lora(ours, **best)
        assert transformers_trainer.reader_of(saved) is None
        saved.train()
        assert all_files(ours) == all_files(stock)
        assert seen.of(seen.saved, ours) == tensor_files(ours)
        adapter = "checkpoint-2/adapter_model.safetensors"
        assert fastensor.inspect(ours / adapter).checked
        assert all("lora_" in name for name in stock_content(ours / adapter)), "the base is not saved"
        assert not list(ours.rglob("model*.safetensors"))
        assert_equal(stock_content(ours / adapter), stock_content(stock / adapter))
        assert seen.of(seen.loaded, ours) == {"checkpoint-4/adapter_model.safetensors"}  # the best one
        shutil.rmtree(ours / "checkpoint-4")
        resumed = lora(ours)
        resumed.train(resume_from_checkpoint=True)
    assert_equal(weights(resumed), weights(whole))
    assert adapter in seen.of(seen.loaded, ours)


def test_a_version_of_peft_without_a_seam_is_told_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.delattr(sys.modules["peft.peft_model"], "safe_save_file")
    with (
        pytest.warns(UserWarning, match=r"PEFT are NOT saved .* no peft\.peft_model\.safe_save_file\."),
        by(SYNCHRONOUS),
    ):
        trainer(tmp_path).train()
    assert fastensor.inspect(tmp_path / "checkpoint-4/model.safetensors").checked


# --- switching on and off


def everything() -> dict[str, Any]:
    """What enabling or a save replaces."""
    module = sys.modules["transformers.trainer"]
    names = [f"{owner.__name__}.{name}" for owner in (Accelerator, Trainer, module) for name in vars(owner)]
    values = [value for owner in (Accelerator, Trainer, module) for value in vars(owner).values()]
    return {**dict(zip(names, values, strict=True)), **{name: seam_value(name) for name in _SEAMS}}


def seam_value(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(sys.modules.get(module), attribute, None)


def test_disable_restores_everything(tmp_path: Path) -> None:
    before = everything()
    for _ in range(2):
        fastensor_accelerate.enable(SYNCHRONOUS)
        fastensor_accelerate.enable(ASYNCHRONOUS)
        assert fastensor_accelerate.is_enabled()
        changed = {name for name, value in everything().items() if value is not before.get(name)}
        assert changed >= {"Accelerator.save_state", "Trainer._save_checkpoint", "Trainer.train"}
        trainer(tmp_path).train()
        fastensor_accelerate.disable()
        fastensor_accelerate.disable()
        after = everything()
        assert after.keys() == before.keys()
        assert [name for name in before if after[name] is not before[name]] == []
        assert not fastensor_accelerate.is_enabled()


def ignore(*arguments: Any, **options: Any) -> None:
    pass


def test_what_is_replaced_in_a_save_is_restored_when_it_fails() -> None:
    before = everything()

    def fail() -> None:
        with replaced(StateFiles(Accelerator(cpu=True), SYNCHRONOUS, ignore)):
            assert not [name for name in _SEAMS if before[name] is not None and seam_value(name) is before[name]]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not [name for name in _SEAMS if seam_value(name) is not before[name]]


@pytest.mark.parametrize(
    "name",
    [
        "trainer.rotate_checkpoints",
        "trainer.safetensors",
        "modeling_utils.safe_save_file",
        "trainer_utils.safe_load_file",
        "Trainer._load_rng_state",
        "Trainer._push_from_checkpoint",
    ],
)
def test_a_version_without_a_seam_is_told_loudly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    older = {
        "trainer.rotate_checkpoints": "Trainer._rotate_checkpoints",
        "trainer_utils.safe_load_file": "modeling_utils.safe_load_file",
    }
    for place in (name, older.get(name, name)):
        owner, _, attribute = place.partition(".")
        module = Trainer if owner == "Trainer" else sys.modules[f"transformers.{owner}"]
        monkeypatch.delattr(module, attribute, raising=False)
    stock = dict(vars(Trainer))
    said = f"NOT saved or loaded by Fastensor.*{name.removeprefix('trainer.')}"
    with pytest.warns(UserWarning, match=said):
        fastensor_accelerate.enable(SYNCHRONOUS)
    try:
        assert dict(vars(Trainer)) == stock
        with pytest.warns(UserWarning, match=said):  # and when a Trainer makes its Accelerator
            Accelerator(cpu=True)
    finally:
        fastensor_accelerate.disable()


def test_shards_may_be_loaded_where_transformers_4_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = sys.modules["transformers.modeling_utils"], sys.modules["transformers.trainer_utils"]
    monkeypatch.setattr(older, "safe_load_file", safetensors.torch.load_file, raising=False)
    monkeypatch.delattr(newer, "safe_load_file", raising=False)
    assert missing_seams("transformers") == []
    files = StateFiles(Accelerator(cpu=True), SYNCHRONOUS, ignore)
    with replaced(files):
        assert older.safe_load_file == files.load_file
    assert older.safe_load_file is safetensors.torch.load_file
    monkeypatch.delattr(older, "safe_load_file")
    assert {*missing_seams("transformers")} == {f"{module.__name__}.safe_load_file" for module in (older, newer)}


def test_enable_before_transformers_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys\n"
        "import fastensor_accelerate\n"
        "fastensor_accelerate.enable()\n"
        "assert 'transformers.trainer' not in sys.modules\n"
        "import torch\n"
        "from transformers import Trainer, TrainingArguments\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x): return {'loss': super().forward(x).sum()}\n"
        f"args = TrainingArguments(**{options(Path('out'))!r})\n"
        "Trainer(model=Model(1, 1), args=args, train_dataset=[{'x': torch.ones(1)}] * 8).train()\n"
    )
    done = run(tmp_path / "train.py", folder=tmp_path)
    assert "fastensor: saved 2 states (" in done.stderr
    assert "NOT saved" not in done.stderr
    assert fastensor.inspect(tmp_path / "out/checkpoint-4/model.safetensors").checked


@pytest.mark.parametrize("config", MODES)
def test_the_file_without_which_no_training_resumes_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: FastensorConfig
) -> None:
    """A checkpoint of a killed process is whole, or a Trainer refuses it."""
    there: list[set[str]] = []
    publish = transformers_trainer.publish_last

    def look(hidden: str, path: str) -> None:
        assert not os.path.exists(path)
        there.append({*os.listdir(os.path.dirname(path))})
        publish(hidden, path)

    monkeypatch.setattr(transformers_trainer, "publish_last", look)
    with by(config):
        trainer(tmp_path).train()
    assert len(there) == 2
    for found, folder in zip(there, checkpoints(tmp_path), strict=True):
        last = {"trainer_state.json.saving"}
        assert found - last == {*os.listdir(tmp_path / folder)} - {"trainer_state.json"}
        assert last < found
