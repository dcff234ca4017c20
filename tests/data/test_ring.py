"""Rings never lend a byte twice, and use all room that there is. Messages arrive whole, whatever their size."""

from __future__ import annotations

import os
import pickle
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastensor.data.connection import Connection, ConnectionLost, Message
from fastensor.data.ring import ALIGNMENT, Slot, SlotReader, SlotWriter

BLOCKS = 12


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * ALIGNMENT)), max_size=200))
def test_room_is_lent_once_and_refused_only_if_no_gap_fits(steps: list[tuple[bool, int]]) -> None:
    writer = SlotWriter(BLOCKS * ALIGNMENT)
    used: dict[int, range] = {}
    for takes, number in steps:
        if not takes:
            if used:
                sequence = list(used)[number % len(used)]
                writer.release(sequence)
                del used[sequence]
            continue
        blocks = max(-(-number // ALIGNMENT), 1)
        map_of_blocks = "".join("x" if any(block in one for one in used.values()) else "." for block in range(BLOCKS))
        placed = writer.place(number)
        assert (placed is None) == ("." * blocks not in map_of_blocks)
        if placed is not None:
            slot, room = placed
            assert slot.offset % ALIGNMENT == 0
            assert slot.nbytes == len(room) == number
            first = slot.offset // ALIGNMENT
            assert map_of_blocks[first : first + blocks] == "." * blocks
            used[slot.sequence] = range(first, first + blocks)
        assert writer.used_nbytes == sum(map(len, used.values())) * ALIGNMENT
    writer.close()


def test_what_a_slot_does_not_need_is_free() -> None:
    writer = SlotWriter(4 * ALIGNMENT)
    slot, _ = writer.place(4 * ALIGNMENT) or pytest.fail("no room")
    assert writer.place(1) is None
    assert writer.shrink(slot, ALIGNMENT + 1).nbytes == ALIGNMENT + 1
    assert writer.used_nbytes == 2 * ALIGNMENT
    placed, _ = writer.place(2 * ALIGNMENT) or pytest.fail("no room")
    assert placed.offset == 2 * ALIGNMENT
    for one in (slot, placed):
        writer.release(one.sequence)
    assert writer.used_nbytes == 0


def test_a_slot_that_is_not_in_use_cannot_be_given_back() -> None:
    writer = SlotWriter(1 << 12)
    assert writer.place(100) is not None
    writer.release(0)
    with pytest.raises(KeyError):
        writer.release(0)


VIEWS: list[Callable[[memoryview], Any]] = [
    lambda view: view,
    lambda view: view[3:5],
    lambda view: np.frombuffer(view, np.float32)[1:],
    lambda view: torch.from_numpy(np.frombuffer(view, np.uint8).copy()) if not view else np.asarray(view),
    lambda view: memoryview(np.asarray(view[1:])).toreadonly(),
]


@pytest.mark.parametrize("use", VIEWS)
def test_a_slot_is_in_use_while_a_view_of_a_view_is(use: Callable[[memoryview], Any]) -> None:
    writer = SlotWriter(1 << 14)
    reader = SlotReader(os.dup(writer.fd))
    placed = writer.place(1000)
    assert placed is not None
    slot, room = placed
    room[:] = bytes(range(250)) * 4
    view = reader.view(slot)
    assert view.readonly
    assert bytes(view) == bytes(range(250)) * 4
    kept = use(view)
    del view
    assert reader.dropped() == []
    del kept
    assert reader.dropped() == [slot.sequence]
    assert reader.dropped() == []
    writer.release(slot.sequence)
    assert writer.used_nbytes == 0


@pytest.mark.parametrize("slot", [Slot(0, 4000, 97), Slot(0, -1, 5), Slot(0, 0, -1)])
def test_a_slot_that_is_not_in_the_ring(slot: Slot) -> None:
    writer = SlotWriter(1 << 12)
    with pytest.raises(ValueError, match=r"slot 0 has bytes .* and the ring has 4096"):
        SlotReader(os.dup(writer.fd)).view(slot)


def test_a_slot_without_bytes() -> None:
    writer = SlotWriter(1 << 12)
    reader = SlotReader(os.dup(writer.fd))
    placed = writer.place(0)
    assert placed is not None
    assert bytes(reader.view(placed[0])) == b""
    assert reader.dropped() == [0]


def test_views_outlive_the_writer_and_the_reader() -> None:
    writer = SlotWriter(1 << 12)
    reader = SlotReader(os.dup(writer.fd))
    slot, room = writer.place(4) or pytest.fail("no room")
    room[:] = b"kept"
    view = reader.view(slot)
    writer.close()
    del writer, reader, room
    assert bytes(view) == b"kept"


def test_the_memory_cannot_be_truncated() -> None:
    writer = SlotWriter(1 << 14)
    for nbytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(writer.fd, nbytes)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    one, other = map(Connection, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield one, other
    one.close()
    other.close()


def received(end: Connection) -> Message:
    while (message := end.receive()) is None:
        assert end.wait(60)
    return message


@pytest.mark.parametrize("nbytes", [0, 1, 100, 65535, 65536, 3_000_000])
def test_messages_arrive_whole_and_in_order(ends: tuple[Connection, Connection], nbytes: int) -> None:
    """Both ends send more than the kernel takes, and neither receives meanwhile."""
    bodies = [bytes([number]) * nbytes for number in range(3)]
    for end in ends:
        for number, body in enumerate(bodies):
            end.send((number, body))

    def exchanged(end: Connection) -> list[tuple[int, bytes]]:
        messages = [received(end) for _ in bodies]
        while end.has_unsent:
            end.wait(0.01)
        return [message.content for message in messages]

    with ThreadPoolExecutor() as threads:
        assert list(threads.map(exchanged, ends)) == [list(enumerate(bodies))] * 2


def test_a_descriptor_comes_with_its_message(ends: tuple[Connection, Connection]) -> None:
    reading, writing = os.pipe()
    ends[0].send("before")
    ends[0].send("with it", fd=writing)
    ends[0].send("after")
    os.close(writing)
    messages = [received(ends[1]) for _ in range(3)]
    assert [message.fd is None for message in messages] == [True, False, True]
    fd = messages[1].fd
    assert fd is not None
    os.write(fd, b"!")
    os.close(fd)
    assert os.read(reading, 10) == b"!"
    os.close(reading)


def test_several_descriptors_at_once_are_refused_and_closed(ends: tuple[Connection, Connection]) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    with socket.socket(fileno=os.dup(ends[0].fileno())) as endpoint:
        socket.send_fds(endpoint, [b"x"], [0, 1])
        socket.send_fds(endpoint, [b"x"], [0, 1, 2])
    with pytest.raises(ConnectionLost, match="2 descriptors"):
        ends[1].receive()
    with pytest.raises(ConnectionLost, match="could not be received"):
        ends[1].receive()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_the_end_of_the_other_process_is_noticed(ends: tuple[Connection, Connection]) -> None:
    ends[0].send("last")
    ends[0].close()
    assert received(ends[1]).content == "last"
    with pytest.raises(ConnectionLost):
        received(ends[1])
    with pytest.raises(ConnectionLost):
        ends[1].send("")


@pytest.mark.parametrize("sent", [b"____", b"\0", b"x" * 100_000, pickle.dumps("cut off")[:-3]])
def test_what_is_no_message_ends_the_connection(ends: tuple[Connection, Connection], sent: bytes) -> None:
    os.write(ends[0].fileno(), sent)
    with pytest.raises(ConnectionLost, match="what it sent is no message"):
        received(ends[1])


def test_messages_that_had_arrived_are_received_although_the_other_end_was_closed_with_some(
    ends: tuple[Connection, Connection],
) -> None:
    ends[0].send("last")
    ends[1].send("nobody receives it")
    ends[0].close()
    assert received(ends[1]).content == "last"
    with pytest.raises(ConnectionLost):
        received(ends[1])


@pytest.mark.parametrize("has_fd", [False, True])
def test_a_long_message_leaves_no_descriptor(ends: tuple[Connection, Connection], has_fd: bool) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    ends[0].send(bytes(1 << 20), fd=0 if has_fd else None)
    message = received(ends[1])
    assert message.content == bytes(1 << 20)
    assert (message.fd is not None) == has_fd
    if message.fd is not None:
        os.close(message.fd)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_connection_ends_although_a_forked_child_has_a_copy(ends: tuple[Connection, Connection]) -> None:
    copy = os.dup(ends[0].fileno())  # as a child has
    ends[0].close()
    with pytest.raises(ConnectionLost):
        received(ends[1])
    os.close(copy)


def test_a_forked_child_that_closes_a_connection_closes_its_copy_only(ends: tuple[Connection, Connection]) -> None:
    child = os.fork()
    if not child:
        ends[0].close()
        os._exit(0)
    os.waitpid(child, 0)
    ends[0].send("still here")
    assert received(ends[1]).content == "still here"


def test_a_descriptor_for_which_there_is_no_room_is_an_error(ends: tuple[Connection, Connection]) -> None:
    reading, writing = os.pipe()
    ends[0].send("with it", fd=writing)
    os.close(reading)
    lowest, limits = os.dup(writing), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(ConnectionLost, match="too many files are open"):
            ends[1].receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.close(writing)


def test_a_descriptor_that_cannot_be_copied_ends_the_connection(ends: tuple[Connection, Connection]) -> None:
    lowest, limits = os.dup(ends[0].fileno()), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(ConnectionLost, match=r"a descriptor could not be sent: .*Too many open files"):
            ends[0].send("with it", fd=ends[0].fileno())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with pytest.raises(ConnectionLost):
        ends[1].receive()
