"""The safetensors container: planning a file, and reading its header (the format's README, huggingface/safetensors).

A file is the length of the header (8 bytes, little endian), the header (a JSON object, padded with spaces to a multiple
of 8), and the tensors' bytes, one behind the other, larger dtypes first, then by name. A planned file is byte for byte
what ``safetensors.torch.save_file`` writes. With checksums, ``__metadata__`` has an entry for them, and names a format
(``FORMAT.md``).
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch

from fastensor.errors import BackendUnavailableError, CorruptCheckpointError, UnsupportedContentError
from fastensor.stitch.areas import Area, overlapping
from fastensor.stitch.image import Header, Image, Payload, Segment
from fastensor.stitch.parts import Part
from fastensor.stitch.shape import MAX_SIZE, is_shape
from fastensor.stitch.signatures import LENGTH_NBYTES, MAX_HEADER_NBYTES
from fastensor.stitch.source import Plan

CHECKSUM_KEY = "fastensor.crc32"
_MARK = b"  "
"""Stands between the name and the text of that entry. JSON ignores it, and tools that copy metadata do not copy it."""
_ENTRY = re.compile(rb'(?<!\\)"' + re.escape(CHECKSUM_KEY.encode()) + b'":(' + _MARK + b')?"')
"""The beginning of the entry. Within a text, the first quote would be escaped."""
OF_TORCH = {"format": "pt"}
"""The metadata by which other libraries know that the tensors are torch's. Accelerate, huggingface_hub and transformers
before 5 take a file without metadata, and refuse one whose metadata name no format."""
METADATA_KEY = "__metadata__"
_ALIGNMENT = 8
_BLANK = "0" * 8
_DTYPES: tuple[tuple[str, str, int], ...] = (
    ("U64", "uint64", 64), ("I64", "int64", 64), ("F64", "float64", 64), ("C64", "complex64", 64),
    ("F32", "float32", 32), ("U32", "uint32", 32), ("I32", "int32", 32),
    ("BF16", "bfloat16", 16), ("F16", "float16", 16), ("U16", "uint16", 16), ("I16", "int16", 16),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz", 8), ("F8_E4M3FNUZ", "float8_e4m3fnuz", 8), ("F8_E8M0", "float8_e8m0fnu", 8),
    ("F8_E4M3", "float8_e4m3fn", 8), ("F8_E5M2", "float8_e5m2", 8), ("I8", "int8", 8), ("U8", "uint8", 8),
    ("F6_E3M2", "", 6), ("F6_E2M3", "", 6), ("F4", "float4_e2m1fn_x2", 4), ("BOOL", "bool", 8),
)  # fmt: skip
"""Name in the file, name in torch (empty if torch has none), bits per element; in the order of tensors in a file."""
_BITS = {name: bits for name, _, bits in _DTYPES}
_FROM_FILE: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own, _ in _DTYPES if hasattr(torch, own)}
_TO_FILE = {dtype: name for name, dtype in _FROM_FILE.items()}
_RANK = {name: rank for rank, (name, _, _) in enumerate(_DTYPES)}
_COPIED = (
    f"another tool has written it, and copied {CHECKSUM_KEY!r} in its metadata from a file of Fastensor's, whose "
    f"checksums these are"
)
_CHECKSUMS = re.compile(r"[0-9a-f]{8}(?: [0-9a-f]{8})*")


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
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


@dataclass(frozen=True, slots=True)
class SafetensorsPlan(Plan):
    """A planned file: see :func:`plan`."""

    header: bytes
    blanks: int | None
    """Offset of the text of the checksums in the header; None if the header has none."""

    @property
    def checksums_first(self) -> bool:
        return self.blanks is not None

    def head(self, checksums: Sequence[int]) -> bytes:
        if self.blanks is None:
            return b""
        head = bytearray(self.header)
        own = self.blanks + len(_BLANK)
        tensors = "".join(f" {crc32:08x}" for crc32 in checksums).encode()
        if head[own + len(tensors) : own + len(tensors) + 1] != b'"':  # the text ends elsewhere
            raise BackendUnavailableError(
                f"the backend has returned {len(checksums)} CRC32s, expected one for each tensor: it cannot write "
                "files that keep CRC32s in their head; choose another backend, or checksums=False"
            )
        head[own : own + len(tensors)] = tensors
        head[self.blanks : own] = b"%08x" % zlib.crc32(head)
        return bytes(head)


def plan(tensors: Any, *, metadata: Mapping[str, str] | None, checksums: bool) -> SafetensorsPlan:
    """Lay out the file that ``safetensors.torch.save_file(tensors, ..., metadata)`` would write.

    Args:
        tensors: a dict from names to dense, contiguous tensors that share no memory. They are borrowed.
        metadata: texts for the ``__metadata__`` of the file.
        checksums: whether the metadata are to hold CRC32s of all tensors and of the header. Then they also name a
            format: that of torch, if ``metadata`` name none.

    Raises:
        UnsupportedContentError: the container cannot hold these tensors; the message says why and what to do.
    """
    checked = _checked_tensors(tensors)
    texts = _checked_metadata(metadata)
    order = sorted(checked, key=lambda name: (_RANK[_TO_FILE[checked[name].dtype]], name.encode()))
    if checksums:
        texts = {**with_format(texts or {}), CHECKSUM_KEY: " ".join([_BLANK] * (len(order) + 1))}
    header, begins = _header(order, checked, texts, is_ours=checksums)
    segments: list[Segment] = [Header(0, header)]
    for index, name in enumerate(order):
        if nbytes := checked[name].nbytes:
            before = int(checked[name].storage_offset()) * checked[name].itemsize
            behind = int(checked[name].untyped_storage().nbytes()) - before - nbytes
            segments.append(Payload(begins[index], nbytes, index, before=before, behind=behind))
    found = _ENTRY.search(header) if checksums else None
    storages = tuple(checked[name].untyped_storage() for name in order)
    return SafetensorsPlan(Image(segments), storages, header, found.end() if found else None)


def _header(
    order: Sequence[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None, *, is_ours: bool
) -> tuple[bytes, list[int]]:
    """The header of the file, and where each tensor begins."""
    content: dict[str, Any] = {} if metadata is None else {METADATA_KEY: metadata}
    begins = []
    at = 0
    for name in order:
        tensor = tensors[name]
        dtype = _TO_FILE[tensor.dtype]
        begins.append(at)
        at += tensor.nbytes
        content[name] = {"dtype": dtype, "shape": _shape_in_file(tensor), "data_offsets": [begins[-1], at]}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    if is_ours:
        text = _ENTRY.sub(lambda entry: entry[0][:-1] + _MARK + entry[0][-1:], text, count=1)
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_NBYTES:
        raise UnsupportedContentError(
            f"the header would take {len(text)} bytes, but readers of safetensors accept {MAX_HEADER_NBYTES}: "
            f"save fewer tensors per file, or a .ckpt"
        )
    header = struct.pack("<Q", len(text)) + text
    return header, [len(header) + begin for begin in begins]


def _shape_in_file(tensor: torch.Tensor) -> list[int]:
    shape = list(tensor.shape)
    if _TO_FILE[tensor.dtype] == "F4":
        shape[-1] *= 2
    return shape


def _checked_tensors(tensors: Any) -> dict[str, torch.Tensor]:
    """The tensors, if the container can hold them."""
    if sys.byteorder != "little":
        raise UnsupportedContentError("safetensors files are little endian, this machine is not: save a .ckpt")
    if not isinstance(tensors, dict):
        raise UnsupportedContentError(
            f"a .safetensors file holds a dict from names to tensors, found {type(tensors).__name__}: save it as "
            f".ckpt, which holds any object"
        )
    for name, tensor in tensors.items():
        if reason := _reason_to_refuse(name, tensor):
            raise UnsupportedContentError(f"a .safetensors file cannot hold {name!r}: {reason}")
    if shared := _find_shared(tensors):
        raise UnsupportedContentError(
            f"tensors share memory, which a .safetensors file cannot express: {shared}. Leave all but one of each "
            f"group out (and tie them again after loading), .clone() them to store each by itself, or save a .ckpt, "
            f"which keeps ties"
        )
    return tensors


def _reason_to_refuse(name: object, tensor: object) -> str:
    """Reason for which a tensor cannot be stored, and what to do; empty if it can."""
    if not isinstance(name, str):
        return f"its name is of type {type(name).__name__}, expected str"
    if name == METADATA_KEY:
        return "the format keeps that name for itself; use another one"
    if not _is_text(name):
        return "its name holds a lone surrogate, which UTF-8 does not have; use another one"
    if not isinstance(tensor, torch.Tensor):
        return f"it is of type {type(tensor).__name__}, expected a tensor; save a .ckpt, or put texts into metadata"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "it is not dense; store .to_dense(), or its parts, or save a .ckpt"
    if tensor.is_quantized or tensor.dtype not in _TO_FILE:
        return f"the format has no {tensor.dtype}; convert it (complex128: torch.view_as_real), or save a .ckpt"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no values"
    if _TO_FILE[tensor.dtype] == "F4" and not tensor.dim():
        return "the format has no single packed pair of 4-bit floats; store .reshape(1)"
    if not is_shape(tensor.shape):
        return "no reader takes so large a shape, though it has no elements"
    if not tensor.is_contiguous():
        return "it is not contiguous; store .contiguous(), or save a .ckpt, which keeps strides"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a lazy conjugate or negative; store .resolve_conj().resolve_neg()"
    if tensor.nbytes and not has_own_memory(tensor):
        return f"a {type(tensor).__name__} has no memory of its own; store its local or full tensor, or save a .ckpt"
    return ""


def has_own_memory(tensor: torch.Tensor) -> bool:
    """True if the tensor's bytes are in its storage. Wrapper subclasses such as DTensor have none."""
    try:
        address = tensor.untyped_storage().data_ptr()
        return address != 0 and tensor.data_ptr() == address + tensor.storage_offset() * tensor.itemsize
    except (RuntimeError, NotImplementedError):
        return False


