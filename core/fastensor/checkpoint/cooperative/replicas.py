"""Comparing the states of ranks, and the words for the first difference."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from isal import isal_zlib

from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.backends.staging import open_stager
from fastensor.checkpoint.cooperative.options import ReplicaCheck
from fastensor.checkpoint.models.names import walk
from fastensor.stitch.image import Image, Payload
from fastensor.stitch.pickle_records import PickledStorage, PickledTensor, UnknownObject, storages_in
from fastensor.stitch.safetensors import SafetensorsPlan
from fastensor.stitch.safetensors_header import CHECKSUM_KEY, METADATA_KEY
from fastensor.stitch.signatures import LENGTH_NBYTES
from fastensor.stitch.source import Plan
from fastensor.stitch.torch_pickle import read_program
from fastensor.stitch.torch_zip import TorchZip

_SAMPLE_NBYTES = 4096
_DEVICE_INDEX = re.compile(rb"X.\0\0\0cuda:\d+", re.DOTALL)
"""A device with its index, as a pickle of protocol 2 has it."""
_LONGEST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Replica:
    """Digest of a rank's state, which rank 0 compares."""

    structure: bytes
    """A digest. Equal ones mean equal structures. Different ones may mean different devices, or sets in other orders:
    then descriptions (:func:`describe`) are compared."""
    crc32s: tuple[int, ...]
    """The CRC32 of each storage, or of a part of it."""


@dataclass(frozen=True, slots=True)
class Tensors(Plan):
    """The storages of tensors, one behind the other: what ranks hold alike, if that is less than a whole state."""

    in_words: Sequence[str]
    """Each tensor in words."""


def storages_of(tensors: Iterable[torch.Tensor]) -> Tensors:
    """The storages of tensors, each once, in the order of the tensors."""
    numbers: dict[int, int] = {}
    storages: list[torch.UntypedStorage] = []
    payloads: list[Payload] = []
    words = []
    at = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        number = numbers.setdefault(storage._cdata, len(storages))
        if number == len(storages):
            storages.append(storage)
            payloads += [Payload(at, nbytes, number)] if nbytes else []
            at += nbytes
        words.append(
            f"{tensor.dtype} of shape {tuple(tensor.shape)}, strides {tensor.stride()} at {tensor.storage_offset()} in "
            f"storage {number}, which has {nbytes} bytes"
        )
    return Tensors(Image(payloads), tuple(storages), words)


def replica_of(plan: Plan, check: ReplicaCheck) -> Replica:
    """Digest of this rank's state, which rank 0 compares.

    Args:
        plan: the planned file.
        check: whether CRC32s are those of up to 4096 bytes from the middle of each storage, or of all bytes.
    """
    return Replica(hashlib.sha256(_structure(plan)).digest(), _crc32s(plan, check))


def _structure(plan: Plan) -> bytes:
    if isinstance(plan, SafetensorsPlan):
        return plan.header
    if isinstance(plan, Tensors):
        return "\n".join(plan.in_words).encode()
    assert isinstance(plan, TorchZip)
    sizes = [storage.nbytes() for storage in plan.storages]
    return _DEVICE_INDEX.sub(b"cuda", plan.recording.data) + repr(sizes).encode()


def _crc32s(plan: Plan, check: ReplicaCheck) -> tuple[int, ...]:
    payloads = [segment for segment in plan.image.segments if isinstance(segment, Payload)]
    compared, at = [], 0
    for payload in payloads:
        nbytes = min(payload.nbytes, _SAMPLE_NBYTES) if check == "sample" else payload.nbytes
        skipped = (payload.nbytes - nbytes) // 2
        behind = payload.storage_nbytes - payload.before - skipped - nbytes
        compared.append(Payload(at, nbytes, payload.storage, payload.before + skipped, behind))
        at += nbytes
    with open_stager(Plan(Image(compared), plan.storages)) as stager:
        for offset in range(0, at, BUFFER_NBYTES):
            window = stager.begin(offset, min(BUFFER_NBYTES, at - offset))
            stager.finish(window)
            stager.release(window)
        return stager.checksums


def describe(plan: Plan) -> dict[str, str]:
    """All values of a state in words, by their names."""
    if isinstance(plan, Tensors):
        return {f"replicated tensor {number}": text for number, text in enumerate(plan.in_words)}
    if isinstance(plan, SafetensorsPlan):
        tensors, metadata = _header_of(plan)
        found = {f"metadata {key!r}": _shortened(text) for key, text in metadata.items()}
        return found | {name: f"{info['dtype']} of shape {tuple(info['shape'])}" for name, info in tensors.items()}
    return {name: _shortened(_in_words(value, ())) for name, value in _values(plan)}


def first_difference(own: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first value that two ranks describe differently, in the order of the first description.

    Returns:
        Its name, and both descriptions; None if nothing differs.
    """
    for name in (*own, *(name for name in other if name not in own)):
        one, two = own.get(name, "missing"), other.get(name, "missing")
        if one != two:
            return name, one, two
    return None


def name_of_storage(plan: Plan, storage: int) -> str:
    """The name of the first tensor in a storage."""
    if isinstance(plan, SafetensorsPlan):
        return list(_header_of(plan)[0])[storage]
    key = str(storage)
    return next(
        (name for name, value in _values(plan) if any(one.key == key for one in storages_in(value))), f"storage {key}"
    )


def _values(plan: Plan) -> Iterator[tuple[str, Any]]:
    assert isinstance(plan, TorchZip)
    return walk(read_program(plan.recording.data, where="the state").structure)


def _header_of(plan: SafetensorsPlan) -> tuple[dict[str, Any], dict[str, str]]:
    content = json.loads(plan.header[LENGTH_NBYTES:])
    metadata = content.pop(METADATA_KEY, {})
    metadata.pop(CHECKSUM_KEY, None)
    return content, metadata


def _in_words(value: Any, above: tuple[int, ...]) -> str:
    if id(value) in above:
        return "..."
    within = (*above, id(value))
    if isinstance(value, PickledTensor):
        parts = "".join(f", {_in_words(part, within)}" for part in value.parts)
        where = f" at {value.offset} in {_in_words(value.storage, within)}" if value.storage is not None else ""
        return f"{value.kind} of {value.dtype}, shape {value.shape}, strides {value.stride}{where}{parts}"
    if isinstance(value, PickledStorage):
        return f"storage {value.key} of {value.dtype}, {value.nbytes} bytes"
    if isinstance(value, UnknownObject):
        return f"<{value.name}>({', '.join(_in_words(part, within) for part in value.parts)})"
    if isinstance(value, dict):
        pairs = (f"{_in_words(key, within)}: {_in_words(one, within)}" for key, one in dict.items(value))
        return f"{type(value).__name__}({', '.join(pairs)})"
    if isinstance(value, list | tuple | set | frozenset):
        words = [_in_words(one, within) for one in value]
        ordered = sorted(words) if isinstance(value, set | frozenset) else words
        return f"{type(value).__name__}({', '.join(ordered)})"
    return repr(value)


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    crc32 = isal_zlib.crc32(text.encode(errors="replace"))
    return f"{text[:_LONGEST_TEXT]}... ({len(text)} characters with CRC32 {crc32:08x})"
