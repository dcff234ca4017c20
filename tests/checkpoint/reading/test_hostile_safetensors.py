"""safetensors files that are damaged or lie, and what the reference says about them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from hostile.attacks import COMPARING, ENTRY_POINTS, EVERY, PLAIN, Defect, attacks_with, withstand
from hostile.crafted import flipped, safetensors_file
from hostile.headers import (
    EMPTY,
    IN_AN_ENTRY,
    IN_THE_CHECKSUMS,
    IN_THE_JSON,
    IN_THE_LENGTH,
    IN_THE_PLACES,
    KEY,
    SOUND,
    A,
)
from hostile.isolated import Laboratory, Limits

import fastensor
from fastensor import CorruptCheckpointError
from fastensor.backends.registry import available_names
from fastensor.stitch.signatures import SAFETENSORS_SUFFIX

pytestmark = pytest.mark.hostile


@pytest.fixture
def suffix() -> str:
    return SAFETENSORS_SUFFIX


@attacks_with([*IN_THE_LENGTH, *IN_THE_JSON, *IN_AN_ENTRY, *IN_THE_PLACES])
def test_wrong_headers(defect: Defect, entry: str, path: Path) -> None:
    defect.assert_withstood(entry, path, SOUND)


@attacks_with(IN_THE_CHECKSUMS)
def test_wrong_checksums(defect: Defect, entry: str, path: Path) -> None:
    defect.assert_withstood(entry, path, SOUND)


BOMBS = {
    "a duplicate behind 40,000 names": "{" + "".join(f'"{i}":0,' for i in range(40_000)) + '"z":0,"z":0}',
    "40,000 sizes": json.dumps({"a": {**A, "shape": [(1 << 63) - 1] * 40_000}}),
    "40,000 sizes of one": json.dumps({"a": {**A, "shape": [1] * 40_000}}),
    "300,000 lists": json.dumps({"a": {**A, "shape": [[]] * 300_000}}),
    "300,000 names": "{" + ",".join(f'"{i}":0' for i in range(300_000)) + "}",
    "a million zeros": '{"a":' + "0" * 1_000_000,
    "a million digits": '{"a":' + "1" * 1_000_000,
    "a million backslashes": '{"a":"' + "\\" * 1_000_000 + '"}',
    "many tensors, all empty": json.dumps({str(i): {**EMPTY, "shape": [0]} for i in range(20_000)}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_large_headers_take_little_time_and_memory(name: str, isolated: Laboratory, path: Path) -> None:
    sound = path.with_name("sound.safetensors")
    path.write_bytes(safetensors_file(BOMBS[name].encode(), b"x"))
    sound.write_bytes(SOUND)
    outcome = isolated.attack(["inspect"], path, sound, Limits(10))["inspect"]
    assert not outcome.broken
    assert not outcome.refused or str(path) in outcome.refused
    assert outcome.grown_nbytes < (32 << 20) + 100 * path.stat().st_size


def flip(bits: Iterable[int], path: Path, tally: Counter[str], *, may_be_unverified: bool = False) -> Counter[str]:
    """Attack with each bit flipped; returns how many were noticed, by entry point."""
    path.write_bytes(SOUND)
    entries = (*COMPARING, "inspect")
    sound = {entry: ENTRY_POINTS[entry](path) for entry in entries}
    noticed: Counter[str] = Counter()
    for bit in bits:
        path.write_bytes(flipped(SOUND, bit))
        for entry in entries:
            noticed[entry] += withstand(entry, path, sound, may_be_unverified=may_be_unverified) is not None
        tally["bits flipped"] += 1
    return noticed


@pytest.mark.parametrize("count", [300, pytest.param(None, marks=pytest.mark.torture)], ids=["sample", "all"])
def test_bits_flipped_anywhere_are_noticed(count: int | None, path: Path, tally: Counter[str]) -> None:
    """All of them, but for those in the name of our entry, without which a file has no checksums, and is said to."""
    bits = random.Random(0).sample(range(8 * len(SOUND)), count or 8 * len(SOUND))
    in_our_name = range(8 * SOUND.index(KEY.encode()), 8 * (SOUND.index(KEY.encode()) + len(KEY)))
    noticed = flip([bit for bit in bits if bit not in in_our_name], path, tally)
    certain = sum(bit not in in_our_name for bit in bits)
    assert noticed["load"] == noticed["verify"] == certain
    flip([bit for bit in bits if bit in in_our_name], path, tally, may_be_unverified=True)


@pytest.mark.parametrize("backend", available_names())
def test_a_flipped_bit_in_a_tensor_is_named(path: Path, backend: str) -> None:
    at = SOUND.index(PLAIN["w"].numpy().tobytes())
    path.write_bytes(flipped(SOUND, 8 * at + 2))
    with pytest.raises(CorruptCheckpointError, match=rf"^{path}: tensor 'w' \(48 bytes at offset {at}\) has CRC32 "):
        fastensor.load(path, backend=backend)
    assert fastensor.load(path, verify=False, backend=backend)["w"][0, 0] == 4


def test_a_file_cut_off_anywhere_is_refused(path: Path, tally: Counter[str]) -> None:
    for length in range(len(SOUND)):
        path.write_bytes(SOUND[:length])
        for entry in EVERY:
            assert withstand(entry, path, {}) is not None, (entry, length)
        tally["files cut off"] += 1
