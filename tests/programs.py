"""Programs in processes of their own, and the command line in this one.

The import of torch takes most of the time of a small program. So programs are forked from a process that has imported
torch and fastensor (``warm_python.py``). In everything else they are as any process, from the arguments to the end of
the interpreter. ``cold=True`` is for tests of what happens while an interpreter starts.
"""

from __future__ import annotations

import atexit
import itertools
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import pytest
import torch

from fastensor.cli import main

TIMEOUT_SECONDS = 120
IMPORTED = (
    "torch",
    "fastensor.checkpoint.asynchronous.writer",
    "fastensor.checkpoint.tools.convert",
    "fastensor.checkpoint.tools.diff",
    "fastensor.checkpoint.reading.lazy",
    "fastensor.store.tensor_store",
)
"""What all names of ``fastensor`` need, which it imports when they are used."""
LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
ACCELERATE = ("accelerate", "fastensor_accelerate", "torch._dynamo", "hypothesis", "pytest")
"""What their first use imports, too."""
PROVISION = ("fastensor.provision", "fastensor.provision.embedded.server")
_ports = itertools.count(os.getpid())  # another run of the tests on this machine takes others
_inputs: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def end_with_this_process(stream: IO[str]) -> None:
    """Let only this process hold the input of a program: not what it forks, such as workers of a ``DataLoader``, for
    which the program would wait before it ends."""
    _inputs.add(stream)


def _let_go_of_inputs() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in _inputs:
        if not stream.closed:
            os.dup2(nothing, stream.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go_of_inputs)


class Program:
    """A running program of Python, with pipes to its standard input, output and error.

    The arguments are those of ``python``: a script, ``-c`` and code, or ``-m`` and a module. ``variables`` are added to
    the environment. With ``lightning``, ``accelerate`` or ``provision``, those packages are imported before, too.
    Attributes and methods are those of ``subprocess.Popen``.
    """

    def __init__(
        self,
        *arguments: object,
        folder: Path | None = None,
        lightning: bool = False,
        accelerate: bool = False,
        provision: bool = False,
        **variables: str,
    ) -> None:
        self.returncode: int | None = None
        message = {
            "arguments": [str(argument) for argument in arguments],
            "environment": {**os.environ, **variables},
            "folder": str(folder or Path.cwd()),
        }
        (theirs_in, ours_in), (ours_out, theirs_out), (ours_err, theirs_err) = os.pipe(), os.pipe(), os.pipe()
        report, theirs_report = os.pipe()
        theirs = [theirs_in, theirs_out, theirs_err, theirs_report]
        modules = (*IMPORTED, *LIGHTNING * lightning, *ACCELERATE * accelerate, *PROVISION * provision)
        socket.send_fds(_warm(*modules), [json.dumps(message).encode()], theirs)
        for fd in theirs:
            os.close(fd)
        self.stdin = os.fdopen(ours_in, "w")
        end_with_this_process(self.stdin)
        self.stdout, self.stderr, self._report = map(os.fdopen, (ours_out, ours_err, report))
        self.pid = int(self._report.readline())

    def poll(self) -> int | None:
        return self._status(0)

    def wait(self, timeout: float = TIMEOUT_SECONDS) -> int:
        status = self._status(timeout)
        if status is None:
            raise TimeoutError(f"the program has not ended within {timeout} s")
        return status

    def _status(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout)[0]:
            self.returncode = int(self._report.read())
        return self.returncode

    def communicate(self, text: str = "", timeout: float = TIMEOUT_SECONDS) -> tuple[str, str]:
        """What it prints to its output and error, until it ends."""
        with ThreadPoolExecutor(3) as threads:
            sent = threads.submit(self._send, text)
            read = [threads.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except BaseException:
                kill_group(self.pid)
                raise
            sent.result()
            out, err = (one.result() for one in read)
        self._close()
        return out, err

    def _close(self) -> None:
        with suppress(BrokenPipeError):
            self.stdin.close()
        for stream in (self.stdout, self.stderr, self._report):
            stream.close()

    def _send(self, text: str) -> None:
        with suppress(BrokenPipeError), self.stdin:
            self.stdin.write(text)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self.kill()
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.wait()
        self._close()


@cache
def _warm(*modules: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = Path(__file__).with_name("warm_python.py")
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(script), str(theirs.fileno()), *modules],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait(TIMEOUT_SECONDS)

    atexit.register(end)
    return ours


def run(
    *arguments: object,
    cold: bool = False,
    lightning: bool = False,
    accelerate: bool = False,
    check: bool = True,
    folder: Path | None = None,
    timeout: float = TIMEOUT_SECONDS,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a program (see ``Program``) to its end; ``check`` fails the test if its status is not 0."""
    if cold:
        done = _run_cold([sys.executable, *map(str, arguments)], folder, {**os.environ, **variables}, timeout)
    else:
        with Program(*arguments, folder=folder, lightning=lightning, accelerate=accelerate, **variables) as program:
            out, err = program.communicate(timeout=timeout)
        done = subprocess.CompletedProcess(arguments, program.wait(), out, err)
    assert not check or done.returncode == 0, f"status {done.returncode}\n{done.stdout}{done.stderr}"
    return done


def _run_cold(
    command: list[str], folder: Path | None, environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, env=environment, text=True, process_group=0, **pipes) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            kill_group(process.pid)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def kill_group(pid: int) -> None:
    """Kill a program and what it has started, which may hold its pipes open."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


# Processes of "forkserver" come as fast as warm programs. The first use of sharded tensors imports torch._dynamo.
multiprocessing.set_forkserver_preload([*IMPORTED, "pytest", *LIGHTNING, "torch._dynamo"])


def run_ranks(function: Callable[..., object], world: int, *arguments: object) -> None:
    """Calls ``function(rank, *arguments)`` in ``world`` new processes; it is pickled.

    Their environment is that of the first call.
    """
    torch.multiprocessing.start_processes(function, arguments, nprocs=world, start_method="forkserver")


def wait_until_stopped(pid: int) -> None:
    """Wait until no thread of a process runs that was sent SIGSTOP."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(_state(thread) != "T" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} was not stopped"
        os.sched_yield()


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def free_port() -> int:
    """A port of this machine at which nothing listens, and that no other test gets: the system gives programs that do
    not name a port higher ones, and each worker of pytest has some for itself."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    for number in itertools.islice(_ports, 1_000):
        port = 12_000 + 1_000 * (worker % 20) + number % 1_000
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def command_line(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The status, output and error of ``fastensor`` with these arguments, in this process."""
    status = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err
