"""Messages between two processes of one user on one machine, over a Unix socket: objects and file descriptors.

A message is one packet of the kernel (``SOCK_SEQPACKET``), so it is there as a whole, or not at all. One that is too
long for a packet is in memory whose descriptor is sent in its place.

Objects are pickled. So each end has to know that the other one belongs to the same user before it receives anything:
:func:`fastensor.data.processes.reach` and :class:`fastensor.data.serving.LocalServer` ask the kernel. A user's own
objects, which need their modules, are pickled before, and go along as ``bytes``: only who needs them unpickles them.
"""

from __future__ import annotations

import errno
import os
import pickle
import select
import socket
import struct
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

from fastensor.data.ring import mapped, shared_memory

_PACKET_NBYTES = 64 << 10
"""The kernel takes packets of 208 KiB at most, unless it is told otherwise (``net.core.wmem_default``)."""
_IN_MEMORY = b"\0"
"""The packet of a message that is in memory. No pickle begins like that."""
_FDS_NBYTES = socket.CMSG_SPACE(2 * array("i").itemsize)
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The errors of accepting somebody for whom no descriptor is free, or no memory. A listener stays readable then."""


class Message(NamedTuple):
    """A message that was received."""

    content: Any
    fd: int | None
    """A descriptor that came along. It belongs to the receiver."""


class ConnectionLost(Exception):
    """The other process has ended, or closed the connection, or what came is no message."""


class Connection:
    """One end of a connected Unix socket. Used by one thread at a time, in the process that has made it.

    Only :meth:`wait` waits for the other process. What the kernel does not take at once, :meth:`send` keeps, and
    :meth:`flush` or :meth:`wait` sends later. So two processes that send to each other cannot block each other.

    After an interrupt within a method (``KeyboardInterrupt``), a message may be lost: close it.

    Args:
        endpoint: a connected socket of packets. It belongs to the connection.
    """

    def __init__(self, endpoint: socket.socket) -> None:
        endpoint.setblocking(False)
        self._socket = endpoint
        self._hang_up = weakref.finalize(self, _hang_up, endpoint, os.getpid())
        self._hang_up.atexit = False  # the kernel closes it then
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        """Packets that the kernel has not taken, and descriptors that go with them."""
        self._packet = bytearray(_PACKET_NBYTES)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection: the other process finds it lost, even while forked children have copies of the socket. In
        a forked child, only the child's copy is closed. A second call does nothing."""
        self._hang_up()
        while self._unsent:
            _close(self._unsent.popleft()[1])

    @property
    def peer(self) -> tuple[int, int]:
        """The process and the user at the other end, as the kernel knows them."""
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
        return pid, uid

    @property
    def has_unsent(self) -> bool:
        """True if there are messages that the kernel has not taken yet."""
        return bool(self._unsent)

    def send(self, content: object, *, fd: int | None = None) -> None:
        """Send a message, or keep it until the kernel takes it.

        Args:
            content: pickled.
            fd: a descriptor to send along. The caller keeps ownership, and may close it.

        Raises:
            ConnectionLost: the other process has ended; or no descriptor is free, and the connection ends.
        """
        packet = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        fds: list[int] = []
        try:
            if len(packet) > _PACKET_NBYTES:
                memory_fd, memory = shared_memory("fastensor-message", len(packet))
                fds.append(memory_fd)
                memory[:], packet = packet, _IN_MEMORY
            if fd is not None:
                fds.append(os.dup(fd))
        except OSError as error:
            _close(fds)
            with suppress(OSError):  # the other end is closed already
                self._socket.shutdown(socket.SHUT_RDWR)
            raise ConnectionLost(f"a descriptor could not be sent: {error}") from error
        self._unsent.append((packet, fds))
        self.flush()

    def flush(self) -> None:
        """Send what was not sent yet, or as much of it as the kernel takes.

        Raises:
            ConnectionLost: the other process has ended.
        """
        while self._unsent:
            packet, fds = self._unsent[0]
            try:
                socket.send_fds(self._socket, [packet], fds)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            self._unsent.popleft()
            _close(fds)

    def receive(self) -> Message | None:
        """The next message, if one has arrived.

        Raises:
            ConnectionLost: the other process has ended, or what came is no message.
        """
        try:
            nbytes, ancillary, flags, _ = self._socket.recvmsg_into(
                [self._packet], _FDS_NBYTES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionResetError:  # said once, ahead of messages that have arrived before the other end was closed
            return self.receive()
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        fds = [fd for _, _, data in ancillary for fd in array("i", data)]
        try:
            if flags & socket.MSG_CTRUNC:
                raise ConnectionLost("a descriptor that came could not be received: too many files are open")
            content = _content(self._packet[:nbytes], fds)
        except ConnectionLost:
            _close(fds)
            raise
        return Message(content, fds[0] if fds else None)

    def arrived(self) -> Iterator[Message]:
        """The messages that have arrived. Sends what was not sent yet.

        Raises:
            ConnectionLost: the other process has ended.
        """
        self.flush()
        yield from iter(self.receive, None)

    def awaited(self, seconds: float) -> Message:
        """The next message.

        Raises:
            ConnectionLost: it has not come within so many seconds, or the other process has ended.
        """
        deadline = time.monotonic() + seconds
        while (message := self.receive()) is None:
            if not self.wait(max(deadline - time.monotonic(), 0)):
                raise ConnectionLost(f"it has sent nothing for {seconds:g} s")
        return message

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until something arrives. Sends meanwhile what was not sent yet.

        Returns:
            False if nothing has arrived within ``seconds``.

        Raises:
            ConnectionLost: the other process has ended.
        """
        while True:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            events = poll.poll(None if seconds is None else seconds * 1000)
            if not events:
                return False
            if events[0][1] & ~select.POLLOUT:
                return True
            self.flush()


class Conversation:
    """A block that talks over a connection, and says in its own words that this was lost, or that memory that has come
    cannot be mapped.

    No generator: since Python 3.12, an exception that a generator's context manager replaces is in a reference cycle
    with the frames of all callers. So what they hold would stay until Python's garbage collector runs.

    Args:
        failed: makes what is raised of the loss.
        closes: is closed by what interrupts the block: a message may be lost.
    """

    def __init__(self, failed: Callable[[Exception], Exception], closes: Connection | None = None) -> None:
        self._failed = failed
        self._closes = closes

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._closes is not None:
            self._closes.close()
        if isinstance(error, ConnectionLost | OSError):
            raise self._failed(error) from error


def _content(packet: bytearray, fds: list[int]) -> Any:
    """The content of a message. The descriptor of its memory is taken out of the ones that came."""
    if not packet:
        raise ConnectionLost("the other end is closed")
    is_in_memory = packet == _IN_MEMORY
    if len(fds) > 1 + is_in_memory:
        raise ConnectionLost(f"it sent {len(fds)} descriptors at once")
    try:
        return pickle.loads(mapped(fds.pop(0)).data if is_in_memory else packet)
    except Exception as error:
        raise ConnectionLost(f"what it sent is no message: {error}") from error


def _hang_up(endpoint: socket.socket, process: int) -> None:
    if os.getpid() == process:
        with suppress(OSError):  # the other end is closed already
            endpoint.shutdown(socket.SHUT_RDWR)
    endpoint.close()


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
