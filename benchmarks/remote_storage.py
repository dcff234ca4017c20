"""Stand-ins for what is remote: processes on the loopback interface that answer late, and slowly.

``Storage``: a request is the number of an object. The answer begins after a delay; all connections together get so many
bytes a second. ``RemoteObjects`` is a map-style dataset of such objects.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_REQUEST = struct.Struct("=q")
_PIECE_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Link:
    """How far away the storage is."""

    delay_seconds: float
    bytes_per_second: float


class Pace:
    """Lets so many bytes a second pass, of all threads together."""

    def __init__(self, bytes_per_second: float) -> None:
        self._seconds_per_byte = 1 / bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait_for(self, nbytes: int) -> None:
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            passed_at = self._free_at = begin + nbytes * self._seconds_per_byte
        time.sleep(max(passed_at - time.monotonic(), 0))


class _Serving:
    """A process that serves what comes to a listener, from when this is entered until it is left."""

    _listener: socket.socket
    _process: multiprocessing.process.BaseProcess

    def __enter__(self) -> Self:
        self._process.start()
        self._listener.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.join()


class Storage(_Serving):
    """Serves the files of a folder, by their place in the order of names, until it is left."""

    def __init__(self, folder: Path, link: Link) -> None:
        context = multiprocessing.get_context("fork")
        self._sent = context.Value("q", 0)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.folder = folder
        paths = sorted(folder.iterdir())
        self.count = len(paths)
        self._process = context.Process(target=self._serve, args=(paths, link), daemon=True)

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all answers so far, those included that are being sent."""
        return int(self._sent.value)

    def _serve(self, paths: Sequence[Path], link: Link) -> None:
        objects = [path.read_bytes() for path in paths]
        pace = Pace(link.bytes_per_second)
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._answer, args=(connection, objects, pace, link), daemon=True).start()

    def _answer(self, connection: socket.socket, objects: Sequence[bytes], pace: Pace, link: Link) -> None:
        with connection, suppress(ConnectionError):  # a client may be killed
            while len(request := connection.recv(_REQUEST.size, socket.MSG_WAITALL)) == _REQUEST.size:
                data = memoryview(objects[_REQUEST.unpack(request)[0]])
                time.sleep(link.delay_seconds)
                connection.sendall(_REQUEST.pack(len(data)))
                for begin in range(0, len(data), _PIECE_NBYTES):
                    piece = data[begin : begin + _PIECE_NBYTES]
                    pace.wait_for(len(piece))
                    with self._sent.get_lock():  # first: who has all bytes may ask how many they were
                        self._sent.value += len(piece)
                    connection.sendall(piece)


@dataclass(slots=True)
class RemoteObjects:
    """The objects of a storage, as a dataset. Each thread has a connection of its own."""

    port: int
    count: int
    fingerprint: str
    _of_thread: threading.local = field(default_factory=threading.local, repr=False)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> bytearray:
        connection = self._connected()
        connection.sendall(_REQUEST.pack(number))
        (nbytes,) = _REQUEST.unpack(_received(connection, _REQUEST.size))
        return _received(connection, nbytes)

    def __getstate__(self) -> dict[str, Any]:
        return {"port": self.port, "count": self.count, "fingerprint": self.fingerprint}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _connected(self) -> socket.socket:
        own: _Own | None = getattr(self._of_thread, "own", None)
        if own is None or own.process != os.getpid():
            own = self._of_thread.own = _Own(socket.create_connection(("127.0.0.1", self.port)), os.getpid())
            weakref.finalize(own, own.connection.close)  # when the thread has ended
        return own.connection


@dataclass(eq=False)
class _Own:
    """What a thread has."""

    connection: socket.socket
    process: int


def _received(connection: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        if not (count := connection.recv_into(view)):
            raise ConnectionError("the storage has ended")
        view = view[count:]
    return data
