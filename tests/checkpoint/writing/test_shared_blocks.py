"""What has not changed is shared with an earlier file, here on a model; ``tests/filesystems`` has real filesystems."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharing
import torch
from device_model import ORDERS, modelled
from disks import Gate, leftovers
from sharing import SharingDisk

import fastensor
from fastensor.backends import registry
from fastensor.backends.buffers import BufferPool
from fastensor.backends.storage_crc32 import crc32s_of
from fastensor.checkpoint.writing import shared_blocks
from fastensor.files import posix
from fastensor.files.new_directory import NewDirectory
from fastensor.files.words import human_size
from fastensor.testing.faults import failing_call

NUMEL = 100_000
NBYTES = 4 * NUMEL
ENDINGS = ("ckpt", "safetensors")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SharingDisk:
    return SharingDisk(monkeypatch)


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Two frozen tensors, and one that is trained."""
    return {name: torch.randn(NUMEL) for name in ("frozen", "frozen_too", "trained")}


def train(state: dict[str, torch.Tensor]) -> None:
    state["trained"].add_(1)


def shared_by(state: Any, path: Path, **options: Any) -> int:
    """Save, and check what was saved. Returns the tensors that were shared."""
    report = fastensor.save(state, path, **options)
    sharing.assert_same(fastensor.load(path, verify=True), state)
    assert not fastensor.verify(path).damage
    assert report.nbytes == path.stat().st_size
    assert not leftovers(path.parent)
    return -(-report.shared_nbytes // NBYTES)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("backend", ["direct", "numpy"])
def test_what_has_not_changed_is_shared(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], ending: str, backend: str
) -> None:
    assert shared_by(state, tmp_path / f"0.{ending}", backend=backend) == 0
    for step in range(1, 4):
        train(state)
        assert shared_by(state, tmp_path / f"{step}.{ending}", backend=backend) == 2
    assert shared_by(state, tmp_path / f"3.{ending}", backend=backend) == 3  # saved twice in one step
    assert shared_by(state, tmp_path / f"4.{ending}", backend=backend, share_unchanged=False) == 0
    assert 0 < disk.nbytes < 9 * NBYTES


def test_files_are_those_that_are_written_without_sharing(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor]
) -> None:
    for ending in ENDINGS:
        shared, written = tmp_path / f"shared.{ending}", tmp_path / f"written.{ending}"
        fastensor.save(state, shared)
        train(state)
        assert shared_by(state, shared) == 2
        fastensor.save(state, written, share_unchanged=False)
        assert shared.read_bytes() == written.read_bytes()


def test_a_text_of_another_length_moves_no_tensor(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing.share_small_tensors(monkeypatch)
    for number in range(3):
        checkpoint = {"state": state, "text": "x" * 1000 * number}
        assert shared_by(checkpoint, tmp_path / "x.ckpt") == (3 if number else 0)
    state = {name: one.clone() for name, one in state.items()}
    for number in range(3):
        metadata = {"text": "x" * 1000 * number}
        assert shared_by(state, tmp_path / "x.safetensors", metadata=metadata) == (3 if number else 0)


@pytest.mark.parametrize("how", [True, "trust"])
def test_a_change_that_torch_counts_is_written(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], how: Any
) -> None:
    model = torch.nn.Linear(300, 300)
    model.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.bias])
    changes: list[Callable[[], object]] = [
        lambda: state["frozen"].mul_(2),
        lambda: state["frozen"][5:7].zero_(),
        lambda: state["frozen"].set_(torch.ones(NUMEL).untyped_storage()),  # type: ignore[call-overload]
        lambda: state.update(frozen=torch.ones(NUMEL)),
        lambda: model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()}),
        lambda: (model(torch.ones(300)).sum().backward(), optimizer.step()),
    ]
    shared_by({"state": state, "model": model.state_dict()}, tmp_path / "x.ckpt", share_unchanged=how)
    for change in changes:
        change()
        checkpoint = {"state": state, "model": model.state_dict()}
        found = shared_by(checkpoint, tmp_path / "x.ckpt", share_unchanged=how)
        assert found >= 2


