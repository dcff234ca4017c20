"""What ``torch.distributed.checkpoint`` costs on 1, 2 and 4 processes of one machine, by its own storage and by ours.

A GPT-2-small with the states of AdamW, each tensor a DTensor of which every process holds some rows. Each run is a
group of fresh processes, in which nothing but imports has happened, with a dictionary folder of its own and default
options. It saves the state some times, each time over the checkpoint before. Or it loads it once, to tensors whose
memory was touched before. The ways take turns.

torch's own storage is measured with several thread counts, with ``sync_files`` and without; the best one counts. What
it leaves unsynced is synced here, directories as well: "done" is when a power failure would do no harm, "call" is when
the program goes on. A storage that moves nothing but ``.metadata`` shows what planning, collectives and metadata cost
by themselves. fio moves as many bytes directly. Before each asynchronous save the processes copy their parts in memory
that was touched before: what a snapshot costs at least. Last, a state that all processes hold whole is saved. Run by
``make bench``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contenders import Shape, build_state, fio_seconds, shapes_of
from measuring import describe_machine, peak_memory, settle
from new_user import evict
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.files import posix

OURS, FIXED, FIO = "fastensor", "planning and metadata alone", "fio"
STOCK = "torch"
STAGED = "torch, staged asynchronously"
THREADS = (1, 2, 4)
PATIENCE = timedelta(minutes=10)

PROMISED_SAVE = 1.10
"""The most that a durable save may take, relative to fio, planning and metadata taken off."""
PROMISED_OF_STOCK = 0.7
"""The most that a durable save may take, relative to torch's best one, planning and metadata taken off both."""
PROMISED_LOAD = 0.9
"""The most that a cold load may take, relative to torch's."""
PROMISED_STALL = 1.1
"""The longest stall of an asynchronous save, relative to torch's."""
PROMISED_COPY = 1.3
"""The longest stall of an asynchronous save, from the second one of a process on, relative to a copy."""
PROMISED_SOONER = 1.3
"""How much sooner than torch's an asynchronous save is durable, at least."""

State = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Sample:
    """One save, load, or move by fio."""

    world: int
    """The number of processes."""
    operation: str
    way: str
    number: int
    """0 for the first one of its processes."""
    call_seconds: float
    """How long the slowest process waits."""
    done_seconds: float
    """How long it takes until the save is on the disk."""
    copy_seconds: float | None = None
    """How long the slowest process takes for a plain copy of the same bytes, right before."""
    cpu_seconds: float = 0.0
    """What all processes together take of the processors."""
    peak_bytes: int = 0
    """How far the memory of all processes together rose in the operation."""


class MetadataWriter(FileSystemWriter):
    """Writes nothing but ``.metadata``."""

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(one.index, 1, _StorageInfo("none", 0, 1)) for one in plan.items])
        return future


class MetadataReader(FileSystemReader):
    """Reads nothing but ``.metadata``."""

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        future: Future[None] = Future()
        future.set_result(None)
        return future


def stock(threads: int, sync: bool) -> str:
    return f"{STOCK}, {threads} {'thread' if threads == 1 else 'threads'}{', sync_files' if sync else ''}"


SAVING: dict[str, Callable[[Path], FileSystemWriter]] = {
    OURS: FastensorStorageWriter,
    **{
        stock(threads, sync): partial(FileSystemWriter, thread_count=threads, sync_files=sync)
        for sync in (True, False)
        for threads in THREADS
    },
    FIXED: partial(MetadataWriter, sync_files=False),
}
LOADING: dict[str, Callable[[Path], FileSystemReader]] = {
    OURS: FastensorStorageReader,
    STOCK: FileSystemReader,
    FIXED: MetadataReader,
}
LOADED = {OURS: OURS, STOCK: stock(1, True), FIXED: stock(1, True)}
"""By the way of a load, that of the save whose files it reads."""
STALLING = (OURS, STOCK, STAGED)
"""Asynchronous saves. torch's stager is used again. By the last one a thread of torch copies, and until that is done a
save holds training up."""


def save_on_rank_0(state: State, path: Path) -> None:
    if dist.get_rank() == 0:
        fastensor.save(state, path)
    dist.barrier()


SAVING_REPLICAS: dict[str, Callable[[State, Path], object]] = {
    "fastensor, rank 0 alone": save_on_rank_0,
    "fastensor, cooperative": cooperative.save,
}
"""Saves of a state that every process holds whole, as in data parallel training. They return when it is durable."""


