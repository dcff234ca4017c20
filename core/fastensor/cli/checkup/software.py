"""What is installed."""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from fastensor import __version__
from fastensor.cli.checkup.ask import NoAnswerError, ask

ROOT = Path("/")
"""Where ``/proc`` is."""
Mode: TypeAlias = Literal["native", "compat", "none"]


@dataclass(frozen=True, slots=True)
class Software:
    """Versions of what Fastensor stands on."""

    fastensor: str
    python: str
    torch: str
    kernel: str


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU that torch can use."""

    name: str
    nbytes: int
    """Of its memory."""


@dataclass(frozen=True, slots=True)
class Cuda:
    """What torch can do with GPUs."""

    built: str
    """The version of CUDA, or ROCm, that torch was built for; empty if for none."""
    driver: str
    """The version of NVIDIA's kernel module; empty if it is not loaded, or cannot be seen."""
    devices: tuple[Device, ...]
    reason: str
    """Why there are no devices; empty if there are."""


@dataclass(frozen=True, slots=True)
class Kvikio:
    """The library that GPUDirect Storage is used by."""

    version: str
    """Empty if it is not installed."""
    imports: bool
    reason: str
    """Why it cannot be used; empty if it can."""
    libcufile: str
    """The version of NVIDIA's library below it; empty if that does not say, or is not there."""


@dataclass(frozen=True, slots=True)
class Gds:
    """GPUDirect Storage: transfers between disk and GPU that do not go through host memory."""

    driver: str
    """The version of the kernel module ``nvidia-fs``; empty if it is not loaded."""
    mode: Mode
    """What kvikio would do: ``native`` uses GDS, ``compat`` copies through host memory; ``none`` is no kvikio."""
    reason: str
    """Why it is not native; empty if it is."""


def find_software() -> Software:
    """What runs this."""
    return Software(__version__, platform.python_version(), str(torch.__version__), platform.release())


def find_cuda() -> Cuda:
    """What torch can do with GPUs. CUDA is initialised only in another process, and only if torch is built for it."""
    built = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else "")
    driver = _first(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", ROOT / "proc/driver/nvidia/version")
    if not built:
        return Cuda("", driver, (), "this torch is built without CUDA")
    try:
        found = ask("probe_cuda")
    except NoAnswerError as error:
        return Cuda(built, driver, (), f"torch.cuda: {error}")
    devices = tuple(Device(one["name"], one["nbytes"]) for one in found["devices"])
    return Cuda(built, driver, devices, found["reason"])


def find_kvikio() -> tuple[Kvikio, Gds]:
    """What kvikio says, asked in another process: importing it may crash."""
    driver = nvidia_fs(ROOT)
    if not _is_installed("kvikio"):
        return Kvikio("", False, "it is not installed", ""), Gds(driver, "none", "kvikio is not installed")
    try:
        found = ask("probe_kvikio")
    except NoAnswerError as error:
        found = {"imports": False, "reason": str(error)}
    release = found.get("version") or _release("kvikio", "kvikio-cu12", "kvikio-cu13") or "of an unknown version"
    return Kvikio(release, found["imports"], found["reason"], found.get("libcufile", "")), gds(found, driver)


def gds(found: dict[str, Any], driver: str) -> Gds:
    """What follows from kvikio's answer.

    >>> gds({"imports": True, "reason": "", "compat_preferred": False, "gds_available": True}, "2.24").mode
    'native'
    """
    if not found["imports"]:
        return Gds(driver, "none", "kvikio cannot be imported")
    if "unread" in found:
        return Gds(driver, "compat", f"kvikio does not say that it uses GDS ({found['unread']})")
    if found["compat_preferred"]:
        return Gds(
            driver, "compat", "kvikio does not use libcufile: it is missing, /run/udev is not readable, or "
            "KVIKIO_COMPAT_MODE says so",
        )  # fmt: skip
    if not found["gds_available"]:
        loaded = "" if driver else ", which is not loaded"
        return Gds(driver, "compat", f"libcufile does not reach the kernel module nvidia-fs{loaded}")
    return Gds(driver, "native", "")


def nvidia_fs(root: Path) -> str:
    """The version of the kernel module; empty if it is not loaded."""
    folder = root / "proc/driver/nvidia-fs"
    number = r"(\d+(?:[.:]\d+)+)"
    found = _first(rf"version\W*{number}", folder / "version") or _first(
        rf"Driver\(version: *{number}", folder / "stats"
    )
    return found or ("of an unknown version" if folder.is_dir() else "")


def _first(pattern: str, path: Path) -> str:
    """What a pattern finds in a file; nothing if there is no such file."""
    try:
        found = re.search(pattern, path.read_text(errors="replace"))
    except OSError:
        return ""
    return found[1] if found else ""


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _release(*distributions: str) -> str:
    """The version of the first of them that is installed."""
    for name in distributions:
        try:
            return version(name)
        except ImportError:
            continue
    return ""
