"""Network cards and processors next to each GPU, read from the PCIe tree in ``/sys``.

KSpeed (section III-D, "interference-free mapping") binds each GPU to a network card below the same PCIe switch, and
each process to processors of the same NUMA node, so that the traffic of GPUs does not meet on the way to memory.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, repeat, takewhile
from pathlib import Path

from fastensor.files.posix import text_of

_DISPLAY = 0x03
_ACCELERATOR = 0x12
"""Base classes of PCI devices (PCI Code and ID Assignment Specification). GPUs are of the first, some of the second."""
_VGA = 0x0300
_VENDORS = {0x10DE: "NVIDIA", 0x1002: "AMD"}
"""Whose VGA-compatible devices compute. Those of others are the consoles of servers."""
_ON_PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
"""A host bridge, or a device."""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A device on the PCIe tree."""

    address: str
    """Such as ``0000:17:00.0``."""
    path: tuple[str, ...]
    """The bridges and switches from the host bridge down to the device, which is the last."""
    numa_node: int | None
    cpus: frozenset[int]
    """Processors that are next to it. Empty if the system does not say."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Network cards and processors next to a GPU."""

    nearest_nics: tuple[str, ...]
    """All network cards that are nearest; RDMA devices, if there are any."""
    nic: str | None
    """The one that the GPU should use: GPUs with the same nearest ones get them in turn. None without network."""
    numa_node: int | None
    cpus: frozenset[int]
    """Processors of its NUMA node. Empty if the system does not say."""


def placements(root: Path = Path("/")) -> dict[str, Placement]:
    """Placement of each GPU, by the GPU's PCI address, in the order of addresses, which is that of CUDA with
    ``CUDA_DEVICE_ORDER=PCI_BUS_ID``. Empty without GPUs, or without PCI.

    Args:
        root: where ``sys`` is mounted, or was recorded.

    Raises:
        ValueError: a file has something else than the kernel would write there.
    """
    cards = dict(_network_cards(root))
    taken: dict[tuple[str, ...], int] = {}
    found = {}
    for gpu in _gpus(root):
        nearest = _nearest(gpu, cards)
        turn = taken[nearest] = taken.get(nearest, -1) + 1
        nic = nearest[turn % len(nearest)] if nearest else None
        found[gpu.address] = Placement(nearest, nic, gpu.numa_node, gpu.cpus)
    return found


def shell_exports(placement: Placement) -> list[str]:
    """The lines by which a shell lets what it starts use the network card of a GPU, by UCX.

    >>> shell_exports(Placement(("mlx5_0:1",), "mlx5_0:1", 0, frozenset()))
    ['export UCX_NET_DEVICES=mlx5_0:1']
    """
    return [] if placement.nic is None else [f"export UCX_NET_DEVICES={shlex.quote(placement.nic)}"]


def worker_cpus(found: Mapping[str, Placement], workers: int) -> list[frozenset[int]]:
    """The processors that each of so many workers runs on, so that the memory of batches is next to GPUs: by turns
    those next to one GPU and another, no more workers than processors. None for the others, and for all without GPUs:
    they run on any.

    Args:
        found: the :func:`placements` of the machine.

    >>> node = [Placement((), None, number, frozenset({2 * number, 2 * number + 1})) for number in range(2)]
    >>> [sorted(cpus) for cpus in worker_cpus({"0000:17:00.0": node[0], "0000:b3:00.0": node[1]}, 5)]
    [[0, 1], [2, 3], [0, 1], [2, 3], []]
    """
    groups = list(dict.fromkeys(placement.cpus for placement in found.values()))
    turns = (group for number in range(workers) for group in groups if number < len(group))
    return list(islice(chain(turns, repeat(frozenset[int]())), workers))


