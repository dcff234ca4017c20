"""The system calls that move and publish bytes, one thin function each, and what Linux tells about a file.

The reads, writes and syncs of a checkpoint go through this module, but for what torch itself writes.
All offsets and sizes are in bytes. Functions raise ``OSError`` and retry neither errors nor, beyond what Python does
for EINTR, interrupted calls. All of them release the GIL while they wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
import time
from dataclasses import dataclass
from functools import cache

ASSUMED_ALIGNMENT = 4096
"""Used where the kernel does not say: no block device in use needs more."""
TEMPORARY_SUFFIX = ".fastensor-tmp"
"""Of files that will have another name when they are whole."""

_FALLOC_FL_KEEP_SIZE = 1
_AT_EMPTY_PATH = 0x1000
_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_AT_EACCESS = 0x200
_STATX_ATTRIBUTES = 0x08  # stx_attributes, u64
_STATX_ATTR_MOUNT_ROOT = 0x2000
_KEPT_ATTRIBUTES = ("user.", "system.", "security.selinux")
_STATX_DIOALIGN = 0x2000
_STATX_NBYTES = 256
_STATX_DIO_OFFSET = 0x98  # stx_dio_mem_align and stx_dio_offset_align, two u32 (linux/stat.h)
_STATFS_NBYTES = 256
_SYNC_FILE_RANGE_AND_WAIT = 7  # WAIT_BEFORE, WRITE, WAIT_AFTER
_MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}
_SYS_CACHESTAT = 451
"""Of all architectures."""
_CACHESTAT_NBYTES = 40  # five u64; the first one counts pages (linux/mman.h)
_RESIDENCY_SAMPLES = 64
_BTRFS = 0x9123683E
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
"""How filesystems, and kernels, say that they do not have them."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class EndOfFile(OSError):
    """A file ends before the bytes that it should hold. Not to be told from its errno, which broken disks use, too."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENODATA, message)


@dataclass(frozen=True, slots=True)
class DirectLimits:
    """What a file demands of O_DIRECT transfers."""

    memory_alignment: int
    offset_alignment: int
    """Offsets and lengths are multiples of this."""


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    function = getattr(_libc(), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, f"the C library has no {name}")
    if function(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def write_fully(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, however many calls it takes."""
    while data.nbytes:
        written = os.pwrite(fd, data, offset)
        if written == 0:
            raise OSError(errno.EIO, "the file accepts no more bytes")
        data = data[written:]
        offset += written


def read_fully(fd: int, buffer: memoryview, offset: int, *, alignment: int = 1) -> int:
    """Fill ``buffer`` from ``offset``; returns the number of bytes read, fewer only at the end of the file.

    With O_DIRECT, ``alignment`` is what offsets have to be multiples of: a read that ends elsewhere met the end.
    """
    filled = 0
    while filled < buffer.nbytes and filled % alignment == 0:
        count = os.preadv(fd, [buffer[filled:]], offset + filled)
        if count == 0:
            break
        filled += count
    return filled


def check_end(filled: int, nbytes: int, offset: int) -> None:
    """
    Raises:
        EndOfFile: a read of so many bytes has met the end.
    """
    if filled < nbytes:
        raise EndOfFile(f"the file ends before offset {offset + nbytes}")


def read_exactly(fd: int, offset: int, nbytes: int) -> bytes:
    """``nbytes`` bytes of a file from ``offset`` on.

    Raises:
        EndOfFile: the file ends before.
    """
    data = bytearray(nbytes)
    check_end(read_fully(fd, memoryview(data), offset), nbytes, offset)
    return bytes(data)


def write_back(fd: int, offset: int, nbytes: int) -> None:
    """Have a part of a file leave the page cache for the disk, whose own cache may still hold it."""
    _call("sync_file_range", fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_AND_WAIT)
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def sync_file(fd: int) -> None:
    """``fsync``: contents and metadata of the file are on stable storage when this returns."""
    os.fsync(fd)


