"""The parts of activation offload that decide: which bytes, where, in which order."""

from __future__ import annotations

import math
import os
import resource
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from programs import run
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.files import launchers
from fastensor.offload import OffloadConfig, engine, slots, tiers
from fastensor.offload.config import with_default_folder
from fastensor.offload.engine import rates_of
from fastensor.offload.forward import ForwardPass, PrefetchSchedule, PrefetchSchedules, complete
from fastensor.offload.host_memory import HostMemory, page_fault_seconds
from fastensor.offload.planner import PassRecord
from fastensor.offload.saved import SavedBytes, StoredBytes, StoredPiece
from fastensor.offload.slots import ALIGNMENT, SlotFiles
from fastensor.offload.statistics import drive_days
from fastensor.offload.swapper import Swapper
from fastensor.offload.tensors import View, bytes_to_move, spanned


@given(st.data())
def test_views_are_made_again_as_they_were(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bool, torch.bfloat16, torch.complex64, torch.int64]))
    tensor = torch.arange(math.prod(shape) + 9).to(dtype)[data.draw(st.integers(0, 9)) :]
    tensor = tensor[: math.prod(shape)].reshape(shape)
    for dimension in range(tensor.dim()):
        if tensor.shape[dimension] > 1 and data.draw(st.booleans()):
            tensor = tensor.narrow(dimension, 1, tensor.shape[dimension] - 1)
        if data.draw(st.booleans()):
            tensor = tensor.transpose(0, dimension)
    if dtype.is_complex and data.draw(st.booleans()):
        tensor = tensor.conj()
    assume(tensor.numel())  # an empty tensor may begin behind its storage; none is moved
    storage = tensor.untyped_storage()
    moved = bytes_to_move(spanned(tensor), storage.nbytes())
    assert moved.start % 64 == 0
    assert 0 <= moved.start <= spanned(tensor).start
    assert spanned(tensor).stop <= moved.stop <= storage.nbytes()
    content = bytes(storage.tolist()[moved.start : moved.stop])
    again, memory = HostMemory(0).storage(max(len(content), 1))
    memory[: len(content)] = content
    found = View.of(tensor).on(again, moved.start)
    assert torch.equal(found, tensor)
    assert (found.stride(), found.dtype, found.is_conj()) == (tensor.stride(), dtype, tensor.is_conj())


@given(st.lists(st.integers(0, 30), max_size=40), st.lists(st.integers(0, 20), max_size=40))
def test_orders_are_complete(known: list[int], saved: list[int]) -> None:
    found = complete(known, saved)
    assert set(found) == set(saved)
    there = [position for position in known if position in saved]
    assert found[: len(there)] == there
    assert found[len(there) :] == [position for position in reversed(saved) if position not in known]


@given(st.permutations(range(8)), st.permutations(range(8)))
def test_the_last_order_is_what_is_expected(first: list[int], second: list[int]) -> None:
    schedules = PrefetchSchedules()
    schedule = schedules.begin(7, range(8))
    assert list(schedule.upcoming()) == list(range(7, -1, -1))
    for position in first:
        schedule.take(position)
    again = schedules.begin(7, range(8))
    assert list(again.upcoming()) == first
    assert [again.take(position) for position in first] == [True] * 8
    other = schedules.begin(7, range(8))
    for position in second:
        other.take(position)
        assert position not in list(other.upcoming())
    assert list(schedules.begin(8, range(2)).upcoming()) == [1, 0], "another form"


def test_a_second_look_that_was_not_expected_changes_nothing() -> None:
    schedule = PrefetchSchedule([2, 1, 0])
    assert [schedule.take(position) for position in (2, 2, 0, 1, 0)] == [True] * 5
    assert schedule.taken == [2, 2, 0, 1, 0]


def test_a_position_that_is_back_after_it_was_struck_out() -> None:
    """It had stayed in memory, and had to leave later."""
    schedule = PrefetchSchedule([0, 1, 2, 3, 4])
    schedule.take(0)
    assert list(schedule.upcoming(lambda position: position not in (2, 3))) == [1, 4]
    schedule.take(1)
    schedule.take(3)
    schedule.take(2)
    assert list(schedule.upcoming()) == [4]


def test_what_is_passed_over_is_expected_for_a_while() -> None:
    schedule = PrefetchSchedule(range(20))
    assert [schedule.take(position) for position in range(1, 9)] == [True] * 8
    assert next(schedule.upcoming()) == 0
    assert not schedule.take(9), "others are wanted by now"
    assert list(schedule.upcoming()) == [*range(10, 20), 0], "and this one last"


