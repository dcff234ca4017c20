"""What has not changed is shared on XFS and btrfs, which are mounted from files."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import struct
import subprocess
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import sharing
import torch
from disk_images import CannotMountError, find_program, mounted
from disks import leftovers
from killer import Killer
from programs import Program
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.checkpoint.writing import shared_blocks
from fastensor.cli.checkup.folder import examine, facts
from fastensor.files import posix
from fastensor.select.machine import identity
from fastensor.testing.calls import intercepted

NUMEL = 1_000_000
NBYTES = 4 * NUMEL
FIEMAP = 0xC020660B
SAVER = Path(__file__).with_name("saver.py")


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    """Eight frozen tensors, and one that is trained."""
    return {name: torch.empty(NUMEL).normal_() for name in ("trained", *(f"frozen{number}" for number in range(8)))}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def used_nbytes(folder: Path) -> int:
    """What the filesystem has in use, when all is written."""
    os.sync()
    found = os.statvfs(folder)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def check(path: Path, state: Any) -> None:
    """The file has the state, for us and for those that wrote such files first."""
    sharing.assert_same(fastensor.load(path, verify=True), state)
    assert not fastensor.verify(path).damage
    if path.suffix == ".safetensors":
        sharing.assert_same(safetensors.torch.load_file(path), state)
    else:
        assert zipfile.ZipFile(path).testzip() is None
        sharing.assert_same(torch.load(path), state)
    assert not leftovers(path.parent)


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("backend", ["direct", "numpy"])
def test_disk_and_file_have_what_has_changed(
    folder: Path, state: dict[str, torch.Tensor], ending: str, backend: str
) -> None:
    fastensor.save(state, folder / f"0.{ending}", backend=backend)
    before = used_nbytes(folder)
    for step in range(1, 5):
        state["trained"].add_(1)
        report = fastensor.save(state, folder / f"{step}.{ending}", backend=backend)
        check(folder / f"{step}.{ending}", state)
        assert 7.9 * NBYTES < report.shared_nbytes <= 8 * NBYTES
        assert report.nbytes == (folder / f"{step}.{ending}").stat().st_size
    assert used_nbytes(folder) - before < 5 * NBYTES
    (folder / f"0.{ending}").unlink()
    check(folder / f"4.{ending}", state)


def test_asynchronous_saves_share(folder: Path, state: dict[str, torch.Tensor]) -> None:
    path = folder / "x.ckpt"
    fastensor.save(state, path)
    with fastensor.AsyncWriter() as writer:
        for _ in range(4):
            state["trained"].add_(1)
            expected = {name: one.clone() for name, one in state.items()}
            handle = writer.save(state, path)
            state["trained"].add_(1)
            assert handle.result().shared_nbytes > 7.9 * NBYTES
            check(path, expected)
        assert writer.statistics().peak_staging_bytes < 3 * NBYTES


def test_shards_share(folder: Path, state: dict[str, torch.Tensor]) -> None:
    checkpoint: Any = {"model": state, "lr": 0.1, "epoch": 1}
    for number in range(3):
        state["trained"].add_(1)
        before = used_nbytes(folder)
        writer = FastensorStorageWriter(folder / str(number))
        dcp.save(checkpoint, storage_writer=writer, no_dist=True)
        assert (used_nbytes(folder) - before < 3 * NBYTES) == (number > 0)
        assert not fastensor.verify(folder / str(number)).damage
        for reader in (FastensorStorageReader(folder / str(number)), dcp.FileSystemReader(folder / str(number))):
            found: Any = {"model": {name: torch.zeros(NUMEL) for name in state}, "lr": 0.0, "epoch": 0}
            dcp.load(found, storage_reader=reader, no_dist=True)
            sharing.assert_same(found, checkpoint)
    state["frozen3"].data.add_(1)
    for _ in range(16):
        writer = FastensorStorageWriter(folder / "x", share_unchanged="trust")
        try:
            dcp.save(checkpoint, storage_writer=writer, no_dist=True)
        except dcp.api.CheckpointException as error:
            assert "'model.frozen3' has changed" in str(error)
            return
    pytest.fail("nothing was compared")


@pytest.mark.parametrize("how", [True, "trust"])
@pytest.mark.parametrize("stager", [None, StagingOptions(False, False, False, False)])
def test_what_was_staged_is_written(
    folder: Path, state: dict[str, torch.Tensor], how: Any, stager: Any, one_rank: None
) -> None:
    """torch's stager writes to the same memory each time, and counts nothing."""
    writer = FastensorStorageWriter(folder / "x", share_unchanged=how)
    options: Any = {} if stager is None else {"async_stager": DefaultStager(stager)}
    for number in range(4):
        state["trained"].add_(1)
        writer.reset(folder / str(number))
        before = used_nbytes(folder)
        saved = dcp.async_save(state, storage_writer=writer, **options)
        getattr(saved, "upload_completion", saved).result()  # type: ignore[union-attr]
        found = {name: torch.zeros(NUMEL) for name in state}
        assert used_nbytes(folder) - before > 8.5 * NBYTES
        dcp.load(found, checkpoint_id=folder / str(number))
        sharing.assert_same(found, state)


