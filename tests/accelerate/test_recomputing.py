"""Blocks of transformers' models are computed again in its Trainer, TRL's and Lightning's: the weights are the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from accelerate import Accelerator
from recomputing import MEASURED, a_slow_disk, plans_that_recompute
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fastensor_accelerate
from fastensor.offload import ActivationOffload, OffloadConfig
from fastensor_accelerate import FastensorConfig, attach
from fastensor_lightning import SSDActivationOffload

transformers = pytest.importorskip("transformers")

LAYERS, STEPS, ROWS, LENGTH, WORDS = 3, MEASURED + 2, 4, 16, 64
SIZE = {"num_hidden_layers": LAYERS, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
OF_WORDS = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2, "use_cache": False}  # fmt: skip
RECOMPUTING = FastensorConfig(offload=True, offload_schedule=1 << 30, offload_min_bytes=256, offload_recompute="auto")


def causal(kind: str, **options: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **SIZE, **OF_WORDS, num_key_value_heads=2, **options)
    found: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return found


def llama() -> nn.Module:
    return causal("llama", attention_dropout=0.1)


def mixtral() -> nn.Module:
    return causal("mixtral", num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)


def bert() -> nn.Module:
    found: nn.Module = transformers.AutoModelForMaskedLM.from_config(
        transformers.AutoConfig.for_model("bert", **SIZE, **OF_WORDS)
    )
    return found


def vit() -> nn.Module:
    config = transformers.AutoConfig.for_model("vit", **SIZE, image_size=16, patch_size=4, num_labels=3)
    config.hidden_dropout_prob = 0.1
    found: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
    return found


MODELS = {"llama": llama, "mixtral": mixtral, "bert": bert, "vit": vit}


def rows(name: str) -> list[dict[str, Tensor]]:
    """Rows of words have different lengths, so that masks matter."""
    chance = torch.Generator().manual_seed(0)
    if name == "vit":
        return [{"pixel_values": torch.randn(3, 16, 16, generator=chance), "labels": torch.tensor(i % 3)}
                for i in range(ROWS * STEPS)]  # fmt: skip
    found = []
    for number in range(ROWS * STEPS):
        words = torch.randint(3, WORDS, (LENGTH,), generator=chance)
        mask = torch.arange(LENGTH) < LENGTH - number % 5
        found.append({"input_ids": words * mask, "labels": words, "attention_mask": mask.long()})
    return found


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 10 and all(map(torch.equal, found, expected))


@pytest.fixture(autouse=True)
def _disabled_at_the_end() -> Iterator[None]:
    yield
    fastensor_accelerate.disable()


def options(folder: Path, **others: Any) -> dict[str, Any]:
    given = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": ROWS, "use_cpu": True,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    return given | others


def recomputed(capsys: pytest.CaptureFixture[str]) -> int:
    """What the line says that is printed when training ends."""
    err = capsys.readouterr().err
    assert "fastensor: activation offload of " in err
    found = re.search(r"(\d+) blocks computed again", err)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("others", [{}, {"bf16": True}, {"gradient_accumulation_steps": 2, "max_steps": 2}],
                         ids=["plain", "bf16", "accumulation"])  # fmt: skip
def test_models_of_transformers_in_its_trainer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, others: dict[str, Any]
) -> None:
    def train() -> list[Tensor]:
        torch.manual_seed(0)
        model = MODELS[name]()
        arguments = transformers.TrainingArguments(**options(tmp_path, **others))
        transformers.Trainer(model, arguments, train_dataset=rows(name)).train()
        return weights(model)

    expected = train()
    fastensor_accelerate.enable(RECOMPUTING)
    capsys.readouterr()
    with plans_that_recompute():
        assert same(train(), expected)
    assert recomputed(capsys) == LAYERS * (STEPS - MEASURED)


class InLightning(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], index: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_models_of_transformers_in_lightning(tmp_path: Path, name: str, precision: Any) -> None:
    def train(*callbacks: pl.Callback) -> list[Tensor]:
        torch.manual_seed(0)
        model = MODELS[name]()
        trainer = pl.Trainer(
            max_steps=STEPS, accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=list(callbacks),
        )  # fmt: skip
        trainer.fit(InLightning(model), DataLoader(rows(name), batch_size=ROWS))  # type: ignore[arg-type]
        return weights(model)

    expected = train()
    callback = SSDActivationOffload(schedule=1 << 30, min_bytes=256, recompute="auto")
    with plans_that_recompute():
        assert same(train(callback), expected)
    assert callback.statistics is not None
    assert callback.statistics.recomputed == LAYERS * (STEPS - MEASURED)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_models_that_checkpoint_their_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reentrant: bool
) -> None:
    """``gradient_checkpointing``: what leaves are the inputs of layers, and nothing is computed again by us."""

    def train(checkpoints: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = MODELS[name]()
        arguments = transformers.TrainingArguments(
            **options(tmp_path, gradient_checkpointing=checkpoints),
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        transformers.Trainer(model, arguments, train_dataset=rows(name)).train()
        return weights(model)

    expected = train(False)
    fastensor_accelerate.enable(
        FastensorConfig(offload=True, offload_schedule=0.3, offload_min_bytes=256, offload_recompute="auto")
    )
    capsys.readouterr()
    with a_slow_disk():
        assert same(train(True), expected)
    assert recomputed(capsys) == 0


@pytest.mark.parametrize("adapters", [False, True])
def test_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str], adapters: bool) -> None:
    """Supervised fine-tuning, with LoRA over frozen weights as well."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    peft = pytest.importorskip("peft") if adapters else None
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[EOS]", *(f"w{number}" for number in range(WORDS - 2))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[PAD]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    texts = [" ".join(f"w{(i * step) % 60}" for step in range(5 + i % 4)) for i in range(ROWS * STEPS)]

    def train() -> list[Tensor]:
        torch.manual_seed(0)
        trainer = trl.SFTTrainer(
            model=llama(),
            args=trl.SFTConfig(**options(tmp_path, max_length=LENGTH, bf16=False, gradient_checkpointing=False)),
            train_dataset=datasets.Dataset.from_dict({"text": texts}),
            processing_class=transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[EOS]"
            ),
            peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1) if peft else None,
        )
        trainer.train()
        return weights(trainer.model)

    expected = train()
    fastensor_accelerate.enable(RECOMPUTING)
    capsys.readouterr()
    with plans_that_recompute():
        assert same(train(), expected)
    assert recomputed(capsys) > 0


