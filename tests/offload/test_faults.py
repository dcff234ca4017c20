"""Disks that fail, fill up, lie or are slow, and threads that die: exceptions or memory, never other gradients."""

from __future__ import annotations

import dis
import errno
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import pytest
import torch
from models import CASES, equal, gradients, in_threads, large, slot_files
from recomputing import MEASURED, plans_that_recompute
from torch import nn

import fastensor
from fastensor.backends import direct, numpy
from fastensor.backends.threads import NoThreadsError, open_pool, shut_down
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.offload import ActivationOffload, CorruptActivationError, OffloadError, copying, jobs, slots, swapper
from fastensor.testing.calls import Call, intercepted
from fastensor.testing.faults import failing_call, short_call

TRANSFORMER = CASES["transformer"]


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return gradients(TRANSFORMER, None)


@contextmanager
def failing(name: str, code: int, *, after: int = 0) -> Iterator[list[int]]:
    """All calls of one name fail, but for the first."""
    seen = [0]

    def fail(call: Call) -> Any:
        if call.name != name:
            return call.perform()
        seen[0] += 1
        if seen[0] <= after:
            return call.perform()
        raise OSError(code, os.strerror(code))

    with intercepted(fail):
        yield seen


def is_clean(offload: ActivationOffload) -> bool:
    gc.collect()  # tracebacks hold graphs
    offload.settle()
    usage = offload.memory_usage()
    return not any(usage[what] for what in ("pending", "in_dram", "loaded", "on_ssd"))


