"""Everything that people read ``.safetensors`` files with reads each file that Fastensor writes: readers × writers.

A way to write such a file belongs into ``WRITERS``, and a library that reads them into ``READERS``. Some libraries take
a file without any metadata, or one whose metadata name a format, and refuse all others.
"""

from __future__ import annotations

import importlib.util
import inspect
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accelerate.utils import OffloadedWeightsLoader
from accelerate.utils import load_state_dict as load_by_accelerate
from accelerators import begin_anew, by
from torch.distributed.checkpoint.filesystem import SerializationFormat

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.checkpoint.dcp import FastensorStorageWriter
from fastensor_accelerate import FastensorConfig

hub = pytest.importorskip("huggingface_hub")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

FILE = "model.safetensors"
TIED = {"lm_head.weight", "transformer.wte.weight"}
"""One tensor of the model. A file has one of its names."""


def model() -> Any:
    transformers.set_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0)
    )


def empty_model() -> Any:
    """The model with other values."""
    found = model()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.fill_(-1)
    return found


def weights() -> dict[str, torch.Tensor]:
    """The tensors of the model, each once."""
    return {name: one.clone() for name, one in model().state_dict().items() if name != "lm_head.weight"}


def as_ckpt(folder: Path) -> Path:
    path = folder.with_suffix(".ckpt")
    fastensor.save(weights(), path)
    return path


def as_stock(folder: Path, metadata: dict[str, str] | None = None) -> Path:
    path = folder.with_suffix(".safetensors")
    safetensors.torch.save_file(weights(), path, metadata)
    return path


# --- who writes


def save_in_file(folder: Path) -> None:
    with open(folder / FILE, "wb") as file:
        fastensor.save(weights(), file, container="safetensors")


def save_later(folder: Path) -> None:
    with fastensor.AsyncWriter() as writer:
        writer.save(weights(), folder / FILE)


def save_distributed(folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = FastensorStorageWriter(folder.with_suffix(".dcp"), **options)
        dcp.save(weights(), storage_writer=writer, no_dist=True)
    return folder.with_suffix(".dcp")


def save_shard(folder: Path) -> None:
    """A file of a distributed checkpoint that is one of safetensors by itself."""
    (path,) = save_distributed(folder, serialization_format=SerializationFormat.SAFETENSORS).glob("*.distcp")
    shutil.copy(path, folder / FILE)


def convert_distributed(folder: Path, **options: Any) -> None:
    fastensor.convert(save_distributed(folder), folder if options else folder / FILE, **options)


def convert_quietly(source: Path, target: Path, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastensor.UnverifiedCheckpointWarning)
        fastensor.convert(source, target, **options)


def convert_command(folder: Path) -> None:
    from fastensor.cli.main import main

    assert main(["convert", str(as_stock(folder)), str(folder / FILE)]) == 0


def state_of_accelerate(folder: Path) -> None:
    begin_anew()
    with by(FastensorConfig()):
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model())
        accelerator.save_state(str(folder))
    begin_anew()


def model_of_accelerate(folder: Path) -> None:
    begin_anew()
    with by(FastensorConfig()):
        accelerator = Accelerator(cpu=True)
        accelerator.save_model(model(), str(folder), max_shard_size="2kB")
    begin_anew()


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sentences of numbers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(8) % (index + 2)
        return {"input_ids": ids, "labels": ids}


def state_of_trainer(folder: Path) -> None:
    """A checkpoint of a training that has changed nothing."""
    begin_anew()
    args = TrainingArguments(
        output_dir=str(folder.with_suffix(".trainer")), max_steps=1, save_steps=1, use_cpu=True, report_to="none",
        disable_tqdm=True, logging_strategy="no", learning_rate=0.0, dataloader_pin_memory=False,
    )  # fmt: skip
    with by(FastensorConfig()):
        Trainer(model=model(), args=args, train_dataset=Numbers()).train()
    shutil.copytree(folder.with_suffix(".trainer") / "checkpoint-1", folder, dirs_exist_ok=True)
    begin_anew()


