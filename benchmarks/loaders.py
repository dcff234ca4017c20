"""Loads and durable saves by the tools that people use for that, beside the disk's limit.

Each load runs in a process of its own, which has done nothing but imports, with the file on the disk (cold) or in the
page cache (warm). Its tensors must not be pages of the file, and their names, dtypes, shapes and bytes are compared
with what was saved; what a save has written is read by the format of safetensors, or by torch, and compared. Before the
rounds, all settings of a tool are tried, for each size and operation; in the rounds, the tool runs by default and, if
that is another one, by its quickest setting. Fastensor runs by default only, with an empty dictionary. All tools that
load files of safetensors read the same one, which ``safetensors`` has written; Fastensor reads that, too, and one with
checksums of its own. What is not installed is left out: ``pip install '.[loaders]' -c constraints.txt``. Run by
``make bench``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pictures
import torch
from checkpoint import LIMIT, Sample, bring_into_page_cache, files_of, summarize
from contenders import OURS, OURS_SAFETENSORS, REFERENCE, SAFETENSORS, Shape, State, filled, fio_seconds, gpt2_block
from loader_contenders import (
    FASTSAFETENSORS,
    INSTANTTENSOR,
    RUNAI,
    TOOLS,
    TORCH_CHECKPOINTING,
    UNCHECKED,
    Setting,
    Tool,
    Use,
    tool_named,
)
from measuring import describe_machine, peak_memory, preload, settle, synchronize
from new_user import evict
from report import Row, bandwidth, spread

import fastensor
from fastensor.files.arguments import as_nbytes
from fastensor.files.words import human_size

COLD, WARM, SAVE = "cold load", "warm load", "durable save"
OPERATIONS = (COLD, WARM, SAVE)
SIZES = ("64 KiB", "1 MiB", "10 MiB", "100 MiB", "1424 MiB", "8 GiB")
TUNED = ", tuned"
"""What the name of a tool ends with where it does not run by default."""
COMPARED = {
    OURS_SAFETENSORS: (SAFETENSORS, RUNAI, FASTSAFETENSORS, INSTANTTENSOR),
    OURS: (REFERENCE, TORCH_CHECKPOINTING),
}
"""Who loads and saves the same kind of file as ours."""


class WrongBytesError(Exception):
    """What has come back is not what was saved."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    tool: str
    setting: Setting
    operation: str
    path: Path
    device: str
    source: Path
    """A file of safetensors that has the state which is to be saved."""


