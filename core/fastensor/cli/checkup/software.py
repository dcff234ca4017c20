"""The software: what is installed, and whether GPUs and GPUDirect Storage can be used."""

from __future__ import annotations

import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from fastensor.backends import registry
from fastensor.backends.gds import compat_reason
from fastensor.cli.checkup import Advice
from fastensor.files.posix import text_of
from fastensor.files.words import human_size
from fastensor.select.machine import software_versions
from fastensor.version import VERSION

ROOT = Path("/")
"""Folder in which ``/proc`` is; tests have others."""
GdsMode: TypeAlias = Literal["native", "compat", "none"]


@dataclass(frozen=True, slots=True)
class Software:
    """Versions of the software that Fastensor runs on."""

    fastensor: str
    python: str
    torch: str
    kernel: str


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that torch can use."""

    name: str
    nbytes: int
    """Size of the GPU's memory."""


@dataclass(frozen=True, slots=True)
class Cuda:
    """GPUs that torch can use."""

    built: str
    """The version of CUDA, or ROCm, that torch was built for; empty if for none."""
    driver: str
    """The version of NVIDIA's kernel module; empty if it is not loaded, or cannot be seen."""
    devices: tuple[Device, ...]
    reason: str
    """Reason for which there are no devices; empty if there are."""


@dataclass(frozen=True, slots=True)
class KvikioState:
    """The library by which Fastensor uses GPUDirect Storage."""

    version: str
    """Empty if it is not installed."""
    imports: bool
    reason: str
    """Reason for which kvikio cannot be used; empty if it can."""
    libcufile: str
    """The version of NVIDIA's library below kvikio; empty if the library does not say, or is missing."""


@dataclass(frozen=True, slots=True)
class Gds:
    """GPUDirect Storage: transfers between disk and GPU around host memory."""

    driver: str
    """The version of the kernel module ``nvidia-fs``; empty if it is not loaded."""
    mode: GdsMode
    """``native``: kvikio uses GDS. ``compat``: kvikio copies through host memory. ``none``: there is no kvikio."""
    reason: str
    """Reason for which the mode is not native; empty if it is."""


def find_software() -> Software:
    """The versions of the software in this process."""
    return Software(VERSION, platform.python_version(), str(torch.__version__), platform.release())


def find_cuda() -> Cuda:
    """Find the GPUs that torch can use. This initialises CUDA, which kvikio needs."""
    built = torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else "")
    driver = _first(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", ROOT / "proc/driver/nvidia/version")
    if not built:
        return Cuda("", driver, (), "this torch is built without CUDA")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types
        found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return Cuda(built, driver, (), str(error).strip().partition("\n")[0])
    devices = tuple(Device(one.name, one.total_memory) for one in found)
    return Cuda(built, driver, devices, "" if devices else "torch finds no device")


def find_kvikio() -> tuple[KvikioState, Gds]:
    """The state of kvikio, and its mode, as the backend ``gds`` finds them. :func:`find_cuda` comes first."""
    driver = nvidia_fs(ROOT)
    if find_spec("kvikio") is None:
        return KvikioState("", False, "it is not installed", ""), Gds(driver, "none", "kvikio is not installed")
    release = software_versions()["kvikio"] or "of an unknown version"
    if reason := registry.why_unavailable("gds"):
        is_imported = "kvikio" in sys.modules
        return KvikioState(release, is_imported, reason, ""), Gds(driver, "none", "kvikio cannot be used")
    try:
        compat, numbers = compat_reason(), import_module("kvikio.cufile_driver").libcufile_version()
    except Exception as error:  # noqa: BLE001  # a version of kvikio that is not known here
        return KvikioState(release, True, "", ""), Gds(
            driver, "compat", f"kvikio does not say that it uses it ({error!r})"
        )
    libcufile = ".".join(map(str, numbers)) if any(numbers) else ""
    return KvikioState(release, True, "", libcufile), Gds(driver, "compat" if compat else "native", compat)


def versions(software: Software) -> dict[str, str]:
    """The first rows of the table."""
    return {
        "fastensor": software.fastensor,
        "Python": software.python,
        "torch": software.torch,
        "Linux": software.kernel,
    }


def devices(cuda: Cuda, kvikio: KvikioState, gds: Gds) -> dict[str, str]:
    """The rows about GPUs."""
    driver = f"nvidia-fs {gds.driver}" if gds.driver else "nvidia-fs is not loaded"
    mode = "no" if gds.mode == "none" else gds.mode
    return {
        "CUDA": _describe(cuda),
        "kvikio": but(kvikio.version, kvikio.reason),
        "GDS": f"{mode}: {gds.reason}; {driver}" if gds.reason else f"{mode}, {driver}",
    }


def _describe(cuda: Cuda) -> str:
    devices = Counter(f"{device.name} ({human_size(device.nbytes)})" for device in cuda.devices)
    parts = [cuda.built, f"driver {cuda.driver}" if cuda.driver else ""]
    parts += [f"{count} × {device}" for device, count in devices.items()]
    return but(", ".join(filter(None, parts)), cuda.reason)


def but(what: str, reason: str) -> str:
    """
    >>> but("25.10", ""), but("25.10", "no driver"), but("", "it is not installed")
    ('25.10', '25.10, but: no driver', 'no: it is not installed')
    """
    if not reason:
        return what
    return f"{what}, but: {reason}" if what else f"no: {reason}"


def advise(kvikio: KvikioState, gds: Gds) -> Iterator[Advice]:
    """A kvikio that is installed and cannot be used, or does not use GDS."""
    if kvikio.version and kvikio.reason:
        yield Advice(
            "warning",
            f"kvikio {kvikio.version} is installed, but cannot be used: {kvikio.reason}",
            "install what is missing (libcuda.so.1 comes with NVIDIA's driver), or remove kvikio",
        )
    if kvikio.version and gds.mode == "compat":
        yield Advice(
            "warning",
            f"kvikio is in compat mode, which is not GPUDirect Storage: {gds.reason}",
            "load the kernel module nvidia-fs, and see NVIDIA's gdscheck -p; else bytes go through host memory",
        )


def nvidia_fs(root: Path) -> str:
    """The version of the kernel module; empty if it is not loaded."""
    folder = root / "proc/driver/nvidia-fs"
    number = r"(\d+(?:[.:]\d+)+)"
    found = _first(rf"version\W*{number}", folder / "version") or _first(
        rf"Driver\(version: *{number}", folder / "stats"
    )
    return found or ("of an unknown version" if folder.is_dir() else "")


def _first(pattern: str, path: Path) -> str:
    """The first group of a pattern in a file; empty if the file is missing or does not match."""
    found = re.search(pattern, text_of(path))
    return found[1] if found else ""