WRITERS: dict[str, Callable[[Path], object]] = {
    "save": lambda folder: fastensor.save(weights(), folder / FILE),
    "save, metadata": lambda folder: fastensor.save(weights(), folder / FILE, metadata={"step": "3"}),
    "save, no checksums": lambda folder: fastensor.save(weights(), folder / FILE, checksums=False),
    "save, open file": save_in_file,
    "save_model": lambda folder: fastensor.save_model(model(), folder / FILE),
    "save_sharded, one file": lambda folder: fastensor.save_sharded(model(), folder),
    "save_sharded": lambda folder: fastensor.save_sharded(model(), folder, shard_nbytes="2kB"),
    "save_sharded, metadata": lambda folder: fastensor.save_sharded(
        model(), folder, shard_nbytes="2kB", metadata={"step": "3"}
    ),
    "save_sharded, metadata, no checksums": lambda folder: fastensor.save_sharded(
        model(), folder, shard_nbytes="2kB", metadata={"step": "3"}, checksums=False
    ),
    "AsyncWriter": save_later,
    "cooperative.save": lambda folder: cooperative.save(weights(), folder / FILE),
    "convert, torch": lambda folder: fastensor.convert(as_ckpt(folder), folder / FILE),
    "convert, safetensors": lambda folder: convert_quietly(as_stock(folder), folder / FILE),
    "convert, safetensors with metadata": lambda folder: convert_quietly(
        as_stock(folder, {"step": "3"}), folder / FILE
    ),
    "convert, distributed": convert_distributed,
    "convert, command": convert_command,
    "convert, torch to huggingface": lambda folder: fastensor.convert(
        as_ckpt(folder), folder, container="huggingface", shard_nbytes="2kB"
    ),
    "convert, safetensors with metadata to huggingface": lambda folder: convert_quietly(
        as_stock(folder, {"step": "3"}), folder, container="huggingface", shard_nbytes="2kB"
    ),
    "convert, safetensors with metadata to huggingface, no checksums": lambda folder: convert_quietly(
        as_stock(folder, {"step": "3"}), folder, container="huggingface", shard_nbytes="2kB", checksums=False
    ),
    "convert, distributed to huggingface": lambda folder: convert_distributed(
        folder, container="huggingface", shard_nbytes="2kB"
    ),
    "FastensorStorageWriter": save_shard,
    "Accelerator.save_state": state_of_accelerate,
    "Accelerator.save_model": model_of_accelerate,
    "Trainer": state_of_trainer,
}


SHARDED = {writer for writer in WRITERS if "huggingface" in writer} | {
    "save_sharded", "save_sharded, metadata", "save_sharded, metadata, no checksums", "Accelerator.save_model"
}  # fmt: skip
"""Those of several files."""


# --- who reads


