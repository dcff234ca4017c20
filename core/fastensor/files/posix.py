"""The system calls that move and publish bytes, one thin function each, and what Linux knows about a file.

The reads, writes and syncs of a checkpoint go through this module, except those that torch itself does.
All offsets and sizes are in bytes. Functions raise ``OSError``. They do not retry errors; Python retries calls that a
signal interrupted (EINTR). All of them release the GIL while they wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_MOST_LINKS = 40
"""The number after which Linux takes a chain of symlinks for a loop."""
ASSUMED_ALIGNMENT = 4096
"""The alignment where the kernel states none: no block device in use needs more."""
TEMPORARY_SUFFIX = ".fastensor-tmp"
"""Suffix of the names of files that are being written, and will then be renamed."""

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_AT_EMPTY_PATH = 0x1000
_AT_FDCWD = -100
_AT_SYMLINK_NOFOLLOW = 0x100
_AT_EACCESS = 0x200
_RENAME_EXCHANGE = 2
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
"""The number of the system call, the same on all architectures."""
_CACHESTAT_NBYTES = 40  # five u64; the first one counts pages (linux/mman.h)
_RESIDENCY_SAMPLES = 64
_BTRFS = 0x9123683E
_SHARING_FILESYSTEMS = {0x58465342: "xfs", _BTRFS: "btrfs", 0xCA451A4E: "bcachefs"}
_FICLONERANGE = 0x4020940D
"""The number of the request where most architectures have it. On others, the kernel does not know this one."""
_ADVICE_NBYTES = 128 << 10
"""The kernel may ignore what one call of ``posix_fadvise`` asks for beyond the largest read-ahead of the device, whose
default is this."""
_MOVED_NBYTES = 64 << 20
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
"""Errors by which filesystems and kernels refuse files without names."""
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class EndOfFile(OSError):
    """A file ends before the bytes that it should hold. Catch the class: broken disks use the same errno."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENODATA, message)

    def __reduce__(self) -> tuple[type[EndOfFile], tuple[str | None]]:
        return type(self), (self.strerror,)


class DirectLimits(NamedTuple):
    """The alignment that a file demands of O_DIRECT transfers."""

    memory_alignment: int
    offset_alignment: int
    """Offsets and lengths are multiples of this number of bytes."""


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

    With O_DIRECT, offsets have to be multiples of ``alignment``: a read that ends elsewhere has met the file's end.
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
        EndOfFile: a read of ``nbytes`` bytes at ``offset`` was ``filled`` only in part.
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
    """Move a part of a file from the page cache to the disk. Not durable: the part may still be in the disk's cache."""
    _call("sync_file_range", fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_AND_WAIT)
    advise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def advise(fd: int, offset: int, nbytes: int, advice: int) -> None:
    """``posix_fadvise``: tell the kernel how a part of a file will be used. A length of 0 means up to the end.

    Some filesystems and sandboxes refuse advice. Nothing depends on it but speed, so a refusal is no error.
    """
    try:  # noqa: SIM105  # contextlib.suppress takes longer than the call; training data has one for each read
        os.posix_fadvise(fd, offset, nbytes, advice)
    except OSError:
        pass


def will_need(fd: int, offset: int, nbytes: int) -> None:
    """Have the kernel begin to read a part of a file into the page cache."""
    end = offset + nbytes
    for begin in range(offset, end, _ADVICE_NBYTES):
        advise(fd, begin, min(_ADVICE_NBYTES, end - begin), os.POSIX_FADV_WILLNEED)


def sync_file(fd: int) -> None:
    """``fsync``: contents and metadata of the file are on stable storage when this returns."""
    os.fsync(fd)


def sync_directory(path: str) -> None:
    """``fsync`` a directory: names that were created, replaced or removed in it are on stable storage.

    A directory that may be written but not read cannot be synced by itself. Then all filesystems are (``sync``).
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
    """Reserve space for ``nbytes`` bytes. The file grows to that size unless ``keep_size``.

    Returns:
        False if the filesystem cannot reserve space.

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


def may_share_blocks(fd: int) -> bool:
    """True if the filesystem is of a kind whose files can share blocks. It may still refuse that (XFS without
    ``reflink``)."""
    return _filesystem_type(fd) in _SHARING_FILESYSTEMS


