"""Activations are offloaded in unchanged scripts: the same gradients, and every trap of hooks."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import json
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from accelerate.tracking import GeneralTracker
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastensor_accelerate
from fastensor.backends import direct
from fastensor.errors import OffloadError
from fastensor.files.words import human_size
from fastensor.offload import ActivationOffload, OffloadConfig
from fastensor_accelerate import ActivationOffloadHook, FastensorAccelerator, FastensorConfig, attach, detach

SMALL = OffloadConfig(schedule="all", min_bytes=4096)
OFFLOADING = FastensorConfig(offload=True, offload_schedule="all", offload_min_bytes=4096)
WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + (self.linear(x) * scale).sigmoid().tanh()


class Model(nn.Module):
    """Blocks, of which the last may be checkpointed, or may raise."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.reentrant = reentrant
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        if self.error is not None:
            raise self.error
        return x


def batch(seed: int = 1, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(128, WIDTH, generator=generator).requires_grad_(**options)


def gradients(model: nn.Module, x: Tensor | None = None) -> list[Tensor]:
    model.zero_grad()
    model(batch() if x is None else x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) > 0 and all(map(torch.equal, found, expected))


def hooked(model: Model, offload: ActivationOffload | None = None) -> ActivationOffload:
    """The model with the hook on its top."""
    offload = offload or ActivationOffload(SMALL)
    add_hook_to_module(model, ActivationOffloadHook(offload), append=True)
    return offload


def attached(model: Model) -> ActivationOffload:
    return attach(model, SMALL)


WAYS = [pytest.param(hooked, id="hook"), pytest.param(attached, id="attach")]
ways = pytest.mark.parametrize("way", WAYS)
Way = Callable[[Model], ActivationOffload]


def count(offload: ActivationOffload) -> int:
    return offload.statistics().offloaded


@contextmanager
def nothing_is_saved_in_steps(offload: ActivationOffload) -> Iterator[None]:
    """No hooks are left behind in this thread."""
    before = offload.statistics().packed
    yield
    batch().exp().sin().sum().backward()
    assert offload.statistics().packed == before
    assert not offload.is_in_step


# --- what hooks and attached models do


@ways
def test_gradients_are_the_same(way: Way) -> None:
    expected = gradients(Model())
    model = Model()
    offload = way(model)
    for _ in range(2):
        assert same(gradients(model), expected)
    assert count(offload) > 10
    assert offload.statistics().steps == 2


@ways
def test_backward_passes_in_any_order(way: Way) -> None:
    """Accelerate's own documentation runs two forward passes and then their backward passes in the same order."""
    plain, model = Model(), Model()
    offload = way(model)
    for one in (plain, model):
        losses = [one(batch(seed)).square().mean() for seed in (1, 2)]
        for loss in losses:
            loss.backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])  # type: ignore[misc]
    assert count(offload) > 10


@ways
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_exceptions_leave_nothing_behind(way: Way, kind: type[BaseException]) -> None:
    """But after an interrupt of an attached model, a step is left until the next forward pass, or ``detach``."""
    model, expected = Model(), gradients(Model())
    offload = way(model)
    model.error = kind("in forward")
    with pytest.raises(kind, match="in forward") as _kept:  # with the frames of the forward pass
        model(batch())
    model.error = None
    if way is attached and kind is KeyboardInterrupt:
        assert offload.is_in_step
        assert same(gradients(model), expected)
    with nothing_is_saved_in_steps(offload):
        pass
    assert same(gradients(model), expected)
    with nothing_is_saved_in_steps(offload):
        pass


@ways
def test_an_exception_of_another_hook(way: Way) -> None:
    model, expected = Model(), gradients(Model())
    offload = way(model)

    def fail(*arguments: Any) -> None:
        raise ValueError("in a hook")

    handle = model.register_forward_pre_hook(fail)
    with nothing_is_saved_in_steps(offload), pytest.raises(ValueError, match="in a hook"):
        model(batch())
    handle.remove()
    assert same(gradients(model), expected)


@ways
def test_forward_passes_at_the_same_time_in_several_threads(way: Way) -> None:
    model, expected = Model(), gradients(Model())
    offload, meeting = way(model), threading.Barrier(2)

    def meet(*arguments: Any) -> None:
        meeting.wait(60)

    model.blocks[1].register_forward_pre_hook(meet)

    def run(_: int) -> tuple[bool, list[Tensor]]:
        loss = model(batch()).square().mean()
        return offload.is_in_step, list(torch.autograd.grad(loss, list(model.parameters())))

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, range(2)))
    assert [is_in_step for is_in_step, _ in found] == [False, False]
    assert all(same(grads, expected) for _, grads in found)
    assert offload.statistics().steps == 2