class Measured:
    """The processes of a run, from inside of one of them."""

    def __init__(self, world: int, results: Any) -> None:
        self.world = world
        self.mesh = init_device_mesh("cpu", (world,))
        self._results = results

    def send(self, operation: str, way: str, number: int, **values: float) -> None:
        """Send a sample from rank 0: the longest times, and the sums of the rest, of all processes."""
        found = torch.tensor(list(values.values()), dtype=torch.float64)
        longest, total = found.clone(), found.clone()
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        if self._results is not None:
            merged = {
                name: (total if name in ("cpu_seconds", "peak_bytes") else longest)[index].item()
                for index, name in enumerate(values)
            }
            self._results.send(Sample(self.world, operation, way, number, **merged))

    def settle(self) -> None:
        """Let the disk become quiet, and begin together."""
        if dist.get_rank() == 0:
            settle()
        dist.barrier()


def on_ranks(world: int, work: Callable[..., None], *arguments: Any) -> list[Sample]:
    """What rank 0 of a group of fresh processes sends."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, world, folder, theirs if rank == 0 else None, work, arguments))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        theirs.close()
        found = []
        try:
            while True:
                found.append(ours.recv())
        except EOFError:
            for process in processes:
                process.join()
    if failed := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"{work.__name__}{arguments} has failed on {world} processes with exit codes {failed}")
    return found


def _rank(rank: int, world: int, folder: str, results: Any, work: Callable[..., None], arguments: Any) -> None:
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
    os.environ["FASTENSOR_DICTIONARIES"] = os.path.join(folder, "dictionaries")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    if world > 1:
        torch.set_num_threads(1)  # as torchrun does
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    work(Measured(world, results), *arguments)
    dist.barrier()
    dist.destroy_process_group()


def sharded_state(model: str, mesh: DeviceMesh) -> State:
    """This process's part of the state: random rows of each tensor, and the optimizer's count of steps."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    state = {name: _sharded(shape, mesh, generator) for name, shape, _ in shapes_of(model)}
    return state | {f"step.{name}": torch.tensor(1.0) for name in state if name.startswith("exp_avg.")}


def _sharded(shape: list[int], mesh: DeviceMesh, generator: torch.Generator) -> DTensor:
    rows = torch.empty(shape[0]).chunk(mesh.size())
    mine = len(rows[dist.get_rank()]) if dist.get_rank() < len(rows) else 0
    local = torch.randn([mine, *shape[1:]], generator=generator)
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=strides)


def local_tensors(state: State) -> list[Tensor]:
    return [one.to_local() if isinstance(one, DTensor) else one for one in state.values()]


def nbytes_of(shapes: list[Shape]) -> int:
    return sum(torch.empty(shape, device="meta").nbytes for _, shape, _ in shapes)


@contextmanager
def effort() -> Iterator[Callable[[], dict[str, float]]]:
    """CPU seconds of this process in the block, and how far its memory rose."""
    with peak_memory() as peak:
        before = time.process_time()
        yield lambda: {"cpu_seconds": spent, "peak_bytes": float(peak())}
        spent = time.process_time() - before


def measure_saves(measured: Measured, way: str, model: str, saves: int, path: Path) -> None:
    """In fresh processes: send a sample for each save."""
    state = sharded_state(model, measured.mesh)
    writer = SAVING[way](path)
    for number in range(saves):
        measured.settle()
        with effort() as spent:
            started = time.perf_counter()
            dcp.save(state, storage_writer=writer)
            returned = time.perf_counter()
        if way not in (OURS, FIXED):
            sync(path)
        done = time.perf_counter()
        measured.send("save", way, number, call_seconds=returned - started, done_seconds=done - started, **spent())


def measure_saves_of_replicas(measured: Measured, way: str, model: str, saves: int, path: Path) -> None:
    """In fresh processes: send a sample for each save."""
    state = build_state(model, "cpu")
    for number in range(saves):
        measured.settle()
        with effort() as spent:
            started = time.perf_counter()
            SAVING_REPLICAS[way](state, path)
            seconds = time.perf_counter() - started
        measured.send("save of replicas", way, number, call_seconds=seconds, done_seconds=seconds, **spent())


