"""Models run from checkpoints by Accelerate's own functions: the same outputs, in bounded memory."""

from __future__ import annotations

import copy
import json
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model, init_empty_weights
from accelerate.hooks import remove_hook_from_module
from accelerate.utils import offload_state_dict
from packaging.version import Version
from programs import run
from torch import Tensor, nn

import fastensor
from fastensor.errors import CheckpointReadError, CorruptCheckpointError, UnknownKeyError, UnsupportedContentError
from fastensor_accelerate import CheckpointMapping
from fastensor_accelerate.checkpoint_mapping import Order
from fastensor_accelerate.weight_files import Checkpoints

WIDTH = 32
BLOCK_NBYTES = WIDTH * WIDTH * 4
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")


class Block(nn.Module):
    """Its modules are called in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x)).tanh()
        return x + y


class Model(nn.Module):
    """An embedding, blocks, and a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool = False, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


TOKENS = torch.arange(20) % 50


def trained(**options: Any) -> Model:
    torch.manual_seed(0)
    model = Model(**options).eval()
    for block in model.blocks:
        assert isinstance(block, Block)
        assert block.norm.running_mean is not None
        nn.init.normal_(block.norm.running_mean)
    return model


def empty(**options: Any) -> Model:
    """On the meta device, buffers included."""
    with torch.device("meta"):
        return Model(**options).eval()


def with_buffers() -> Model:
    """On the meta device, but for buffers, which have the values that they begin with."""
    with init_empty_weights():
        return Model().eval()


def to_safetensors(model: nn.Module, folder: Path) -> Path:
    fastensor.save(model.state_dict(), folder / "model.safetensors", durable=False)
    return folder / "model.safetensors"


def to_safetensors_of_others(model: nn.Module, folder: Path) -> Path:
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    return folder / "model.safetensors"