def test_a_change_behind_torchs_back_is_written(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def noted(parts: list[Any]) -> list[int]:
        compared.append(len(parts))
        return crc32s_of(parts)

    monkeypatch.setattr("fastensor.backends.storage_crc32.crc32s_of", noted)
    path = tmp_path / "x.ckpt"
    shared_by(state, path)
    state["frozen"].data.add_(1)
    for _ in range(3):
        train(state)
        state["frozen"].data.add_(1)
        assert shared_by(state, path) == 1
    assert compared == [2, 1, 1]  # what was changed so once is changed again and again; what torch counts is not read


@pytest.mark.parametrize("ending", ENDINGS)
def test_trust_compares_samples_and_names_the_tensor(tmp_path: Path, disk: SharingDisk, ending: str) -> None:
    state = {f"w{number}": torch.empty(NUMEL).normal_() for number in range(32)}
    path = tmp_path / f"x.{ending}"
    shared_by(state, path)
    state["w17"].data.add_(1)
    contents = [path.read_bytes()]

    def save_again() -> None:
        for _ in range(16):
            fastensor.save(state, path, share_unchanged="trust")
            contents.append(path.read_bytes())

    with pytest.raises(fastensor.StateChangedError, match=f"'w17' has changed since {path}"):
        save_again()
    assert path.read_bytes() == contents[-1]
    assert not leftovers(tmp_path)
    with pytest.raises(fastensor.StateChangedError):  # until another way is chosen
        fastensor.save(state, path, share_unchanged="trust")
    assert shared_by(state, path) == 31


@pytest.mark.parametrize("value", ["Trust", None, 1, "yes"])
def test_a_wrong_choice(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="share_unchanged is True, False, 'trust' or 'link', found"):
        fastensor.save({}, tmp_path / "x.ckpt", share_unchanged=value)


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def damaged(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"damaged")


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def renamed(path: Path) -> None:
    path.rename(path.with_name("other"))


def linked(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()
    path.rmdir()
    os.mkfifo(path)


@pytest.mark.parametrize("what", [removed, replaced, damaged, cut_off, renamed, linked, unreadable])
def test_a_file_that_is_not_what_it_was_shares_nothing(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], what: Callable[[Path], None]
) -> None:
    base = tmp_path / "base.ckpt"
    shared_by(state, base)
    what(base)
    assert shared_by(state, tmp_path / "x.ckpt") == 0
    assert shared_by(state, tmp_path / "x.ckpt") == 3


def test_what_does_not_change_the_bytes_is_no_change(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor]
) -> None:
    base = tmp_path / "base.ckpt"
    shared_by(state, base)
    base.chmod(0o400)
    os.link(base, tmp_path / "link")
    assert not fastensor.verify(base).damage
    assert shared_by(state, tmp_path / "x.ckpt") == 3


def test_a_file_that_changes_while_it_is_shared_shares_nothing(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, share = tmp_path / "base.ckpt", posix.share_blocks
    shared_by(state, base)

    def damage_and_share(*arguments: Any) -> None:
        damaged(base)
        share(*arguments)

    monkeypatch.setattr(posix, "share_blocks", damage_and_share)
    assert shared_by(state, tmp_path / "x.ckpt") == 0


@pytest.mark.parametrize("code", sharing.REFUSALS)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_part_that_cannot_be_shared_is_written(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], code: int, number: int
) -> None:
    path = tmp_path / "x.ckpt"
    shared_by(state, path)
    disk.refused = {number: code}
    assert shared_by(state, path) == 2
    assert shared_by(state, path) == 3


