"""Samples and batches as bytes, for memory that processes share, and for Ray.

A value is pickled, with its tensors, arrays and bytes out of band, so that the former are views of the memory. Whoever
decodes has to trust who has encoded: both are processes of one service, or of its trainers.

Layout, in the byte order of the machine: a head of 32 bytes (magic number, CRC32 of all that follows it, number of
bytes in all, and of the pickle, number of buffers); the number of bytes of each buffer, in 8 bytes each; the pickle;
then the buffers in the order in which the pickle refers to them, each at the next multiple of
:data:`~fastensor.data.ring.ALIGNMENT` from the beginning. Padding is zero.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib

from fastensor.data.ring import aligned
from fastensor.errors import CorruptSampleError, UnsupportedSampleError

_MAGIC = b"FSV3"
_HEAD = struct.Struct("=4sIQQQ")
_CRC32_BEGIN = len(_MAGIC)
_CRC32_END = _CRC32_BEGIN + 4
"""The CRC32 is of all bytes from here on."""
_BLOCK_NBYTES = 256 << 10
"""Bytes that are copied at a time, so that their CRC32 is computed while the processor's cache has them."""
_ADDRESS_ALIGNMENT = 16
"""Memory begins at a multiple of it: what ``malloc`` gives, and enough for every dtype."""
_OF_NUMPY = frozenset(
    getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
)
"""Dtypes whose tensors are most quickly shown as bytes."""
_PLAIN = frozenset((NoneType, bool, int, float, str, list, tuple, dict))
"""The types of what is pickled as it is."""


class Encoded(NamedTuple):
    """A value that is ready to be written. It refers to the memory of the value, which must not change until then."""

    description: bytes
    """The pickle, after the lengths of the buffers."""
    buffers: tuple[memoryview, ...]
    nbytes: int
    """Bytes that :meth:`write_into` needs."""
    as_decoded: bool
    """True if all arrays of the value lie in memory as :func:`decode` makes them: contiguous, aligned and writable."""

    def write_into(self, memory: memoryview, *, checksum: bool = True) -> None:
        """Write the value into the first :attr:`nbytes` bytes of writable memory.

        Args:
            checksum: whether to compute the CRC32. Without it, the CRC32 in the memory is 0, and :func:`check` refuses
                the memory. What is used once, by the process that it is written for, needs none.

        Raises:
            ValueError: the memory is shorter.
        """
        if len(memory) < self.nbytes:
            raise ValueError(f"the value takes {self.nbytes} bytes, found memory of {len(memory)}")
        crc32 = end = 0
        for block in self._blocks():
            memory[end : end + len(block)] = block
            if checksum:
                crc32 = isal_zlib.crc32(block if end else block[_CRC32_END:], crc32)
            end += len(block)
        if checksum:
            struct.pack_into("=I", memory, _CRC32_BEGIN, crc32)

    def copied(self) -> memoryview:
        """The value in memory of its own."""
        if self.nbytes > _BLOCK_NBYTES:
            memory = np.empty(self.nbytes, np.uint8).data
            self.write_into(memory)
        else:  # takes half the time
            memory = memoryview(bytearray().join(self._blocks()))
            struct.pack_into("=I", memory, _CRC32_BEGIN, isal_zlib.crc32(memory[_CRC32_END:]))
        return memory

    def _blocks(self) -> Iterator[bytes | memoryview]:
        """All bytes in their order, with a CRC32 of 0. The head is in the first block."""
        small = _HEAD.pack(_MAGIC, 0, self.nbytes, len(self.description), len(self.buffers)) + self.description
        end = len(small)
        for buffer in self.buffers:
            yield small + bytes(aligned(end) - end)
            for begin in range(0, len(buffer), _BLOCK_NBYTES):
                yield buffer[begin : begin + _BLOCK_NBYTES]
            small, end = b"", aligned(end) + len(buffer)
        yield small


