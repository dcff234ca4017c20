"""Activation offload under the trainers that users have, beside their own gradient checkpointing.

Models of transformers with random weights are trained by ``transformers.Trainer``, by TRL's ``SFTTrainer`` (language
models only; nothing but LoRA's adapters trains) and by Lightning's ``Trainer``. Each run is a process of its own, the
ways take turns, and offload is switched on as users do it: by what ``--fastensor_offload`` does in an unchanged script,
or by Lightning's callback. The ways:

- ``none``: nothing;
- ``checkpointing``: ``gradient_checkpointing=True``; in Lightning ``model.gradient_checkpointing_enable()``;
- ``checkpointing, inputs moved``: the same, and the inputs of blocks are offloaded (``schedule="all"``);
- ``auto, room of checkpointing``: offload with ``recompute="auto"`` in the room that checkpointing needs: the saved
  tensors that it leaves in memory, and those of one block, which are counted in a step before all others
  (``memory_bytes``);
- ``default``: offload without options.

A *step* is what the trainer does with a batch, from the forward pass to the optimizer: the median without the first
five. *First* and *second* are these steps, relative to those of ``none``. *CPU* is what all threads of the process take
of the processors in a step. *Memory* is how far the process has grown at most since before the training; gradients and
the optimizer's state are a part of it. *Counted* is the most bytes of saved tensors in memory, by the offload's own
count; *moved* and *computed again* are the bytes and blocks of a step. Run by ``make bench``. What earlier runs have
measured stays in the results until it is measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import describe_machine, peak_of, preload, settle
from offload import WARM_UP, in_fresh_process, mib, ratio_of
from offload_contenders import Counted
from offload_limits import CHECKPOINTING, EQUAL, INPUTS_MOVED, NONE, options_of
from torch import Tensor, nn

from fastensor.offload import OffloadConfig, OffloadStatistics

DEFAULT = "default"
WAYS = (NONE, CHECKPOINTING, INPUTS_MOVED, EQUAL, DEFAULT)
TRL = "TRL"
CAUSAL = "CausalLM"
IMPORTED = ("fastensor_accelerate", "fastensor_lightning", "transformers.trainer", "trl.trainer.sft_trainer", "peft")
_HEADER = ("| | step, s | : none | first | second | CPU, s | memory, MiB | counted | moved | computed again |",
           "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """A model of transformers, and its batches."""

    kind: str
    task: str
    batch: int
    length: int
    """Words in a row, or the width of an image."""
    sizes: Mapping[str, int]

    def rows(self, batches: int) -> list[dict[str, Tensor]]:
        count, chance = self.batch * batches, torch.Generator().manual_seed(0)
        if self.kind == "vit":
            images = torch.randn(count, 3, self.length, self.length, generator=chance)
            return [{"pixel_values": image, "labels": torch.tensor(i % 2)} for i, image in enumerate(images)]
        words = torch.randint(3, self.sizes["vocab_size"], (count, self.length), generator=chance)
        return [{"input_ids": row, "labels": row} for row in words]


def sizes(width: int, layers: int, inner: int, **others: int) -> dict[str, int]:
    common = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner, "num_attention_heads": 4}
    return common | others


_WORDS = {"vocab_size": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_CAUSAL = _WORDS | {"num_key_value_heads": 2}
MODELS = {
    "Llama": Model("llama", CAUSAL, 8, 256, sizes(256, 8, 704, **_CAUSAL)),
    "Mixtral": Model("mixtral", CAUSAL, 8, 256, sizes(256, 6, 512, **_CAUSAL, num_local_experts=4)),
    "BERT": Model("bert", "MaskedLM", 8, 256, sizes(256, 8, 1024, **_WORDS)),
    "ViT": Model("vit", "ImageClassification", 8, 224, sizes(256, 8, 1024)),
    "tiny": Model("llama", CAUSAL, 4, 256, sizes(64, 3, 128, **_CAUSAL)),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One process. Bytes and blocks without offload are 0."""

    step_seconds: float
    first_seconds: float
    second_seconds: float
    cpu_seconds: float
    memory_nbytes: int
    loss: float
    """The mean of all steps."""
    weights: int
    """CRC32 of what was trained, at the end."""
    counted_nbytes: int
    moved_nbytes: int
    computed_again: float


@dataclass(frozen=True, slots=True)
class Training:
    """What all ways of a trainer and a model have in common."""

    trainer: str
    model: str
    steps: int
    folder: str