def test_a_filesystem_that_shares_nothing_is_asked_once(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    disk.refused = {1: errno.EOPNOTSUPP}
    for _ in range(3):
        assert shared_by(state, tmp_path / "x.ckpt") == 0
    assert disk.calls == 1
    assert [one.getMessage() for one in caplog.records if "sharing" in one.getMessage()] == [
        "sharing unchanged blocks is not used: [Errno 95] Operation not supported"
    ]


def test_other_filesystems_are_left_alone(
    tmp_path: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posix, "may_share_blocks", lambda fd: False)
    monkeypatch.setattr(shared_blocks, "share_blocks", None)  # nothing is looked at
    for _ in range(2):
        assert fastensor.save(state, tmp_path / "x.ckpt").shared_nbytes == 0
    assert not any(one in shared_blocks._copies for one in map(torch.Tensor.untyped_storage, state.values()))


def test_a_save_that_fails_is_no_base(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.ckpt"
    shared_by(state, path)
    train(state)
    with monkeypatch.context() as patch:
        patch.setattr(posix, "sync_file", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(fastensor.CheckpointWriteError):
            fastensor.save(state, path)
    assert not leftovers(tmp_path)
    assert shared_by(state, path) == 2


def test_a_file_of_a_folder_that_was_published_meanwhile_is_found(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor]
) -> None:
    for number in range(3):
        new = NewDirectory(str(tmp_path / f"checkpoint_{number}"))
        new.create()
        assert shared_by(state, Path(new.hidden) / "x.ckpt") == (3 if number else 0)
        new.publish(durable=False)
    shutil.rmtree(tmp_path / "checkpoint_2")
    assert shared_by(state, tmp_path / "x.ckpt") == 0


def test_views_and_ties_are_shared_as_their_storage_is(tmp_path: Path, disk: SharingDisk) -> None:
    whole = torch.randn(3 * NUMEL)
    parts = {"a": whole[:NUMEL], "b": whole[NUMEL:]}
    shared_by(parts, tmp_path / "x.ckpt")
    shared_by(parts, tmp_path / "x.safetensors")
    assert shared_by(parts, tmp_path / "x.ckpt") == 3
    assert shared_by(parts, tmp_path / "x.safetensors") == 3
    parts["b"][0] = 1
    assert shared_by(parts, tmp_path / "x.ckpt") == 0
    assert shared_by(parts, tmp_path / "x.safetensors") == 0  # the storage is one, and has one counter


def test_an_alias_with_a_counter_of_its_own_is_looked_at(tmp_path: Path, disk: SharingDisk) -> None:
    weight = torch.randn(NUMEL)
    state = {"weight": weight, "alias": weight.data}
    shared_by(state, tmp_path / "x.ckpt", share_unchanged="trust")
    state["alias"].add_(1)
    assert shared_by(state, tmp_path / "x.ckpt", share_unchanged="trust") == 0


def test_tensors_that_count_nothing_are_written(tmp_path: Path, disk: SharingDisk) -> None:
    with torch.inference_mode():
        state: Any = {"inference": torch.randn(NUMEL)}
    for _ in range(2):
        assert shared_by(state, tmp_path / "x.ckpt") == 0
    for _ in range(2):
        report = fastensor.save(torch.randn(NUMEL).untyped_storage(), tmp_path / "x.ckpt")
        assert report.shared_nbytes == 0


@pytest.mark.parametrize("kept", [False, True])
def test_what_is_collected_by_data_is_compared(tmp_path: Path, disk: SharingDisk, kept: bool) -> None:
    """Its counter begins at 0, whatever was counted before, and does not see the changes of the parameter."""
    model = {name: torch.nn.Parameter(torch.empty(NUMEL).normal_()) for name in ("frozen", "frozen_too", "trained")}
    state = {name: one.data for name, one in model.items()}
    shared_by(state, tmp_path / "x.ckpt", share_unchanged="trust")
    for _ in range(20):
        with torch.no_grad():
            model["trained"].add_(1)
        state = state if kept else {name: one.data for name, one in model.items()}
        assert shared_by(state, tmp_path / "x.ckpt", share_unchanged="trust") == 2


def test_a_tensor_that_torch_counts_again_is_shared_again(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor]
) -> None:
    path = tmp_path / "x.ckpt"
    shared_by(state, path)
    state["frozen"].data.add_(1)
    assert [shared_by(state, path) for _ in range(2)] == [2, 2]
    state["frozen"].add_(1)
    assert [shared_by(state, path) for _ in range(2)] == [2, 3]


def test_no_more_than_some_copies_are_remembered(
    tmp_path: Path, disk: SharingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blocks, "_MOST_COPIES", 5)
    whole, path = torch.randn(2 * NUMEL), tmp_path / "x.safetensors"
    for begin in (*range(20), 0):
        assert shared_by({"w": whole[begin : begin + NUMEL]}, path) == 0
    assert shared_by({"w": whole[:NUMEL]}, path) == 1
    assert len(shared_blocks._copies[whole.untyped_storage()]) == 5


def test_a_handle_keeps_no_header(tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor]) -> None:
    shared_by(state, tmp_path / "x.ckpt")
    text = b"x" * (1 << 20)
    with fastensor.AsyncWriter() as writer:
        handle = writer.save({**state, "text": text}, tmp_path / "x.ckpt")
        assert handle.result().shared_nbytes > 2.9 * NBYTES
    gc.collect()
    tuples = [one for one in gc.get_objects() if isinstance(one, tuple)]
    assert not any(type(one) is bytes and len(one) > len(text) for some in tuples for one in some)


