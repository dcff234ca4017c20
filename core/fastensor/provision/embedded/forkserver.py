"""The process that workers are forked from: it has imported torch, and the user's script, once for all of them.

It does nothing else. It prepares itself as ``multiprocessing`` prepares its children: it imports the script that has
started the service. If that ends it, starts threads of Python, or leaves files, sockets or devices open, which workers
would share, the server starts one that does not prepare itself; then each worker imports the script, opens its own, and
tells what goes wrong. A GPU that the script has begun to use is such a device.

Threads of libraries in C are not looked for, and a fork has none of them. Those for computing are told not to start,
and some cope with forks, such as that of the memory allocator of pyarrow (``jemalloc_bg_thd``), which pandas and
scikit-learn import. Those of gRPC, or of the SDK of AWS, may not: a script must not start clients of these when it is
imported.

A worker is the grandchild of the forkserver. The process between them ends, and the worker becomes a child of the
server, which has asked the kernel for orphans: it can wait for the worker, and the worker ends with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import NoReturn

from fastensor.data.connection import Connection, ConnectionLost
from fastensor.files.garbage import without_collection
from fastensor.provision.embedded.protocol import Fork, Forked
from fastensor.provision.embedded.spec import prepare

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Libraries that are imported from now on start no threads. There are as many workers as processors."""
_MAY_BE_SHARED = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
"""Files that the script may leave open: they have no state."""


class ChildProcess:
    """A process that the server has made, and talks to.

    Args:
        pid: of a child of this process.
        connection: to it. It belongs to this object.
    """

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid = pid
        self.connection = connection

    def end(self) -> int:
        """Kill it, unless it has ended. Returns the status with which it has ended, or minus a signal."""
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


class ForkServer(ChildProcess):
    """A forkserver, as the server sees it.

    Args:
        import_main: is called in the forkserver, and returns what runs in each worker: that gets the connection to the
            server, and as ``place`` which of the workers it is.
        spec_fd: what is served.
        prepares: whether it imports the user's script before it forks.
        kept: descriptors that workers need, besides that of the spec.
    """

    def __init__(
        self,
        import_main: Callable[[], Callable[..., None]],
        spec_fd: int,
        *,
        prepares: bool,
        kept: Collection[int] = (),
    ) -> None:
        self.prepares = prepares
        self.awaited: set[int] = set()
        """The places of workers that it was asked for, and that have not come yet."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server_pid = os.getpid()
        pid = os.fork()
        if not pid:
            _run_and_exit(
                partial(_make_workers, Connection(theirs), server_pid, import_main, spec_fd, kept, prepares=prepares)
            )
        theirs.close()
        super().__init__(pid, Connection(ours))

    def ask(self, places: Collection[int]) -> None:
        """Ask for workers, in one message: the kernel takes few while the forkserver prepares itself. That it has ended
        is found when it is listened to."""
        self.awaited.update(places)
        if places:
            with suppress(ConnectionLost):
                self.connection.send(Fork([*places]))


def adopt_orphans() -> None:
    """Become the parent of all processes that descend from this one, and lose theirs."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _run_and_exit(run: Callable[[], object]) -> NoReturn:
    """Run in a forked process, and end it: with 0 if the other end has ended. The server replaces what ends."""
    status = 1
    try:
        run()
    except (ConnectionLost, ConnectionResetError):
        status = 0
    except BaseException:  # noqa: BLE001  # it is printed
        traceback.print_exc()
    finally:
        os._exit(status)


def _make_workers(
    connection: Connection,
    server_pid: int,
    import_main: Callable[[], Callable[..., None]],
    spec_fd: int,
    kept: Collection[int],
    *,
    prepares: bool,
) -> None:
    """Be a forkserver, in a forked child of the server. Keeps nothing else of it open."""
    _die_with(server_pid)
    _close_all_but({connection.fileno(), spec_fd, *kept, 0, 1, 2})
    for name in _ONE_THREAD:
        os.environ.setdefault(name, "1")
    with without_collection():
        main = import_main()
    if prepares:
        _prepare(spec_fd)
    gc.freeze()  # so that workers share its memory
    while True:
        connection.wait()
        for message in connection.arrived():
            for place in message.content.places:
                pid, endpoint = _fork(partial(main, place=place), server_pid, connection)
                with endpoint:
                    connection.send(Forked(pid, place), fd=endpoint.fileno())


def _prepare(spec_fd: int) -> None:
    """Import the user's script. Ends the process if that has started threads, which a fork would not have, or has left
    something open, which workers would share: its offset, its locks, and what it is connected to."""
    before = _open_files()
    with suppress(Exception, SystemExit):  # each worker tries again, and the trainer is told
        prepare(spec_fd)
    left_open = {fd for fd, name in _open_files().items() if before.get(fd) != name and name not in _MAY_BE_SHARED}
    if threading.active_count() > 1 or left_open:
        os._exit(1)


def _fork(main: Callable[[Connection], None], server_pid: int, connection: Connection) -> tuple[int, socket.socket]:
    """Make a worker. Returns its process id, and the server's end of the connection to it.

    Args:
        connection: of the forkserver to the server. The worker closes it, and what is made here, but nothing that the
            user's script, or a library, may have open.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    between = os.fork()
    if not between:
        pid = os.fork()
        if pid:
            theirs.send(b"%d" % pid)
            os._exit(0)
        ours.close()
        theirs.recv(1)  # comes when the process between has ended: the server is the parent
        _die_with(server_pid)
        os.close(connection.fileno())
        _run_and_exit(partial(main, Connection(theirs)))
    os.waitpid(between, 0)
    theirs.close()
    pid = int(ours.recv(32))
    ours.send(b"!")
    return pid, ours


def _die_with(server_pid: int) -> None:
    """Have the kernel kill this process when its parent, the server, ends, even if the user's code hangs."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server_pid:
        os._exit(0)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _close_all_but(kept: set[int]) -> None:
    for fd in _open_files():
        if fd not in kept:
            os.close(fd)


def _open_files() -> dict[int, str]:
    """By descriptor the names of all that this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # it was that of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found
