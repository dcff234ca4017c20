"""What users import: names, types and weight."""

from __future__ import annotations

import inspect
import os
import pickle
import typing
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch
from programs import run

import fastensor
import fastensor_accelerate
import fastensor_lightning
from fastensor.version import LOWEST_TORCH

HEAVY = (
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "accelerate",
    "kvikio",
    "cupy",
    "ray",
    "lmdb",
    "pytest",
    "fsspec",
)
OTHERS = ("torch", "torch.serialization", "torch.utils.data", "numpy", "isal.isal_zlib", "platformdirs.unix")
"""What the core imports of others."""


def test_public_names_exist_and_are_documented() -> None:
    for module in (fastensor, fastensor_lightning, fastensor_accelerate):
        for name in module.__all__:
            value = getattr(module, name)
            assert name == "__version__" or inspect.getdoc(value), name


def test_public_names_are_visible_to_type_checkers(tmp_path: Path) -> None:
    packages = (fastensor, fastensor_lightning, fastensor_accelerate)
    uses = (
        "size: int = fastensor_lightning.OffloadConfig(min_bytes='1MiB', schedule='2GiB', ssd_bytes=None).min_bytes",
        "fastensor_accelerate.FastensorConfig(staging_bytes='1GiB', max_bytes_per_second='1MB', offload_min_bytes=1)",
        "from fastensor.data import Merging",
        "gap: int = Merging('1KiB', read_nbytes=2048).gap_nbytes",
    )
    """Records whose sizes may be words, and then are numbers."""
    names = [f"{package.__name__}.{name}" for package in packages for name in package.__all__]
    source = f"import {', '.join(package.__name__ for package in packages)}\n" + "\n".join(
        [*(f"reveal_type({name})" for name in names), *uses, ""]
    )
    (tmp_path / "use.py").write_text(source)
    # No name of ours is one of others, so theirs may be Any. mypy would take half a minute for torch.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*,lightning.*]\nfollow_imports = skip\n")
    command = ("-m", "mypy", "--strict", "--config-file=mypy.ini", f"--cache-dir={os.devnull}", "use.py")
    shown = run(*command, cold=True, folder=tmp_path, timeout=300).stdout
    assert shown.count("Revealed type") == len(names)
    assert 'is "Any"' not in shown


def test_importing_loads_nothing_heavy() -> None:
    code = (
        "import sys; import fastensor\n"
        "print([name for name in ('torch', 'numpy', 'isal') if name in sys.modules])\n"
        "import torch; before = set(sys.modules); from fastensor import *\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules and name not in before])"
    )
    assert run("-c", code, cold=True).stdout.split("\n")[:2] == ["[]", "[]"]


def test_the_server_of_a_data_service_needs_no_torch() -> None:
    """So it is there at once, while others import torch."""
    code = "import sys; import fastensor.provision.embedded.server; print('torch' in sys.modules)"
    assert run("-c", code, cold=True).stdout == "False\n"