def test_a_save_that_is_skipped_compares_nothing(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_by(state, tmp_path / "x.ckpt")
    monkeypatch.setattr(BufferPool, "has_room", lambda *_: False)
    monkeypatch.setattr("fastensor.backends.storage_crc32.crc32s_of", None)
    with fastensor.AsyncWriter(when_busy="skip") as writer:
        assert writer.save(state, tmp_path / "x.ckpt").stage == "skipped"
    assert not leftovers(tmp_path)


class Uncounted(torch.Tensor):
    @property
    def _version(self) -> int:
        raise AttributeError("nothing is counted")


def test_a_subclass_without_a_counter_is_written(tmp_path: Path, disk: SharingDisk) -> None:
    state = {"w": torch.zeros(NUMEL).as_subclass(Uncounted)}
    for _ in range(2):
        assert fastensor.save(state, tmp_path / "x.ckpt").shared_nbytes == 0
        assert torch.load(tmp_path / "x.ckpt", weights_only=False)["w"].sum() == 0


@pytest.mark.parametrize("how", [True, "trust"])
@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_what_cannot_be_compared_is_written(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], how: Any, error: type[Exception],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def fail(parts: list[Any]) -> list[int]:
        raise error("out of memory")

    registry.announce.cache_clear()
    path = tmp_path / "x.ckpt"
    shared_by(state, path)
    with monkeypatch.context() as patch:
        patch.setattr("fastensor.backends.storage_crc32.crc32s_of", fail)
        assert shared_by(state, path, share_unchanged=how) == 0
    assert "sharing unchanged blocks is not used: there is no memory to compare them" in caplog.text
    assert shared_by(state, path, share_unchanged=how) == 3


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_more_than_some_files_are_open_at_once(
    tmp_path: Path, disk: SharingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing.share_small_tensors(monkeypatch)
    blocks = [2 if number % 3 == 0 and number < 90 else 1 for number in range(100)]
    state = {f"w{number}": torch.randn(count * 1024) for number, count in enumerate(blocks)}
    for name, one in state.items():
        fastensor.save({name: one}, tmp_path / f"{name}.ckpt", durable=False)
    for number in (3, 30, 60):
        replaced(tmp_path / f"w{number}.ckpt")
    before, most, share = open_files(), 0, posix.share_blocks

    def counted(*arguments: int) -> None:
        nonlocal most
        most = max(most, open_files() - before)
        share(*arguments)

    monkeypatch.setattr(posix, "share_blocks", counted)
    report = fastensor.save(state, tmp_path / "all.ckpt", durable=False)
    sharing.assert_same(fastensor.load(tmp_path / "all.ckpt"), state)
    assert report.shared_nbytes == (27 * 2 + 2) * sharing.BLOCK_NBYTES  # of 30 files with the most, and two others
    assert most == 29 + 1  # with the new file; what is not what it was is closed
    assert open_files() == before
    report = fastensor.save(state, tmp_path / "all.ckpt", durable=False)
    assert report.shared_nbytes == sum(blocks) * sharing.BLOCK_NBYTES


def test_a_storage_in_the_place_of_another_is_another(tmp_path: Path, disk: SharingDisk) -> None:
    """Freed memory, and identities of objects, are used again."""
    for number in range(20):
        state = {"w": torch.full((NUMEL,), float(number))}
        assert shared_by(state, tmp_path / "x.ckpt", share_unchanged="trust") == 0
        del state


@pytest.mark.parametrize("how", [True, "trust"])
def test_an_asynchronous_save_stages_what_has_changed(
    tmp_path: Path, disk: SharingDisk, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{number}": torch.randn(NUMEL) for number in range(100)}
    for ending in ENDINGS:
        path = tmp_path / f"x.{ending}"
        shared_by(state, path)
        with fastensor.AsyncWriter(staging_bytes=8 << 20) as writer:
            for step in range(3):
                state["w5"].add_(1)
                expected = {name: one.clone() for name, one in state.items()}
                handle = writer.save(state, path, share_unchanged=how)
                for one in state.values() if step == 2 else ():
                    one.add_(1)  # the call has returned
                assert handle.result().shared_nbytes > 97 * NBYTES
                sharing.assert_same(fastensor.load(path), expected)
            statistics = writer.statistics()
        assert statistics.shared_nbytes > 3 * 97 * NBYTES
        assert "unchanged and shared" in str(statistics)
        assert statistics.peak_staging_bytes <= 4 << 20


def test_a_pending_save_keeps_no_storage(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    fastensor.save(state, tmp_path / "x.ckpt")
    gate = Gate(monkeypatch)
    with fastensor.AsyncWriter() as writer:
        handle = writer.save({**state}, tmp_path / "x.ckpt")
        alive = [weakref.ref(state.pop(name).untyped_storage()) for name in [*state]]
        gc.collect()
        assert not any(one() for one in alive)
        gate.open()
        assert handle.result().shared_nbytes > 2.9 * NBYTES


def test_a_pending_save_is_no_base(tmp_path: Path, disk: SharingDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.zeros(NUMEL)}
    with fastensor.AsyncWriter() as writer:
        handles = [writer.save(state, tmp_path / f"{number}.ckpt") for number in range(4)]
        found = [handle.result().shared_nbytes for handle in handles]
    assert found[0] == 0
    for number in range(4):
        sharing.assert_same(fastensor.load(tmp_path / f"{number}.ckpt"), state)


@pytest.mark.parametrize("order", ORDERS)
def test_a_device_compares_behind_what_is_queued(
    tmp_path: Path, disk: SharingDisk, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{number}": torch.zeros(NUMEL) for number in range(4)}
    with fastensor.AsyncWriter() as writer, modelled(order) as model, model.queuing():
        writer.save(state, tmp_path / "x.ckpt").result()
        for number in range(4):
            model.kernel(lambda one=state[f"w{number}"]: one.data.fill_(1))
            handle = writer.save(state, tmp_path / "x.ckpt")
            model.kernel(lambda one=state[f"w{number}"]: one.data.fill_(2))
            assert handle.result().shared_nbytes > (2.9 - number) * NBYTES
            found = fastensor.load(tmp_path / "x.ckpt")
            assert [int(one[0]) for one in found.values()] == [2] * number + [1] + [0] * (3 - number)
            assert all((one == one[0]).all() for one in found.values())


def test_a_report_says_what_was_shared(tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor]) -> None:
    first, second = (fastensor.save(state, tmp_path / "x.ckpt") for _ in range(2))
    assert "shared" not in str(first)
    assert f"{human_size(second.shared_nbytes)} unchanged and shared" in str(second)


def test_files_of_both_containers_share(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing.share_small_tensors(monkeypatch)
    state = {name: torch.randn(25 * 4096) for name in state}  # whole blocks, so that none shifts the next one
    shared_by(state, tmp_path / "x.ckpt")
    assert shared_by(state, tmp_path / "x.safetensors") == 4  # in units of other tensors


def test_every_failing_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, disk: SharingDisk, state: dict[str, torch.Tensor], tally: Counter[str]
) -> None:
    path = tmp_path / "x.ckpt"
    for number in range(1, 1000):
        shared_by(state, path)
        old = {name: one.clone() for name, one in state.items()}
        train(state)
        possible = [state]
        with failing_call(number, errno.EIO) as fault:
            try:
                fastensor.save(state, path)
            except fastensor.CheckpointWriteError:
                possible.append(old)
        found = fastensor.load(path, verify=True)
        assert any(torch.equal(found["trained"], one["trained"]) for one in possible)
        assert torch.equal(found["frozen"], state["frozen"])
        assert not leftovers(tmp_path) or fault.fired in ("unlink", "lstat", "fstat")
        tally["faults injected"] += bool(fault.fired)
        if not fault.fired:
            break
        for name in leftovers(tmp_path):
            (tmp_path / name).unlink()
    assert number > 30


class History:
    """Saves of a state that changes, and changes of the files. Every file has exactly the state that was saved."""

    def __init__(self, folder: Path, rng: random.Random, disk: SharingDisk, how: Any) -> None:
        self._folder, self._rng, self._disk, self._how = folder, rng, disk, how
        self._state = {f"w{number}": self._new() for number in range(rng.randint(1, 4))}
        self._step = 0
        self._saved: dict[Path, Any] = {}
        self.writer: fastensor.AsyncWriter | None = None

    def run(self, length: int) -> None:
        acts = [self._save] * 5 + [self._train] * 3 + [self._replace, self._grow, self._file, self._tie, self._refuse]
        if self._how is True:
            acts.append(self._behind)
        for _ in range(length):
            self._rng.choice(acts)()
        self._check()

    def _new(self) -> torch.Tensor:
        numel = self._rng.choice([10, 1024, 2048, 2500, 3 * 1024])
        return torch.full((numel,), self._rng.random())

    def _some(self) -> str:
        return self._rng.choice([*self._state])

    def _train(self) -> None:
        self._step += self._rng.choice([1, 255, 70_000])
        self._state[self._some()].add_(self._rng.random())

    def _behind(self) -> None:
        self._state[self._some()].data.mul_(self._rng.random())

    def _replace(self) -> None:
        self._state[self._some()] = self._new()

    def _grow(self) -> None:
        if len(self._state) > 1 and self._rng.random() < 0.5:
            del self._state[self._some()]
        else:
            self._state[f"w{self._rng.randrange(9)}"] = self._new()

    def _tie(self) -> None:
        one, other = self._some(), self._some()
        self._state[one] = self._state[other][: self._rng.randint(1, 2000)]

    def _refuse(self) -> None:
        self._disk.refused = {self._disk.calls + self._rng.randint(1, 3): self._rng.choice(sharing.REFUSALS)}

    def _file(self) -> None:
        if not self._saved:
            return
        if self.writer is not None:
            self.writer.wait()
        path = self._rng.choice([*self._saved])
        del self._saved[path]
        self._rng.choice([removed, replaced, damaged, cut_off, renamed])(path)

    def _save(self) -> None:
        ending = self._rng.choice(ENDINGS)
        path = self._folder / f"{self._rng.randrange(3)}.{ending}"
        tensors = self._state if ending == "ckpt" else {name: one.clone() for name, one in self._state.items()}
        if ending == "safetensors" and self._rng.random() < 0.7:
            try:
                fastensor.save(self._state, self._folder / "probe.safetensors", share_unchanged=False)
                tensors = self._state
            except fastensor.UnsupportedContentError:
                pass  # tensors are tied
        obj: Any = {"state": tensors, "step": self._step} if ending == "ckpt" else tensors
        how = self._how if self._rng.random() < 0.9 else False
        if self.writer is not None and self._rng.random() < 0.4:
            self.writer.save(obj, path, share_unchanged=how, durable=False)
        else:
            fastensor.save(obj, path, share_unchanged=how, durable=False)
        values = {name: one.clone() for name, one in tensors.items()}
        self._saved[path] = {"state": values, "step": self._step} if ending == "ckpt" else values
        if self._rng.random() < 0.3:
            self._check()

    def _check(self) -> None:
        for path, expected in self._saved.items():
            sharing.assert_same(fastensor.load(path, verify=True), expected)


@pytest.mark.parametrize("how", [True, "trust"])
@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.torture)])
def test_random_histories(
    tmp_path: Path, disk: SharingDisk, how: Any, count: int, tally: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing.share_small_tensors(monkeypatch)
    with fastensor.AsyncWriter(staging_bytes=4 << 20) as writer:
        for seed in range(count):
            folder = tmp_path / str(seed)
            folder.mkdir()
            history = History(folder, random.Random(seed), disk, how)
            history.writer = writer
            history.run(14)
            writer.wait()
            shutil.rmtree(folder)
    tally["histories of saves"] += count
    assert disk.nbytes > count * sharing.BLOCK_NBYTES
