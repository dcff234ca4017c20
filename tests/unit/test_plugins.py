"""Backends of other packages: found by their entry points, and as good as our own."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import run

from fastensor.backends import registry
from fastensor.backends.base import Backend
from fastensor.errors import UnknownBackendError
from fastensor.testing import BackendTests

PLUGIN = Path(__file__).parents[1] / "plugin"
"""What a package that brings a backend leaves in ``site-packages``."""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, *points: str) -> None:
    """A package named ``brought``."""
    (folder / "brought-1.0.dist-info").mkdir()
    (folder / "brought-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
    text = "\n".join(["[fastensor.backends]", *points])
    (folder / "brought-1.0.dist-info" / "entry_points.txt").write_text(text)
    (folder / "brought.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "brought", raising=False)


class TestElsewhere(BackendTests):
    @pytest.fixture
    def backend(self, plugin: None) -> Backend:
        return registry.get("elsewhere")


def test_it_joins_the_others(plugin: None) -> None:
    assert registry.names() == ("direct", "gds", "numpy", "torch", "elsewhere")
    assert type(registry.get("elsewhere")).__module__ == "elsewhere"


def test_it_is_imported_when_it_is_wanted(register: Any) -> None:
    code = (
        "import sys, fastensor\nfrom fastensor.backends import registry\n"
        "assert registry.get('pt').name == 'torch' and 'elsewhere' not in sys.modules\n"
        "assert registry.get('elsewhere').name == 'elsewhere' and 'elsewhere' in sys.modules\n"
    )
    path = [*sys.path, str(PLUGIN)]
    run("-c", f"import sys; sys.path[:] = {path!r}\n{code}")


PRELUDE = "from fastensor.backends.numpy import NumpyBackend\nclass Mine(NumpyBackend):\n    name = 'mine'\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("raise SystemError('at import')", "at import"),
        ("", "no attribute 'Bad'"),
        ("def Bad(): raise ValueError('when made')", "when made"),
        ("Bad = 3", "not callable"),
        ("class Bad: name = 'bad'", "expected a fastensor.backends.base.Backend, found Bad"),
        (PRELUDE + "class Bad(Mine): name = 'numpy'", "'numpy' is registered already"),
        (PRELUDE + "class Bad(Mine): name = 'auto'", "'auto' is registered already"),
        (PRELUDE + "class Bad(Mine): name = 'cpy'", "'cpy' is registered already"),
    ],
)
def test_a_broken_one_is_left_out_with_a_warning(
    register: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    source: str,
    reason: str,
) -> None:
    install(tmp_path, monkeypatch, source, "bad = brought:Bad")
    assert registry.names() == ("direct", "gds", "numpy", "torch")
    assert registry.names() == ("direct", "gds", "numpy", "torch")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the backend bad (brought:Bad) is left out" in record.message
    assert reason in record.message


def test_a_broken_one_does_not_keep_others_away(
    register: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, PRELUDE, "a = brought:Bad", "b = brought:Mine")
    assert registry.names() == ("direct", "gds", "numpy", "torch", "mine")
    assert len(caplog.records) == 1
    with pytest.raises(UnknownBackendError, match=r"'yours'.*auto, direct, gds, numpy, torch, mine"):
        registry.get("yours")


def test_damaged_metadata_of_anybody_is_survived(
    register: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(group: str) -> None:
        raise ValueError("a line without a section")

    monkeypatch.setattr(registry, "entry_points_of", fail)
    assert registry.names() == ("direct", "gds", "numpy", "torch")
    assert "a line without a section" in caplog.text


def test_whoever_asks_meanwhile_waits_and_the_module_itself_does_not(
    register: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PRELUDE + (
        "import threading\nfrom fastensor.backends import registry\nseen = []\nseen.append(registry.names())\n"
        "other = threading.Thread(target=lambda: seen.append(registry.names()))\nother.start()\n"
    )
    install(tmp_path, monkeypatch, source, "mine = brought:Mine")
    assert "mine" in registry.names()
    brought = sys.modules["brought"]
    brought.other.join(60)
    assert not brought.other.is_alive()
    assert [("mine" in names) for names in brought.seen] == [False, True]