def pin_to(cpus: frozenset[int]) -> frozenset[int]:
    """Let this process run on these processors only, as far as it may run on them.

    Returns:
        where it may run now: as before, if it may run on none of them.
    """
    allowed = os.sched_getaffinity(0)
    if cpus & allowed:
        os.sched_setaffinity(0, cpus & allowed)
    return frozenset(os.sched_getaffinity(0))


def parsed_cpus(text: str) -> frozenset[int]:
    """The processors of a list as the kernel writes it.

    Raises:
        ValueError: it is none.

    >>> sorted(parsed_cpus("0-2,8,10-11"))
    [0, 1, 2, 8, 10, 11]
    """
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(chain.from_iterable(range(int(first), int(last or first) + 1) for first, _, last in ranges))


def listed_cpus(cpus: frozenset[int]) -> str:
    """Processors as :func:`parsed_cpus` reads them.

    >>> listed_cpus(frozenset({0, 1, 2, 8, 10, 11}))
    '0-2,8,10-11'
    """
    firsts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    lasts = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)
    )


def _nearest(gpu: PciDevice, cards: Mapping[str, PciDevice]) -> tuple[str, ...]:
    """The names of the nearest cards, of the kind that is better: whoever has RDMA, wants to use it."""
    usable = [name for name in cards if ":" in name] or list(cards)
    distances = {name: _distance(gpu, cards[name]) for name in usable}
    least = min(distances.values(), default=None)
    return tuple(name for name, distance in distances.items() if distance == least)


def _distance(one: PciDevice, other: PciDevice) -> tuple[int, int]:
    """How far two devices are from each other. The first number is 0 below one host bridge; 1 on one NUMA node, or if
    that is unknown; 2 on different ones. The second one is of the bridges and switches between them."""
    common = sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], zip(one.path, other.path, strict=False)))
    hops = len(one.path) + len(other.path) - 2 * common
    differ = None not in (one.numa_node, other.numa_node) and one.numa_node != other.numa_node
    return 0 if common else 2 if differ else 1, hops


def _gpus(root: Path) -> Iterator[PciDevice]:
    for entry in _entries(root / "sys/bus/pci/devices"):
        number = _number(entry / "class")
        vendor = _number(entry / "vendor")
        if number is None or number >> 16 not in (_DISPLAY, _ACCELERATOR):
            continue
        if (number >> 8 != _VGA or vendor in _VENDORS) and (device := _device(root, entry)):
            yield device


def _network_cards(root: Path) -> Iterator[tuple[str, PciDevice]]:
    """Names and devices of ports of RDMA devices (``mlx5_0:1``), then of interfaces (``eth0``), as UCX calls them.
    Those that are down are left out."""
    for entry in _entries(root / "sys/class/infiniband"):
        device = _device(root, entry / "device")
        for port in _entries(entry / "ports"):
            if device and text_of(port / "state") in ("", "4: ACTIVE"):
                yield f"{entry.name}:{port.name}", device
    for entry in _entries(root / "sys/class/net"):
        device = _device(root, entry / "device")
        if device and text_of(entry / "operstate") in ("", "up", "unknown"):
            yield entry.name, device


def _device(root: Path, link: Path) -> PciDevice | None:
    """The PCI device that a link leads to; None if there is none."""
    tree = os.path.realpath(root / "sys/devices")
    real = os.path.realpath(link)
    below = os.path.relpath(real, tree).split(os.sep)
    path = tuple(takewhile(_ON_PCI.fullmatch, below))  # what is below the PCI device is no part of the PCIe tree
    if len(path) < 2 or not os.path.isdir(real):
        return None
    folder = Path(tree, *path)
    node = _number(folder / "numa_node")
    numa_node = None if node is None or node < 0 else node
    of_node = root / f"sys/devices/system/node/node{numa_node}/cpulist"
    return PciDevice(path[-1], path, numa_node, parsed_cpus(text_of(folder / "local_cpulist") or text_of(of_node)))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda entry: (len(entry.name), entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _number(path: Path) -> int | None:
    text = text_of(path)
    return int(text, 0) if text else None
