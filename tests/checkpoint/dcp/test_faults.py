"""System calls of a save fail, bits flip, files are mixed up: the old checkpoint or the new one; damage is named."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import fails_to_load, load, save, stamped, step_of, unstamped
from torch.distributed.checkpoint import FileSystemWriter

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.testing import failing_call, short_call

pytestmark = pytest.mark.crash

MOST_CALLS = 200


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, 0])
@pytest.mark.parametrize("options", [{}, {"sync_files": False, "thread_count": 2}])
def test_every_call_fails(tmp_path: Path, code: int, options: dict[str, Any], tally: Counter[str]) -> None:
    folder = tmp_path / "x"
    save(stamped(1), FastensorStorageWriter(folder))
    step = 1
    for number in range(1, MOST_CALLS):
        writer = FastensorStorageWriter(folder, **options)
        with short_call(number) if code == 0 else failing_call(number, code) as fault:
            try:
                save(stamped(step + 1), writer)
                raised = ""
            except dcp.api.CheckpointException as error:
                raised = str(error)
        if not fault.fired:
            break
        tally["faults injected"] += 1
        found = step_of(load(unstamped(), FastensorStorageReader(folder)))
        assert found in ({step, step + 1} if raised else {step + 1})
        assert "is in place" in raised or "no checkpoint needs it" in raised or not raised or found == step, raised
        step = found
        save(stamped(step), writer)  # removes what is left
        assert len(os.listdir(folder)) == 1 + options.get("thread_count", 1)
    else:
        raise AssertionError(f"a save makes more than {MOST_CALLS} calls")


@pytest.mark.parametrize("writer", [FastensorStorageWriter, FileSystemWriter])
def test_flipped_bits_are_found_and_named(tmp_path: Path, writer: Any, tally: Counter[str]) -> None:
    save(stamped(3), writer(tmp_path))
    (path,) = tmp_path.glob("*.distcp")
    flip_bits(path, 60, tally, named=writer is FastensorStorageWriter)


@pytest.mark.torture
def test_many_flipped_bits(tmp_path: Path, tally: Counter[str]) -> None:
    save(stamped(3), FastensorStorageWriter(tmp_path))
    (path,) = tmp_path.glob("*.distcp")
    flip_bits(path, 3000, tally, named=True)


def flip_bits(path: Path, times: int, tally: Counter[str], *, named: bool) -> None:
    sound = path.read_bytes()
    moments = random.Random(7)
    expected = load(unstamped(), FastensorStorageReader(path.parent))
    for _ in range(times):
        at = moments.randrange(len(sound))
        data = bytearray(sound)
        data[at] ^= 1 << moments.randrange(8)
        path.write_bytes(data)
        tally["bits flipped"] += 1
        found = unstamped()
        try:
            load(found, FastensorStorageReader(path.parent))
        except dcp.api.CheckpointException as error:
            assert path.name in str(error)
            assert "item '" in str(error)
        else:
            assert not named
            assert all(torch.equal(found[key], expected[key]) for key in ("large", "small"))
        if named:
            with pytest.raises(fastensor.DamagedCheckpointError, match="item '"):
                fastensor.verify(path.parent)
    path.write_bytes(sound)


def test_all_damage_is_listed(tmp_path: Path) -> None:
    """Files of torch's own writer have the checksums of each item's records, and none of items."""
    save({"a": torch.zeros(1000), "b": torch.zeros(1000), "c": torch.zeros(1000)}, FileSystemWriter(tmp_path))
    (path,) = tmp_path.glob("*.distcp")
    data = bytearray(path.read_bytes())
    for begin in (data.index(bytes(4000)), data.rindex(bytes(4000))):
        data[begin + 2000] ^= 1
    path.write_bytes(data)
    (tmp_path / "meta.pt").write_bytes(b"PK\3\4 cut off")
    with pytest.raises(fastensor.DamagedCheckpointError) as caught:
        fastensor.verify(tmp_path)
    assert len(caught.value.report.damage) == 2
    assert all(one.part.startswith(f"{path.name}: item '") for one in caught.value.report.damage)
    assert "no zip end-of-directory" in caught.value.__notes__[0]


def test_flipped_bits_in_metadata(tmp_path: Path, tally: Counter[str]) -> None:
    save(stamped(3), FastensorStorageWriter(tmp_path))
    path = tmp_path / ".metadata"
    sound = path.read_bytes()
    for at in range(0, len(sound), 7):
        data = bytearray(sound)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        tally["bits flipped"] += 1
        with pytest.raises(fastensor.CorruptCheckpointError, match="metadata"):
            fastensor.verify(tmp_path)


def test_damaged_metadata_are_not_run(tmp_path: Path) -> None:
    save({"name": torch.ones(3)}, FastensorStorageWriter(tmp_path))
    path = tmp_path / ".metadata"
    path.write_bytes(path.read_bytes().replace(b"name", b"came"))
    fails_to_load({"came": torch.zeros(3)}, FastensorStorageReader(tmp_path, weights_only=False), "has CRC32")


def test_damaged_values_on_request(tmp_path: Path) -> None:
    save({"x": torch.zeros(50_000)}, FastensorStorageWriter(tmp_path))
    (path,) = tmp_path.glob("*.distcp")
    with path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\1")
    with pytest.raises(dcp.api.CheckpointException, match="pass verify=False to get the damaged values"):
        load({"x": torch.zeros(50_000)}, FastensorStorageReader(tmp_path))
    found = load({"x": torch.zeros(50_000)}, FastensorStorageReader(tmp_path, verify=False))
    assert found["x"].count_nonzero() == 1


def test_files_of_different_saves(tmp_path: Path) -> None:
    """Metadata of one save with the shards of another, under their own names or under those of the first."""
    for step in (1, 2):
        save(stamped(step), FastensorStorageWriter(tmp_path / str(step)))
    shutil.copy(tmp_path / "1" / ".metadata", tmp_path / "2")
    with pytest.raises(dcp.api.CheckpointException, match=r"is missing.*another save"):
        load(unstamped(), FastensorStorageReader(tmp_path / "2"))
    (one,), (two,) = ((tmp_path / name).glob("*.distcp") for name in "12")
    shutil.move(two, two.with_name(one.name))
    with pytest.raises(dcp.api.CheckpointException, match=r"has CRC32 .* of another save"):
        load(unstamped(), FastensorStorageReader(tmp_path / "2"))


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    save(stamped(1), FastensorStorageWriter(tmp_path))
    (path,) = tmp_path.glob("*.distcp")
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(dcp.api.CheckpointException, match="cut off"):
        load(unstamped(), FastensorStorageReader(tmp_path))
    with pytest.raises(fastensor.CorruptCheckpointError, match="cut off"):
        fastensor.verify(tmp_path)


def test_an_incomplete_checkpoint(tmp_path: Path) -> None:
    save(stamped(1), FastensorStorageWriter(tmp_path))
    (tmp_path / ".metadata").unlink()
    fails_to_load(unstamped(), FastensorStorageReader(tmp_path), "No such file")


def test_old_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    names = [f"__{rank}_0123456789abcdef_0.distcp" for rank in range(4)] + ["__0_0.distcp", "mine.distcp"]
    for name in names:
        (tmp_path / name).touch()
        if name != names[3]:
            os.utime(tmp_path / name, (1, 1))
    save(stamped(1), FastensorStorageWriter(tmp_path))
    assert {name for name in names if (tmp_path / name).exists()} == set(names[3:])
