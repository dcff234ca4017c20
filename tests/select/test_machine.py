"""What timings depend on, read from made-up trees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from fastensor.select import machine
from fastensor.select.machine import digest, identity

Tree: TypeAlias = Callable[[dict[str, str]], Path]
SIZE = str(1 << 31)  # of a disk, in sectors: 1 TiB
CPU = "processor\t: 0\nmodel name\t: AMD  EPYC 9654\n\nprocessor\t: 1\nmodel name\t: AMD  EPYC 9654\n"
BAR = "0x00000000a0000000 0x00000000a0ffffff 0x40200\n0x0000400000000000 0x0000401fffffffff 0x14220c\n0x0 0x0 0x0\n"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    def build(files: dict[str, str]) -> Path:
        """Files by name; what begins with ``->`` is a link to another one."""
        for name, text in files.items():
            file = tmp_path / "root" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if text.startswith("->"):
                file.symlink_to(os.path.relpath(tmp_path / "root" / text[2:], file.parent))
            else:
                file.write_text(text)
        return tmp_path / "root"

    return build


def device_of(folder: Path) -> str:
    number = os.stat(folder).st_dev
    return f"{os.major(number)}:{os.minor(number)}"


def mounted(folder: Path, kind: str = "ext4", source: str = "/dev/sda", device: str = "") -> str:
    escaped = str(folder).replace(" ", r"\040")
    return f"27 1 {device or device_of(folder)} / {escaped} rw,relatime shared:1 master:2 - {kind} {source} rw\n"


def test_everything(tree: Tree, tmp_path: Path) -> None:
    root = tree(
        {
            "proc/cpuinfo": CPU,
            "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
            "proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-secret\n",
            "proc/driver/nvidia/gpus/0000:65:00.0/information": "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-other\n",
            "sys/bus/pci/devices/0000:17:00.0/resource": BAR,
            "sys/bus/pci/devices/0000:65:00.0/resource": BAR,
            "proc/self/mountinfo": mounted(tmp_path),
            f"sys/dev/block/{device_of(tmp_path)}": "->sys/devices/pci/block/sda/sda2",
            "sys/devices/pci/block/sda/sda2/partition": "2",
            "sys/devices/pci/block/sda/size": SIZE,
            "sys/devices/pci/block/sda/device/model": "Samsung SSD 990   \n",
        }
    )
    found = identity(tmp_path, root)
    assert found == {
        "cpu": "2 × AMD EPYC 9654",
        "gpu": "NVIDIA H100 (128 GiB on the bus)",
        "linux": "6.8",
        "filesystem": "ext4",
        "disk": "Samsung SSD 990 (1 TiB)",
        "fastensor": "0.1",
        "torch": torch.__version__,
    }
    assert identity(tmp_path / "not" / "there", root) == found
    (tmp_path / "file").touch()
    assert identity(tmp_path / "file", root) == found


DISKS = {
    "nvme": ({"device/model": "INTEL SSDPE"}, "INTEL SSDPE (1 TiB)"),
    "virtio": ({"device/subsystem": "->sys/bus/virtio"}, "virtio (1 TiB)"),
    "card": ({"device/name": "SD64G", "device/subsystem": "->sys/bus/mmc"}, "SD64G (1 TiB)"),
    "memory": ({}, "zram (1 TiB)"),
    "crypt": (
        {"dm/uuid": "CRYPT-LUKS2-0123-luks-0123", "slaves/sdb1": "->sys/one/sdb/sdb1"},
        "crypt of Seagate (2 GiB)",
    ),
    "lvm": (
        {"dm/uuid": "LVM-0123", "slaves/sdb1": "->sys/one/sdb/sdb1", "slaves/sdc": "->sys/one/sdc"},
        "lvm of Seagate (2 GiB), WDC (3 GiB)",
    ),
    "raid": (
        {"md/level": "raid0", "slaves/sdb1": "->sys/one/sdb/sdb1", "slaves/sdb": "->sys/one/sdb"},
        "raid0 of 2 × Seagate (2 GiB)",
    ),
    "unknown": ({"slaves/sdc": "->sys/one/sdc"}, "zram of WDC (3 GiB)"),
    "nested": ({"dm/uuid": "LVM-1", "slaves/dm-1": "->sys/one/dm-1"}, "lvm of crypt of WDC (3 GiB)"),
}
OTHERS = {
    "sys/bus/virtio/uevent": "",
    "sys/bus/mmc/uevent": "",
    "sys/one/sdb/sdb1/partition": "1",
    "sys/one/sdb/size": str(2 << 21),
    "sys/one/sdb/device/model": "Seagate",
    "sys/one/sdc/size": str(3 << 21),
    "sys/one/sdc/device/model": "WDC",
    "sys/one/dm-1/dm/uuid": "CRYPT-PLAIN-1",
    "sys/one/dm-1/slaves/sdc": "->sys/one/sdc",
}


@pytest.mark.parametrize("name", DISKS)
def test_disks(tree: Tree, tmp_path: Path, name: str) -> None:
    files, expected = DISKS[name]
    root = tree(
        {
            **OTHERS,
            **{f"sys/devices/zram0/{file}": text for file, text in files.items()},
            "sys/devices/zram0/size": SIZE,
            f"sys/dev/block/{device_of(tmp_path)}": "->sys/devices/zram0",
            "proc/self/mountinfo": mounted(tmp_path),
        }
    )
    assert identity(tmp_path, root)["disk"] == expected


@pytest.mark.parametrize("dev", [True, False])
def test_the_disk_is_found_by_its_name(tree: Tree, tmp_path: Path, dev: bool) -> None:
    """As for btrfs, whose subvolumes have numbers of their own, whether or not a container has ``/dev``."""
    folder = tmp_path / "with space"
    (folder / "sub").mkdir(parents=True)
    root = tree(
        {
            "proc/self/mountinfo": "damaged\n- \n"
            + mounted(Path("/"), "ext4", device="999:1")
            + mounted(folder, "btrfs", "/dev/mapper/data" if dev else "/dev/dm-0", device="0:99999"),
            "sys/class/block/dm-0": "->sys/devices/dm-0",
            "sys/devices/dm-0/dm/name": "data",
            "sys/devices/dm-0/size": SIZE,
            **({"dev/dm-0": "", "dev/mapper/data": "->dev/dm-0"} if dev else {}),
        }
    )
    found = identity(folder / "sub" / "new", root)
    assert (found["filesystem"], found["disk"]) == ("btrfs", "dm (1 TiB)")


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("nfs4", "server.example.org:/exports/alice"),
        ("overlay", "overlay"),
        ("lustre", "10.0.0.1@tcp:/scratch"),
        ("fuse.sshfs", "alice@host:/home/alice"),
        ("zfs", "pool/alice"),
        ("cifs", "//host/share"),
    ],
)
def test_what_is_on_no_disk_has_its_kind_and_no_names(tree: Tree, tmp_path: Path, kind: str, source: str) -> None:
    root = tree({"proc/self/mountinfo": mounted(tmp_path, kind, source, device="0:99999")})
    found = identity(tmp_path, root)
    assert found["filesystem"] == kind
    assert "disk" not in found
    for secret in ("alice", "host", "10.0.0.1", "example", str(tmp_path)):
        assert secret not in str(found)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd40\nprocessor : 1\n", "2 × ARM 0x41 0xd40"),
        ("processor : 0\ncpu : POWER9, altivec supported\n", "1 × POWER9, altivec supported"),
    ],
)
def test_other_processors(tree: Tree, tmp_path: Path, cpuinfo: str, expected: str) -> None:
    assert identity(tmp_path, tree({"proc/cpuinfo": cpuinfo}))["cpu"] == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/driver/nvidia/gpus/0000:17:00.0/information": "Model: NVIDIA A10\n"}, "NVIDIA A10"),
        ({"proc/driver/nvidia/gpus/0000:17:00.0/information": ""}, "NVIDIA"),
        (
            {
                "sys/class/drm/card0/device/mem_info_vram_total": str(192 << 30),
                "sys/class/drm/card0/device/device": "0x74a1\n",
                "sys/class/drm/card1/device/mem_info_vram_total": "damaged",
                "sys/class/drm/card1/device/device": "0x1234\n",
            },
            "AMD 0x1234 (0 GiB), AMD 0x74a1 (192 GiB)",
        ),
    ],
)
def test_other_gpus(tree: Tree, tmp_path: Path, files: dict[str, str], expected: str) -> None:
    assert identity(tmp_path, tree(files))["gpu"] == expected


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The versions of what is installed: nothing, until something is added."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(machine, "version", version)
    machine.software_versions.cache_clear()
    yield versions
    machine.software_versions.cache_clear()


def test_a_machine_without_known_facts(tree: Tree, tmp_path: Path, installed: dict[str, str]) -> None:
    found = identity(tmp_path, tree({"proc/version": ""}))
    assert set(found) == {"cpu", "fastensor", "torch"}
    assert identity("/dev/null/x/y", tmp_path / "nothing") == found


def test_versions(tree: Tree, tmp_path: Path, installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "VERSION", "3.4.5.dev1")
    installed["kvikio-cu13"] = "25.10.0"
    found = identity(tmp_path, tree({"proc/version": ""}))
    assert (found["fastensor"], found["torch"], found["kvikio"]) == ("3.4", torch.__version__, "25.10.0")


def test_this_machine(tmp_path: Path) -> None:
    found = identity(tmp_path)
    assert {"cpu", "linux", "filesystem", "torch"} <= set(found)
    assert os.uname().nodename not in found.values()
    assert digest(found) == digest(dict(reversed(found.items()))) == digest(identity(tmp_path))
    assert len(digest(found)) == 16
    assert int(digest(found), 16)
    assert digest({**found, "cpu": "other"}) != digest(found)
    assert not torch.cuda.is_initialized()
