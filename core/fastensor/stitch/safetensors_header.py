"""Reading the header of a safetensors file (the format's README, huggingface/safetensors).

A file is the length of the header (8 bytes, little endian), the header (a JSON object, padded with spaces to a multiple
of 8), and the tensors' bytes, one behind the other, larger dtypes first, then by name. With checksums, ``__metadata__``
has an entry for them, and names a format (``FORMAT.md``).
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fastensor.errors import CorruptCheckpointError, UnsupportedContentError
from fastensor.files.garbage import without_collection
from fastensor.stitch.parts import Part
from fastensor.stitch.shape import MAX_SIZE, is_shape, kept_if_short
from fastensor.stitch.signatures import LENGTH_NBYTES, MAX_HEADER_NBYTES

CHECKSUM_KEY = "fastensor.crc32"
MARK = b"  "
"""Stands between the name and the text of that entry. JSON ignores it, and tools that copy metadata do not copy it."""
ENTRY = re.compile(rb'(?<!\\)"' + re.escape(CHECKSUM_KEY.encode()) + b'":(' + MARK + b')?"')
"""The beginning of the entry. Within a text, the first quote would be escaped."""
METADATA_KEY = "__metadata__"
BLANK = "0" * 8
DTYPES: tuple[tuple[str, str, int], ...] = (
    ("U64", "uint64", 64), ("I64", "int64", 64), ("F64", "float64", 64), ("C64", "complex64", 64),
    ("F32", "float32", 32), ("U32", "uint32", 32), ("I32", "int32", 32),
    ("BF16", "bfloat16", 16), ("F16", "float16", 16), ("U16", "uint16", 16), ("I16", "int16", 16),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz", 8), ("F8_E4M3FNUZ", "float8_e4m3fnuz", 8), ("F8_E8M0", "float8_e8m0fnu", 8),
    ("F8_E4M3", "float8_e4m3fn", 8), ("F8_E5M2", "float8_e5m2", 8), ("I8", "int8", 8), ("U8", "uint8", 8),
    ("F6_E3M2", "", 6), ("F6_E2M3", "", 6), ("F4", "float4_e2m1fn_x2", 4), ("BOOL", "bool", 8),
)  # fmt: skip
"""Name in the file, name in torch (empty if torch has none), bits per element; in the order of tensors in a file."""
_BITS = {name: bits for name, _, bits in DTYPES}
FROM_FILE: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own, _ in DTYPES if hasattr(torch, own)}
_FIELDS = {"dtype", "shape", "data_offsets"}
"""What a header says of each tensor."""
_LEAST_ENTRY_NBYTES = 60
"""About as much of a header says where a tensor is."""
_COPIED = (
    f"another tool has written it, and copied {CHECKSUM_KEY!r} in its metadata from a file of Fastensor's, whose "
    f"checksums these are"
)


class SafetensorsHeader(NamedTuple):
    """The header of a file."""

    tensors: tuple[Part, ...]
    """The tensors, in the order of the header."""
    metadata: Mapping[str, str]
    """The metadata without the entry for the checksums."""
    nbytes: int
    """Offset of the data region."""
    checked: bool
    """True if the file carries checksums, the header's among them, which matches."""
    unchecked: str = ""
    """Reason for which ``checked`` is False, if there is more to say than that the file carries no checksums."""


def torch_dtype(tensor: Part, where: str) -> torch.dtype:
    """The torch dtype of a tensor.

    Raises:
        UnsupportedContentError: this torch does not have it.
    """
    try:
        return FROM_FILE[tensor.dtype]
    except KeyError:
        raise UnsupportedContentError(
            f"{where}: tensor {tensor.name!r} is of dtype {tensor.dtype}, which torch {torch.__version__} does not have"
        ) from None


def header_nbytes(start: bytes, nbytes: int, where: str) -> int:
    """The size of the header, its length included.

    Args:
        start: the first 8 bytes of the file, or all of a shorter one.
        nbytes: size of the file.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpointError: the file is shorter.
    """
    if len(start) < LENGTH_NBYTES:
        raise CorruptCheckpointError(
            f"{where}: {nbytes} bytes at offset 0, too few for a safetensors file; it was cut off"
        )
    length = int(struct.unpack("<Q", start)[0])
    if length > min(MAX_HEADER_NBYTES, nbytes - LENGTH_NBYTES):
        raise CorruptCheckpointError(
            f"{where}: the length at offset 0 claims a header of {length} bytes, but the file has {nbytes} and headers "
            f"have at most {MAX_HEADER_NBYTES}; the file is damaged, was cut off, or is not a safetensors file"
        )
    return LENGTH_NBYTES + length


