"""Codecs: pure functions that make saved bytes fewer before they go to an SSD, and make them again afterwards.

A *piece* is a part of a saved tensor's memory: a one-dimensional contiguous uint8 tensor, whose bytes are elements of
one dtype, and perhaps a tail that is shorter than an element. Each piece is encoded for itself, so that threads may
share a tensor, and no more than a piece is held beside it.

Augmented CSR (the FlashNeuron paper, section 3.2) keeps every bit. The elements are rows of 128, and the encoded piece
is::

    bitmap   one bit for each element, 16 bytes for each row; bit i % 8 of byte i // 8 is set if element i is not zero
    values   the elements that are not zero, in their order
    tail     the bytes behind the last whole element

An element is zero if all of its bits are: -0.0 is a value. The rows need no counts, because the bits tell them. A piece
that would not get smaller is written as it is: its size says so.

FP16 and BF16 round float32 to 16 bits (to nearest, ties to even), and are padded to float32 again. CSR may follow.

Numpy does the work in the calling thread, on the host, chunk by chunk, so that chunks stay in the cache, and no thread
for I/O starts threads of OpenMP.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fastensor.errors import FastensorError

Codec: TypeAlias = Literal["csr", "fp16", "bf16"]
LOSSY: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes of codecs that round float32."""
_BITS_OF_INFINITY = {
    torch.float16: (0x7FFF, 0x7C00),
    torch.bfloat16: (0x7FFF, 0x7F80),
    torch.float32: (0x7FFFFFFF, 0x7F800000),
}
"""By dtype: all bits but the sign, and those of infinity."""
ROW_ELEMENTS = 128
_BITMAP_ROW_NBYTES = ROW_ELEMENTS // 8
_CHUNK_ELEMENTS = 255 * ROW_ELEMENTS
"""Elements that are encoded at a time: fewer than the 32768 from which torch starts threads of OpenMP."""
_SAMPLED_ROWS = 61
"""One in so many rows is looked at to estimate a ratio. A prime, so that the sample does not follow a shape."""
_LARGEST_ELEMENT = 8
"""Larger elements, of complex128, count as several."""
_Integers: TypeAlias = npt.NDArray[np.signedinteger[Any]]


class DamagedPieceError(FastensorError):
    """The bytes of an encoded piece contradict themselves."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of pieces of a saved tensor."""

    itemsize: int
    """Bytes of an element in memory: 1, 2, 4 or 8."""
    narrow: torch.dtype | None = None
    """The dtype that float32 is rounded to; None if nothing is rounded."""
    is_sparse: bool = False
    """True if pieces that get smaller by that are in augmented CSR."""

    @property
    def name(self) -> str:
        """The codecs, such as ``csr`` or ``fp16+csr``.

        >>> Encoding(4, torch.float16, is_sparse=True).name
        'fp16+csr'
        """
        rounded = [name for name, dtype in LOSSY.items() if dtype == self.narrow]
        return "+".join([*rounded, *(["csr"] if self.is_sparse else [])])

    @property
    def stored_itemsize(self) -> int:
        """Bytes of an element that is stored."""
        return self.itemsize if self.narrow is None else self.narrow.itemsize


