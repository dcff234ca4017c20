"""What is kept and what is found wrong: in-place changes, parameters, graphs that are never used, ends of processes."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import in_threads
from programs import Program, run
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fastensor.offload import ActivationOffload, OffloadConfig, OffloadError
from fastensor.offload.jobs import THREADS
from fastensor.offload.swapper import Swapper


def empty(offload: ActivationOffload) -> bool:
    offload.settle()
    usage = offload.memory_usage()
    return not any(usage[what] for what in ("pending", "in_dram", "loaded", "on_ssd"))


class ChangesWhatItSaved(torch.autograd.Function):
    """Its backward pass does what it must not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return gradient


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_what_a_backward_pass_changes_of_what_it_gets_is_found(make: Any, settled: bool, dtype: torch.dtype) -> None:
    offload = make()
    x = torch.randn(5000, dtype=dtype, requires_grad=True)
    with offload.step():
        y = x.exp()
        y = y.conj() if dtype.is_complex else y
        loss = ChangesWhatItSaved.apply(y).abs().sum()  # type: ignore[no-untyped-call]
    del y
    if settled:
        offload.settle()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("way", ["kept", "on its way", "written", "read"])
def test_an_in_place_change_is_found(make: Any, way: str) -> None:
    offload = make(min_bytes=1 << 30 if way == "kept" else 1)
    x = torch.randn(1000, requires_grad=True)
    with offload.step():
        y = x.exp()
        z = y.sin().sum()
    if way in ("written", "read"):
        offload.settle()
    if way == "read":
        z.backward(retain_graph=True)
    y.detach().add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        z.backward()


def test_an_optimizer_step_before_the_backward_pass_is_found(make: Any) -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
    offload = make()
    with offload.step():
        first, second = (layers(torch.randn(8, 64)).sum() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="inplace"):
        second.backward()


@pytest.mark.parametrize("attached", [False, True])
def test_parameters_and_buffers_are_never_written(make: Any, attached: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.conv = nn.Linear(64, 64), nn.Conv1d(1, 4, 3)
            self.linear.weight.requires_grad_(True)
            self.register_buffer("scale", torch.randn(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(x) * self.scale
            return (self.conv(found[:, None]) @ self.linear.weight[:62, :62].t()).sum()

    net = Net()
    offload = make()
    if attached:
        offload.attach(net)
    written: set[int] = set()
    admit = Swapper.admit

    def watch(self: Swapper, saved: Any) -> None:
        written.add(saved.source._cdata)
        admit(self, saved)

    with mock.patch.object(Swapper, "admit", watch):
        for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False)):
            with offload.step(), context:
                loss = net(torch.randn(8, 64, requires_grad=True))
            loss.backward()
    persistent = {one.untyped_storage()._cdata for one in net.parameters()}
    if attached:
        persistent |= {one.untyped_storage()._cdata for one in net.buffers()}
        assert offload.statistics().kept["buffer"] > 0
    assert written
    assert not written & persistent


def test_casts_of_parameters_stay(make: Any) -> None:
    net = nn.Linear(256, 256, bias=False)
    offload = make()
    with offload.step(), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(torch.randn(4, 256, requires_grad=True)).sum()
    assert offload.statistics().kept["parameter"] >= 256 * 256 * 2
    loss.backward()


def resident_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def test_graphs_that_are_never_used_leave_nothing(make: Any) -> None:
    offload = make(min_bytes=1 << 10, staging_bytes=1 << 20)
    net = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())])
    x = torch.randn(64, 64)
    with ExitStack() as all_at_once:  # memory that is taken when so many threads first copy at once
        for _ in range(2 * THREADS):
            block = all_at_once.enter_context(offload._engine.swapper(torch.device("cpu"))._tiers.bounce_block())
            block.prepare(torch.device("cpu"))
    sizes, resident = [], []
    for number in range(1000):
        with offload.step():
            loss = net(x).sum()
        if number % 100 == 0:
            offload.settle()
            gc.collect()
            sizes.append(
                (len(os.listdir("/proc/self/fd")), threading.active_count(), offload.statistics().reserved_ssd_bytes)
            )
            resident.append(resident_nbytes())
    del loss
    offload.settle()
    assert len(set(sizes[1:])) == 1, sizes
    assert resident[-1] - resident[2] < 4 << 20, "each of 700 forward passes saves 96 KiB"
    assert empty(offload)