def parse_header(data: bytes, nbytes: int, *, where: str, verify: bool = True) -> SafetensorsHeader:
    """Read and check a header.

    Args:
        data: the first :func:`header_nbytes` bytes of the file.
        nbytes: size of the file.
        where: the file's name, for messages.
        verify: whether to read and compare checksums. If not, the result is that of a file without checksums.

    Raises:
        CorruptCheckpointError: the header cannot be parsed, contradicts itself or the file's size, or does not match
            its checksum.
    """
    with without_collection(len(data) // _LEAST_ENTRY_NBYTES):
        content = _parse_json(data[LENGTH_NBYTES:], where)
        metadata = _parse_metadata(content.pop(METADATA_KEY, {}), where)
        text = metadata.pop(CHECKSUM_KEY, None)
        checksums = None if text is None or not verify else _parse_checksums(text, len(content), data, where)
        unchecked = _COPIED if text is not None and verify and checksums is None else ""
        tensors = tuple(
            _parse_tensor(name, value, None if checksums is None else checksums[i], len(data), where)
            for i, (name, value) in enumerate(content.items())
        )
        _check_tiling(tensors, len(data), nbytes, where)
        return SafetensorsHeader(tensors, metadata, len(data), checksums is not None, unchecked)


def _parse_json(data: bytes, where: str) -> dict[str, Any]:
    here = f"{where}: the header at offset {LENGTH_NBYTES}"
    if data[:1] != b"{":
        raise CorruptCheckpointError(f"{here} begins with {data[:1]!r}, expected {b'{'!r}; not a safetensors file")
    try:
        content = json.loads(data.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # JSON, UTF-8, and numbers of thousands of digits
        raise CorruptCheckpointError(f"{here} is not sound JSON ({error})") from error
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{here} holds a JSON {type(content).__name__}, expected an object")
    return content


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{_shortened(name)} occurs twice")
    if not is_unicode("".join(result)):
        raise ValueError("a name holds a lone surrogate")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _parse_metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) and is_unicode(text) for text in value.values()):
        raise CorruptCheckpointError(f"{where}: {METADATA_KEY} in the header maps something else than texts to texts")
    return dict(value)


def _parse_checksums(text: str, tensors: int, data: bytes, where: str) -> list[int] | None:
    """The CRC32 of each tensor, in the order of the header; None if another tool has copied them from another file.

    They are this file's if the header's own matches. If it does not, the header is damaged if it is one of ours.
    """
    entry = ENTRY.search(data)
    is_ours = entry is not None and entry[1] == MARK
    try:
        numbers = bytes.fromhex(text)
    except ValueError:
        numbers = b""
    is_complete = len(numbers) == 4 * (tensors + 1) and numbers.hex(" ", 4) == text
    own = entry.end() if entry else len(data)
    found = zlib.crc32(b"".join((data[:own], BLANK.encode(), data[own + len(BLANK) :])))
    if is_complete and found == int(text[: len(BLANK)], 16):  # as in files that an older Fastensor wrote unmarked
        return list(struct.unpack(f">{tensors}I", numbers[4:]))
    if not is_ours:
        return None
    if not is_complete:
        raise CorruptCheckpointError(
            f"{where}: {CHECKSUM_KEY!r} in the header at offset {LENGTH_NBYTES} does not hold {tensors + 1} CRC32s: "
            f"the file was damaged after it was written. Load an older checkpoint, or pass verify=False to load it "
            f"unverified"
        )
    raise CorruptCheckpointError(
        f"{where}: the header ({len(data)} bytes at offset 0) has CRC32 {found:08x}, expected {text[: len(BLANK)]}: "
        f"the file was damaged after it was written. Load an older checkpoint, or pass verify=False to load it "
        f"unverified"
    )


def _parse_tensor(name: str, value: Any, crc32: int | None, base: int, where: str) -> Part:
    def refused(what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{where}: tensor {name!r} in the header{what}")

    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise refused(f" is described by {_shortened(value)}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise refused(f" has dtype {_shortened(dtype)}, which the format does not have")
    if not _are_sizes(shape) or (numel := _numel(tuple(shape))) is None:
        raise refused(f" has shape {_shortened(shape)}, which no tensor has")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refused(f" has data_offsets {_shortened(offsets)}, expected [begin, end]")
    begin, end = offsets
    bits = numel * _BITS[dtype]
    if bits != 8 * (end - begin):
        raise refused(
            f": {dtype} of shape {shape} takes {bits / 8:g} bytes, but its data_offsets {offsets} have room for "
            f"{end - begin}"
        )
    if dtype == "F4":
        if not shape or shape[-1] % 2:
            raise refused(f" has shape {shape}; the last size of F4 is even")
        shape = [*shape[:-1], shape[-1] // 2]
    return Part(name, end - begin, crc32, base + begin, base + end, 0, dtype, tuple(shape))


@kept_if_short
def _numel(shape: tuple[int, ...]) -> int | None:
    """Number of elements of a shape; None if no tensor has it."""
    return math.prod(shape) if is_shape(shape) else None


def _are_sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for size in value:  # noqa: SIM110  # several times faster than all(), for tens of thousands of tensors
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            return False
    return True


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_tiling(tensors: Sequence[Part], base: int, nbytes: int, where: str) -> None:
    """The tensors follow each other without gaps or overlaps, from the header to the end of the file."""
    ordered = sorted(tensors, key=attrgetter("begin", "end"))
    for before, after in pairwise(ordered):
        if before.end != after.begin:
            kind = "overlap" if before.end > after.begin else "leave a gap"
            raise CorruptCheckpointError(
                f"{where}: tensors {before.name!r} and {after.name!r} {kind} at offset {after.begin}; the header "
                f"is wrong"
            )
    begin, end = (ordered[0].begin, ordered[-1].end) if ordered else (base, base)
    if (begin, end) != (base, nbytes):
        raise CorruptCheckpointError(
            f"{where}: the header says that tensors take the bytes from {begin} to {end}, but there are those from "
            f"{base} to {nbytes}: the file was cut off, or something was appended to it"
        )


def is_unicode(text: str) -> bool:
    """True if a text has no lone surrogate, which UTF-8 does not have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