def test_a_cache_of_keys_and_values_is_not_computed_twice() -> None:
    """A model of transformers that is called as it is fills one, to which its layers append. Trainers switch it off."""

    def gradients(offload: ActivationOffload | None, use_cache: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = llama()
        if offload is not None:
            offload.attach(model)
        found: list[Tensor] = []
        for _ in range(STEPS):
            words = torch.randint(3, WORDS, (ROWS, LENGTH))
            model.zero_grad()
            torch.manual_seed(1)
            if offload is None:
                loss = model(input_ids=words, labels=words, use_cache=use_cache).loss
            else:
                with offload.step():
                    loss = model(input_ids=words, labels=words, use_cache=use_cache).loss
            loss.backward()
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        return found

    config = OffloadConfig(schedule=1 << 30, min_bytes=256, recompute="auto")
    for use_cache in (True, False):
        with plans_that_recompute(), ActivationOffload(config) as offload:
            assert same(gradients(offload, use_cache), gradients(None, use_cache))
            if not use_cache:
                assert offload.statistics().recomputed == LAYERS * (STEPS - MEASURED)
            elif transformers.__version__ >= "5":  # earlier ones say how torch can make a cache of its tensors again
                assert offload.statistics().recomputed == 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(32, 32), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x).sigmoid())


def scripted(accelerator: Accelerator, prepare: Callable[[nn.Module], nn.Module] = lambda model: model) -> list[Tensor]:
    """The weights after an unchanged script."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer() for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(prepare(model), optimizer)
    for step in range(STEPS):
        x = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(step))
        accelerator.backward(prepared(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    assert not any("forward" in vars(one) for one in list(model.modules())[1:])
    return weights(model)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("pattern", ["auto", "1,3"])
def test_the_flag(capsys: pytest.CaptureFixture[str], precision: str, pattern: str) -> None:
    expected = scripted(Accelerator(cpu=True, mixed_precision=precision))
    capsys.readouterr()
    fastensor_accelerate.enable(
        FastensorConfig.from_mapping(
            {"offload": True, "offload_schedule": 1 << 30, "offload_min_bytes": 1, "offload_recompute": pattern}
        )
    )
    with plans_that_recompute():
        assert same(scripted(Accelerator(cpu=True, mixed_precision=precision)), expected)
    assert recomputed(capsys) == (6 if pattern == "auto" else 2) * (STEPS - MEASURED)


def test_attached_by_the_script() -> None:
    config = OffloadConfig(schedule=1 << 30, min_bytes=1, recompute="auto")
    offloads: list[ActivationOffload] = []

    def attached(model: nn.Module) -> nn.Module:
        offloads.append(attach(model, config))
        return model

    expected = scripted(Accelerator(cpu=True))
    fastensor_accelerate.enable(FastensorConfig(offload=True))
    with plans_that_recompute():
        assert same(scripted(Accelerator(cpu=True), attached), expected)
    assert offloads[0].statistics().recomputed == 6 * (STEPS - MEASURED)