def _find_shared(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Groups of names whose tensors overlap in memory."""
    areas = {
        name: Area(str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        for name, tensor in tensors.items()
        if tensor.nbytes
    }
    return [sorted(group) for group in overlapping(areas)]


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str] | None:
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise UnsupportedContentError(f"metadata maps str to str, found {type(metadata).__name__}")
    for key, value in metadata.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise UnsupportedContentError(
                f"metadata of a .safetensors file maps str to str, found {key!r}: {value!r}; json.dumps makes texts"
            )
        if not (_is_text(key) and _is_text(value)):
            raise UnsupportedContentError(f"metadata {key!r} holds a lone surrogate, which UTF-8 does not have")
    return {key: value for key, value in metadata.items() if key != CHECKSUM_KEY}  # of another file


def with_format(metadata: Mapping[str, str]) -> Mapping[str, str]:
    """The metadata, which name the format of torch if they name none.

    >>> with_format({"step": "3"}), with_format({"step": "3", "format": "np"})
    ({'format': 'pt', 'step': '3'}, {'step': '3', 'format': 'np'})
    """
    return metadata if metadata.keys() >= OF_TORCH.keys() else {**OF_TORCH, **metadata}


def beyond_format(metadata: Mapping[str, str]) -> dict[str, str]:
    """Metadata beside the entry that tensors are torch's, which every file with checksums has."""
    return {name: text for name, text in metadata.items() if (name, text) not in OF_TORCH.items()}


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def torch_dtype(tensor: Part, where: str) -> torch.dtype:
    """The torch dtype of a tensor.

    Raises:
        UnsupportedContentError: this torch does not have it.
    """
    try:
        return _FROM_FILE[tensor.dtype]
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
    for name in result:
        if not name.isascii() and not _is_text(name):
            raise ValueError("a name holds a lone surrogate")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _parse_metadata(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) and _is_text(text) for text in value.values()):
        raise CorruptCheckpointError(f"{where}: {METADATA_KEY} in the header maps something else than texts to texts")
    return dict(value)


