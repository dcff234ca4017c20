"""Network cards and processors next to GPUs, on trees of three machines, and on damaged ones."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from provision import sysfs

from fastensor.cli import placement as command
from fastensor.provision.placement import (
    Placement,
    listed_cpus,
    parsed_cpus,
    pin_to,
    placements,
    shell_exports,
    worker_cpus,
)

FIRST_CPUS, SECOND_CPUS = parsed_cpus("0-47,96-143"), parsed_cpus("48-95,144-191")


def test_each_gpu_gets_the_card_below_its_switch(tmp_path: Path) -> None:
    sysfs.dgx(tmp_path)
    found = placements(tmp_path)
    assert list(found) == [f"0000:{bus}:00.0" for bus in ("07", "0b", "47", "4b", "87", "8b", "c7", "cb")]
    for number, placement in enumerate(list(found.values())[:7]):
        own = f"mlx5_{number}:1"
        node, cpus = (0, FIRST_CPUS) if number < 4 else (1, SECOND_CPUS)
        assert placement == Placement((own,), own, node, cpus)
        assert shell_exports(placement) == [f"export UCX_NET_DEVICES={own}"]
    assert found["0000:cb:00.0"].nic == "mlx5_6:1"  # its own is down, this is below the same host bridge


def test_a_workstation(tmp_path: Path) -> None:
    sysfs.workstation(tmp_path)
    found = placements(tmp_path)
    assert found == {
        "0000:18:00.0": Placement(("eno1",), "eno1", 0, parsed_cpus("0-15,32-47")),
        "0000:b3:00.0": Placement(("eno1",), "eno1", 1, parsed_cpus("16-31,48-63")),
    }


def test_a_machine_without_gpus_or_devices(tmp_path: Path) -> None:
    assert placements(tmp_path) == {}
    sysfs.without_gpu(tmp_path)
    assert placements(tmp_path) == {}


def test_a_gpu_on_a_virtual_machine(tmp_path: Path) -> None:
    """The network card is a device below the PCI device; the node is not known."""
    sysfs.without_gpu(tmp_path)
    sysfs.device(tmp_path, "pci0000:00/0000:00:05.0", sysfs.NVIDIA_3D, sysfs.NVIDIA, node=-1, cpus="0-1")
    assert placements(tmp_path) == {"0000:00:05.0": Placement(("eth0",), "eth0", None, frozenset({0, 1}))}


def test_gpus_with_the_same_nearest_cards_get_them_in_turn(tmp_path: Path) -> None:
    for bus in ("11", "12", "13"):
        sysfs.device(tmp_path, f"pci0000:10/0000:{bus}:00.0", sysfs.NVIDIA_3D, sysfs.NVIDIA, node=0, cpus="0-3")
    for number in range(2):
        card = sysfs.device(
            tmp_path, f"pci0000:10/0000:2{number}:00.0", sysfs.INFINIBAND, sysfs.MELLANOX, node=0, cpus="0-3"
        )
        sysfs.rdma(tmp_path, f"mlx5_{number}", card)
    assert [placement.nic for placement in placements(tmp_path).values()] == ["mlx5_0:1", "mlx5_1:1", "mlx5_0:1"]


def test_gpus_without_network(tmp_path: Path) -> None:
    sysfs.dgx(tmp_path)
    for folder in ("infiniband", "net"):
        shutil.rmtree(tmp_path / "sys/class" / folder)
    found = placements(tmp_path)["0000:07:00.0"]
    assert (found.nearest_nics, found.nic, shell_exports(found)) == ((), None, [])
    assert found.cpus == FIRST_CPUS


GPU = "sys/devices/pci0000:17/0000:17:00.0/0000:18:00.0"


@pytest.mark.parametrize("missing", ["numa_node", "local_cpulist"])
def test_what_the_system_does_not_say_is_not_known(tmp_path: Path, missing: str) -> None:
    sysfs.workstation(tmp_path)
    (tmp_path / GPU / missing).unlink()
    found = placements(tmp_path)["0000:18:00.0"]
    assert found.numa_node == (None if missing == "numa_node" else 0)
    assert found.nic == "eno1"


def test_strange_entries_are_left_out(tmp_path: Path) -> None:
    sysfs.workstation(tmp_path)
    expected = placements(tmp_path)
    devices, cards = tmp_path / "sys/bus/pci/devices", tmp_path / "sys/class/net"
    (devices / "0000:01:00.0").symlink_to("0000:01:00.0")  # round and round
    (devices / "0000:02:00.0").symlink_to("../../../../../nowhere")
    (devices / "0000:03:00.0").write_bytes(b"\xff")
    (cards / "eth7").symlink_to(tmp_path)
    (cards / "eth8").mkdir()
    (cards / "eth8/device").symlink_to("/")
    sysfs.write(tmp_path, "elsewhere/class", sysfs.NVIDIA_3D)
    (devices / "0000:04:00.0").symlink_to(tmp_path / "elsewhere")
    assert placements(tmp_path) == expected


def test_this_machine() -> None:
    for placement in placements().values():
        assert placement.cpus or placement.numa_node is None


def test_a_process_is_pinned_as_far_as_it_may_be() -> None:
    before = os.sched_getaffinity(0)
    try:
        assert pin_to(frozenset({max(before), 1 << 15})) == {max(before)}
        assert pin_to(frozenset({1 << 15})) == {max(before)}
        assert pin_to(frozenset()) == {max(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_workers_run_next_to_the_gpus_by_turns(tmp_path: Path) -> None:
    sysfs.dgx(tmp_path)
    found = worker_cpus(placements(tmp_path), 200)
    assert found[:4] == [FIRST_CPUS, SECOND_CPUS, FIRST_CPUS, SECOND_CPUS]
    assert [found.count(cpus) for cpus in (FIRST_CPUS, SECOND_CPUS, frozenset())] == [96, 96, 8]


def test_workers_run_anywhere_without_gpus(tmp_path: Path) -> None:
    sysfs.without_gpu(tmp_path)
    assert worker_cpus(placements(tmp_path), 3) == [frozenset()] * 3


def test_the_system_need_not_say_which_processors_are_next(tmp_path: Path) -> None:
    sysfs.device(tmp_path, "pci0000:00/0000:00:05.0", sysfs.NVIDIA_3D, sysfs.NVIDIA, node=-1, cpus="")
    assert worker_cpus(placements(tmp_path), 2) == [frozenset()] * 2


@given(st.frozensets(st.integers(0, 200)))
def test_lists_of_processors_are_read_back(cpus: frozenset[int]) -> None:
    assert parsed_cpus(listed_cpus(cpus)) == cpus


def test_the_command_shows_gpus_and_exports_what_ucx_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sysfs.dgx(tmp_path)
    assert command.run(None, tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert lines[1].split()[:5] == ["0", "0000:07:00.0", "0", "0-47,96-143", "mlx5_0:1"]
    assert command.run(3, tmp_path) == 0
    assert capsys.readouterr().out == "export UCX_NET_DEVICES=mlx5_3:1\n"
    assert command.run(8, tmp_path) == 1
    assert "there is no GPU 8: this machine has 8" in capsys.readouterr().err
