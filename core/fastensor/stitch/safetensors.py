"""Planning a safetensors file. A planned file is byte for byte what ``safetensors.torch.save_file`` writes; see
``safetensors_header.py`` for what stands in it."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastensor.errors import BackendUnavailableError, UnsupportedContentError
from fastensor.stitch.areas import Area, overlapping
from fastensor.stitch.image import Header, Image, Payload, Segment
from fastensor.stitch.safetensors_header import (
    BLANK,
    CHECKSUM_KEY,
    DTYPES,
    ENTRY,
    FROM_FILE,
    MARK,
    METADATA_KEY,
    is_unicode,
)
from fastensor.stitch.shape import is_shape
from fastensor.stitch.signatures import LENGTH_NBYTES, MAX_HEADER_NBYTES
from fastensor.stitch.source import Plan

OF_TORCH = {"format": "pt"}
"""The metadata by which other libraries know that the tensors are torch's. Accelerate, huggingface_hub and transformers
before 5 take a file without metadata, and refuse one whose metadata name no format."""
_ALIGNMENT = 8
_PAGE_NBYTES = 4096
_PADDING_LIMIT = 0.01
_TO_FILE = {dtype: name for name, dtype in FROM_FILE.items()}
_RANK = {name: rank for rank, (name, _, _) in enumerate(DTYPES)}


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
        own = self.blanks + len(BLANK)
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
        texts = {**with_format(texts or {}), CHECKSUM_KEY: " ".join([BLANK] * (len(order) + 1))}
    header, begins = _header(order, checked, texts, is_ours=checksums)
    segments: list[Segment] = [Header(0, header)]
    for index, name in enumerate(order):
        if nbytes := checked[name].nbytes:
            before = int(checked[name].storage_offset()) * checked[name].itemsize
            behind = int(checked[name].untyped_storage().nbytes()) - before - nbytes
            segments.append(Payload(begins[index], nbytes, index, before=before, behind=behind))
    found = ENTRY.search(header) if checksums else None
    storages = tuple(checked[name].untyped_storage() for name in order)
    blanks = found.end() if found else None
    return SafetensorsPlan(Image(segments), storages, header, blanks, tensors=tuple(checked.values()))


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
        text = ENTRY.sub(lambda entry: entry[0][:-1] + MARK + entry[0][-1:], text, count=1)
    alignment = _PAGE_NBYTES if is_ours and _PADDING_LIMIT * at > _PAGE_NBYTES else _ALIGNMENT
    text += b" " * (-(LENGTH_NBYTES + len(text)) % alignment)
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
    if not is_unicode(name):
        return "its name holds a lone surrogate, which UTF-8 does not have; use another one"
    if not isinstance(tensor, torch.Tensor):
        return f"it is of type {type(tensor).__name__}, expected a tensor; save a .ckpt, or put texts into metadata"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "it is not dense; store .to_dense(), or its parts, or save a .ckpt"
    if tensor.is_quantized or tensor.dtype not in _TO_FILE:
        return f"the format has no {tensor.dtype}; convert it (complex128: torch.view_as_real), or save a .ckpt"
    if tensor.is_meta:
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
        if not (is_unicode(key) and is_unicode(value)):
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
