"""What users do on a GPU, beside the same without Fastensor: a part of ``make gpu``.

Each program says what came of it, and fails if that is not what it has to be. What takes long to import or to compile
comes last. Nothing begins after the time that is given.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_results import Row, Rows
from measuring import describe_gpu_machine, synchronize
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.offload import ActivationOffload, OffloadConfig


class WrongError(Exception):
    """What came of a program is not what it has to be."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where programs run, where their files go, and how large they are."""

    device: str
    folder: Path
    width: int = 512
    blocks: int = 6
    tokens: int = 256
    batch: int = 8
    large_numbers: int = 64 << 20
    """The elements of a tensor that takes a while to be copied."""

    def model(self) -> nn.Module:
        """The same weights each time."""
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.width) for _ in range(self.blocks)))

    def batches(self, count: int = 1) -> Tensor:
        return torch.randn(count * self.batch, self.tokens, self.width, generator=torch.Generator().manual_seed(1))

    def offload(self) -> ActivationOffload:
        return ActivationOffload(OffloadConfig(schedule="all", directories=(str(self.folder),), min_bytes=1 << 12))


class Block(nn.Module):
    """One of GPT's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.attention(self.before_attention(x)).view(batch, tokens, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        found: Tensor = x + self.inner(self.before_inner(x))
        return found


Program = Callable[[Place], str]
PROGRAMS: dict[str, Program] = {}


def program(title: str) -> Callable[[Program], Program]:
    def add(function: Program) -> Program:
        PROGRAMS[title] = function
        return function

    return add


def expect(what: str, holds: bool) -> None:
    """
    Raises:
        WrongError: it does not hold.
    """
    if not holds:
        raise WrongError(what)


def all_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def timed(action: Callable[[], object], device: str) -> float:
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started


@program("asynchronous saves while training goes on")
def save_while_training(place: Place) -> str:
    weight, path = torch.zeros(place.large_numbers, device=place.device), place.folder / "async.ckpt"
    with fastensor.AsyncWriter() as writer:
        for number in range(6):
            weight.fill_(number)
            handle = writer.save({"weight": weight}, path)
            for _ in range(20):
                weight.add_(1.0)
            handle.result()
            saved = torch.load(path, "cpu")["weight"]
            expect(f"save {number} holds what the weight was", bool((saved == number).all()))
    return "each file holds what the weight was when it was saved"


@program("models and float8: save, load, read by safetensors")
def models(place: Place) -> str:
    net, other = place.model().to(place.device), place.model().to(place.device)
    fastensor.save_model(net, place.folder / "model.safetensors")
    for one in other.parameters():
        one.data.zero_()
    fastensor.load_model(other, place.folder / "model.safetensors")
    expect("the model is loaded", all_equal([*net.parameters()], [*other.parameters()]))
    read = load_file(place.folder / "model.safetensors", device=place.device)
    expect("safetensors reads it", all(torch.equal(read[name], one) for name, one in net.state_dict().items()))
    eighths = torch.randn(100, 100, device=place.device).to(torch.float8_e4m3fn)
    fastensor.save({"eighths": eighths, "host": torch.ones(3)}, place.folder / "float8.ckpt")
    found = fastensor.load(place.folder / "float8.ckpt")
    expect("float8 is the same", torch.equal(found["eighths"].view(torch.uint8), eighths.view(torch.uint8)))
    where = [one.device.type for one in found.values()]
    expect(f"tensors are where they were, not on {where}", where == [place.device, "cpu"])
    return "equal"


@program("gradient checkpointing of both kinds, and offload")
def checkpointing(place: Place) -> str:
    net, x, counts = place.model().to(place.device), place.batches().to(place.device), []

    def gradients(reentrant: bool, offload: ActivationOffload | None) -> list[Tensor]:
        net.zero_grad()
        y = x.clone().requires_grad_()
        with nullcontext() if offload is None else offload.step():
            for block in net.children():
                y = checkpoint(block, y, use_reentrant=reentrant)
            loss = y.square().mean()
        loss.backward()
        return [one.grad.clone() for one in net.parameters() if one.grad is not None]

    for reentrant in (True, False):
        expected = gradients(reentrant, None)
        with place.offload() as offload:
            for _ in range(3):
                found = gradients(reentrant, offload)
            expect(f"gradients are equal, reentrant={reentrant}", all_equal(found, expected))
            counts.append(offload.statistics().offloaded)
    expect("the inputs of checkpointed blocks are offloaded", all(counts))
    return f"gradients equal; {counts[0]} and {counts[1]} tensors offloaded in three steps"


@program("torch.distributed.checkpoint, 16 tensors")
def distributed_checkpoint(place: Place) -> str:
    state = {str(number): torch.randn(place.large_numbers // 16, device=place.device) for number in range(16)}
    ours, theirs = place.folder / "dcp", place.folder / "dcp-torch"
    writer = FastensorStorageWriter(ours)
    seconds = timed(lambda: save_dcp(state, storage_writer=writer, no_dist=True), place.device)
    torchs = FileSystemWriter(theirs, thread_count=4)
    torchs_seconds = timed(lambda: save_dcp(state, storage_writer=torchs, no_dist=True), place.device)
    found = {name: torch.zeros_like(one) for name, one in state.items()}
    load_dcp(found, storage_reader=FastensorStorageReader(ours), no_dist=True)
    expect("the tensors are loaded", all_equal([*found.values()], [*state.values()]))
    return f"equal; {seconds:.2f} s, durable; torch's storage, not durable, {torchs_seconds:.2f} s"


@program("Accelerate: save_state, load_state")
def accelerate(place: Place) -> str:
    import fastensor_accelerate

    accelerator = importlib.import_module("accelerate").Accelerator(cpu=place.device == "cpu", mixed_precision="bf16")
    model = place.model()
    net, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x = place.batches().to(accelerator.device)
    with enabled(fastensor_accelerate):
        for _ in range(2):
            accelerator.backward(net(x).float().square().mean())
            optimizer.step()
        seconds = timed(lambda: accelerator.save_state(str(place.folder / "state")), place.device)
        expected = [one.detach().clone() for one in net.parameters()]
        for one in net.parameters():
            one.data.zero_()
        accelerator.load_state(str(place.folder / "state"))
    expect("the weights are loaded", all_equal([*net.parameters()], expected))
    momenta = next(iter(optimizer.state.values()))["exp_avg"]
    expect("the optimizer's state is on the device", momenta.device.type == place.device)
    return f"equal; saved in {seconds:.2f} s"


@contextmanager
def enabled(adapter: Any) -> Iterator[None]:
    """Accelerators save and load by Fastensor."""
    adapter.enable()
    try:
        yield
    finally:
        adapter.disable()


@program("Lightning: offload, asynchronous saves, resumed")
def lightning(place: Place) -> str:
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    from fastensor_lightning import FastensorCheckpointIO, SSDActivationOffload

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = place.model()
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).float().square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    data = torch.utils.data.TensorDataset(place.batches(4))

    def losses(name: str, plugins: list[Any], callbacks: list[Any], resumed: Path | None = None) -> list[float]:
        seed_everything(0, verbose=False)
        module = Module()
        saves = ModelCheckpoint(place.folder / name, every_n_train_steps=2, save_top_k=-1)
        trainer = Trainer(
            accelerator="cpu" if place.device == "cpu" else "gpu", devices=1, precision="bf16-mixed", max_steps=6,
            plugins=plugins, callbacks=[*callbacks, saves], logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=place.folder,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=place.batch), ckpt_path=resumed)
        return module.losses

    offload = SSDActivationOffload(str(place.folder), schedule="all", min_bytes=1 << 12)
    stock = losses("stock", [], [])
    expect("losses are equal with offload", losses("ours", [FastensorCheckpointIO()], [offload]) == stock)
    expect("losses are equal with asynchronous saves",
           losses("async", [FastensorCheckpointIO(asynchronous=True)], []) == stock)  # fmt: skip
    first = {name: min((place.folder / name).iterdir()) for name in ("stock", "ours", "async")}
    expected = losses("resumed-stock", [], [], first["stock"])
    for name, path in first.items():
        found = losses(f"resumed-{name}", [FastensorCheckpointIO(map_location=place.device)], [], path)
        expect(f"losses are equal, resumed from the file of {name}", found == expected)
    loaded = FastensorCheckpointIO(map_location=place.device).load_checkpoint(first["ours"])["state_dict"]
    devices = {one.device.type for one in loaded.values()}
    expect(f"the file is loaded straight to the device, not to {devices}", devices == {place.device})
    return "losses equal to the last bit, resumed ones too"


@program("transformers.Trainer: a small Llama in bf16")
def transformers(place: Place) -> str:
    import fastensor_accelerate

    library = importlib.import_module("transformers")
    config = library.LlamaConfig(
        vocab_size=512, hidden_size=place.width // 2, intermediate_size=place.width, num_hidden_layers=place.blocks,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    words = torch.randint(0, 512, (64, min(place.tokens, 128)), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": one, "labels": one} for one in words]

    def losses(name: str, resumed: str | None = None) -> list[float]:
        torch.manual_seed(0)
        arguments = library.TrainingArguments(
            str(place.folder / name), per_device_train_batch_size=4, max_steps=8, save_steps=4, logging_steps=1,
            bf16=True, report_to=[], disable_tqdm=True, seed=0, use_cpu=place.device == "cpu",
        )  # fmt: skip
        trainer = library.Trainer(library.LlamaForCausalLM(config), arguments, train_dataset=data)
        trainer.train(resume_from_checkpoint=resumed and str(place.folder / resumed))
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    stock = losses("hf-stock")
    with enabled(fastensor_accelerate):
        expect("losses are equal", losses("hf-ours") == stock)
        for name in ("hf-ours", "hf-stock"):
            found = losses(f"{name}-by-ours", f"{name}/checkpoint-4")
            expect(f"losses are equal, resumed from the files of {name}", found[-4:] == stock[-4:])
    found = losses("hf-ours-by-stock", "hf-ours/checkpoint-4")
    expect("losses are equal, our files resumed without Fastensor", found[-4:] == stock[-4:])
    return "losses equal to the last bit; files of either side are resumed by either side"


@program("torch.compile and offload")
def compiled(place: Place) -> str:
    net, x = place.model().to(place.device), place.batches().to(place.device)
    # The compiler proper takes long on a CPU, where this program is tried only.
    compiled_net = torch.compile(net, backend="aot_eager" if place.device == "cpu" else "inductor")

    def gradients(offload: ActivationOffload | None) -> list[Tensor]:
        net.zero_grad()
        with nullcontext() if offload is None else offload.step():
            loss = compiled_net(x).square().mean()
        loss.backward()
        return [one.grad.clone() for one in net.parameters() if one.grad is not None]

    expected = gradients(None)
    with place.offload() as offload:
        offload.attach(net)
        for _ in range(3):
            found = gradients(offload)
        count = offload.statistics().offloaded
    expect("gradients are equal", all_equal(found, expected))
    expect("tensors are offloaded", count > 0)
    return f"gradients equal; {count} tensors offloaded in three steps"


@program("fastensor doctor")
def doctor(place: Place) -> str:
    from fastensor.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(["doctor", "--quick", str(place.folder)])
    print(out.getvalue())
    expect(f"its status is 0, not {status}", status == 0)
    found = [line for line in out.getvalue().splitlines() if line.startswith("GDS ")]
    expect("it says what there is of GDS", bool(found))
    return " ".join(found[0].split())[:100]


def run(rows: Rows, title: str, place: Place) -> None:
    """Have a program run, and add what came of it, whatever that is."""
    rows.begin(title)
    started = time.monotonic()
    try:
        row = Row(title, PROGRAMS[title](place), holds=True)
    except ImportError as error:
        row = Row(title, f"not tried: {error}")
    except Exception as error:  # noqa: BLE001  # of any library: it is shown
        traceback.print_exc()
        row = Row(title, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", holds=False)
    rows.details = {**(rows.details or {}), title: round(time.monotonic() - started, 1)}
    rows.add(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, for trying the programs themselves")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--seconds", type=float, default=120.0, help="no program begins after that")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu-use.json"))
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    small: dict[str, int] = {"width": 64, "blocks": 2, "tokens": 16, "batch": 2, "large_numbers": 64 << 10}
    rows = Rows.at(options.output)
    rows.machine = describe_gpu_machine(options.folder, options.device)
    for title in options.programs:
        if time.monotonic() > end:
            rows.add(Row(title, "not begun: the time was up"))
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            run(rows, title, Place(options.device, Path(folder), **(small if options.tiny else {})))
    rows.end()
    return int(any(row.holds is False for row in rows.rows))


if __name__ == "__main__":
    sys.exit(main())