def bitmap_nbytes(elements: int) -> int:
    """Size of the bitmap of so many elements, which fills whole rows.

    >>> bitmap_nbytes(0), bitmap_nbytes(1), bitmap_nbytes(129)
    (0, 16, 32)
    """
    return -(-elements // ROW_ELEMENTS) * _BITMAP_ROW_NBYTES


def candidates(dtype: torch.dtype, codecs: Set[str]) -> list[Encoding]:
    """The encodings of a tensor of a dtype, the smallest first.

    >>> [one.name for one in candidates(torch.float32, {"csr", "fp16"})], candidates(torch.int64, {"fp16"})
    (['fp16+csr', 'csr'], [])
    """
    itemsize = min(dtype.itemsize, _LARGEST_ELEMENT)
    rounding = [LOSSY[name] for name in LOSSY if name in codecs and dtype == torch.float32]
    found = [Encoding(itemsize, narrow, "csr" in codecs) for narrow in rounding]
    return [*found, Encoding(itemsize, is_sparse=True)] if "csr" in codecs else found


def sampled_ratio(memory: Sequence[torch.Tensor], dtype: torch.dtype, codecs: Set[str]) -> float:
    """An estimate, from one in 61 rows, of how many times smaller codecs make a tensor; 1.0 if they do not.

    Args:
        memory: the tensor's bytes, uint8, in parts, on any device. The calling thread waits for a device.
        dtype: what they are.
        codecs: the codecs that may be used.

    >>> sampled_ratio([torch.zeros(4096, dtype=torch.uint8)], torch.float32, {"csr"})
    32.0
    """
    if not candidates(dtype, codecs) or not memory:
        return 1.0
    itemsize = min(dtype.itemsize, _LARGEST_ELEMENT)
    sample = torch.from_numpy(np.concatenate([_sample(part, itemsize) for part in memory]))
    encoded = encode(sample, dtype, codecs, torch.empty_like(sample))
    return 1.0 if encoded is None else sample.numel() / encoded[1]


def encode(piece: torch.Tensor, dtype: torch.dtype, codecs: Set[str], out: torch.Tensor) -> tuple[Encoding, int] | None:
    """Encode a piece, by the first of its :func:`candidates` that makes it smaller and no infinity of a finite number.

    Args:
        piece: uint8, on the host. If others change it meanwhile, each element is one that it has been.
        dtype: what it holds.
        codecs: the codecs that may be used.
        out: gets the encoded bytes, at its beginning; uint8, as large as the piece, aligned to 16 bytes.

    Returns:
        The encoding, and the number of encoded bytes; None if the piece is to be written as it is.
    """
    for encoding in candidates(dtype, codecs):
        nbytes = _encode_sparse(piece, encoding, out) if encoding.is_sparse else None
        if nbytes is None and encoding.narrow is not None:
            nbytes = _encode_dense(piece, encoding, out)
        if nbytes is not None and nbytes < piece.numel():
            return encoding, nbytes
    return None


def decode(encoded: torch.Tensor, encoding: Encoding, out: torch.Tensor) -> None:
    """Make a piece again.

    Args:
        encoded: what :func:`encode` has made; uint8, aligned to 16 bytes.
        encoding: how.
        out: the piece; uint8, on the host.

    Raises:
        DamagedPieceError: the encoded bytes are not those of a piece of this size. The contents of ``out`` are
            undefined.
    """
    found, tail, size = _integers(out, encoding.itemsize), _tail(out, encoding.itemsize), encoding.stored_itemsize
    nbytes = encoded.numel() - tail.numel()
    is_sparse = encoding.is_sparse and nbytes < len(found) * size
    bitmap = encoded[: bitmap_nbytes(len(found)) if is_sparse else 0].numpy()
    nbytes -= len(bitmap)
    if nbytes < 0 or nbytes % size or (not is_sparse and nbytes != len(found) * size):
        raise DamagedPieceError(f"{encoded.numel()} bytes of {encoding.name} cannot be a piece of {out.numel()} bytes")
    values = _integers(encoded[len(bitmap) : len(bitmap) + nbytes], size)
    tail.copy_(encoded[encoded.numel() - tail.numel() :])
    if _fill(found, bitmap if is_sparse else None, values, encoding.narrow) != len(values):
        raise DamagedPieceError(
            f"the bitmap of a piece of {out.numel()} bytes in {encoding.name} names another number of values than "
            "those that follow it"
        )


def _sample(part: torch.Tensor, itemsize: int) -> npt.NDArray[np.uint8]:
    """Some rows of a part, on the host; all of it if it has no row."""
    row = ROW_ELEMENTS * itemsize
    rows = part[: part.numel() // row * row].view(torch.int64).view(-1, row // 8)
    sampled = rows[::_SAMPLED_ROWS].contiguous() if len(rows) else part  # so few that torch starts no thread
    return sampled.cpu().numpy().reshape(-1).view(np.uint8)


def _integers(memory: torch.Tensor, itemsize: int) -> _Integers:
    """The whole elements in a uint8 tensor of host memory, as integers of the same size."""
    whole = memory[: memory.numel() // itemsize * itemsize]
    values: _Integers = whole.numpy().view(f"i{itemsize}")
    return values


def _tail(memory: torch.Tensor, itemsize: int) -> torch.Tensor:
    return memory[memory.numel() // itemsize * itemsize :]


def _stored_chunks(piece: torch.Tensor, encoding: Encoding) -> Iterator[tuple[int, _Integers, bool]]:
    """The index of the first element of each chunk, its elements as they are stored, and whether a finite one has
    become infinity. The elements of a chunk are valid until the next one."""
    values, narrow = _integers(piece, encoding.itemsize), encoding.narrow
    rounded = None if narrow is None else torch.empty(_CHUNK_ELEMENTS, dtype=narrow)
    for begin in range(0, len(values), _CHUNK_ELEMENTS):
        chunk = values[begin : begin + _CHUNK_ELEMENTS]
        if rounded is None:
            yield begin, chunk, False
            continue
        part = rounded[: len(chunk)].copy_(torch.from_numpy(chunk).view(torch.float32))
        stored = part.view(torch.int16).numpy()
        infinite = _infinite(stored, rounded.dtype)
        yield begin, stored, infinite > 0 and infinite > _infinite(chunk, torch.float32)


def _infinite(values: _Integers, dtype: torch.dtype) -> int:
    """Number of floating-point numbers, given as integers, that are infinite."""
    without_sign, infinity = _BITS_OF_INFINITY[dtype]
    return int(np.count_nonzero((values & without_sign) == infinity))


def _encode_dense(piece: torch.Tensor, encoding: Encoding, out: torch.Tensor) -> int | None:
    """Round a piece. Returns the number of bytes; None if a finite number would become infinity."""
    room, end = _integers(out, encoding.stored_itemsize), 0
    for begin, stored, overflows in _stored_chunks(piece, encoding):
        if overflows:
            return None
        room[begin : begin + len(stored)] = stored
        end = begin + len(stored)
    return _with_tail(piece, encoding, out, end * encoding.stored_itemsize)


def _encode_sparse(piece: torch.Tensor, encoding: Encoding, out: torch.Tensor) -> int | None:
    """Encode a piece in CSR. Returns the number of bytes; None if it would get no smaller, or a finite number would
    become infinity."""
    elements, size = piece.numel() // encoding.itemsize, encoding.stored_itemsize
    begin_values, smaller = bitmap_nbytes(elements), elements * size - 1
    if smaller < begin_values:
        return None
    bitmap, room = out[:begin_values].numpy(), _integers(out[begin_values:smaller], size)
    bitmap[-_BITMAP_ROW_NBYTES:] = 0  # the last row may be longer than its elements
    filled = 0
    for begin, stored, overflows in _stored_chunks(piece, encoding):
        is_there = stored != 0
        count = int(np.count_nonzero(is_there))
        if overflows or filled + count > len(room):
            return None
        bits = np.packbits(is_there, bitorder="little")
        bitmap[begin // 8 : begin // 8 + len(bits)] = bits
        np.compress(is_there, stored, out=room[filled : filled + count])
        filled += count
    return _with_tail(piece, encoding, out, len(bitmap) + filled * size)


def _with_tail(piece: torch.Tensor, encoding: Encoding, out: torch.Tensor, end: int) -> int:
    """Put the bytes behind the last whole element behind ``end`` encoded bytes. Returns the number of all bytes."""
    tail = _tail(piece, encoding.itemsize)
    out[end : end + tail.numel()] = tail
    return end + tail.numel()


def _fill(found: _Integers, bitmap: npt.NDArray[np.uint8] | None, values: _Integers, narrow: torch.dtype | None) -> int:
    """Fill a piece with values, which a bitmap gives places if there is one. Returns how many it wants, or more than
    there are."""
    taken = 0
    rounded = None if narrow is None else torch.empty(_CHUNK_ELEMENTS, dtype=narrow)
    for begin in range(0, len(found), _CHUNK_ELEMENTS):
        chunk = found[begin : begin + _CHUNK_ELEMENTS]
        stored = chunk if rounded is None else rounded.view(torch.int16).numpy()[: len(chunk)]
        if bitmap is None:
            stored[:] = values[begin : begin + len(chunk)]
            taken += len(chunk)
        else:
            within = bitmap[begin // 8 : (begin + len(chunk) + 7) // 8]
            bits = np.unpackbits(within, count=len(chunk), bitorder="little")
            (places,) = bits.view(np.bool_).nonzero()  # numpy finds booleans much faster
            if taken + len(places) > len(values):
                return taken + len(places)
            stored[:] = 0
            stored[places] = values[taken : taken + len(places)]
            taken += len(places)
        if rounded is not None:
            torch.from_numpy(chunk).view(torch.float32).copy_(rounded[: len(chunk)])
    return taken
