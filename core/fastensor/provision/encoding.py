"""Samples and batches as bytes, for memory that processes share, and for sockets.

Tensors and arrays come back as views of the memory. Nothing of a value is executed or imported on the way back.

Layout, in the byte order of the machine: a head of 24 bytes (magic number, CRC32 of all that follows it, number of
bytes in all, and of the description); the description, see :mod:`fastensor.provision.describing`; then the buffers in
the order in which the description names them, each at the next multiple of :data:`~fastensor.data.ring.ALIGNMENT` from
the beginning. Padding is zero.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from isal import isal_zlib

from fastensor.data.ring import aligned
from fastensor.errors import CorruptSampleError
from fastensor.provision.describing import described
from fastensor.provision.restoring import restored

_MAGIC = b"FSV1"
_HEAD = struct.Struct("=4sIQQ")
_CRC32_BEGIN = len(_MAGIC)
_CRC32_END = _CRC32_BEGIN + 4
"""The CRC32 is of all bytes from here on."""
_BLOCK_NBYTES = 256 << 10
"""Bytes that are copied at a time, so that their CRC32 is computed while the processor's cache has them."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value that is ready to be written. It refers to the memory of the value, which must not change until then."""

    description: bytes
    buffers: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that :meth:`write_into` needs."""
        end = _HEAD.size + len(self.description)
        for buffer in self.buffers:
            end = aligned(end) + len(buffer)
        return end

    def write_into(self, memory: memoryview) -> None:
        """Write the value into the first :attr:`nbytes` bytes of writable memory.

        Raises:
            ValueError: the memory is shorter.
        """
        nbytes = self.nbytes
        if len(memory) < nbytes:
            raise ValueError(f"the value takes {nbytes} bytes, found memory of {len(memory)}")
        _HEAD.pack_into(memory, 0, _MAGIC, 0, nbytes, len(self.description))
        crc32, end = isal_zlib.crc32(memory[_CRC32_END : _HEAD.size]), _HEAD.size
        for block in self._blocks():
            memory[end : end + len(block)] = block
            crc32 = isal_zlib.crc32(block, crc32)
            end += len(block)
        struct.pack_into("=I", memory, _CRC32_BEGIN, crc32)

    def _blocks(self) -> Iterator[bytes | memoryview]:
        """All that follows the head."""
        yield self.description
        end = _HEAD.size + len(self.description)
        for buffer in self.buffers:
            yield bytes(aligned(end) - end)
            for begin in range(0, len(buffer), _BLOCK_NBYTES):
                yield buffer[begin : begin + _BLOCK_NBYTES]
            end = aligned(end) + len(buffer)


def encode(value: Any) -> Encoded:
    """Prepare a value to be written into memory. Copies nothing but tensors and arrays that are not contiguous.

    Args:
        value: tensors of the CPU that need no gradient, arrays and scalars of NumPy, ``bytes``, ``str``, ``int``,
            ``float``, ``bool``, None; and lists, tuples, named tuples and dicts of values.

    Raises:
        UnsupportedSampleError: the value has an object of another type, or is nested in itself.

    >>> import torch
    >>> encoded = encode({"image": torch.zeros(3, 2, 2), "label": 7})
    >>> memory = memoryview(bytearray(encoded.nbytes))
    >>> encoded.write_into(memory)
    >>> decode(memory)["label"]
    7
    """
    return Encoded(*described(value))


def decode(memory: memoryview) -> Any:
    """The value that was written into the memory.

    Arrays are views of the memory, and keep it. Tensors, too, if the memory is writable; tensors of read-only memory
    are copies, because torch has no read-only tensors, and to write to one would end the process.

    Whatever the memory holds, this takes time and memory in proportion to its size. It does not compare the CRC32, see
    :func:`check`.

    Args:
        memory: contiguous bytes, which begin at a multiple of 16. It may be longer than the value.

    Raises:
        CorruptSampleError: the memory does not hold such a value.
        UnsupportedSampleError: it has a named tuple of a module that has not been imported.
        ValueError: the memory begins elsewhere.
    """
    nbytes, description_nbytes = _parsed_head(memory)
    return restored(memory[:nbytes], _HEAD.size, _HEAD.size + description_nbytes)


def check(memory: memoryview) -> None:
    """Compare the CRC32 of a value in memory.

    Raises:
        CorruptSampleError: the memory does not hold such a value, or one that has changed.
    """
    nbytes, _ = _parsed_head(memory)
    (expected,) = struct.unpack_from("=I", memory, _CRC32_BEGIN)
    found = isal_zlib.crc32(memory[_CRC32_END:nbytes])
    if found != expected:
        raise CorruptSampleError(f"{nbytes} bytes of a sample in memory have the CRC32 {found:#x}, not {expected:#x}")


def _parsed_head(memory: memoryview) -> tuple[int, int]:
    """The bytes of the value, and of its description."""
    if len(memory) < _HEAD.size:
        raise CorruptSampleError(f"a sample has a head of {_HEAD.size} bytes, found memory of {len(memory)}")
    magic, _, nbytes, description_nbytes = _HEAD.unpack_from(memory)
    if magic != _MAGIC or not _HEAD.size + description_nbytes <= nbytes <= len(memory):
        raise CorruptSampleError(
            f"found {magic!r}, a sample of {nbytes} bytes with a description of {description_nbytes}; expected "
            f"{_MAGIC!r}, and no more than the memory's {len(memory)} bytes"
        )
    return nbytes, description_nbytes