def sync_directory(path: str) -> None:
    """``fsync`` a directory: names that were created, replaced or removed in it are on stable storage.

    One that may be written but not read cannot be synced by itself: then everything is (``sync``).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        os.sync()
        return
    try:
        sync_file(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network filesystems sync names at once
            raise
    finally:
        os.close(fd)


def preallocate(fd: int, nbytes: int, *, keep_size: bool = False) -> bool:
    """Reserve space for ``nbytes`` bytes, which grows the file unless it is to keep its size; False if that cannot be.

    Raises:
        OSError: there is no space (ENOSPC, EDQUOT), or the file may not be that large (EFBIG).
    """
    while True:
        try:
            _call(
                "fallocate64", fd, _FALLOC_FL_KEEP_SIZE if keep_size else 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)
            )
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            raise
        return True


def truncate(fd: int, nbytes: int) -> None:
    """Make the file exactly ``nbytes`` long."""
    os.ftruncate(fd, nbytes)


def set_direct(fd: int, enabled: bool) -> None:
    """Switch O_DIRECT on an open file; EINVAL where the filesystem does not have it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if enabled else flags & ~os.O_DIRECT)


def reopen_direct(fd: int, mode: int) -> int:
    """A second descriptor of the same file, which may have no name, with O_DIRECT. The caller closes it.

    Raises:
        FileNotFoundError: ``/proc`` is missing.
    """
    return os.open(f"/proc/self/fd/{fd}", mode | os.O_DIRECT | os.O_CLOEXEC)


def open_nameless(directory: str) -> int:
    """A new file for reading and writing that has no name, so that nothing is left of it when it is closed."""
    fd = try_nameless(directory, 0o600)
    if fd is not None:
        return fd
    path = os.path.join(directory, f".{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def try_nameless(directory: str, mode: int) -> int | None:
    """A new file for reading and writing without a name, which ``linkat`` may give it; None where there are none.

    None also where a file without a name could not be given one (no ``/proc``), and on btrfs: its ``fsync`` skips files
    without names, so that they would be empty after a power failure.
    """
    if not has_proc():
        return None
    try:
        fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in _NO_NAMELESS_FILES:
            raise
        return None
    try:
        forgets = _filesystem_type(fd) == _BTRFS
    except BaseException:
        os.close(fd)
        raise
    if forgets:
        os.close(fd)
        return None
    return fd


def has_proc() -> bool:
    """Whether open files can be found in ``/proc``, which some sandboxes lack."""
    try:
        os.stat("/proc/self/fd")
    except FileNotFoundError:
        return False
    return True


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """``flock`` a file, which lasts until all copies of the descriptor are closed; False if another process holds it.

    Where the filesystem has no locks, this returns True.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    return True


def unlock(fd: int) -> None:
    """Give up a ``flock``, also for copies of the descriptor that forked children have."""
    with contextlib.suppress(OSError):  # there are no locks here; closing the file ends one as well
        fcntl.flock(fd, fcntl.LOCK_UN)


def open_to_lock(path: str) -> int:
    """Open a file that may be anybody's, to ask who locks it.

    Raises:
        OSError: it is a link, gone, or may not be opened.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, flags | os.O_RDWR)  # NFS locks only files that are open for writing
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY)  # its writer may have made it a read-only one


def remove_leftover(path: str, unchanged_seconds: float | None = None) -> None:
    """Remove the temporary file of a process that was killed: nobody locks it.

    What cannot be told to be one stays: it is locked, somebody else's, gone, or on a filesystem without locks. Whoever
    has locked a file under that name is the only one who may take the name away.

    Args:
        path: of the file.
        unchanged_seconds: nor was it written to for so long. None leaves that to the lock.
    """
    with contextlib.suppress(OSError):
        fd = open_to_lock(path)
        try:
            if unchanged_seconds is None or os.fstat(fd).st_mtime < time.time() - unchanged_seconds:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.lstat(path), os.fstat(fd)):  # else it has got another name, and this is another
                    os.unlink(path)
        finally:
            close_read_only(fd)


def close_read_only(fd: int) -> None:
    """Close a descriptor that nothing was written through: a failure to do so loses nothing, and Linux frees it."""
    with contextlib.suppress(OSError):
        os.close(fd)


def memory_filesystem(fd: int) -> str | None:
    """The name of the filesystem if it lives in memory, where direct I/O gains nothing and nothing is durable."""
    return _MEMORY_FILESYSTEMS.get(_filesystem_type(fd))


