"""Ranks that save together hold different states, fail, die or stop: all others say which, and the old file is kept."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import at_call, join
from disks import leftovers
from programs import run_ranks, wait_until_stopped

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.checkpoint.cooperative.ranks import Ranks
from fastensor.testing import failing_call, short_call
from fastensor.testing.calls import Call, intercepted

MOST_CALLS = 120
SHORT_SECONDS = 4.0
MIB = 1 << 20


def state(step: int) -> dict[str, Any]:
    """A part for each of three ranks."""
    return {"large": torch.full((3 * MIB // 4,), float(step)), "small": torch.full((5,), step), "step": step}


def step_in(path: Path) -> int:
    found = fastensor.load(path, verify=True)
    steps = {float(one) for key in ("large", "small") for one in (found[key].min(), found[key].max())}
    assert steps == {float(found["step"])}
    return int(found["step"])


def everyones(value: Any) -> list[Any]:
    """What each rank gives."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# --- different states

DIFFERENCES: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("rank 1 holds another state than rank 0, .*'b.1.x' has other values", lambda state: state["b"][1]["x"].add_(1)),
    ("'a' is .* shape .12, 1., .*expected .* shape .3, 4.", lambda state: state.update(a=state["a"].view(12, 1))),
    (
        "'a' is Tensor of torch.int32, .*expected Tensor of torch.float32",
        lambda s: s.update(a=s["a"].int()),
    ),
    ("'a' is missing, expected Tensor", lambda state: state.pop("a")),
    ("'more' is Tensor of torch.float32, .*expected missing", lambda state: state.update(more=torch.zeros(2))),
    ("'epoch' is 4, expected 3", lambda state: state.update(epoch=4)),
    ("'a' is .* 80 bytes, expected .* 48 bytes", lambda state: state.update(a=torch.arange(20.0)[:12].view(3, 4))),
    ("'again' is .* storage 3 .*expected .* storage 0", lambda state: state.update(again=state["a"].clone())),
]


def to_compare() -> dict[str, Any]:
    values = torch.arange(12.0).view(3, 4)
    return {"a": values, "b": [torch.zeros(5), {"x": torch.ones(9000)}], "again": values, "epoch": 3, "c": {"x", "y"}}


def test_different_states_are_refused(tmp_path: Path) -> None:
    run_ranks(_differ, 2, tmp_path)


def _differ(rank: int, folder: Path) -> None:
    join(folder, rank, 2)
    path = folder / "x"
    cooperative.save(to_compare(), path)
    before = path.read_bytes()
    for message, change in DIFFERENCES:
        own = to_compare()
        if rank == 1:
            change(own)
        with pytest.raises(fastensor.ReplicaMismatchError, match=message):
            cooperative.save(own, path)
        assert path.read_bytes() == before
        assert not leftovers(folder)
    for name, message in (("x", "'x' is F32 of shape .4,., expected F32 of shape .3,."), ("y", "'y' has other values")):
        tensors = {"x": torch.zeros(3), "y": torch.zeros(5)}
        if rank == 1:
            tensors[name] = torch.zeros(4) if name == "x" else torch.ones(5)
        with pytest.raises(fastensor.ReplicaMismatchError, match=message):
            cooperative.save(tensors, folder / "y.safetensors")
    own = to_compare()
    own["b"][1]["x"][0] += rank  # outside of the sample
    cooperative.save(own, folder / "sampled")
    with pytest.raises(fastensor.ReplicaMismatchError, match=r"'b\.1\.x' has other values"):
        cooperative.save(own, path, check_replicas="all")
    with pytest.raises(fastensor.ReplicaMismatchError, match=r"'replicated tensor 0' is .*12.*, expected .*3, 4"):
        cooperative.save(own, path, replicated=[own["a"].view(12) if rank else own["a"]])
    assert path.read_bytes() == before
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("container", ["torch", "safetensors"])
def test_what_is_not_replicated_is_that_of_rank_0(tmp_path: Path, container: str) -> None:
    run_ranks(_save_own, 3, tmp_path, container)


