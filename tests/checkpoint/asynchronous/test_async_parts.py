"""The parts of asynchronous saves that decide: budgets and pace; the memory and the thread."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.checkpoint.asynchronous.pace import Pace
from fastensor.checkpoint.asynchronous.settings import staging_limit
from fastensor.files import launchers
from fastensor.files.afterwards import Worker
from fastensor.files.budgets import available_memory
from fastensor.files.launchers import local_processes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable:   {32 << 20} kB\n"}
V2 = {**MEMINFO, "proc/self/cgroup": "0::/jobs/7\n"}
V1 = {**MEMINFO, "proc/self/cgroup": "12:cpu:/x\n5:memory,hugetlb:/jobs/7\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (MEMINFO, 32 * GIB),
        ({}, 0),
        ({**V2, "sys/fs/cgroup/jobs/7/memory.max": "max\n", "sys/fs/cgroup/jobs/7/memory.current": "5"}, 32 * GIB),
        (
            {
                **V2,
                "sys/fs/cgroup/jobs/7/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/jobs/7/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/jobs/7/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            6 * GIB,
        ),
        (
            {
                **V2,
                "sys/fs/cgroup/jobs/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/jobs/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/jobs/7/memory.max": "max\n",
            },
            GIB,
        ),
        ({**V2, "sys/fs/cgroup/memory.max": f"{4 * GIB}", "sys/fs/cgroup/memory.current": f"{3 * GIB}"}, GIB),
        (
            {
                **V1,
                "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": f"{8 * GIB}",
                "sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/jobs/7/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
            },
            7 * GIB,
        ),
        (
            {
                **V2,
                "sys/fs/cgroup/jobs/7/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/jobs/7/memory.high": f"{6 * GIB}\n",
                "sys/fs/cgroup/jobs/7/memory.current": f"{GIB}\n",
            },
            5 * GIB,
        ),
        ({**V2, "sys/fs/cgroup/jobs/7/memory.max": "5", "sys/fs/cgroup/jobs/7/memory.current": "9"}, 1),
    ],
    ids=[
        "no cgroup",
        "nothing known",
        "no limit",
        "limit",
        "limit above",
        "limit of the container",
        "v1",
        "high",
        "used up",
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert available_memory(write(tmp_path, files)) == expected


@pytest.mark.parametrize(("limit", "use"), [("data size", "VmData"), ("address space", "VmSize")])
def test_available_memory_within_limits_of_the_process(tmp_path: Path, limit: str, use: str) -> None:
    files = MEMINFO | {
        "proc/self/limits": f"Limit   Soft Limit  Hard Limit  Units\nMax {limit}     {3 << 30}   unlimited   bytes\n",
        "proc/self/status": f"Name: x\n{use}:\t {1 << 20} kB\n",
    }
    assert available_memory(write(tmp_path, files)) == 2 << 30
    files["proc/self/limits"] = f"Max {limit}     unlimited   unlimited   bytes\n"
    assert available_memory(write(tmp_path, files)) == 32 << 30


def test_available_memory_of_this_machine() -> None:
    assert 0 < available_memory() < 1 << 50


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        *(({"LOCAL_WORLD_SIZE": nothing}, 1) for nothing in ("", "none", "0", "-2", "\u00b2")),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x16),4(x3),1"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"MPI_LOCALNRANKS": "3"}, 3),
        ({"PMI_LOCAL_SIZE": "3"}, 3),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "none", "SLURM_NTASKS_PER_NODE": "8"}, 8),
        # In a job of 8 tasks per machine, a step of one has started torchrun or a single process.
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NTASKS_PER_NODE": "8"}, 1),
    ],
)
def test_launchers_say_how_many_processes_there_are(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: int
) -> None:
    for name in launchers._LOCAL_PROCESSES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert local_processes() == expected


def test_the_budget_is_shared_by_the_processes_of_a_machine() -> None:
    assert staging_limit(64 * GIB, 8) == 4 * GIB
    assert staging_limit(0, 8) == BUFFER_NBYTES


@given(rate=st.floats(1, 1e9), sizes=st.lists(st.integers(1, 1 << 24), max_size=20), pauses=st.lists(st.floats(0, 10)))
def test_the_pace_is_kept(rate: float, sizes: list[int], pauses: list[float]) -> None:
    now = 100.0
    pace = Pace(rate, clock=lambda: now)
    started, moved = now, 0
    for number, nbytes in enumerate(sizes):
        now += pace.delay(nbytes)
        moved += nbytes
        assert moved - nbytes <= rate * (now - started) * (1 + 1e-9) + 1
        now += pauses[number] if number < len(pauses) else 0.0


def test_without_a_rate_no_caller_waits() -> None:
    assert Pace(None).delay(1 << 40) == 0.0


def test_who_is_in_a_hurry_does_not_wait() -> None:
    pace = Pace(1.0)
    pace.wait(1 << 40)  # the first bytes are free
    with pace.hurried():
        with pace.hurried():
            pass
        pace.wait(1 << 40)
    waiting = threading.Thread(target=pace.wait, args=(1,))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    with pace.hurried():
        waiting.join(60)
        assert not waiting.is_alive()


def test_a_worker_keeps_the_order_and_goes_on_after_a_failure() -> None:
    done: list[int] = []
    worker = Worker("test-worker")
    assert not worker.has_thread
    for number in range(200):
        assert worker.give(partial(done.append, number))
        if number % 20 == 0:
            assert worker.give(sys.exit)
    worker.stop(wait=True)
    assert done == list(range(200))
    assert not [thread for thread in threading.enumerate() if thread.name == "test-worker"]
