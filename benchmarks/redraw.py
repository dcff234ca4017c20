"""Draws the pictures of ``benchmarks/results`` again, from what was measured. Nothing is measured.

python benchmarks/redraw.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loaders
import new_user
import report
import tensor_io

RESULTS = Path(__file__).parent / "results"


def draw_tensors(found: dict[str, Any], path: Path) -> None:
    transfers = [tensor_io.Transfer(*row) for row in found["measurements"]]
    backends = [one for one in dict.fromkeys(one.way for one in transfers) if one != tensor_io.AUTO]
    mixes = [tensor_io.evaluate_mix(name, transfers, backends) for name in found["runs"]]
    tensor_io.plot(transfers, mixes, backends, path)


DRAWN_BY: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "checkpoint": lambda found, path: report.plot(found["rows"], path),
    "checkpoint-small": lambda found, path: report.plot(found["rows"], path),
    "safetensors": lambda found, path: report.plot(found["rows"], path),
    "loaders": lambda found, path: loaders.plot(found["rows"], path),
    "new_user": lambda found, path: new_user.plot([new_user.Run(**run) for run in found["runs"]], path),
    "tensor_io": draw_tensors,
    "tensor_io-mixes": draw_tensors,
}


def main() -> None:
    for name, draw in DRAWN_BY.items():
        draw(json.loads((RESULTS / f"{name}.json").read_text()), RESULTS / f"{name}.png")
        print(f"{name}.png")


if __name__ == "__main__":
    main()
