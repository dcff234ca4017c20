"""The benchmark of saves of what has changed, at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import run

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "unchanged.py"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    import unchanged  # type: ignore[import-not-found]

    return unchanged


def saved(benchmark: Any, way: str, number: int, seconds: float, nbytes: int, is_asynchronous: bool = False) -> Any:
    return benchmark.Saved(way, number, is_asynchronous, 1000, seconds, seconds / 2, nbytes, 1000 - nbytes)


def test_promises(benchmark: Any) -> None:
    found = []
    for way, seconds, nbytes in (("share", 0.04, 20), ("trust", 0.06, 50), ("write", 1.0, 1000)):
        for number in range(3):
            found.append(saved(benchmark, way, number, seconds if number else 1.0, nbytes if number else 1000))
            found.append(saved(benchmark, way, number, seconds, nbytes, is_asynchronous=True))
    for way, seconds in (("share", 1.03), ("write", 1.0)):
        found += [saved(benchmark, f"all trained, {way}", number, seconds, 1000) for number in range(3)]
    rows = benchmark.summary(found)
    verdicts = benchmark.judge(rows)
    assert [one["holds"] for one in verdicts] == [True, True, False, False, False, True, True]
    assert verdicts[0]["measured"] == 25
    text = benchmark.table({"machine": "this"}, rows, verdicts)
    assert "| share | later | 2 | 0.040 |" in text
    assert text.count("**no**") == 3


def test_two_percent_are_trained(benchmark: Any) -> None:
    state = benchmark.made(64)
    trained, frozen = (sum(one.nbytes for one in state[part].values()) for part in ("trained", "frozen"))
    assert 0.015 < trained / (trained + frozen) < 0.025
    assert frozen == 64 << 20


def test_a_tiny_run(tmp_path: Path, benchmark: Any) -> None:
    import disk_images  # type: ignore[import-not-found]

    arguments = ("--mib", "32", "--rounds", "1", "--saves", "2", "--output", tmp_path / "found")
    try:
        with disk_images.mounted("xfs", tmp_path / "image", 512 << 20) as folder:
            run(BENCHMARK, *arguments, "--folder", folder)
    except disk_images.CannotMountError as error:
        pytest.skip(f"no filesystem can be mounted here: {error}")
    saves = json.loads((tmp_path / "found.json").read_text())["saves"]
    assert {one["way"] for one in saves} == {"share", "trust", "write", "all trained, share", "all trained, write"}
    assert all((one["shared_nbytes"] > 0) == (one["number"] == 1 and one["way"] in ("share", "trust")) for one in saves)