def rot(file: Path, offset: int, image: Path) -> None:
    """Change a byte of a file on the disk, as if no program had written. On XFS, whose extents say where it is."""
    with file.open("rb") as opened:
        found = bytearray(struct.pack("=2Q4I", offset, 1, 0, 0, 1, 0) + bytes(56))
        fcntl.ioctl(opened, FIEMAP, found)
        logical, physical = struct.unpack_from("=2Q", found, 32)
        with image.open("r+b") as disk:
            disk.seek(physical + offset - logical)
            byte = disk.read(1)
            disk.seek(physical + offset - logical)
            disk.write(bytes([byte[0] ^ 1]))
        posix.evict(opened.fileno(), file.stat().st_size)


def test_damage_of_a_shared_block_is_found_in_each_file(
    folder: Path, filesystem: Path, state: dict[str, torch.Tensor]
) -> None:
    if identity(folder)["filesystem"] != "xfs":
        pytest.skip("btrfs says where a block is in terms of its own, and finds the damage itself")
    paths = [folder / f"{number}.ckpt" for number in range(3)]
    for path in paths:
        fastensor.save(state, path)
    at = paths[1].read_bytes().index(state["frozen4"].numpy().tobytes())
    rot(paths[1], at + NBYTES // 2, filesystem.with_suffix(""))
    for path in paths:
        with path.open("rb") as file:
            posix.evict(file.fileno(), path.stat().st_size)
        for read in (fastensor.verify, fastensor.load):
            with pytest.raises(fastensor.CorruptCheckpointError, match="has CRC32"):
                read(path)


def test_models_in_several_files_share(folder: Path, state: dict[str, torch.Tensor]) -> None:
    before = 0
    for _ in range(3):
        state["trained"].add_(1)
        before = used_nbytes(folder)
        fastensor.save_sharded(state, folder / "model", shard_nbytes=3 * NBYTES)
        sharing.assert_same(fastensor.load_sharded(folder / "model"), state)
    assert used_nbytes(folder) - before < 2 * NBYTES


class Tuned(torch.nn.Module):
    """A model whose parameters are the tensors of a state, of which one trains."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, one in state.items():
            self.register_parameter(name, torch.nn.Parameter(one, requires_grad=name == "trained"))


def check_model(folder: Path, state: dict[str, torch.Tensor]) -> None:
    sharing.assert_same(fastensor.load_sharded(folder, verify=True), state)
    for file in folder.glob("*.safetensors"):
        assert safetensors.torch.load_file(file).keys() <= state.keys()
    assert not leftovers(folder)


def test_links_of_what_does_not_train(folder: Path, state: dict[str, torch.Tensor]) -> None:
    model = Tuned(state)
    fastensor.save_sharded(model, folder / "0", share_unchanged="link")
    for number in range(1, 4):
        state["trained"].add_(1)
        before = used_nbytes(folder)
        report = fastensor.save_sharded(model, folder / str(number), share_unchanged="link")
        assert 8 * NBYTES < report.shared_nbytes < 8.1 * NBYTES
        assert used_nbytes(folder) - before < 2 * NBYTES
        check_model(folder / str(number), state)
    assert sorted(one.stat().st_nlink for one in (folder / "3").glob("*.safetensors")) == [1, 4]
    shutil.rmtree(folder / "0")
    check_model(folder / "3", state)


def test_blocks_are_shared_where_a_file_is_not_linked(folder: Path, state: dict[str, torch.Tensor]) -> None:
    model = Tuned(state)
    fastensor.save_sharded(model, folder / "0", share_unchanged="link")
    state["frozen3"].add_(1)
    report = fastensor.save_sharded(model, folder / "1", share_unchanged="link")
    assert 7.9 * NBYTES < report.shared_nbytes <= 8 * NBYTES
    check_model(folder / "1", state)
    assert {one.stat().st_nlink for one in (folder / "1").glob("*.safetensors")} == {1}


@pytest.mark.crash
def test_a_save_by_links_that_is_killed_before_the_nth_call(folder: Path, tally: Counter[str]) -> None:
    state = {name: torch.randn(1000) for name in ("frozen", "trained")}
    model = Tuned(state)
    for fatal in count(1):
        fastensor.save_sharded(model, folder / "other", share_unchanged="link", durable=False)
        fastensor.save_sharded(model, folder / "model", share_unchanged="link", durable=False)
        before = {name: one.clone() for name, one in state.items()}
        state["trained"].add_(1)
        pid = os.fork()
        if pid == 0:
            with intercepted(Killer(fatal, ("pwrite", "rename", "link", "unlink", "fsync"))):
                fastensor.save_sharded(model, folder / "model", share_unchanged="link")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        left = fastensor.load_sharded(folder / "model", verify=True)
        assert torch.equal(left["frozen"], state["frozen"])
        assert torch.equal(left["trained"], before["trained"]) or torch.equal(left["trained"], state["trained"])
        sharing.assert_same(fastensor.load_sharded(folder / "other", verify=True), before)
        fastensor.save_sharded(model, folder / "model", share_unchanged="link", durable=False)
        check_model(folder / "model", state)
        tally["killed while files are linked"] += code != 0
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert fatal > 6


def test_the_doctor_says_that_files_can_share_blocks(folder: Path) -> None:
    found = examine(str(folder))
    assert found.shared_blocks is not None
    assert found.shared_blocks.accepted
    assert facts(found)["sharing"] == "yes, of blocks: saves write what has changed"
    assert not os.listdir(folder)


def fill(folder: Path, left_nbytes: int) -> None:
    """Leave so many bytes of the disk."""
    found = os.statvfs(folder)
    with (folder / "filling").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - left_nbytes)


def test_a_disk_without_room_for_the_file_has_room_for_what_has_changed(
    folder: Path, state: dict[str, torch.Tensor]
) -> None:
    path = folder / "x.ckpt"
    fastensor.save(state, path)
    fill(folder, 5 * NBYTES)
    for step in range(3):
        state["trained"].add_(1)
        assert fastensor.save(state, path).shared_nbytes > 7.9 * NBYTES
        check(path, state)
        assert step < 3
    expected = {name: one.clone() for name, one in state.items()}
    for one in state.values():
        one.add_(1)
    with pytest.raises(fastensor.CheckpointWriteError) as failed:
        fastensor.save(state, path)
    assert failed.value.errno == errno.ENOSPC
    check(path, expected)


@pytest.mark.parametrize("number", [1, 2, 5, 8])
def test_a_refusal_in_the_middle(
    folder: Path, state: dict[str, torch.Tensor], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, share, calls = folder / "x.ckpt", posix.share_blocks, Counter[str]()
    fastensor.save(state, path)

    def refuse(*arguments: int) -> None:
        calls["all"] += 1
        if calls["all"] == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        share(*arguments)

    monkeypatch.setattr(posix, "share_blocks", refuse)
    assert 7.9 * NBYTES < fastensor.save(state, path).shared_nbytes < 8.1 * NBYTES
    check(path, state)


def test_moving_falls_back_to_copying(
    folder: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets that are no multiples of a block cannot be shared: the kernel copies such parts."""
    path = folder / "x.ckpt"
    fastensor.save(state, path)
    copy = os.copy_file_range

    def copy_little(source: int, target: int, count: int, begin: int, offset: int) -> int:
        return copy(source, target, min(count, 5000), begin, offset)

    monkeypatch.setattr(os, "copy_file_range", copy_little)
    monkeypatch.setattr(posix, "_punch_hole", lambda *arguments: None)
    state["trained"].add_(1)
    fastensor.save(state, path)
    check(path, state)


def test_two_writers_to_one_path(folder: Path, state: dict[str, torch.Tensor]) -> None:
    path = folder / "x.ckpt"
    fastensor.save(state, path)
    states = [{**state, "trained": torch.full((NUMEL,), float(number))} for number in range(2)]
    errors: list[BaseException] = []

    def save(own: dict[str, torch.Tensor]) -> None:
        try:
            for _ in range(5):
                own["trained"].add_(2)
                fastensor.save(own, path)
        except BaseException as error:  # noqa: BLE001  # raised below
            errors.append(error)

    threads = [threading.Thread(target=save, args=(one,)) for one in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    found = fastensor.load(path, verify=True)
    assert any(torch.equal(found["trained"], one["trained"]) for one in states)
    assert all(torch.equal(found[name], state[name]) for name in state if name != "trained")
    assert not leftovers(folder)


def test_two_processes_that_save_to_one_path(folder: Path) -> None:
    with Program(SAVER, folder, "x.ckpt", 0) as one, Program(SAVER, folder, "x.ckpt", 0) as other:
        for _ in range(20):
            assert one.stdout.readline()
            assert other.stdout.readline()
        one.kill()
        other.kill()
        one.wait()
        other.wait()
    check_saved(folder / "x.ckpt")


def check_saved(path: Path) -> int:
    """The file has one of the states of ``saver.py``. Returns the step."""
    found = fastensor.load(path, verify=True)
    assert not fastensor.verify(path).damage
    for number in range(4):
        assert (found[f"frozen{number}"] == number).all()
    step = int(found["step"][0])
    assert (found["step"] == step).all()
    return step


@pytest.mark.crash
@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.torture)])
def test_a_killed_process_leaves_the_old_file_or_the_new_one(folder: Path, kills: int, tally: Counter[str]) -> None:
    rng = random.Random(0)
    path = folder / "x.ckpt"
    for _ in range(kills):
        with Program(SAVER, folder, path.name, 0) as process:
            assert process.stdout.readline().split()[1] != "0"  # it shares
            time.sleep(rng.random() * 0.05)
            process.kill()
            assert process.wait() == -signal.SIGKILL
        check_saved(path)
        assert len(leftovers(folder)) <= 2  # the new file, and what is left to write
        tally["killed while blocks are shared"] += 1
    fastensor.save({"done": True}, path)
    assert len(leftovers(folder)) <= 1


