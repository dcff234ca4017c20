"""Files that were written once and must be read, and written, the same for ever."""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fastensor

HERE = Path(__file__).parent / "golden"
TORCH_OF_GOLDEN_FILES = "2.13.0"


def state(name: str) -> Any:
    if name == "mixed":
        weight = torch.arange(24, dtype=torch.float32).reshape(4, 6)
        return {
            "weight": weight,
            "tied": weight,
            "view": weight[1:3, ::2],
            "bf16": torch.tensor([1.5, -2.0]).bfloat16(),
            "fp8": torch.tensor([0.5, 8.0]).to(torch.float8_e4m3fn),
            "scalar": torch.tensor(7),
            "empty": torch.empty(0, 3),
            "complex": torch.tensor([1 + 2j]),
            "step": 12345678901234567890,
            "nested": [{"lr": 1e-3}, ("a", None, True)],
        }
    return torch.arange(7, dtype=torch.int64)


@pytest.mark.parametrize("name", ["mixed", "tensor"])
def test_golden_files_load(name: str) -> None:
    loaded, report = fastensor.load_with_report(HERE / f"{name}.pt")
    assert report.verified
    expected = state(name)
    if name == "tensor":
        assert torch.equal(loaded, expected)
        return
    assert loaded.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert loaded[key].dtype == value.dtype
            assert loaded[key].tolist() == value.tolist()
        else:
            assert loaded[key] == value
    assert loaded["view"].untyped_storage().data_ptr() == loaded["weight"].untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["mixed", "tensor"])
@pytest.mark.parametrize("backend", ["direct", "numpy"])
def test_golden_files_are_written_byte_by_byte(tmp_path: Path, name: str, backend: str) -> None:
    if torch.__version__.partition("+")[0] != TORCH_OF_GOLDEN_FILES:
        pytest.skip(f"the golden files were written with torch {TORCH_OF_GOLDEN_FILES}, this is {torch.__version__}")
    fastensor.save(state(name), tmp_path / "x", backend=backend)
    assert (tmp_path / "x").read_bytes() == (HERE / f"{name}.pt").read_bytes()


def weights() -> dict[str, torch.Tensor]:
    return {name: one for name, one in state("mixed").items() if name in ("weight", "bf16", "fp8", "scalar", "empty")}


def test_a_golden_file_of_safetensors_loads() -> None:
    loaded, report = fastensor.load_with_report(HERE / "weights.safetensors")
    assert report.verified
    assert {name: (one.dtype, one.tolist()) for name, one in loaded.items()} == {
        name: (one.dtype, one.tolist()) for name, one in weights().items()
    }


@pytest.mark.parametrize("backend", ["direct", "numpy"])
def test_a_golden_file_of_safetensors_is_written_byte_by_byte(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "x.safetensors"
    fastensor.save(weights(), path, metadata={"step": "3"}, backend=backend)
    assert path.read_bytes() == (HERE / "weights.safetensors").read_bytes()


def test_the_layout_of_safetensors_is_that_of_format_md() -> None:
    """A reading of FORMAT.md with nothing but struct, json and zlib."""
    data = (HERE / "weights.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    base = 8 + length
    assert base % 8 == 0
    header = json.loads(data[8:base])
    metadata = header.pop("__metadata__")
    assert [*metadata] == ["format", "step", "fastensor.crc32"]
    assert (metadata["format"], metadata["step"]) == ("pt", "3")
    assert [*header] == ["scalar", "empty", "weight", "bf16", "fp8"], "larger dtypes first, then by name"
    own, *others = metadata["fastensor.crc32"].split(" ")
    at = data.index(b'"fastensor.crc32":  "') + len(b'"fastensor.crc32":  "')
    assert f"{zlib.crc32(data[:at] + b'00000000' + data[at + 8 : base]):08x}" == own
    end = 0
    for entry, crc32 in zip(header.values(), others, strict=True):
        begin, stop = entry["data_offsets"]
        assert begin == end
        assert f"{zlib.crc32(data[base + begin : base + stop]):08x}" == crc32
        end = stop
    assert base + end == len(data)


def test_the_layout_is_that_of_format_md() -> None:
    """A reading of FORMAT.md with nothing but struct."""
    data = (HERE / "tensor.pt").read_bytes()
    expected = ["data.pkl", ".format_version", ".storage_alignment", "byteorder", "data/0", "version"]
    expected = [f"archive/{name}" for name in [*expected, ".data/serialization_id"]]
    at, names = 0, []
    while data[at : at + 4] == b"PK\x03\x04":
        flags, method, crc, stored, size, n, m = struct.unpack_from("<2x2H4x3L2H", data, at + 4)
        assert (flags, method, crc, stored, size) == (0x0808, 0, 0, 0, 0)
        name = data[at + 30 : at + 30 + n].decode()
        begin = at + 30 + n + m
        assert begin % 64 == 0
        assert data[at + 30 + n :][:2] == b"FB"
        with zipfile.ZipFile(HERE / "tensor.pt") as archive:
            info = archive.getinfo(name)
        end = begin + info.file_size
        assert struct.unpack_from("<4s3L", data, end) == (b"PK\x07\x08", info.CRC, info.file_size, info.file_size)
        if name == "archive/data/0":
            assert data[begin:end] == struct.pack("<7q", *range(7))
        names.append(name)
        at = end + 16
    assert names == expected
    assert data[at : at + 4] == b"PK\x01\x02"
    assert data[-22:-18] == b"PK\x05\x06"
