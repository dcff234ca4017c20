"""Ranks that share what they learn: real processes, real groups of gloo, made-up kinds of machines."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from fastensor import Context, Selector
from fastensor.select import share
from fastensor.select.dictionary import Change
from fastensor.select.share import Sharing, kind_of, leaders_of

WRITE, NBYTES = Context("write"), 1 << 20
CANDIDATES = ("numpy", "torch", "direct")
FASTEST = ("direct", "torch", "numpy", "torch")
"""By rank, if it explores by itself."""


def explore(selector: Selector, rank: int, uses: int = 12) -> list[str]:
    used = []
    for _ in range(uses):
        choice = selector.choose(NBYTES, WRITE, CANDIDATES, default="numpy")
        selector.record(NBYTES, WRITE, choice.backend, 1.0 if choice.backend == FASTEST[rank] else 1.9, choice)
        used.append(choice.backend)
    return used


def start(rank: int, program: str, world: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=30))
    dist.barrier()  # a rank that ended before the others are connected to it would fail them
    PROGRAMS[program](rank, folder)
    if dist.is_initialized() and not program.startswith("dies"):
        dist.destroy_process_group()


def run(program: str, world: int, folder: Path) -> list[Any]:
    """What each rank has noted."""
    run_ranks(start, world, program, world, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def note(folder: Path, rank: int, found: Any) -> None:
    (folder / f"{rank}.json").write_text(json.dumps(found))


def shared(kinds: tuple[str | None, ...]) -> Callable[[int, Path], None]:
    def program(rank: int, folder: Path) -> None:
        selector = Selector(paper=True)
        sharing = Sharing(selector, kinds[rank])
        before = explore(selector, rank)
        sharing.sync()
        sharing.sync()  # nothing is new
        after = explore(selector, rank, 3)
        note(folder, rank, [sharing.leader, sorted(set(before)), after, selector.statistics().explored > 0])

    return program


def learned_anew(rank: int, folder: Path) -> None:
    selector = Selector(paper=True)
    sharing = Sharing(selector, "same")
    explore(selector, rank)
    sharing.sync()
    before = selector.choose(NBYTES, WRITE, CANDIDATES).backend
    if rank == 0:
        for _ in range(20):  # its disk has become another one
            selector.record(NBYTES, WRITE, "torch", 0.1)
    sharing.sync()
    note(folder, rank, [before, selector.choose(NBYTES, WRITE, CANDIDATES).backend])


def read_otherwise(rank: int, folder: Path) -> None:
    """What is the fastest to write stays so, and so does what is the fastest to read; but not for both."""
    selector = Selector(mode="write_read", paper=True)
    timings = {("write", "numpy"): 1.0, ("write", "direct"): 1.2, ("read", "numpy"): 2.0, ("read", "direct"): 1.9}
    if rank == 0:
        for (operation, name), seconds in timings.items():
            selector.record(NBYTES, Context(operation), name, seconds)  # type: ignore[arg-type]
    sharing = Sharing(selector, "same")
    before = selector.choose(NBYTES, WRITE, ("direct", "numpy")).backend
    if rank == 0:
        found = selector.dictionary
        found.apply(Change(Context("read"), NBYTES, "numpy"))
        found.apply(Change(Context("read"), NBYTES, "numpy", 2.3))
        selector.adopt(found)
    sharing.sync()
    note(folder, rank, [before, selector.choose(NBYTES, WRITE, ("direct", "numpy")).backend])


def cannot_everything(rank: int, folder: Path) -> None:
    """What fails on rank 1 is not asked of it again, whatever rank 0 has learned."""
    selector = Selector(paper=True)
    sharing = Sharing(selector, "same")
    if rank == 1:
        selector.failed(NBYTES, WRITE, "direct", "not now")
    explore(selector, 0)
    sharing.sync()
    note(folder, rank, selector.choose(NBYTES, WRITE, CANDIDATES).backend)


def known_before(rank: int, folder: Path) -> None:
    """Rank 0 knows from an earlier run; no rank explores."""
    selector = Selector(paper=True)
    if rank == 0:
        explore(selector, rank)
    Sharing(selector, "same")
    note(folder, rank, explore(selector, rank, 3))


def in_a_dimension(rank: int, folder: Path) -> None:
    """Ranks of one of two dimensions share, twice. Rank 0 has a group more than others, and rank 3 comes last."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    if rank == 3:  # ranks 0 and 2 do not wait for rank 3 to share
        dist.recv(torch.empty(1), 0)
    group = mesh.get_group("dp")
    found = []
    for _ in range(2):
        selector = Selector(paper=True)
        sharing = Sharing(selector, "same", group)
        explore(selector, rank)
        sharing.sync()
        found.append([sharing.leader, explore(selector, rank, 1)])
        sharing.end()
    if rank == 0:
        dist.send(torch.ones(1), 3)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)  # the group is still the training's
    note(folder, rank, [*found, total.item()])