def to_torch(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def to_ckpt(model: nn.Module, folder: Path) -> Path:
    fastensor.save(model.state_dict(), folder / "model.ckpt", durable=False)
    return folder / "model.ckpt"


def to_shards(model: nn.Module, folder: Path) -> Path:
    """Two shards, as ``save_pretrained`` and ``Accelerator.save_model`` name them."""
    state = model.state_dict()
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    files = {name: names[place % 2] for place, name in enumerate(state)}
    for file in names:
        fastensor.save({name: state[name] for name in state if files[name] == file}, folder / file, durable=False)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    return index


def to_offload_folder(model: nn.Module, folder: Path) -> Path:
    offload_state_dict(folder, dict(model.state_dict()))
    return folder


WRITERS = (to_safetensors, to_safetensors_of_others, to_torch, to_ckpt, to_shards, to_offload_folder)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of a trained model."""
    return to_safetensors(trained(), tmp_path)


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("read_ahead_bytes", [0, 2 * BLOCK_NBYTES, 1 << 20])
def test_cpu_offload_computes_what_the_model_does(
    write: Callable[[nn.Module, Path], Path], read_ahead_bytes: int, tmp_path: Path
) -> None:
    expected = trained()(TOKENS)
    model = empty()
    with CheckpointMapping(write(trained(), tmp_path), model, read_ahead_bytes=read_ahead_bytes) as weights:
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        for _ in range(3):
            assert torch.equal(model(TOKENS), expected)
        assert all(parameter.device.type == "meta" for parameter in model.parameters())


@pytest.mark.parametrize("write", WRITERS)
def test_dispatch_model_computes_what_the_model_does(write: Callable[[nn.Module, Path], Path], tmp_path: Path) -> None:
    expected, model = trained()(TOKENS), empty()
    with CheckpointMapping(write(trained(), tmp_path), model) as weights:
        # Nothing would be offloaded from the main device "cpu". torch.device("cpu") is not equal to it.
        places = dict.fromkeys(("embedding", "blocks", "head"), "cpu")
        dispatch_model(model, places, CPU, weights, offload_buffers=True, force_hooks=True)
        for _ in range(3):
            assert torch.equal(model(TOKENS), expected)
        assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_what_stock_disk_offload_has_written_computes_what_it_does(tmp_path: Path) -> None:
    stock = disk_offload(trained(), tmp_path, CPU, offload_buffers=True)
    model = empty()
    with CheckpointMapping(tmp_path / "index.json", model) as weights:
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        assert torch.equal(model(TOKENS), stock(TOKENS))


def test_removing_the_hooks_gives_the_weights_back(path: Path) -> None:
    model = trained()
    with CheckpointMapping(path, model) as weights:
        cpu_offload(model, CPU, state_dict=weights)
        remove_hook_from_module(model, recurse=True)
    assert torch.equal(model(TOKENS), trained()(TOKENS))


def test_accelerate_casts_to_the_dtype_of_the_model(path: Path) -> None:
    model = empty().to(torch.bfloat16)
    with CheckpointMapping(path, model) as weights:
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        assert torch.equal(model(TOKENS), trained().to(torch.bfloat16)(TOKENS))


def test_weights_in_a_checkpoint_of_a_training(tmp_path: Path) -> None:
    """What is beside the weights is left out."""
    state = {f"model.{name}": tensor for name, tensor in trained().state_dict().items()}
    fastensor.save(
        {"state_dict": state, "optimizer_states": [{"step": torch.ones(3)}], "epoch": 1}, tmp_path / "x.ckpt"
    )
    model = empty()
    with pytest.raises(
        UnknownKeyError, match=r"no weight is called 'embedding.weight', but .*prefix='state_dict.model.'"
    ):
        CheckpointMapping(tmp_path / "x.ckpt", model)
    with CheckpointMapping(tmp_path / "x.ckpt", model, prefix="state_dict.model.") as weights:
        assert list(weights) == list(trained().state_dict())
        assert "optimizer_states.0.step" not in weights
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        assert torch.equal(model(TOKENS), trained()(TOKENS))
    with pytest.raises(
        UnknownKeyError, match=r"expected names that begin with 'module\.', found 'state_dict\.model\.emb"
    ):
        CheckpointMapping(tmp_path / "x.ckpt", prefix="module.")


# --- ties ---


def tied_model() -> Model:
    """Tied on the meta device, as ``tie_weights`` of transformers does it after ``init_empty_weights``."""
    with init_empty_weights():
        model = Model(tied=True).eval()
    model.head.weight = model.embedding.weight
    return model


@pytest.mark.parametrize("write", [to_ckpt, to_torch, to_safetensors, to_offload_folder])
def test_tied_weights(write: Callable[[nn.Module, Path], Path], tmp_path: Path) -> None:
    """safetensors keep one name of them, as transformers writes files."""
    source: nn.Module = trained(tied=True)
    if write is to_safetensors:
        state = {name: tensor for name, tensor in source.state_dict().items() if name != "head.weight"}
        fastensor.save(state, tmp_path / "model.safetensors", durable=False)
        path = tmp_path / "model.safetensors"
    else:
        path = write(source, tmp_path)
    model = tied_model()
    with CheckpointMapping(path, model) as weights:
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        assert torch.equal(model(TOKENS), trained(tied=True)(TOKENS))


def test_tied_weights_have_one_memory_and_are_read_once(tmp_path: Path, reads: list[str]) -> None:
    with CheckpointMapping(to_ckpt(trained(tied=True), tmp_path)) as weights:
        first, second = weights["embedding.weight"], weights["head.weight"]
        assert first.data_ptr() == second.data_ptr()
        assert reads == ["embedding.weight"]
        view = first[1:]
        del first, second
        assert weights["head.weight"].data_ptr() == view.data_ptr() - WIDTH * 4  # its memory is still in use
        del view
        assert torch.equal(weights["head.weight"], trained(tied=True).head.weight)
    assert reads == ["embedding.weight"] * 2


def test_tied_weights_of_which_the_file_has_both(path: Path) -> None:
    """Copies are one tensor. Different values are those of another model."""
    state = fastensor.load(path)
    fastensor.save(state | {"head.weight": state["embedding.weight"].clone()}, path, durable=False)
    model = tied_model()
    with CheckpointMapping(path, model) as weights:
        assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
        cpu_offload(model, CPU, state_dict=weights)
        assert torch.equal(model(TOKENS), trained(tied=True)(TOKENS))
    fastensor.save(state, path, durable=False)
    with pytest.raises(
        UnsupportedContentError, match=r"ties 'embedding\.weight' and 'head\.weight', but .* different values for them"
    ):
        CheckpointMapping(path, tied_model())
    with CheckpointMapping(path, empty()) as weights:
        assert not torch.equal(weights["head.weight"], weights["embedding.weight"])
    fastensor.save(state | {"head.weight": state["embedding.weight"].half()}, path, durable=False)
    with pytest.raises(
        UnsupportedContentError, match=r"has them in different dtypes \(torch\.float\d\d, torch\.float\d\d\)"
    ):
        CheckpointMapping(path, tied_model())


def test_tied_weights_of_one_value_that_is_a_part_of_a_row(tmp_path: Path) -> None:
    """The stride of a dimension with one element may be any."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Parameter(torch.zeros(1))

    row = torch.arange(8.0)
    torch.save({"first": row[2:4:2], "second": row[2:5:2][:1]}, tmp_path / "x.bin")
    with CheckpointMapping(tmp_path / "x.bin", Scaled()) as weights:
        assert weights["first"].tolist() == weights["second"].tolist() == [2.0]


# --- buffers ---


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("make", [empty, with_buffers, Model])
def test_persistent_buffers_are_those_of_the_checkpoint(
    write: Callable[[nn.Module, Path], Path], make: Callable[[], Model], tmp_path: Path
) -> None:
    """Accelerate leaves them in the model, on the meta device or with the values that a new model has."""
    expected, model = trained()(TOKENS), make().eval()
    with CheckpointMapping(write(trained(), tmp_path), model) as weights:
        cpu_offload(model, CPU, state_dict=weights)
        assert torch.equal(model(TOKENS), expected)


class Scaled(nn.Module):
    """Buffers of all kinds, and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("same", self.scale)
        self.register_buffer("computed", torch.arange(3.0), persistent=False)
        self.register_buffer("nothing", None)
        self.inner = nn.BatchNorm1d(3, affine=False)


def scales(path: Path, **more: Tensor) -> Path:
    state = Scaled().state_dict() | {"scale": torch.tensor([1.0, 1.5, 2.0])} | more
    del state["same"]
    fastensor.save(state, path / "model.safetensors", durable=False)
    return path


def test_buffers_keep_their_dtypes_and_stay_tied(tmp_path: Path) -> None:
    model = Scaled()
    with CheckpointMapping(scales(tmp_path, computed=torch.zeros(3)), model):
        assert model.scale is model.same
        assert torch.equal(model.scale, torch.tensor([1.0, 1.5, 2.0], dtype=torch.bfloat16))
        assert torch.equal(model.computed, torch.arange(3.0))  # load_state_dict would leave it as it is, too
    model.scale += 1  # of this process, and with the file closed
    assert list(model.state_dict()) == list(Scaled().state_dict())


def test_a_buffer_that_no_checkpoint_holds_has_to_have_values(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Scaled()
    with pytest.raises(UnknownKeyError, match=r"buffer 'computed' of Scaled is not persistent.*init_empty_weights\(\)"):
        CheckpointMapping(scales(tmp_path), model)
    model.computed = torch.arange(3.0)
    with CheckpointMapping(tmp_path, model):
        assert not any(buffer.is_meta for buffer in model.buffers())


def test_a_buffer_that_is_missing(tmp_path: Path) -> None:
    """``load_state_dict`` refuses that as well, but for the number of batches, which early torch did not count."""
    state = Scaled().state_dict()
    del state["inner.num_batches_tracked"], state["same"]
    fastensor.save(state, tmp_path / "model.safetensors", durable=False)
    with CheckpointMapping(tmp_path, Scaled()):
        pass
    del state["inner.running_var"]
    fastensor.save(state, tmp_path / "model.safetensors", durable=False)
    with pytest.raises(
        UnknownKeyError, match=r"'inner.running_var'.*; 0 parameters and 1 buffer of Scaled are missing in all"
    ):
        CheckpointMapping(tmp_path, Scaled())


def test_a_buffer_of_another_shape(tmp_path: Path) -> None:
    model = Scaled()
    with pytest.raises(UnsupportedContentError, match=r"'scale' in the shape \[3\] that it has in Scaled, found \[4\]"):
        CheckpointMapping(scales(tmp_path, scale=torch.zeros(4)), model)
    assert torch.equal(model.scale, torch.ones(3, dtype=torch.bfloat16))


class Factor(nn.Linear):
    """Computes with what is neither a parameter nor a buffer."""

    factor = 1.0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.factor)

    def set_extra_state(self, state: Tensor) -> None:
        self.factor = state.item()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def test_extra_states_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    source, model = nn.Sequential(Factor(3, 3)), nn.Sequential(Factor(3, 3))
    source[0].factor = 3.0
    fastensor.save(source.state_dict(), tmp_path / "model.safetensors", durable=False)
    with CheckpointMapping(tmp_path, model) as weights, torch.no_grad():
        cpu_offload(model, CPU, state_dict=weights)
        assert torch.equal(model(torch.ones(1, 3)), source(torch.ones(1, 3)))
    parameters = {name: one for name, one in source.state_dict().items() if "extra" not in name}
    fastensor.save(parameters, tmp_path / "model.safetensors", durable=False)
    with pytest.raises(
        UnknownKeyError, match=r"Factor '0' has an extra state, and no tensor is called '0._extra_state'"
    ):
        CheckpointMapping(tmp_path, nn.Sequential(Factor(3, 3)))


def test_a_model_is_as_before_if_an_extra_state_is_missing(tmp_path: Path) -> None:
    source, model = (nn.Sequential(Factor(3, 3), nn.BatchNorm1d(3)) for _ in range(2))
    source[1].running_mean.fill_(2.0)
    parameters = {name: one for name, one in source.state_dict().items() if "extra" not in name}
    fastensor.save(parameters, tmp_path / "model.safetensors", durable=False)
    with pytest.raises(UnknownKeyError, match=r"without the model: then buffers are not filled, names .*, and nothing"):
        CheckpointMapping(tmp_path, model)
    assert not model[1].running_mean.any()


class Stateless(nn.Linear):
    """A module with an extra state that holds nothing, as those of TransformerEngine without FP8."""

    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("there is nothing to set")


@pytest.mark.parametrize("state", [None, torch.empty(0, dtype=torch.uint8), {}, b""], ids=repr)
def test_an_extra_state_that_holds_nothing_may_be_missing(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stateless, "state", state)
    model = nn.Sequential(Stateless(3, 3))
    fastensor.save(model[0].state_dict(prefix="0.") | {"0._extra_state": None}, tmp_path / "x.ckpt", durable=False)
    with CheckpointMapping(tmp_path / "x.ckpt", model) as weights:
        assert list(weights) == ["0.weight", "0.bias"]


def test_the_buffers_of_another_device_come_by_way_of_the_host(tmp_path: Path) -> None:
    """The model's buffers stay where they are. Accelerate moves them."""
    model = Scaled()
    with CheckpointMapping(scales(tmp_path), model, device="meta", backend="numpy"):
        assert model.scale.tolist() == [1.0, 1.5, 2.0]


# --- the order of reading ---


def asked(order: Order, names: str) -> list[str]:
    """What an order predicts after each of the names."""
    predicted = []
    for name in names:
        order.add(name)
        predicted.append("".join(order.following()))
    return predicted


def test_nothing_is_predicted_without_a_guess_but_what_was_seen() -> None:
    assert asked(Order(), "abcabc") == ["", "", "", "bc", "ca", "ab"]


def test_a_guess_is_corrected_by_the_first_pass() -> None:
    """A block asks for its norm ("n") first, which is registered last."""
    order = Order("qkvnQKVN")
    assert asked(order, "nqkvNQKV")[:5] == ["qkvQKVN", "kvQKVNn", "vQKVNnq", "QKVNnqk", "QKVnqkv"]
    assert asked(order, "n") == ["qkvNQKV"]


def test_what_a_guess_has_in_vain_is_given_up() -> None:
    names = [f"used {number}" for number in range(80)]
    order = Order(["unused", *names])
    for name in names:
        order.add(name)
        if "unused" not in order.following():
            break
    assert name == "used 63"


def test_a_part_that_is_repeated_is_predicted() -> None:
    """An encoder, and a decoder that runs for each token."""
    order = Order("eEdD")
    asked(order, "eEdDdD")
    assert asked(order, "dD") == ["D", "d"]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is read from files, in turn."""
    read, names = Checkpoints.read, list[str]()

    def noted(self: Checkpoints, name: str) -> Tensor:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(Checkpoints, "read", noted)
    return names


def wait_for_reads(weights: CheckpointMapping) -> None:
    """Until the thread has nothing to do."""
    weights._thread.submit(bool).result()


def test_the_first_pass_reads_ahead_in_the_order_of_the_model(path: Path, reads: list[str]) -> None:
    model = empty()
    parameters = [name for name, _ in model.named_parameters()]
    buffers = [name for name, _ in model.named_buffers()]
    with CheckpointMapping(path, model) as weights:
        assert reads == buffers
        reads.clear()
        weights["embedding.weight"]
        wait_for_reads(weights)
        assert reads == parameters
        for name in parameters[1:]:
            weights[name]
            wait_for_reads(weights)
        assert reads[: len(parameters)] == parameters


def test_without_a_model_the_second_pass_reads_ahead(path: Path, reads: list[str]) -> None:
    names = [f"blocks.{number}.linear.weight" for number in (2, 0, 1)]
    with CheckpointMapping(path) as weights:
        for name in names:
            weights[name]
            wait_for_reads(weights)
        assert reads == names
        weights[names[0]]
        wait_for_reads(weights)
        assert reads == names + names


def test_read_ahead_keeps_to_its_budget(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, ahead = Checkpoints.read, list[int]()
    model = empty()
    with CheckpointMapping(path, model, read_ahead_bytes=2 * BLOCK_NBYTES) as weights:

        def noted(self: Checkpoints, name: str) -> Tensor:
            ahead.append(sum(one.nbytes for one in weights._ahead.values()))
            return read(self, name)

        monkeypatch.setattr(Checkpoints, "read", noted)
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        for _ in range(2):
            assert torch.equal(model(TOKENS), trained()(TOKENS))
    assert BLOCK_NBYTES <= max(ahead) <= 2 * BLOCK_NBYTES


def test_what_is_larger_than_the_budget_is_read_when_it_is_asked_for(path: Path, reads: list[str]) -> None:
    model = empty()
    with CheckpointMapping(path, model, read_ahead_bytes=BLOCK_NBYTES) as weights:
        weights["blocks.2.norm.bias"]
        wait_for_reads(weights)
        assert "embedding.weight" not in reads
        assert torch.equal(weights["embedding.weight"], trained().embedding.weight)


def test_what_was_read_in_vain_is_kept_until_its_memory_is_needed(path: Path, reads: list[str]) -> None:
    linear = [f"blocks.{number}.linear.weight" for number in range(3)]
    with CheckpointMapping(path, read_ahead_bytes=2 * BLOCK_NBYTES) as weights:
        for name in [*linear, linear[0], "blocks.0.norm.bias"]:  # linear 1 and 2 are read ahead behind linear 0
            weights[name]
            wait_for_reads(weights)
        assert list(weights._ahead) == linear[1:]
        weights[linear[2]]  # it was kept; linear 0 and the bias are expected next, for which linear 1 has to go
        assert list(weights._ahead) == [linear[0], "blocks.0.norm.bias"]
        assert reads.count(linear[2]) == 2


def test_what_is_asked_for_is_read_before_what_is_expected(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, names, may_read = Checkpoints.read, list[str](), threading.Event()
    begun = threading.Event()

    def noted(self: Checkpoints, name: str) -> Tensor:
        names.append(name)
        if len(names) == 2:
            begun.set()
            assert may_read.wait(60)
        return read(self, name)

    model = empty()
    with CheckpointMapping(path, model) as weights:
        monkeypatch.setattr(Checkpoints, "read", noted)
        weights["embedding.weight"]
        assert begun.wait(60)  # the second one is being read, all others wait
        taken = weights._take("head.weight")
        may_read.set()
        assert torch.equal(taken.result(), trained().head.weight)
    assert names == ["embedding.weight", "blocks.0.linear.weight", "head.weight"]


# --- memory ---


def mapped(path: Path) -> int:
    """How many bytes of a file are mapped into this process."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):  # models of other tests may be mapped as well
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def test_memory_is_free_behind_a_forward_pass(path: Path) -> None:
    model = empty()
    with CheckpointMapping(path, model, read_ahead_bytes=0) as weights:
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        model(TOKENS)
        assert mapped(path) == 0
        weight = weights["head.weight"]
        assert mapped(path) >= weight.nbytes
    assert torch.equal(weight, trained().head.weight)  # closed, but in use
    del weight
    assert mapped(path) == 0


def test_memory_is_free_when_a_mapping_is_closed(path: Path) -> None:
    weights = CheckpointMapping(path, empty())
    weights["embedding.weight"]
    wait_for_reads(weights)
    assert mapped(path) > 0
    weights.close()
    weights.close()
    assert mapped(path) == 0
    with pytest.raises(ValueError, match=r"model\.safetensors.*: 23 weights, closed> is closed"):
        weights["embedding.weight"]


def test_one_that_is_forgotten_ends_its_thread_and_closes_its_files(path: Path) -> None:
    before = set(threading.enumerate())
    weights = CheckpointMapping(path, empty())
    weights["embedding.weight"]
    wait_for_reads(weights)
    (thread,) = set(threading.enumerate()) - before
    del weights
    thread.join(60)
    assert not thread.is_alive()
    assert mapped(path) == 0
    assert str(path) not in {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}


@pytest.mark.parametrize("write", WRITERS)
def test_what_is_written_to_a_tensor_stays_in_this_process(
    write: Callable[[nn.Module, Path], Path], tmp_path: Path
) -> None:
    with CheckpointMapping(write(trained(), tmp_path)) as weights:
        weights["head.weight"].zero_()
        assert torch.equal(weights["head.weight"], trained().head.weight)


LIMITED = """
import resource, sys, torch
from accelerate import cpu_offload
from torch import nn
from fastensor_accelerate import CheckpointMapping
path, limit, runs = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "mapping"
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + limit,) * 2)
weights = CheckpointMapping(path, model, read_ahead_bytes=16 << 20) if runs else dict(CheckpointMapping(path))
cpu_offload(model, torch.device("cpu"), state_dict=weights)
with torch.no_grad():
    print(model(torch.ones(1, 1024)).sum().item())
"""


def test_a_model_that_is_larger_than_memory(tmp_path: Path) -> None:
    """128 MiB of weights, and memory for half of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(32)))
    with torch.no_grad():
        for layer in model:  # exact, whatever kernels processors choose: each row has one number, a power of two
            layer.weight.copy_(torch.eye(1024)[torch.randperm(1024)] * 2.0 ** torch.randint(-1, 2, (1024, 1)))
        expected = model(torch.ones(1, 1024)).sum().item()
    path = to_safetensors(model, tmp_path)
    program = ("-c", LIMITED, str(path), str(64 << 20))
    assert float(run(*program, "mapping", accelerate=True).stdout) == pytest.approx(expected)
    assert "Cannot allocate memory" in run(*program, "dict", check=False, accelerate=True).stderr


# --- damage ---


def damage(path: Path, tensor: Tensor) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(tensor.detach().numpy().tobytes())] ^= 1
    path.write_bytes(data)


def test_damage_is_an_error_of_the_tensor_that_is_damaged(path: Path) -> None:
    damage(path, trained().head.weight)
    model = empty()
    with CheckpointMapping(path, model) as weights:
        weights["embedding.weight"]
        wait_for_reads(weights)  # of the head as well
        assert torch.equal(weights["blocks.1.linear.weight"], trained().state_dict()["blocks.1.linear.weight"])
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError, match=r"tensor 'head.weight' .*the file was damaged"):
                weights["head.weight"]
    with CheckpointMapping(path, model, verify=False) as weights:
        assert not torch.equal(weights["head.weight"], trained().head.weight)


def test_a_tensor_is_compared_once(path: Path) -> None:
    """A file whose time says that nothing was written shows it: the second time, nothing is compared."""
    before = os.stat(path)
    with CheckpointMapping(path) as weights:
        weights["head.weight"]
        damage(path, trained().head.weight)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert not torch.equal(weights["head.weight"], trained().head.weight)


@pytest.mark.parametrize("write", [to_safetensors, to_ckpt])
def test_a_file_that_is_written_to_meanwhile_is_an_error(
    write: Callable[[nn.Module, Path], Path], tmp_path: Path
) -> None:
    path = write(trained(), tmp_path)
    with CheckpointMapping(path) as weights:
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointReadError, match=r"the file was written to after it was opened"):
            weights["head.weight"]


def test_a_checkpoint_that_is_replaced_is_read_on(path: Path) -> None:
    """A save replaces a file whole; the old one stays while it is open."""
    with CheckpointMapping(path) as weights:
        fastensor.save({"head.weight": torch.zeros(3)}, path)
        assert torch.equal(weights["head.weight"], trained().head.weight)


def test_a_file_of_a_folder_that_is_replaced_is_an_error(tmp_path: Path) -> None:
    folder = to_offload_folder(trained(), tmp_path)
    with CheckpointMapping(folder) as weights:
        weights["head.weight"]
        os.replace(folder / "embedding.weight.dat", folder / "head.weight.dat")
        with pytest.raises(CheckpointReadError, match=r"replaced or written to meanwhile.*head\.weight\.dat"):
            weights["head.weight"]
        with pytest.raises(FileNotFoundError, match=r"embedding\.weight\.dat"):
            weights["embedding.weight"]


# --- what is refused ---


def test_a_weight_that_is_missing(path: Path) -> None:
    model = empty(blocks=4)
    with pytest.raises(
        UnknownKeyError, match=r"'blocks.3.linear.weight'.*nearest name is 'blocks.\d.linear.weight'; 4 par"
    ):
        CheckpointMapping(path, model)
    with CheckpointMapping(path) as weights, pytest.raises(KeyError, match=r"nearest name is 'head.weight'"):
        weights["heads.weight"]


def test_a_weight_of_another_shape(path: Path) -> None:
    model = empty()
    model.head = nn.Linear(WIDTH, 51, bias=False, device="meta")
    with pytest.raises(
        UnsupportedContentError, match=r"'head.weight' in the shape \[51, 32\] .* Model, found \[50, 32\]"
    ):
        CheckpointMapping(path, model)


def test_a_budget_that_is_none(path: Path) -> None:
    with pytest.raises(ValueError, match="read_ahead_bytes is at least 0, found -1"):
        CheckpointMapping(path, read_ahead_bytes=-1)


def test_a_tensor_that_is_not_dense(tmp_path: Path) -> None:
    torch.save({"sparse": torch.eye(3).to_sparse(), "dense": torch.eye(3)}, tmp_path / "x.bin")
    with CheckpointMapping(tmp_path / "x.bin") as weights:
        assert torch.equal(weights["dense"], torch.eye(3))
        for _ in range(2):
            with pytest.raises(UnsupportedContentError, match=r"'sparse' .* is more than its bytes"):
                weights["sparse"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[1", "the index is not JSON"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "expected 'weight_map', an object from names of tensors to names of files"),
        ('{"weight_map": {"a": 1}}', "expected 'weight_map'"),
        ('{"weight_map": {"nobody": "model.safetensors"}}', r"'nobody' is not in it \(1 of the tensors that the index"),
    ],
)
def test_an_index_that_is_none(index: str, message: str, path: Path) -> None:
    found = path.with_name("model.safetensors.index.json")
    found.write_text(index)
    with pytest.raises(CorruptCheckpointError, match=message):
        CheckpointMapping(found)


def test_of_a_folder_the_single_file_is_read_before_an_index(path: Path) -> None:
    path.with_name("model.safetensors.index.json").write_text("{}")
    with CheckpointMapping(path.parent) as weights:
        assert set(weights) == set(trained().state_dict())


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    index = to_shards(trained(), tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors"):
        CheckpointMapping(index)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"safetensors_file": "x"},
            r"'head.weight': expected a dtype of torch and a shape, as disk_offload writes them",
        ),
        ({"dtype": "float32", "shape": [-1]}, r"found the shape \[-1\]"),
        ({"dtype": "float32", "shape": [0, 1 << 40, 1 << 40]}, r"found the shape \[0, 1099"),
        (
            {"dtype": "float32", "shape": [50, 33]},
            r"expected 6600 bytes .*, found 6400; the folder was not written whole",
        ),
    ],
)
def test_a_folder_that_is_damaged(entry: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    to_offload_folder(trained(), tmp_path)
    index = tmp_path / "index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"head.weight": entry}))
    with pytest.raises(CorruptCheckpointError, match=message):
        CheckpointMapping(tmp_path)


def test_folders(tmp_path: Path) -> None:
    """What is in one is found by the names that other programs give."""
    with pytest.raises(
        FileNotFoundError, match=r"no weights: expected index\.json .* model\.safetensors or pytorch_model"
    ):
        CheckpointMapping(tmp_path)
    with pytest.raises(FileNotFoundError):
        CheckpointMapping(tmp_path / "nothing")
    for write in (to_torch, to_safetensors, to_shards, to_offload_folder):  # each is preferred to those before
        write(trained(), tmp_path)
        (tmp_path / "pytorch_model.bin.index.json").write_text("not read")
        if write is not to_torch and write is not to_safetensors:
            with CheckpointMapping(tmp_path) as weights:
                assert torch.equal(weights["head.weight"], trained().head.weight)


def test_every_dtype_of_an_offload_folder(tmp_path: Path) -> None:
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    if Version(accelerate.__version__) >= Version("1.15"):  # older ones cannot write it
        dtypes.append(torch.float8_e4m3fn)
    state = {str(dtype): torch.arange(3).to(dtype) for dtype in dtypes} | {"scalar": torch.tensor(7)}
    offload_state_dict(tmp_path, state)
    with CheckpointMapping(tmp_path) as weights:
        for name, tensor in state.items():
            assert (weights[name].dtype, weights[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(weights[name].to(torch.float64), tensor.to(torch.float64))


# --- copies, threads, processes ---


def test_a_copy_of_a_model_computes_alike(path: Path) -> None:
    model = empty()
    with CheckpointMapping(path, model) as weights:
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        assert copy.copy(weights) is weights
        copied = copy.deepcopy(model)
        assert torch.equal(copied(TOKENS), trained()(TOKENS))
        with pytest.raises(TypeError, match="make a mapping in each process"):
            pickle.dumps(weights)


def test_several_threads_ask_at_a_time(path: Path) -> None:
    expected, failures = trained().state_dict(), list[str]()

    def compare(names: list[str]) -> None:
        for _ in range(10):
            failures.extend(name for name in names if not torch.equal(weights[name], expected[name]))

    with CheckpointMapping(path, empty(), read_ahead_bytes=3 * BLOCK_NBYTES) as weights:
        orders = [list(expected), list(reversed(expected)), list(expected)[::2]]
        threads = [threading.Thread(target=compare, args=(names,)) for names in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_a_forked_process_is_told(path: Path) -> None:
    code = (
        "import os, sys; from fastensor_accelerate import CheckpointMapping; weights = CheckpointMapping(sys.argv[1])\n"
        "weights['head.weight']\n"
        "if os.fork(): os.wait()\n"
        "else:\n"
        "    try: weights['head.weight']\n"
        "    except RuntimeError as error: print(error, flush=True)\n"
        "    weights.close(); os._exit(0)\n"
    )
    assert "was made before this process was forked; make a mapping in each process" in run("-c", code, path).stdout


def test_a_default_device_changes_nothing(path: Path) -> None:
    with CheckpointMapping(path) as weights, torch.device("meta"):
        first = weights["head.weight"]
        assert (first.device, weights["head.weight"].device) == (CPU, CPU)


def test_inference_mode(path: Path) -> None:
    model = empty()
    with CheckpointMapping(path, model) as weights, torch.inference_mode():
        cpu_offload(model, CPU, offload_buffers=True, state_dict=weights)
        assert torch.equal(model(TOKENS), trained()(TOKENS))


@pytest.mark.gpu
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("side_stream", [False, True])
def test_a_gpu_computes_what_the_model_does(
    write: Callable[[nn.Module, Path], Path], side_stream: bool, tmp_path: Path
) -> None:
    gpu = torch.device("cuda", 0)
    expected, model = trained().to(gpu)(TOKENS.to(gpu)), empty()
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    with CheckpointMapping(write(trained(), tmp_path), model, device=gpu) as weights, torch.cuda.stream(stream):
        dispatch_model(model, {"": "cpu"}, gpu, weights, offload_buffers=True, force_hooks=True)
        for _ in range(5):
            assert weights["head.weight"].device == gpu
            assert torch.equal(model(TOKENS.to(gpu)), expected)
