"""The program that runs the tests with several versions, and what pyproject.toml and the documents say about them."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "versions"))
import run  # noqa: E402

GOOD = run.Outcome({"torch": "2.10.0", "numpy": "1.26.0"}, {"passed": 1234, "skipped": 5, "failed": 0}, 90)
REPORT = """<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10"/></testsuites>"""


def test_the_table_shows_each_pair() -> None:
    failed = run.Outcome({}, {}, 0, "no Python 3.13 here")
    lines = run.table({run.PAIRS["lowest-3.11"]: GOOD, run.PAIRS["newest-3.13"]: failed}).splitlines()
    assert lines[2] == "| 3.11 | lowest | 2.10.0 | 1.26.0 |  |  |  | 1,234 | 5 | 0 | 1.5 |"
    assert lines[3].startswith("| 3.13 | newest |")
    assert lines[3].count("no Python 3.13 here") == 1
    assert len({line.count("|") for line in lines}) == 1


def test_what_did_not_run_is_not_good(tmp_path: Path) -> None:
    assert GOOD.is_good
    for counts in ({"passed": 1, "skipped": 0, "failed": 1}, {"passed": 0, "skipped": 9, "failed": 0}):
        assert not run.Outcome({}, counts, 1).is_good
    assert not run.Outcome({}, {}, 1, "pytest ended with 3").is_good
    (tmp_path / "report.xml").write_text(REPORT)
    assert run._counts(tmp_path / "report.xml") == {"passed": 4, "skipped": 3, "failed": 3}


def test_the_pythons_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert (tuple(named), f">={named[0]}") == (run.PYTHONS, project["requires-python"])


@pytest.mark.parametrize("package", ["torch", "numpy", "lightning", "accelerate"])
def test_the_documented_lowest_versions_are_those_of_the_package(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = "\n".join([*project["dependencies"], *project["optional-dependencies"].get(package, ())])
    (bound,) = re.findall(rf"^{package}>=([\d.]+)$", bounds, re.MULTILINE)
    page = (ROOT / "docs" / "install.md").read_text()
    (row,) = re.findall(r"^\| 3\.11 \| lowest \|.*$", page, re.MULTILINE)
    head = next(line for line in page.splitlines() if line.startswith("| Python | versions |"))
    shown = dict(zip(head.split(" | "), row.split(" | "), strict=True))[package]
    assert shown == bound or shown.startswith(f"{bound}.")
