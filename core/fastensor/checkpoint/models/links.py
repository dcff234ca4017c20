"""Files of a model that are hard links to earlier ones: what has not changed is not written again.

This process remembers the files whose bytes it knows to match the CRC32s in their headers, because it has written or
verified them. A file of safetensors with the same header, in which names, dtypes, shapes and CRC32s of all tensors
stand, has the same bytes. So if the earlier file is still the one that is remembered (same inode, size and time of
modification), it gets a second name. In doubt, a file is written.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from fastensor.backends.registry import announce
from fastensor.backends.storage_crc32 import StoragePart, crc32s_of
from fastensor.checkpoint import ordering
from fastensor.checkpoint.models.sharded import files_behind
from fastensor.checkpoint.report import SaveReport
from fastensor.checkpoint.tools.verify import verify
from fastensor.errors import CorruptCheckpointError
from fastensor.files import posix
from fastensor.files.atomic import leads_to
from fastensor.stitch import safetensors
from fastensor.stitch.image import Payload
from fastensor.stitch.source import Plan

_WHAT = "linking unchanged files"
_Identity: TypeAlias = tuple[int, int, int, int]
_intact: dict[str, _Identity] = {}
"""The files whose bytes are known to match their CRC32s, by path, the latest one last. Each change is a single call."""


def frozen_in(state: Mapping[str, Any]) -> set[str]:
    """The names of the parameters that do not train.

    >>> frozen_in({"a": nn.Parameter(torch.ones(1), requires_grad=False), "b": torch.ones(1)})
    {'a'}
    """
    return {name for name, one in state.items() if isinstance(one, nn.Parameter) and not one.requires_grad}


def link_unchanged(
    tensors: dict[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
    base: str | os.PathLike[str] | None = None,
    durable: bool = True,
) -> SaveReport | None:
    """Make a file of safetensors a hard link to an earlier one that has the same bytes.

    Args:
        tensors, metadata, durable: as for :func:`fastensor.save`, with checksums.
        path: the new file, which is not there yet; or the earlier one itself, which stays then.
        base: folder of an earlier model, whose files are verified before one is linked.

    Returns:
        The report; None if there is no such file, or the filesystem refuses the link, which is logged. Then nothing has
        changed, and the file is to be written.

    Raises:
        UnsupportedContentError: as :func:`fastensor.save`.
    """
    started = time.perf_counter()
    path = os.path.abspath(path)
    plan = safetensors.plan(tensors, metadata=metadata, checksums=True)
    found = [*reversed([known for known, (_, _, nbytes, _) in _intact.items() if nbytes == plan.nbytes])]
    found += [file for file in files_of(base) if file not in found and _nbytes_of(file) == plan.nbytes]
    header = plan.head(_crc32s_in(plan)) if found else b""
    ordering.wait_to_remove(path)
    for earlier in found:
        try:
            if _link(earlier, header, path, durable=durable):
                return _report(path, earlier, plan.nbytes, durable, time.perf_counter() - started)
        except (OSError, CorruptCheckpointError) as error:
            _intact.pop(earlier, None)
            announce(_WHAT, str(error))
    return None


def remember(path: str | os.PathLike[str]) -> None:
    """Note that the bytes of a file match the CRC32s in its header: it has just been written, whole."""
    path = os.path.abspath(path)
    try:
        with _opened(path) as fd:
            _intact[path] = _identity(fd)
    except OSError as error:
        announce(_WHAT, str(error))


@contextmanager
def verifying(path: str | os.PathLike[str]) -> Iterator[None]:
    """A block that verifies a whole file, or raises. Afterwards the file is remembered, if nobody has written to it
    meanwhile. A symlink, or a file of another user, is not remembered."""
    path = os.path.abspath(path)
    with ExitStack() as opened:
        try:
            fd = opened.enter_context(_opened(path))
        except OSError:  # if nobody can open it, the block says why
            yield
            return
        before = _identity(fd)
        yield
        if _identity(fd) == before:
            _intact[path] = before


def _crc32s_in(plan: Plan) -> list[int]:
    """The CRC32 of each storage in memory, as the head of the file needs them."""
    found = [0] * len(plan.storages)
    payloads = [segment for segment in plan.image.segments if isinstance(segment, Payload)]
    parts = [StoragePart(plan.storages[one.storage], one.before, one.nbytes) for one in payloads]  # type: ignore[arg-type]  # no file is copied
    for payload, crc32 in zip(payloads, crc32s_of(parts), strict=True):
        found[payload.storage] = crc32
    return found


def files_of(base: str | os.PathLike[str] | None) -> Iterable[str]:
    """The files of an earlier model.

    Raises:
        FileNotFoundError: there is no model, or no such folder.
    """
    if base is not None and not os.path.isdir(base):
        raise FileNotFoundError(errno.ENOENT, "expected the folder of an earlier model", os.fspath(base))
    return () if base is None else [os.path.abspath(Path(str(file))) for file in files_behind(base)]


def _nbytes_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:  # a file that is missing is not linked
        return -1


def _link(earlier: str, header: bytes, path: str, *, durable: bool) -> bool:
    """Give a file the name ``path`` as well, if it has this header and is the one that is remembered.

    Raises:
        OSError: the file is missing, or the filesystem refuses the link.
        CorruptCheckpointError: the file, which was not remembered, is damaged.
    """
    with _opened(earlier) as fd:
        if posix.read_exactly(fd, 0, len(header)) != header:
            return False
        if earlier not in _intact:
            with verifying(earlier):
                verify(earlier)
        if _identity(fd) != _intact.get(earlier):
            raise OSError(errno.ESTALE, "it was written to, or replaced, since it was saved or verified", earlier)
        if durable:
            posix.sync_file(fd)
        try:
            posix.link_file(fd, path)
        except FileExistsError:
            if not leads_to(path, fd):
                return False
        if durable:
            posix.sync_directory(os.path.dirname(path))
        _intact.pop(earlier)
        _intact[path] = _identity(fd)
    return True


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor of a file that is no link and belongs to this user.

    Raises:
        OSError: it is something else, or missing.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "it is no file of this user", path)
        yield fd
    finally:
        posix.close_read_only(fd)


def _identity(fd: int) -> _Identity:
    """What changes when somebody writes to a file, and not when it gets another name."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _report(path: str, earlier: str, nbytes: int, durable: bool, seconds: float) -> SaveReport:
    reason = "it has not changed since it was saved" if path == earlier else f"nothing has changed since {earlier}"
    is_durable = durable and posix.memory_filesystem_of(path) is None
    return SaveReport(
        path, nbytes, "link", reason, is_durable, True, 0.0, seconds, 0.0, 0.0, seconds, seconds, shared_nbytes=nbytes
    )
