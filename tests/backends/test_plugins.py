"""Backends of other packages: found by their entry points, and usable wherever built-in ones are."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run

import fastensor
from fastensor.backends import registry
from fastensor.backends.base import Backend
from fastensor.checkpoint.report import LoadReport
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.cli import main
from fastensor.errors import UnknownBackendError
from fastensor.offload import ActivationOffload, OffloadConfig
from fastensor.testing import BackendTests

BUILT_IN = tuple(point.name for point in registry.BUILT_IN)
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
    assert registry.names() == (*BUILT_IN, "elsewhere")
    assert type(registry.get("elsewhere")).__module__ == "elsewhere"


def test_it_is_usable_wherever_built_in_ones_are(
    plugin: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"w": torch.arange(1 << 20), "b": torch.ones(3)}

    def check(report: SaveReport | LoadReport, found: Any = state) -> None:
        assert (report.backend, report.fallbacks) == ("elsewhere", ())
        assert all(torch.equal(found[name], state[name]) for name in state)

    for name in ("x.ckpt", "x.safetensors"):
        check(fastensor.save(state, tmp_path / name, backend="elsewhere"))
        found, report = fastensor.load_with_report(tmp_path / name, backend="elsewhere")
        check(report, found)
        assert fastensor.verify(tmp_path / name, backend="elsewhere").complete
    with fastensor.AsyncWriter() as writer:
        check(writer.save(state, tmp_path / "y.ckpt", backend="elsewhere").result())
    with fastensor.TensorStore(tmp_path, backend="elsewhere") as store:
        assert torch.equal(store.get(store.put(state["w"])), state["w"])
        assert store.statistics().written_by == {"elsewhere": 1}
    assert "elsewhere" in registry.names_with_slots()
    config = OffloadConfig(schedule="all", directories=(str(tmp_path),), min_bytes=1, backend="elsewhere")
    with ActivationOffload(config) as offload:
        x = torch.rand(1 << 18, requires_grad=True)
        with offload.step():
            loss = x.exp().exp().sum()
        offload.settle()  # so that all is written, before it is needed
        loss.backward()
        assert set(offload.statistics().written_by) == {"elsewhere"}
    assert x.grad is not None
    assert torch.allclose(x.grad, x.detach().exp() * x.detach().exp().exp())
    assert main(["doctor", str(tmp_path), "--quick"]) == 0
    assert "\nelsewhere " in capsys.readouterr().out


def test_one_that_moves_no_parts_of_files_is_refused_for_activations(plugin: None) -> None:
    with pytest.raises(ValueError, match=r"auto or one of direct, gds, numpy, elsewhere, found 'torch'"):
        OffloadConfig(backend="torch")


def test_one_that_cannot_open_slots_is_replaced(
    plugin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: object, fd: int) -> None:
        raise KeyError("anything")

    monkeypatch.setattr(type(registry.get("elsewhere")), "open_slots", refuse)
    with ActivationOffload(
        OffloadConfig(schedule="all", directories=(str(tmp_path),), min_bytes=1, backend="elsewhere")
    ) as offload:
        with offload.step():
            loss = torch.rand(1 << 18, requires_grad=True).exp().sum()
        offload.settle()
        loss.backward()
        assert set(offload.statistics().written_by) == {"numpy"}
    assert "elsewhere is not used: it raised KeyError('anything')" in caplog.text


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
    assert registry.names() == BUILT_IN
    assert registry.names() == BUILT_IN
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "the backend bad (brought:Bad) is left out" in record.message
    assert reason in record.message


def test_a_broken_one_does_not_keep_others_away(
    register: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, PRELUDE, "a = brought:Bad", "b = brought:Mine")
    assert registry.names() == (*BUILT_IN, "mine")
    assert len(caplog.records) == 1
    with pytest.raises(UnknownBackendError, match=r"'yours'.*auto, direct, gds, numpy, torch, mine"):
        registry.get("yours")


def test_damaged_metadata_of_anybody_is_survived(
    register: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(group: str) -> None:
        raise ValueError("a line without a section")

    monkeypatch.setattr(registry, "entry_points_of", fail)
    assert registry.names() == BUILT_IN
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
