"""``fastensor provision up``, ``status`` and ``down``.

A service runs as long as somebody uses it. So the program that has started one keeps it, as its client. It listens on a
Unix socket without a file, whose name says whose it is; there it is asked for the address, and told to end.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from json import dumps, loads
from pathlib import Path
from typing import Any, Literal

from fastensor.cli.errors import status_of
from fastensor.cli.output import OK, USAGE, print_json, print_table
from fastensor.data import LmdbDataset, processes
from fastensor.data.connection import Connection, ConnectionLost, Message
from fastensor.data.serving import LocalClient, LocalServer
from fastensor.errors import FastensorError, ProvisionError
from fastensor.files.job_store import wait_until
from fastensor.files.words import counted, human_seconds, human_size
from fastensor.provision import DataService
from fastensor.provision.embedded.client import LOCAL, checked_address

_PATIENCE_SECONDS = 10
_LEAVE_SECONDS = 60
"""Leaving a service on Ray takes seconds."""
_LOOK_SECONDS = 1
"""Seconds within which an unused service is started again."""
_PREFIX = f"fastensor-up-{os.geteuid()}-"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Arguments of ``provision up``: the source and the options of the service."""

    source: str
    cache_nbytes: int
    workers: int | None
    before_cache: str | None
    after_cache: str | None
    seed: int
    fingerprint: str
    name: str
    engine: Literal["embedded", "ray"]
    address: str


def up(wanted: Wanted, started: Callable[[str], None] = lambda address: print(address, flush=True)) -> int:
    """Start a service, and keep it.

    Args:
        started: is given the address, when the service can be used, looked at and ended.
    """
    sys.path.insert(0, os.getcwd())  # as python -m does
    with (
        ExitStack() as left,
        DataService.start(
            _source_of(wanted.source),
            engine=wanted.engine,
            address=wanted.address,
            cache_bytes=wanted.cache_nbytes,
            before_cache=_function_of(wanted.before_cache),
            after_cache=_function_of(wanted.after_cache),
            workers=wanted.workers,
            seed=wanted.seed,
            fingerprint=wanted.fingerprint,
            name=wanted.name,
        ) as service,
    ):
        supervisor = _Supervisor(service.address)
        left.callback(supervisor.close)  # after the service was left: each `down` waits for that
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            started(service.address)
            supervisor.keep(service)
    return OK


def up_detached(wanted: Wanted) -> int:
    """Have another process do :func:`up`, and return when the service has started."""
    program = "from fastensor.cli.services import keep_detached; keep_detached()"
    said, say = os.pipe()
    log_fd, log = tempfile.mkstemp(prefix="fastensor-up-", suffix=".log")
    with open(said) as answer, open(log_fd, "w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(say), dumps(asdict(wanted))],
            stdin=subprocess.DEVNULL,
            stdout=output,  # what the user's code prints is no address
            stderr=output,
            start_new_session=True,
            pass_fds=[say],
        )
        os.close(say)
        address = answer.read()
    if not address:
        failure = ValueError if process.wait() == USAGE else ProvisionError
        text = Path(log).read_text()
        Path(log).unlink()
        raise failure(text.strip())
    print(address)
    print(f"What the service says comes into {log}", file=sys.stderr)
    return OK


def keep_detached() -> None:
    """Main function of the detached process. Its arguments are a descriptor for the address, and those of the
    service."""

    def started(address: str) -> None:
        with open(int(sys.argv[1]), "w") as out:
            out.write(address)

    os.set_inheritable(int(sys.argv[1]), False)  # or the reader would wait for the service, too
    try:
        up(Wanted(**loads(sys.argv[2])), started)
    except (FastensorError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(status_of(error))


def status(address: str | None, *, json: bool) -> int:
    """Show what a service does."""
    with DataService.connect(_checked(address or _only_address()), timeout=_PATIENCE_SECONDS) as service:
        found = {"address": service.address, "samples": len(service), **service.status()}
    if json:
        print_json(found)
    else:
        _print(found)
    return OK


def down(address: str | None) -> int:
    """End a service."""
    address = _checked(address or _only_address())
    supervisors = [supervisor for supervisor, kept in _supervisors() if kept == address]
    for supervisor in supervisors:
        with suppress(ConnectionLost):  # it ends just now
            supervisor.send("end")
            if not supervisor.wait(_LEAVE_SECONDS):  # it hangs up when it has left the service
                raise ProvisionError(f"the program that keeps {address} does not end within {_LEAVE_SECONDS} s")
    if address.startswith("ray:"):
        with suppress(ProvisionError) if supervisors else nullcontext():  # it has ended
            import_module("fastensor.provision.ray.client").end(
                address, seconds=0 if supervisors else _PATIENCE_SECONDS
            )
    elif not supervisors:
        raise ProvisionError(
            f"no program of this machine keeps the data service {address}: one that a training job has started ends "
            f"with that"
        )
    elif not wait_until(lambda: not _is_there(address), _PATIENCE_SECONDS):
        print(f"The data service {address} goes on for its clients, and ends with the last one", file=sys.stderr)
    return OK


def _is_there(address: str) -> bool:
    """True if an embedded service can be reached."""
    try:
        processes.reach(address.removeprefix(LOCAL)).close()
    except OSError:
        return False
    return True


def _source_of(text: str) -> Any:
    """The dataset that a text names."""
    path = Path(text)
    if (path / "data.mdb").exists() or (path.is_file() and path.suffix in (".mdb", ".lmdb")):
        return LmdbDataset(text)
    if ":" in text and "://" not in text and not path.exists():
        return _function_of(text)()
    return text


def _function_of(text: str | None) -> Any:
    """The function that ``MODULE:FUNCTION`` names."""
    if text is None:
        return None
    module, _, name = text.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"expected MODULE:FUNCTION that can be imported from here, found {text!r}: {error}") from error