def test_branches_in_another_order_than_the_last_time() -> None:
    """The branch that was passed over is expected once the other one is done, or begins in between."""
    schedule = PrefetchSchedule(range(40))
    assert [schedule.take(position) for position in range(20, 30)] == [False] + [True] * 9
    assert list(schedule.upcoming()) == [*range(30, 40), *range(20)]
    assert schedule.take(0)
    assert [schedule.take(position) for position in range(30, 40)] == [True] * 10
    assert list(schedule.upcoming()) == list(range(1, 20))
    assert [schedule.take(position) for position in range(1, 20)] == [True] * 19
    assert not list(schedule.upcoming())


@given(st.lists(st.integers(0, 5), max_size=30))
def test_what_is_wanted_several_times_is_expected_as_often(order: list[int]) -> None:
    schedule = PrefetchSchedule(order)
    for number, position in enumerate(order):
        assert list(schedule.upcoming()) == order[number:]
        assert schedule.take(position)
    assert not list(schedule.upcoming())


@given(st.lists(st.integers(0, 9), max_size=30), st.sets(st.integers(0, 9)))
def test_what_is_gone_is_not_expected(wanted: list[int], gone: set[int]) -> None:
    schedule, left = PrefetchSchedule([*range(10), *range(10)]), dict.fromkeys(range(10), 2)
    for position in (one for one in wanted if one not in gone):
        schedule.take(position)
        left[position] -= 1
        there = list(schedule.upcoming(lambda one: one not in gone))
        assert not gone.intersection(there)
        assert all(there.count(one) <= max(left[one], 0) for one in range(10))
        assert there == list(schedule.upcoming()), "it is not asked about again"


def test_what_is_gone_is_asked_about_once() -> None:
    """A look ahead costs what it finds, however much was saved before."""
    schedule = PrefetchSchedule(range(100_000))
    asked: list[int] = []

    def is_there(position: int) -> bool:
        asked.append(position)
        return position in (0, 1, 50_000, 99_999)

    assert list(schedule.upcoming(is_there)) == [0, 1, 50_000, 99_999]
    assert len(asked) == 100_000
    asked.clear()
    assert schedule.take(0)
    assert list(schedule.upcoming(is_there)) == asked == [1, 50_000, 99_999]
    assert not schedule.take(50_000), "that was not expected so soon"
    assert list(schedule.upcoming(is_there)) == [99_999, 1]
    assert len(asked) == 5


def test_a_trainers_folder_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = with_default_folder(OffloadConfig(min_bytes=1), "new/folder")
    assert found == OffloadConfig(min_bytes=1, directories=(str(tmp_path / "new/folder"),))
    assert (tmp_path / "new/folder").is_dir()
    for config, folder in (
        (found, "other"),
        (OffloadConfig(target="dram"), "other"),
        (OffloadConfig(), None),
        (OffloadConfig(), "s3://bucket"),
    ):
        assert with_default_folder(config, folder) == config
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("nbytes", [1, 4096, (4 << 20) + 1, (20 << 20) + 77])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_slots_hold_what_is_put_there(tmp_path: Path, nbytes: int, count: int) -> None:
    folders = [tmp_path / str(number) for number in range(count)]
    for folder in folders:
        folder.mkdir()
    files = SlotFiles(OffloadConfig(directories=tuple(map(str, folders))))
    found = [files.allocate(nbytes) for _ in range(2 * count)]
    assert len({slot.file.fd for slot in found if slot is not None}) == count, "the files take turns"
    for slot in found:
        assert slot is not None
        assert slot.extent.begin % ALIGNMENT == slot.extent.end % ALIGNMENT == 0
        assert nbytes <= slot.extent.end - slot.extent.begin < nbytes + ALIGNMENT
        files.free(slot)
    assert files.used_nbytes == 0
    assert not any(list(folder.iterdir()) for folder in folders)
    files.close()


def test_memory_goes_from_one_tensor_to_the_next() -> None:
    memory = HostMemory(1 << 20)
    first, view = memory.storage(100_000)
    view[:3] = b"abc"
    address = first.data_ptr()
    assert address % 4096 == 0
    assert first.nbytes() == 102_400
    del view
    assert memory.idle_nbytes == 0
    del first
    assert memory.idle_nbytes == 102_400
    assert memory.storage(99_000)[0].data_ptr() == address
    kept = [memory.storage(600_000) for _ in range(3)]
    del kept
    assert memory.idle_nbytes <= 1 << 20