def of_some_ranks(rank: int, folder: Path) -> None:
    """Ranks outside of the group share nothing, and learn by themselves."""
    group = dist.new_group([1, 2])
    selector = Selector(paper=True)
    sharing = Sharing(selector, "same", group)
    explore(selector, rank)
    sharing.sync()
    note(folder, rank, [explore(selector, rank, 1), selector.statistics().explored > 0])


def dies(rank: int, folder: Path) -> None:
    selector = Selector(paper=True)
    sharing = Sharing(selector, "same")
    if rank == 0:
        note(folder, rank, "dead")
        os._exit(0)
    before = explore(selector, rank)
    sharing.sync()
    note(folder, rank, [sorted(set(before)), explore(selector, rank)[-1], sharing.leader])
    os._exit(0)


def train(rank: int, sharing: Sharing, steps: int = 3) -> list[float]:
    """What the ranks sum up between the syncs: 1 and 2 and so on."""
    sums = []
    for _ in range(steps):
        sharing.sync()
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        sums.append(total.item())
    return sums


def leaves(rank: int, folder: Path) -> None:
    """Rank 1 cannot go on."""
    selector = Selector(paper=True)
    sharing = Sharing(selector, "same")
    if rank == 1:

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("injected")

        share._broadcast = fail
    sums = train(rank, sharing)
    note(folder, rank, [sums, sharing.leader == rank, selector.explore])


def does_not_come(rank: int, folder: Path) -> None:
    """Rank 1 is not there when rank 0 syncs, but later."""
    share._PATIENCE = datetime.timedelta(seconds=1)
    sharing = Sharing(Selector(), "same")
    if rank == 0:
        sharing.sync()
    dist.barrier()
    note(folder, rank, [train(rank, sharing), sharing.leader])


def of_another_version(rank: int, folder: Path) -> None:
    selector = Selector(paper=True)
    sharing = Sharing(selector, "same")
    if rank == 0:
        sharing._update = lambda: '{"format": "fastensor dictionary", "version": 99}'  # type: ignore[method-assign]
    sums = train(rank, sharing)
    explore(selector, rank)
    note(folder, rank, [sums, sharing.leader, selector.choose(NBYTES, WRITE, CANDIDATES).backend])


PROGRAMS: dict[str, Callable[[int, Path], None]] = {
    "homogeneous": shared(("same",) * 4),
    "heterogeneous": shared(("A100, ext4", "H100, ext4", "A100, ext4", "H100, ext4")),
    "two kinds": shared(("A100, ext4", "A100, nfs")),
    "model parallel": shared((None, "same", "same", None)),
    "learned anew": learned_anew,
    "read otherwise": read_otherwise,
    "cannot everything": cannot_everything,
    "known before": known_before,
    "dimension": in_a_dimension,
    "some": of_some_ranks,
    "dies": dies,
    "leaves": leaves,
    "does not come": does_not_come,
    "another version": of_another_version,
}


@pytest.mark.parametrize("world", [2, 4])
def test_rank_0_explores_for_all_that_are_alike(tmp_path: Path, world: int) -> None:
    found = run("homogeneous", world, tmp_path)
    assert found[0] == [0, sorted(CANDIDATES), ["direct"] * 3, True]
    assert found[1:] == [[0, ["numpy"], ["direct"] * 3, False]] * (world - 1)