# Programs that keep services


class _Supervisor(LocalServer[LocalClient]):
    """Tells who connects the address of a service, until somebody says that it is to end."""

    def __init__(self, address: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{_PREFIX}{hashlib.blake2b(address.encode(), digest_size=8).hexdigest()}")
        listener.listen()
        super().__init__(listener, LocalClient, greeting=address)
        self._is_over = False

    def keep(self, service: DataService) -> None:
        """Look after a service, which is started again if it has ended."""
        while not self._is_over:
            self.await_events(_LOOK_SECONDS)
            service.status()

    def obey(self, client: LocalClient, message: Message) -> None:
        self._is_over = True


def _supervisors() -> Iterator[tuple[Connection, str]]:
    """The programs of this user that keep services, and the addresses of these."""
    names = [line.rpartition(" ")[2] for line in Path("/proc/net/unix").read_text().splitlines()]
    for name in dict.fromkeys(names):  # sockets that a program has accepted have the name, too
        if name.startswith(f"@{_PREFIX}"):
            with suppress(OSError, ConnectionLost):  # it has ended just now
                supervisor = processes.reach(name[1:])
                yield supervisor, supervisor.awaited(_PATIENCE_SECONDS).content


def _checked(address: str) -> str:
    """
    Raises:
        ValueError: it is no address of a service.
    """
    try:
        return checked_address(address)
    except ProvisionError as error:
        raise ValueError(str(error)) from error


def _only_address() -> str:
    found = [address for _, address in _supervisors()]
    if not found:
        raise ProvisionError(
            "no data service runs here that fastensor provision up has started; name the ADDRESS of another one"
        )
    if len(found) > 1:
        listed = "".join(f"\n  {address}" for address in found)
        raise ProvisionError(f"found {len(found)} data services that were started here: say the address of one{listed}")
    return found[0]


# The table


def _print(found: Mapping[str, Any]) -> None:
    loaders = found.get("loaders", [])  # those of Ray are known to their trainers alone
    used_by = f", {counted(len(loaders), 'loaders')}" if "loaders" in found else ""
    print(
        f"{found['address']}: {counted(found['samples'], 'samples')}, {counted(found['clients'], 'clients')}{used_by}"
    )
    if "cached_samples" in found:
        size = human_size(found["cached_nbytes"])
        print(f"cache: {counted(found['cached_samples'], 'samples')} of {size}, {found['evictions']} had to make room")
    if "hits" in found:
        used = found["hits"] + found["misses"]
        print(
            f"samples: {_percent(found['hits'], used)} of {used} came from the cache; {found['misses']} were read when "
            f"they were needed, {found['preloaded']} ahead; {found['damaged']} were damaged in memory"
        )
    print(_health(found) + "\n")
    rows = [_row(loader) for loader in loaders]
    if rows:
        print_table(_HEAD, rows, right=range(1, len(_HEAD)))


_HEAD = ("rank", "batches", "ahead wanted", "samples", "given", "in cache", "read", "waited", "wait p50", "p99")


def _row(loader: Mapping[str, Any]) -> list[str]:
    rank = "not begun" if loader["ranks"] is None else "{} of {}".format(*loader["ranks"])
    return [
        rank,
        str(loader["batches"]),
        str(loader["needed"]),
        str(loader["samples"]),
        human_size(loader["nbytes"]),
        _percent(loader["hits"], loader["samples"]),
        human_size(loader["read_nbytes"]),
        *(human_seconds(loader[name]) for name in ("wait_seconds", "wait_p50", "wait_p99")),
    ]


def _health(found: Mapping[str, Any]) -> str:
    """Words for the state of the service's processes."""
    if "servers" in found:
        silent = [str(one["number"]) for one in found["servers"] if one["pid"] is None]
        words = f"{', '.join(silent)} do not answer" if silent else "all answer"
        killed = found["servers_killed"]
        return f"servers: {counted(len(found['servers']), 'actors')} of Ray, {words}; {killed} hung and were replaced"
    workers = counted(len(found.get("workers", [])), "workers")
    return f"server: process {found['pid']}, {workers}; {found.get('workers_replaced', 0)} were replaced"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
