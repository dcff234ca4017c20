"""A dictionary as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fastensor.errors import FastensorError
from fastensor.files.words import MIB, human_size
from fastensor.select.choice import in_order
from fastensor.select.context import Context, size_of
from fastensor.select.dictionary import Dictionary

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Point(NamedTuple):
    """The bandwidth of a backend at one size."""

    nbytes: int
    bytes_per_second: float
    best: bool
    """True if no backend is faster."""


def lines(dictionary: Dictionary) -> dict[Context, dict[str, list[Point]]]:
    """The lines to draw: for each context, the bandwidth of each backend by size."""
    found: dict[Context, dict[str, list[Point]]] = {}
    for key, entry in dictionary:
        nbytes = size_of(key.bucket)
        for name, timing in entry.timings.items():
            if timing.seconds:
                point = Point(nbytes, nbytes / timing.seconds, name == entry.best)
                found.setdefault(key.context, {}).setdefault(name, []).append(point)
    return found


def plot(dictionary: Dictionary, title: str, path: Path) -> None:
    """Draw the bandwidth of every backend by size, a panel for each context.

    Raises:
        FastensorError: matplotlib is not installed, or there is nothing to draw.
        ValueError: matplotlib does not know how to write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FastensorError("drawing needs matplotlib: pip install matplotlib") from error

    panels = lines(dictionary)
    if not panels:
        raise FastensorError("there is nothing to draw: nothing was measured yet")
    names = in_order(sorted({name for panel in panels.values() for name in panel}))
    figure = Figure(figsize=(9, 0.6 + 3.2 * len(panels)), layout="constrained")
    figure.suptitle(title, fontsize=8, wrap=True)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (context, panel) in zip(axes, panels.items(), strict=True):
        axis.set(title=str(context), ylabel="MiB/s", yscale="log")
        axis.set_xscale("log", base=2)
        _draw(axis, panel, names)
    figure.savefig(path, dpi=110)


def _draw(axis: Axes, panel: Mapping[str, Sequence[Point]], names: Sequence[str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogFormatter

    for name, points in panel.items():
        axis.plot(*_coordinates(points), marker="o", markersize=4, color=f"C{names.index(name)}", label=name)
    best = [point for points in panel.values() for point in points if point.best]
    axis.plot(*_coordinates(best), "k*", markersize=11, fillstyle="none", label="best")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: human_size(nbytes)))
    axis.yaxis.set_major_formatter(LogFormatter())
    axis.yaxis.set_minor_formatter(LogFormatter())
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _coordinates(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [point.nbytes for point in points], [point.bytes_per_second / MIB for point in points]