def test_each_kind_has_an_explorer_of_its_own(tmp_path: Path) -> None:
    found = run("heterogeneous", 4, tmp_path)
    assert [one[0] for one in found] == [0, 1, 0, 1]
    assert [one[2][0] for one in found] == ["direct", "torch", "direct", "torch"]
    assert [one[3] for one in found] == [True, True, False, False]


def test_ranks_on_other_filesystems_are_not_alike(tmp_path: Path) -> None:
    found = run("two kinds", 2, tmp_path)
    assert [one[2][0] for one in found] == ["direct", "torch"]
    assert [one[3] for one in found] == [True, True]


def test_ranks_of_other_sizes_keep_to_themselves(tmp_path: Path) -> None:
    found = run("model parallel", 4, tmp_path)
    assert [one[0] for one in found] == [0, 1, 1, 3]
    assert [one[2][0] for one in found] == ["direct", "torch", "torch", "torch"]
    assert [one[3] for one in found] == [True, True, False, True]


def test_what_is_learned_anew_is_sent_anew(tmp_path: Path) -> None:
    assert run("learned anew", 2, tmp_path) == [["direct", "torch"]] * 2


def test_another_winner_of_the_sum_of_both_is_news(tmp_path: Path) -> None:
    assert run("read otherwise", 2, tmp_path) == [["numpy", "direct"]] * 2


def test_what_failed_on_one_rank_is_not_used_there(tmp_path: Path) -> None:
    assert run("cannot everything", 2, tmp_path) == ["direct", "numpy"]


def test_what_rank_0_knows_is_sent_at_once(tmp_path: Path) -> None:
    assert run("known before", 2, tmp_path) == [["direct"] * 3] * 2


def test_groups_of_a_dimension_of_a_mesh(tmp_path: Path) -> None:
    first, second = [0, ["direct"]], [0, ["torch"]]
    assert run("dimension", 4, tmp_path) == [[first] * 2 + [2.0], [second] * 2 + [2.0]] * 2


def test_ranks_outside_of_the_group_keep_to_themselves(tmp_path: Path) -> None:
    found = run("some", 4, tmp_path)
    assert found == [[["direct"], True], [["torch"], True], [["torch"], False], [["torch"], True]]


def test_a_rank_that_dies_leaves_the_others_to_themselves(tmp_path: Path) -> None:
    found = run("dies", 2, tmp_path)
    assert found[1] == [["numpy"], "torch", 1]


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_leaves_does_not_disturb_the_training(tmp_path: Path, world: int) -> None:
    total = world * (world + 1) / 2
    assert run("leaves", world, tmp_path) == [[[total] * 3, True, True]] * world


def test_a_rank_that_does_not_come_is_waited_for_so_long(tmp_path: Path) -> None:
    assert run("does not come", 2, tmp_path) == [[[3.0] * 3, 0], [[3.0] * 3, 1]]


def test_what_cannot_be_read_is_not_followed(tmp_path: Path) -> None:
    assert run("another version", 2, tmp_path) == [[[3.0] * 3, 0, "direct"], [[3.0] * 3, 1, "torch"]]


def test_without_a_group_there_is_nothing_to_share() -> None:
    selector = Selector(paper=True)
    sharing = Sharing(selector, "same")
    assert set(explore(selector, 0)) == set(CANDIDATES)
    sharing.sync()
    assert sharing.leader == 0


def test_kinds() -> None:
    cpu, machine = torch.device("cpu"), {"cpu": "a", "filesystem": "ext4", "disk": "nvme", "torch": "2.13"}
    assert kind_of(cpu, machine) == kind_of(cpu, {**machine, "torch": "2.14"})
    for other in ({"cpu": "b"}, {"filesystem": "nfs"}, {"disk": "virtual"}):
        assert kind_of(cpu, machine) != kind_of(cpu, {**machine, **other})
    assert leaders_of([None, None]) == (0, 1)