def _filesystem_type(fd: int) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_NBYTES)
    _call("fstatfs64", fd, buffer)
    kind: int = struct.unpack_from("@l", buffer)[0]
    return kind & 0xFFFFFFFF


def is_mounted_by_itself(path: str) -> bool:
    """Whether a file is the root of a mount (``mount --bind``), so that its name cannot be given to another file.

    False where the kernel does not tell (``statx``, STATX_ATTR_MOUNT_ROOT; Linux 5.8).
    """
    buffer = ctypes.create_string_buffer(_STATX_NBYTES)
    try:
        _call("statx", _AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, 0, buffer)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    attributes: int = struct.unpack_from("=Q", buffer, _STATX_ATTRIBUTES)[0]
    return bool(attributes & _STATX_ATTR_MOUNT_ROOT)


def check_writable(path: str) -> None:
    """Find out whether this process may write to a file, without opening it.

    Raises:
        OSError: it may not, or the file is not there.
    """
    _call("faccessat", _AT_FDCWD, os.fsencode(path), os.W_OK, _AT_EACCESS)


def attributes_of(file: str | int) -> dict[str, bytes]:
    """The extended attributes that tell who may use a file, or what its user has noted on it: ACLs, labels, notes."""
    try:
        names = os.listxattr(file)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return {}
    return {name: os.getxattr(file, name) for name in names if name.startswith(_KEPT_ATTRIBUTES)}


def direct_limits(fd: int) -> DirectLimits | None:
    """What the file demands of direct I/O (``statx``, STATX_DIOALIGN; Linux 6.1); None if it has no direct I/O.

    Where the kernel or the filesystem does not say, 4096 is assumed, and the first transfer finds out.
    """
    buffer = ctypes.create_string_buffer(_STATX_NBYTES)
    try:
        _call("statx", fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return DirectLimits(ASSUMED_ALIGNMENT, ASSUMED_ALIGNMENT)
    if not struct.unpack_from("=I", buffer)[0] & _STATX_DIOALIGN:
        return DirectLimits(ASSUMED_ALIGNMENT, ASSUMED_ALIGNMENT)
    memory, offset = struct.unpack_from("=2I", buffer, _STATX_DIO_OFFSET)
    return DirectLimits(memory, offset) if memory and offset else None


def resident_fraction(fd: int, nbytes: int) -> float:
    """How much of the file is in the page cache (``cachestat``, Linux 6.5).

    Where the kernel is older, or does not tell because the file is somebody else's, 64 samples are read without
    waiting, which starts to read those that are not there.
    """
    if nbytes == 0:
        return 1.0
    where, found = struct.pack("@2Q", 0, nbytes), ctypes.create_string_buffer(_CACHESTAT_NBYTES)
    try:
        _call("syscall", *map(ctypes.c_long, (_SYS_CACHESTAT, fd)), where, found, ctypes.c_long(0))
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.EPERM, errno.EACCES):
            raise
        return _resident_samples(fd, nbytes)
    pages: int = struct.unpack_from("@Q", found)[0]
    return min(pages / -(-nbytes // mmap.PAGESIZE), 1.0)


def _resident_samples(fd: int, nbytes: int) -> float:
    """The fraction, by ``preadv2`` and RWF_NOWAIT; unlike ``mincore`` that tells the truth about all files.

    They start no read-ahead on ``fd``'s own account: it is told to expect random access while they are taken.
    """
    samples = min(_RESIDENCY_SAMPLES, -(-nbytes // ASSUMED_ALIGNMENT))
    byte = bytearray(1)
    hits = 0
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        for sample in range(samples):
            try:
                hits += os.preadv(fd, [byte], (2 * sample + 1) * nbytes // (2 * samples), os.RWF_NOWAIT)
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                return 1.0  # the filesystem cannot tell; such ones (9p, some FUSE) have no direct I/O either
    finally:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    return hits / samples


def evict(fd: int, nbytes: int) -> float:
    """Drop a file that was written to the disk from the page cache.

    Returns:
        How much of the file is in the page cache all the same, such as what others have mapped, what is not on the
        disk yet, and all of a filesystem in memory.
    """
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_fraction(fd, nbytes)
