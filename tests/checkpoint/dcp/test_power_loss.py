"""The power fails after any step of a save that replaces a checkpoint: the old one or the new one is there, whole."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest
from checkpoints import load, save, stamped, step_of, unstamped
from disk_model import File, Operation, SyncFile, SyncFolder
from power_loss import look_at, power_failures, recorded, replay

from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter

pytestmark = pytest.mark.crash

SAMPLE = 4


def record(folder: Path) -> tuple[dict[str, File], list[Operation], dict[str, File]]:
    """What is in a folder before a save, the save, and what is there afterwards."""
    save(stamped(1), FastensorStorageWriter(folder))
    before = look_at(folder)
    with recorded(folder) as done:
        save(stamped(2), FastensorStorageWriter(folder))
    after = look_at(folder)
    assert replay(before, done) == after
    assert step_of(load(unstamped(), FastensorStorageReader(folder))) == 2
    return before, done, after


def broken_steps(folder: Path, tally: Counter[str], *, forgets: type | None = None) -> list[int]:
    """The steps after which a power failure may leave metadata whose shard is not whole."""
    before, done, after = record(folder)
    kept = [one for one in done if forgets is None or not isinstance(one, forgets)]
    whole = {name: file.content for name, file in (*before.items(), *after.items()) if name != ".metadata"}
    (old,), (new,) = ([name for name in found if name != ".metadata"] for found in (before, after))
    names = {before[".metadata"].content: old, after[".metadata"].content: new}
    possible: dict[str, dict[int, set[bytes | None]]] = {}
    for name in (".metadata", old, new):
        possible[name] = defaultdict(set)
        for step, state in power_failures(before, kept, name, sample=SAMPLE):
            tally["power-loss states compared"] += 1
            possible[name][step].add(state.file.content if state.file else None)
    broken = []
    for step, contents in possible[".metadata"].items():
        shards = [names.get(content) if content is not None else None for content in contents]
        if any(shard is None or possible[shard][step] != {whole[shard]} for shard in shards):
            broken.append(step)
    return broken


def test_old_or_new(tmp_path: Path, tally: Counter[str]) -> None:
    assert broken_steps(tmp_path, tally) == []


@pytest.mark.parametrize("forgotten", [SyncFile, SyncFolder])
def test_syncs_are_needed(tmp_path: Path, forgotten: type, tally: Counter[str]) -> None:
    assert broken_steps(tmp_path, tally, forgets=forgotten)
