"""Backing memory with pages ahead of use, and copying between addresses."""

from __future__ import annotations

import ctypes
import mmap

MADV_POPULATE_WRITE = 23  # Linux 5.14
_WORTH_POPULATING_NBYTES = 64 << 10
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(address: int, nbytes: int) -> None:
    """Back memory with pages in one call, which takes half as long as a fault for each page. The contents stay.

    Does nothing where the kernel cannot, and costs little where the pages exist already.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - begin >= _WORTH_POPULATING_NBYTES:
        _madvise(begin, end - begin, MADV_POPULATE_WRITE)


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """``memmove`` between two addresses, without the GIL."""
    ctypes.memmove(target, source, nbytes)