@ways
def test_forward_passes_without_gradients_are_left_alone(way: Way) -> None:
    model = Model()
    offload = way(model)
    with torch.no_grad():
        model(batch())
    with torch.inference_mode():
        model(batch())
    assert offload.statistics().steps == 0


@ways
def test_a_model_that_calls_itself_without_gradients_stays_in_its_step(way: Way) -> None:
    class Conditioned(Model):
        """As in self-conditioning: the first guess is a part of the input."""

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    x = x + self(x)
            return super().forward(x)

    expected = gradients(Conditioned())
    model = Conditioned()
    offload = way(model)
    assert same(gradients(model), expected)
    assert count(offload) > 6
    with nothing_is_saved_in_steps(offload):
        pass


@ways
def test_a_step_around_covers_the_loss_and_the_model_once(way: Way) -> None:
    model = Model()
    offload = way(model)
    with offload.step():
        loss = model(batch()).softmax(dim=1).log().square().mean()
    loss.backward()
    covered = offload.statistics()
    model(batch()).softmax(dim=1).log().square().mean().backward()
    both = offload.statistics()
    assert covered.steps == 1
    assert both.steps == 2
    assert both.offloaded - covered.offloaded < covered.offloaded


@ways
def test_copies_use_their_own_weights_and_offload_nothing(way: Way) -> None:
    model = Model()
    offload = way(model)
    gradients(model)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    before = count(offload)
    assert torch.allclose(average(batch()), batch() + 3 * torch.tensor(0.5).tanh(), atol=1e-5)
    assert len(gradients(average)) == 6
    assert count(offload) == before
    assert not torch.allclose(model(batch()), average(batch()))


@ways
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_inside(way: Way, reentrant: bool) -> None:
    """What is saved are the inputs of blocks; nothing of what the backward pass computes anew."""
    expected, model = gradients(Model(), batch()), Model(reentrant)
    offload = way(model)
    assert same(gradients(model), expected)
    assert 1 <= count(offload) <= 4


@ways
def test_accumulation_and_autocast(way: Way) -> None:
    def train(prepare: Way | None) -> tuple[list[Tensor], int]:
        accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", cpu=True)
        model = Model()
        prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        offload = None if prepare is None else prepare(prepared)
        for seed in range(4):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(batch(seed)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()], 0 if offload is None else count(offload)

    (expected, _), (found, offloaded) = train(None), train(way)
    assert same(found, expected)
    assert offloaded > 10


# --- the hook among Accelerate's hooks


class Scaled(ModelHook):  # type: ignore[misc]  # Accelerate has no types
    def __init__(self, seen: list[str], name: str) -> None:
        self.seen, self.name = seen, name

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(f"{self.name} before")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.seen.append(f"{self.name} after")
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.seen.append(f"{self.name} gone")
        return module


def test_the_hook_beside_others(caplog: pytest.LogCaptureFixture) -> None:
    model, expected, seen = Model(), gradients(Model()), list[str]()
    add_hook_to_module(model, Scaled(seen, "first"))
    offload = hooked(model)
    add_hook_to_module(model, Scaled(seen, "last"), append=True)
    assert isinstance(model._hf_hook, SequentialHook)
    assert inspect.signature(model.forward) == inspect.signature(Model().forward)
    seen.clear()
    assert same(gradients(model), expected)
    assert seen == ["first before", "last before", "first after", "last after"]
    assert count(offload) > 3
    remove_hook_from_module(model)
    assert model.forward == Model.forward.__get__(model)
    assert not hasattr(model, "_old_forward")
    assert same(gradients(model), expected)
    assert offload.statistics().steps == 1
    assert not caplog.records


def test_a_hook_that_is_replaced_says_so_and_the_model_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model, expected, seen = Model(), gradients(Model()), list[str]()
    offload = hooked(model)
    add_hook_to_module(model, Scaled(seen, "other"))
    assert inspect.signature(model.forward) == inspect.signature(Model().forward)  # a Trainer reads it
    for _ in range(2):
        assert same(gradients(model), expected)
    assert count(offload) == 0
    assert ["without append=True" in record.message for record in caplog.records] == [True]
    remove_hook_from_module(model)
    assert same(gradients(model), expected)
    assert seen[-1] == "other gone"