def _save_own(rank: int, folder: Path, container: Any) -> None:
    join(folder, rank, 3)
    flat = torch.cat([torch.full((MIB // 2,), float(number)) for number in range(4)])
    weights = list(flat.chunk(4)) if container == "safetensors" else [flat, flat[5:]]
    own = {f"buffer {number}": torch.full((size,), float(rank)) for number, size in enumerate((3, MIB // 3, 10))}
    tensors: dict[str, Any] = {**{f"weight {number}": weight for number, weight in enumerate(weights)}, **own}
    if container == "torch":
        tensors = {"tensors": tensors, "seconds": 5.0, "others": [torch.zeros(3)]}
    whole: Any = "what is not replicated need not be there" if rank == 2 else tensors
    cooperative.save(whole, folder / "x", container=container, replicated=weights)
    if rank == 0:
        fastensor.save(whole, folder / "alone", container=container)
        assert (folder / "x").read_bytes() == (folder / "alone").read_bytes()
    dist.barrier()
    dist.destroy_process_group()


# --- faults


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0])
def test_every_call_of_each_rank_fails(tmp_path: Path, code: int, tally: Counter[str]) -> None:
    run_ranks(_fail, 2, tmp_path, code)
    tally["faults injected"] += int((tmp_path / "faults").read_text())


def _fail(rank: int, folder: Path, code: int) -> None:
    join(folder, rank, 2)
    (folder / "files").mkdir(exist_ok=True)
    path = folder / "files" / "x.ckpt"
    step = faults = 0
    cooperative.save(state(step), path)
    for failing in (0, 1):
        for number in range(1, MOST_CALLS):
            injected = short_call(number) if code == 0 else failing_call(number, code)
            error: Exception | None = None
            with injected if rank == failing else nullcontext() as fault:
                try:
                    cooperative.save(state(step + 1), path, timeout=20)
                except fastensor.CheckpointWriteError as caught:
                    error = caught
            errors = everyones(None if error is None else str(error))
            if not everyones(bool(fault and fault.fired))[failing]:
                step += 1
                break
            faults += 1
            found = step_in(path)
            assert (errors[0] is None) == (errors[1] is None), errors
            assert found == step + 1 if errors[0] is None else found == step or "is in place" in errors[0], errors
            assert errors[0] is None or f"rank {failing}" in errors[1 - failing], errors
            assert not leftovers(path.parent)
            step = found
            dist.barrier()
        else:
            raise AssertionError(f"a save makes more than {MOST_CALLS} calls")
    if rank == 0:
        (folder / "faults").write_text(str(faults))
    dist.destroy_process_group()


def test_ranks_without_a_common_filesystem(tmp_path: Path) -> None:
    run_ranks(_save_elsewhere, 2, tmp_path)


def _save_elsewhere(rank: int, folder: Path) -> None:
    join(folder, rank, 2)
    other = folder / "other"
    path = folder / "files" / "x.ckpt"
    path.parent.mkdir(exist_ok=True)
    other.write_bytes(bytes(4 * MIB))
    for seen in (folder / "missing", other):

        def open_there(call: Call, seen: Path = seen) -> Any:
            if call.name != "open" or not str(call.arguments[0]).endswith(".fastensor-tmp"):
                return call.perform()
            return call.function(seen, *call.arguments[1:], **call.options)

        with (
            intercepted(open_there) if rank == 1 else nullcontext(),
            pytest.raises(fastensor.CheckpointWriteError, match="they have to share a filesystem") as caught,
        ):
            cooperative.save(state(1), path)
        assert rank == 1 or "rank 1" in str(caught.value)
        dist.barrier()
        assert os.listdir(path.parent) == []
        assert other.read_bytes() == bytes(4 * MIB)
    dist.destroy_process_group()


def test_where_rank_0_saves_alone(tmp_path: Path) -> None:
    run_ranks(_save_alone, 2, tmp_path)


def _save_alone(rank: int, folder: Path) -> None:
    join(folder, rank, 2)
    (folder / "empty").touch()
    for target in (folder / "empty", f"memory://{folder}/x"):
        dist.barrier()
        report = cooperative.save(state(1), target)
        assert [one.backend for one in report.fallbacks] == ["saving together"]
    assert step_in(folder / "empty") == 1
    stock = torch.save
    with pytest.MonkeyPatch.context() as patches:  # a library has wrapped it, in one rank, and then in both
        for wrapped in ((1,), (0, 1)):
            if rank in wrapped:
                patches.setattr(torch, "save", lambda *arguments, **options: stock(*arguments, **options))
            if len(wrapped) == 2:
                report = cooperative.save(state(3), folder / "x")
                assert [one.backend for one in report.fallbacks] == ["stitching", "saving together"]
                continue
            with pytest.raises(fastensor.CheckpointWriteError, match="rank 1 cannot lay out the file as rank 0 can"):
                cooperative.save(state(1), folder / "x")
    assert step_in(folder / "x") == 3
    half = dist.new_group([1])
    if rank == 1:
        cooperative.save(state(2), folder / "own", group=half)
        assert step_in(folder / "own") == 2
    dist.destroy_process_group()


# --- interrupted ranks


def test_a_rank_is_interrupted_while_it_waits(tmp_path: Path) -> None:
    run_ranks(_interrupt_rank_1, 3, tmp_path)


def _interrupt_rank_1(rank: int, folder: Path) -> None:
    join(folder, rank, 3)
    path = folder / "files" / "x.ckpt"
    path.parent.mkdir(exist_ok=True)
    small = {"x": torch.zeros(7)}  # which rank 0 writes alone
    pids = everyones(os.getpid())
    both = dist.new_group([0, 1])

    def interrupt() -> None:
        os.kill(pids[1], signal.SIGINT)
        dist.barrier(both)

    if rank == 1:
        with pytest.raises(KeyboardInterrupt):
            cooperative.save(small, path)
        dist.barrier(both)
    else:
        with (
            at_call("fsync", interrupt) if rank == 0 else nullcontext(),
            pytest.raises(fastensor.CheckpointWriteError, match=r"rank 1: KeyboardInterrupt$"),
        ):
            cooperative.save(small, path)
    dist.barrier()
    assert not os.listdir(path.parent)
    cooperative.save(small, path)
    dist.destroy_process_group()


def test_rank_0_is_interrupted_when_it_has_published(tmp_path: Path) -> None:
    run_ranks(_interrupt_rank_0, 2, tmp_path)


def _interrupt_rank_0(rank: int, folder: Path) -> None:
    join(folder, rank, 2)

    def interrupt(call: Call) -> Any:
        result = call.perform()
        if call.name == "rename":
            raise KeyboardInterrupt
        return result

    if rank == 0:
        with intercepted(interrupt), pytest.raises(KeyboardInterrupt):
            cooperative.save(state(1), folder / "x.ckpt")
    else:
        with pytest.raises(
            fastensor.CheckpointWriteError, match="rank 0: KeyboardInterrupt; perhaps the new file is in place"
        ):
            cooperative.save(state(1), folder / "x.ckpt")
        assert step_in(folder / "x.ckpt") == 1
    dist.destroy_process_group()


# --- dead and stopped ranks


def run_mortal_ranks(function: Callable[..., object], world: int, *arguments: object) -> list[int]:
    """As :func:`run_ranks`, but ranks may die. Returns how they ended."""
    context = torch.multiprocessing.start_processes(
        function, arguments, nprocs=world, join=False, start_method="forkserver"
    )
    for process in context.processes:
        process.join()
    return [process.exitcode for process in context.processes]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    "when",
    [
        pytest.param("before", marks=pytest.mark.torture),
        pytest.param("open", marks=pytest.mark.torture),
        "pwrite",
        "fsync",
        pytest.param("after", marks=pytest.mark.torture),
    ],
)
def test_a_rank_that_is_killed(tmp_path: Path, when: str) -> None:
    assert run_mortal_ranks(_be_killed, 3, tmp_path, when) == [0, -signal.SIGKILL, 0]


def _be_killed(rank: int, folder: Path, when: str) -> None:
    join(folder, rank, 3)
    path = folder / "files" / "x.ckpt"
    path.parent.mkdir(exist_ok=True)
    cooperative.save(state(1), path)
    if rank != 1:
        if when == "after":
            cooperative.save(state(2), path, timeout=SHORT_SECONDS)
        else:
            message = f"rank 1 did not come within {SHORT_SECONDS:g} s"
            with pytest.raises(fastensor.CheckpointWriteError, match=message):
                cooperative.save(state(2), path, timeout=SHORT_SECONDS)
        assert os.listdir(path.parent) == [path.name]
        assert step_in(path) == (2 if when == "after" else 1)
        return
    if when == "before":
        die()
    if when == "after":
        receive = Ranks.receive
        replies = []

        def receive_once(ranks: Ranks) -> Any:
            replies.append(None)
            return receive(ranks) if len(replies) == 1 else die()

        Ranks.receive = receive_once  # type: ignore[method-assign]
        cooperative.save(state(2), path)
    with at_call(when, die):
        cooperative.save(state(2), path)


def test_rank_0_is_killed(tmp_path: Path) -> None:
    assert run_mortal_ranks(_lose_rank_0, 3, tmp_path) == [-signal.SIGKILL, 0, 0]


def _lose_rank_0(rank: int, folder: Path) -> None:
    join(folder, rank, 3)
    path = folder / "files" / "x.ckpt"
    path.parent.mkdir(exist_ok=True)
    cooperative.save(state(1), path)
    if rank == 0:
        with at_call("fsync", die):
            cooperative.save(state(2), path)
    message = f"rank 0 has not answered rank [12] for {SHORT_SECONDS:g} s"
    with pytest.raises(fastensor.CheckpointWriteError, match=message):
        cooperative.save(state(2), path, timeout=SHORT_SECONDS / 2)
    assert step_in(path) == 1
    assert len(leftovers(path.parent)) == 1
    if rank == 2:
        (folder / "seen").touch()
    if rank == 1:
        deadline = time.monotonic() + 60
        while not (folder / "seen").exists():
            assert time.monotonic() < deadline, "rank 2 has not seen it"
            os.sched_yield()
        fastensor.save(state(3), path)  # removes what the killed rank has left
        assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("stopped", "call"),
    [
        pytest.param(1, "open", marks=pytest.mark.torture),
        (1, "pwrite"),
        pytest.param(0, "pwrite", marks=pytest.mark.torture),
        (0, "fsync"),
    ],
)
def test_a_rank_that_is_stopped(tmp_path: Path, stopped: int, call: str) -> None:
    """It finds out when it goes on, and the next save succeeds."""
    run_ranks(_be_stopped, 2, tmp_path, stopped, call)


def _be_stopped(rank: int, folder: Path, stopped: int, call: str) -> None:
    join(folder, rank, 2)
    path = folder / "files" / "x.ckpt"
    path.parent.mkdir(exist_ok=True)
    cooperative.save(state(1), path)
    pids = everyones(os.getpid())
    with at_call(call, stop) if rank == stopped else nullcontext():
        with pytest.raises(
            fastensor.CheckpointWriteError, match=f"rank {stopped} (did not come|has not answered)|share"
        ):
            cooperative.save(state(2), path, timeout=SHORT_SECONDS / 2)
        if rank != stopped:
            assert step_in(path) == 1
            wait_until_stopped(pids[stopped])
            os.kill(pids[stopped], signal.SIGCONT)
    dist.barrier()
    assert os.listdir(path.parent) == [path.name]
    assert step_in(path) == 1
    dist.barrier()
    cooperative.save(state(3), path)
    assert step_in(path) == 3
    dist.destroy_process_group()


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"check_replicas is one of .*'sample', 'all'.*found 'none'"):
        cooperative.save(7, tmp_path / "x", check_replicas="none")  # type: ignore[arg-type]
    run_ranks(_save_wrongly, 2, tmp_path)


def _save_wrongly(rank: int, folder: Path) -> None:
    join(folder, rank, 2)
    with pytest.raises(ValueError, match="this rank is not in the group"):
        cooperative.save(7, folder / "x", group=[dist.new_group([0]), dist.new_group([1])][1 - rank])
    for timeout in (timedelta(seconds=5), None, 0, math.nan):
        with pytest.raises(ValueError, match="timeout is a positive number of seconds, found"):
            cooperative.save(7, folder / "x", timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises(fastensor.CheckpointWriteError, match="its directory is missing"):
        cooperative.save(7, folder / "missing" / "x")
    with pytest.raises((fastensor.UnsupportedContentError, fastensor.CheckpointWriteError), match="cannot hold 'x'"):
        cooperative.save({"x": 7}, folder / "x.safetensors")
    with pytest.raises(fastensor.CheckpointWriteError, match="cannot save together inside of other work"):
        _save_nested(folder)
    dist.barrier()
    assert not (folder / "x").exists()
    dist.destroy_process_group()


def _save_nested(folder: Path) -> None:
    """As a signal handler does that interrupts a save."""

    class Saves:
        def __reduce__(self) -> Any:
            cooperative.save(7, folder / "x")
            raise AssertionError

    fastensor.save(Saves(), folder / "x")


def test_a_group_that_begins_again_on_the_same_store(tmp_path: Path) -> None:
    """As a program can that torchrun has started, and that has caught a failure."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run_ranks(_begin_again, 2, tmp_path, server.port)


def _begin_again(rank: int, folder: Path, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port)
    for life in range(3):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
        for _ in range(life + 1):
            cooperative.save(state(life), folder / "x.ckpt")
        if rank == life:  # the other one does not come
            with pytest.raises(fastensor.CheckpointWriteError, match=r"rank . (did not come|has not answered)"):
                cooperative.save(state(7), folder / "x.ckpt", timeout=0.1)
        dist.barrier()
        assert step_in(folder / "x.ckpt") == life
        dist.destroy_process_group()
        _forget_addresses(store, rank, life)


def _forget_addresses(store: dist.Store, rank: int, life: int) -> None:
    """Remove the keys of gloo, which connects to the addresses of the group before if it finds them."""
    store.set(f"ended {life} {rank}", "")
    if rank == 0:
        store.wait([f"ended {life} 1"])
        for key in [key for key in store.list_keys() if "//cpu//" in key]:
            store.delete_key(key)
        store.set(f"forgotten {life}", "")
    store.wait([f"forgotten {life}"])


def test_a_rank_that_does_something_else(tmp_path: Path) -> None:
    run_ranks(_save_while_others_do_not, 2, tmp_path)


def _save_while_others_do_not(rank: int, folder: Path) -> None:
    join(folder, rank, 2)
    if rank == 0:
        with pytest.raises(fastensor.CheckpointWriteError, match=r"rank 1 did not come within 0\.2 s"):
            cooperative.save(state(1), folder / "x", timeout=0.2)
    dist.barrier()
    assert not (folder / "x").exists()
    dist.destroy_process_group()