@pytest.mark.crash
@pytest.mark.torture
def test_a_process_that_is_killed_before_any_call(folder: Path, tally: Counter[str]) -> None:
    path = folder / "x.ckpt"
    for fatal in range(1, 1000):
        with Program(SAVER, folder, path.name, fatal) as process:
            code = process.wait()
        step = check_saved(path)
        assert step in (0, 1)
        tally["killed while blocks are shared"] += code != 0
        if code == 0:
            assert step == 1
            break
        assert code == -signal.SIGKILL
    assert fatal > 30


@contextmanager
def with_quota(kind: str, image: Path, *commands: str) -> Iterator[Path]:
    """A folder in which files may take no more than the commands allow."""
    try:
        options = ["prjquota"] if kind == "xfs" else []
        with mounted(kind, image, 320 << 20, options=options) as mount:
            folder = mount / "test"
            for command in commands:
                program, *arguments = [word.format(mount=mount, folder=folder) for word in command.split(" ; ")]
                subprocess.run([find_program(program), *arguments], check=True, capture_output=True)
            folder.mkdir(exist_ok=True)
            yield folder
    except CannotMountError as error:
        pytest.skip(f"no filesystem with quotas can be mounted here: {error}")


def test_a_quota_of_xfs_counts_shared_blocks_in_each_file(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    del state["frozen6"], state["frozen7"]
    with with_quota(
        "xfs", tmp_path / "image", "mkdir ; {folder}", "xfs_quota ; -x ; -c ; project -s -p {folder} 7 ; {mount}",
        "xfs_quota ; -x ; -c ; limit -p bhard=60m 7 ; {mount}",
    ) as folder:  # fmt: skip
        path = folder / "x.ckpt"
        fastensor.save(state, path)  # 28 MB
        for _ in range(2):  # 28 MB more, and what is left to write twice for a moment
            state["trained"].add_(1)
            assert fastensor.save(state, path).shared_nbytes > 5.9 * NBYTES
            check(path, state)
        fastensor.save({"x": torch.zeros(2 * NUMEL)}, folder / "other.ckpt")
        check_refused(path, state)


def test_a_quota_of_btrfs_counts_shared_blocks_once(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    with with_quota(
        "btrfs", tmp_path / "image", "btrfs ; subvolume ; create ; {folder}", "btrfs ; quota ; enable ; {mount}",
        "btrfs ; qgroup ; limit ; 60M ; {folder}",
    ) as folder:  # fmt: skip
        path = folder / "x.ckpt"
        fastensor.save(state, path)  # 36 MB
        for _ in range(2):
            state["trained"].add_(1)
            assert fastensor.save(state, path).shared_nbytes > 7.9 * NBYTES
            check(path, state)
        check_refused(path, state)


def check_refused(path: Path, state: dict[str, torch.Tensor]) -> None:
    """There is no room for another file that shares nothing. The old one stays."""
    expected = {name: one.clone() for name, one in state.items()}
    for one in state.values():
        one.add_(1)
    with pytest.raises(fastensor.CheckpointWriteError) as failed:
        fastensor.save(state, path)
    assert failed.value.errno in (errno.EDQUOT, errno.ENOSPC)
    check(path, expected)


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("block_nbytes", [1024, 2048])
def test_blocks_that_are_smaller_than_a_page(tmp_path: Path, block_nbytes: int, ending: str) -> None:
    state = {"a": torch.randn(NUMEL), "b": torch.ones(2000), "c": torch.randn(NUMEL), "d": torch.ones(3000)}
    try:
        with mounted("xfs", tmp_path / "image", 320 << 20, make=["-b", f"size={block_nbytes}"]) as folder:
            for step in range(4):
                state["b"] += 1
                state["d"] += 1
                report = fastensor.save(state, folder / f"{step}.{ending}")
                check(folder / f"{step}.{ending}", state)
                assert (report.shared_nbytes > 1.9 * NBYTES) == (step > 0)
    except CannotMountError as error:
        pytest.skip(f"no filesystem can be mounted here: {error}")


def test_xfs_without_reflink_is_asked_once(
    tmp_path: Path, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_blocks, "_refusing", set())
    calls, share = Counter[str](), posix.share_blocks

    def counted(*arguments: int) -> None:
        calls["all"] += 1
        share(*arguments)

    monkeypatch.setattr(posix, "share_blocks", counted)
    try:
        with mounted("xfs", tmp_path / "image", 320 << 20, make=["-m", "reflink=0"]) as folder:
            for _ in range(3):
                assert fastensor.save(state, folder / "x.ckpt").shared_nbytes == 0
                check(folder / "x.ckpt", state)
            assert facts(examine(str(folder)))["sharing"] == (
                "no: xfs refuses (Operation not supported); XFS can if made with -m reflink=1"
            )
    except CannotMountError as error:
        pytest.skip(f"no filesystem can be mounted here: {error}")
    assert calls["all"] == 2  # by the first save that could share, and by the doctor