def _parse_checksums(text: str, tensors: int, data: bytes, where: str) -> list[int] | None:
    """The CRC32 of each tensor, in the order of the header; None if another tool has copied them from another file.

    They are this file's if the header's own matches. If it does not, the header is damaged if it is one of ours.
    """
    entry = _ENTRY.search(data)
    is_ours = entry is not None and entry[1] == _MARK
    is_complete = _CHECKSUMS.fullmatch(text) and len(text) == 9 * (tensors + 1) - 1
    own = entry.end() if entry else len(data)
    found = zlib.crc32(b"".join((data[:own], _BLANK.encode(), data[own + len(_BLANK) :])))
    if is_complete and found == int(text[: len(_BLANK)], 16):  # as in files that an older Fastensor wrote unmarked
        return [int(word, 16) for word in text.split(" ")[1:]]
    if not is_ours:
        return None
    if not is_complete:
        raise CorruptCheckpointError(
            f"{where}: {CHECKSUM_KEY!r} in the header at offset {LENGTH_NBYTES} does not hold {tensors + 1} CRC32s: "
            f"the file was damaged after it was written. Load an older checkpoint, or pass verify=False to load it "
            f"unverified"
        )
    raise CorruptCheckpointError(
        f"{where}: the header ({len(data)} bytes at offset 0) has CRC32 {found:08x}, expected {text[: len(_BLANK)]}: "
        f"the file was damaged after it was written. Load an older checkpoint, or pass verify=False to load it "
        f"unverified"
    )


def _parse_tensor(name: str, value: Any, crc32: int | None, base: int, where: str) -> Part:
    here = f"{where}: tensor {name!r} in the header"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CorruptCheckpointError(
            f"{here} is described by {_shortened(value)}, expected dtype, shape and data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CorruptCheckpointError(f"{here} has dtype {_shortened(dtype)}, which the format does not have")
    if not _are_sizes(shape) or not is_shape(shape):
        raise CorruptCheckpointError(f"{here} has shape {_shortened(shape)}, which no tensor has")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptCheckpointError(f"{here} has data_offsets {_shortened(offsets)}, expected [begin, end]")
    bits = math.prod(shape) * _BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise CorruptCheckpointError(
            f"{here}: {dtype} of shape {list(shape)} takes {bits / 8:g} bytes, but its data_offsets {offsets} have "
            f"room for {offsets[1] - offsets[0]}"
        )
    if dtype == "F4":
        if not shape or shape[-1] % 2:
            raise CorruptCheckpointError(f"{here} has shape {list(shape)}; the last size of F4 is even")
        shape = [*shape[:-1], shape[-1] // 2]
    begin, end = offsets
    return Part(name, end - begin, crc32, base + begin, base + end, 0, dtype, tuple(shape))


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