def each_file(read: Callable[[str], Mapping[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    """A reader of folders from one of files."""

    def read_all(folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in safetensors_in(folder):
            found.update(read(str(path)))
        return found

    return read_all


def safetensors_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def names_in(folder: Path) -> set[str]:
    return {name for path in safetensors_in(folder) for name in safetensors.torch.load_file(path)}


def opened(path: str) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(path, "pt") as file:
        return {name: file.get_slice(name)[:] for name in file.keys()}  # noqa: SIM118  # it is no mapping


def of_framework(framework: str) -> Callable[[Path], dict[str, Any]]:
    """The reader of safetensors for a framework."""

    def read(path: str) -> dict[str, Any]:
        module = importlib.import_module(f"safetensors.{framework}")
        return {name: np.asarray(one) for name, one in module.load_file(path).items()}

    return each_file(read)


def into_model(load: Callable[[Any, str], object]) -> Callable[[Path], dict[str, Any]]:
    """A reader of folders that gives what it fills a model with: some leave ties to their users."""

    def read(folder: Path) -> dict[str, Any]:
        found = empty_model()
        load(found, str(folder))
        return {name: one for name, one in found.state_dict().items() if name in names_in(folder)}

    return read


def file_into_model(load: Callable[[Any, str], object]) -> Callable[[Path], dict[str, Any]]:
    """A reader of folders from one that fills a model with what a file has."""

    def read(folder: Path) -> dict[str, Any]:
        found = empty_model()
        for path in safetensors_in(folder):
            load(found, str(path))
        return {name: one for name, one in found.state_dict().items() if name in names_in(folder)}

    return read


def dispatched(folder: Path) -> dict[str, Any]:
    """As Accelerate documents it: the model has no memory before."""
    with init_empty_weights():
        found = model()
    found.tie_weights()
    load_checkpoint_and_dispatch(found, folder, device_map=WHOLE)
    return dict(found.state_dict())


def state_by_accelerate(folder: Path) -> dict[str, Any]:
    """``load_state`` wants all that a state has; ``load_model`` of safetensors is what it reads weights by."""
    begin_anew()
    accelerator = Accelerator(cpu=True)
    found = accelerator.prepare(empty_model())
    whole = folder.with_suffix(".state")
    if not whole.exists():
        accelerator.save_state(str(whole))
    (path,) = safetensors_in(folder)
    shutil.copy(path, whole / FILE)
    accelerator.load_state(str(whole))
    begin_anew()
    return dict(found.state_dict())


def from_pretrained(folder: Path) -> dict[str, Any]:
    model().config.save_pretrained(folder)
    return dict(GPT2LMHeadModel.from_pretrained(folder).state_dict())


def by_torch(folder: Path) -> dict[str, Any]:
    """The reader that torch has for folders of Hugging Face."""
    state = {}
    for path in safetensors_in(folder):
        state.update({name: torch.zeros_like(one) for name, one in safetensors.torch.load_file(path).items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


def by_diffusers(path: str) -> dict[str, Any]:
    from diffusers.models.model_loading_utils import load_state_dict

    return dict(load_state_dict(path))


def offloaded(path: str) -> dict[str, Any]:
    with safetensors.safe_open(path, "pt") as file:
        index = {name: {"safetensors_file": path, "weight_name": name, "dtype": "float32"} for name in file.keys()}  # noqa: SIM118
    return dict(OffloadedWeightsLoader(index=index))


WHOLE = {"": "cpu"}
SPLIT = {"transformer": "cpu", "lm_head": "disk"}
READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "safetensors": each_file(safetensors.torch.load_file),
    "safetensors, bytes": each_file(lambda path: safetensors.torch.load(Path(path).read_bytes())),
    "safetensors, opened": each_file(opened),
    "safetensors, load_model": file_into_model(lambda found, path: safetensors.torch.load_model(found, path, False)),
    "safetensors, numpy": each_file(safetensors.numpy.load_file),
    "safetensors, flax": of_framework("flax"),
    "safetensors, mlx": of_framework("mlx"),
    "safetensors, tensorflow": of_framework("tensorflow"),
    "safetensors, paddle": of_framework("paddle"),
    "torch": by_torch,
    "accelerate, load_checkpoint_in_model": into_model(load_checkpoint_in_model),
    "accelerate, load_checkpoint_in_model of a file": file_into_model(load_checkpoint_in_model),
    "accelerate, load_checkpoint_and_dispatch": dispatched,
    "accelerate, load_state_dict": each_file(load_by_accelerate),
    "accelerate, load_state_dict to a device": each_file(lambda path: load_by_accelerate(path, WHOLE)),
    "accelerate, load_state_dict to several": each_file(lambda path: load_by_accelerate(path, SPLIT)),
    "accelerate, load_state": state_by_accelerate,
    "accelerate, OffloadedWeightsLoader": each_file(offloaded),
    "huggingface_hub, load_torch_model": into_model(hub.load_torch_model),
    "huggingface_hub, load_torch_model of a file": file_into_model(hub.load_torch_model),
    "huggingface_hub, load_state_dict_from_file": each_file(hub.load_state_dict_from_file),
    "transformers, from_pretrained": from_pretrained,
    "diffusers": each_file(by_diffusers),
}
OF_ONE_FILE = {"accelerate, load_state"}
REQUIRED = {
    "safetensors, flax": "jax",
    "safetensors, mlx": "mlx",
    "safetensors, tensorflow": "tensorflow",
    "safetensors, paddle": "paddle",
    "diffusers": "diffusers",
}
"""Packages that may be missing."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that a writer has written into."""
    folders: dict[str, Path] = {}

    def folder_of(writer: str) -> Path:
        if writer not in folders:
            folders[writer] = tmp_path_factory.mktemp("written") / "model"
            folders[writer].mkdir()
            WRITERS[writer](folders[writer])
        return folders[writer]

    return folder_of


def cells() -> Iterator[Any]:
    for reader in READERS:
        package = REQUIRED.get(reader)
        if package is not None and importlib.util.find_spec(package) is None:
            yield pytest.param(reader, "save", marks=pytest.mark.skip(reason=f"{package} is not installed"))
            continue
        for writer in WRITERS:
            if not (reader in OF_ONE_FILE and writer in SHARDED):
                yield reader, writer


@pytest.mark.parametrize(("reader", "writer"), [*cells()])
def test_everyone_reads_what_is_written(written: Callable[[str], Path], reader: str, writer: str) -> None:
    folder = written(writer)
    assert_is_the_model(READERS[reader](folder))


@pytest.mark.torture
def test_transformers_4_reads_what_is_written(written: Callable[[str], Path]) -> None:
    python = Path(sys.prefix, "transformers4", "bin", "python")
    if not python.exists():
        pytest.skip(f"{python} is missing (make torture)")
    # It leaves tied weights without values if a file has the name of them that ``safetensors.torch.save_model`` keeps.
    folders = [written(writer) for writer in WRITERS if writer != "save_model"]
    for folder in folders:
        model().config.save_pretrained(folder)
    script = Path(__file__).parents[1] / "transformers4" / "read.py"
    out = subprocess.run([python, script, *folders], check=True, capture_output=True, text=True).stdout
    assert out.splitlines()[-1].startswith("4.")
    for folder in folders:
        assert_is_the_model(torch.load(folder / "read.pt"))


ADAPTER_WRITERS: dict[str, Callable[[dict[str, torch.Tensor], Path], object]] = {
    "save": fastensor.save,
    "save, metadata": lambda state, path: fastensor.save(state, path, metadata={"step": "3"}),
    "AsyncWriter": lambda state, path: fastensor.AsyncWriter().save(state, path).result(),
    "convert": lambda state, path: (
        fastensor.save(state, path.with_suffix(".ckpt")),
        fastensor.convert(path.with_suffix(".ckpt"), path),
    ),
}


@pytest.mark.parametrize("writer", ADAPTER_WRITERS)
def test_peft_reads_adapters(tmp_path: Path, writer: str) -> None:
    adapted = peft.get_peft_model(model(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.uniform_()
    adapted.save_pretrained(str(tmp_path))
    state = {name: one.clone() for name, one in peft.get_peft_model_state_dict(adapted).items()}
    (tmp_path / "adapter_model.safetensors").unlink()
    ADAPTER_WRITERS[writer](state, tmp_path / "adapter_model.safetensors")
    found = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(model(), str(tmp_path)))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], one) for name, one in state.items())


LAYS_OUT = {
    "checkpoint/writing/save.py": "save",
    "checkpoint/dcp/writer.py": "FastensorStorageWriter",
    "testing/backends.py": "",
}
"""The modules that lay out files of safetensors, and writers that go through them."""


def test_what_writes_is_tried() -> None:
    """Who finds a new name here adds it to the writers."""
    tried = {writer.partition(",")[0] for writer in WRITERS}
    takes_checksums = {
        name
        for name in fastensor.__all__
        if inspect.isfunction(getattr(fastensor, name))
        and "checksums" in inspect.signature(getattr(fastensor, name)).parameters
    }
    assert takes_checksums | {"AsyncWriter", "cooperative.save"} <= tried
    root = Path(fastensor.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if "safetensors.plan(" in path.read_text()}
    assert found == LAYS_OUT.keys()
    assert {*LAYS_OUT.values()} - {""} <= tried


def assert_is_the_model(found: Mapping[str, Any]) -> None:
    expected = dict(model().state_dict())
    assert found.keys() - TIED == expected.keys() - TIED
    assert found.keys() & TIED
    for name, one in found.items():
        assert np.array_equal(
            np.asarray(one.detach() if isinstance(one, torch.Tensor) else one), expected[name].numpy()
        )
