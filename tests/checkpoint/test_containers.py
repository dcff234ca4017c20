"""A container is a door: with one module and one line, everything that reads checkpoints reads its files."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fastensor
from fastensor.checkpoint import containers
from fastensor.checkpoint.containers import ToCompare
from fastensor.checkpoint.reading.opened import OpenedFile, read_exactly
from fastensor.checkpoint.reading.reader import open_reader
from fastensor.checkpoint.reading.request import Loaded, LoadRequest
from fastensor.checkpoint.tools.catalog import Catalog, Located, TensorInfo
from fastensor.stitch.parts import Part

MAGIC = b"one tensor\n"
HEAD = struct.Struct(f"<{len(MAGIC)}sI")
"""What a file begins with: the magic bytes, and the CRC32 of the floats of 32 bits behind them."""


def part_of(file: OpenedFile) -> Part:
    _, crc32 = HEAD.unpack(read_exactly(file, 0, HEAD.size))
    return Part("values", file.nbytes - HEAD.size, crc32, HEAD.size, file.nbytes)


def load(file: OpenedFile, request: LoadRequest) -> Loaded:
    part = part_of(file)
    with open_reader(file, [part], request) as reader:
        values = torch.from_numpy(reader.read_array(part)).view(torch.float32)
        return Loaded({"values": values}, reader.backend, reader.reason, request.checked)


def read_catalog(file: OpenedFile, *, verify: bool) -> Catalog:
    part = part_of(file)
    info = TensorInfo("values", "Tensor", torch.float32, (part.nbytes // 4,), "values", part.crc32)
    located = {"values": Located(info, part, 0, (1,))}
    of_structure = {id(one): one for one in located.values()}
    infos = {"values": info}
    return Catalog("toy", infos, located, {}, {}, True, structure=located, by_identity=of_structure, is_flat=True)  # type: ignore[arg-type]  # registered by the fixture


def to_compare(file: OpenedFile) -> ToCompare:
    return ToCompare([part_of(file)])


def foreign_code(file: OpenedFile) -> tuple[str, ...]:
    return ()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a container that is registered for the test."""
    module = ModuleType("toy_file")
    vars(module).update({one.__name__: one for one in (load, read_catalog, to_compare, foreign_code)})
    monkeypatch.setitem(sys.modules, f"{containers.__name__}.toy_file", module)
    line = containers.RegisteredContainer("toy_file", lambda start, nbytes: start.startswith(MAGIC))
    monkeypatch.setitem(containers.REGISTERED, "toy", line)  # type: ignore[arg-type]  # as above
    data = torch.arange(1000.0).numpy().tobytes()
    (tmp_path / "x.toy").write_bytes(HEAD.pack(MAGIC, zlib.crc32(data)) + data)
    return tmp_path / "x.toy"


def test_one_module_and_one_line_are_enough(toy: Path, tmp_path: Path) -> None:
    expected = torch.arange(1000.0)
    assert torch.equal(fastensor.load(toy)["values"], expected)
    target = {"values": torch.zeros(1000)}
    assert torch.equal(fastensor.load(toy, into=target)["values"], expected)
    with fastensor.open(toy) as checkpoint:
        assert torch.equal(checkpoint["values", 10:20], expected[10:20])
    report = fastensor.verify(toy)
    assert (report.container, report.complete, report.compared_bytes) == ("toy", True, 4000)
    assert [str(one) for one in fastensor.inspect(toy).tensors] == ["values: float32 (1000,), 3.91 KiB"]
    for name in ("x.ckpt", "x.safetensors"):
        fastensor.convert(toy, tmp_path / name)
        assert fastensor.diff(toy, tmp_path / name).is_empty


def test_its_files_in_folders_and_their_damage(toy: Path, tmp_path: Path) -> None:
    fastensor.save({"w": torch.ones(3)}, tmp_path / "y.ckpt")
    assert {one.container for one in fastensor.inspect(tmp_path).files.values()} == {"toy", "torch"}
    data = bytearray(toy.read_bytes())
    data[100] ^= 1
    toy.write_bytes(data)
    with pytest.raises(fastensor.DamagedCheckpointError, match=r"x\.toy: tensor 'values'"):
        fastensor.verify(tmp_path)
    with pytest.raises(fastensor.CorruptCheckpointError, match="tensor 'values'"):
        fastensor.load(toy)
