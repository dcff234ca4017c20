"""Trees of devices, as Linux shows them in ``/sys``: a few files and links of three machines."""

from __future__ import annotations

from pathlib import Path

NVIDIA_3D, VGA, ETHERNET, INFINIBAND, BRIDGE, NVME = (
    "0x030200",
    "0x030000",
    "0x020000",
    "0x020700",
    "0x060400",
    "0x010802",
)
NVIDIA, INTEL, MELLANOX, ASPEED = "0x10de", "0x8086", "0x15b3", "0x1a03"


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def link(root: Path, path: str, target: str) -> None:
    """A relative link, as all in ``/sys``."""
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.symlink_to("../" * (path.count("/")) + target)


def device(root: Path, path: str, kind: str, vendor: str, *, node: int, cpus: str) -> str:
    """A device below a path of bridges. Returns where it is."""
    place = f"sys/devices/{path}"
    for name, text in (("class", kind), ("vendor", vendor), ("numa_node", str(node)), ("local_cpulist", cpus)):
        write(root, f"{place}/{name}", text)
    address = path.rpartition("/")[2]
    link(root, f"sys/bus/pci/devices/{address}", place)
    return place


def rdma(root: Path, name: str, place: str, *, state: str = "4: ACTIVE") -> None:
    write(root, f"{place}/infiniband/{name}/ports/1/state", state)
    link(root, f"{place}/infiniband/{name}/device", place)
    link(root, f"sys/class/infiniband/{name}", f"{place}/infiniband/{name}")


def interface(root: Path, name: str, place: str, *, state: str = "up") -> None:
    write(root, f"{place}/net/{name}/operstate", state)
    link(root, f"{place}/net/{name}/device", place)
    link(root, f"sys/class/net/{name}", f"{place}/net/{name}")


def dgx(root: Path) -> None:
    """Two sockets, two host bridges each. Below each bridge a switch with two GPUs and two RDMA cards, each pair below
    a switch of its own; on the last one, a card is down. Storage and management networks are elsewhere.
    """
    for number, bus in enumerate(("07", "47", "87", "c7")):
        node = number // 2
        common = {"node": node, "cpus": "0-47,96-143" if node == 0 else "48-95,144-191"}
        for half in range(2):
            first, second = f"{int(bus, 16) + 4 * half:02x}", f"{int(bus, 16) + 4 * half + 1:02x}"
            switch = f"pci0000:{bus[0]}0/0000:{bus[0]}0:01.1/0000:{bus[0]}1:00.0/0000:{bus[0]}2:{half:02x}.0"
            device(root, f"{switch}/0000:{first}:00.0", NVIDIA_3D, NVIDIA, **common)  # type: ignore[arg-type]
            card = device(root, f"{switch}/0000:{second}:00.0", INFINIBAND, MELLANOX, **common)  # type: ignore[arg-type]
            rdma(root, f"mlx5_{2 * number + half}", card, state="1: DOWN" if (number, half) == (3, 1) else "4: ACTIVE")
            interface(root, f"ibp{2 * number + half}", card)
    console = device(root, "pci0000:60/0000:60:05.0/0000:61:00.0", VGA, ASPEED, node=0, cpus="0-47,96-143")
    assert console
    storage = device(root, "pci0000:e0/0000:e0:01.0/0000:e1:00.0", ETHERNET, MELLANOX, node=1, cpus="48-95,144-191")
    rdma(root, "mlx5_8", storage)
    interface(root, "enp225s0", storage)


def workstation(root: Path) -> None:
    """Two sockets with a GPU each; one network card, on the second one, and one that has no cable. No switches. The
    devices do not say which processors are next to them, the nodes do.
    """
    device(root, "pci0000:17/0000:17:00.0/0000:18:00.0", VGA, NVIDIA, node=0, cpus="")
    device(root, "pci0000:b2/0000:b2:00.0/0000:b3:00.0", VGA, NVIDIA, node=1, cpus="")
    card = device(root, "pci0000:b2/0000:b2:02.0/0000:b4:00.0", ETHERNET, INTEL, node=1, cpus="")
    interface(root, "eno1", card)
    interface(
        root,
        "eno2",
        device(root, "pci0000:17/0000:17:02.0/0000:19:00.0", ETHERNET, INTEL, node=0, cpus=""),
        state="down",
    )
    write(root, "sys/devices/virtual/net/lo/operstate", "unknown")
    link(root, "sys/class/net/lo", "sys/devices/virtual/net/lo")
    for node, cpus in ((0, "0-15,32-47"), (1, "16-31,48-63")):
        write(root, f"sys/devices/system/node/node{node}/cpulist", cpus)


def without_gpu(root: Path) -> None:
    """A virtual machine: a console, and a network card that is below a PCI device."""
    device(root, "pci0000:00/0000:00:02.0", VGA, "0x1234", node=-1, cpus="0-1")
    card = device(root, "pci0000:00/0000:00:03.0", ETHERNET, "0x1af4", node=-1, cpus="0-1")
    write(root, f"{card}/virtio0/features", "0")
    interface(root, "eth0", f"{card}/virtio0")
