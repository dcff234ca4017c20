"""The tests that need a GPU, whose results are there however many of them could run: a part of ``make gpu``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from gpu_results import Row, Rows
from measuring import describe_gpu_machine

LONGEST = 5
"""How many of the longest tests are shown."""


class Reporter:
    """A plugin of pytest that notes each test as it ends."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._begin = time.monotonic()
        self._outcomes: Counter[str] = Counter()
        self._failed: list[Row] = []
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._rows.doing = nodeid
        self._rows.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.append(Row(report.nodeid, failure_of(report), holds=False))
        if report.failed or report.skipped or report.when == "call":
            self._outcomes[report.outcome] += 1
        self._write()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed.append(Row(report.nodeid, failure_of(report), holds=False))
            self._write()

    def _write(self) -> None:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self._outcomes.items()))
        total = Row("tests/gpu", f"{counts} in {time.monotonic() - self._begin:.0f} s", holds=not self._failed)
        self._rows.rows = [total, *self._failed]
        longest = sorted(self._seconds, key=self._seconds.__getitem__, reverse=True)[:LONGEST]
        self._rows.details = {"longest, seconds": {name: round(self._seconds[name], 1) for name in longest}}
        self._rows.write()


def failure_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The line that says why; the log has the rest."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else str(crash.message)
    return text.strip().partition("\n")[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, required=True, help="where the files go: the disk to test")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, help="is not looked at: a test cannot be half done")
    options = parser.parse_args()
    rows = Rows.at(options.output)
    rows.machine = describe_gpu_machine(options.folder, options.device)
    status = pytest.main(
        ["tests/gpu", "-m", "gpu", "-rs", "-p", "no:cacheprovider", f"--basetemp={options.folder / 'pytest'}",
         "-o", "tmp_path_retention_policy=none"],
        [Reporter(rows)],
    )  # fmt: skip
    rows.end()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
