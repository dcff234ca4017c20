"""Backing memory with pages ahead of use, mapping files, and copying between addresses."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref

import torch

from fastensor.files import posix

MADV_POPULATE_WRITE = 23  # Linux 5.14
_MADV_POPULATE_READ = 22  # Linux 5.14
_WORTH_POPULATING_NBYTES = 64 << 10
_libc = ctypes.CDLL(None, use_errno=True)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_mmap = _libc.mmap64
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_mmap.restype = ctypes.c_void_p
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def populate(address: int, nbytes: int) -> None:
    """Back memory with pages in one call, which takes half as long as a fault for each page. The contents stay.

    Does nothing where the kernel cannot, and costs little where the pages exist already.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - begin >= _WORTH_POPULATING_NBYTES:
        _madvise(begin, end - begin, MADV_POPULATE_WRITE)


def map_file(fd: int, offset: int, nbytes: int) -> torch.UntypedStorage:
    """A range of a file as a storage in host memory, mapped privately: what is written to it stays in this process.

    The pages are those of the page cache, and are there when this returns. The mapping ends with the storage, and needs
    ``fd`` no longer. ``mmap.mmap`` would keep a descriptor for each mapping.

    A file that another process cuts off meanwhile ends this process by SIGBUS when the storage is used.

    Raises:
        EndOfFile: the file ends before ``offset + nbytes``.
        OSError: the file cannot be mapped, or the disk fails to deliver its bytes.
    """
    if not nbytes:
        return torch.UntypedStorage(0, device="cpu")  # type: ignore[no-untyped-call]  # torch gives it no types
    if os.fstat(fd).st_size < offset + nbytes:
        posix.check_end(0, nbytes, offset)
    inside = offset % mmap.PAGESIZE
    address = _mmap(
        None, inside + nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, fd, ctypes.c_int64(offset - inside)
    )
    if address == _MAP_FAILED:
        raise _last_error()
    memory = (ctypes.c_char * nbytes).from_address(address + inside)
    # Not at exit: threads may still use the storage then.
    weakref.finalize(memory, _munmap, address, inside + nbytes).atexit = False
    # An older kernel reads the pages when they are used. There, and here, EFAULT stands for what would be a SIGBUS.
    if _madvise(address, inside + nbytes, _MADV_POPULATE_READ) and (error := _last_error()).errno != errno.EINVAL:
        raise OSError(errno.EIO, "the file cannot be read") if error.errno == errno.EFAULT else error
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """``memmove`` between two addresses, without the GIL."""
    ctypes.memmove(target, source, nbytes)
