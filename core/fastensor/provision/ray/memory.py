"""Memory that Ray has handed to one process only, as what it is: writable."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ALIGNMENT = 16
"""Alignment that :func:`fastensor.provision.encoding.decode` needs."""
_writable: list[range] = []
"""Addresses of mappings that are known to be writable."""


def owned(array: npt.NDArray[np.uint8]) -> memoryview:
    """The bytes of an array that was returned to this process, and to no other one. They may be written to, and keep
    the array.

    Ray shows what it brings as read-only, because other processes may have the same object; nobody else asks for what
    was made for one loader. Its object store is mapped writable, so nothing has to be copied. Should Ray ever map it
    otherwise, this is a copy.

    Args:
        array: one-dimensional, contiguous.
    """
    if not len(array) or array.flags.writeable:
        return array.data
    if array.ctypes.data % _ALIGNMENT or not _is_writable(array.ctypes.data):
        return array.copy().data
    return np.asarray(_Writable(array)).data


class _Writable:
    """An array, for NumPy, without its promise not to write."""

    def __init__(self, array: npt.NDArray[np.uint8]) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {**self._array.__array_interface__, "data": (self._array.ctypes.data, False)}


def _is_writable(address: int) -> bool:
    if any(address in one for one in _writable):
        return True
    with open("/proc/self/maps") as file:
        for line in file:
            where, rights = line.split(maxsplit=2)[:2]
            begin, end = (int(part, 16) for part in where.split("-"))
            if begin <= address < end:
                if "w" in rights:
                    _writable.append(range(begin, end))
                return "w" in rights
    return False
