"""Damaged files: an error that says what and where, never a wrong value, a crash or a hang."""

from __future__ import annotations

import random
import struct
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor import CorruptCheckpointError, FastensorError
from fastensor.backends import registry
from fastensor.stitch.zip_directory import parse_directory

STATE = {"w": torch.arange(300, dtype=torch.int32), "b": torch.ones(7), "name": "x" * 50}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "x"
    fastensor.save(STATE, path)
    return path.read_bytes()


def load_quietly(path: Path, backend: str = "auto") -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fastensor.load(path, backend=backend)


def assert_refused_or_equal(path: Path, where: object) -> bool:
    try:
        found = load_quietly(path)
    except FastensorError:
        return True
    except RuntimeError:  # torch's own complaint about what the archive holds
        return True
    assert isinstance(found, dict), where
    assert torch.equal(found["w"], STATE["w"]), where
    assert torch.equal(found["b"], STATE["b"]), where
    assert found["name"] == STATE["name"], where
    return False


@pytest.mark.parametrize("backend", registry.names())
def test_a_flipped_bit_in_the_payload_is_named(sound: bytes, tmp_path: Path, backend: str) -> None:
    at = sound.index(STATE["w"].numpy().tobytes()) + 100
    damaged = bytearray(sound)
    damaged[at] ^= 4
    (tmp_path / "x").write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match=r"/x: record 'archive/data/0' \(1200 bytes at offset \d+\)"):
        fastensor.load(tmp_path / "x", backend=backend)
    assert not torch.equal(fastensor.load(tmp_path / "x", verify=False, backend=backend)["w"], STATE["w"])


@pytest.mark.parametrize("count", [1500, pytest.param(None, marks=pytest.mark.torture)], ids=["sample", "all"])
def test_bits_flipped_anywhere_are_noticed_or_harmless(
    sound: bytes, tmp_path: Path, count: int | None, tally: Counter[str]
) -> None:
    rng = random.Random(0)
    refused = 0
    bits = rng.sample(range(8 * len(sound)), count or 8 * len(sound))
    for bit in bits:
        damaged = bytearray(sound)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "x").write_bytes(damaged)
        refused += assert_refused_or_equal(tmp_path / "x", bit)
        tally["bits flipped"] += 1
    assert refused > len(bits) / 2


def test_a_file_cut_off_anywhere_is_refused(sound: bytes, tmp_path: Path, tally: Counter[str]) -> None:
    for length in [0, 1, 3, 4, 30, 64, *range(100, len(sound), 97), len(sound) - 22, len(sound) - 1]:
        (tmp_path / "x").write_bytes(sound[:length])
        with pytest.raises(FastensorError):
            load_quietly(tmp_path / "x")
        tally["files cut off"] += 1


@given(data=st.binary(max_size=200))
def test_any_bytes_behind_a_zip_signature(
    tmp_path_factory: pytest.TempPathFactory, tally: Counter[str], data: bytes
) -> None:
    tally["files of random bytes"] += 1
    path = tmp_path_factory.mktemp("any") / "x"
    path.write_bytes(b"PK\x03\x04" + data)
    with pytest.raises(CorruptCheckpointError):
        load_quietly(path)


@given(data=st.binary(min_size=1, max_size=300))
def test_any_bytes_at_all(tmp_path_factory: pytest.TempPathFactory, tally: Counter[str], data: bytes) -> None:
    tally["files of random bytes"] += 1
    path = tmp_path_factory.mktemp("any") / "x"
    path.write_bytes(data)
    with pytest.raises((FastensorError, RuntimeError)):
        load_quietly(path)


def test_zips_that_are_no_checkpoints(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises((FastensorError, RuntimeError)):
        load_quietly(tmp_path / "x")


def entry_of(sound: bytes, name: bytes) -> int:
    return sound.rindex(name) - 46


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (20, 1 << 31, "not compressed"),
        (24, 1 << 31, "not compressed"),
        (42, 1 << 31, "past the directory"),
        (42, 0, "overlap"),
        (42, 0xFFFFFFFF, "zip64 field"),
        (28, 60000, "cut off"),
    ],
)
def test_lies_in_the_directory(sound: bytes, tmp_path: Path, field: int, value: int, message: str) -> None:
    damaged = bytearray(sound)
    struct.pack_into("<H" if field == 28 else "<L", damaged, entry_of(sound, b"archive/data/0") + field, value)
    (tmp_path / "x").write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match=message):
        fastensor.load(tmp_path / "x")


def test_two_records_of_one_name(sound: bytes, tmp_path: Path) -> None:
    damaged = bytearray(sound)
    at = damaged.rindex(b"archive/data/1")
    damaged[at + 13 : at + 14] = b"0"
    (tmp_path / "x").write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError, match="two records"):
        fastensor.load(tmp_path / "x")


def test_an_absurd_number_of_entries_allocates_nothing() -> None:
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65000, 65000, 0xFFFFFF, 0, 0)
    with pytest.raises(CorruptCheckpointError, match="65000 entries"):
        parse_directory(lambda at, n: end[at : at + n], len(end), where="x")
