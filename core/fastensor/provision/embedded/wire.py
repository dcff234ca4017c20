"""Who may talk to a service over TCP: whoever shows that it knows the token, without sending it.

The server sends a random number; the client answers with one of its own, and a keyed digest (HMAC-SHA256) of both; the
server proves in the same way that it knows the token. Nothing else of a client is looked at before. What follows is not
encrypted: use networks that you trust.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket

from fastensor.errors import ProvisionError

NONCE_NBYTES = 32
ANSWER_NBYTES = 64
"""A random number and a digest: all that is taken from a client that has not answered yet."""


def proof(token: str, side: str, *nonces: bytes) -> bytes:
    """What only who knows the token can compute.

    Args:
        side: ``"client"`` or ``"server"``, so that neither can be given its own proof.
        nonces: of the server, then of the client.
    """
    return hmac.digest(token.encode(), side.encode() + b"".join(nonces), "sha256")


def is_proof(found: bytes, token: str, side: str, *nonces: bytes) -> bool:
    """Whether it is. Takes the same time if it is not."""
    return hmac.compare_digest(found, proof(token, side, *nonces))


def parsed_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``.

    Raises:
        ProvisionError: it is neither.

    >>> parsed_address("[::1]:29501")
    ('::1', 29501)
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) >= 1 << 16:
        raise ProvisionError(f"expected host:port, found {address!r}")
    return host.strip("[]"), int(port)


def address_of(listener: socket.socket) -> str:
    """``host:port`` where a socket listens."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def keep_alive(endpoint: socket.socket) -> None:
    """Have a connection send at once, and end within minutes if the other machine is lost."""
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, 30),
        (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_USER_TIMEOUT, 60_000),
    ):
        endpoint.setsockopt(socket.IPPROTO_TCP, option, value)
    endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def listening(address: str, token: str | None) -> socket.socket:
    """A socket that listens.

    Args:
        address: port 0 takes one that is free.
        token: needed unless the host is this machine itself.

    Raises:
        ProvisionError: it cannot be listened there, or not without a token.
    """
    host, port = parsed_address(address)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not token and not ipaddress.ip_address(where[0]).is_loopback:
            raise ProvisionError(
                f"a data service that listens on {address} can be reached by others: give it a token=, which its "
                f"clients need, or let it listen on localhost"
            )
        return socket.create_server(where, family=family, backlog=128)
    except OSError as error:
        raise ProvisionError(f"a data service cannot listen on {address}: {error}") from error