def test_hooks_of_blocks_share_an_offload_and_are_removed_together() -> None:
    model, expected, offload = Model(), gradients(Model()), ActivationOffload(SMALL)
    for block in model.blocks:
        add_hook_to_module(block, ActivationOffloadHook(offload), append=True)
    assert same(gradients(model), expected)
    assert offload.statistics().steps == 3
    remove_hook_from_module(model, recurse=True)
    assert same(gradients(model), expected)
    assert offload.statistics().steps == 3


def test_a_hook_on_the_model_and_on_a_block_is_one_step() -> None:
    model, offload = Model(), ActivationOffload(SMALL)
    for module in (model, model.blocks[0]):
        add_hook_to_module(module, ActivationOffloadHook(offload))
    gradients(model)
    assert offload.statistics().steps == 1


def test_keywords_reach_the_module() -> None:
    block = Block()
    add_hook_to_module(block, ActivationOffloadHook(ActivationOffload(SMALL)))
    assert torch.equal(block(batch(), scale=0.0), batch() + torch.tensor(0.5).tanh())


def test_a_module_with_a_hook_refuses_to_be_pickled_and_says_why() -> None:
    model = Model()
    hooked(model)
    for dump in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
        with pytest.raises(TypeError, match="remove_hook_from_module"):
            dump(model)


def test_hooks_before_prepare_survive_unwrapping() -> None:
    """On blocks: Accelerate itself cannot unwrap a model with a hook on its top (``keep_fp32_wrapper=False``)."""
    model, offload = Model(), ActivationOffload(SMALL)
    for block in model.blocks:
        add_hook_to_module(block, ActivationOffloadHook(offload), append=True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare(model)
    for keep in (True, False):
        before = count(offload)
        gradients(accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep))
        assert count(offload) > before


# --- attached models


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_attached_models_survive_unwrapping(precision: str, compiled: bool) -> None:
    """But for a compiled model in bf16, which Accelerate itself leaves broken by ``keep_fp32_wrapper=False``."""
    torch._dynamo.reset()
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    model = Model()
    prepared = accelerator.prepare(torch.compile(model, backend="eager") if compiled else model)
    offload = attach(prepared, SMALL)
    for keep_fp32 in (True,) if compiled and precision == "bf16" else (True, False):
        for keep_compiled in (True, False):
            accelerator.unwrap_model(prepared, keep_fp32_wrapper=keep_fp32, keep_torch_compile=keep_compiled)
            before = count(offload)
            gradients(prepared)
            assert count(offload) > before
    detach(prepared)


def test_attached_models_can_be_pickled_and_loaded_without_us() -> None:
    model = Model()
    offload = attached(model)
    data = pickle.dumps(model)
    assert b"fastensor" not in data
    loaded = pickle.loads(data)
    assert same(gradients(loaded), gradients(Model()))
    assert count(offload) == 0


def test_what_hooks_of_the_model_compute_is_offloaded() -> None:
    """Hooks that were registered before, as ``weight_norm`` registers one to compute its weight."""
    model = Model()
    model.register_forward_pre_hook(lambda _, arguments: (arguments[0].exp(),))
    model.register_forward_hook(lambda _, __, output: output.exp())
    offload = attached(model)
    for block in model.blocks:
        block.forward = lambda x: x  # type: ignore[method-assign]  # so that hooks alone compute
    model(batch()).sum().backward()
    assert count(offload) == 2


def test_attaching_again_and_detaching() -> None:
    model, expected = Model(), gradients(Model())
    offload = attached(model)
    assert attach(model) is offload
    assert attach(model, SMALL) is offload
    with pytest.raises(ValueError, match="detach"):
        attach(model, OffloadConfig(schedule="all", min_bytes=1))
    detach(model)
    detach(model)
    assert same(gradients(model), expected)
    assert count(offload) == 0
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    with pytest.raises(OffloadError, match="closed"), offload.step():
        pass
    assert attach(model, OffloadConfig(schedule="all", min_bytes=1)) is not offload
    detach(model)


def test_detaching_ends_a_step_that_an_interrupt_has_left() -> None:
    """After Ctrl-C, torch calls no forward hooks. Operators of torch.func show whether hooks of tensors are left."""
    model = Model()
    offload = attached(model)
    model.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    assert offload.is_in_step
    detach(model)
    assert not offload.is_in_step
    torch.func.grad(lambda x: x.sin().sum())(batch())