def sync(path: Path) -> None:
    """Make durable what this process has written by torch's storage, and on rank 0 the directories. Returns when all
    processes have done so."""
    for file in path.glob(f"__{dist.get_rank()}_*"):
        sync_path(file)
    if dist.get_rank() == 0:
        sync_path(path / ".metadata")
        posix.sync_directory(str(path))
        posix.sync_directory(str(path.parent))
    dist.barrier()


def sync_path(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def measure_stalls(measured: Measured, way: str, model: str, saves: int, threads: int, path: Path) -> None:
    """In fresh processes: send a sample for each asynchronous save."""
    state = sharded_state(model, measured.mesh)
    copies = [torch.ones_like(tensor) for tensor in local_tensors(state)]
    options: dict[str, Any] = {"process_group": dist.new_group(backend="gloo", timeout=PATIENCE)}
    if way == OURS:
        writer: FileSystemWriter = FastensorStorageWriter(path)
    else:
        writer = FileSystemWriter(path, thread_count=threads)
        options["async_stager"] = DefaultStager(StagingOptions(False, False, way == STAGED, False))
    for number in range(saves):
        measured.settle()
        with effort() as spent:
            started = time.perf_counter()
            for copy, tensor in zip(copies, local_tensors(state), strict=True):
                copy.copy_(tensor)
            copied = time.perf_counter()
            dist.barrier()
            begun = time.perf_counter()
            response: Any = dcp.async_save(state, storage_writer=writer, **options)
            if way == STAGED:
                response.staging_completion.result()
                response = response.upload_completion
            stalled = time.perf_counter()
            response.result()
        if way != OURS:
            sync(path)
        done = time.perf_counter()
        times = {"call_seconds": stalled - begun, "done_seconds": done - begun, "copy_seconds": copied - started}
        measured.send("asynchronous save", way, number, **times, **spent())
    if way != OURS:
        options["async_stager"].close()


def measure_load(measured: Measured, way: str, model: str, cold: bool, path: Path) -> None:
    """In fresh processes: send a sample of one load. Check what was loaded, if anything was."""
    expected = sharded_state(model, measured.mesh)
    state = {
        name: torch.zeros_like(value) if name.startswith("step.") else torch.ones_like(value)
        for name, value in expected.items()
    }
    if dist.get_rank() == 0:
        for file in path.iterdir():
            evict(file) if cold else file.read_bytes()
    dist.barrier()
    with effort() as spent:
        started = time.perf_counter()
        dcp.load(state, storage_reader=LOADING[way](path))
        seconds = time.perf_counter() - started
    if way != FIXED and not all(map(torch.equal, local_tensors(state), local_tensors(expected))):
        raise SystemExit(f"{way} has loaded something else than was saved")
    operation = "cold load" if cold else "warm load"
    measured.send(operation, way, 0, call_seconds=seconds, done_seconds=seconds, **spent())


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(model: str, worlds: list[int], runs: int, saves: int, threads: int, folder: Path) -> list[Sample]:
    """Everything that is measured."""
    samples: list[Sample] = []
    for run in range(runs):
        for world in worlds:
            say(f"run {run + 1} of {runs}, {world} processes")
            samples += measure_once(model, world, run, saves, threads, folder)
    return samples


def measure_once(model: str, world: int, run: int, saves: int, threads: int, folder: Path) -> list[Sample]:
    """Each way once."""
    samples: list[Sample] = []
    nbytes = nbytes_of(shapes_of(model))
    for way in in_turn(SAVING, run):
        say(f"  {way}: saves")
        samples += on_ranks(world, measure_saves, way, model, saves, path_of(way, folder))
        if way not in LOADED.values():
            shutil.rmtree(path_of(way, folder))
    samples += by_fio(world, folder / "limit", nbytes, write=True)
    for cold in (True, False):
        for way in in_turn(LOADING, run):
            say(f"  {way}: {'cold' if cold else 'warm'} load")
            samples += on_ranks(world, measure_load, way, model, cold, path_of(LOADED[way], folder))
    samples += by_fio(world, folder / "limit", nbytes, write=False)
    for way in in_turn(dict.fromkeys(STALLING), run):
        clear(folder)
        say(f"  {way}: asynchronous saves")
        samples += on_ranks(world, measure_stalls, way, model, saves, threads, path_of(way, folder))
    for way in in_turn(SAVING_REPLICAS, run):
        clear(folder)
        say(f"  {way}: saves of replicas")
        samples += on_ranks(world, measure_saves_of_replicas, way, model, saves, path_of(way, folder))
    clear(folder)
    return samples


def in_turn(ways: Mapping[str, object], run: int) -> list[str]:
    """The ways in another order each run, so that none always follows the same one."""
    names = list(ways)
    return names[run % len(names) :] + names[: run % len(names)]


def path_of(way: str, folder: Path) -> Path:
    return folder / way.replace(", ", "-").replace(" ", "_")


def clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def by_fio(world: int, path: Path, nbytes: int, *, write: bool) -> list[Sample]:
    settle()
    seconds = fio_seconds(path, nbytes, write=write)
    operation = "save" if write else "cold load"
    return [] if seconds is None else [Sample(world, operation, FIO, 0, seconds, seconds)]


def judge(samples: list[Sample]) -> list[dict[str, Any]]:
    """What was promised, what was measured, and whether it holds."""
    return [one for world in dict.fromkeys(sample.world for sample in samples) for one in judge_world(world, samples)]


def judge_world(world: int, samples: list[Sample]) -> list[dict[str, Any]]:
    mine = [one for one in samples if one.world == world]
    later = [one for one in mine if one.number and one.operation == "asynchronous save"]

    def done(operation: str, way: str) -> float:
        return statistics.median(one.done_seconds for one in mine if (one.operation, one.way) == (operation, way))

    def later_median(way: str, value: Callable[[Sample], float]) -> float:
        return statistics.median(value(one) for one in later if one.way == way)

    def verdict(promise: str, bound: float, measured: float, *, least: bool = False) -> dict[str, Any]:
        holds = measured >= bound if least else measured <= bound
        text = f"{world} {'process' if world == 1 else 'processes'}: {promise} {'≥' if least else '≤'} {bound}"
        return {"promise": text, "measured": round(measured, 3), "holds": holds}

    fixed, ours = done("save", FIXED), done("save", OURS)
    best = min(done("save", way) for way in SAVING if way.startswith(STOCK))
    torchs = min((STOCK, STAGED), key=lambda way: later_median(way, stall_of))
    found = []
    if any(one.way == FIO for one in mine):
        found.append(verdict("(durable save - fixed) / fio", PROMISED_SAVE, (ours - fixed) / done("save", FIO)))
    load, stall = done("cold load", OURS) / done("cold load", STOCK), later_median(OURS, stall_of)
    sooner = min(later_median(way, lambda one: one.done_seconds) for way in (STOCK, STAGED))
    return [
        *found,
        verdict("(durable save - fixed) / (torch's best - fixed)", PROMISED_OF_STOCK, (ours - fixed) / (best - fixed)),
        verdict("cold load / torch's", PROMISED_LOAD, load),
        verdict("later stalls / torch's shortest", PROMISED_STALL, stall / later_median(torchs, stall_of)),
        verdict("later stalls / copy", PROMISED_COPY, later_median(OURS, stall_to_copy)),
        verdict("torch's soonest durable / ours, asynchronous", PROMISED_SOONER,
                sooner / later_median(OURS, lambda one: one.done_seconds), least=True),
    ]  # fmt: skip


def stall_of(sample: Sample) -> float:
    return sample.call_seconds


def stall_to_copy(sample: Sample) -> float:
    assert sample.copy_seconds is not None
    return sample.call_seconds / sample.copy_seconds


NODES = (1, 2, 4, 8, 16, 64)


def paper_model(samples: list[Sample]) -> list[str]:
    """What N nodes with a disk each would do, as lines of Markdown; docs/distributed.md has the assumptions.

    ``fixed(N) + share × moved``: what planning and metadata cost is taken to grow linearly with the number of
    processes, what is moved is that of the fewest processes here, and a node's share of it is 1/N, or 1 if the state
    grows with N.
    """
    worlds = sorted({one.world for one in samples})

    def done(world: int, operation: str, way: str) -> float:
        found = [one.done_seconds for one in samples if (one.world, one.operation, one.way) == (world, operation, way)]
        return statistics.median(found)

    def line(operation: str) -> tuple[float, float]:
        fixed = [done(world, operation, FIXED) for world in worlds]
        if len(worlds) == 1:
            return fixed[0], 0.0
        slope, begin = statistics.linear_regression(worlds, fixed)
        return begin, slope

    best = min((way for way in SAVING if way.startswith(STOCK)), key=lambda way: done(worlds[0], "save", way))
    kinds = [("save", OURS), ("save", best), ("cold load", OURS), ("cold load", STOCK)]
    lines = ["", "## a paper model: N nodes with a disk each, one process on each node", ""]
    lines += [f"| what | way | the state | {' | '.join(f'N = {nodes}' for nodes in NODES)} |"]
    lines += [f"|---|---|---|{'---:|' * len(NODES)}"]
    for operation, way in kinds:
        begin, slope = line(operation)
        moved = done(worlds[0], operation, way) - done(worlds[0], operation, FIXED)
        for state, share in (("stays", lambda nodes: 1 / nodes), ("grows with N", lambda nodes: 1)):
            seconds = " | ".join(f"{begin + slope * nodes + share(nodes) * moved:.3f} s" for nodes in NODES)
            lines.append(f"| {operation} | {way} | {state} | {seconds} |")
    return lines


def table(machine: dict[str, str], nbytes: int, samples: list[Sample], verdicts: list[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    lines = ["# torch.distributed.checkpoint: empty dictionary, default options, first use included", ""]
    lines += [f"- {what}: {text}" for what, text in machine.items()]
    lines += [f"- state: {nbytes / 2**20:.1f} MiB, in all processes together", "", "## medians", ""]
    lines += [
        "| processes | what | way | of its processes | call: median s (minimum–maximum) | done after | call / copy "
    ]
    lines[-1] += "| CPU s | peak MiB | times |"
    lines += ["|---:|---|---|---|---:|---:|---:|---:|---:|---:|"]
    groups: dict[tuple[int, str, str, bool], list[Sample]] = {}
    for one in samples:
        groups.setdefault((one.world, one.operation, one.way, one.number > 0), []).append(one)
    for world, operation, way, later in sorted(groups, key=lambda key: (key[0], key[1], list(groups).index(key))):
        group = groups[world, operation, way, later]
        calls = [one.call_seconds for one in group]
        ratio = f"{statistics.median(map(stall_to_copy, group)):.2f}" if group[0].copy_seconds else "–"
        lines.append(
            f"| {world} | {operation} | {way} | {'later' if later else 'first'} "
            f"| {statistics.median(calls):.3f} ({min(calls):.3f}–{max(calls):.3f}) "
            f"| {statistics.median(one.done_seconds for one in group):.3f} | {ratio} "
            f"| {statistics.median(one.cpu_seconds for one in group):.2f} "
            f"| {statistics.median(one.peak_bytes for one in group) / 2**20:.0f} | {len(group)} |"
        )
    lines += paper_model(samples)
    lines += ["", "## promises", "", f"Fixed is {FIXED}.", "", "| promise | measured | holds |", "|---|---:|---|"]
    lines += [f"| {v['promise']} | {v['measured']:.2f} | {'yes' if v['holds'] else '**no**'} |" for v in verdicts]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2_adam", "tiny"), default="gpt2_adam")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="numbers of processes")
    parser.add_argument("--runs", type=int, default=5, help="groups of processes of each way")
    parser.add_argument("--saves", type=int, default=3, help="in each group that saves")
    parser.add_argument("--threads", type=int, default=2, help="of torch's storage, for asynchronous saves")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/distributed"), help="without suffix")
    options = parser.parse_args()
    if options.saves < 2:
        parser.error("--saves: 2 or more: the promises are about the second asynchronous save as well")
    libraries = ["fastensor.checkpoint.dcp", "torch.distributed.checkpoint", "torch.distributed.tensor"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(libraries)
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        machine = describe_machine(Path(name), "cpu")
        samples = measure(
            options.model, options.worlds, options.runs, options.saves, options.threads, Path(name)
        )  # fmt: skip
    verdicts, nbytes = judge(samples), nbytes_of(shapes_of(options.model))
    text = table(machine, nbytes, samples, verdicts)
    options.output.with_suffix(".md").write_text(text)
    document = {"machine": machine, "nbytes": nbytes, "verdicts": verdicts, "samples": [asdict(one) for one in samples]}
    options.output.with_suffix(".json").write_text(json.dumps(document, indent=1))
    print(text)


if __name__ == "__main__":
    main()
