"""Tables, a plot, and the comparison of what was measured with what was promised."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pictures
from contenders import OURS, OURS_SAFETENSORS, REFERENCE, SAFETENSORS

LIMIT = "fio"
LARGE_NBYTES = 256 << 20
NOTE = (
    "note: fio moves 8 MiB blocks, 4 in flight, from ordinary pages, Fastensor from huge ones, which the kernel pins "
    "faster. Fastensor frees the space of the file that it replaces in a thread after the save has returned (about "
    "0.1 s per GiB here), the others do so within the save"
)
Row = dict[str, Any]


def judge(rows: list[Row]) -> list[dict[str, Any]]:
    """The promised ratios, model by model: what was measured, and whether it holds."""
    verdicts: list[dict[str, Any]] = []

    def promise(model: str, what: str, measured: float, bound: float, *, at_least: bool = False) -> None:
        holds = measured >= bound if at_least else measured <= bound
        sign = "≥" if at_least else "≤"
        verdicts.append(
            {"model": model, "promise": f"{what} {sign} {bound}", "measured": round(measured, 3), "holds": holds}
        )

    for model in dict.fromkeys(row["model"] for row in rows):
        save, cold, warm = (_by_contender(rows, model, op) for op in ("save", "cold load", "warm load"))
        ours = save[OURS]
        large = ours["nbytes"] >= LARGE_NBYTES
        if large and LIMIT in save:
            promise(model, "durable save / fio", _ratio(save, LIMIT), 1.10)
        peer = _fastest_peer(save)
        promise(model, f"durable save / fastest peer ({peer})", _ratio(save, peer), 1.0 if large else 1.05)
        ratio = _ratio(save, SAFETENSORS, OURS_SAFETENSORS)
        promise(model, "durable save of safetensors / safetensors", ratio, 1.0 if large else 1.05)
        if not large:
            continue
        promise(model, "cold load of safetensors / safetensors", _ratio(cold, SAFETENSORS, OURS_SAFETENSORS), 1.05)
        peer = _fastest_peer(cold)
        promise(model, f"cold load / fastest peer ({peer})", _ratio(cold, peer), 1.05)
        promise(model, "torch / cold load", 1 / _ratio(cold, REFERENCE), 1.8, at_least=True)
        promise(model, "warm load / torch", _ratio(warm, REFERENCE), 1.10)
        if ours["extra_nbytes"] is not None:
            promise(model, "extra MiB of a save", ours["extra_nbytes"] / 2**20, 128)
        promise(model, "CPU seconds of a save / torch", ours["cpu_seconds"] / save[REFERENCE]["cpu_seconds"], 0.45)
    return verdicts


def _by_contender(rows: list[Row], model: str, operation: str) -> dict[str, Row]:
    return {r["contender"]: r for r in rows if r["model"] == model and r["operation"] == operation}


def _fastest_peer(by_contender: dict[str, Row]) -> str:
    peers = (name for name in by_contender if name not in (OURS, OURS_SAFETENSORS, LIMIT))
    return min(peers, key=lambda name: by_contender[name]["seconds"])


def _ratio(by_contender: dict[str, Row], name: str, ours: str = OURS) -> float:
    return float(by_contender[ours]["seconds"] / by_contender[name]["seconds"])


def table(rows: list[Row], machine: dict[str, str], verdicts: list[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    lines = ["# Checkpoints: durable saves, cold and warm loads", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [f"- {NOTE}"]
    for operation in dict.fromkeys(row["operation"] for row in rows):
        lines += ["", f"## {operation}: median seconds (minimum to maximum)", ""]
        names = list(dict.fromkeys(row["contender"] for row in rows if row["operation"] == operation))
        lines += ["| model | MiB | " + " | ".join(names) + " |", "|---|---:|" + "---:|" * len(names)]
        for model in dict.fromkeys(row["model"] for row in rows):
            found = _by_contender(rows, model, operation)
            cells = [spread(found.get(name)) for name in names]
            lines.append(f"| {model} | {next(iter(found.values()))['nbytes'] / 2**20:.0f} | {' | '.join(cells)} |")
    lines += ["", "## save: median CPU seconds, and most extra memory", ""]
    names = list(dict.fromkeys(row["contender"] for row in rows if row["cpu_seconds"] is not None))
    lines += ["| model | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for model in dict.fromkeys(row["model"] for row in rows):
        found = _by_contender(rows, model, "save")
        lines.append(f"| {model} | {' | '.join(_effort(found.get(name)) for name in names)} |")
    lines += ["", "## promises", "", "| model | promise | measured | holds |", "|---|---|---:|---|"]
    lines += [
        f"| {v['model']} | {v['promise']} | {v['measured']:.2f} | {'yes' if v['holds'] else '**no**'} |"
        for v in verdicts
    ]
    return "\n".join(lines) + "\n"


def spread(row: Row | None) -> str:
    if row is None:
        return "–"
    median, least, most = (_three_digits(row[key]) for key in ("seconds", "seconds_min", "seconds_max"))
    return f"{median} ({least}–{most})"


def _three_digits(value: float) -> str:
    """A positive number with three digits, and without an exponent.

    >>> _three_digits(0.0012345), _three_digits(4), _three_digits(1234.5)
    ('0.00123', '4.00', '1234')
    """
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _effort(row: Row | None) -> str:
    if row is None:
        return "–"
    extra = "" if row["extra_nbytes"] is None else f", {row['extra_nbytes'] / 2**20:.0f} MiB"
    return f"{row['cpu_seconds']:.3f} s{extra}"


def plot(rows: list[Row], path: Path) -> None:
    """Bandwidth of every contender, one panel per operation, models from small to large."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    models = sorted({(row["nbytes"], row["model"]) for row in rows})
    figure, axes = pictures.panels(len(operations), height=2.7)
    for axis, operation in zip(axes, operations, strict=True):
        found = {(row["contender"], row["model"]): row for row in rows if row["operation"] == operation}
        names = dict.fromkeys(name for name, _ in found)
        pictures.bars(
            axis,
            [f"{model.replace('_', chr(10), 1)}\n{nbytes / 2**20:.0f} MiB" for nbytes, model in models],
            {
                name: [bandwidth(found[name, model]) if (name, model) in found else None for _, model in models]
                for name in names
            },
        )
        axis.set(title=f"{operation}: median, slowest and fastest of the rounds", ylabel="GB/s")
    pictures.legend(figure, axes)
    pictures.write(figure, path)


def bandwidth(row: Row) -> pictures.Spread:
    """GB/s."""
    return pictures.Spread(*(row["nbytes"] / row[key] / 1e9 for key in ("seconds", "seconds_max", "seconds_min")))