def encode(value: Any) -> Encoded:
    """Prepare a value to be written into memory. Copies no tensors and arrays but those that are not contiguous, or
    read-only.

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
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, 5)
    pickler.fast = True  # an object is pickled as often as it occurs, so the bytes of equal values are equal
    try:
        pickler.dump(value)
    except (ValueError, RecursionError) as error:
        raise UnsupportedSampleError(f"the sample is nested too deeply, or contains itself: {error}") from error
    lengths = list(map(len, pickler.buffers))
    description = struct.pack(f"={len(lengths)}Q", *lengths) + pickled.getbuffer()
    nbytes = _HEAD.size + len(description)
    for length in lengths:
        nbytes = aligned(nbytes) + length
    return Encoded(description, tuple(pickler.buffers), nbytes, pickler.as_decoded)


def decode(memory: memoryview) -> Any:
    """The value that was written into the memory.

    Arrays are views of the memory, and keep it. Tensors, too, if the memory is writable; tensors of read-only memory
    are copies, because torch has no read-only tensors, and to write to one would end the process.

    It does not compare the CRC32, see :func:`check`.

    Args:
        memory: contiguous bytes, which begin at a multiple of 16. It may be longer than the value.

    Raises:
        CorruptSampleError: the memory does not hold such a value.
        UnsupportedSampleError: it has a named tuple of a module that has not been imported.
        ValueError: the memory begins elsewhere.
    """
    nbytes, description_nbytes, count = _parsed_head(memory)
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    if address % _ADDRESS_ALIGNMENT:
        raise ValueError(f"memory of samples begins at a multiple of {_ADDRESS_ALIGNMENT}, found {address:#x}")
    lengths = struct.unpack_from(f"={count}Q", memory, _HEAD.size)
    begin, end = _HEAD.size + 8 * count, _HEAD.size + description_nbytes
    return _Unpickler(io.BytesIO(memory[begin:end]), _buffers(memory[:nbytes], end, lengths)).load()


def check(memory: memoryview) -> None:
    """Compare the CRC32 of a value in memory.

    Raises:
        CorruptSampleError: the memory does not hold such a value, or one that has changed.
    """
    nbytes = _parsed_head(memory)[0]
    (expected,) = struct.unpack_from("=I", memory, _CRC32_BEGIN)
    found = isal_zlib.crc32(memory[_CRC32_END:nbytes])
    if found != expected:
        raise CorruptSampleError(f"{nbytes} bytes of a sample in memory have the CRC32 {found:#x}, not {expected:#x}")


def _parsed_head(memory: memoryview) -> tuple[int, int, int]:
    """The bytes of the value, and of its description; the number of its buffers."""
    if len(memory) < _HEAD.size:
        raise CorruptSampleError(f"a sample has a head of {_HEAD.size} bytes, found memory of {len(memory)}")
    magic, _, nbytes, description_nbytes, count = _HEAD.unpack_from(memory)
    if magic != _MAGIC or not _HEAD.size + 8 * count <= _HEAD.size + description_nbytes <= nbytes <= len(memory):
        raise CorruptSampleError(
            f"found {magic!r}, a sample of {nbytes} bytes with a description of {description_nbytes}; expected "
            f"{_MAGIC!r}, and no more than the memory's {len(memory)} bytes"
        )
    return nbytes, description_nbytes, count


def _buffers(memory: memoryview, end: int, lengths: tuple[int, ...]) -> Iterator[memoryview]:
    for nbytes in lengths:
        begin = aligned(end)
        end = begin + nbytes
        yield memory[begin:end]


class _Pickler(pickle.Pickler):
    """Pickles plain data. Refers to tensors, arrays, bytes and named tuples by their parts, and refuses all else."""

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.buffers: list[memoryview] = []
        self.as_decoded = True

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return None
        if kind is bytes:
            self.buffers.append(memoryview(value))
            return (_bytes.__name__,)
        if kind is torch.Tensor and _is_simple(value):
            self.buffers.append(_bytes_of_tensor(value))
            return _tensor_of(value.dtype, value.shape)
        if kind in (np.ndarray, np.memmap) and _is_named(value.dtype):
            self.as_decoded &= value.flags.carray
            flat = np.ascontiguousarray(value).reshape(-1)
            self.buffers.append(flat.view(np.uint8).data if len(flat) else memoryview(b""))
            return _array_of(value.dtype, value.shape)
        if isinstance(value, np.generic) and _is_named(value.dtype):
            return _scalar.__name__, value.dtype.str, value.tobytes().decode("latin-1")
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return _named_tuple.__name__, _module_of(kind), kind.__qualname__, *value
        raise UnsupportedSampleError(
            f"the sample has {_in_words(value)}. Only tensors of the CPU that need no gradient, arrays and plain data "
            f"are passed on: convert it, in a data service by before_cache or after_cache"
        )


class _Unpickler(pickle.Unpickler):
    """Makes values of what :class:`_Pickler` has written. Nothing else is looked for, or called."""

    def __init__(self, file: io.BytesIO, buffers: Iterator[memoryview]) -> None:
        super().__init__(file)
        self._buffers = buffers

    def persistent_load(self, reference: Any) -> Any:
        make, *parts = _parts_of(reference) if type(reference) is str else reference
        return _MAKE[make](self._buffers, *parts)

    def find_class(self, module: str, name: str) -> Any:
        raise CorruptSampleError(f"the sample in memory refers to {module}.{name}, which no sample does")


@lru_cache(maxsize=1024)
def _tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """A reference to a tensor, in one text: each part of a tuple would be looked at by :class:`_Pickler`."""
    return " ".join([_tensor.__name__, str(dtype).removeprefix("torch."), *map(str, shape)])


@lru_cache(maxsize=1024)
def _array_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return " ".join([_array.__name__, dtype.str, *map(str, shape)])


@lru_cache(maxsize=1024)
def _parts_of(reference: str) -> tuple[str, str, tuple[int, ...]]:
    make, dtype, *shape = reference.split(" ")
    return make, dtype, tuple(map(int, shape))


@lru_cache(maxsize=1024)
def _is_named(dtype: np.dtype[Any]) -> bool:
    """True if a dtype is known by its name: it has no objects, no fields, and is of no other package."""
    return not dtype.hasobject and np.dtype(dtype.str) == dtype


def _is_simple(tensor: torch.Tensor) -> bool:
    """True if dtype, shape and bytes describe a tensor."""
    dense = tensor.layout is torch.strided and tensor.is_cpu
    return dense and not tensor.requires_grad and not tensor.is_quantized


def _bytes_of_tensor(tensor: torch.Tensor) -> memoryview:
    if not tensor.numel():
        return memoryview(b"")
    if tensor.dtype in _OF_NUMPY and tensor.is_contiguous() and not tensor.is_neg():
        return tensor.numpy().data.cast("B")  # most samples: what follows takes several times as long
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.unsqueeze(-1).view(torch.uint8).reshape(-1).numpy().data  # the stride of one element may be any


def _module_of(kind: type) -> str:
    """Module in which others find a class. In processes that ``multiprocessing`` has started, the script has another
    name."""
    return "__main__" if kind.__module__ == "__mp_main__" else kind.__module__


def _in_words(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        gradient = ", requires_grad" if value.requires_grad else ""
        return f"a {kind} ({value.layout}, {value.device}{gradient})"
    return f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"an object of the type {kind}"


def _tensor(buffers: Iterator[memoryview], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    memory, dtype = next(buffers), getattr(torch, name)
    if not len(memory):
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=dtype)
    return flat if len(shape) == 1 else flat.view(shape)  # a view takes longer than all else here


def _array(buffers: Iterator[memoryview], name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.ndarray(shape, name, next(buffers))


def _bytes(buffers: Iterator[memoryview]) -> bytes:
    return bytes(next(buffers))


def _scalar(_: Iterator[memoryview], name: str, text: str) -> Any:
    """A scalar, whose bytes are the characters of the text."""
    return np.frombuffer(text.encode("latin-1"), name)[0]


def _named_tuple(_: Iterator[memoryview], module: str, name: str, *items: Any) -> Any:
    """A named tuple of a class in a module that is there: nothing is imported."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make")):
        raise UnsupportedSampleError(
            f"the sample has a named tuple {module}.{name}, and found {found!r} by this name: define the class in a "
            f"module, and import {module} before"
        )
    return found._make(items)


_MAKE: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (_tensor, _array, _bytes, _scalar, _named_tuple)
}
