"""Coverage-guided fuzzing of our parsers with atheris (libFuzzer): one target for each, and one for the entry points.

``python tests/hostile/fuzz.py TARGET [options of libFuzzer] FOLDER`` runs until it finds something or has had enough.
Anything but an error of ours is a finding: it ends the process with the exception, and leaves the input in the folder.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import atheris
import torch

with atheris.instrument_imports(include=["fastensor.stitch"]):
    import fastensor.stitch.containers
    import fastensor.stitch.safetensors
    import fastensor.stitch.torch_pickle
    import fastensor.stitch.torch_records
    import fastensor.stitch.zip_directory

import fastensor
from fastensor.checkpoint.names import walk
from fastensor.errors import FastensorError
from fastensor.stitch import containers, safetensors, torch_pickle, torch_records, zip_directory

sys.path.insert(0, str(Path(__file__).parents[1]))
from hostile import crafted
from hostile.attacks import PLAIN, STATE

_MOST_VALUES = 10_000


def directory(data: bytes) -> None:
    """Zip archives: their directory, and the local headers of their records."""

    def read(offset: int, nbytes: int) -> bytes:
        assert min(offset, nbytes) >= 0
        assert offset + nbytes <= len(data), "the parser reads, and allocates, beyond the file"
        return data[offset : offset + nbytes]

    with contextlib.suppress(FastensorError):
        archive = zip_directory.parse_directory(read, len(data), where="x")
        if not archive.records:
            return  # whoever looks for a pickle refuses it
        checks = torch_records.Checks(archive, enabled=True)
        ends = torch_records.record_ends(archive)
        for record in archive.records:
            header = read(record.header_offset, zip_directory.LOCAL_HEADER.size)
            opened = checks.open_record(record.header_offset, memoryview(header), "x")
            assert opened is not None
            assert opened.begin + record.stored_nbytes <= ends[record.header_offset] <= len(data)


def header(data: bytes) -> None:
    """safetensors files: their header, also behind a length that fits, which takes luck to find."""
    _read_header(data)
    _read_header(struct.pack("<Q", len(data[1:])) + data[1:] + bytes(data[0] if data else 0))


def _read_header(data: bytes) -> None:
    with contextlib.suppress(FastensorError):
        nbytes = safetensors.header_nbytes(data[:8], len(data), "x")
        assert nbytes <= len(data)
        parsed = safetensors.parse_header(data[:nbytes], len(data), where="x")
        assert sum(entry.nbytes for entry in parsed.entries) == len(data) - nbytes
        for entry in parsed.entries:
            safetensors.torch_dtype(entry, "x")
            assert nbytes <= entry.begin <= entry.end <= len(data)


def structure(data: bytes) -> None:
    """Pickles: what they describe, its storages and names."""
    with contextlib.suppress(FastensorError):
        found = torch_pickle.read_structure(data, where="x")
        list(torch_pickle.storages_in(found))
        for number, _ in enumerate(walk(found)):
            if number > _MOST_VALUES:
                break


def container(data: bytes) -> None:
    """Which container a file is."""
    nbytes = int.from_bytes(data[:2], "little")
    name = data[2:10].decode(errors="replace")
    assert containers.recognize(data[10:19], nbytes, name) in ("torch", "safetensors", "legacy", None)


def entry_points(data: bytes) -> None:
    """Whole files of any container, through what users call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for read in (fastensor.load, fastensor.verify, _read_all):
            # A pickle may ask torch's own unpickler for a bytearray of any size, which is not ours to refuse.
            with contextlib.suppress(FastensorError, *((MemoryError,) if read is fastensor.load else ())):
                read(io.BytesIO(data))


def inspection(data: bytes) -> None:
    """The same for ``inspect``."""
    with contextlib.suppress(FastensorError):
        found = fastensor.inspect(io.BytesIO(data))
        assert found.tensor_nbytes >= 0


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


def archives() -> list[bytes]:
    small = {"plain": {"w": torch.arange(3)}}
    file = io.BytesIO()
    fastensor.save(STATE, file)
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    deflated = io.BytesIO()
    with zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\2}.")
    zeros = {field: 0 for field in crafted.fields_of(file.getvalue()) if field.endswith("].crc32")}
    return [
        file.getvalue(),
        crafted.lie(zeros)(file.getvalue()),
        deflated.getvalue(),
        crafted.saved_by_torch(small),
        crafted.archive64(records),
        crafted.archive(records, comment=b"comment"),
        crafted.archive_of_two_minds(records, {"archive/data/0": b"x"}),
        crafted.checkpoint(crafted.program(crafted.dict_of(w=crafted.tensor()))),
    ]


def safetensors_files() -> list[bytes]:
    file = io.BytesIO()
    fastensor.save(PLAIN, file, container="safetensors", metadata={"format": "pt"})
    unsorted = {
        "a": {"dtype": "F4", "shape": [1, 2], "data_offsets": [1, 2]},
        "b": {"dtype": "BOOL", "shape": [], "data_offsets": [0, 1]},
    }
    return [file.getvalue(), crafted.safetensors_file({}), crafted.safetensors_file(unsorted, b"\1\2")]


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
        with zipfile.ZipFile(io.BytesIO(crafted.saved_by_torch(state))) as archive:
            found.append(archive.read("archive/data.pkl"))
    return found


def files() -> list[bytes]:
    return [*archives(), *safetensors_files()]


def beginnings() -> list[bytes]:
    return [struct.pack("<H8s", 500, b"x.ckpt") + b"PK\3\4     ", bytes(10) + b"\2\0\0\0\0\0\0\0{"]


def headers() -> list[bytes]:
    found = safetensors_files()
    return [*found, *(b"\2" + one[8:].rpartition(b"}")[0] + b"}" for one in found)]


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "directory": archives,
    "header": headers,
    "structure": pickles,
    "container": beginnings,
    "parsers": lambda: [
        bytes([number]) + seed
        for number, seeds in enumerate((archives, headers, pickles, beginnings))
        for seed in seeds()
    ],
    "entry_points": files,
    "inspection": files,
}
TROUBLE: dict[str, list[bytes]] = {
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


def main() -> None:
    target, *options, folder = sys.argv[1:]
    corpus, words = Path(folder, "corpus"), Path(folder, "words")
    corpus.mkdir()
    for number, seed in enumerate([*SEEDS[target](), *TROUBLE.get(target, [])]):
        (corpus / f"seed_{number}").write_bytes(seed)
    quoted = ["".join(f"\\x{byte:02x}" for byte in word) for word in WORDS.get(target, [b"PK"])]
    words.write_text("".join(f'"{word}"\n' for word in quoted))
    logging.disable()
    places = (f"-dict={words}", f"-artifact_prefix={folder}/", str(corpus))
    atheris.Setup([sys.argv[0], *options, *places], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
