"""Backing memory with pages ahead of use, mapping files, and copying between addresses."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from isal import isal_zlib

from fastensor.backends.base import Reader
from fastensor.files import posix

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
"""An array of bytes. NumPy's own name for it takes a millisecond to import."""
MADV_WIPEONFORK, MADV_KEEPONFORK = 18, 19
"""Linux 4.14. A fork during a direct transfer into shared pages would leave the bytes with the child (open(2))."""
FILLED_AT_ONCE = {"cuda"}
"""Types of devices whose storages are filled without a storage of the same size on the host."""
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_POPULATE_READ = 22  # Linux 5.14
_WORTH_POPULATING_NBYTES = 64 << 10
_PIECE_NBYTES = 4 << 20
"""Populated and checksummed at a time. 768 MiB from a disk took 0.20 s in pieces of 2 to 4 MiB, 0.25 s in whole."""
_ROW_NBYTES = 512 << 10
_ROW_STEP = _ROW_NBYTES - 64
"""See :func:`copy_memory`."""
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap = _libc.mmap64
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def map_private(nbytes: int, *advice: int) -> mmap.mmap:
    """New memory of this process, which is unmapped when nothing uses it any more. See :func:`advise`.

    Raises:
        OSError: there is no memory.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise(memory, *advice)
    return memory


def advise(memory: mmap.mmap, *advice: int) -> None:
    """Give the kernel advice on memory, as far as the kernel takes it (``madvise``)."""
    for one in advice:
        with contextlib.suppress(OSError):  # this kernel does not have it
            memory.madvise(one)


def populate(address: int, nbytes: int) -> None:
    """Back memory with pages in one call, which takes half as long as a fault for each page. The contents stay.

    Does nothing where the kernel cannot, and costs little where the pages exist already.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - begin >= _WORTH_POPULATING_NBYTES:
        _madvise(begin, end - begin, _MADV_POPULATE_WRITE)


def map_file(fd: int, offset: int, nbytes: int, *, checksum: bool) -> tuple[torch.UntypedStorage, int]:
    """A range of a file as a storage in host memory, mapped privately: what is written to it stays in this process.

    The pages are those of the page cache, and are there when this returns. The kernel reads ahead while the CRC32 of
    what it has read is computed. The mapping ends with the storage, and does not need ``fd``: ``mmap.mmap`` would keep
    a descriptor for each. A file that another process cuts off later ends this process by SIGBUS when the storage is
    used.

    Returns:
        The storage, and its CRC32, or 0 without ``checksum``.

    Raises:
        EndOfFile: the file ends before ``offset + nbytes``.
        OSError: the file cannot be mapped, or the disk fails to deliver its bytes.
    """
    if not nbytes:
        return torch.UntypedStorage(0, device="cpu"), 0  # type: ignore[no-untyped-call]  # torch gives it no types
    if os.fstat(fd).st_size < offset + nbytes:
        posix.check_end(0, nbytes, offset)
    inside = offset % mmap.PAGESIZE
    total = inside + nbytes
    address = _mmap(None, total, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, offset - inside)
    if address == _MAP_FAILED:
        raise _last_error()
    memory = (ctypes.c_ubyte * nbytes).from_address(address + inside)
    # Not at exit: threads may still use the storage then.
    weakref.finalize(memory, _munmap, address, total).atexit = False
    # The kernel reads ahead by 4 MiB then, whatever the device is set to, and pages are large. Some kernels refuse.
    _madvise(address, total, mmap.MADV_HUGEPAGE)
    crc32 = 0
    for at in range(0, total, _PIECE_NBYTES):
        _populate_read(address + at, min(_PIECE_NBYTES, total - at))
        if checksum:
            crc32 = isal_zlib.crc32(memoryview(memory)[max(at - inside, 0) : at + _PIECE_NBYTES - inside], crc32)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(), crc32


def _populate_read(address: int, nbytes: int) -> None:
    """Back pages of a mapped file with those of the page cache.

    Raises:
        OSError: the disk fails to deliver them. Without this call, using them would end the process by SIGBUS, and does
            so before Linux 5.14.
    """
    if _madvise(address, nbytes, _MADV_POPULATE_READ) == 0 or (error := _last_error()).errno == errno.EINVAL:
        return
    raise OSError(errno.EIO, "the file cannot be read") if error.errno == errno.EFAULT else error


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy between two addresses, without the GIL. The memory does not overlap.

    From 1 MiB on, most is copied in rows of 512 KiB, which glibc copies faster on AMD's processors than all at once:
    256 MiB by two threads in 12.0 ms in place of 13.6. NumPy copies them in one call, row by row because each begins a
    little before the one in front of it ends; without that, NumPy would make one copy of it.
    """
    count = max(nbytes - _ROW_NBYTES, 0) // _ROW_STEP
    if count:
        np.copyto(_rows(target, count), _rows(source, count))
    done = count * _ROW_STEP
    ctypes.memmove(target + done, source + done, nbytes - done)


def _rows(address: int, count: int) -> Bytes:
    """Rows of memory that overlap."""
    memory = _array_of((count - 1) * _ROW_STEP + _ROW_NBYTES).from_address(address)
    return np.ndarray((count, _ROW_NBYTES), np.uint8, memoryview(memory), strides=(_ROW_STEP, 1))


@lru_cache(maxsize=256)
def _array_of(nbytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """The type of an array of bytes. To make one takes as long as to copy 4 MiB."""
    return ctypes.c_ubyte * nbytes


def is_filled_at_once(device: torch.device) -> bool:
    """True if storages on the device are filled without a storage of the same size on the host."""
    return device.type in FILLED_AT_ONCE


def storage_on(device: torch.device, nbytes: int) -> torch.UntypedStorage:
    """A new storage on a device or in host memory, whose pages were not touched yet."""
    return torch.UntypedStorage(nbytes, device=device)  # type: ignore[no-untyped-call]  # torch gives it no types


def memory_of(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage in host memory, which the memoryview keeps alive."""
    array: Bytes = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return array.data


def fill(reader: Reader, storage: torch.UntypedStorage, offset: int, *, checksum: bool) -> int:
    """Fill a storage on any device from an offset of a file. Returns the CRC32 of the bytes, or 0 without ``checksum``.

    On a device, work that is queued on the current stream from now on finds the bytes.

    Args:
        reader: reads the file. One thread uses it.

    Raises:
        OSError: the file cannot be read there. The contents of the storage are undefined.
    """
    if not storage.nbytes():
        return 0
    if not is_filled_at_once(storage.device):
        return reader.readinto(offset, memory_of(storage), checksum=checksum)
    from fastensor.backends.to_device import fill_device  # what devices need is imported for devices

    return fill_device(reader, storage, offset, checksum=checksum)