def test_a_model_is_attached_once_whatever_holds_it() -> None:
    model = Model()
    offload = attached(model)
    for holder in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert attach(holder, SMALL) is offload
        assert not holder._forward_pre_hooks
    detach(holder)
    assert not model._forward_pre_hooks


def test_patterns_name_modules_of_the_unwrapped_model() -> None:
    torch._dynamo.reset()
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(torch.compile(Model(), backend="eager"))
    with pytest.raises(ValueError, match="no module of Model is called 'layers"):
        attach(prepared, OffloadConfig(schedule="all", include=("layers.*",)))
    offload = attach(prepared, OffloadConfig(schedule="all", min_bytes=4096, include=("blocks.0",)))
    gradients(prepared)
    assert 0 < count(offload) < 6
    detach(prepared)


# --- compiled models


def test_a_compiled_model_is_attached_whole() -> None:
    torch._dynamo.reset()
    expected, model = gradients(Model()), torch.compile(Model(), backend="eager", fullgraph=True)
    offload = attach(model, SMALL)
    assert same(gradients(model), expected)
    assert count(offload) > 3
    with nothing_is_saved_in_steps(offload):
        pass
    detach(model)


@ways
def test_compiling_over_a_hook_breaks_the_graph(way: Way) -> None:
    torch._dynamo.reset()
    model, expected = Model(), gradients(Model())
    offload = way(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert same(gradients(compiled), expected)
    assert count(offload) > 3
    with nothing_is_saved_in_steps(offload):
        pass


def test_a_model_that_is_compiled_in_place_runs_in_a_step() -> None:
    """What the message advises if ``attach`` cannot do it."""
    torch._dynamo.reset()
    expected, model = gradients(Model()), Model()
    model.compile(backend="eager", fullgraph=True)
    attached(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="detach the model"):
        model(batch())
    detach(model)
    offload = ActivationOffload(SMALL)
    with offload.step():
        loss = model(batch()).square().mean()
    loss.backward()
    assert same([parameter.grad for parameter in model.parameters()], expected)  # type: ignore[misc]
    assert count(offload) > 3


@ways
def test_compiling_a_full_graph_over_a_hook_says_what_to_do(way: Way) -> None:
    torch._dynamo.reset()
    model = Model()
    offload = way(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Attach what torch\.compile returns; or detach"):
        compiled(batch())
    with nothing_is_saved_in_steps(offload), torch.no_grad():
        compiled(batch())


# --- the flag


class Tracker(GeneralTracker):  # type: ignore[misc]  # Accelerate has no types
    name = "kept"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.logged.append((values, step))


@pytest.fixture(autouse=True)
def _disabled_at_the_end() -> Iterator[None]:
    yield
    fastensor_accelerate.disable()


def trained(tracker: Tracker | None = None, folder: Path | None = None, end: bool = True) -> list[Tensor]:
    """The weights after an unchanged script."""
    accelerator = Accelerator(cpu=True, project_dir=folder, log_with=tracker)
    if tracker is not None:
        accelerator.init_trackers("project")
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    for step in range(3):
        loss = prepared(batch(step)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
        with torch.no_grad():
            prepared(batch(step))
    if end:
        accelerator.end_training()
        assert not prepared._forward_pre_hooks
    return [parameter.detach() for parameter in model.parameters()]


def test_the_flag_trains_alike_and_says_what_was_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected, tracker = trained(), Tracker()
    assert capsys.readouterr().err == ""
    fastensor_accelerate.enable(OFFLOADING)
    assert same(trained(tracker, tmp_path / "project"), expected)
    err = capsys.readouterr().err
    assert "fastensor: activation offload of Model: activations took at most " in err
    assert not caplog.records
    assert [step for _, step in tracker.logged] == [0, 1, 2]
    for values, _ in tracker.logged:
        assert values.keys() == {
            "loss",
            "offload/written_bytes", "offload/read_bytes", "offload/stall_seconds", "offload/prefetch_hit_rate",
        }  # fmt: skip
    assert list((tmp_path / "project").iterdir()) == []


def test_trackers_get_what_was_moved_since_the_last_call_once() -> None:
    """A tracker keeps one row for each step: a second call for the same step must not replace what it knows."""
    fastensor_accelerate.enable(OFFLOADING)
    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project")
    model = accelerator.prepare(Model())
    offload = attach(model)
    for step in range(2):
        loss = model(batch()).square().mean()
        offload.settle()  # so that all is written, before it is needed
        accelerator.backward(loss)
        accelerator.log({"loss": loss.item(), "offload/stall_seconds": "the script's own"}, step=step)
        accelerator.log({"evaluated": 1.0}, step=step)
    written = [values.get("offload/written_bytes") for values, _ in tracker.logged]
    assert written == [half := offload.statistics().written_bytes / 2, None, half, None]
    assert half > 0
    assert tracker.logged[0][0]["offload/stall_seconds"] == "the script's own"
    assert tracker.logged[1] == ({"evaluated": 1.0}, 0)


def test_the_flag_says_loudly_that_nothing_is_offloaded(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained()
    fastensor_accelerate.enable(FastensorConfig(offload=True, offload_schedule="all"))
    with caplog.at_level(logging.WARNING):
        assert same(trained(), expected)
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        "activation offload of Model, after the first backward pass",
        "activation offload of Model",
    ]
    assert "are smaller than min_bytes (256 KiB)" in caplog.text


def test_the_flag_says_that_no_model_was_prepared_or_called(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    early = accelerator.prepare(Model())
    fastensor_accelerate.enable(OFFLOADING)
    for _ in range(2):
        accelerator.backward(early(batch()).sum())
    assert [record.message.split(":")[0] for record in caplog.records] == ["no activations are offloaded so far"]
    caplog.clear()
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Model())
    for _ in range(2):
        accelerator.backward(model.forward(batch()).sum())
    accelerator.end_training()
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "no activations are offloaded so far",
        "no activations of Model were offloaded",
    ]


def test_nothing_is_said_of_a_frozen_model_that_computes_no_gradients(caplog: pytest.LogCaptureFixture) -> None:
    fastensor_accelerate.enable(OFFLOADING)
    accelerator = Accelerator(cpu=True)
    student, teacher = accelerator.prepare(Model(), Model().requires_grad_(False))
    with torch.no_grad():
        target = teacher(batch())
    accelerator.backward((student(batch()) - target).square().mean())
    accelerator.end_training()
    assert not caplog.records


def test_options_of_a_later_enable_are_those_of_models_that_are_prepared_later() -> None:
    fastensor_accelerate.enable()
    accelerator = Accelerator(cpu=True)
    early = accelerator.prepare(Model())
    accelerator.backward(early(batch()).sum())
    fastensor_accelerate.enable(OFFLOADING)
    assert not early._forward_pre_hooks
    assert accelerator.prepare(Model())._forward_pre_hooks


def test_a_model_that_cannot_be_offloaded_is_refused_by_prepare() -> None:
    fastensor_accelerate.enable(OFFLOADING)
    model = Model()
    model.blocks[1].linear.weight.ds_id = 1  # as DeepSpeed's ZeRO stage 3 marks parameters
    with pytest.raises(OffloadError, match=r"blocks\.1\.linear\.weight is a parameter of DeepSpeed's ZeRO stage 3"):
        Accelerator(cpu=True).prepare(model)
    assert not model._forward_pre_hooks


def test_models_for_evaluation_are_left_alone() -> None:
    fastensor_accelerate.enable(OFFLOADING)
    model = Accelerator(cpu=True).prepare_model(Model(), evaluation_mode=True)
    assert not model._forward_pre_hooks


def test_what_is_still_being_written_in_the_end_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, go = direct.DirectSlots.write, threading.Event()

    def when_let_go(self: direct.DirectSlots, data: memoryview, offset: int) -> None:
        assert go.wait(60)
        write(self, data, offset)

    def let_go(end: Callable[[ActivationOffload], None]) -> Callable[[ActivationOffload], None]:
        return lambda offload: go.set() or end(offload)

    monkeypatch.setattr(direct.DirectSlots, "write", when_let_go)
    for end in ("settle", "close"):
        monkeypatch.setattr(ActivationOffload, end, let_go(getattr(ActivationOffload, end)))
    fastensor_accelerate.enable(OFFLOADING)
    accelerator, model = Accelerator(cpu=True), Model()
    offload = attach(model, dataclasses.replace(SMALL, backend="direct"))
    loss = accelerator.prepare(model)(batch()).sum()
    accelerator.end_training()
    assert loss.requires_grad, "the graph needs what was saved"
    assert f"{human_size(offload.statistics().offloaded_bytes)} written" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["disable", "free_memory", "end_training"])
def test_models_are_detached(how: str) -> None:
    fastensor_accelerate.enable(OFFLOADING)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Model())
    gradients(model)
    {"disable": fastensor_accelerate.disable, "free_memory": accelerator.free_memory,
     "end_training": accelerator.end_training}[how]()  # fmt: skip
    assert not model._forward_pre_hooks


