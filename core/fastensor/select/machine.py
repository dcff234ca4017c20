"""The identity of a machine, its filesystems and its software: dictionaries of different identities are kept apart.

The identity is read from files, so it is the same before and after CUDA is initialised, and never initialises CUDA.
Names of hosts, users and folders are no part of it: containers change host names, and the others are private.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch

from fastensor.files.posix import text_of
from fastensor.version import VERSION

_KVIKIO = ("kvikio", "kvikio-cu12", "kvikio-cu13")
"""Names of the distribution on PyPI and conda."""
_RELEASE = re.compile(r"\d+\.\d+")
_PROCESSOR = re.compile(r"^processor\b", re.MULTILINE)
_ESCAPED = re.compile(r"\\([0-7]{3})")
_NUMBER = re.compile(r"[0-9]{1,20}")
_SECTOR_NBYTES = 512
"""The unit in which Linux gives sizes of disks."""

_IN_MEMORY = frozenset(["tmpfs", "ramfs", "devtmpfs", "hugetlbfs"])
_SERVED = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "ocfs2",
    "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs",
))  # fmt: skip
"""Filesystems that another machine serves, or the host of a virtual machine."""

StorageKind: TypeAlias = Literal["disk", "memory", "server"]


def identity(path: str | os.PathLike[str], root: Path = Path("/")) -> dict[str, str]:
    """The known facts about the machine, the filesystem of a path, and the software. Two servers whose filesystems are
    of the same kind have the same identity.

    Args:
        path: a file or folder. If it does not exist, the nearest folder above it counts.
        root: where ``/proc``, ``/sys`` and ``/dev`` are.
    """
    found = {**_hardware(root), **_storage(*nearest(os.path.realpath(path)), root), **software_versions()}
    return {name: text for name, text in found.items() if text}


def digest(machine: Mapping[str, str]) -> str:
    """An identity in 16 hexadecimal digits.

    >>> digest({"cpu": "2 × AMD EPYC"}), digest({})
    ('7693a3202c826ffe', '44136fa355b3678a')
    """
    return hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:16]


def storage_kind(filesystem: str) -> StorageKind:
    """Kind of storage on which a filesystem of that kind keeps files.

    >>> storage_kind("ext4"), storage_kind("tmpfs"), storage_kind("nfs4"), storage_kind("fuse.sshfs")
    ('disk', 'memory', 'server', 'server')
    """
    if filesystem in _IN_MEMORY:
        return "memory"
    return "server" if filesystem in _SERVED or filesystem.startswith("fuse.") else "disk"


@cache
def _hardware(root: Path) -> dict[str, str]:
    release = _RELEASE.match(text_of(root / "proc/sys/kernel/osrelease"))
    return {"cpu": _cpu(root), "gpu": ", ".join(sorted(set(_gpus(root)))), "linux": release[0] if release else ""}


def _cpu(root: Path) -> str:
    text = text_of(root / "proc/cpuinfo")
    count = len(_PROCESSOR.findall(text)) or os.cpu_count()
    fields = _fields(text)
    arm = [fields[name] for name in ("CPU implementer", "CPU part") if name in fields]
    model = fields.get("model name") or fields.get("cpu") or " ".join(["ARM", *arm] if arm else [platform.machine()])
    return f"{count} × {model}"


def _gpus(root: Path) -> Iterator[str]:
    """The models of the GPUs, each with its memory, or with as much of the memory as the bus sees: models are sold with
    several sizes, and transfers from the disk go through that window."""
    for information in root.glob("proc/driver/nvidia/gpus/*/information"):
        window = _largest_window(text_of(root / "sys/bus/pci/devices" / information.parent.name / "resource"))
        model = _fields(text_of(information)).get("Model", "NVIDIA")
        yield f"{model} ({_binary_size(window)} on the bus)" if window else model
    for memory in root.glob("sys/class/drm/card*/device/mem_info_vram_total"):
        yield f"AMD {text_of(memory.with_name('device'))} ({_binary_size(_number(memory))})"


def _largest_window(resource: str) -> int:
    """The largest window of a PCI device, in bytes.

    >>> _largest_window("0xa0000000 0xa0ffffff 0x40200\\n0x0 0x0 0x0")
    16777216
    """
    ranges = re.findall(r"^0x([0-9a-f]+) 0x([0-9a-f]+)", resource, re.MULTILINE)
    return max((int(end, 16) - int(begin, 16) + 1 for begin, end in ranges if int(end, 16)), default=0)


class _Mount(NamedTuple):
    device: str
    point: str
    filesystem: str
    source: str


def _storage(folder: Path, number: int, root: Path) -> dict[str, str]:
    mount = _mount_of(folder, number, list(_mounts(text_of(root / "proc/self/mountinfo"))))
    if mount is None:
        return {}
    block = _block_device(mount, root)
    return {"filesystem": mount.filesystem, "disk": _describe_disk(block) if block else ""}


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    """The mounts of this process (proc(5))."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) > 4 and len(kind) > 1:
            yield _Mount(fields[2], _unescaped(fields[4]), kind[0], _unescaped(kind[1]))


