"""What server, workers and clients say to each other, over a :class:`~fastensor.data.connection.Connection`.

All processes belong to one user on one machine, so numbers are in the byte order of the machine. What a client says is
checked, so that one that has gone wrong ends alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import asdict, fields
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fastensor.data.coalescing import Integers
from fastensor.data.connection import Bytes, Message
from fastensor.data.plan import EpochPlan
from fastensor.provision.engine import Facts, Start
from fastensor.provision.work import Done, Work

T = TypeVar("T")

_MOST = {
    "batch_size": 1 << 24,
    "world_size": 1 << 20,
    "block_size": 1 << 24,
    "seed": (1 << 63) - 1,
    "epoch": 1 << 31,
    "generation": 1 << 62,
    "index": 1 << 62,
}


class BadMessage(Exception):
    """The other process has sent what makes no sense."""


class Say(IntEnum):
    """Kinds of messages."""

    HELLO = 0
    """Server to client, first, and after ``SPEC``: JSON of its process id, and of the facts, if it has been given any:
    then the spec comes along."""
    READY = 1
    """Server to client: a loader is registered. The memory of its ring comes along."""
    REFUSED = 2
    """Server to client: a loader, or a spec, is not; text."""
    BATCH = 3
    """Server to client: ``BATCH``. A batch without a slot comes in memory of its own."""
    FAILED = 4
    """Server to client: ``BATCH``, then text."""
    STATUS = 5
    """Server to client: JSON."""
    SPEC = 16
    """Client to server: what is to be served, as a descriptor."""
    REGISTER = 17
    """Client to server: JSON of the registration, and a pickle of the collate function, see :func:`joined`."""
    START = 18
    """Client to server: JSON, see :func:`start_of`."""
    CREDIT = 19
    """Client to server: ``CREDIT``, then sequence numbers of slots as int64."""
    ASK = 20
    """Client to server: for a ``STATUS``."""
    PRELOAD = 21
    """Client to server: as ``START``."""
    LOADER = 32
    """Server to worker: ``LOADER``, then the pickle. The memory of its ring comes along."""
    FORGET = 33
    """Server to worker: ``NUMBER`` of a loader."""
    TASK = 34
    """Server to worker: ``TASK``, then positions of samples, and where those are that the cache has, see
    :class:`~fastensor.provision.work.Work`."""
    STORE = 35
    """Server to worker: ``NUMBER`` of a task, then offsets for the samples that it has read, -1 for none."""
    FORK = 36
    """Server to nursery: places of workers, as int64."""
    DONE = 48
    """Worker to server: ``DONE``, then numbers of samples in the batch that were read, and their bytes; then positions
    of samples that the cache had lost. A batch without a slot comes in memory of its own."""
    STORED = 49
    """Worker to server: ``NUMBER`` of a task."""
    BROKEN = 50
    """Worker to server: ``NUMBER`` of a task, then a traceback."""
    FORKED = 51
    """Nursery to server: ``FORKED``. The connection to the worker comes along."""


BATCH = struct.Struct("=qqqqqqqqq")
"""Generation, index; the slot: sequence number, offset, bytes; and :class:`Cost`."""
CREDIT = struct.Struct("=qqd")
"""Generation, number of the first batch that was not given out, and the seconds that the last one was waited for."""
NUMBER = struct.Struct("=q")
LOADER = struct.Struct("=q?")
"""Number of a loader, and whether samples that cannot be made are left out."""
TASK = struct.Struct("=qqqqqqq")
"""Number, loader (-1: only for the cache), seed, epoch, offset and bytes of the slot, number of samples."""
FORKED = struct.Struct("=qq")
"""Process id and place of a worker."""
DONE = struct.Struct("=qqqqq")
"""Number of the task, bytes of the batch, and the numbers of samples that were read, lost, and left out."""


def work_as_bytes(work: Work) -> tuple[Bytes, ...]:
    """The body of a ``TASK``."""
    *head, positions, offsets, lengths = work
    return TASK.pack(*head, len(positions)), as_bytes(np.concatenate([positions, offsets, lengths]))


def work_of(body: memoryview) -> Work:
    """What a ``TASK`` says."""
    *head, _count = TASK.unpack_from(body)
    return Work(*head, *np.frombuffer(body[TASK.size :], np.int64).reshape(3, -1))


def done_as_bytes(done: Done) -> tuple[Bytes, ...]:
    """The body of a ``DONE``."""
    head = DONE.pack(done.number, done.nbytes, len(done.read), len(done.lost), done.skipped)
    return head, as_bytes(np.concatenate([done.read, done.lengths, done.lost]))


def done_of(body: memoryview) -> Done:
    """What a ``DONE`` says."""
    number, nbytes, read, _, skipped = DONE.unpack_from(body)
    numbers = np.frombuffer(body[DONE.size :], np.int64)
    positions, lengths, lost = np.split(numbers, [read, 2 * read])
    return Done(number, nbytes, positions, lengths, lost, skipped)


class Hello(NamedTuple):
    """What a server says of itself."""

    pid: int
    facts: Facts | None
    """None: it was not told yet what to serve."""

    def as_json(self) -> bytes:
        """The body of a ``HELLO``."""
        facts = None if self.facts is None else asdict(self.facts)
        return json.dumps({"pid": self.pid, "facts": facts}).encode()


def hello_of(body: memoryview) -> Hello:
    """What a ``HELLO`` says.

    Raises:
        BadMessage: it says what no server of this version does.
    """
    found = json_of(body)
    pid = found.get("pid")
    if not isinstance(pid, int):
        raise BadMessage(f"expected a process id, found {str(found)[:80]}")
    if (said := found.get("facts")) is None:
        return Hello(pid, None)
    facts = checked(lambda: Facts(**said))
    for field in fields(Facts):
        if type(value := getattr(facts, field.name)).__name__ != field.type:
            raise BadMessage(f"{field.name} is {value!r}, expected {field.type}")
    return Hello(pid, facts)


def start_as_json(start: Start) -> bytes:
    """The body of a ``START``."""
    return json.dumps(asdict(start)).encode()


def start_of(body: memoryview, samples: int) -> Start:
    """What a ``START`` says.

    Args:
        samples: of the source.

    Raises:
        BadMessage: it says what cannot be.
    """
    found = checked(json_of, body)
    plan = checked(lambda: EpochPlan(**found.pop("plan")))
    start = checked(lambda: Start(plan, **found))
    of_plan = {name: getattr(plan, name) for name in ("batch_size", "world_size", "block_size", "seed")}
    numbers = {**of_plan, **found}
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number <= _MOST.get(name, samples):
            raise BadMessage(f"{name} is {number!r}")
    if plan.n != samples:
        raise BadMessage(f"the plan is of {plan.n} samples, not of {samples}")
    return start


def joined(head: dict[str, Any], pickled: bytes) -> tuple[Bytes, ...]:
    """The body of a message that has JSON and a pickle."""
    text = json.dumps(head).encode()
    return NUMBER.pack(len(text)), text, pickled


def parted(body: memoryview) -> tuple[dict[str, Any], memoryview]:
    """The parts of :func:`joined`."""
    (nbytes,) = checked(NUMBER.unpack_from, body)
    if not 0 <= nbytes <= len(body) - NUMBER.size:
        raise BadMessage(f"it has {len(body)} bytes, of which {nbytes} are text")
    end = NUMBER.size + nbytes
    return json_of(body[NUMBER.size : end]), body[end:]


def json_of(body: memoryview) -> dict[str, Any]:
    """The body of a message that is JSON.

    Raises:
        BadMessage: it is not an object in JSON.
    """
    found = checked(json.loads, bytes(body))
    if not isinstance(found, dict):
        raise BadMessage("it is no object in JSON")
    return found


def text_of(message: Message, *, begin: int = 0) -> str:
    """The text of a message, behind its head."""
    return bytes(message.body[begin:]).decode(errors="replace")


def as_bytes(numbers: Integers) -> memoryview:
    """Integers for a message."""
    return np.ascontiguousarray(numbers, np.int64).data.cast("B")


def checked(function: Callable[..., T], *arguments: object) -> T:
    """Call a function with what a message says.

    Raises:
        BadMessage: that makes no sense to it.
    """
    try:
        return function(*arguments)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
        raise BadMessage(f"{type(error).__name__}: {error}") from error
