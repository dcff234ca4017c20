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

On the host, numpy does the work in the calling thread, chunk by chunk, so that chunks stay in the cache, and no thread
for I/O starts threads of OpenMP. On a GPU, Triton or torch does it: :mod:`fastensor.offload.device_codecs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fastensor.errors import FastensorError
from fastensor.offload import device_codecs
from fastensor.offload.device_codecs import INTEGERS

Codec: TypeAlias = Literal["csr", "fp16", "bf16"]
LOSSY: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The dtypes of codecs that round float32."""
ROW_ELEMENTS = 128
_BITMAP_ROW_NBYTES = ROW_ELEMENTS // 8
_CHUNK_ELEMENTS = 255 * ROW_ELEMENTS
"""Elements that are encoded at a time on the host: fewer than the 32768 from which torch starts threads of OpenMP."""
_SAMPLED_ROWS = 61
"""One in so many rows is looked at to estimate a ratio. A prime, so that the sample does not follow a shape."""
_LARGEST_ELEMENT = 8
"""Larger elements, of complex128, count as several."""
_Integers: TypeAlias = npt.NDArray[np.signedinteger[Any]]


class NotAsMeasuredError(FastensorError):
    """Memory has changed since it was measured, or is being changed, so that it does not fit the encoding."""


class DamagedPieceError(FastensorError):
    """The bytes of an encoded piece contradict themselves."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """Encoding of all pieces of a saved tensor."""

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

    def dense_nbytes(self, nbytes: int) -> int:
        """Size of an encoded piece of ``nbytes`` that is not in CSR."""
        return nbytes // self.itemsize * self.stored_itemsize + nbytes % self.itemsize

    def encoded_nbytes(self, nbytes: int, nonzero: int) -> int:
        """Size of an encoded piece of ``nbytes``, of whose elements ``nonzero`` are not zero."""
        dense = self.dense_nbytes(nbytes)
        if not self.is_sparse:
            return dense
        in_csr = bitmap_nbytes(nbytes // self.itemsize) + nonzero * self.stored_itemsize + nbytes % self.itemsize
        return min(in_csr, dense)


@dataclass(frozen=True, slots=True)
class MeasuredEncoding:
    """An encoding, and how large it makes each piece."""

    encoding: Encoding
    sizes: tuple[int, ...]
    """Bytes of the encoded pieces, in order."""


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


def sampled_ratio(pieces: Sequence[torch.Tensor], dtype: torch.dtype, codecs: Set[str]) -> float:
    """An estimate, from one in 61 rows, of how many times smaller codecs make a tensor; 1.0 if they do not.

    Args:
        pieces: the tensor's memory, uint8, on one device.
        dtype: what the memory holds.
        codecs: the codecs that may be used.

    >>> sampled_ratio([torch.zeros(4096, dtype=torch.uint8)], torch.float32, {"csr"})
    32.0
    """
    if not (encodings := candidates(dtype, codecs)):
        return 1.0
    encoding = encodings[0]
    sampled = [_sample(piece, encoding.itemsize) for piece in pieces]
    nbytes = sum(piece.numel() for piece in sampled)
    counts = [nonzero for nonzero, _ in _counts(sampled, encoding)]
    found = sum(encoding.encoded_nbytes(one.numel(), nonzero) for one, nonzero in zip(sampled, counts, strict=True))
    return nbytes / found if found else 1.0


def measure(pieces: Sequence[torch.Tensor], dtype: torch.dtype, codecs: Set[str]) -> MeasuredEncoding | None:
    """The encoding that makes a tensor the smallest; None if none makes it smaller.

    A sample is looked at first; if that says that the tensor may get smaller, each element is counted. The calling
    thread waits for a GPU. An encoding is not used that would make infinity of a finite number.

    Args:
        pieces: the tensor's memory, uint8, on one device.
        dtype: what the memory holds.
        codecs: the codecs that may be used.
    """
    if sampled_ratio(pieces, dtype, codecs) <= 1:
        return None
    for encoding in candidates(dtype, codecs):
        counts = _counts(pieces, encoding)
        if any(overflows for _, overflows in counts):
            continue
        sizes = tuple(
            encoding.encoded_nbytes(one.numel(), nonzero) for one, (nonzero, _) in zip(pieces, counts, strict=True)
        )
        if sum(sizes) < sum(one.numel() for one in pieces):
            return MeasuredEncoding(encoding, sizes)
    return None


def encode(piece: torch.Tensor, encoding: Encoding, out: torch.Tensor) -> None:
    """Encode a piece.

    Args:
        piece: uint8.
        encoding: how.
        out: the encoded bytes, of the size that was measured; uint8, on the same device, aligned to 16 bytes.

    Raises:
        NotAsMeasuredError: the piece has another size when it is encoded, or a finite number would become infinity.
            The contents of ``out`` are undefined.
    """
    coded = device_codecs.encode if piece.device.type != "cpu" else _encode_on_host
    if not coded(piece, encoding.itemsize, encoding.narrow, out, is_sparse=_is_sparse(piece, encoding, out)):
        raise NotAsMeasuredError(f"{piece.numel()} bytes do not fit {out.numel()} bytes of {encoding.name} any more")


def decode(encoded: torch.Tensor, encoding: Encoding, out: torch.Tensor) -> None:
    """Make a piece again.

    Args:
        encoded: what :func:`encode` has made; uint8, aligned to 16 bytes.
        encoding: how.
        out: the piece; uint8, on the same device.

    Raises:
        DamagedPieceError: the encoded bytes are not those of a piece of this size. The contents of ``out`` are
            undefined.
    """
    if not _can_be(encoded.numel(), encoding, out.numel()):
        raise DamagedPieceError(f"{encoded.numel()} bytes of {encoding.name} cannot be a piece of {out.numel()} bytes")
    decoded = device_codecs.decode if out.device.type != "cpu" else _decode_on_host
    found = decoded(encoded, encoding.itemsize, encoding.narrow, out, is_sparse=_is_sparse(out, encoding, encoded))
    if not found:
        raise DamagedPieceError(
            f"the bitmap of a piece of {out.numel()} bytes in {encoding.name} names another number of values than "
            "those that follow it"
        )


def _can_be(encoded_nbytes: int, encoding: Encoding, nbytes: int) -> bool:
    """True if an encoded piece of ``nbytes`` may have a size."""
    dense = encoding.dense_nbytes(nbytes)
    least = encoding.encoded_nbytes(nbytes, 0)
    whole = (encoded_nbytes - least) % encoding.stored_itemsize == 0
    return encoded_nbytes == dense or (encoding.is_sparse and whole and least <= encoded_nbytes < dense)


def _is_sparse(piece: torch.Tensor, encoding: Encoding, encoded: torch.Tensor) -> bool:
    return encoded.numel() < encoding.dense_nbytes(piece.numel())


def _sample(piece: torch.Tensor, itemsize: int) -> torch.Tensor:
    row = ROW_ELEMENTS * itemsize
    rows = (
        piece[: piece.numel() // row * row].view(torch.int64).view(-1, row // 8)
    )  # so few that torch starts no thread
    return rows[::_SAMPLED_ROWS].reshape(-1).view(torch.uint8) if len(rows) else piece


def _counts(pieces: Sequence[torch.Tensor], encoding: Encoding) -> list[tuple[int, bool]]:
    """Count of the stored elements of each piece that are not zero, and a flag if a finite one would become
    infinity."""
    if all(piece.device.type == "cpu" for piece in pieces):
        return [_count_on_host(piece, encoding) for piece in pieces]
    counted = [device_codecs.count(piece, encoding.itemsize, encoding.narrow) for piece in pieces]
    return [(nonzero, bool(overflows)) for nonzero, overflows in torch.stack(counted).tolist()]


# --- on the host


def _integers(memory: torch.Tensor, itemsize: int) -> _Integers:
    """The whole elements in a uint8 tensor of host memory, as integers of the same size."""
    whole = memory[: memory.numel() // itemsize * itemsize]
    values: _Integers = whole.view(INTEGERS[itemsize]).numpy()
    return values


def _tail(memory: torch.Tensor, itemsize: int) -> torch.Tensor:
    return memory[memory.numel() // itemsize * itemsize :]


def _count_on_host(piece: torch.Tensor, encoding: Encoding) -> tuple[int, bool]:
    if encoding.narrow is None:
        return int(np.count_nonzero(_integers(piece, encoding.itemsize))), False
    nonzero = 0
    for _, stored, overflows in _stored_chunks(piece, encoding.itemsize, encoding.narrow):
        if overflows:
            return 0, True
        nonzero += int(np.count_nonzero(stored))
    return nonzero, False


def _stored_chunks(
    piece: torch.Tensor, itemsize: int, narrow: torch.dtype | None
) -> Iterator[tuple[int, _Integers, bool]]:
    """The index of the first element of each chunk, its elements as they are stored, and whether a finite one has
    become infinity. The elements of a chunk are valid until the next one."""
    values = _integers(piece, itemsize)
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
    without_sign, infinity = device_codecs.BITS_OF_INFINITY[dtype]
    return int(np.count_nonzero((values & without_sign) == infinity))


def _encode_on_host(
    piece: torch.Tensor, itemsize: int, narrow: torch.dtype | None, out: torch.Tensor, *, is_sparse: bool
) -> bool:
    """Encode a piece. False if the piece does not fit, or overflows."""
    elements = piece.numel() // itemsize
    tail, stored_itemsize = _tail(piece, itemsize), itemsize if narrow is None else narrow.itemsize
    body = out[: out.numel() - tail.numel()]
    out[body.numel() :] = tail
    bitmap = out[: bitmap_nbytes(elements) if is_sparse else 0].numpy()
    room, filled = _integers(body[len(bitmap) :], stored_itemsize), 0
    bitmap[-_BITMAP_ROW_NBYTES:] = 0  # the last row may be longer than its elements
    for begin, stored, overflows in _stored_chunks(piece, itemsize, narrow):
        if overflows:
            return False
        if not is_sparse:
            room[begin : begin + len(stored)] = stored
            continue
        is_there = stored != 0
        bits = np.packbits(is_there, bitorder="little")
        bitmap[begin // 8 : begin // 8 + len(bits)] = bits
        count = int(np.count_nonzero(is_there))
        if filled + count > len(room):
            return False
        np.compress(is_there, stored, out=room[filled : filled + count])
        filled += count
    return not is_sparse or filled == len(room)


def _decode_on_host(
    encoded: torch.Tensor, itemsize: int, narrow: torch.dtype | None, out: torch.Tensor, *, is_sparse: bool
) -> bool:
    """Make a piece again. False if the bitmap does not fit the values."""
    found = _integers(out, itemsize)
    tail, stored_itemsize = _tail(out, itemsize), itemsize if narrow is None else narrow.itemsize
    body = encoded[: encoded.numel() - tail.numel()]
    tail.copy_(encoded[body.numel() :])
    bitmap = encoded[: bitmap_nbytes(len(found)) if is_sparse else 0].numpy()
    values, taken = _integers(body[len(bitmap) :], stored_itemsize), 0
    rounded = None if narrow is None else torch.empty(_CHUNK_ELEMENTS, dtype=narrow)
    for begin in range(0, len(found), _CHUNK_ELEMENTS):
        chunk = found[begin : begin + _CHUNK_ELEMENTS]
        stored = chunk if rounded is None else rounded.view(torch.int16).numpy()[: len(chunk)]
        if is_sparse:
            (places,) = _bits(bitmap, begin, len(chunk)).nonzero()
            if taken + len(places) > len(values):
                return False
            stored[:] = 0
            stored[places] = values[taken : taken + len(places)]
            taken += len(places)
        else:
            stored[:] = values[begin : begin + len(chunk)]
        if rounded is not None:
            torch.from_numpy(chunk).view(torch.float32).copy_(rounded[: len(chunk)])
    return not is_sparse or taken == len(values)


def _bits(bitmap: npt.NDArray[np.uint8], begin: int, count: int) -> npt.NDArray[np.bool_]:
    """Bits ``begin`` to ``begin + count`` of a bitmap. As booleans, because numpy finds these much faster."""
    bits = np.unpackbits(bitmap[begin // 8 : (begin + count + 7) // 8], count=count, bitorder="little")
    return bits.view(np.bool_)
