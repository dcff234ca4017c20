"""Being a member of a cluster of Ray: one that others have started, or one of this machine for this job alone.

A process is in one cluster at a time, whatever uses it. What the user has joined before is used, and left alone.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import _enable_token_auth
from ray._private.authentication.authentication_utils import is_token_auth_enabled

from fastensor.data import processes
from fastensor.data.connection import Connection, ConnectionLost
from fastensor.errors import ProvisionError
from fastensor.provision.ray.names import NAMESPACE

_MODE_VARIABLE = "RAY_AUTH_MODE"
"""By which Ray is told whether to ask for a token."""


class Membership:
    """A process is in a cluster, until the last one of those that have joined leaves.

    Args:
        address: see :func:`join`.
        lease: of a local Ray, which runs while this connection is open.
        is_own: whether it is left when it ends: the user has not joined before.
    """

    def __init__(self, address: str, lease: Connection | None = None, *, is_own: bool = True) -> None:
        self.address = address
        self._lease = lease
        self._is_own = is_own
        self._users = 0
        self._process = os.getpid()

    @property
    def is_alive(self) -> bool:
        """True if the cluster is there, as far as can be told without asking it."""
        if not ray.is_initialized() or self.is_inherited:
            return False
        try:
            return self._lease is None or not self._lease.wait(0) or self._lease.receive() is None
        except ConnectionLost:
            return False

    @property
    def is_inherited(self) -> bool:
        """True if this process was forked from the one that has joined: Ray's threads and connections are the parent's,
        and nothing of them may be used, or ended."""
        return self._process != os.getpid()

    def check_process(self) -> None:
        """
        Raises:
            ProvisionError: this is a forked child.
        """
        if self.is_inherited:
            raise ProvisionError(
                "this process was forked from one that is in a cluster of Ray, and Ray cannot be used in a forked "
                "child: start the process by spawn, or before the parent uses Ray, and DataService.connect() in it"
            )

    def leave(self) -> None:
        """End the membership, unless others go on. Does nothing in a forked child."""
        global _current
        if self.is_inherited:
            return
        with _lock:
            self._users -= 1
            if not self._users and _current is self:
                _current = None
                self.end()

    def end(self) -> None:
        """Leave the cluster, unless the user has joined it."""
        if self._is_own:
            ray.shutdown()  # before its cluster ends: Ray ends processes that have lost theirs
        if self._lease is not None:
            self._lease.close()


_lock = threading.RLock()  # what the garbage collector drops may leave at any time
_current: Membership | None = None


def join(address: str) -> Membership:
    """Join a cluster. Each call is followed by :meth:`Membership.leave`.

    Args:
        address: ``host:port`` of Ray's head node, or ``auto``, as Ray itself takes it. A name without a colon: a Ray of
            this machine alone, which is started if it does not run; unless this process is in a cluster already.

    Raises:
        ProvisionError: it cannot be reached, anybody could join it, or this process is in another one.
    """
    global _current
    if _current is not None:
        _current.check_process()
    with _lock:
        if _current is not None and not _current.is_alive:
            _current.end()
            _current = None
        if _current is None:
            _current = _joined(address)
        elif _is_cluster(address) and not _is_at(address, _current.address):
            raise ProvisionError(
                f"this process uses the cluster of Ray at {_current.address}, and cannot use another one at {address}"
            )
        _current._users += 1
        return _current


def _is_cluster(address: str) -> bool:
    """True if it is the address of a certain cluster."""
    return ":" in address


def _joined(address: str) -> Membership:
    if ray.is_initialized():
        found = str(ray.get_runtime_context().gcs_address)
        if _is_cluster(address) and not _is_at(address, found):
            raise ProvisionError(
                f"this process is in the cluster of Ray at {found}, and cannot join another one at {address}"
            )
        _check_access(found)
        return Membership(found, is_own=False)
    if "://" in address:
        raise ProvisionError(
            f"expected host:port of Ray's head node, found {address!r}: a client of Ray (ray://) has no object store"
        )
    if _is_cluster(address):
        _check_host(address.rpartition(":")[0])
        where, lease = address, None
    elif address == "auto":
        where, lease = address, None
    else:
        if _MODE_VARIABLE not in os.environ:  # Ray does so where it is started, but not where it is joined
            _enable_token_auth()
        where, lease = _local(address)
    membership = Membership(address, lease)
    try:
        with _in_words(f"cannot join the cluster of Ray at {where}"), as_named(where.rpartition(":")[0]):
            ray.init(where, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
        found = str(ray.get_runtime_context().gcs_address)
        if lease is None:
            membership.address = found
        _check_access(found)
    except BaseException:
        membership.end()
        raise
    return membership


@contextmanager
def as_named(host: str) -> Iterator[None]:
    """Have Ray use the loopback interface if an address is there: unless it takes clusters of several machines for
    impossible, as on a Mac, it uses the machine's address on the network instead, and listens on all."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = before and not (host and _is_loopback(host))
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _check_access(address: str) -> None:
    """Refuse clusters that anybody on the network could join: what comes from there is unpickled.

    That this process shows a token does not say that the cluster asks for one. So a process of the cluster says whether
    it does.
    """
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    hosts = [address.rpartition(":")[0], *(node["NodeManagerAddress"] for node in nodes if node["Alive"])]
    if all(map(_is_loopback, hosts)):
        return
    for host in hosts:
        _check_host(host)
    asks = ray.remote(num_cpus=0)(is_token_auth_enabled)
    with _in_words(f"the cluster of Ray at {address} does not say whether it has authentication"):
        if not ray.get(asks.remote(), timeout=processes.ANSWER_SECONDS):
            raise _open_to(hosts[0])


def _check_host(host: str) -> None:
    if not is_token_auth_enabled() and not _is_loopback(host):
        raise _open_to(host)


def _open_to(host: str) -> ProvisionError:
    return ProvisionError(
        f"anybody who reaches {host} can join this cluster of Ray, which has no authentication: start it with "
        f"{_MODE_VARIABLE}=token, and set that for its clients, too; or let its nodes listen on 127.0.0.1"
    )


def _is_at(address: str, found: str) -> bool:
    """True if an address, which may have the name of a host, is the one that Ray has found."""
    (host, _, port), (found_host, _, found_port) = address.rpartition(":"), found.rpartition(":")
    return address == found or (port == found_port and not _numbers_of(host).isdisjoint(_numbers_of(found_host)))


def _is_loopback(host: str) -> bool:
    return all(ipaddress.ip_address(number).is_loopback for number in _numbers_of(host))


def _numbers_of(host: str) -> set[str]:
    """The addresses of a host.

    Raises:
        ProvisionError: there is none of this name.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ProvisionError(f"there is no host {host!r}: {error}") from error
    return {str(one[4][0]) for one in found}


def _local(name: str) -> tuple[str, Connection]:
    """The address of a Ray of this machine alone, and a connection to the process that keeps it. See
    :mod:`fastensor.provision.ray.local_ray`."""
    with _in_words("Ray cannot be started on this machine"):
        try:
            lease, greeting = processes.joined(
                name, lambda: processes.start(name, "fastensor.provision.ray.local_ray"), processes.ANSWER_SECONDS
            )
        except ConnectionLost as error:
            raise ConnectionError(f"it has ended: {error}") from error
    return greeting.content, lease


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise ProvisionError(f"{what}: {error}") from error
