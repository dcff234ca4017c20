"""What a load of a small file costs: calls of Python, calls of C, and system calls, beside its time.

    python benchmarks/small_loads.py --output /tmp/small_loads

Each row is of a process of its own, which has loaded the file before, so that nothing is imported any more. Calls are
counted in one load, by ``sys.setprofile``, in all threads; system calls in another one, by ``strace`` where that is
installed, in all threads, too; times are medians of ten more. Cold: nothing of the file is in the page cache,
nor its inode in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import describe_machine
from new_user import evict

import fastensor

SIZES = {"64 KiB": (16, 1 << 10), "1 MiB": (16, 16 << 10), "10 MiB": (40, 64 << 10)}
"""Tensors, and elements of each, of 4 bytes."""
CONTAINERS = ("ckpt", "safetensors")
STATES = ("cold", "warm")
ROUNDS = 10
_MARK = b"a load begins or ends"
_SHOWN = 6
"""The most frequent system calls are named."""
_NAMES = {"syscall_0x1c3": "cachestat"}
"""Names that an older ``strace`` does not know."""


def counted(call: Callable[[], object]) -> Counter[str]:
    """Calls of Python's functions and of C's, in all threads that begin meanwhile, and in this one."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        found[event] += 1

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


def one(path: Path, state: str) -> dict[str, float]:
    """In a process of its own."""
    times = []
    load = partial(fastensor.load, path)
    load()
    mark = os.open(os.devnull, os.O_WRONLY)

    def prepare() -> None:
        if state == "cold":
            evict(path)

    prepare()
    os.write(mark, _MARK)
    load()
    os.write(mark, _MARK)
    prepare()
    calls = counted(load)
    for _ in range(ROUNDS):
        prepare()
        began = time.perf_counter()
        load()
        times.append(time.perf_counter() - began)
    return {"calls": calls["call"], "c_calls": calls["c_call"], "seconds": statistics.median(times)}


def system_calls(trace: str) -> Counter[str]:
    """By name the system calls between the marks; what is resumed counts once."""
    between = trace.split(_MARK.decode())[1].splitlines()[1:-1]
    names = (line.split(None, 1)[1].partition("(")[0] for line in between if "resumed>" not in line)
    return Counter(_NAMES.get(name, name) for name in names if name.isidentifier())


def measured(path: Path, state: str, trace: Path) -> str:
    """A row of the table."""
    command = [sys.executable, __file__, "--one", str(path), state]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found, system, names = json.loads(done.stdout), "–", "–"
    if shutil.which("strace"):
        subprocess.run(["strace", "-f", "-o", str(trace), *command], capture_output=True, check=True)
        counts = system_calls(trace.read_text())
        system = str(counts.total())
        names = ", ".join(f"{count} {name}" for name, count in counts.most_common(_SHOWN))
    times = f"{found['seconds'] * 1e3:.2f}"
    return f"| {found['calls']} | {found['c_calls']} | {system} | {times} | {names} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/small_loads"), help="without suffix")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(Path(options.one[0]), options.one[1])))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    lines = ["# Loads of small files", ""]
    lines += [f"- {what}: {text}" for what, text in describe_machine(options.folder, "cpu").items()]
    lines += ["", "| file | state | calls of Python | of C | system calls | ms | the most frequent system calls |"]
    lines += ["|---|---|---:|---:|---:|---:|---|"]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for size in options.sizes:
            tensors, elements = SIZES[size]
            state = {f"layer.{number}": torch.rand(elements) for number in range(tensors)}
            for container in CONTAINERS:
                path = Path(name) / f"model.{container}"
                fastensor.save(state, path)
                for how in STATES:
                    row = measured(path, how, Path(name) / "trace")
                    lines.append(f"| {size} in {tensors} tensors, `.{container}` | {how} {row}")
    text = "\n".join(lines) + "\n"
    options.output.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