def test_two_models_have_offloads_of_their_own() -> None:
    fastensor_accelerate.enable(OFFLOADING)
    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("project")
    first, second = accelerator.prepare(Model(), Model())
    assert attach(first) is not attach(second)
    for model in (first, second):
        loss = model(batch()).sum()
        attach(model).settle()  # so that all is written, before it is needed
        accelerator.backward(loss)
    accelerator.log({})
    assert tracker.logged[-1][0]["offload/written_bytes"] > 0
    assert tracker.logged[-1][0]["offload_1/written_bytes"] > 0


def test_two_models_have_traces_of_their_own(tmp_path: Path) -> None:
    options = {"offload": True, "offload_schedule": "all", "offload_min_bytes": 4096, "offload_codecs": ("csr",)}
    fastensor_accelerate.enable(FastensorConfig(**options, offload_trace=str(tmp_path / "trace.json")))
    accelerator = Accelerator(cpu=True)
    for model in accelerator.prepare(Model(), Model()):
        gradients(model)
    accelerator.end_training()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["trace-offload_1.json", "trace.json"]
    for file in tmp_path.iterdir():
        assert {"forward", "backward"} <= {one["name"] for one in json.loads(file.read_text())["traceEvents"]}


@pytest.mark.parametrize("dynamo_backend", ["no", "eager"])
def test_a_script_may_attach_with_its_own_options(dynamo_backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also if ``prepare`` puts the model into another one."""
    torch._dynamo.reset()
    fastensor_accelerate.enable(FastensorConfig(offload=True, offload_schedule="all"))
    model = Model()
    offload = attach(model, SMALL)
    accelerator = Accelerator(cpu=True, dynamo_backend=dynamo_backend)
    prepared = accelerator.prepare(model)
    accelerator.backward(prepared(batch()).sum())
    assert count(offload) > 0
    accelerator.end_training()
    assert not model._forward_pre_hooks
    assert "fastensor" not in {record.name for record in caplog.records}  # torch logs what it compiles


def test_one_accelerator_alone() -> None:
    offloading, stock = FastensorAccelerator(cpu=True, fastensor_config=OFFLOADING), Accelerator(cpu=True)
    first, second = offloading.prepare(Model()), stock.prepare(Model())
    offload = attach(first)
    offloading.backward(first(batch()).square().mean())
    stock.backward(second(batch()).square().mean())
    assert count(offload) > 0
    assert not second._forward_pre_hooks
    assert same([p.grad for p in first.parameters()], [p.grad for p in second.parameters()])  # type: ignore[misc]
    offloading.end_training()
    assert not first._forward_pre_hooks


# --- transformers.Trainer


def test_a_trainer_trains_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """With label smoothing, so that the Trainer computes the loss outside of the model. It is covered as well: it is
    all that is offloaded if every module is excluded."""
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    def train(folder: str) -> list[Tensor]:
        torch.manual_seed(0)
        size = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 200, "n_positions": 32}
        model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
        data = [{"input_ids": (row := torch.arange(i, i + 32) % 200), "labels": row} for i in range(32)]
        arguments = TrainingArguments(
            str(tmp_path / folder), max_steps=4, per_device_train_batch_size=8, use_cpu=True, save_strategy="no",
            report_to=[], label_smoothing_factor=0.1, eval_strategy="steps", eval_steps=2,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
        trainer.train()
        assert not trainer.model_wrapped._forward_pre_hooks
        return [parameter.detach() for parameter in model.parameters()]

    expected = train("plain")
    assert "offload" not in capsys.readouterr().err
    fastensor_accelerate.enable(OFFLOADING)
    assert same(train("offloaded"), expected)
    err = capsys.readouterr().err
    assert "fastensor: activation offload of GPT2LMHeadModel: activations took at most " in err
    fastensor_accelerate.enable(FastensorConfig(offload=True, offload_min_bytes=4096, offload_exclude=("*",)))
    assert same(train("loss"), expected)
    assert not caplog.records