def test_outputs_are_not_held_by_the_graph_itself(make: Any) -> None:
    """A pack hook that returns what it gets makes a circle that no collector sees."""
    import weakref

    offload = make(min_bytes=1 << 30)
    with offload.step():
        y = torch.randn(100, requires_grad=True).exp()
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_leave_nothing(make: Any, where: str) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise ValueError(where)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            raise ValueError(where)

    offload = make()
    x = torch.randn(5000, requires_grad=True)

    def use() -> None:
        with offload.step():
            y = Failing.apply(x.exp().sin()).sum()  # type: ignore[no-untyped-call]
        y.backward()

    for _ in range(20):
        with pytest.raises(ValueError, match=where):
            use()
    gc.collect()
    assert empty(offload)
    assert torch.equal(x.exp().grad_fn._saved_result, x.exp())  # type: ignore[union-attr]


def test_several_threads_at_once(make: Any) -> None:
    offload = make(staging_bytes=1 << 18, prefetch_bytes=1 << 18)

    def work(x: torch.Tensor) -> None:
        for _ in range(10):
            with offload.step():
                y = x.exp().sin().square().tanh().sum()
            (found,) = torch.autograd.grad(y, x)
            assert torch.equal(found, torch.autograd.grad(x.exp().sin().square().tanh().sum(), x)[0])

    in_threads(work, [torch.randn(64, 256, requires_grad=True) for _ in range(4)])
    assert empty(offload)


