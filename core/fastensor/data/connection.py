"""Messages between two processes of one user on one machine, over a Unix socket: objects, bytes and file descriptors.

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
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Bytes: TypeAlias = bytes | bytearray | memoryview

_HEAD = struct.Struct("<QQ")
"""Bytes of the pickled object, and of the bytes behind it."""
_LONGEST_NBYTES = 8 << 30
"""A value of LMDB has less than 4 GiB."""
_ONE_FD_NBYTES = socket.CMSG_SPACE(array("i").itemsize)
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The errors of accepting somebody for whom no descriptor is free, or no memory. A listener stays readable then."""


class Message(NamedTuple):
    """A message that was received."""

    content: Any
    body: memoryview
    """Bytes that came along."""
    fd: int | None
    """A descriptor that came along. It belongs to the receiver."""


class ConnectionLost(Exception):
    """The other process has ended, or closed the connection, or what came is no message."""


class Connection:
    """One end of a connected Unix socket. Used by one thread at a time, in the process that has made it.

    Only :meth:`wait` waits for the other process. What the kernel does not take at once, :meth:`send` keeps, and
    :meth:`flush` or :meth:`wait` sends later. So two processes that send to each other cannot block each other.

    After an interrupt within a method (``KeyboardInterrupt``), half a message may have come or gone: close it.

    Args:
        endpoint: a connected socket. It belongs to the connection.
    """

    def __init__(self, endpoint: socket.socket) -> None:
        endpoint.setblocking(False)
        self._socket = endpoint
        self.longest_nbytes = _LONGEST_NBYTES
        """The other end counts as lost if it announces a longer message."""
        self._hang_up = weakref.finalize(self, _hang_up, endpoint, os.getpid())
        self._hang_up.atexit = False  # the kernel closes it then
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        """Bytes that the kernel has not taken, and a descriptor that goes with them."""
        self._head = bytearray(_HEAD.size)
        self._pickled_nbytes = 0
        self._into: memoryview | None = None
        """Body of the message that is arriving; None while its head is."""
        self._filled = 0
        """Bytes of that, or of the head, that have arrived."""
        self._fd: int | None = None

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """End the connection: the other process finds it lost, even while forked children have copies of the socket. In
        a forked child, only the child's copy is closed. A second call does nothing."""
        self._hang_up()
        for _, fd in self._unsent:
            _close(fd)
        self._unsent.clear()
        _close(self._fd)
        self._fd = None

    @property
    def peer(self) -> tuple[int, int]:
        """The process and the user at the other end, as the kernel knows them."""
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
        return pid, uid

    @property
    def unsent_nbytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return sum(len(piece) for piece, _ in self._unsent)

    def send(self, content: object, body: Bytes = b"", *, fd: int | None = None) -> None:
        """Send a message, or as much of it as the kernel takes.

        Args:
            content: pickled.
            body: bytes that go along as they are. They must not change until :attr:`unsent_nbytes` is 0.
            fd: a descriptor to send along. The caller keeps ownership, and may close it.

        Raises:
            ConnectionLost: the other process has ended; or no descriptor is free, and the connection ends.
        """
        pickled = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        try:
            copy = None if fd is None else os.dup(fd)
        except OSError as error:
            with suppress(OSError):  # the other end is closed already
                self._socket.shutdown(socket.SHUT_RDWR)
            raise ConnectionLost(f"a descriptor could not be sent: {error}") from error
        self._unsent.append((memoryview(_HEAD.pack(len(pickled), len(body)) + pickled), copy))
        if body:
            self._unsent.append((memoryview(body), None))
        self.flush()

    def flush(self) -> None:
        """Send what was not sent yet, or as much of it as the kernel takes.

        Raises:
            ConnectionLost: the other process has ended.
        """
        while self._unsent:
            piece, fd = self._unsent[0]
            try:
                sent = socket.send_fds(self._socket, [piece], [fd]) if fd is not None else self._socket.send(piece)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            self._unsent[0] = piece[sent:], None
            _close(fd)
            if sent == len(piece):
                self._unsent.popleft()

    def receive(self) -> Message | None:
        """The next message, if all of it has arrived.

        Raises:
            ConnectionLost: the other process has ended, or what came is no message.
            MemoryError: there is no memory for the message.
        """
        while True:
            into = memoryview(self._head) if self._into is None else self._into
            if self._filled < len(into) and not self._fill(into[self._filled :]):
                return None
            if self._filled < len(into):
                continue
            self._filled = 0
            if self._into is None:
                self._pickled_nbytes, nbytes = _HEAD.unpack(self._head)
                if self._pickled_nbytes + nbytes > self.longest_nbytes:
                    raise ConnectionLost(f"it sent a message of {self._pickled_nbytes + nbytes} bytes")
                # unlike a bytearray, it takes memory only as it is filled: who claims much has sent nothing yet
                self._into = np.empty(self._pickled_nbytes + nbytes, np.uint8).data
                continue
            try:
                content = pickle.loads(into[: self._pickled_nbytes])
            except Exception as error:
                raise ConnectionLost(f"what it sent is no message: {error}") from error
            self._into, fd, self._fd = None, self._fd, None
            return Message(content, into[self._pickled_nbytes :], fd)

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

    def _fill(self, room: memoryview) -> bool:
        """Receive some bytes; False if none have arrived."""
        try:
            count, ancillary, flags, _ = self._socket.recvmsg_into([room], _ONE_FD_NBYTES, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._keep(array("i", data))
        if flags & socket.MSG_CTRUNC:
            raise ConnectionLost("a descriptor that came could not be received: too many files are open")
        if count == 0:
            raise ConnectionLost("the other end is closed")
        self._filled += count
        return True

    def _keep(self, fds: array[int]) -> None:
        """Keep a descriptor that has come.

        Raises:
            ConnectionLost: these are several. They are closed.
        """
        _close(self._fd)
        self._fd = fds[0] if len(fds) == 1 else None
        if len(fds) > 1:
            for fd in fds:
                _close(fd)
            raise ConnectionLost(f"it sent {len(fds)} descriptors at once")


class Conversation:
    """A block that talks over a connection, and says in its own words that this was lost.

    No generator: since Python 3.12, an exception that a generator's context manager replaces is in a reference cycle
    with the frames of all callers. So what they hold would stay until Python's garbage collector runs.

    Args:
        failed: makes what is raised of the loss.
        closes: is closed by what interrupts the block: half a message may have come or gone.
    """

    def __init__(self, failed: Callable[[ConnectionLost], Exception], closes: Connection | None = None) -> None:
        self._failed = failed
        self._closes = closes

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._closes is not None:
            self._closes.close()
        if isinstance(error, ConnectionLost):
            raise self._failed(error) from error


def _hang_up(endpoint: socket.socket, process: int) -> None:
    if os.getpid() == process:
        with suppress(OSError):  # the other end is closed already
            endpoint.shutdown(socket.SHUT_RDWR)
    endpoint.close()


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