FREED_MEMORY = """
import mmap
import torch
from fastensor.offload.host_memory import free_heap_bytes, resident_bytes, return_freed_memory

of_another_allocator = mmap.mmap(-1, 300_000_000, flags=mmap.MAP_PRIVATE)
of_another_allocator.write(bytes(300_000_000))
tensors = [torch.ones(100_000, dtype=torch.uint8) for _ in range(2000)]
last = tensors[-1]
del tensors
free, resident = free_heap_bytes(), resident_bytes()
return_freed_memory()
print(free, free - free_heap_bytes(), resident - resident_bytes())
"""


def test_freed_memory_returns_to_the_system_wherever_it_lies(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FREED_MEMORY)
    free, less_free, less_resident = map(int, run(program).stdout.split())
    assert free > 150_000_000
    assert min(less_free, less_resident) > 150_000_000


KEPT_MEMORY = """
import sys
import torch
from fastensor.offload import host_memory

tensors = [torch.ones(100_000, dtype=torch.uint8) for _ in range(2000)]
last = tensors[-1]
del tensors
free = int(sys.argv[1]) * host_memory.free_heap_bytes() // 100
host_memory.available_memory = lambda: free
print(host_memory.bytes_until_short(0) < 0, host_memory.bytes_until_short(1 << 50) - free + (1 << 50))
"""