class Noting:
    """What the callback of a trainer notes of each step: its seconds, those of the processors, and the offload's
    statistics after it."""

    def __init__(self, statistics: Callable[[], OffloadStatistics | None]) -> None:
        self._statistics = statistics
        self._began = (0.0, 0.0)
        self.steps: list[tuple[float, float, OffloadStatistics | None]] = []

    def callback(self, base: type, begin: str, end: str) -> Any:
        """A callback whose methods ``begin`` and ``end`` note."""
        return type("NotingCallback", (base,), {begin: self._begin, end: self._end})()

    def _begin(self, *arguments: Any, **keywords: Any) -> None:
        self._began = time.perf_counter(), time.process_time()

    def _end(self, *arguments: Any, **keywords: Any) -> None:
        wall, cpu = self._began
        self.steps.append((time.perf_counter() - wall, time.process_time() - cpu, self._statistics()))


def by_transformers(of: Training, net: nn.Module, checkpoints: bool, options: Any) -> tuple[float, Noting]:
    """The mean loss, and the steps. ``options`` are those of an offload, or None."""
    import transformers

    import fastensor_accelerate
    from fastensor_accelerate.attached import offloads_of

    if options is not None:
        named = {f"offload_{name}": value for name, value in options.items()}
        fastensor_accelerate.enable(fastensor_accelerate.FastensorConfig(offload=True, **named))
    model = MODELS[of.model]
    arguments: dict[str, Any] = {
        "output_dir": of.folder, "max_steps": of.steps, "per_device_train_batch_size": model.batch, "use_cpu": True,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_strategy": "no",
        "gradient_checkpointing": checkpoints,
    }  # fmt: skip
    if of.trainer == TRL:
        trainer: Any = sft_trainer(net, arguments, model.rows(of.steps))
    else:
        trainer = transformers.Trainer(
            net, transformers.TrainingArguments(**arguments), train_dataset=model.rows(of.steps)
        )
    trainer.remove_callback(transformers.PrinterCallback)

    def statistics() -> OffloadStatistics | None:
        offloads = offloads_of(trainer.accelerator)
        return None if offloads is None else offloads._models[0].offload.statistics()

    noting = Noting(statistics)
    trainer.add_callback(noting.callback(transformers.TrainerCallback, "on_step_begin", "on_step_end"))
    return trainer.train().training_loss, noting


def sft_trainer(net: nn.Module, arguments: Mapping[str, Any], rows: list[dict[str, Tensor]]) -> Any:
    """TRL's, which wants a tokenizer for words that are numbers already, too."""
    import datasets
    import peft
    import tokenizers
    import transformers
    import trl

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "[EOS]": 2}, unk_token="[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")
    return trl.SFTTrainer(
        model=net,
        args=trl.SFTConfig(**arguments, max_length=None, bf16=False),
        train_dataset=datasets.Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in rows]}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    )


def by_lightning(of: Training, net: Any, checkpoints: bool, options: Any) -> tuple[float, Noting]:
    """As :func:`by_transformers`."""
    import lightning.pytorch as pl

    from fastensor_lightning import SSDActivationOffload

    losses: list[Tensor] = []

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net.train()

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=5e-5)

    if checkpoints:
        net.gradient_checkpointing_enable()
    offload = None if options is None else SSDActivationOffload(**options)
    noting = Noting(lambda: None if offload is None else offload.statistics)
    callback = noting.callback(pl.Callback, "on_train_batch_start", "on_train_batch_end")
    trainer = pl.Trainer(
        max_steps=of.steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=of.folder, callbacks=[*([offload] if offload else []), callback],
    )  # fmt: skip
    data: Any = MODELS[of.model].rows(of.steps)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=MODELS[of.model].batch))
    return float(torch.stack(losses).double().mean()), noting


TRAINERS = {"transformers": by_transformers, TRL: by_transformers, "Lightning": by_lightning}


def made(name: str) -> nn.Module:
    """The model of this name, with the same weights each time."""
    import transformers

    for function in (torch.exp, torch.sin, torch.tanh):
        function(torch.ones(1))  # the first call in several threads may be wrong: issue 188792 of pytorch
    torch.manual_seed(0)
    model = MODELS[name]
    config = transformers.AutoConfig.for_model(model.kind, **model.sizes)
    found: nn.Module = getattr(transformers, f"AutoModelFor{model.task}").from_config(config)
    return found


def train(of: Training, way: str, options: Mapping[str, Any] | None) -> Run:
    """All steps. ``options`` are those of an offload, or None."""
    net = made(of.model)
    with peak_of("cpu") as peak:
        loss, noting = TRAINERS[of.trainer](of, net, way in (CHECKPOINTING, INPUTS_MOVED), options)
    weights = 0
    for parameter in net.parameters():
        if parameter.requires_grad:
            weights = zlib.crc32(parameter.detach().numpy().data, weights)
    seconds, cpu_seconds, statistics = zip(*noting.steps, strict=True)
    counts: tuple[Any, ...] = (0, 0, 0)
    if options is not None:
        before, after, count = statistics[WARM_UP - 1], statistics[-1], of.steps - WARM_UP
        moved, again = after.offloaded_bytes - before.offloaded_bytes, after.recomputed - before.recomputed
        counts = after.peak_memory_bytes, moved // count, again / count
    cpu = median(cpu_seconds[WARM_UP:])
    return Run(median(seconds[WARM_UP:]), seconds[0], seconds[1], cpu, peak(), loss, weights, *counts)


