"""The machines of these tests are what the other tests take them for."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from hosts.machines import PATIENCE_SECONDS, CannotMakeMachinesError, Machines, made


def test_machines_share_disks_and_nothing_else(machines: Machines, tmp_path: Path) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    with listening:
        machines.run([0, 1], _look_around, machines, tmp_path, listening.getsockname()[1])
    assert {(tmp_path / f"of-{rank}").read_text() for rank in range(2)} == {"machine-0", "machine-1"}


def _look_around(rank: int, machines: Machines, folder: Path, port: int) -> None:
    (folder / f"of-{rank}").write_text(socket.gethostname())
    assert os.listdir("/dev/shm") == []
    addresses = subprocess.run(["ip", "-brief", "-4", "addr"], capture_output=True, text=True, check=True).stdout
    assert machines.address(rank) in addresses
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 5)
    with pytest.raises(OSError, match="unreachable"):
        socket.create_connection(("192.0.2.1", 80), 5)


def test_a_cable_is_cut_and_joined(machines: Machines) -> None:
    machines.run([0], _talk_to_itself_and_others, machines)


def _talk_to_itself_and_others(rank: int, machines: Machines) -> None:
    del rank
    own = socket.create_server((machines.address(0), 0))

    def reaches(number: int) -> bool:
        try:
            socket.create_connection((machines.address(number), own.getsockname()[1]), 0.5).close()
        except ConnectionRefusedError:  # somebody is there to refuse it
            return True
        except OSError:
            return False
        return True

    def comes_to_reach(number: int) -> bool:
        """The kernel may have to ask several times whose address it is."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (found := reaches(number)) and time.monotonic() < deadline:
            pass
        return found

    with own:
        assert comes_to_reach(0)
        assert comes_to_reach(1)
        machines.cut(0)
        assert comes_to_reach(0), "a machine always reaches itself"
        assert not reaches(1)
        machines.join(0)
        assert comes_to_reach(1)


def test_nothing_is_left_of_machines() -> None:
    try:
        with made(1) as machines:
            processes = [machines.switch, *machines.processes]
    except CannotMakeMachinesError as error:
        pytest.skip(f"machines cannot be made in namespaces here: {error}")
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


def test_what_cannot_be_made_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    unshare = tmp_path / "unshare"
    unshare.write_text("#!/bin/sh\necho unshare failed: Operation not permitted\nexit 1\n")
    unshare.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotMakeMachinesError, match="Operation not permitted"), made(1):
        pass
    unshare.unlink()
    with pytest.raises(CannotMakeMachinesError, match=r"unshare.*install\.sh"), made(1):
        pass