def share_blocks(source: int, begin: int, fd: int, offset: int, nbytes: int) -> None:
    """Let a part of a file have the blocks of a part of another file, until one of both is written
    (``ioctl_ficlonerange``). The source's part is on the disk then.

    Args:
        source: a file of the same filesystem, open for reading.
        begin, offset: where the parts begin; multiples of the filesystem's blocks.
        fd: open for writing. The file grows if the part ends behind its end.
        nbytes: a multiple of the blocks, too.

    Raises:
        OSError: the filesystem refuses it, for example because it has no shared blocks (EOPNOTSUPP), or no space for
            its notes (ENOSPC). The file's part is undefined.
    """
    fcntl.ioctl(fd, _FICLONERANGE, struct.pack("=qQQQ", source, begin, nbytes, offset))


def move_bytes(source: int, begin: int, fd: int, offset: int, nbytes: int) -> None:
    """Move a part of a file into another one of the same filesystem, which shares blocks for that where it can
    (``copy_file_range``). Little by little, since a quota counts a shared block in both files.

    Args:
        source: open for reading and writing. The part is zeros then, and its whole blocks are free.
        begin, offset: where the parts begin; multiples of the filesystem's blocks, which make it fast.
        fd: open for writing.
        nbytes: size of the parts.

    Raises:
        OSError: there is no space, or the source ends before.
    """
    while nbytes:
        moved = os.copy_file_range(source, fd, min(nbytes, _MOVED_NBYTES), begin, offset)
        check_end(moved, min(nbytes, 1), begin)
        _punch_hole(source, begin, moved)
        begin, offset, nbytes = begin + moved, offset + moved, nbytes - moved


def _punch_hole(fd: int, offset: int, nbytes: int) -> None:
    with contextlib.suppress(OSError):  # the space is freed when the file is
        mode = _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE
        _call("fallocate64", fd, mode, ctypes.c_int64(offset), ctypes.c_int64(nbytes))


def truncate(fd: int, nbytes: int) -> None:
    """Make the file exactly ``nbytes`` long."""
    os.ftruncate(fd, nbytes)


def set_direct(fd: int, enabled: bool) -> None:
    """Switch O_DIRECT of an open file on or off. Raises EINVAL where the filesystem has no direct I/O."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if enabled else flags & ~os.O_DIRECT)


def reopen_direct(fd: int, mode: int) -> int:
    """A second descriptor of the same file, with O_DIRECT. The file need not have a name. The caller closes the
    descriptor.

    Raises:
        FileNotFoundError: ``/proc`` is missing.
    """
    return os.open(f"/proc/self/fd/{fd}", mode | os.O_DIRECT | os.O_CLOEXEC)


def open_nameless(directory: str) -> int:
    """A new file for reading and writing without a name: nothing is left of the file when it is closed."""
    fd = try_nameless(directory, 0o600)
    if fd is not None:
        return fd
    path = os.path.join(directory, f".{os.urandom(8).hex()}{TEMPORARY_SUFFIX}")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.unlink(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def try_nameless(directory: str, mode: int) -> int | None:
    """A new file for reading and writing without a name. ``linkat`` can give the file a name.

    Returns:
        None where the filesystem has no such files; where they could not be given a name (no ``/proc``); and on btrfs,
        whose ``fsync`` skips files without names, so that they would be empty after a power failure.
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
    """True if open files can be found in ``/proc``, which some sandboxes lack."""
    try:
        os.stat("/proc/self/fd")
    except FileNotFoundError:
        return False
    return True


