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
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import NoneType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from isal import isal_zlib

from fastensor.data.ring import ALIGNMENT, aligned
from fastensor.errors import CorruptSampleError, UnsupportedSampleError

_MAGIC = b"FSV3"
_BEGIN = struct.Struct("=4sI")
"""The magic number, and the CRC32 of all bytes behind this."""
_SIZES = struct.Struct("=QQQ")
_HEAD_NBYTES = _BEGIN.size + _SIZES.size
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
    buffers: list[memoryview]
    nbytes: int
    """Bytes that :meth:`write_into` needs."""
    as_decoded: bool
    """True if all arrays of the value lie in memory as :func:`decode` makes them: contiguous, aligned and writable."""

    def write_into(self, memory: memoryview) -> None:
        """Write the value into the first :attr:`nbytes` bytes of writable memory, with a CRC32 of 0: :func:`check`
        refuses it. What is used once, by the process that it is written for, needs none.

        Raises:
            ValueError: the memory is shorter.
        """
        if len(memory) < self.nbytes:
            raise ValueError(f"the value takes {self.nbytes} bytes, found memory of {len(memory)}")
        _BEGIN.pack_into(memory, 0, _MAGIC, 0)
        end = _BEGIN.size
        for piece in self._pieces():
            memory[end : end + len(piece)] = piece
            end += len(piece)

    def copied(self) -> memoryview:
        """The value in memory of its own, with its CRC32."""
        memory = memoryview(bytearray().join((bytes(_BEGIN.size), *self._pieces())))
        _BEGIN.pack_into(memory, 0, _MAGIC, isal_zlib.crc32(memory[_BEGIN.size :]))
        return memory

    def _pieces(self) -> list[bytes | memoryview]:
        """What the CRC32 is of, one piece behind the other. Most are of the value's memory."""
        small = _SIZES.pack(self.nbytes, len(self.description), len(self.buffers)) + self.description
        pieces: list[bytes | memoryview] = []
        end = _BEGIN.size + len(small)
        for buffer in self.buffers:
            padding = -end % ALIGNMENT
            pieces += (small + bytes(padding), buffer)
            small, end = b"", end + padding + len(buffer)
        return pieces or [small]


def encode(value: Any) -> Encoded:
    """Prepare a value to be written into memory. Copies no tensors and arrays but those that are not contiguous.

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
    return Encoder().encode(value)


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
    lengths = struct.unpack_from(f"={count}Q", memory, _HEAD_NBYTES)
    begin, end = _HEAD_NBYTES + 8 * count, _HEAD_NBYTES + description_nbytes
    return _Unpickler(io.BytesIO(memory[begin:end]), _buffers(memory[:nbytes], end, lengths)).load()


def check(memory: memoryview) -> None:
    """Compare the CRC32 of a value in memory.

    Raises:
        CorruptSampleError: the memory does not hold such a value, or one that has changed.
    """
    nbytes = _parsed_head(memory)[0]
    _, expected = _BEGIN.unpack_from(memory)
    found = isal_zlib.crc32(memory[_BEGIN.size : nbytes])
    if found != expected:
        raise CorruptSampleError(f"{nbytes} bytes of a sample in memory have the CRC32 {found:#x}, not {expected:#x}")


def _parsed_head(memory: memoryview) -> tuple[int, int, int]:
    """The bytes of the value, and of its description; the number of its buffers."""
    if len(memory) < _HEAD_NBYTES:
        raise CorruptSampleError(f"a sample has a head of {_HEAD_NBYTES} bytes, found memory of {len(memory)}")
    magic, _ = _BEGIN.unpack_from(memory)
    nbytes, description_nbytes, count = _SIZES.unpack_from(memory, _BEGIN.size)
    if magic != _MAGIC or not _HEAD_NBYTES + 8 * count <= _HEAD_NBYTES + description_nbytes <= nbytes <= len(memory):
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


class Encoder(pickle.Pickler):
    """Encodes values, one after the other: for many, :func:`encode` takes longer.

    Pickles plain data. Refers to tensors, arrays, bytes and named tuples by their parts, and refuses all else.
    """

    def __init__(self) -> None:
        self._pickled = io.BytesIO()
        super().__init__(self._pickled, 5)
        self.fast = True  # an object is pickled as often as it occurs, so the bytes of equal values are equal

    def encode(self, value: Any) -> Encoded:
        """See :func:`encode`."""
        self._buffers: list[memoryview] = []
        self._as_decoded = True
        self._pickled.seek(0)
        self._pickled.truncate()
        try:
            self.dump(value)
        except (ValueError, RecursionError) as error:
            raise UnsupportedSampleError(f"the sample is nested too deeply, or contains itself: {error}") from error
        lengths = array("Q", map(len, self._buffers))
        description = lengths.tobytes() + self._pickled.getvalue()
        nbytes = _HEAD_NBYTES + len(description)
        for length in lengths:
            nbytes += -nbytes % ALIGNMENT + length
        return Encoded(description, self._buffers, nbytes, self._as_decoded)

    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return None
        if kind is torch.Tensor and (found := _bytes_of_tensor(value)) is not None:
            self._buffers.append(found)
            return _tensor_of(value.dtype, value.shape)
        if kind is bytes:
            self._buffers.append(memoryview(value))
            return (_bytes.__name__,)
        if kind in (np.ndarray, np.memmap) and _is_named(value.dtype):
            self._as_decoded &= value.flags.carray
            flat = np.ascontiguousarray(value).reshape(-1)
            self._buffers.append(flat.view(np.uint8).data if len(flat) else memoryview(b""))
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
    """Makes values of what :class:`Encoder` has written. Nothing else is looked for, or called."""

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


def _bytes_of_tensor(tensor: torch.Tensor) -> memoryview | None:
    """None if dtype, shape and bytes do not describe the tensor."""
    if tensor.dtype in _OF_NUMPY:
        try:
            return tensor.numpy().data.cast("B")  # most samples: what follows takes several times as long
        except (TypeError, RuntimeError):
            pass
    if tensor.layout is not torch.strided or not tensor.is_cpu or tensor.requires_grad or tensor.is_quantized:
        return None
    if not tensor.numel():
        return memoryview(b"")
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
