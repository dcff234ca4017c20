"""Processes that serve the others of a machine. They are found by a name; the first one that needs one starts it."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from fastensor.data.connection import Connection, ConnectionLost, Message, open_here
from fastensor.files import launchers

ANSWER_SECONDS = 60
"""Seconds that a service may take to start, and to answer: it may have to import torch."""
_RETRY_SECONDS = 0.01
_STANDARD = (0, 1, 2)
_STATELESS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
"""Files that processes may share: they have no state."""
_OF_NO_SCRIPT = ("/memfd:fastensor-", "pipe:")
"""Prefixes of the names of what no dataset reads: our own memory, and what shells and launchers leave open."""
_MOST_FORKED_NBYTES = 1 << 30
"""A fork keeps the memory that the other process gives up or changes later."""
_START = """
import importlib, json, os, sys
if os.fork():
    os._exit(0)
fds = json.loads(sys.argv[1])
for fd in fds:
    os.set_inheritable(fd, False)  # programs that the service starts get none
sys.path[:] = json.loads(sys.argv[3])
importlib.import_module(sys.argv[2]).main(*fds)
"""
"""The program of the process. It forks and leaves its parent: it may outlive the process that has started it, which
would otherwise have to wait for it."""


def name_of_service(kind: str, job: str | None, *more: str) -> str:
    """A name that processes of one user and one job have in common.

    Args:
        kind: what the service is for.
        job: names the job. By default its launcher does; without one, the name is like no other.
        more: what else services of one job may differ in.
    """
    job = job or launchers.job() or secrets.token_hex()
    digest = hashlib.blake2b("\n".join([job, *more]).encode(), digest_size=12)
    return f"fastensor-{kind}-{os.geteuid()}-{digest.hexdigest()}"


def reach(name: str) -> Connection:
    """Connect to the service of this name.

    Raises:
        PermissionError: it belongs to somebody else.
        OSError: there is none.
    """
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        endpoint.connect(_address(name))
    except OSError:
        endpoint.close()
        raise
    connection = Connection(endpoint)
    _, uid = connection.peer
    if uid != os.geteuid():
        connection.close()
        raise PermissionError(f"{name} belongs to user {uid}, not to user {os.geteuid()}")
    return connection


@contextmanager
def _listening(name: str) -> Iterator[socket.socket | None]:
    """A socket at which the service of this name is found; None if another process has one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(_address(name))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            yield None
            return
        listener.listen(1024)
        yield listener


def start(name: str, module: str, *given: int) -> bool:
    """Start the service of this name, unless another process has.

    Args:
        module: its function ``main`` gets the number of a Unix socket that listens, in a process of its own. That is in
            a session of its own, so Ctrl-C in a terminal does not reach it.
        given: further descriptors for ``main``.

    Returns:
        whether this call has started it.

    Raises:
        OSError: Python cannot be started.
    """
    with _listening(name) as listener:
        if listener is None:
            return False
        fds = [listener.fileno(), *given]
        paths = json.dumps([path or os.getcwd() for path in sys.path])
        status = subprocess.run(
            [sys.executable, "-c", _START, json.dumps(fds), module, paths],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            check=False,
        ).returncode
    if status:
        raise OSError(f"{name} cannot be started: Python has ended with {status}")
    return True


def fork(name: str, main: Callable[..., object], *given: int) -> bool:
    """As :func:`start`, in a fork of this process, which has imported what takes long. See :func:`can_be_forked`.

    Args:
        main: gets what :func:`start` gives to that of the module.
        given: further descriptors for ``main``.

    Returns:
        whether this call has started it.
    """
    with _listening(name) as listener:
        if listener is None:
            return False
        if not (between := os.fork()):
            _serve_and_exit(main, listener.detach(), *given)
        with suppress(ChildProcessError):  # who ignores SIGCHLD has no children to wait for
            os.waitpid(between, 0)
    return True


def _serve_and_exit(main: Callable[..., object], *fds: int) -> NoReturn:
    """In a forked child, leave a service behind that is a child of nobody here. It has the standard error output, and
    these descriptors."""
    status = 1
    try:
        os.setsid()
        if not os.fork():
            let_go_of_all_but({2, *fds})
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            gc.freeze()  # what is the parent's is never collected: that might close or remove something
            main(*fds)
        status = 0
    except BaseException:  # noqa: BLE001  # it is printed
        traceback.print_exc()
    finally:
        os._exit(status)


def can_be_forked() -> bool:
    """True if a fork of this process, as it is, can go on for long in its own right: it would lack no thread of Python,
    share nothing that is open, such as a GPU, and hold no more memory than services do.
    """
    ours = {*_STANDARD, *open_here()}
    before = {fd: name for fd, name in open_files().items() if fd in ours or name.startswith(_OF_NO_SCRIPT)}
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return is_alone(before) and (resident - shared) * mmap.PAGESIZE < _MOST_FORKED_NBYTES


def is_alone(before: Mapping[int, str]) -> bool:
    """True if this process has no other threads of Python, and nothing open but what was open before, and files without
    a state.

    Args:
        before: what :func:`open_files` has found.
    """
    left = {fd for fd, name in open_files().items() if before.get(fd) != name and name not in _STATELESS}
    return threading.active_count() == 1 and not left


def open_files() -> dict[int, str]:
    """By descriptor the names of all that this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it was that of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def let_go_of_all_but(kept: Collection[int]) -> None:
    """Have nothing in place of each other descriptor: its number is not free, so who still closes it harms nobody."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in open_files():
        if fd not in kept and fd != null:
            os.dup2(null, fd, inheritable=fd in _STANDARD)


def connected(name: str) -> tuple[Connection, Message]:
    """A connection to the service of this name, and its greeting.

    Raises:
        ConnectionLost: there is none, it has ended before it greeted, or hangs.
        PermissionError: it belongs to somebody else.
    """
    try:
        connection = reach(name)
    except PermissionError:
        raise
    except OSError as error:
        raise ConnectionLost(str(error)) from error
    try:
        return connection, connection.awaited(ANSWER_SECONDS)
    except BaseException:
        connection.close()
        raise


def joined(name: str, start: Callable[[], bool], seconds: float) -> tuple[Connection, Message]:
    """As :func:`connected`, and the service is started if there is none.

    Args:
        start: returns whether it has started one; if not, another process has.
        seconds: for how long to try.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return connected(name)
        except ConnectionLost:  # none runs; or one is about to end, or was started just now
            if time.monotonic() > deadline:
                raise
        if start():
            return connected(name)
        time.sleep(_RETRY_SECONDS)


def _address(name: str) -> str:
    return f"\0{name}"  # in the abstract namespace of Linux: no file
