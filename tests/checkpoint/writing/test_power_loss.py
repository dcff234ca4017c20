"""The power fails after any step of a save, and the disk holds whatever it may: the old content or the new, whole."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_model import File, Link, Operation, Rename, Resize, SyncFile, SyncFolder, Write
from power_loss import look_at, power_failures, recorded, replay
from sharing import SharingDisk

import fastensor
from fastensor import FastensorError
from fastensor.backends.registry import available_names

pytestmark = pytest.mark.crash

WAYS = [*((backend, "x") for backend in available_names()), ("direct", "x.safetensors")]
SAMPLE, LARGE_SAMPLE = 8, 600


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


OLD = {"w": random_bytes(300_000, 1), "b": torch.ones(5), "step": torch.tensor(1)}
NEW = {"w": random_bytes(2 << 20, 2), "v": random_bytes(300_000, 3), "b": torch.zeros(5), "step": torch.tensor(2)}


def is_equal(found: Any, expected: dict[str, torch.Tensor]) -> bool:
    return sorted(found) == sorted(expected) and all(torch.equal(found[key], expected[key]) for key in expected)


@dataclass
class Judge:
    """Puts states of a disk into a real file and loads it, each content once."""

    folder: Path
    tally: Counter[str]
    verify: bool = True
    refusals: tuple[type[Exception], ...] = (FastensorError,)
    known: dict[bytes, str] = field(default_factory=dict)

    def verdict(self, name: str, file: File | None) -> str:
        if file is None:
            return "absent"
        digest = hashlib.blake2b(file.content).digest()
        if digest not in self.known:
            self.tally["power-loss states loaded"] += 1
            (self.folder / name).write_bytes(file.content)
            self.known[digest] = self._load(self.folder / name)
        return self.known[digest]

    def _load(self, path: Path) -> str:
        try:
            found = fastensor.load(path, verify=self.verify)
        except self.refusals:
            return "refused"
        return "old" if is_equal(found, OLD) else "new" if is_equal(found, NEW) else "wrong values"


@dataclass(frozen=True)
class Recording:
    """One save, and what was in the folder before."""

    name: str
    before: dict[str, File]
    operations: list[Operation]
    after: dict[str, File]

    def verdicts(self, judge: Judge, sample: int, operations: Sequence[Operation] | None = None) -> list[set[str]]:
        """What may be found, by the number of operations that were completed."""
        operations = self.operations if operations is None else operations
        found: list[set[str]] = [set() for _ in range(len(operations) + 1)]
        for completed, state in power_failures(self.before, operations, self.name, sample=sample):
            found[completed].add(judge.verdict(self.name, state.file))
        return found


def record(path: Path, *, backend: str, overwrite: bool, durable: bool) -> Recording:
    path.parent.mkdir()
    if overwrite:
        fastensor.save(OLD, path)
        path.chmod(0o640)
    before = look_at(path.parent)
    with recorded(path.parent) as operations:
        fastensor.save(NEW, path, backend=backend, durable=durable)
    return Recording(path.name, before, operations, look_at(path.parent))


@pytest.fixture
def judge(tmp_path: Path, tally: Counter[str]) -> Judge:
    (tmp_path / "judged").mkdir()
    return Judge(tmp_path / "judged", tally)


samples = pytest.mark.parametrize(
    "sample", [SAMPLE, pytest.param(LARGE_SAMPLE, marks=pytest.mark.torture)], ids=["small", "large"]
)
ways = pytest.mark.parametrize(("backend", "name"), WAYS, ids=["-".join(way) for way in WAYS])
targets = pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])


@ways
@targets
def test_what_is_recorded_is_what_happens(
    tmp_path: Path, backend: str, name: str, overwrite: bool, temporaries: str
) -> None:
    """Nothing that reaches the file passes the recorder, or the tests below would prove nothing."""
    recording = record(tmp_path / "saved" / name, backend=backend, overwrite=overwrite, durable=True)
    assert list(recording.after) == [name]
    assert replay(recording.before, recording.operations) == recording.after
    kinds = [type(operation) for operation in recording.operations]
    assert kinds.count(Write) > 1
    assert kinds.count(SyncFile) == kinds.count(SyncFolder) == 1
    assert kinds.count(Link) == (temporaries == "nameless")
    assert kinds.count(Rename) == (overwrite or temporaries == "named")


@samples
@pytest.mark.usefixtures("temporaries")
def test_a_save_that_shares_blocks(tmp_path: Path, judge: Judge, sample: int, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SharingDisk(monkeypatch)
    fastensor.save(NEW, tmp_path / "base.ckpt")
    recording = record(tmp_path / "saved" / "x", backend="direct", overwrite=True, durable=True)
    assert disk.nbytes > 2 << 20
    assert replay(recording.before, recording.operations) == recording.after
    found = recording.verdicts(judge, sample)
    assert found[0] == {"old"}
    assert {"old", "new"} in found, "no moment is left open: the model has lost its point"
    assert all(verdicts <= {"old", "new"} for verdicts in found)
    assert found[-1] == {"new"}


@samples
@ways
@targets
@pytest.mark.usefixtures("temporaries")
def test_a_durable_save(tmp_path: Path, judge: Judge, backend: str, name: str, overwrite: bool, sample: int) -> None:
    recording = record(tmp_path / "saved" / name, backend=backend, overwrite=overwrite, durable=True)
    found = recording.verdicts(judge, sample)
    earlier = "old" if overwrite else "absent"
    assert found[0] == {earlier}
    assert {earlier, "new"} in found, "no moment is left open: the model has lost its point"
    assert all(verdicts <= {earlier, "new"} for verdicts in found)
    assert found[-1] == {"new"}


@samples
@ways
@targets
def test_a_save_that_is_not_durable_is_damaged_at_most_noticeably(
    tmp_path: Path, judge: Judge, backend: str, name: str, overwrite: bool, sample: int
) -> None:
    recording = record(tmp_path / "saved" / name, backend=backend, overwrite=overwrite, durable=False)
    found = recording.verdicts(judge, sample)
    earlier = "old" if overwrite else "absent"
    assert found[0] == {earlier}
    assert found[-1] == {earlier, "new", "refused"}
    assert all(verdicts <= {earlier, "new", "refused"} for verdicts in found)


def test_only_checksums_tell_that_a_save_that_is_not_durable_is_damaged(tmp_path: Path, judge: Judge) -> None:
    recording = record(tmp_path / "saved" / "x", backend="numpy", overwrite=True, durable=False)
    judge.verify = False
    judge.refusals = (Exception,)
    assert "wrong values" in recording.verdicts(judge, SAMPLE)[-1]


@ways
@pytest.mark.usefixtures("temporaries")
def test_modes_are_durable_with_the_content(tmp_path: Path, backend: str, name: str) -> None:
    recording = record(tmp_path / "saved" / name, backend=backend, overwrite=True, durable=True)
    assert recording.after[name].mode == 0o640
    for _, state in power_failures(recording.before, recording.operations, recording.name, sample=SAMPLE):
        assert state.file
        assert state.file.mode == 0o640


@pytest.mark.usefixtures("temporaries")
def test_temporaries_that_are_left_go_with_the_next_save(tmp_path: Path, judge: Judge) -> None:
    recording = record(tmp_path / "saved" / "x", backend="numpy", overwrite=True, durable=True)
    states = {
        state.others: state for _, state in power_failures(recording.before, recording.operations, recording.name)
    }
    assert sorted(map(len, states)) == [0, 1]
    for state in states.values():
        for name in state.others:
            (judge.folder / name).write_bytes(b"cut off")
        fastensor.save(NEW, judge.folder / recording.name)
        assert os.listdir(judge.folder) == [recording.name]


def renumbered(operations: Sequence[Operation]) -> list[Operation]:
    """Every sync covers what stands before it."""
    return [
        replace(operation, covers=number) if isinstance(operation, SyncFile | SyncFolder) else operation
        for number, operation in enumerate(operations)
    ]


def without(kind: type[Operation]) -> Callable[[list[Operation]], list[Operation]]:
    return lambda operations: [operation for operation in operations if not isinstance(operation, kind)]


def moved(kind: type[Operation], behind: type[Operation]) -> Callable[[list[Operation]], list[Operation]]:
    """The operation of one kind comes right after that of the other."""

    def move(operations: list[Operation]) -> list[Operation]:
        (one,) = (operation for operation in operations if isinstance(operation, kind))
        rest = without(kind)(operations)
        at = next(i for i, operation in enumerate(rest) if isinstance(operation, behind))
        return [*rest[: at + 1], one, *rest[at + 1 :]]

    return move


@ways
@pytest.mark.parametrize(
    ("mistake", "during", "afterwards"),
    [
        pytest.param(without(SyncFile), {"old", "new", "refused"}, {"new", "refused"}, id="file-not-synced"),
        pytest.param(moved(SyncFile, Write), {"old", "new", "refused"}, {"new", "refused"}, id="synced-too-early"),
        pytest.param(moved(SyncFile, Rename), {"old", "new", "refused"}, {"new"}, id="synced-after-rename"),
        pytest.param(without(SyncFolder), {"old", "new"}, {"old", "new"}, id="folder-not-synced"),
        pytest.param(moved(SyncFolder, SyncFile), {"old", "new"}, {"old", "new"}, id="folder-synced-before-rename"),
    ],
)
def test_mistakes_are_found(
    tmp_path: Path,
    judge: Judge,
    backend: str,
    name: str,
    mistake: Callable[[list[Operation]], list[Operation]],
    during: set[str],
    afterwards: set[str],
) -> None:
    """A save that did not sync, or at the wrong moment, would fail the tests above."""
    recording = record(tmp_path / "saved" / name, backend=backend, overwrite=True, durable=True)
    found = recording.verdicts(judge, SAMPLE, renumbered(mistake(recording.operations)))
    assert set.union(*found) == during
    assert found[-1] == afterwards


def test_the_length_of_a_file_is_not_durable_by_itself(tmp_path: Path, judge: Judge) -> None:
    """Preallocated space that was not cut off is a state, too."""
    recording = record(tmp_path / "saved" / "x", backend="direct", overwrite=False, durable=False)
    lengths = {
        len(state.file.content)
        for _, state in power_failures(recording.before, recording.operations, recording.name, sample=SAMPLE)
        if state.file
    }
    resized = {operation.nbytes for operation in recording.operations if isinstance(operation, Resize)}
    assert {0, *resized} <= lengths