@pytest.mark.parametrize("percent", [0, 20, 30, 100])
def test_memory_is_short_if_little_is_free_beside_the_holes(tmp_path: Path, percent: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(KEPT_MEMORY)
    assert run(program, percent, LOCAL_WORLD_SIZE="1").stdout.split() == [str(percent < 25), "0"]


HOLES = """
import sys
import torch
from fastensor.offload import ActivationOffload, OffloadConfig
from fastensor.offload.host_memory import free_heap_bytes, return_freed_memory

return_freed_memory()  # from now on it is known what is beside the heap
tensors = [torch.ones(100_000, dtype=torch.uint8) for _ in range(2000)]
last = tensors[-1]
del tensors
before = free_heap_bytes()
schedule = 0.0 if sys.argv[2] == "share" else "1MiB"
config = OffloadConfig(schedule=schedule, staging_bytes="1MiB", prefetch_bytes="1MiB", directories=(sys.argv[1],))
x = torch.ones(1 << 20, requires_grad=True)
with ActivationOffload(config) as offload:
    with offload.step():
        loss = x
        for _ in range(8):
            loss = loss.sin()
    print(before, free_heap_bytes())
    loss.sum().backward()
"""


@pytest.mark.parametrize("schedule", ["share", "bytes"])
def test_holes_take_no_more_than_the_room_if_the_schedule_is_a_number_of_bytes(tmp_path: Path, schedule: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(HOLES)
    before, after = map(int, run(program, tmp_path, schedule).stdout.split())
    assert before > 150_000_000
    assert (after < 100_000_000) == (schedule == "bytes")


# --- rates of transfers

MB = 10**6
LATEST: dict[str, float] = {
    "written_bytes": 100 * MB, "read_bytes": 50 * MB, "write_seconds": 0.5, "read_seconds": 0.1, "cpu_seconds": 0.3,
    "hook_seconds": 0.2, "offloaded": 20, "offloaded_bytes": 100 * MB, "page_faults": 1000,
}  # fmt: skip


@pytest.fixture
def each_second_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every processor computes, in two threads; the first touch of a page takes a tenth of a millisecond."""
    monkeypatch.setattr(engine, "_share_of_processors", lambda: 1.0)
    monkeypatch.setattr(engine, "page_fault_seconds", lambda: 1e-4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)


def test_rates_are_those_of_the_latest_transfers(each_second_counts: None) -> None:
    found = rates_of(LATEST, OffloadConfig(staging_bytes=7 << 20, prefetch_bytes=9 << 20), None)
    assert (found.write_bandwidth, found.read_bandwidth) == (200 * MB, 500 * MB)
    assert (found.staging_bytes, found.prefetch_bytes) == (7 << 20, 9 << 20)
    assert found.seconds_per_tensor == 0.01
    assert found.slowdown_per_byte == pytest.approx((0.3 + 1000 * 1e-4 / 2) / (150 * MB))


def test_pages_that_others_touch_do_not_count(each_second_counts: None) -> None:
    """At most what has left memory is touched first again."""
    found = rates_of(LATEST | {"cpu_seconds": 0.0, "page_faults": 10**9}, OffloadConfig(), None)
    assert found.slowdown_per_byte == pytest.approx(100 * MB // 4096 * 1e-4 / 2 / (150 * MB))


def test_bytes_that_stay_in_host_memory_share_what_transfers_take(each_second_counts: None) -> None:
    found = rates_of(LATEST | {"offloaded_bytes": 1000 * MB, "page_faults": 0}, OffloadConfig(), None)
    assert found.slowdown_per_byte == pytest.approx(0.3 / (1000 * MB))


@pytest.mark.parametrize("nothing_read", [{"read_bytes": 0}, {"read_seconds": 0.0}])
def test_reads_are_as_fast_as_before_where_none_were_measured(nothing_read: dict[str, float]) -> None:
    without = LATEST | nothing_read
    assert rates_of(without, OffloadConfig(), None).read_bandwidth == 200 * MB
    before = rates_of(LATEST, OffloadConfig(), None)
    assert rates_of(without, OffloadConfig(), before).read_bandwidth == 500 * MB


def test_hooks_that_have_waited_longer_than_they_took_take_nothing() -> None:
    assert rates_of(LATEST | {"hook_seconds": -1.0}, OffloadConfig(), None).seconds_per_tensor == 0


def test_rates_are_found_out_again_when_much_has_moved_since() -> None:
    one = engine.OffloadEngine(OffloadConfig())
    counts, clock = one._counters.counts, one._counters.writes

    def bandwidth(written: int, seconds: float) -> float:
        counts["written_bytes"] += written
        clock._seconds += seconds
        rates = one._rates()
        assert rates is not None
        return rates.write_bandwidth

    assert one._rates() is None
    assert bandwidth(1000, 1.0) == 1000
    assert bandwidth(200, 0.1) == 1000
    assert bandwidth(400, 0.1) == pytest.approx(3000)
    assert bandwidth(0, 0.0) == pytest.approx(3000)


def test_pages_that_were_touched_before_the_first_step_do_not_count() -> None:
    one = engine.OffloadEngine(OffloadConfig())
    assert one._counters.transfers()["page_faults"] - one._window_start["page_faults"] < 10_000 < resource.getrusage(
        resource.RUSAGE_SELF
    ).ru_minflt  # fmt: skip


def test_the_first_touch_of_memory_takes_time() -> None:
    assert 1e-8 < page_fault_seconds() < 1e-3


@pytest.mark.parametrize("away", [False, True])
def test_only_ranges_that_were_written_until_they_are_needed_have_moved(away: bool) -> None:
    storage = torch.UntypedStorage(100)
    saved = SavedBytes(100, 0, storage.device, StorageWeakRef(storage), storage)  # type: ignore[no-untyped-call]
    saved.stored = StoredBytes("numpy", (StoredPiece(cast(slots.FileSlot, None), 60, 60, 0),))
    saved.source = None if away else storage
    record = PassRecord()
    forward = ForwardPass(cast(Swapper, None), PrefetchSchedules(), record)
    forward.add(None, record.nothing(0.0))
    for clock in (1.0, 2.0):
        forward.note_needed(0, clock, saved)
    assert record.moved_nbytes == (60 if away else 0)
    assert record.tensors[0].needed_at == 1.0


@pytest.mark.parametrize(("nbytes", "seconds", "terabytes", "days"), [(0, 1, 5, math.inf), (1, 1, None, math.inf),
                         (10**12, 86_400, 365, 365)])  # fmt: skip
def test_days_of_drives(nbytes: int, seconds: float, terabytes: float | None, days: float) -> None:
    assert drive_days(nbytes, seconds, terabytes) == days


def test_folders_on_one_filesystem_share_its_space(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    one, two = (slots._limits([str(tmp_path)] * count, OffloadConfig()) for count in (1, 2))
    assert sum(one) == pytest.approx(sum(two), rel=0.01)
    assert sum(two) <= space.f_bavail * space.f_frsize


def test_the_budget_of_host_memory_is_what_a_container_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "available_memory", lambda: 8 << 30)
    for name in launchers._LOCAL_PROCESSES:
        monkeypatch.delenv(name, raising=False)
    assert tiers._dram_budget(OffloadConfig(target="dram")) == 4 << 30
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    assert tiers._dram_budget(OffloadConfig(target="dram")) == 1 << 30


def test_processes_of_any_launcher_share_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launchers._LOCAL_PROCESSES:
        monkeypatch.delenv(name, raising=False)
    (alone,) = slots._limits([str(tmp_path)], OffloadConfig())
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    (shared,) = slots._limits([str(tmp_path)], OffloadConfig())
    assert shared == pytest.approx(alone / 4, rel=0.01)
