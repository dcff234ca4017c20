"""What users import: names, types, weight, and what the wheel holds."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import zipfile
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

import fastensor
import fastensor_lightning

ROOT = Path(__file__).parents[2]
HEAVY = (
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "accelerate",
    "kvikio",
    "cupy",
    "ray",
    "pytest",
    "fsspec",
)


def test_public_names_exist_and_are_documented() -> None:
    for module in (fastensor, fastensor_lightning):
        for name in module.__all__:
            value = getattr(module, name)
            assert name == "__version__" or inspect.getdoc(value), name


def test_public_names_are_visible_to_type_checkers(tmp_path: Path) -> None:
    names = [f"{m.__name__}.{name}" for m in (fastensor, fastensor_lightning) for name in m.__all__]
    source = "import fastensor, fastensor_lightning\n" + "\n".join(f"reveal_type({name})" for name in names)
    (tmp_path / "use.py").write_text(source)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(tmp_path / "use.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("Revealed type") == len(names)
    assert 'is "Any"' not in result.stdout


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import torch, sys; before = set(sys.modules); import fastensor\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules and name not in before])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "[]"


def test_the_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling builds the wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    tops = {name.split("/")[0] for name in files}
    assert tops == {"fastensor", "fastensor_lightning", f"fastensor-{fastensor.__version__}.dist-info"}
    assert {"fastensor/py.typed", "fastensor_lightning/py.typed"} <= set(files)


def test_errors_are_fastensor_errors_and_fitting_builtins() -> None:
    errors = [getattr(fastensor, name) for name in fastensor.__all__ if name.endswith("Error")]
    assert len(errors) == 16
    for error in errors:
        assert issubclass(error, fastensor.FastensorError)
        fitting = (OSError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError, CancelledError)
        assert error is fastensor.FastensorError or issubclass(error, fitting)
