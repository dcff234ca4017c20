"""How pictures of measurements look: a contender has one colour and one place in the order in all of them, and ours
stand out. ``redraw.py`` draws those of ``results/`` again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

COLOURS = {
    "fastensor": "#303f9f",
    "with offload": "#303f9f",
    "auto": "#303f9f",
    "fastensor, safetensors": "#7986cb",
    "torch": "#e08e45",
    "torch, no crc / mmap": "#f2c49b",
    "safetensors": "#7fae86",
    "run:ai model streamer": "#c0616b",
    "fastsafetensors": "#9a8f5c",
    "InstantTensor": "#5d8f5f",
    "torch_checkpointing": "#8a6d9c",
    "dcp, 1 thread": "#b39ac6",
    "dcp, 2 threads": "#d9cce3",
    "direct": "#4f9da6",
    "numpy": "#c7b446",
    "gds": "#8d6e63",
    "without offload": "#e08e45",
    "the best for each size, in hindsight": "#9e9e9e",
    "fio": "#616161",
}
"""By contender, in the order in which they are drawn."""
_INCHES = 8.0
"""Width of every picture: that of a page, so that letters have the size of the page's."""


class Spread(NamedTuple):
    """A median, and the least and the greatest value."""

    median: float
    least: float
    greatest: float


def in_order(names: Iterable[str]) -> list[str]:
    """The names in their order.

    >>> in_order(["fio", "torch", "fastensor"])
    ['fastensor', 'torch', 'fio']
    """
    known = list(COLOURS)
    return sorted(names, key=known.index)


def panels(rows: int, columns: int = 1, *, height: float) -> tuple[Any, list[Any]]:
    """A figure, and its panels row by row; ``height`` is that of a panel, in inches."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(
            rows, columns, figsize=(_INCHES, height * rows), squeeze=False, layout="constrained"
        )
    return figure, list(axes.flat)


def bars(
    axis: Any, groups: Sequence[str], series: Mapping[str, Sequence[Spread | None]], *, upright: bool = True
) -> None:
    """Bars of each contender side by side, with their spreads.

    Args:
        axis: where to draw.
        groups: names of the groups.
        series: by contender, a bar for each group, or None.
        upright: whether bars stand, or lie.
    """
    names = in_order(series)
    thickness = 0.84 / len(names)
    draw = axis.bar if upright else axis.barh
    for number, name in enumerate(names):
        found = [
            (at + (number + 0.5) * thickness - 0.42, one) for at, one in enumerate(series[name]) if one is not None
        ]
        errors = [[one.median - one.least for _, one in found], [one.greatest - one.median for _, one in found]]
        draw(
            [at for at, _ in found], [one.median for _, one in found], thickness, color=COLOURS[name], label=name,
            **{"yerr" if upright else "xerr": errors}, error_kw={"elinewidth": 0.9, "ecolor": "#78909c"},
        )  # fmt: skip
    if upright:
        axis.set_xticks(range(len(groups)), groups, fontsize=7)
    else:
        axis.set_yticks(range(len(groups)), groups)
        axis.tick_params(left=False)
        axis.invert_yaxis()


def lines(axis: Any, series: Mapping[str, Mapping[float, Spread]]) -> None:
    """A line for each contender, with spreads, on logarithmic scales. By contender, ``series`` has what is measured by
    what it depends on."""
    for name in in_order(series):
        found = sorted(series[name].items())
        errors = [[one.median - one.least for _, one in found], [one.greatest - one.median for _, one in found]]
        is_ours = name.startswith("fastensor")
        axis.errorbar(
            [at for at, _ in found], [one.median for _, one in found], yerr=errors, color=COLOURS[name], label=name,
            marker="o", markersize=3, linewidth=2.2 if is_ours else 1.2, elinewidth=0.9, zorder=3 if is_ours else 2,
        )  # fmt: skip
    axis.set(xscale="log", yscale="log")
    axis.minorticks_off()


def legend(figure: Any, axes: Iterable[Any]) -> None:
    """One legend above all panels, where it covers nothing."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    names = in_order(handles)
    figure.legend(
        [handles[name] for name in names], names, loc="outside upper center", ncols=min(4, len(names)), frameon=False
    )


def write(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)
