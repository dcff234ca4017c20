"""Damaged and lying zip archives: an error that says what and where, never a wrong value, a crash or a hang."""

from __future__ import annotations

import copy
import gc
import os
import random
import re
import struct
from collections import Counter
from pathlib import Path

import pytest
from hostile import archives, crafted
from hostile.attacks import (
    BY_BACKEND,
    ENTRY_POINTS,
    EVERY,
    PLAIN,
    REFUSED,
    STATE,
    Reading,
    withstand,
)
from hostile.crafted import fields_of, flipped

import fastensor
from fastensor import CorruptCheckpointError, FastensorError
from fastensor.backends.registry import available_names
from fastensor.checkpoint.reading.checked_file import CheckedFile
from fastensor.checkpoint.reading.reader import PartReader
from fastensor.files import posix

pytestmark = pytest.mark.hostile

every_kind = pytest.mark.parametrize("kind", archives.SOUND)


# Bits.


def telling_bits(data: bytes) -> list[int]:
    """All bits but those of long padding."""
    padding = {at for run in re.finditer(rb"(?s)(.)\1{63,}", data) for at in range(run.start() + 32, run.end())}
    return [8 * at + bit for at in range(len(data)) if at not in padding for bit in range(8)]


def flip(
    data: bytes, bits: list[int], entry: str, path: Path, tally: Counter[str], *, may_be_unverified: bool = False
) -> int:
    """Attack with each bit flipped; returns how many were noticed."""
    path.write_bytes(data)
    sound = {entry: ENTRY_POINTS[entry](path)}
    noticed = 0
    for bit in bits:
        path.write_bytes(flipped(data, bit))
        try:
            noticed += withstand(entry, path, sound, may_be_unverified=may_be_unverified) is not None
        except Exception as error:
            raise AssertionError(f"bit {bit % 8} of byte {bit // 8}") from error
        tally["bits flipped"] += 1
    return noticed


@pytest.mark.parametrize("count", [100, pytest.param(300, marks=pytest.mark.torture)], ids=["sample", "many"])
@pytest.mark.parametrize("entry", [entry for entry in EVERY if entry != "load_mapped"])
@every_kind
def test_bits_flipped_anywhere_are_noticed_or_harmless(
    kind: str, entry: str, count: int, path: Path, tally: Counter[str]
) -> None:
    bits = random.Random(0).sample(telling_bits(archives.SOUND[kind]()), count)
    assert flip(archives.SOUND[kind](), bits, entry, path, tally) > len(bits) / 5


@pytest.mark.parametrize("entry", BY_BACKEND)
def test_bits_flipped_anywhere_whatever_the_backend(entry: str, path: Path, tally: Counter[str]) -> None:
    data = archives.SOUND["torch, aligned to 4096"]()
    assert flip(data, random.Random(1).sample(telling_bits(data), 200), entry, path, tally) > 40


@pytest.mark.parametrize(
    ("count", "step"), [(100, 31), pytest.param(400, 9, marks=pytest.mark.torture)], ids=["sample", "many"]
)
@pytest.mark.parametrize("entry", ["load", "load_keys", "verify"])
@pytest.mark.parametrize("kind", archives.BY_TORCH)
def test_bits_flipped_in_files_that_torch_reads_by_itself(
    kind: str, entry: str, count: int, step: int, path: Path, tally: Counter[str]
) -> None:
    data = archives.BY_TORCH[kind]()
    unchecked = kind == "before 1.6"
    bits = random.Random(0).sample(telling_bits(data), count)
    noticed = flip(data, bits, entry, path, tally, may_be_unverified=unchecked)
    assert noticed > len(bits) / 5 or unchecked
    for length in range(1, len(data), step):
        path.write_bytes(data[:length])
        refused = withstand(entry, path, {}, may_be_unverified=unchecked) is not None
        assert refused or (unchecked and entry == "verify"), length
        tally["files cut off"] += 1


@pytest.mark.torture
@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        *(("fastensor", entry) for entry in ("load", "load_mapped", "open", "verify", "convert")),
        *(("zip64", entry) for entry in ("load", "open")),
    ],
)
def test_every_bit_flipped(kind: str, entry: str, path: Path, tally: Counter[str]) -> None:
    bits = telling_bits(archives.SOUND[kind]())
    assert flip(archives.SOUND[kind](), bits, entry, path, tally) > len(bits) / 5