def test_what_is_saved_while_the_last_that_has_saved_it_goes(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may come in between; here the finalizer does it itself."""
    offload, release = make(), Swapper.release
    x = torch.randn(5000, requires_grad=True)
    held: list[torch.Tensor] = []
    again: list[torch.Tensor] = []

    def saves_again(swapper: Swapper, saved: Any) -> None:
        if held:
            again.append(held.pop().sin())
        release(swapper, saved)

    monkeypatch.setattr(Swapper, "release", saves_again)
    with offload.step():
        held.append(x + 1)  # saves nothing
        first = held[0].sin()
        offload.settle()
        del first
    again[0].sum().backward()
    assert torch.equal(x.grad, (x + 1).cos())  # type: ignore[arg-type]


def test_steps_may_nest_and_hooks_of_others_too(make: Any) -> None:
    offload, seen = make(), []
    x = torch.randn(500, requires_grad=True)
    with offload.step():
        a = x.exp()
        with offload.step():
            b = a.sin()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.detach(), lambda t: t):
            c = b.tanh()
        d = c.exp().sum()
    d.backward()
    assert len(seen) == 1
    assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().tanh().exp().sum(), x)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(("include", "exclude", "count"), [((), ("1",), 2), (("0", "2"), (), 2), (("*",), ("0",), 2)])
def test_modules_by_name(make: Any, include: tuple[str, ...], exclude: tuple[str, ...], count: int) -> None:
    net = nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Sigmoid())
    offload = make(include=include, exclude=exclude)
    with pytest.raises(OffloadError, match="attach"), offload.step():
        pass
    offload.attach(net)
    with offload.step():
        loss = net(torch.randn(1000, requires_grad=True)).sum()
    assert offload.statistics().offloaded == count
    loss.backward()
    offload.detach()
    assert not net[0]._forward_hooks


def test_patterns_that_fit_nothing(make: Any) -> None:
    with pytest.raises(ValueError, match=r"no module of Linear is called 'layer\*'"):
        make(include=("layer*",)).attach(nn.Linear(2, 2))


def test_models_whose_memory_comes_and_goes_are_refused(make: Any, tmp_path: Path) -> None:
    stage_3 = nn.Linear(4, 4)
    stage_3.weight.ds_id = 0  # type: ignore[assignment]  # as DeepSpeed marks it
    with pytest.raises(OffloadError, match=r"weight is a parameter of DeepSpeed's ZeRO stage 3.*Use ZeRO"):
        make().attach(stage_3)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        version_1 = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
        with pytest.raises(OffloadError, match=r"0 is a FullyShardedDataParallel \(FSDP version 1\).*Use FSDP2"):
            make().attach(version_1)
    finally:
        distributed.destroy_process_group()


def test_hooks_of_others_that_fail_do_not_mix_up_the_modules(make: Any) -> None:
    net = nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.Sigmoid())
    offload = make(include=("0", "1"))
    offload.attach(net)
    x = torch.randn(1000, requires_grad=True)

    def fail(module: nn.Module, arguments: Any) -> None:
        raise ValueError("not mine")

    for prepend in (False, True):
        handle = net[1].register_forward_pre_hook(fail, prepend=prepend)
        with pytest.raises(ValueError, match="not mine"), offload.step():
            net(x)
        handle.remove()
        before = offload.statistics().offloaded
        with offload.step():
            loss = net(x).sum()
        assert offload.statistics().offloaded == before + 2
        loss.backward()


def test_what_others_keep_alive_is_not_offloaded_again(make: Any) -> None:
    offload = make()
    batch = torch.randn(1000)
    weight = torch.randn(1000, requires_grad=True)
    for _ in range(3):
        with offload.step():
            loss = (batch * weight).exp().sum()
        offload.settle()
        loss.backward()
    found = offload.statistics()
    assert found.kept["externally referenced"] == 2 * batch.nbytes
    assert found.offloaded == 4


def test_backward_passes_begin_at_once_from_memory(make: Any) -> None:
    """What is not written yet is not waited for."""
    offload = make(dram_bytes=1 << 20)
    x = torch.randn(1000, requires_grad=True)
    with offload.step():
        loss = x.exp().sin().sum()
    loss.backward()
    found = offload.statistics()
    assert (found.written_bytes, found.read_bytes, found.taken_back_bytes) == (0, 0, x.nbytes)


def test_after_closing(make: Any) -> None:
    offload = make()
    x = torch.randn(1000, requires_grad=True)
    with offload.step():
        loss = x.exp().sin().sum()
    offload.settle()
    offload.close()
    offload.close()
    with pytest.raises(OffloadError, match="closed"):
        loss.backward()
    with pytest.raises(OffloadError, match="closed"), offload.step():
        pass


def test_a_copy_of_it_is_a_new_one(make: Any) -> None:
    offload = make(min_bytes=7)
    again = pickle.loads(pickle.dumps(offload))
    assert (again.config, again.memory_usage()) == (offload.config, {})


def test_a_forked_child_has_no_share(make: Any, tmp_path: Path) -> None:
    offload = make()
    x = torch.randn(5000, requires_grad=True)
    with offload.step():
        loss = x.exp().sin().sum()
    offload.settle()
    pid = os.fork()
    if pid == 0:
        try:
            if str(tmp_path) in str([os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]):
                os._exit(4)  # it would keep the space of the file that has no name
            loss.backward()
        except OffloadError as error:
            os._exit(0 if "forked child" in str(error) else 2)
        except BaseException:  # noqa: BLE001  # it is not what was expected
            os._exit(3)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    loss.backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())  # type: ignore[arg-type]


def test_what_has_come_back_is_there_in_forked_children(make: Any) -> None:
    """A saved tensor may become a gradient, and live longer than the step."""

    class ReturnsWhatItSaved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(factor)
            return (x * factor).sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            return ctx.saved_tensors[0], None

    offload = make()
    x = torch.randn(5000, requires_grad=True)
    for _ in range(2):  # the second time, to memory that was filled before
        x.grad = None
        with offload.step():
            loss = ReturnsWhatItSaved.apply(x, x.detach().exp())  # type: ignore[no-untyped-call]
        offload.settle()
        loss.backward()
        del loss
        assert offload.statistics().read_bytes
        found, expected = x.grad.numpy(), x.detach().exp().numpy()  # type: ignore[attr-defined]
        pid = os.fork()
        if pid == 0:
            os._exit(0 if found.tobytes() == expected.tobytes() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_transforms_of_functions_are_refused_by_torch(make: Any) -> None:
    offload = make()
    with offload.step(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: x.exp().sum())(torch.randn(500))


def test_a_fork_while_threads_are_at_work(make: Any) -> None:
    """The child offloads by itself; the parent does not notice."""
    offload = make(staging_bytes=1 << 20)
    x = torch.randn(200_000, requires_grad=True)
    expected = torch.autograd.grad(x.exp().sin().square().sum(), x)[0]

    def use() -> bool:
        with offload.step():
            loss = x.exp().sin().square().sum()
        return torch.equal(torch.autograd.grad(loss, x)[0], expected)

    for _ in range(4):
        with offload.step():
            loss = x.exp().sin().square().sum()
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)  # torch's own are not there
            try:
                os._exit(0 if use() and offload.statistics().steps == 1 else 1)
            finally:
                os._exit(2)
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert use()


PROGRAM = """
import os, sys, torch
from fastensor.offload import ActivationOffload, OffloadConfig
offload = ActivationOffload(OffloadConfig(schedule="all", directories=(sys.argv[1],), min_bytes=1))
x = torch.randn(1 << 20, requires_grad=True)
with offload.step():
    loss = x.exp().sin().sum()
offload.settle()
print(offload.memory_usage()["on_ssd"], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, None])
def test_nothing_is_left_on_the_disk(tmp_path: Path, end: signal.Signals | None) -> None:
    with Program("-c", PROGRAM, tmp_path) as process:
        assert int(process.stdout.readline()) >= 4 << 20
        assert list(tmp_path.iterdir()) == [], "not even while it runs"
        if end is not None:
            process.send_signal(end)
        process.communicate()
    assert process.returncode == (-end if end is not None else 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"target": "tape"}, ValueError, "target is one of"),
        ({"min_bytes": 0}, ValueError, "min_bytes is at least 1, found 0"),
        ({"directories": "/tmp"}, TypeError, "directories is a tuple"),
        ({"backend": "torch"}, ValueError, "backend is auto or one of"),
        ({"when_full": "pray"}, ValueError, "when_full is one of"),
    ],
)
def test_configurations_that_make_no_sense(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OffloadConfig(**options)


def test_a_folder_in_memory_is_named(caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("there is no /dev/shm")
    with ActivationOffload(OffloadConfig(schedule="all", directories=("/dev/shm",), min_bytes=1)) as offload:
        with offload.step():
            loss = torch.randn(100, requires_grad=True).exp().sum()
        offload.settle()
        loss.backward()
        assert offload.statistics().written_bytes > 0
    assert "/dev/shm is on tmpfs, which is in memory" in caplog.text


def test_drives_that_wear_out_are_named(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fastensor.offload import engine

    monkeypatch.setattr(engine, "_LEAST_SECONDS", 0.0)
    offload = make(drive_tbw=1e-9)
    with offload.step():
        loss = torch.randn(10_000, requires_grad=True).exp().sum()
    offload.settle()
    with offload.step():
        pass
    assert "the drives last 0 days" in caplog.text
    assert offload.statistics().drive_days < 1
    loss.backward()


MEMORY = """
import sys, torch
from pathlib import Path
from torch import nn
from fastensor.offload import ActivationOffload, OffloadConfig

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

net = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU())])
x = torch.randn(16384, 256)
config = OffloadConfig(schedule="all", directories=(sys.argv[1],), staging_bytes=32 << 20, prefetch_bytes=32 << 20)
offload = ActivationOffload(config)
before = resident("VmRSS")
for _ in range(2):
    if sys.argv[2] == "offloaded":
        with offload.step():
            loss = net(x).square().mean()
    else:
        loss = net(x).square().mean()
    loss.backward()
print(resident("VmHWM") - before)
"""


def test_the_process_takes_less_memory(tmp_path: Path) -> None:
    """24 activations of 16 MiB; what stays is what is on its way, the work of a layer, and blocks to move by."""

    def peak(how: str) -> int:
        return int(run("-c", MEMORY, tmp_path, how).stdout)

    usual, offloaded = peak("usual"), peak("offloaded")
    assert usual > 384 << 20
    assert offloaded < usual / 2
