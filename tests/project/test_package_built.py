"""What is built for users holds what it should, and works in an environment that has never seen the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from programs import run

import fastensor

ROOT = Path(__file__).parents[2]
PACKAGES = {"fastensor", "fastensor_lightning", "fastensor_accelerate"}
METADATA = f"fastensor-{fastensor.__version__}.dist-info"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
OFFLINE = ("--no-index", "--no-deps", "--no-cache-dir")

USE = """
import importlib.util, json, sys
import torch
import fastensor

state = {"w": torch.arange(5.0)}
report = fastensor.save(state, "x.ckpt")
same = torch.equal(fastensor.load("x.ckpt")["w"], state["w"]) and torch.equal(torch.load("x.ckpt")["w"], state["w"])
packages = {name: importlib.util.find_spec(name).origin for name in sys.argv[1:]}
print(json.dumps({"same": same, "atomic": report.atomic, "version": fastensor.__version__, "packages": packages}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a source archive and a wheel."""
    pytest.importorskip("hatchling", reason="hatchling builds the packages")
    folder = tmp_path_factory.mktemp("built")
    run("-m", "hatchling", "build", "-d", folder, cold=True, folder=ROOT)
    return folder


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def source_in(folder: Path) -> Path:
    (source,) = folder.glob("*.tar.gz")
    return source


def test_the_wheel_holds_the_packages_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(wheel_in(built)) as archive:
        files = archive.namelist()
        commands = archive.read(f"{METADATA}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in files} == {*PACKAGES, METADATA}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(files)
    assert "fastensor-accelerate = fastensor_accelerate.launcher:main" in commands
    for package in ("lightning.pytorch", "pytorch_lightning"):
        factory = f"[{package}.callbacks_factory]\nfastensor = fastensor_lightning.callbacks_factory:callbacks"
        assert factory in commands


def test_the_source_holds_what_the_readme_links_to(built: Path) -> None:
    with tarfile.open(source_in(built)) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert tops >= {
        "core",
        "docs",
        "fastensor_lightning",
        "fastensor_accelerate",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    }
    assert not tops & {"tests", "benchmarks", "examples"}


def test_both_are_installed_and_work_outside_of_the_checkout(built: Path, tmp_path: Path) -> None:
    """The source makes the same wheel as the checkout, file by file; it is what is installed."""
    run(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "-w", tmp_path, source_in(built), cold=True, folder=tmp_path)
    assert record_of(wheel_in(tmp_path)) == record_of(wheel_in(built))
    environment = new_environment(tmp_path / "environment", wheel_in(tmp_path))
    found = json.loads(used(environment, "python", "-c", USE, *PACKAGES))
    assert {Path(place).parents[1] for place in found.pop("packages").values()} == {site_of(environment)}
    assert found == {"same": True, "atomic": True, "version": fastensor.__version__}
    assert f"fastensor {fastensor.__version__}" in used(environment, "fastensor", "--version")
    assert "direct" in used(environment, "fastensor", "doctor", "--quick")


def record_of(wheel: Path) -> str:
    """The names, sizes and hashes of the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{METADATA}/RECORD").decode()


def new_environment(folder: Path, wheel: Path) -> Path:
    """A new environment with a wheel in it. What the wheel asks for is that of this one: torch need not be copied."""
    venv.create(folder, symlinks=True)
    run(*PIP, "--python", folder / "bin" / "python", "install", *OFFLINE, wheel, cold=True, folder=folder)
    (site_of(folder) / "others.pth").write_text(sysconfig.get_path("purelib"))  # after its own, and no .pth file of it
    return folder


def site_of(environment: Path) -> Path:
    (site,) = environment.glob("lib/python*/site-packages")
    return site


def used(environment: Path, command: str, *arguments: str) -> str:
    """What a command of an environment prints, in a folder that is not the checkout."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [environment / "bin" / command, *arguments],
        cwd=environment, env=variables, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
