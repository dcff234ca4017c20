"""What all benchmarks need: a quiet disk, the peak of memory, and a description of the machine."""

from __future__ import annotations

import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

import fastensor
from fastensor.checkpoint.writing.freeing import wait_for_space

if "FASTENSOR_DICTIONARIES" not in os.environ:
    _dictionaries = tempfile.TemporaryDirectory(prefix="fastensor-bench-dictionaries-")
    os.environ["FASTENSOR_DICTIONARIES"] = _dictionaries.name
"""What is measured is what a new user has: nothing was learned before. Processes that a benchmark starts share it."""

SETTLE_SECONDS = 0.1
IS_TEST = "FASTENSOR_BENCHMARK_IS_TEST" in os.environ
"""Tests run benchmarks beside other tests: the figures mean nothing then, and the disks and the page cache of the whole
machine are left alone."""


def preload(*others: str) -> None:
    """Have processes of the context ``forkserver`` begin with what takes long to import, and is the same for all. Names
    of files beside the program would not be found there."""
    libraries = ["fastensor", "safetensors.torch", "torch.distributed.checkpoint", "lightning.pytorch.plugins", *others]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)


def settle() -> None:
    """Let the disk finish what earlier measurements left behind, freed space included."""
    wait_for_space()
    if not IS_TEST:
        os.sync()
        time.sleep(SETTLE_SECONDS)


def drop_caches(which: Literal["inodes", "all"]) -> None:
    """As root, drop what the kernel keeps of all files that are on the disk: their inodes, or these and their pages."""
    if IS_TEST:
        return
    os.sync()
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text({"inodes": "2", "all": "3"}[which])


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """How far resident memory rose in the block over what it was before (Linux: VmHWM, reset by clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    peaks: list[int] = []
    yield lambda: peaks[0] - before
    peaks.append(_status("VmHWM"))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def synchronize(device: torch.device | str) -> None:
    """Wait for a GPU. A CPU has done what it was asked for."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def peak_of(device: torch.device | str) -> Iterator[Callable[[], int]]:
    """How far the memory of the device rises in the block: on a CPU that of the process, known when the block ends."""
    if torch.device(device).type == "cpu":
        with peak_memory() as peak:
            yield peak
        return
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield lambda: torch.cuda.max_memory_allocated() - before


def describe_gpu_machine(folder: Path, device: str) -> dict[str, str]:
    """What matters for a GPU, too, and of which commit the program is."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    found = describe_machine(folder, device) | {"Python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        driver = Path("/proc/driver/nvidia/version")
        found["device"] = f"{torch.cuda.device_count()} × {found['device']} ({total / 2**30:.0f} GiB)"
        found["CUDA"] = str(torch.version.cuda)
        found["driver"] = driver.read_text().splitlines()[0] if driver.exists() else "?"
    return found | {"commit": git.stdout.strip() or "?"}


def describe_machine(folder: Path, device: str) -> dict[str, str]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "?")
    filesystem = subprocess.run(["df", "--output=fstype", folder], capture_output=True, text=True, check=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python " + " ".join([os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "cpu": f"{len(os.sched_getaffinity(0))} × {model.partition(':')[2].strip()}",
        "kernel": platform.release().partition("-")[0],
        "filesystem": filesystem.stdout.split()[-1],
        "device": torch.cuda.get_device_name() if device == "cuda" else "none",
        **{name: version(name) for name in ("torch", "safetensors")},
        "fastensor": fastensor.__version__,
    }


def received(pipe: Any, seconds: float) -> Any:
    """What a process sends next.

    Raises:
        EOFError: it has ended.
        TimeoutError: nothing comes.
    """
    if not pipe.poll(seconds):
        raise TimeoutError(f"a process has sent nothing for {seconds:g} s")
    return pipe.recv()


@contextmanager
def memory_limit(nbytes: int) -> Iterator[Path | None]:
    """A cgroup whose processes may bring so many bytes into memory from then on, page cache included: the kernel kills
    them if they want more. A process joins by writing its number to the file ``cgroup.procs``. None if no cgroup can be
    made here, which takes root, and a container that allows it. All processes have to be gone when the block ends.
    """
    folder, limit, swap = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
    most_swap = nbytes  # memory counts, too
    if not (folder / limit).exists():  # version 2
        folder, limit, swap, most_swap = Path("/sys/fs/cgroup"), "memory.max", "memory.swap.max", 0
    group, is_made = folder / f"fastensor-{os.getpid()}", True
    try:
        group.mkdir()
        (group / limit).write_text(str(nbytes))
        if (group / swap).exists():
            (group / swap).write_text(str(most_swap))
    except OSError:
        is_made = False
    try:
        yield group if is_made else None
    finally:
        if group.exists():
            group.rmdir()
