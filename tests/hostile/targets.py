"""What is fuzzed: one target for each of our parsers, and one for the entry points; and what to begin with.

A target takes any bytes. Anything but an error of ours is a finding.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import warnings
from collections.abc import Callable

import torch
from hostile import archives, crafted, headers
from hostile.attacks import STATE, in_one_step

import fastensor
from fastensor.checkpoint.containers import recognize
from fastensor.checkpoint.models.names import walk
from fastensor.errors import FastensorError
from fastensor.stitch import parts, pickle_records, safetensors_header, torch_pickle, torch_records, zip_directory

_MOST_VALUES = 10_000


def directory(data: bytes) -> None:
    """Zip archives: their directory, and the local headers of their records."""

    def read(offset: int, nbytes: int) -> bytes:
        assert min(offset, nbytes) >= 0
        assert offset + nbytes <= len(data), "the parser reads, and allocates, beyond the file"
        return data[offset : offset + nbytes]

    with contextlib.suppress(FastensorError):
        for part in zip_directory.parse_directory(read, len(data), where="x").parts:
            assert part.begin + part.header_nbytes <= part.end <= len(data)
    with contextlib.suppress(FastensorError):
        archive = torch_records.read_archive(read, len(data), where="x")
        if archive.compressed:
            return  # its local headers are not read
        for part in archive.parts:
            begin = parts.find_data(part, read(part.begin, parts.LOCAL_HEADER.size), "x")
            assert begin + part.nbytes <= part.end <= len(data)


def header(data: bytes) -> None:
    """safetensors files: their header, also behind a length that fits, which takes luck to find."""
    _read_header(data)
    _read_header(struct.pack("<Q", len(data[1:])) + data[1:] + bytes(data[0] if data else 0))


def _read_header(data: bytes) -> None:
    with contextlib.suppress(FastensorError):
        nbytes = safetensors_header.header_nbytes(data[:8], len(data), "x")
        assert nbytes <= len(data)
        parsed = safetensors_header.parse_header(data[:nbytes], len(data), where="x")
        assert sum(tensor.nbytes for tensor in parsed.tensors) == len(data) - nbytes
        for tensor in parsed.tensors:
            safetensors_header.torch_dtype(tensor, "x")
            assert nbytes <= tensor.begin <= tensor.end <= len(data)


def structure(data: bytes) -> None:
    """Pickles: what they describe, its storages and names."""
    with contextlib.suppress(FastensorError):
        found = torch_pickle.read_program(data, where="x").structure
        list(pickle_records.storages_in(found))
        for number, _ in enumerate(walk(found)):
            if number > _MOST_VALUES:
                break


def container(data: bytes) -> None:
    """Which container a file is."""
    nbytes = int.from_bytes(data[:2], "little")
    assert recognize(data[2:], nbytes) in ("torch", "safetensors", "legacy", None)


def _load_in_one_step(file: io.BytesIO) -> None:
    with in_one_step():
        fastensor.load(file)


_LOADS = (fastensor.load, _load_in_one_step)


def entry_points(data: bytes) -> None:
    """Whole files of any container, through what users call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for read in (*_LOADS, fastensor.verify, _read_all):
            # A pickle may ask torch's own unpickler for a bytearray of any size, which is not ours to refuse.
            with contextlib.suppress(FastensorError, *((MemoryError,) if read in _LOADS else ())):
                read(io.BytesIO(data))


def inspection(data: bytes) -> None:
    """The same for ``inspect``."""
    with contextlib.suppress(FastensorError):
        found = fastensor.inspect(io.BytesIO(data))
        assert found.tensor_bytes >= 0


def _read_all(file: io.BytesIO) -> None:
    with fastensor.open(file) as checkpoint:
        for name in checkpoint:
            with contextlib.suppress(FastensorError):
                checkpoint[name]


PARSERS: tuple[Callable[[bytes], None], ...] = (directory, header, structure, container)


def parsers(data: bytes) -> None:
    """One of them, chosen by the first byte."""
    PARSERS[(data[0] if data else 0) % len(PARSERS)](data[1:])


TARGETS = {one.__name__: one for one in (*PARSERS, parsers, entry_points, inspection)}


def zip_archives() -> list[bytes]:
    sound = archives.SOUND["fastensor"]()
    records = archives.records_of(sound)
    zeros = {field: 0 for field in crafted.fields_of(sound) if field.endswith("].crc32")}
    return [
        *(make() for make in (archives.SOUND | archives.BY_TORCH).values()),
        crafted.lie(zeros)(sound),
        crafted.saved_by_torch({"plain": {"w": torch.arange(3)}}),
        crafted.archive(records, comment=b"comment"),
        crafted.archive_of_two_minds(records, {"archive/data/0": b"x"}),
        crafted.checkpoint(crafted.program(crafted.dict_of(w=crafted.tensor()))),
    ]


def safetensors_files() -> list[bytes]:
    unsorted = {
        "a": {"dtype": "F4", "shape": [1, 2], "data_offsets": [1, 2]},
        "b": {"dtype": "BOOL", "shape": [], "data_offsets": [0, 1]},
    }
    return [headers.SOUND, crafted.safetensors_file({}), crafted.safetensors_file(unsorted, b"\1\2")]


def pickles() -> list[bytes]:
    odd = {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 3, torch.qint8),
        "meta": torch.empty(3, device="meta"),
        "set": {1},
        "bytes": b"x",
        "size": torch.Size([1]),
        "dtype": torch.float8_e4m3fn,
    }
    found = [pickle.dumps([{1: b"x"}, (2.5, {"a"}), bytearray(b"y")], protocol) for protocol in range(6)]
    for state in (STATE, odd):
        found.append(archives.records_of(crafted.saved_by_torch(state))["archive/data.pkl"])
    return found


def files() -> list[bytes]:
    return [*zip_archives(), *safetensors_files()]


def beginnings() -> list[bytes]:
    return [struct.pack("<H8s", 500, b"x.ckpt") + b"PK\3\4     ", bytes(10) + b"\2\0\0\0\0\0\0\0{"]


def lengths_and_headers() -> list[bytes]:
    found = safetensors_files()
    return [*found, *(b"\2" + one[8:].rpartition(b"}")[0] + b"}" for one in found)]


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "directory": zip_archives,
    "header": lengths_and_headers,
    "structure": pickles,
    "container": beginnings,
    "parsers": lambda: [
        bytes([number]) + seed
        for number, seeds in enumerate((zip_archives, lengths_and_headers, pickles, beginnings))
        for seed in seeds()
    ],
    "entry_points": files,
    "inspection": files,
}
FOUND: dict[str, list[bytes]] = {
    "directory": [crafted.archive({})],
    "entry_points": [crafted.lie({"end.total": 0, "end.here": 0})(crafted.archive({"a": b"x"}))],
    "inspection": [crafted.saved_by_torch({"w": torch.arange(3)}, pickle_protocol=4)],
}
"""What found something once."""
WORDS = {
    "directory": [b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"archive/data/0", b"\xff" * 4],
    "header": [b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"fastensor.crc32"', b'"F4"', b"[0,1]"],
    "structure": [b"ctorch\nSize\n", b"ccollections\nOrderedDict\n", b"cbuiltins\nset\n", b"ca\nb\n", crafted.REBUILD],
}
"""What is hard to come upon by chance."""
