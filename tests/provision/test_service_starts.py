"""A service is forked from the process that starts it, if nothing that is in this process could harm it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from programs import Program, run
from provision.conftest import has_ended, wait_until

ASKS = """
import os, socket, sys, threading
from fastensor.data import processes
from fastensor.provision.service import DataService
{does}
print(processes.can_be_forked())
"""


@pytest.mark.parametrize(
    ("does", "expected"),
    [
        ("", True),
        ("null = open('/dev/null', 'wb')", True),
        ("pipe = os.pipe()", True),
        ("log = open(sys.executable, 'rb')", False),
        ("pair = socket.socketpair()", False),
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", False),
        ("processes._MOST_FORKED_NBYTES = 1 << 20", False),
    ],
)
def test_what_may_be_forked(does: str, expected: bool) -> None:
    assert run("-c", ASKS.format(does=does)).stdout == f"{expected}\n"


SCRIPT = """
import os, signal, sys
sys.path[:] = sys.argv[2:]
from pathlib import Path
from fastensor.data import processes
from fastensor.provision import DataService
from provision.conftest import workers_of
from provision.datasets import Numbers

processes.start = None  # it is not used
STARTED_BY = os.getpid()


class OfScript(Numbers):
    def __getitem__(self, position):
        return {**super().__getitem__(position), "process": os.getpid(), "started by": STARTED_BY}


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, print)
    folder = Path(sys.argv[1])
    services = [DataService.start(OfScript(60, folder), cache_bytes=1 << 20, workers=1, name=name) for name in "ab"]
    for service in services:
        loader = service.loader(8, seed=1)
        for epoch in range(2):
            found = [batch for batch in loader]
            assert sorted(number for batch in found for number in batch["id"].tolist()) == list(range(60))
            assert {one for batch in found for one in batch["started by"].tolist()} == {os.getpid()}
            assert os.getpid() not in {one for batch in found for one in batch["process"].tolist()}
        print(service.status()["pid"], *workers_of(service, 1), flush=True)
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        print("no children", flush=True)
    sys.stdin.read()
"""


def test_forked_services_are_on_their_own_and_end_with_their_client(folder: Path) -> None:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    paths = [str(Path(__file__).parents[1]), *sys.path]
    with Program(script, folder, *paths, provision=True) as program:
        pids = [[int(pid) for pid in program.stdout.readline().split()] for _ in range(2)]
        assert program.stdout.readline() == "no children\n"
        for server, worker in pids:
            assert not _is_caught(server, signal.SIGUSR1)
            assert _is_caught(program.pid, signal.SIGUSR1)
            for pid in (server, worker):
                names = {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
                assert not {name for name in names if str(folder) in name}
        program.kill()
        program.wait()
        wait_until(lambda: all(has_ended(pid) for pair in pids for pid in pair))


def _is_caught(pid: int, number: signal.Signals) -> bool:
    """True if a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> number - 1 & 1)
