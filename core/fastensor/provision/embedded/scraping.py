"""The metrics of a service over HTTP, for Prometheus and whatever else reads its text form.

Only the loopback interface is listened on. Anybody on the machine can read the counts; there are no samples in them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from http import HTTPStatus

from fastensor.provision.metrics import CONTENT_TYPE

PATH = "/metrics"
_LONGEST_NBYTES = 8 << 10
"""A longer request is not answered."""
_END = b"\r\n\r\n"


class Scrape:
    """A request, and its answer. Waits for nothing: the server goes on when the kernel has more, or takes more.

    Args:
        endpoint: connected. It belongs to this object.
        metrics: makes the text.
    """

    def __init__(self, endpoint: socket.socket, metrics: Callable[[], str]) -> None:
        endpoint.setblocking(False)
        self.endpoint = endpoint
        self.is_answered = False
        """Whether the answer is being sent."""
        self._metrics = metrics
        self._request = b""
        self._unsent = memoryview(b"")

    def go_on(self) -> bool:
        """Do what can be done now. False: it is over."""
        try:
            if not self.is_answered:
                came = self.endpoint.recv(_LONGEST_NBYTES)
                self._request += came
                if _END not in self._request:
                    return bool(came) and len(self._request) < _LONGEST_NBYTES
                self._unsent = memoryview(answer(self._request, self._metrics))
                self.is_answered = True
            self._unsent = self._unsent[self.endpoint.send(self._unsent) :]
            return bool(self._unsent)
        except BlockingIOError:
            return True
        except OSError:
            return False  # the other end has gone

    def close(self) -> None:
        """Hang up."""
        self.endpoint.close()


def answer(request: bytes, metrics: Callable[[], str]) -> bytes:
    """The answer to a request of HTTP.

    >>> answer(b"GET /metrics HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n", lambda: "up 1\\n").split(b"\\r\\n")[0]
    b'HTTP/1.1 200 OK'
    >>> answer(b"POST /metrics HTTP/1.1\\r\\n\\r\\n", lambda: "").split(b"\\r\\n")[0]
    b'HTTP/1.1 405 Method Not Allowed'
    """
    method, _, rest = request.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    path, _, version = rest.partition(" ")
    status = HTTPStatus.OK
    if not version.startswith("HTTP/1."):
        status = HTTPStatus.BAD_REQUEST
    elif method not in ("GET", "HEAD"):
        status = HTTPStatus.METHOD_NOT_ALLOWED
    elif path.partition("?")[0] != PATH:
        status = HTTPStatus.NOT_FOUND
    text = metrics() if status == HTTPStatus.OK else f"{status.phrase}: expected GET {PATH}\n"
    body = text.encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else body)