def room_of_checkpointing(of: Training) -> int:
    """The bytes of saved tensors that checkpointing leaves in memory, and those of one block."""
    saved = []
    for checkpoints in (False, True):
        net, counted = made(of.model), Counted(OffloadConfig().min_bytes)
        with counted.step():
            TRAINERS[of.trainer](replace(of, steps=1), net, checkpoints, None)
        saved.append(counted.nbytes)
    everything, inputs = saved
    return inputs + (everything - inputs) // MODELS[of.model].sizes["num_hidden_layers"]


def options_in(way: str, room: int, folder: str) -> dict[str, Any] | None:
    """The options of an offload; None for ways without one."""
    if way in (NONE, CHECKPOINTING):
        return None
    return {"directories": (folder,)} | ({} if way == DEFAULT else options_of(way, room))


def measure(of: Training, rounds: int) -> dict[str, Any]:
    """All ways, in turns."""
    fresh = partial(in_fresh_process, start="forkserver")
    room = fresh(room_of_checkpointing, of)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in random.Random(number).sample(WAYS, len(WAYS)):
            settle()
            found = fresh(train, of, way, options_in(way, room, of.folder))
            print(of.trainer, of.model, way, found, flush=True)
            runs[way].append(asdict(found))
    return {"room": room, "runs": runs}


def report_one(found: Mapping[str, Any]) -> Iterator[str]:
    """A trainer and a model."""
    of = {way: [Run(**run) for run in runs] for way, runs in found["runs"].items()}
    yield from _HEADER
    for way, runs in of.items():
        middle = {name: median(getattr(run, name) for run in runs) for name in Run.__slots__}
        times = [f"{ratio_of(of, way, NONE, f'{which}_seconds'):.2f}" for which in ("step", "first", "second")]
        cells = [f"{middle['step_seconds']:.3f}", *times, f"{middle['cpu_seconds']:.2f}", mib(middle["memory_nbytes"])]
        of_offload = [mib(middle["counted_nbytes"]), mib(middle["moved_nbytes"]), f"{middle['computed_again']:g}"]
        cells += ["–"] * 3 if way in (NONE, CHECKPOINTING) else of_offload
        yield f"| {way} | {' | '.join(map(str, cells))} |"
    same = len({(run.loss, run.weights) for runs in of.values() for run in runs}) == 1
    step, memory = (ratio_of(of, EQUAL, CHECKPOINTING, name) for name in ("step_seconds", "memory_nbytes"))
    yield from ("", f"- losses and trained weights of all ways {'are equal' if same else '**differ**'}")
    yield (
        f"- in the room of checkpointing, {mib(found['room'])} MiB, a step takes {step:.2f} of one by checkpointing, "
        f"and the process grows by {memory:.2f} of what it grows by there"
    )


def report(results: Mapping[str, Any]) -> str:
    lines = ["# Activation offload under trainers", ""]
    for title, found in results.items():
        machine = ", ".join(f"{name}: {value}" for name, value in found["machine"].items())
        lines += [f"## {title}", "", *report_one(found), "", machine, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name != "tiny"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3, help="that are measured, after five to warm up")
    parser.add_argument("--directory", default=None, help="on the disk to use; default: the system's temporary one")
    parser.add_argument("--output", default="benchmarks/results/offload_trainers", help="without .md and .json")
    options = parser.parse_args()
    os.environ |= {"THP_MEM_ALLOC_ENABLE": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}  # of the processes
    preload(*IMPORTED)
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    data = output.with_suffix(".json")
    results: dict[str, Any] = json.loads(data.read_text()) if data.exists() else {}
    pairs = [(trainer, model) for trainer in options.trainers for model in options.models]
    pairs = [(trainer, model) for trainer, model in pairs if trainer != TRL or MODELS[model].task == CAUSAL]
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for trainer, model in pairs:
            of, machine = (
                Training(trainer, model, WARM_UP + options.steps, folder),
                describe_machine(Path(folder), "cpu"),
            )
            results[f"{trainer}, {model}"] = {"machine": machine, **measure(of, options.rounds)}
            data.write_text(json.dumps(results, indent=1) + "\n")
            output.with_suffix(".md").write_text(report(results) + "\n")
    print(report({title: results[title] for title in map(", ".join, pairs)}))


if __name__ == "__main__":
    main()
