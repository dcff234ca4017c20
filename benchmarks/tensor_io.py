"""The tables of the Fastensor paper on this machine: which backend is the fastest, and is it the one that is chosen?

Single tensors of 3 MB to 1.5 GB, written durably, read cold and read from the page cache, by each backend alone (Tables
2 to 5); models saved by each backend alone and by the one that a selector has learned (Table 9); and the sizes of the
feature maps of BERT and ViT, written and read back over and over, by way of the page cache and from the disk (Tables 13
and 14): how often what was chosen was the best, and how its time compares with the best in hindsight. Everything is
interleaved; figures are medians. At last, what a decision costs.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pictures
import torch
from contenders import build_state, model_names
from measuring import describe_machine, settle

import fastensor
from fastensor import Context, Dictionary, Selector, TensorStore
from fastensor.backends import registry
from fastensor.files import posix
from fastensor.select.context import RESIDENT_FRACTION

AUTO = "auto"
SIZES_MIB = tuple(3.0625 * 2**power for power in range(10))
"""The sizes of Tables 2 to 4."""
MIXES_MIB = {
    "BERT": (5.34e-5, 0.0030, 0.0040, 0.0074, 0.0147, 0.0293, 0.1875, 0.6592, 1.4063, 2.25, 2.6368, 5.625, 9.0, 22.5),
    "ViT": (
        5.34e-5, 0.0049, 0.0050, 0.0628, 0.4981, 2.8711, 6.25, 6.2745, 18.75, 20.1566, 25.0, 25.0977, 36.75, 80.3125,
        258.004, 321.25,
    ),
}  # fmt: skip
"""The sizes of Tables 13 and 14. One backward pass needs each of them once."""
TIE = 1.03
ENOUGH_HITS = 0.938
"""What the paper reports (section 5.2.1)."""
LEARNERS = 4
"""So many selectors find out what is best for a mix."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One measurement."""

    table: str
    what: str
    """The operation, or the model, or the mix."""
    nbytes: int
    way: str
    """A backend, or ``auto``."""
    used: str
    """The backend that did it."""
    round: int
    seconds: float
    cpu_seconds: float
    exploring: bool = False
    """Whether something was tried, before any measurement had shown that it is the best."""


def timed(action: Callable[[], Any]) -> tuple[Any, float, float]:
    """What an action returns, its seconds, and the seconds of CPU that this process has spent on it."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = action()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def evict(path: Path) -> bool:
    """Drop a file from the page cache; returns whether it is out."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return posix.evict(file.fileno(), path.stat().st_size) < RESIDENT_FRACTION


def shuffled(ways: Iterable[str], *place: object) -> list[str]:
    """The order in which ways go at a place of the benchmark: always the same there, and another one elsewhere."""
    order = list(ways)
    random.Random(repr(place)).shuffle(order)
    return order