@pytest.mark.parametrize("backend", ["direct", "numpy"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("after", [0, 7])
def test_what_cannot_be_written_stays_in_memory(
    make: Any, expected: list[torch.Tensor], backend: str, code: int, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    offload = make(backend=backend)
    with failing("pwrite", code, after=after):
        assert equal(gradients(TRANSFORMER, offload), expected)
    found = offload.statistics()
    assert found.failed_writes > 0
    assert found.kept["not moved"] > 0
    assert "stays in memory, because it could not be written" in caplog.text
    assert is_clean(offload)
    assert equal(gradients(TRANSFORMER, offload), expected)
    written = offload.statistics().written_bytes - found.written_bytes
    assert bool(written) == (code == errno.ENOSPC), "a disk that fails is not used again, a full one is"


def test_space_that_cannot_be_reserved(make: Any, expected: list[torch.Tensor]) -> None:
    offload = make()
    with failing("fallocate64", errno.ENOSPC):
        assert equal(gradients(TRANSFORMER, offload), expected)
    assert offload.statistics().written_bytes == 0
    assert equal(gradients(TRANSFORMER, offload), expected)
    assert offload.statistics().written_bytes > 0


def test_a_failed_write_is_raised_once_if_that_is_wanted(make: Any, expected: list[torch.Tensor]) -> None:
    offload = make(when_full="raise", ssd_bytes=4096, staging_bytes=1)
    with pytest.raises(OffloadError, match=r"could not be written.*ssd_bytes leave no room"):
        gradients(TRANSFORMER, offload)
    assert is_clean(offload)


@contextmanager
def counted_writes() -> Iterator[list[int]]:
    """The bytes of each write."""
    written: list[int] = []

    def count_bytes(call: Call) -> Any:
        result = call.perform()
        if call.name == "pwrite":
            written.append(result)
        return result

    with intercepted(count_bytes):
        yield written


@pytest.mark.parametrize("codecs", [(), ("csr",)])
def test_nothing_is_written_of_a_range_that_does_not_fit(make: Any, codecs: tuple[str, ...]) -> None:
    """The first two of its pieces would fit, also where a codec makes them smaller."""
    offload = make(ssd_bytes=8 << 20, codecs=codecs, when_full="raise")
    values = torch.randn(3 << 20)
    values[::4] = 0
    weight = torch.ones_like(values, requires_grad=True)
    with counted_writes() as written:
        with offload.step():
            loss = (weight * values.clone()).sum()
        offload.settle()
    assert written == []
    with pytest.raises(OffloadError, match="leave no room for 12 MiB more"):
        offload.step().__enter__()
    assert torch.equal(torch.autograd.grad(loss, weight)[0], values)


@pytest.mark.parametrize("codecs", [(), ("csr",)])
def test_ranges_that_are_written_at_once_do_not_take_each_others_room(make: Any, codecs: tuple[str, ...]) -> None:
    """Of four ranges of 8 MiB one fits."""
    offload = make(ssd_bytes=12 << 20, codecs=codecs)
    values = torch.randn(2 << 20)
    values[::8] = 0
    weight = torch.ones_like(values, requires_grad=True)
    with counted_writes() as written:
        with offload.step():
            loss = torch.stack([(weight * values.clone()).sum() for _ in range(4)]).sum()
        offload.settle()
    found = offload.statistics()
    assert found.failed_writes == 3
    assert sum(written) <= found.written_bytes + 2 * 4096, "encoded pieces are written in whole pages"
    assert torch.equal(torch.autograd.grad(loss, weight)[0], 4 * values)
    assert is_clean(offload)


def test_a_failed_write_of_the_last_tensor_is_raised_by_the_next_step(make: Any) -> None:
    offload = make(when_full="raise", ssd_bytes=4096)
    with offload.step():
        loss = torch.randn(5000, requires_grad=True).exp().sum()
    offload.settle()
    with pytest.raises(OffloadError, match="could not be written"), offload.step():
        pass
    with offload.step():
        loss.backward()


def test_a_folder_that_is_not_there(
    make: Any, expected: list[torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OffloadError, match=r"made in /nonexistent/folder \(No such file or directory\); create it"):
        make(directories=("/nonexistent/folder",))
    (tmp_path / "folder").mkdir()
    offload = make(directories=(str(tmp_path / "folder"),))
    (tmp_path / "folder").rmdir()
    assert equal(gradients(TRANSFORMER, offload), expected)
    assert f"no file for activations can be made in {tmp_path / 'folder'} (No such file or directory)" in caplog.text


@pytest.mark.parametrize("ahead", [0, 64 << 20])
def test_what_cannot_be_read_raises(make: Any, ahead: int) -> None:
    offload = make(prefetch_bytes=ahead)
    with failing("preadv", errno.EIO), pytest.raises(OffloadError, match=r"cannot be read.*Input/output error"):
        gradients(TRANSFORMER, offload)
    offload.settle()
    assert equal(gradients(TRANSFORMER, offload), gradients(TRANSFORMER, None))


def test_memory_that_is_short_while_ranges_are_read_ahead(
    make: Any, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranges are read when the backward pass needs them. It raises if there is no memory for them then."""
    read, failed, is_short = swapper.Swapper._read_in, [0], [False]

    def read_in(self: swapper.Swapper, reading: Any, *, urgent: bool) -> Any:
        if urgent and not is_short[0]:
            return read(self, reading, urgent=urgent)
        failed[0] += 1
        with monkeypatch.context() as patched:
            patched.setattr(self._jobs, "_read_slots", no_memory)
            return read(self, reading, urgent=urgent)

    def no_memory(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("there is none")

    monkeypatch.setattr(swapper.Swapper, "_read_in", read_in)
    monkeypatch.setattr(jobs, "THREADS", 1)
    offload = make()
    assert equal(gradients(TRANSFORMER, offload), expected)
    assert failed[0] > 1
    is_short[0] = True
    with pytest.raises(OffloadError, match="cannot be read"):
        gradients(TRANSFORMER, offload)
    offload.settle()


@pytest.mark.parametrize("ahead", [0, 64 << 20])
def test_a_flipped_bit_is_found(make: Any, ahead: int) -> None:
    offload = make(prefetch_bytes=ahead)
    torch.manual_seed(0)
    with offload.step():
        loss, _ = TRANSFORMER()
    offload.settle()
    (file,) = slot_files(offload)
    data = bytearray(os.pread(file.fd, 4096, 8192))
    data[100] ^= 1
    os.pwrite(file.fd, data, 8192)
    with pytest.raises(CorruptActivationError, match=r"has changed on the disk.*have CRC32"):
        loss.backward()


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.torture)], ids=["sample", "all"])
@pytest.mark.parametrize("fault", [failing_call, short_call])
def test_each_call_fails_once(
    make: Any, tally: Any, monkeypatch: pytest.MonkeyPatch, fault: Callable[[int], Any], step: int
) -> None:
    """Whatever fails: the gradients are right, or it is raised, and the next step is right."""
    monkeypatch.setattr(slots, "_GROWTH_NBYTES", 1 << 20)  # disks are slow to give so many large files back
    net = CASES["perceptron"]
    expected = gradients(net, None)
    for number in count(1, step):
        offload = make()
        with fault(number) as found:
            try:
                assert equal(gradients(net, offload), expected)
            except OffloadError:
                assert fault is failing_call
                assert found.fired == "preadv"
        if not found.fired:
            break
        tally["offload: calls failed or cut short"] += 1
        assert equal(gradients(net, offload), expected)
        assert is_clean(offload)
        offload.close()
    assert number > 10


def test_direct_io_that_is_refused_at_the_first_write(make: Any, expected: list[torch.Tensor]) -> None:
    def refuse(*arguments: Any) -> None:
        raise BackendUnavailableError("refused")

    offload = make()
    with mock.patch.object(direct.DirectSlots, "write", refuse):
        assert equal(gradients(TRANSFORMER, offload), expected)
    found = offload.statistics()
    assert set(found.written_by) == {"numpy"}
    assert found.failed_writes == 0


class SomeOnDevice:
    """A backend of which every other file moves a device's memory by itself."""

    name = "some"

    def __init__(self) -> None:
        self.opened = 0

    def why_unavailable(self) -> str:
        return ""

    def open_slots(self, fd: int) -> numpy.BufferedSlots:
        self.opened += 1
        return OnDevice(fd) if self.opened % 2 else numpy.BufferedSlots(fd)


class OnDevice(numpy.BufferedSlots):
    device_types = frozenset({"cpu"})

    def write_from_device(self, values: torch.Tensor, offset: int) -> None:
        self.write(memoryview(values.numpy()), offset)

    def read_to_device(self, values: torch.Tensor, offset: int) -> None:
        self.read(memoryview(values.numpy()), offset)


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("staging", ["4MiB", "64MiB"])
def test_not_every_file_moves_a_devices_memory(make: Any, register: Any, tmp_path: Path, staging: str) -> None:
    """Pieces of a range lie in all of them."""
    register(SomeOnDevice())
    offload = make(backend="some", directories=(str(tmp_path),) * 2, staging_bytes=staging)
    for _ in range(2):
        assert equal(gradients(large, offload), gradients(large, None))
    found = offload.statistics()
    assert set(found.written_by) == {"some"}
    assert found.failed_writes == 0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupt_while_threads_are_started_leaves_none(number: int) -> None:
    begin, begun = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        begin(thread)
        begun.append(thread)
        if len(begun) == number:
            raise KeyboardInterrupt

    with mock.patch.object(threading.Thread, "start", interrupted), pytest.raises(KeyboardInterrupt):
        open_pool(4, "interrupted")
    for thread in begun:
        thread.join(60)
        assert not thread.is_alive()


def test_threads_that_cannot_be_started(
    make: Any, expected: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    offload = make(staging_bytes=1)
    with mock.patch.object(jobs, "open_pool", mock.Mock(side_effect=NoThreadsError("there are too many"))):
        assert equal(gradients(TRANSFORMER, offload), expected)
    assert offload.statistics().written_bytes == 0
    assert "no activations are offloaded any more: there are too many" in caplog.text


def test_threads_that_die(make: Any, expected: list[torch.Tensor]) -> None:
    """An unexpected failure, in each of the threads."""
    offload = make(backend="numpy", staging_bytes=1)
    with mock.patch.object(numpy.BufferedSlots, "write", mock.Mock(side_effect=SystemExit)):
        assert equal(gradients(TRANSFORMER, offload), expected)
    assert offload.statistics().failed_writes > 0
    assert is_clean(offload)
    assert equal(gradients(TRANSFORMER, offload), expected)
    assert offload.statistics().written_bytes > 0


def test_a_slow_disk_changes_nothing_but_the_time(make: Any, expected: list[torch.Tensor]) -> None:
    """Each transfer waits until a few others have begun to wait, or the training stands still."""
    turn = threading.Condition()
    waiting = [0]

    def slow(function: Callable[..., Any]) -> Callable[..., Any]:
        def transfer(*arguments: Any, **options: Any) -> Any:
            with turn:
                waiting[0] += 1
                turn.notify_all()
                turn.wait_for(lambda: waiting[0] >= 3, timeout=0.01)
                waiting[0] -= 1
            return function(*arguments, **options)

        return transfer

    offload = make(staging_bytes=200_000, prefetch_bytes=100_000)
    with (
        mock.patch.object(posix, "write_fully", slow(posix.write_fully)),
        mock.patch.object(posix, "read_fully", slow(posix.read_fully)),
    ):
        for _ in range(2):
            assert equal(gradients(TRANSFORMER, offload), expected)
    assert is_clean(offload)


@pytest.mark.parametrize("budget", [100_000, 400_000])
def test_budgets_hold_at_every_instant(make: Any, expected: list[torch.Tensor], budget: int) -> None:
    offload = make(staging_bytes=budget, prefetch_bytes=budget)
    for _ in range(2):
        assert equal(gradients(TRANSFORMER, offload), expected)
    found = offload.statistics()
    assert found.peak_pending_bytes <= budget
    assert found.peak_loaded_bytes <= 2 * budget, "what is needed at once may come on top"


def test_what_several_nodes_share_does_not_stay_beyond_the_budget(make: Any) -> None:
    """The heads' backward pass brings in what the loop's wants much later."""

    def run(offload: ActivationOffload | None) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        x = torch.randn(10_000, requires_grad=True)
        with offload.step() if offload else nullcontext():
            hidden = [x.exp()]
            for _ in range(20):
                hidden.append(hidden[-1].tanh())
            loss = torch.stack([one.square().sum() for one in hidden]).sum()
        if offload is not None:
            hidden.clear()
            offload.settle()
        return torch.autograd.grad(loss, x)

    offload = make(prefetch_bytes=100_000)
    for _ in range(2):
        assert equal(run(offload), run(None))
    found = offload.statistics()
    assert found.shared_bytes > 20 * 40_000
    assert found.peak_loaded_bytes <= 100_000 + 40_000
    assert is_clean(offload)


def test_memory_for_what_comes_next_is_bounded_at_all_times(make: Any) -> None:
    offload = make(prefetch_bytes=100_000)
    x = torch.randn(10_000, requires_grad=True)
    with offload.step():
        y = x
        for _ in range(20):
            y = y.tanh()
        loss = y.sum()
    del y
    offload.settle()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)  # whose graph holds all that was read
    again = gradient.sum()
    del gradient, loss
    again.backward()
    del again
    x.grad = None
    idle = offload._engine.swapper(torch.device("cpu"))._loaded.host
    with offload.step():
        x.exp()
    assert sum(map(len, idle._returned)) + idle._idle_nbytes <= 100_000
    with offload.step():
        kept = x.sin().exp()
    offload.settle()
    loss = kept.sum()
    del kept
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    offload.close()
    del gradient, loss
    assert not idle._returned
    assert not idle._idle_nbytes


def threads_of_offloads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("fastensor-offload")}


def test_closing_in_the_middle_of_a_step_that_has_saved_nothing(make: Any) -> None:
    before = set(threading.enumerate())
    offload = make()
    x = torch.randn(10_000, requires_grad=True)
    with offload.step():
        offload.close()
        loss = x.exp().sum()
    loss.backward()
    assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]
    assert not threads_of_offloads() - before


def test_what_is_closed_while_it_is_written_is_no_failure(
    make: Any, held_writes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    offload = make()
    x = torch.randn(8 << 20, requires_grad=True)  # in more pieces than there are threads
    with offload.step():
        loss = x.exp().sum()
    assert held_writes.begun.wait(60)
    with mock.patch.object(jobs, "shut_down", lambda pool: (held_writes.go.set(), shut_down(pool))):
        offload.close()
    loss.backward()
    assert torch.equal(x.grad, x.exp())  # type: ignore[arg-type]
    assert offload.statistics().failed_writes == 0
    assert not caplog.text


def test_memory_is_freed_once_it_is_written(make: Any) -> None:
    """No reference to the tensors is left, and the space in use on the disk is what they take."""
    from torch.multiprocessing.reductions import StorageWeakRef

    offload = make()
    x = torch.randn(1 << 20, requires_grad=True)
    with offload.step():
        y = x.exp()
        loss = y.sin().sum()
    reference = StorageWeakRef(y.untyped_storage())
    offload.settle()
    del y
    assert reference.expired()
    assert x.nbytes <= offload.memory_usage()["on_ssd"] <= x.nbytes + 4096, "whole pages"
    loss.backward()
    assert torch.equal(x.grad, x.exp().cos() * x.exp())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_after_an_interrupt_the_next_step_begins_anew(make: Any, kind: type[BaseException]) -> None:
    """The user presses Ctrl-C while the backward pass waits for the disk."""
    offload = make(prefetch_bytes=0)
    torch.manual_seed(0)
    with offload.step():
        loss, wanted = large()
    offload.settle()
    with mock.patch.object(swapper, "_wait_until_done", mock.Mock(side_effect=kind)), pytest.raises(kind):
        loss.backward(retain_graph=True)
    with pytest.raises(OffloadError, match="lost"):
        loss.backward()
    assert all(one.grad is None for one in wanted), "nor is anything made up"
    assert equal(gradients(large, offload), gradients(large, None))
    del loss
    assert is_clean(offload)


@pytest.mark.parametrize("options", [{"ssd_bytes": 4096}, {"ssd_bytes": 4096, "dram_bytes": 8 << 20}])
def test_blocks_of_what_cannot_be_written_are_not_waited_for(
    make: Any, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(copying, "STAGED", {"cpu"})
    offload = make(staging_bytes=8 << 20, **options)
    for _ in range(2):
        assert equal(gradients(TRANSFORMER, offload), expected)
    assert is_clean(offload)


def test_several_threads_with_little_room(make: Any) -> None:
    """What leaves its rest waits for room, and may be wanted, or let go of, meanwhile."""
    offload = make(staging_bytes=30_000, dram_bytes=60_000, prefetch_bytes=30_000)

    def work(x: torch.Tensor) -> None:
        for number in range(20):
            with offload.step():
                y = x.exp().sin().square().tanh().sum()
            if number % 3:
                (found,) = torch.autograd.grad(y, x)
                assert torch.equal(found, torch.autograd.grad(x.exp().sin().square().tanh().sum(), x)[0])

    in_threads(work, [torch.randn(64, 64, requires_grad=True) for _ in range(4)])
    assert is_clean(offload)


@pytest.mark.parametrize("settled", [False, True])
def test_storages_that_are_resized(make: Any, settled: bool) -> None:
    """As FSDP does with parameters: what was written before is right, and nothing else is made up."""
    offload = make(dram_bytes=0 if settled else 1 << 30)
    x = torch.randn(5000, requires_grad=True)
    with offload.step():
        y = x.exp()
        loss = y.sum()
    expected = y.detach().clone()
    if settled:
        offload.settle()
        found = offload.statistics()
        assert (found.failed_writes, found.written_bytes) == (0, y.nbytes)
    y.untyped_storage().resize_(0)
    if settled:
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, expected), (x.grad != expected).nonzero().flatten().tolist()
    else:
        with pytest.raises(OffloadError, match="was resized"):
            loss.backward()


def test_closing_while_others_work(make: Any) -> None:
    offload = make(staging_bytes=1)
    x = torch.randn(200_000, requires_grad=True)
    stopped = threading.Event()
    unexpected: list[BaseException] = []

    def work() -> None:
        try:
            while not stopped.is_set():
                with offload.step():
                    loss = x.exp().sin().square().sum()
                torch.autograd.grad(loss, x)
        except OffloadError as error:
            assert "closed" in str(error)
        except BaseException as error:  # noqa: BLE001  # shown below
            unexpected.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while offload.statistics().written_bytes < 4 * x.nbytes:
        pass
    offload.close()
    stopped.set()
    for thread in threads:
        thread.join()
    assert not unexpected


@pytest.mark.parametrize("case", [TRANSFORMER, large])
def test_a_full_disk_leaves_it_to_the_others(make: Any, tmp_path: Any, case: Any) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    offload = make(directories=tuple(map(str, folders)))
    full: set[int] = set()

    def reserve(call: Call) -> Any:
        if call.name != "fallocate64":
            return call.perform()
        full.add(call.arguments[0]) if not full else None
        if call.arguments[0] in full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call.perform()

    with intercepted(reserve):
        assert equal(gradients(case, offload), gradients(case, None))
    found = offload.statistics()
    assert found.failed_writes == 0
    assert found.kept.get("not moved", 0) == 0
    assert sorted(bool(file.reserved_nbytes) for file in slot_files(offload)) == [False, True]
    assert is_clean(offload)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.torture)], ids=["sample", "all"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_interrupts_wherever_they_may_come(
    make: Any, tally: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, where: str, step: int
) -> None:
    """Ctrl-C in the thread of the training, at each place of this package in turn where Python looks for it. The step
    is lost, or is right; the next one is right; no thread waits for ever; and nothing stays open."""
    if where == "device":
        request.getfixturevalue("staged")
    hear = sys.unraisablehook
    monkeypatch.setattr(sys, "unraisablehook", lambda it: it.exc_type is KeyboardInterrupt or hear(it))  # of finalizers
    inputs = torch.randn(3000, requires_grad=True)
    expected = torch.autograd.grad(inputs.exp().sin().square().sum(), inputs)[0]

    def use() -> torch.Tensor:
        with offload.step():
            loss = inputs.exp().sin().square().sum()
        return torch.autograd.grad(loss, inputs)[0]

    gc.collect()  # what other tests have left
    wait_for_space()
    fds, threads = len(os.listdir("/proc/self/fd")), threads_of_offloads()
    offload = make(staging_bytes=16_000, prefetch_bytes=16_000)
    use()
    for number in count(1, step):
        with interrupt(number) as seen, suppress(KeyboardInterrupt):
            assert torch.equal(use(), expected)
        if not seen.fired:
            break
        tally["offload: interrupts"] += 1
        assert torch.equal(use(), expected)
    assert number > 300
    gc.collect()  # tracebacks hold graphs
    offload.settle()
    usage = offload.memory_usage()
    lost = sum(usage[what] for what in ("pending", "in_dram", "loaded", "on_ssd"))
    assert lost <= number / step / 40 * inputs.nbytes, (
        "what an interrupted finalizer has let go of may stay until it is closed"
    )
    offload.close()
    assert len(os.listdir("/proc/self/fd")) == fds
    assert not threads_of_offloads() - threads


@pytest.mark.parametrize("step", [41, pytest.param(1, marks=pytest.mark.torture)], ids=["sample", "all"])
def test_interrupts_while_blocks_are_computed_again(
    make: Any, tally: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Or are noted, or are planned. Buffers and modes are those of the steps that were not interrupted, or of all."""
    hear = sys.unraisablehook
    monkeypatch.setattr(sys, "unraisablehook", lambda it: it.exc_type is KeyboardInterrupt or hear(it))  # of finalizers
    inputs = torch.randn(64, 8)

    def new_model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)))

    def use(model: nn.Module, step: Callable[[], Any]) -> list[torch.Tensor]:
        with step():
            loss = model(inputs).square().sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    expected, offload, model = use(new_model(), nullcontext), make(schedule=1 << 30, recompute="auto"), new_model()
    offload.attach(model)
    with plans_that_recompute():
        for number in count(1, step):
            for _ in range(MEASURED):
                assert equal(use(model, offload.step), expected)
            with interrupt(number) as seen, suppress(KeyboardInterrupt):
                assert equal(use(model, offload.step), expected)
            if not seen.fired:
                break
            tally["offload: interrupts"] += 1
            assert equal(use(model, offload.step), expected)
    assert number > 300
    assert offload.statistics().recomputed > number / step
    assert all(one.training for one in model.modules())
    fresh = new_model()
    for _ in range(int(model.get_buffer("0.1.num_batches_tracked"))):
        fresh(inputs)
    assert equal([one.float() for one in model[0].buffers()], [one.float() for one in fresh[0].buffers()])  # type: ignore[index]
    offload.detach()
    assert not any("forward" in vars(one) for one in model.modules())


class Interrupt:
    fired = False


@contextmanager
def interrupt(number: int) -> Iterator[Interrupt]:
    """KeyboardInterrupt is raised at the given one of the places where Python looks for signals: behind calls, and
    where functions and rounds of loops begin. (Those at the very end of blocks are left out: what is raised behind
    their last call would be raised outside of them here.)"""
    found, places = Interrupt(), [0]
    previous: dict[int, int] = {}

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if found.fired or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "return":
            previous.pop(id(frame), None)  # frames are not kept: what they hold is to be let go of
        if event != "opcode":
            return trace
        last, previous[id(frame)] = previous.get(id(frame), 0), frame.f_lasti
        looks = dis.opname[frame.f_code.co_code[last]].startswith(LOOKS)
        if looks and handler(frame.f_code, last) == handler(frame.f_code, frame.f_lasti):
            places[0] += 1
            if places[0] == number:
                found.fired = True
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks whether any frame wants these when tracing begins
    sys.settrace(trace)
    try:
        yield found
    finally:
        sys.settrace(before)


LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
PACKAGE = os.path.dirname(fastensor.__file__)


@cache
def handler(code: CodeType, at: int) -> int | None:
    """Where it goes on after an exception that is raised by an instruction."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return next((one.target for one in entries if one.start <= at < one.end), None)