FIRST_CALLS = {
    "load .safetensors": ("fastensor.load('x.safetensors')", 38),
    "load .ckpt": ("fastensor.load('x.ckpt')", 41),
    "save": ("fastensor.save({'weight': torch.ones(1 << 20)}, 'y.ckpt')", 61),
}
"""Calls, and the most modules of ours that a process imports for it, with those of ``import fastensor``."""


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_a_first_call_imports_what_it_uses(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statement, most = FIRST_CALLS[call]
    monkeypatch.chdir(tmp_path)
    for name in ("x.safetensors", "x.ckpt"):
        fastensor.save({"weight": torch.ones(1 << 20)}, name)
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        f"import fastensor; {statement}\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    imported = run("-c", code, cold=True).stdout.split()
    ours = [name for name in imported if name.split(".")[0] == "fastensor"]
    assert len(ours) <= most, ours
    assert not {"statistics", "decimal", "fsspec"} & set(imported)
    assert not {"fastensor.backends.gds", "fastensor.select.share", "fastensor.checkpoint.tools.verify"} & set(imported)


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_a_first_call_imports_without_the_garbage_collector(call: str, tmp_path: Path) -> None:
    """Else a first save looks through all objects of torch, which takes longer than all the rest of it."""
    fastensor.save({"weight": torch.ones(1 << 20)}, tmp_path / "x.safetensors")
    fastensor.save({"weight": torch.ones(1 << 20)}, tmp_path / "x.ckpt")
    code = (
        "import gc, os, sys, torch, fastensor\n"
        "class Observer:\n"
        "    def find_spec(self, name, *_): seen.append((name, gc.get_threshold()[0]))\n"
        "seen = []; sys.meta_path.insert(0, Observer())\n"
        f"os.chdir({str(tmp_path)!r}); {FIRST_CALLS[call][0]}\n"
        "ours = [(name, threshold) for name, threshold in seen if name.startswith('fastensor.')]\n"
        "print(len(ours), *(name for name, threshold in ours if threshold))\n"
        "print(gc.get_threshold()[0] > 0)"
    )
    (count, *collecting), (goes_on,) = map(str.split, run("-c", code, cold=True).stdout.splitlines())
    assert int(count) > 20
    assert set(collecting) <= {"fastensor.backends.pipeline"}
    assert goes_on == "True"


def test_a_save_is_planned_by_modules_that_came_with_its_name() -> None:
    """A signal handler that saves may interrupt the first save, and would find modules half imported."""
    code = (
        "import sys; from fastensor import save; before = set(sys.modules)\n"
        "import torch; import fastensor.stitch.torch_zip, fastensor.stitch.safetensors\n"
        "print(*(name for name in set(sys.modules) - before if name.startswith('fastensor')))"
    )
    assert run("-c", code, cold=True).stdout.split() == []


def test_loads_import_the_containers_that_they_meet(tmp_path: Path) -> None:
    fastensor.save({"w": torch.ones(3)}, tmp_path / "x.ckpt")
    code = (
        f"import sys, fastensor; fastensor.load({str(tmp_path / 'x.ckpt')!r})\n"
        "print([name for name in sys.modules if 'safetensors' in name or name.endswith(('.catalog', '.torch_pickle'))])"
    )
    assert run("-c", code, cold=True).stdout.splitlines() == ["[]"]


def test_names_are_imported_when_they_are_used() -> None:
    assert set(fastensor.__all__) <= set(dir(fastensor))
    assert fastensor.errors.FastensorError is fastensor.FastensorError
    with pytest.raises(AttributeError, match=r"module 'fastensor' has no attribute 'svae'"):
        fastensor.svae  # type: ignore[attr-defined]  # noqa: B018


def test_any_name_may_be_the_first_one() -> None:
    """Modules that import each other have to bear any order. One name of each module is tried."""
    names = {getattr(getattr(fastensor, name), "__module__", ""): name for name in fastensor.__all__}
    assert len(names) > 20
    code = (
        f"import os, {', '.join(OTHERS)}\n"  # once, not in each child
        f"for name in {[*names.values()]!r}:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        import fastensor\n"
        "        getattr(fastensor, name)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0, name\n"
    )
    run("-c", code, cold=True)


@pytest.mark.parametrize("version", ["2.9.1+cpu", "1.13", "2.9.0a0+git"])
@pytest.mark.parametrize("is_imported", [True, False])
def test_a_torch_that_is_too_old_is_refused(tmp_path: Path, version: str, is_imported: bool) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from torch.version import __version__")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = {version!r}\ndebug = False\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {'import torch; ' if is_imported else ''}import fastensor"
    )
    done = run("-c", code, cold=True, check=False)
    assert done.returncode == 1
    expected = f"ImportError: fastensor needs torch 2.10 or later (pip install -U torch), found {version}"
    assert done.stderr.splitlines()[-1] == expected


def test_a_torch_that_says_no_version_is_tried(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    assert run("-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fastensor, torch", cold=True)


def test_the_lowest_torch_is_that_of_the_package() -> None:
    assert f'"torch>={".".join(map(str, LOWEST_TORCH))}"' in Path("pyproject.toml").read_text()


def test_an_accelerate_that_is_too_old_is_refused() -> None:
    code = "import accelerate; accelerate.__version__ = '1.0.1'; import fastensor_accelerate"
    done = run("-c", code, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: fastensor_accelerate needs Accelerate 1.")
    assert last.endswith("found 1.0.1")


def test_errors_are_fastensor_errors_and_fitting_builtins() -> None:
    errors = [getattr(fastensor, name) for name in fastensor.__all__ if name.endswith("Error")]
    assert len(errors) == 20
    for error in errors:
        assert issubclass(error, fastensor.FastensorError)
        fitting = (OSError, RuntimeError, ValueError, LookupError, pickle.UnpicklingError, CancelledError)
        assert error is fastensor.FastensorError or issubclass(error, fitting)


def test_hints_of_public_functions_can_be_resolved() -> None:
    """As command lines that are made of functions do."""
    functions = [one for one in (getattr(fastensor, name) for name in fastensor.__all__) if inspect.isfunction(one)]
    assert fastensor.save in functions
    for function in functions:
        assert "return" in typing.get_type_hints(function)