def measure_tensors(folder: Path, sizes: Iterable[float], rounds: int, backends: Sequence[str]) -> list[Transfer]:
    """Tables 2 to 5."""
    found = []
    stores = {name: TensorStore(folder, backend=name, durable=True) for name in backends}
    for mib in sizes:
        tensor = torch.randn(round(mib * 2**20) // 4)
        for number in range(rounds):
            for way in shuffled(backends, mib, number):
                say(f"{mib:.4g} MiB, round {number + 1}, {way}")
                store = stores[way]
                settle()
                ref, *write = timed(lambda: store.put(tensor))  # noqa: B023
                taken = {"durable write": write}
                is_out = evict(folder / ref.file)
                _, *cold = timed(lambda: store.get(ref))  # noqa: B023
                if is_out:
                    taken["cold read"] = cold
                (folder / ref.file).read_bytes()
                _, *taken["warm read"] = timed(lambda: store.get(ref))  # noqa: B023
                store.delete(ref)
                if store.statistics().fallbacks:
                    raise SystemExit(f"{way} cannot be measured: {store.statistics().fallbacks}")
                for what, (seconds, cpu) in taken.items():
                    found.append(Transfer("tensors", what, tensor.nbytes, way, way, number, seconds, cpu))
    return found


def measure_models(folder: Path, models: Iterable[str], rounds: int, backends: Sequence[str]) -> list[Transfer]:
    """Table 9. A selector explores by the paper's Algorithm 1 first, which is not counted."""
    found = []
    selector = Selector(paper=True)
    ways: dict[str, Any] = {AUTO: selector, **{name: name for name in backends}}
    for model in models:
        state = build_state(model, "cpu")
        nbytes = sum(tensor.nbytes for tensor in state.values())
        exploring = True
        while exploring:
            explored = selector.statistics().explored
            say(f"{model}, exploring: {fastensor.save(state, folder / AUTO, backend=selector).reason}")
            exploring = selector.statistics().explored > explored
        for number in range(rounds):
            for way in shuffled(ways, model, number):
                say(f"{model}, round {number + 1}, {way}")
                settle()
                report, seconds, cpu = timed(lambda: fastensor.save(state, folder / way, backend=ways[way]))  # noqa: B023
                if report.fallbacks:
                    raise SystemExit(f"{way} cannot be measured: {report.fallbacks}")
                found.append(Transfer("models", model, nbytes, way, report.backend, number, seconds, cpu))
        for way in ways:
            (folder / way).unlink()
    return found


def measure_mix(
    folder: Path, mix: str, iterations: int, backends: Sequence[str], *, durable: bool
) -> tuple[list[Transfer], dict[str, int]]:
    """Tables 13 and 14: as in training, everything is written, and then read in the reverse order. Several selectors
    explore by the paper's Algorithm 1, one after the other; iterations are measured when one has.

    Args:
        durable: write durably and read from the disk, as if there was no room in the page cache.

    Returns:
        The measurements, and what the selector did: here, and in a second run that begins with what it has learned.
    """
    found = []
    stores = {way: TensorStore(folder, backend=way, durable=durable) for way in backends}
    tensors = [torch.randn(max(round(mib * 2**20) // 4, 1)) for mib in MIXES_MIB[mix]]
    name = mix_name(mix, durable=durable)
    not_cold: list[bool] = []

    def iteration(way: str, number: int, table: str) -> None:
        say(f"{name}, iteration {number + 1}, {way}")
        settle()
        for tensor, one in zip(tensors, pass_through(stores[way], tensors, selector, cold=durable), strict=True):
            if stores[way].statistics().fallbacks:
                raise SystemExit(f"{way} cannot be measured: {stores[way].statistics().fallbacks}")
            not_cold.append(durable and one.warm)
            taken = (one.seconds, one.cpu_seconds, one.exploring)
            found.append(Transfer(table, "write and read", tensor.nbytes, way, one.used, number, *taken))

    counts: Counter[str] = Counter()
    learners = min(LEARNERS, iterations)
    for learner in range(learners):
        selector = Selector(paper=True)
        stores[AUTO] = TensorStore(folder, selector=selector, mode="write_read", durable=durable)
        explored = -1
        while selector.statistics().explored > explored:
            explored = selector.statistics().explored
            iteration(AUTO, 0, exploring_table(name))
        for number in range(learner * iterations // learners, (learner + 1) * iterations // learners):
            for way in shuffled(stores, name, number):
                iteration(way, number, name)
        counts["explored"] += selector.statistics().explored
        counts["exploited"] += selector.statistics().exploited
    second = Selector(Dictionary.from_json(selector.dictionary.to_json()), paper=True)
    store = TensorStore(folder, selector=second, mode="write_read", durable=durable)
    pass_through(store, tensors, second, cold=durable)
    return found, {
        **counts,
        "reads that were to be cold and were not": sum(not_cold),
        "explored in a second run": second.statistics().explored,
    }


def mix_name(mix: str, *, durable: bool) -> str:
    return f"{mix}, durable and cold" if durable else f"{mix}, in the page cache"


def exploring_table(name: str) -> str:
    return f"{name}, exploring"


@dataclass(frozen=True, slots=True)
class Pass:
    """One tensor, written and read back."""

    used: str
    """The backend that wrote it."""
    exploring: bool
    """Whether one was tried on the way."""
    warm: bool
    """Whether its file was in the page cache when it was read."""
    seconds: float
    cpu_seconds: float


def pass_through(store: TensorStore, tensors: Sequence[torch.Tensor], selector: Selector, *, cold: bool) -> list[Pass]:
    """Write all, read all in the reverse order, delete all."""

    def explored() -> int:
        return selector.statistics().explored

    written = []
    for tensor in tensors:
        before = explored()
        ref, *taken = timed(lambda: store.put(tensor))  # noqa: B023
        written.append((ref, taken, explored() > before))
    warm = {ref.file: not (cold and evict(Path(store.directory, ref.file))) for ref, _, _ in written}
    passes = []
    for ref, put, tried in reversed(written):
        before = explored()
        _, *got = timed(lambda: store.get(ref))  # noqa: B023
        tried |= explored() > before
        passes.append(Pass(ref.backend, tried, warm[ref.file], put[0] + got[0], put[1] + got[1]))
    for ref, _, _ in written:
        store.delete(ref)
    return passes[::-1]


def measure_decisions() -> dict[str, float]:
    """Microseconds of one decision: medians of many. All times that are recorded are equal."""
    nbytes, candidates = 1 << 20, ("direct", "gds", "numpy", "torch")
    write, read = Context("write"), Context("read")
    selector = Selector()
    for _ in range(100):
        for context in (write, read):
            selector.record(nbytes, context, selector.choose(nbytes, context, candidates).backend, 1.0)

    def microseconds(action: Callable[[], object]) -> float:
        return median(timed(action)[1] for _ in range(10_000)) * 1e6

    def new_size() -> float:
        copy = Selector(selector.dictionary)
        return timed(lambda: copy.choose(2 * nbytes, write, candidates))[1]

    def choose_and_record() -> None:
        selector.record(nbytes, write, selector.choose(nbytes, write, candidates).backend, 1.0)

    return {
        "to choose for a write": microseconds(lambda: selector.choose(nbytes, write, candidates)),
        "to choose for a write and a read": microseconds(
            lambda: selector.choose(nbytes, write, candidates, "write_read")
        ),
        "to choose at a size that is new": median(new_size() for _ in range(1000)) * 1e6,
        "to choose, and to learn": microseconds(choose_and_record),
    }


def say(text: str) -> None:
    print(text, "...", file=sys.stderr, flush=True)


# --- what it amounts to


@dataclass(frozen=True, slots=True)
class Figure:
    """A median, and the median distance from it."""

    seconds: float
    spread: float
    cpu_seconds: float


def figures(found: Iterable[Transfer]) -> dict[tuple[str, str, int, str], Figure]:
    """By table, operation, size and way."""
    groups = defaultdict(list)
    for one in found:
        groups[one.table, one.what, one.nbytes, one.way].append(one)
    result = {}
    for key, group in groups.items():
        centre = median(one.seconds for one in group)
        spread = median(abs(one.seconds - centre) for one in group)
        result[key] = Figure(centre, spread, median(one.cpu_seconds for one in group))
    return result


def is_as_fast(figure: Figure, best: Figure) -> bool:
    """Whether one is as fast as the best, within 3 %."""
    return figure.seconds <= TIE * best.seconds


def tied(figure: Figure, best: Figure) -> bool:
    """Whether one is as fast as the best, or the difference may be noise: their spreads overlap."""
    return is_as_fast(figure, best) or figure.seconds - figure.spread <= best.seconds + best.spread


@dataclass(frozen=True, slots=True)
class Mix:
    """Tables 13 and 14, of one model. What is tried between the iterations counts in no figure but one."""

    name: str
    hits: dict[str, float]
    """By way: the share of its transfers whose backend was the best one of its size, within 3 %. What auto tries is
    left out."""
    ties: dict[str, float]
    """The same, where a backend whose spread overlaps with the best one's is as good."""
    seconds: dict[str, float]
    """An iteration on average, by each way, and by some that can only be computed."""
    chosen: dict[int, Counter[str]]
    """By size: how often each backend was chosen."""
    best: dict[int, str]
    """By size: the fastest, by medians."""
    fastest: dict[int, Counter[str]]
    """By size: in how many iterations each backend was the fastest."""


HINDSIGHT = "the best for each size, in hindsight"
BY_MEDIANS = "auto, if each transfer had taken the median of its size and backend"
HINDSIGHT_BY_MEDIANS = "the best in hindsight, likewise"
ALL_OF_IT = "auto, with the iterations in which it finds out what is best"


def evaluate_mix(name: str, found: Sequence[Transfer], backends: Sequence[str]) -> Mix:
    """What it amounts to. Every backend has to have moved every size."""
    own = [one for one in found if one.table == name]
    by = {(nbytes, way): one for (_, _, nbytes, way), one in figures(own).items() if way != AUTO}
    sizes = sorted({one.nbytes for one in own})
    best = {nbytes: min(backends, key=lambda way: by[nbytes, way].seconds) for nbytes in sizes}
    decided = [one for one in own if not one.exploring]

    def rate(way: str, is_good: Callable[[Figure, Figure], bool]) -> float:
        goods = [
            is_good(by[one.nbytes, one.used], by[one.nbytes, best[one.nbytes]]) for one in decided if one.way == way
        ]
        return sum(goods) / len(goods) if goods else 0.0

    iterations = len({one.round for one in own})
    everything = [one for one in found if one.table in (name, exploring_table(name)) and one.way == AUTO]
    seconds = {way: sum(one.seconds for one in own if one.way == way) / iterations for way in (AUTO, *backends)}
    right = [one for one in own if one.way == best[one.nbytes]]
    seconds[HINDSIGHT] = sum(one.seconds for one in right) / iterations
    seconds[BY_MEDIANS] = sum(by[one.nbytes, one.used].seconds for one in own if one.way == AUTO) / iterations
    seconds[HINDSIGHT_BY_MEDIANS] = sum(by[nbytes, way].seconds for nbytes, way in best.items())
    seconds[ALL_OF_IT] = sum(one.seconds for one in everything) * len(sizes) / len(everything)
    chosen: dict[int, Counter[str]] = {nbytes: Counter() for nbytes in sizes}
    for one in decided:
        if one.way == AUTO:
            chosen[one.nbytes][one.used] += 1
    fastest: dict[int, Counter[str]] = {nbytes: Counter() for nbytes in sizes}
    rounds: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    for one in own:
        if one.way != AUTO:
            rounds[one.nbytes, one.round].append(one)
    for (nbytes, _), group in rounds.items():
        fastest[nbytes][min(group, key=lambda one: one.seconds).way] += 1
    ways = (AUTO, *backends)
    hits = {way: rate(way, is_as_fast) for way in ways}
    return Mix(name, hits, {way: rate(way, tied) for way in ways}, seconds, chosen, best, fastest)


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}


def judge(
    found: Sequence[Transfer],
    mixes: Sequence[Mix],
    runs: dict[str, dict[str, int]],
    decisions: dict[str, float],
    backends: Sequence[str],
) -> list[dict[str, Any]]:
    """The promises, and whether they hold."""
    verdicts: list[dict[str, Any]] = []

    def promise(what: str, measured: float, sign: str, bound: float) -> None:
        holds = _COMPARISONS[sign](measured, bound)
        verdicts.append({"promise": f"{what} {sign} {bound:g}", "measured": round(measured, 3), "holds": holds})

    for mix in mixes:
        promise(f"{mix.name}: share of choices that were the best, or as good", mix.ties[AUTO], "≥", ENOUGH_HITS)
        promise(f"{mix.name}: time / hindsight", mix.seconds[AUTO] / mix.seconds[HINDSIGHT], "≤", 1.05)
        fixed = min(backends, key=mix.seconds.__getitem__)
        promise(f"{mix.name}: time / best fixed backend ({fixed})", mix.seconds[AUTO] / mix.seconds[fixed], "<", 1.0)
        promise(f"{mix.name}: explored in a second run", runs[mix.name]["explored in a second run"], "≤", 0)
    by = figures(one for one in found if one.table == "models")
    for model, nbytes in dict.fromkeys((what, nbytes) for _, what, nbytes, _ in by):
        own = {way: figure.seconds for (_, what, _, way), figure in by.items() if what == model}
        fixed = min((way for way in own if way != AUTO), key=own.__getitem__)
        promise(f"{model} ({nbytes >> 20} MiB): auto / best fixed backend ({fixed})", own[AUTO] / own[fixed], "≤", 1.05)
    for what, microseconds in decisions.items():
        promise(f"{what}, µs", microseconds, "<", 20.0)
    return verdicts


def report(
    machine: dict[str, str],
    found: Sequence[Transfer],
    mixes: Sequence[Mix],
    runs: dict[str, dict[str, int]],
    verdicts: list[dict[str, Any]],
    decisions: dict[str, float],
    backends: Sequence[str],
) -> str:
    """Everything as Markdown."""
    by = figures(found)
    lines = ["# Single tensors and models by each backend, and by the one that is chosen", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    for operation in dict.fromkeys(what for table, what, _, _ in by if table == "tensors"):
        lines += [
            "",
            f"## {operation}, MB/s (Tables 2 to 4), CPU utilisation, and MB/s per core in use (IOef, Table 5)",
            "",
            "The fastest, and those whose spreads overlap with its own, are marked. CPU is this process's: what the",
            "kernel does later for what went through the page cache is not in it.",
        ]
        lines += ["", "| MiB | " + " | ".join(f"{way} | CPU | IOef" for way in backends) + " |"]
        lines += ["|---:|" + "---:|" * 3 * len(backends)]
        for nbytes in sorted({n for table, what, n, _ in by if table == "tensors" and what == operation}):
            own = [by.get(("tensors", operation, nbytes, way)) for way in backends]
            fastest = min(filter(None, own), key=lambda figure: figure.seconds)
            cells = " | ".join(_cells(one, nbytes, tied(one, fastest)) if one else "– | – | –" for one in own)
            lines += [f"| {nbytes / 2**20:.4g} | {cells} |"]
    models = dict.fromkeys((what, nbytes) for table, what, nbytes, _ in by if table == "models")
    ways = (AUTO, *backends)
    if models:
        lines += ["", "## saving models durably, seconds ± spread (Table 9), and what was chosen", ""]
        lines += ["| model | MiB | " + " | ".join(ways) + " | chosen |", "|---|---:|" + "---:|" * len(ways) + "---|"]
    for model, nbytes in models:
        own = [by["models", model, nbytes, way] for way in ways]
        cells = " | ".join(f"{figure.seconds:.4f} ± {figure.spread:.4f}" for figure in own)
        used = Counter(one.used for one in found if (one.table, one.what, one.way) == ("models", model, AUTO))
        lines += [f"| {model} | {nbytes / 2**20:.4g} | {cells} | {_counted(used)} |"]
    for mix in mixes:
        lines += ["", f"## the sizes of {mix.name}, written and read back (Tables 13 and 14)", ""]
        lines += ["In how many iterations each backend was the fastest, the best by medians, and what was chosen.", ""]
        lines += [
            "| MiB | " + " | ".join(backends) + " | best | chosen |",
            "|---:|" + "---:|" * len(backends) + "---|---|",
        ]
        for nbytes, best in mix.best.items():
            counts = " | ".join(str(mix.fastest[nbytes][way]) for way in backends)
            lines += [f"| {nbytes / 2**20:.4g} | {counts} | {best} | {_counted(mix.chosen[nbytes])} |"]
        lines += ["", "| way | the best, within 3 % | or a tie |", "|---|---:|---:|"]
        lines += [f"| {way} | {rate:.1%} | {mix.ties[way]:.1%} |" for way, rate in mix.hits.items()]
        lines += ["", "| way | ms an iteration, on average |", "|---|---:|"]
        lines += [f"| {way} | {seconds * 1e3:.1f} |" for way, seconds in mix.seconds.items()]
        lines += ["", f"The selector: {', '.join(f'{what} {count}' for what, count in runs[mix.name].items())}."]
    lines += ["", "## what a decision costs, µs", "", "| decision | µs |", "|---|---:|"]
    lines += [f"| {what} | {microseconds:.1f} |" for what, microseconds in decisions.items()]
    lines += ["", "## promises", "", "| promise | measured | holds |", "|---|---:|---|"]
    lines += [f"| {v['promise']} | {v['measured']:.3f} | {'yes' if v['holds'] else '**no**'} |" for v in verdicts]
    return "\n".join(lines) + "\n"


def _counted(names: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in names.most_common())


def _rounded(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _cells(figure: Figure, nbytes: int, fastest: bool) -> str:
    speed, utilisation = nbytes / figure.seconds / 1e6, figure.cpu_seconds / figure.seconds
    shown = f"{speed:.0f} ± {speed * figure.spread / figure.seconds:.0f}"
    shown = f"**{shown}**" if fastest else shown
    return f"{shown} | {utilisation:.2f} | {speed / utilisation:.0f}" if utilisation else f"{shown} | 0 | -"


def plot(found: Sequence[Transfer], mixes: Sequence[Mix], backends: Sequence[str], path: Path) -> None:
    """Bandwidth by size, one line a backend, with its spread; models and mixes as bars."""
    by = figures(found)
    operations = list(dict.fromkeys(what for table, what, _, _ in by if table == "tensors"))
    models = list(dict.fromkeys((what, nbytes) for table, what, nbytes, _ in by if table == "models"))
    drawn, axes = pictures.panels(len(operations) + bool(models) + bool(mixes), height=2.7)
    rest = iter(axes)
    for operation, axis in zip(operations, rest):  # noqa: B905  # the other panels stay
        for way in pictures.in_order(backends):
            own = sorted((n, one) for (_, what, n, other), one in by.items() if (what, other) == (operation, way))
            speeds = [_speed(nbytes, one) for nbytes, one in own]
            sizes, colour = [nbytes / 2**20 for nbytes, _ in own], pictures.COLOURS[way]
            axis.plot(sizes, [one.median for one in speeds], marker=".", color=colour, label=way)
            axis.fill_between(
                sizes,
                [one.least for one in speeds],
                [one.greatest for one in speeds],
                color=colour,
                alpha=0.2,
                linewidth=0,
            )
        axis.set(xscale="log", title=f"{operation}: median, and median distance from it", xlabel="MiB", ylabel="MB/s")
        axis.set_ylim(bottom=0)
    ways = (AUTO, *backends)
    if models:
        speeds_of = {way: [_speed(n, by["models", model, n, way]) for model, n in models] for way in ways}
        axis = next(rest)
        pictures.bars(axis, [model.replace("_", "\n", 1) for model, _ in models], speeds_of)
        axis.set(title="saving models durably: median, and median distance from it", ylabel="MB/s")
    if mixes:
        shown = (*ways, HINDSIGHT)
        times = {
            way: [pictures.Spread(*[mix.seconds[way] / mix.seconds[HINDSIGHT]] * 3) for mix in mixes] for way in shown
        }
        axis = next(rest)
        pictures.bars(axis, [mix.name.replace(", ", "\n", 1) for mix in mixes], times)
        axis.set(title="a mix of sizes, written and read", ylabel="time : hindsight")
    pictures.legend(drawn, axes)
    pictures.write(drawn, path)


def _speed(nbytes: int, figure: Figure) -> pictures.Spread:
    fastest = max(figure.seconds - figure.spread, 1e-9)
    times = (figure.seconds, figure.seconds + figure.spread, fastest)
    return pictures.Spread(*(nbytes / seconds / 1e6 for seconds in times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=float, nargs="*", default=SIZES_MIB, help="MiB of single tensors")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="*", default=[name for name in model_names() if name != "gpt2_adam"])
    parser.add_argument("--mixes", nargs="*", choices=list(MIXES_MIB), default=list(MIXES_MIB))
    parser.add_argument("--iterations", type=int, default=40, help="of the mixes, for each way")
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="where the files go: the disk to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/tensor_io"))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    backends = [name for name in registry.names() if not registry.get(name).why_unavailable()]
    runs: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        machine = describe_machine(folder, "cpu")
        found = measure_tensors(folder, options.sizes, options.rounds, backends)
        found += measure_models(folder, options.models, options.rounds, backends)
        for mix, durable in product(options.mixes, (False, True)):
            more, runs[mix_name(mix, durable=durable)] = measure_mix(
                folder, mix, options.iterations, backends, durable=durable
            )
            found += more
    mixes = [evaluate_mix(name, found, backends) for name in runs]
    decisions = measure_decisions()
    verdicts = judge(found, mixes, runs, decisions, backends)
    text = report(machine, found, mixes, runs, verdicts, decisions, backends)
    options.output.with_suffix(".md").write_text(text)
    result = {
        "machine": machine,
        "verdicts": verdicts,
        "runs": runs,
        "decisions": decisions,
        "columns": [field.name for field in fields(Transfer)],
        "measurements": [[_rounded(value) for value in astuple(one)] for one in found],
    }
    options.output.with_suffix(".json").write_text(json.dumps(result))
    if found:
        plot(found, mixes, backends, options.output.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