def shapes_of_size(nbytes: int) -> list[Shape]:
    """Layers like GPT-2's, as wide as suits the size, and an embedding that fills it up to the last four bytes."""
    most_mib = ((16, 1), (64, 8), (256, 64), (512, 256), (768, 2048), (1024, math.inf))
    width = next(width for width, most in most_mib if nbytes >> 20 < most)
    values = nbytes // 4
    block = gpt2_block(width)
    count = values * 9 // 10 // values_of(block.values())
    shapes = {f"h.{number}.{name}": shape for number in range(count) for name, shape in block.items()}
    rest = values - values_of(shapes.values())
    shapes["wte.weight"] = [rest // width, width]
    if rest % width:
        shapes["ln_f.bias"] = [rest % width]
    return [(name, shape, "float32") for name, shape in shapes.items()]


def values_of(shapes: Iterable[list[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def fingerprint(state: State) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, in the order of names."""

    def line_of(item: tuple[str, torch.Tensor]) -> str:
        name, tensor = item
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{name} {tensor.dtype} {[*tensor.shape]} {hashlib.sha256(data).hexdigest()}\n"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return hashlib.sha256("".join(pool.map(line_of, sorted(state.items()))).encode()).hexdigest()


def read_plainly(path: Path) -> State:
    """The tensors of a file of safetensors, by its format and nothing else. All are of float32."""
    state = {}
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            data = bytearray(end - begin)
            file.seek(8 + length + begin)
            if entry["dtype"] != "F32" or file.readinto(data) != len(data):
                raise WrongBytesError(f"{path}: {name} is of {entry['dtype']}, or not all there")
            state[name] = torch.frombuffer(data, dtype=torch.float32).reshape(entry["shape"])
    return state


def read_back(path: Path) -> State:
    """What a tool has saved: a file, or a folder of files."""
    state: State = {}
    for file in files_of(path):
        state |= read_plainly(file) if file.suffix == ".safetensors" else torch.load(file, "cpu")
    return state


def is_mapped(state: State, path: Path) -> bool:
    """Whether a tensor lies in pages of the file, or of these files."""
    names = {str(file.resolve()) for file in files_of(path)}
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [[int(end, 16) for end in line[0].split("-")] for line in lines if len(line) == 6 and line[5] in names]
    return any(begin <= tensor.data_ptr() < end for tensor in state.values() for begin, end in ranges)


def in_fresh_process(job: Job, expected: str, prepare: Callable[[], None]) -> tuple[float, float, int]:
    """Seconds, CPU seconds, and the peak of memory over that before; for a load to memory, less the tensors.

    Args:
        job: what the process does.
        expected: the fingerprint of what it has to load or save.
        prepare: is called when the process has imported what it needs.

    Raises:
        ChildProcessError: it has failed, and has said why.
        WrongBytesError: it has loaded or saved something else.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as dictionaries:
        variables = {"FASTENSOR_DICTIONARIES": dictionaries, **job.setting.variables}
        process = context.Process(target=do, args=(job, variables, theirs))
        process.start()
        theirs.close()
        try:
            ours.recv()
            prepare()
            ours.send(None)
            costs, found = ours.recv()
        except (EOFError, ConnectionError):
            process.join()
            what = f"{job.operation} by {job.tool}, {job.setting.name}"
            raise ChildProcessError(f"{what}: exit code {process.exitcode}") from None
        process.join()
    if (fingerprint(read_back(job.path)) if job.operation == SAVE else found) != expected:
        raise WrongBytesError(f"{job.operation} by {job.tool}, {job.setting.name}: not what was saved")
    return costs


def do(job: Job, variables: dict[str, str], pipe: Any) -> None:
    """In the process."""
    os.environ |= variables
    warnings.simplefilter("ignore", fastensor.UnverifiedCheckpointWarning)
    tool = tool_named(job.tool)
    if tool.distribution:
        importlib.import_module(tool.distribution)
    torch.zeros(1, device=job.device)
    use, is_save = use_of(tool, job.operation), job.operation == SAVE
    state = read_plainly(job.source) if is_save else {}
    pipe.send("ready")
    pipe.recv()
    with peak_memory() as extra:
        cpu, started = time.process_time(), time.perf_counter()
        if is_save:
            use.call(state, job.path, **job.setting.options)
        else:
            state = use.call(job.path, job.device, **job.setting.options)
            synchronize(job.device)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    if not is_save and is_mapped(state, job.path):
        raise RuntimeError("its tensors are pages of the file")
    returned_nbytes = 0 if is_save or job.device != "cpu" else sum(tensor.nbytes for tensor in state.values())
    pipe.send(((seconds, cpu, extra() - returned_nbytes), "" if is_save else fingerprint(state)))


@dataclass(frozen=True, slots=True)
class Files:
    """One state, as the tools have saved it."""

    nbytes: int
    tensors: int
    device: str
    folder: Path
    expected: str
    """The fingerprint of the state."""

    def of(self, tool: Tool) -> Path:
        """What the tool loads, or what others load of what it has saved."""
        saved_by = tool_named(tool.loads or tool.name)
        return self.folder / f"{TOOLS.index(saved_by)}{saved_by.suffix}"


class Run(NamedTuple):
    """A tool, told to work in some way."""

    tool: Tool
    setting: Setting
    is_default: bool

    @property
    def name(self) -> str:
        return self.tool.name + TUNED * (not self.is_default)


def save_files(nbytes: int, device: str, folder: Path, tools: Sequence[Tool]) -> Files:
    state = filled(shapes_of_size(nbytes), "cpu")
    files = Files(nbytes, len(state), device, folder, fingerprint(state))
    for name in dict.fromkeys([SAFETENSORS, *(tool.loads or tool.name for tool in tools)]):
        tool = tool_named(name)
        save = use_of(tool, SAVE)
        save.call(state, files.of(tool), **save.settings[0].options)
    return files


def use_of(tool: Tool, operation: str) -> Use:
    use = tool.save if operation == SAVE else tool.load
    assert use is not None
    return use


def measured(files: Files, operation: str, run: Run) -> Sample:
    path = files.folder / f"saved{run.tool.suffix}" if operation == SAVE else files.of(run.tool)

    def prepare() -> None:
        settle()
        if operation == WARM:
            bring_into_page_cache(path)
        for file in files_of(path) if operation == COLD else ():
            evict(file)

    job = Job(run.tool.name, run.setting, operation, path, files.device, files.of(tool_named(SAFETENSORS)))
    costs = in_fresh_process(job, files.expected, prepare)
    if operation == SAVE:
        remove(path)
    return sample_of(files, operation, run.name, *costs)


def sample_of(files: Files, operation: str, name: str, *costs: Any) -> Sample:
    return Sample(f"{files.tensors} tensors", files.nbytes, operation, name, *costs)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def try_settings(files: Files, operation: str, tool: Tool, tries: int) -> dict[str, list[float]]:
    """The seconds of each setting that works here."""
    seconds: dict[str, list[float]] = {}
    for setting in use_of(tool, operation).settings:
        try:
            seconds[setting.name] = [
                measured(files, operation, Run(tool, setting, False)).seconds for _ in range(tries)
            ]
        except ChildProcessError as error:
            print(f"{error}, so it is left out", file=sys.stderr)
            remove(files.folder / f"saved{tool.suffix}")
    return seconds


def runs_of(tool: Tool, operation: str, seconds: Mapping[str, Sequence[float]]) -> list[Run]:
    """How a tool takes part in the rounds: by default, and by its quickest setting, if these work."""
    settings = use_of(tool, operation).settings
    best = min(seconds, key=lambda name: min(seconds[name]), default="")
    return [
        Run(tool, setting, setting is settings[0])
        for setting in settings
        if setting.name in seconds and (setting is settings[0] or setting.name == best)
    ]


def limit(files: Files, operation: str) -> list[Sample]:
    """What fio takes for the same bytes, if it is installed."""
    if operation == WARM:
        return []
    settle()
    path = files.folder / LIMIT if operation == SAVE else files.of(tool_named(SAFETENSORS))
    seconds = fio_seconds(path, files.nbytes, write=operation == SAVE)
    remove(files.folder / LIMIT)
    return [] if seconds is None else [sample_of(files, operation, LIMIT, seconds)]


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Ours beside the quickest of the other tools that load or save the same kind of file."""
    verdicts = []
    for operation, nbytes in dict.fromkeys((row["operation"], row["nbytes"]) for row in rows):
        found = {r["contender"]: r for r in rows if (r["operation"], r["nbytes"]) == (operation, nbytes)}
        for ours, others in COMPARED.items():
            peers = [name for other in others for name in (other, other + TUNED) if name in found]
            if ours not in found or not peers:
                continue
            peer = min(peers, key=lambda name: float(found[name]["seconds"]))
            measured = found[ours]["seconds"] / found[peer]["seconds"]
            verdicts.append(
                {"operation": operation, "nbytes": nbytes, "ours": ours, "quickest other": peer,
                 "measured": round(measured, 3), "holds": measured <= 1}
            )  # fmt: skip
    return verdicts


def table(rows: Sequence[Row], machine: Mapping[str, str], verdicts: Sequence[Mapping[str, Any]]) -> str:
    """Everything as Markdown."""
    lines = ["# Loads and durable saves, beside other tools", ""]
    lines += [f"- {key}: {text}" for key, text in machine.items()]
    lines += ["", "| tool | version | a load compares | memory of its tensors |", "|---|---|---|---|"]
    for tool in (tool for tool in TOOLS if any(row["contender"].removesuffix(TUNED) == tool.name for row in rows)):
        version = tool.version or machine.get(tool.name.partition(",")[0], "–")
        lines.append(f"| {tool.name} | {version} | {tool.checks} | {tool.memory} |")
    sizes = sorted({row["nbytes"] for row in rows})
    columns, rule = [human_size(nbytes) for nbytes in sizes], "|---|" + "---:|" * len(sizes)

    def section(operation: str, shown: Sequence[Row], title: str, text_of: Callable[[Row], str]) -> None:
        found = [row for row in shown if row["operation"] == operation]
        cells = {(row["contender"], row["nbytes"]): text_of(row) for row in found}
        lines.extend(["", f"## {operation}: {title}", "", f"| | {' | '.join(columns)} |", rule])
        names = [one for tool in TOOLS for one in (tool.name, tool.name + TUNED)]
        for name in (one for one in (*names, LIMIT) if any(contender == one for contender, _ in cells)):
            lines.append(f"| {name} | {' | '.join(cells.get((name, nbytes), '–') for nbytes in sizes)} |")

    operations = list(dict.fromkeys(row["operation"] for row in rows))
    for operation in operations:
        section(operation, rows, "median seconds (minimum to maximum)", spread)
    lines += ["", "## ours : the quickest other tool, tuned or not", ""]
    lines += [f"| | | {' | '.join(columns)} |", f"|---{rule}"]
    for operation, ours in dict.fromkeys((one["operation"], one["ours"]) for one in verdicts):
        own = {one["nbytes"]: one for one in verdicts if (one["operation"], one["ours"]) == (operation, ours)}
        cells = [f"{own[n]['measured']:.2f} ({own[n]['quickest other']})" if n in own else "–" for n in sizes]
        lines.append(f"| {ours} | {operation} | {' | '.join(cells)} |")
    told = [row for row in rows if row["setting"] not in ("", "default")]
    for operation in dict.fromkeys(row["operation"] for row in told):
        section(operation, told, "setting", lambda row: str(row["setting"]))
    for operation in operations:
        section(operation, rows, "most memory beyond what it returns, MiB; CPU seconds", effort)
    return "\n".join(lines) + "\n"


def effort(row: Row) -> str:
    return "–" if row["extra_nbytes"] is None else f"{row['extra_nbytes'] / 2**20:.0f}; {row['cpu_seconds']:.2f}"


def drawn(rows: Sequence[Row]) -> list[Row]:
    """Each tool once, by default or tuned, whichever is quicker. Ours reads its checksums."""
    quickest: dict[tuple[int, str, str], Row] = {}
    for row in rows:
        name = row["contender"].removesuffix(TUNED)
        key = (row["nbytes"], row["operation"], name)
        if key not in quickest or row["seconds"] < quickest[key]["seconds"]:
            quickest[key] = {**row, "contender": name}
    return [row for row in quickest.values() if row["contender"] != UNCHECKED]


def plot(rows: Sequence[Row], path: Path) -> None:
    """How the bandwidth of each tool grows with the size, a panel for each operation."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    sizes = sorted({row["nbytes"] for row in rows})
    figure, axes = pictures.panels(len(operations), height=3.2)
    for axis, operation in zip(axes, operations, strict=True):
        lines: dict[str, dict[int, pictures.Spread]] = {}
        for row in (row for row in drawn(rows) if row["operation"] == operation):
            lines.setdefault(row["contender"], {})[row["nbytes"]] = bandwidth(row)
        pictures.lines(axis, lines)
        axis.set_xticks(sizes, [human_size(nbytes) for nbytes in sizes])
        axis.set(title=f"{operation}: median, slowest and fastest of the rounds", ylabel="GB/s")
    pictures.legend(figure, axes)
    pictures.write(figure, path)


def present(names: Sequence[str], device: str) -> list[Tool]:
    """The tools that take part. Says who is not installed."""
    found = []
    for tool in TOOLS:
        if (names and tool.name not in names) or (tool.needs_gpu and device == "cpu"):
            continue
        if tool.version is None:
            print(f"{tool.name} is not installed: pip install '.[loaders]' -c constraints.txt", file=sys.stderr)
        else:
            found.append(tool)
    return found


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured."""

    machine: dict[str, str]
    samples: list[Sample] = field(default_factory=list)
    settings: dict[tuple[int, str, str], str] = field(default_factory=dict)
    """By bytes, operation and contender."""
    tried: list[dict[str, Any]] = field(default_factory=list)

    def write(self, output: Path) -> None:
        rows = [
            {**row, "setting": self.settings.get((row["nbytes"], row["operation"], row["contender"]), "")}
            for row in summarize(self.samples)
        ]
        verdicts = judge(rows)
        output.with_suffix(".md").write_text(table(rows, self.machine, verdicts))
        result = {"machine": self.machine, "rows": rows, "verdicts": verdicts, "tried": self.tried}
        samples = [asdict(sample) for sample in self.samples]
        output.with_suffix(".json").write_text(json.dumps({**result, "samples": samples}) + "\n")
        plot(rows, output.with_suffix(".png"))


def measure(files: Files, operation: str, tools: Sequence[Tool], options: argparse.Namespace, found: Found) -> None:
    """Try the settings of each tool, and then measure all tools in turns."""
    runs = []
    for tool in tools:
        if operation == SAVE and tool.save is None:
            continue
        settings = use_of(tool, operation).settings
        seconds = {settings[0].name: [0.0]}
        if len(settings) > 1 or tool.distribution:
            seconds = try_settings(files, operation, tool, options.tries)
            found.tried.append({"nbytes": files.nbytes, "operation": operation, "tool": tool.name, "seconds": seconds})
        runs += runs_of(tool, operation, seconds)
    for run in runs:
        found.settings[files.nbytes, operation, run.name] = run.setting.name
    for number in range(options.rounds):
        found.samples.extend(measured(files, operation, run) for run in random.Random(number).sample(runs, len(runs)))
        found.samples.extend(limit(files, operation))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="of the state, such as 64KiB")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--tools", nargs="+", choices=[tool.name for tool in TOOLS], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tries", type=int, default=2, help="of each setting, before the rounds")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where loads go")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/loaders"), help="without suffix")
    options = parser.parse_args()
    preload()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    tools = present(options.tools, options.device)
    found = Found(describe_machine(options.folder, options.device))
    for size in [as_nbytes(size, "--sizes", at_least=64 << 10) for size in options.sizes]:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            files = save_files(size, options.device, Path(folder), tools)
            for operation in options.operations:
                print(f"{human_size(size)}, {operation} ...", file=sys.stderr, flush=True)
                measure(files, operation, tools, options, found)
        found.write(options.output)  # what there is, if a later size cannot be measured
    print(options.output.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