def _mount_of(folder: Path, number: int, mounts: list[_Mount]) -> _Mount | None:
    """The mount of a folder: by its device number, or by its name if no mount has the number (subvolumes of btrfs)."""
    device = f"{os.major(number)}:{os.minor(number)}"
    found = [mount for mount in mounts if mount.device == device]
    found = found or [mount for mount in mounts if folder.is_relative_to(mount.point)]
    return max(found, key=lambda mount: len(mount.point), default=None)


def _block_device(mount: _Mount, root: Path) -> Path | None:
    """The disk's folder in ``/sys``; None if the mount is not on a disk of this machine, or the disk is unknown."""
    source = Path(os.path.realpath(root / mount.source.lstrip("/")))
    found = [root / "sys/dev/block" / mount.device]
    if mount.source.startswith("/dev/"):
        found += [root / "sys/class/block" / name for name in (source.name, Path(mount.source).name)]
    return next(filter(os.path.exists, found), None)


def _describe_disk(block: Path) -> str:
    """The model of a disk; for a disk that is made of others, how it is made, and their models."""
    folder = Path(os.path.realpath(block))
    if os.path.exists(folder / "partition"):
        folder = folder.parent
    parts = Counter(_describe_disk(part) for part in _entries(folder / "slaves"))
    if parts:
        models = (f"{count} × {model}" if count > 1 else model for model, count in sorted(parts.items()))
        return f"{_composition(folder)} of {', '.join(models)}"
    return f"{_model(folder)} ({_binary_size(_number(folder / 'size') * _SECTOR_NBYTES)})"


def _composition(folder: Path) -> str:
    """Way in which a disk is made of others: ``raid0``, ``crypt``, ``lvm``, ..."""
    mapped = text_of(folder / "dm/uuid").partition("-")[0].lower()
    return text_of(folder / "md/level") or mapped or _kind(folder)


def _model(folder: Path) -> str:
    given = text_of(folder / "device/model") or text_of(folder / "device/name")
    subsystem = folder / "device/subsystem"
    return given or (os.path.basename(os.path.realpath(subsystem)) if os.path.exists(subsystem) else _kind(folder))


def _kind(folder: Path) -> str:
    return folder.name.rstrip("0123456789").rstrip("-")


@cache
def software_versions() -> dict[str, str]:
    """The versions of the software, as identities have them; that of kvikio is empty if it is not installed."""
    found = {"fastensor": ".".join(VERSION.split(".")[:2]), "torch": str(torch.__version__)}
    return found | {"kvikio": next(filter(None, map(_version, _KVIKIO)), "")}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def nearest(path: str | os.PathLike[str]) -> tuple[Path, int]:
    """The path, or the nearest folder above it that exists, and the number of its device. Links are followed."""
    name = os.path.abspath(path)
    while True:
        with contextlib.suppress(OSError):
            return Path(name), os.stat(name).st_dev
        if name == os.path.dirname(name):
            return Path(path), 0
        name = os.path.dirname(name)


def _fields(text: str) -> dict[str, str]:
    """
    >>> _fields("model name\\t: AMD  EPYC\\nmodel name\\t: the second\\nflags:")
    {'model name': 'AMD EPYC', 'flags': ''}
    """
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        if colon:
            found.setdefault(name.strip(), " ".join(rest.split()))
    return found


def _unescaped(text: str) -> str:
    """
    >>> _unescaped("/my\\\\040disk")
    '/my disk'
    """
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text) if "\\" in text else text


def _binary_size(nbytes: int) -> str:
    """A size as identities have it. Names of dictionary files are hashed from it, so it never changes; for people there
    is :func:`fastensor.files.words.human_size`.

    >>> _binary_size(256 << 30), _binary_size(1 << 29), _binary_size(1000 << 30)
    ('256 GiB', '0.5 GiB', '1e+03 GiB')
    """
    return f"{nbytes / 2**30:.3g} GiB" if nbytes < 1 << 40 else f"{nbytes / 2**40:.3g} TiB"


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _number(path: Path) -> int:
    """The number in a small file; 0 if there is none."""
    text = text_of(path)
    return int(text) if _NUMBER.fullmatch(text) else 0
