"""Machines of a test: this one, many times, in namespaces, with cables to a switch that a test can cut.

A machine has a network, a host name, and shared memory of its own. It has the address ``10.77.0.N``, which nobody else
sees: the switch is in a namespace as well. Disks are those of this machine, so all machines share them. Namespaces have
no names. A shell keeps each of them, and ends with the process that has started it, so nothing is left of any test.

This needs root, and the programs of ``install.sh``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from programs import end_with_this_process, run_ranks

PORT = 29_500
PATIENCE_SECONDS = 60.0
"""What goes on is never given up before that, and nothing takes as long."""
_NAMESPACES = ("net", "ipc", "uts", "mnt")
_MACHINE = """
mount -t tmpfs machine /dev/shm
hostname machine-{number}
ip link set lo up
"""
_SWITCH = """
ip link add switch type bridge
ip link set switch up
"""
_CABLE = """
ip link add cable-{number} type veth peer name e0 netns {machine}
ip link set cable-{number} master switch up
"""
_ADDRESS = """
ip link set e0 addrgenmode none
ip addr add {address}/24 dev e0
ip link set e0 up
"""


class CannotMakeMachinesError(Exception):
    """Namespaces, or the network in them, cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Machines that are there, for any process."""

    switch: int
    """The process that keeps the switch."""
    processes: tuple[int, ...]
    """Those that keep the machines."""

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def cut(self, number: int) -> None:
        """Pull the cable of a machine: what is sent to it, or by it, is lost."""
        self._set_cable(number, "down")

    def join(self, number: int) -> None:
        """Put the cable in again."""
        self._set_cable(number, "up")

    def enter(self, number: int) -> None:
        """Bring this process, which must have one thread, to a machine."""
        files = [f"/proc/{self.processes[number]}/ns/{name}" for name in _NAMESPACES]
        fds = [os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in files]
        folder = Path.cwd()
        libc = ctypes.CDLL(None, use_errno=True)
        for fd in fds:
            if libc.setns(fd, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            os.close(fd)
        os.chdir(folder)

    def run(self, places: Sequence[int], function: Callable[..., object], *arguments: object) -> None:
        """Call ``function(rank, *arguments)`` in a new process for each place, which is the number of a machine.

        The ranks meet at port ``PORT`` of the machine of rank 0, unless they do otherwise.
        """
        run_ranks(_start, len(places), self, tuple(places), function, arguments)

    def _set_cable(self, number: int, state: str) -> None:
        namespace = f"--net=/proc/{self.switch}/ns/net"
        subprocess.run(["nsenter", namespace, "ip", "link", "set", f"cable-{number}", state], check=True)


def _start(
    rank: int, machines: Machines, places: tuple[int, ...], function: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    machines.enter(places[rank])
    neighbours = [one for one in range(len(places)) if places[one] == places[rank]]
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(len(places)), LOCAL_RANK=str(neighbours.index(rank)),
        LOCAL_WORLD_SIZE=str(len(neighbours)), GROUP_RANK=str(places[rank]), MASTER_ADDR=machines.address(places[0]),
        MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME="e0", OMP_NUM_THREADS="1",
    )  # fmt: skip
    function(rank, *arguments)


def meet(folder: Path, name: str, rank: int, world: int) -> None:
    """Wait until all ranks have come, without a network. A name is used once."""
    (folder / f"{name}-{rank}").touch()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all((folder / f"{name}-{one}").exists() for one in range(world)):
        assert time.monotonic() < deadline, f"{name}: a rank does not come"
        time.sleep(0.01)


def after(do: Callable[[], object], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which does something else before."""

    def ours(*arguments: Any, **options: Any) -> Any:
        do()
        return function(*arguments, **options)

    return ours


@contextmanager
def made(count: int) -> Iterator[Machines]:
    """So many machines, until the context is left.

    Raises:
        CannotMakeMachinesError: this machine, or who runs the tests, cannot make them.
    """
    with ExitStack() as shells:
        switch = shells.enter_context(_Shell("--net"))
        found = [shells.enter_context(_Shell("--net", "--ipc", "--uts", "--mount")) for _ in range(count)]
        machines = Machines(switch.pid, tuple(one.pid for one in found))
        switch.run(_SWITCH)
        for number, machine in enumerate(found):
            machine.run(_MACHINE.format(number=number))
            switch.run(_CABLE.format(number=number, machine=machine.pid))
            machine.run(_ADDRESS.format(address=machines.address(number)))
        yield machines


class _Shell:
    """A shell in new namespaces, which last as long as it does: until its input ends."""

    def __init__(self, *namespaces: str) -> None:
        command = ["unshare", *namespaces, "sh", "-e"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except FileNotFoundError as error:
            raise CannotMakeMachinesError(f"{error}; tests/hosts/install.sh installs it") from error
        assert self._process.stdin is not None
        end_with_this_process(self._process.stdin)
        self.pid = self._process.pid

    def __enter__(self) -> _Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, commands: str) -> None:
        """
        Raises:
            CannotMakeMachinesError: a command fails.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        said = []
        try:
            self._process.stdin.write(f"{commands}\necho done\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the shell has ended, and said why
        for line in self._process.stdout:
            if line == "done\n":
                return
            said.append(line.strip())
        raise CannotMakeMachinesError("; ".join(said) or "no namespaces can be made")