def exchange(one: str, two: str) -> bool:
    """Exchange what two names of a filesystem lead to, in one instant (``renameat2``, RENAME_EXCHANGE).

    Returns:
        False if the filesystem cannot do that. Nothing has changed then.
    """
    try:
        _call("renameat2", _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(two), _RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def sync_tree(directory: str) -> None:
    """``fsync`` every file and directory below a directory, and the directory. Links are not followed. A file that
    disappears meanwhile is passed over."""
    with os.scandir(directory) as found:
        entries = list(found)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            sync_tree(entry.path)
        elif entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    sync_file(fd)
                finally:
                    close_read_only(fd)
    sync_directory(directory)


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
    """Release a ``flock``, also for the copies of the descriptor in forked children."""
    with contextlib.suppress(OSError):  # the filesystem has no locks; closing the file releases a lock as well
        fcntl.flock(fd, fcntl.LOCK_UN)


def close_read_only(fd: int) -> None:
    """Close a descriptor that was only read. A failure to close it loses nothing: Linux frees the descriptor anyway."""
    with contextlib.suppress(OSError):
        os.close(fd)


def memory_filesystem(fd: int) -> str | None:
    """The filesystem's name if it is in memory, where direct I/O gains nothing and nothing is durable; else None."""
    return _MEMORY_FILESYSTEMS.get(_filesystem_type(fd))


def memory_filesystem_of(path: str) -> str | None:
    """The name of the filesystem of a file, if that lives in memory; None if it does not, or the file is missing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return memory_filesystem(fd)
    finally:
        close_read_only(fd)


def _filesystem_type(fd: int) -> int:
    buffer = ctypes.create_string_buffer(_STATFS_NBYTES)
    _call("fstatfs64", fd, buffer)
    kind: int = struct.unpack_from("@l", buffer)[0]
    return kind & 0xFFFFFFFF


def is_mounted_by_itself(path: str) -> bool:
    """True if a file is the root of a mount (``mount --bind``), so that no other file can take its name.

    False where the kernel does not say (``statx``, STATX_ATTR_MOUNT_ROOT; Linux 5.8).
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


def names_along(path: str, *, strict: bool = False) -> Iterator[str]:
    """The absolute name of a file, whose directory is no symlink; and, as long as such a name is a symlink itself, that
    of what it leads to. No more than 40 symlinks are followed.

    Raises:
        OSError: ``strict``, and a directory is missing, cannot be looked at, or is a loop of symlinks.
    """
    for _ in range(_MOST_LINKS):
        directory, name = os.path.split(path)
        path = os.path.join(os.path.realpath(directory or os.curdir, strict=strict), name)
        yield path
        try:
            path = os.path.join(os.path.dirname(path), os.readlink(path))
        except OSError:  # no link, or not there
            return


def check_writable(path: str) -> None:
    """Check that this process may write to a file, without opening the file.

    Raises:
        OSError: the process may not, or the file is missing.
    """
    _call("faccessat", _AT_FDCWD, os.fsencode(path), os.W_OK, _AT_EACCESS)


def text_of(path: Path) -> str:
    """The text of a small file, such as those of ``/proc`` and ``/sys``, without space around it; empty if it cannot be
    read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_ahead_nbytes(fd: int, root: Path = Path("/sys")) -> int:
    """How far the kernel reads ahead of a file that is read in order, in bytes; 0 if it does not say, as of files that
    are on no disk or on several (btrfs, overlayfs)."""
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    folders = root / "class/bdi" / name, root / "dev/block" / name / "../queue"  # a partition has only that one
    return int(next(filter(None, (text_of(folder / "read_ahead_kb") for folder in folders)), 0)) << 10


def identity_of(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size and time of the last write of a file. A new name or other rights do not change them."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def attributes_of(file: str | int) -> dict[str, bytes]:
    """The extended attributes that a replacement of the file has to keep: ACLs, security labels, notes of the user."""
    try:
        names = os.listxattr(file)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return {}
    return {name: os.getxattr(file, name) for name in names if name.startswith(_KEPT_ATTRIBUTES)}


def direct_limits(fd: int) -> DirectLimits | None:
    """Alignment that direct I/O of a file needs (``statx``, STATX_DIOALIGN; Linux 6.1); None without direct I/O.

    Where the kernel or the filesystem does not say, an alignment of 4096 is assumed; the first transfer may fail then.
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
    """The part of a file that is in the page cache, from 0 to 1 (``cachestat``, Linux 6.5).

    Where the kernel is older, or keeps the answer because the file belongs to another user, 64 samples are read without
    waiting. That makes the kernel read the samples that are missing.
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
    """The resident part, estimated by ``preadv2`` and RWF_NOWAIT, which unlike ``mincore`` works for all files.

    The descriptor is set to random access meanwhile, so that the samples start no read-ahead.
    """
    samples = min(_RESIDENCY_SAMPLES, -(-nbytes // ASSUMED_ALIGNMENT))
    byte = bytearray(1)
    hits = 0
    advise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    try:
        for sample in range(samples):
            try:
                hits += os.preadv(fd, [byte], (2 * sample + 1) * nbytes // (2 * samples), os.RWF_NOWAIT)
            except BlockingIOError:
                pass
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                return 1.0  # the filesystem (9p, some FUSE) cannot say; such filesystems have no direct I/O either
    finally:
        advise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    return hits / samples


def evict(fd: int, nbytes: int) -> float:
    """Drop a file from the page cache, as far as the file is on the disk.

    Returns:
        The part of the file that is still in the page cache: pages that processes have mapped, pages that are not on
        the disk yet, and everything if the filesystem is in memory.
    """
    advise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return resident_fraction(fd, nbytes)