@pytest.mark.parametrize("backend", available_names())
@every_kind
def test_a_flipped_bit_in_a_tensor_is_named(kind: str, path: Path, backend: str) -> None:
    data = archives.SOUND[kind]()
    at = data.index(PLAIN["w"].numpy().tobytes())
    path.write_bytes(flipped(data, 8 * at + 2))
    named = rf"^{path}: record 'archive/data/0' \(48 bytes at offset {at}\) has CRC32 \w+, expected \w+: .*older"
    with pytest.raises(CorruptCheckpointError, match=named):
        fastensor.load(path, backend=backend)
    assert fastensor.load(path, verify=False, backend=backend)["plain"]["w"][0, 0] == 4


def test_what_is_refused_is_forgotten(path: Path) -> None:
    """torch's reader and our file hold each other, and Python's collector does not see into the former."""
    data = archives.SOUND["fastensor"]()
    path.write_bytes(flipped(data, 8 * data.index(PLAIN["w"].numpy().tobytes())))
    before = _files_in_memory()  # torch itself keeps the latest map_location whose load failed
    for weights_only in (True, False):  # rebuilt here, and by torch.load
        with pytest.raises(CorruptCheckpointError):
            fastensor.load(path, weights_only=weights_only)
    assert _files_in_memory() <= before


def _files_in_memory() -> int:
    gc.collect()
    return sum(isinstance(one, CheckedFile | PartReader) for one in gc.get_objects())


# Ends.


def boundaries(data: bytes) -> list[int]:
    """Where anything begins or ends in an archive, and one byte before and behind."""
    fields = fields_of(data).values()
    places = {place for at, code in fields for place in (at, at + struct.calcsize(f"<{code}"))}
    places |= {at for run in re.finditer(rb"(?s)(.)\1{15,}", data) for at in run.span()}
    near = {place + step for place in (0, *places, len(data)) for step in (-1, 0, 1)}
    return sorted(place for place in near if 0 <= place < len(data))


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.torture)], ids=["one entry", "every entry"]
)
@every_kind
def test_a_file_cut_off_at_any_boundary_is_refused(kind: str, every: bool, path: Path, tally: Counter[str]) -> None:
    """At each boundary by one entry point, which take turns, or by every one."""
    data = archives.SOUND[kind]()
    for number, length in enumerate(boundaries(data)):
        path.write_bytes(data[:length])
        for entry in EVERY if every else [EVERY[number % len(EVERY)]]:
            assert withstand(entry, path, {}) is not None, (entry, length)
        tally["files cut off"] += 1


@pytest.mark.parametrize("entry", [*(entry for entry in EVERY if entry != "load_mapped"), *BY_BACKEND])
def test_a_file_that_is_cut_off_while_it_is_read(
    entry: str, path: Path, monkeypatch: pytest.MonkeyPatch, tally: Counter[str]
) -> None:
    """Before each read of it."""
    data = archives.SOUND["fastensor"]()
    path.write_bytes(data)
    sound = {entry: ENTRY_POINTS[entry](path)}
    read_fully = posix.read_fully
    left = refused = cuts = 0

    def cut_first(fd: int, buffer: memoryview, offset: int, **options: int) -> int:
        nonlocal left
        left -= 1
        if not left:
            os.truncate(path, offset + buffer.nbytes // 2)
        return read_fully(fd, buffer, offset, **options)

    monkeypatch.setattr(posix, "read_fully", cut_first)
    while left <= 0:
        cuts += 1
        left = cuts
        path.write_bytes(data)
        error = withstand(entry, path, sound)
        if error is not None:
            assert re.search("cut off|ends before", str(error)), error
            refused += 1
        tally["files cut off"] += 1
    assert refused >= 3


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.torture)], ids=["sample", "all"])
@pytest.mark.parametrize("entry", ["load", "open", "verify"])
def test_a_save_over_an_older_one_that_stopped_anywhere(entry: str, step: int, path: Path, tally: Counter[str]) -> None:
    """As ``torch.save`` may leave it, with the beginning of the new file and the end of the old one."""
    state = copy.deepcopy(STATE)
    for tensor in state["plain"].values():
        tensor += 1
    old, new = archives.saved_by_fastensor(), crafted.saved_by_torch({**state, "epoch": 4})
    assert len(old) == len(new)
    readings = []
    for data in (old, new):
        path.write_bytes(data)
        readings.append(ENTRY_POINTS[entry](path))
    refused = 0
    lengths = boundaries(old)[len(entry) % step :: step]
    for length in lengths:
        path.write_bytes(new[:length] + old[length:])
        refused += withstand_either(entry, path, readings)
        tally["files torn"] += 1
    assert refused > len(lengths) / 3


def withstand_either(entry: str, path: Path, readings: list[Reading]) -> bool:
    """Whether it was refused; if not, it is one of these."""
    try:
        found = ENTRY_POINTS[entry](path)
    except FastensorError:
        return True
    assert found.verified
    assert found.picture in (REFUSED, *(reading.picture for reading in readings))
    return False
