"""What a power failure in the middle of a save can leave behind: the save is recorded, and its disk is modelled.

>>> before = {"x": File(b"old", 0o644)}
>>> done = [Create("new", 1, 0o644), Write(1, 0, b"new!"), Rename("new", "x")]
>>> found = {state.file.content for _, state in power_failures(before, done, "x") if state.file}
>>> sorted(found)  # the name before the length, the length before the data
[b'', b'\\x00\\x00\\x00\\x00', b'new!', b'old']
>>> done.insert(2, SyncFile(1, covers=2))
>>> sorted({state.file.content for _, state in power_failures(before, done, "x") if state.file})
[b'new!', b'old']
"""

from __future__ import annotations

import itertools
import os
import random
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from disk_model import (
    Create,
    Disk,
    File,
    Link,
    Operation,
    Rename,
    Resize,
    SetMode,
    State,
    SyncFile,
    SyncFolder,
    Unlink,
    Write,
)

from fastensor.testing.calls import Call, intercepted

_fstat, _lstat = os.fstat, os.lstat  # as they are outside of any block


def look_at(folder: str | os.PathLike[str]) -> dict[str, File]:
    """The files in a folder, by name."""
    found = {}
    for entry in os.scandir(folder):
        with open(entry.path, "rb") as file:
            found[entry.name] = File(file.read(), stat.S_IMODE(entry.stat().st_mode))
    return found


@contextmanager
def recorded(folder: str | os.PathLike[str]) -> Iterator[list[Operation]]:
    """Record what Fastensor does in ``folder``, in the order of completion, from all threads of the process.

    Files that were there before may get and lose names; what is written to them is not recorded, and neither is what
    libraries do in C. :func:`replay` says whether anything was missed. Not for use by several threads at a time.
    """
    recorder = _Recorder(os.path.realpath(folder))
    with intercepted(recorder.intercept):
        yield recorder.operations


def replay(before: Mapping[str, File], operations: Sequence[Operation]) -> dict[str, File]:
    """What :func:`look_at` should find after the operations."""
    disk = Disk(before)
    for operation in operations:
        disk.apply(operation)
    return disk.without_failure()


def power_failures(
    before: Mapping[str, File], operations: Sequence[Operation], name: str, *, sample: int = 32, seed: int = 0
) -> Iterator[tuple[int, State]]:
    """What can be found under ``name`` if the power fails after the first so many operations, for every number of them.

    See :mod:`disk_model` for what can happen. Of what was not synced, on the disk are: all, nothing, what
    the first operations made, all operations but one, one alone; all blocks but one, one alone, random ones.

    Args:
        before: the folder's durable contents; see :func:`look_at`.
        operations: what was done then; see :func:`recorded`.
        name: of a file in the folder.
        sample: how many blocks are tried as the missing and as the only one, at most, and how many random sets.
        seed: of the randomness.

    Yields:
        The number of operations, and a state; states differ for equal numbers.
    """
    rng = random.Random(seed)
    disk = Disk(before)
    for completed in range(len(operations) + 1):
        if completed:
            disk.apply(operations[completed - 1])
        for state in disk.after_failure(name, rng, sample):
            yield completed, state


class _Recorder:
    def __init__(self, folder: str) -> None:
        self.operations: list[Operation] = []
        self._folder = folder
        self._folder_identity = _identity(os.stat(folder))
        self._files: dict[tuple[int, int], int] = {}
        self._numbers = itertools.count(1)

    def intercept(self, call: Call) -> Any:
        covers = len(self.operations)
        result = call.perform()
        operation = self._operation(call, result, covers)
        if operation is not None:
            self.operations.append(operation)
        return result

    def _operation(self, call: Call, result: Any, covers: int) -> Operation | None:
        match call.name, call.arguments:
            case "open", (path, flags, *_) if flags & os.O_CREAT and self._is_inside(path):
                return self._creation(os.path.basename(path), result)
            case "open", (path, flags, *_) if flags & os.O_TMPFILE == os.O_TMPFILE and path == self._folder:
                return self._creation(None, result)
            case "link", (_, name) if self._is_inside(name):
                return Link(self._files[_identity(_lstat(name))], os.path.basename(name))
            case "rename", (source, target) if self._is_inside(target):
                return Rename(os.path.basename(source), os.path.basename(target))
            case "unlink", (path,) if self._is_inside(path):
                return Unlink(os.path.basename(path))
            case "copy_file_range", (_, fd, _, _, offset):
                file = self._files.get(_identity(_fstat(fd)))
                return None if file is None else Write(file, offset, os.pread(fd, result, offset))
            case (("pwrite" | "ftruncate" | "fallocate64" | "fchmod" | "fsync"), (int(fd), *_)):
                return self._change(_fstat(fd), call, result, covers)
        return None

    def _creation(self, name: str | None, fd: int) -> Create:
        status = _fstat(fd)
        self._files[_identity(status)] = number = next(self._numbers)
        return Create(name, number, stat.S_IMODE(status.st_mode))

    def _change(self, status: os.stat_result, call: Call, result: Any, covers: int) -> Operation | None:
        if call.name == "fsync" and _identity(status) == self._folder_identity:
            return SyncFolder(covers)
        file = self._files.get(_identity(status))
        if file is None:
            return None
        match call.name, call.arguments:
            case "fsync", _:
                return SyncFile(file, covers)
            case "fchmod", _:
                return SetMode(file, stat.S_IMODE(status.st_mode))
            case "pwrite", (_, data, offset):
                return Write(file, offset, bytes(memoryview(data)[:result]))
        return Resize(file, status.st_size)

    def _is_inside(self, path: str) -> bool:
        return os.path.dirname(path) == self._folder


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
