"""The test tools themselves: what is intercepted, how faults are made, and what the model of a disk allows."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_model import (
    BLOCK_NBYTES,
    Create,
    File,
    Operation,
    Rename,
    Resize,
    SetMode,
    SyncFile,
    SyncFolder,
    Unlink,
    Write,
)
from power_loss import power_failures, replay

import fastensor
from fastensor.testing import calls, failing_call, short_call

HARMLESS = {
    *("environ", "fspath", "fsencode", "fsdecode", "getpid", "path", "strerror"),
    *("sched_getaffinity", "register_at_fork", "stat_result", "PathLike"),
    *("makedirs", "dup2", "devnull", "kill", "cpu_count", "major", "minor"),
    *("pathsep", "statvfs_result", "listdir", "access", "sysconf", "curdir", "geteuid", "getcwd"),
    *("fork", "waitpid", "waitstatus_to_exitcode", "_exit", "getppid", "sched_setaffinity", "sep", "fdopen"),
    "urandom",
    *("pipe", "read", "set_inheritable"),  # between processes; files are read by preadv
}
"""Attributes of ``os`` that are used, but make no call on a file that could fail by themselves."""


def attributes_used(module: str) -> Iterator[str]:
    package = Path(fastensor.__file__).parent
    for path in package.rglob("*.py"):
        if package / "testing" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module:
                yield node.attr


def test_every_call_that_fastensor_makes_is_intercepted() -> None:
    for module, intercepted in (("os", calls.OS_CALLS), ("fcntl", calls.FCNTL_CALLS)):
        used = {name for name in attributes_used(module) if not name.isupper()}
        assert used
        assert used <= {*intercepted, *HARMLESS}


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def test_the_chosen_call_fails_and_no_other(fd: int) -> None:
    with failing_call(2, errno.EINTR) as fault:
        assert os.pwrite(fd, b"ab", 0) == 2
        with pytest.raises(InterruptedError):
            os.pwrite(fd, b"cd", 0)
        assert os.pwrite(fd, b"ef", 2) == 2
    assert (fault.calls, fault.fired) == (3, "pwrite")
    assert os.pread(fd, 10, 0) == b"abef"


def test_only_calls_of_a_name_are_counted(fd: int) -> None:
    with failing_call(2, name="pwrite") as fault:
        assert os.pwrite(fd, b"ab", 0) == 2
        assert os.pread(fd, 2, 0) == b"ab"
        with pytest.raises(OSError, match="Input/output"):
            os.pwrite(fd, b"cd", 0)
    assert (fault.calls, fault.fired) == (2, "pwrite")


def test_a_failing_close_frees_the_descriptor(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    with failing_call(1), pytest.raises(OSError, match="Input/output"):
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(("nbytes", "moved"), [(1, 1), (2, 1), (3, 1), (10, 3), (30, 10)])
def test_a_short_call_moves_some_of_the_bytes(fd: int, nbytes: int, moved: int) -> None:
    with short_call(1) as fault:
        assert os.pwrite(fd, bytes(range(nbytes)), 5) == moved
    assert fault.fired == "pwrite"
    assert os.fstat(fd).st_size == 5 + moved
    os.pwrite(fd, bytes(range(nbytes)), 5)
    buffer = bytearray(nbytes)
    with short_call(1) as fault:
        assert os.preadv(fd, [buffer, bytearray(9)], 5) == moved
    assert fault.fired == "preadv"
    assert buffer == bytes(range(moved)).ljust(nbytes, b"\0")


def test_a_short_call_that_moves_nothing_is_made_as_it_is(fd: int) -> None:
    with short_call(1) as fault:
        assert os.fstat(fd).st_size == 0
    assert fault.fired == "fstat"


BEFORE = {"x": File(b"old", 0o644)}


def found_after(operations: list[Operation], name: str = "x") -> set[File | None]:
    """Under that name, if the power fails when all operations have been completed."""
    return {state.file for done, state in power_failures(BEFORE, operations, name) if done == len(operations)}


def contents_after(operations: list[Operation]) -> set[bytes]:
    return {file.content for file in found_after(operations, "new") if file}


def test_blocks_reach_the_disk_alone() -> None:
    a, b = (bytes([byte]) * BLOCK_NBYTES for byte in b"ab")
    zeros = bytes(BLOCK_NBYTES)
    operations: list[Operation] = [Create("new", 1, 0o600), SyncFolder(1), Write(1, 0, a + b)]
    found = {first + second for first in (a, zeros) for second in (b, zeros)}
    assert contents_after(operations) == {*found, b""}
    assert contents_after([*operations, SyncFile(1, covers=3)]) == {a + b}
    assert contents_after([*operations, SyncFile(1, covers=2)]) == {*found, b""}, "it began before the write"


def test_each_version_of_a_block_is_possible() -> None:
    operations: list[Operation] = [
        *(Create("new", 1, 0o600), SyncFolder(1), Resize(1, 4), SyncFile(1, covers=3)),
        *(Write(1, 0, b"abcd"), Write(1, 1, b"X"), Write(1, 3, b"Y")),
    ]
    assert contents_after(operations) == {b"\0\0\0\0", b"abcd", b"aXcd", b"aXcY"}


def test_what_is_cut_off_does_not_come_back() -> None:
    operations: list[Operation] = [
        *(Create("new", 1, 0o600), SyncFolder(1), Write(1, 0, b"abcd")),
        *(Resize(1, 2), Resize(1, 4), SyncFile(1, covers=5)),
    ]
    assert contents_after(operations) == {b"ab\0\0"}


def test_modes_and_names_are_not_durable_by_themselves() -> None:
    operations: list[Operation] = [Create("new", 1, 0o600), SyncFile(1, covers=1), SetMode(1, 0o640)]
    assert found_after(operations, "new") == {None, File(b"", 0o600), File(b"", 0o640)}
    operations.append(SyncFile(1, covers=3))
    assert found_after(operations, "new") == {None, File(b"", 0o640)}
    operations += [SyncFolder(4), Rename("new", "x")]
    assert found_after(operations) == {BEFORE["x"], File(b"", 0o640)}
    operations += [Unlink("x")]
    assert found_after(operations) == {BEFORE["x"], File(b"", 0o640), None}
    operations += [SyncFolder(covers=6)]
    assert found_after(operations) == {File(b"", 0o640), None}, "it began before the name was removed"
    assert replay(BEFORE, operations) == {}


def test_each_block_is_tried_as_the_missing_one_and_alone() -> None:
    blocks = [bytes([number]) * BLOCK_NBYTES for number in range(1, 20)]
    zeros = bytes(BLOCK_NBYTES)
    found = contents_after([Create("new", 1, 0o600), Write(1, 0, b"".join(blocks))])
    for missing in blocks:
        assert b"".join(zeros if block == missing else block for block in blocks) in found
        assert b"".join(block if block == missing else zeros for block in blocks) in found
