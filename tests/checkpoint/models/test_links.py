"""``save_sharded(share_unchanged="link")``: what does not train is a hard link, and every model has its own values."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch
import torch
from disks import leftovers
from killer import Killer
from sharing import SharingDisk
from states import assert_equal
from torch import nn

import fastensor
from fastensor.backends.registry import announce
from fastensor.checkpoint.models.ties import frozen_among
from fastensor.checkpoint.writing import save_transaction
from fastensor.checkpoint.writing.outputs import Link
from fastensor.errors import CheckpointWriteError
from fastensor.files import posix
from fastensor.testing.calls import intercepted
from fastensor.testing.faults import failing_call

pytestmark = pytest.mark.skipif(
    tuple(map(int, safetensors.__version__.split(".")[:2])) < (0, 8), reason="links need safetensors 0.8"
)
INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


@pytest.fixture(autouse=True)
def _says_everything() -> None:
    announce.cache_clear()


def model() -> nn.Sequential:
    """A model whose first layer does not train. Its tensors are new, so that no file is known to have them."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    made[0].requires_grad_(False)
    return made


def train(made: nn.Module) -> None:
    with torch.no_grad():
        made[1].weight += 1  # type: ignore[index]  # a Sequential


def save(made: Any, folder: Path, **options: Any) -> fastensor.SaveReport:
    return fastensor.save_sharded(made, folder, **{"share_unchanged": "link", **options})


def places(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return found


def frozen_file(folder: Path) -> Path:
    return folder / places(folder)["0.weight"]


def is_link(one: Path, other: Path) -> bool:
    return os.path.samestat(frozen_file(one).lstat(), frozen_file(other).lstat())


def values(made: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in sorted(made.state_dict().items())}


def check(expected: dict[str, torch.Tensor], folder: Path) -> None:
    """The folder has these values, for Fastensor and for safetensors, verifies, and nothing else is in it."""
    assert_equal(dict(sorted(fastensor.load_sharded(folder).items())), expected)
    files = {*places(folder).values()} if (folder / INDEX).exists() else {WHOLE}
    found = {name: one for file in files for name, one in safetensors.torch.load_file(folder / file).items()}
    assert_equal(dict(sorted(found.items())), expected)
    assert fastensor.verify(folder).complete
    assert {*os.listdir(folder)} == files | ({INDEX} if len(files) > 1 else set())


def test_what_does_not_train_is_a_link(tmp_path: Path) -> None:
    made = model()
    first = save(made, tmp_path / "1")
    train(made)
    second = save(made, tmp_path / "2")
    assert is_link(tmp_path / "1", tmp_path / "2")
    assert first.shared_nbytes == 0
    assert second.shared_nbytes == frozen_file(tmp_path / "2").stat().st_size
    assert second.nbytes == first.nbytes
    assert second.atomic
    assert "unchanged and shared" in str(second)
    check(values(made), tmp_path / "2")
    shutil.rmtree(tmp_path / "1")  # as a rotation does
    check(values(made), tmp_path / "2")
    train(made)
    save(made, tmp_path / "3")
    assert is_link(tmp_path / "2", tmp_path / "3")
    check(values(made), tmp_path / "3")


@pytest.mark.parametrize("how", [True, "trust", False])
def test_without_the_option_nothing_is_linked(tmp_path: Path, how: Any) -> None:
    made = model()
    for number in "12":
        assert save(made, tmp_path / number, share_unchanged=how).shared_nbytes == 0
        save(made, tmp_path / f"{number}-linked")
    assert os.listdir(tmp_path / "2") == [WHOLE]
    assert (tmp_path / "2" / WHOLE).stat().st_nlink == 1


def test_reports_of_shards_say_what_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SharingDisk(monkeypatch)
    state = {name: torch.randn(200_000) for name in "abc"}
    for number in "12":
        report = save(state, tmp_path / number, share_unchanged=True, shard_nbytes="1MB")
        state["c"] += 1
    assert report.shared_nbytes == disk.nbytes > 2 * 4 * 190_000


def changed_through_data(made: nn.Sequential) -> None:
    made[0].weight.data[3, 3] += 1


def counted_and_the_same(made: nn.Sequential) -> None:
    with torch.no_grad():
        made[0].weight += 0


def replaced_in_memory(made: nn.Sequential) -> None:
    made[0].weight = nn.Parameter(made[0].weight.detach() * 2, requires_grad=False)


def moved_within_the_module(made: nn.Sequential) -> None:
    weight = made[0].weight
    weight.data = weight.data.clone()


@pytest.mark.parametrize(
    "change", [changed_through_data, counted_and_the_same, replaced_in_memory, moved_within_the_module]
)
def test_what_may_have_changed_is_written(tmp_path: Path, change: Callable[[nn.Sequential], None]) -> None:
    made = model()
    old = values(made)
    save(made, tmp_path / "1")
    change(made)
    assert save(made, tmp_path / "2").shared_nbytes == 0
    assert not is_link(tmp_path / "1", tmp_path / "2")
    check(values(made), tmp_path / "2")
    check(old, tmp_path / "1")
    save(made, tmp_path / "3")
    check(values(made), tmp_path / "3")


def test_what_trains_again_is_written(tmp_path: Path) -> None:
    made = model()
    for number, trains in enumerate((False, True, True, False, False)):
        made[0].requires_grad_(trains)
        if trains:
            with torch.no_grad():
                made[0].weight += 1
        save(made, tmp_path / str(number))
        check(values(made), tmp_path / str(number))
    assert (tmp_path / "2" / WHOLE).exists()
    assert is_link(tmp_path / "3", tmp_path / "4")


def test_a_model_that_does_not_train_at_all_is_one_link(tmp_path: Path) -> None:
    made = model().requires_grad_(False)
    for number in "123":
        save(made, tmp_path / number)
        check(values(made), tmp_path / number)
    assert (tmp_path / "1" / WHOLE).stat().st_nlink == 3


def test_the_same_folder_again(tmp_path: Path) -> None:
    made = model()
    inodes = []
    for _ in range(4):
        save(made, tmp_path)
        check(values(made), tmp_path)
        assert frozen_file(tmp_path).stat().st_nlink == 1
        inodes.append(frozen_file(tmp_path).stat().st_ino)
        train(made)
    assert inodes == inodes[:1] * 4


@pytest.mark.parametrize("metadata", [None, {"step": "1"}])
def test_metadata_are_part_of_a_file(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    made = model()
    save(made, tmp_path / "1")
    save(made, tmp_path / "2", metadata=metadata)
    assert is_link(tmp_path / "1", tmp_path / "2") == (metadata is None)


def test_other_names_are_another_file(tmp_path: Path) -> None:
    made = model()
    state = made.state_dict(keep_vars=True)
    save(state, tmp_path / "1")
    state["0.renamed"] = state.pop("0.bias")
    assert save(state, tmp_path / "2").shared_nbytes == 0
    assert_equal(fastensor.load_sharded(tmp_path / "2")["0.renamed"], made[0].bias.detach())


def test_a_dict_of_parameters(tmp_path: Path) -> None:
    made = model()
    for number in "12":
        save(made.state_dict(keep_vars=True), tmp_path / number)
        train(made)
    assert is_link(tmp_path / "1", tmp_path / "2")


def test_several_shards_of_what_does_not_train(tmp_path: Path) -> None:
    made = model()
    for number in "12":
        report = save(made, tmp_path / number, shard_nbytes=200)
        check(values(made), tmp_path / number)
        train(made)
    apart = {places(tmp_path / "2")[name] for name in ("0.weight", "0.bias")}
    assert len(apart) == 2
    assert {name for name in os.listdir(tmp_path / "2") if (tmp_path / "2" / name).stat().st_nlink == 2} == apart
    assert report.shared_nbytes == sum((tmp_path / "2" / name).stat().st_size for name in apart)


def test_memory_that_trains_by_another_name_is_not_frozen() -> None:
    memory = torch.ones(8)
    frozen = nn.Parameter(memory[:4], requires_grad=False)
    trained = nn.Parameter(memory[4:])
    tied = nn.Parameter(torch.ones(3), requires_grad=False)
    assert frozen_among({"a": frozen, "b": trained, "c": tied.data, "d": torch.ones(3)}, [frozen, trained, tied]) == {
        "c"
    }


def test_progress_comes_to_its_end(tmp_path: Path) -> None:
    made = model()
    told: list[tuple[int, int]] = []
    for number in "12":
        told.clear()
        save(made, tmp_path / number, progress=lambda done, total: told.append((done, total)))
        assert told[-1] == (sum(one.nbytes for one in made.state_dict().values()),) * 2
        assert told == sorted(told)


def test_arguments_that_mean_nothing(tmp_path: Path) -> None:
    state = dict(model().state_dict())
    with pytest.raises(ValueError, match="found checksums=True and 0 parameters: give the model, or state_dict"):
        save(state, tmp_path / "x")
    with pytest.raises(ValueError, match="found checksums=False and 4 parameters"):
        save(model(), tmp_path / "x", checksums=False)
    with pytest.raises(
        ValueError, match="share_unchanged is True, False, 'trust' or 'link', found 'links'; did you mean"
    ):
        save(model(), tmp_path / "x", share_unchanged="links")
    with pytest.raises(ValueError, match="'link' is for safetensors files with checksums, found 'torch'"):
        fastensor.save(state, tmp_path / "x.ckpt", share_unchanged="link")
    with pytest.raises(ValueError, match="'link' is for safetensors files with checksums, found 'safetensors' and"):
        fastensor.save(state, tmp_path / "x.safetensors", share_unchanged="link", checksums=False)
    assert not os.listdir(tmp_path)


def test_a_safetensors_that_overwrites_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_transaction, "version", lambda name: "0.7.0")
    with pytest.raises(ValueError, match=r"needs safetensors 0\.8, found 0\.7\.0, whose save_file overwrites"):
        save(model(), tmp_path / "x")
    assert not os.listdir(tmp_path)


def test_other_programs_replace_a_link(tmp_path: Path) -> None:
    """safetensors' own ``save_file``, and a save of ours to the same name."""
    made = model()
    for number in "12":
        save(made, tmp_path / number)
    file = frozen_file(tmp_path / "2")
    safetensors.torch.save_file({"x": torch.zeros(3)}, file)
    check(values(made), tmp_path / "1")
    os.link(frozen_file(tmp_path / "1"), tmp_path / "linked.safetensors")
    fastensor.save({"x": torch.ones(3)}, tmp_path / "linked.safetensors")
    check(values(made), tmp_path / "1")


# --- files that must not be linked


def edited(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-5, os.SEEK_END)
        opened.write(b"\xff")
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))  # the kernel's clock may stand still so long


def replaced(file: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:-5] + b"\xff" + data[-4:])


def led_elsewhere(file: Path) -> None:
    target = file.rename(file.with_name("elsewhere"))
    file.symlink_to(target)


def made_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def given_other_tensors(file: Path) -> None:
    found = safetensors.torch.load_file(file)
    fastensor.save({name: one + 1 for name, one in found.items()}, file)


@pytest.mark.parametrize("harm", [edited, replaced, led_elsewhere, made_a_pipe, given_other_tensors, Path.unlink])
def test_an_earlier_file_that_is_not_what_it_was_is_not_linked(
    tmp_path: Path, harm: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    made = model()
    save(made, tmp_path / "1")
    harm(frozen_file(tmp_path / "1"))
    report = save(made, tmp_path / "2")
    assert report.shared_nbytes == 0
    assert frozen_file(tmp_path / "2").stat().st_nlink == 1
    check(values(made), tmp_path / "2")
    assert not caplog.text


def test_a_header_that_says_something_else_is_not_linked(tmp_path: Path) -> None:
    """As if the file had been edited within the clock's tick: only its bytes say so."""
    made = model()
    save(made, tmp_path / "1")
    file = frozen_file(tmp_path / "1")
    before = file.stat()
    data = file.read_bytes()
    with file.open("r+b") as opened:
        opened.write(data.replace(b'"0.weight"', b'"0.height"'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert save(made, tmp_path / "2").shared_nbytes == 0
    check(values(made), tmp_path / "2")


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOENT, errno.ENOSPC, errno.EDQUOT])
def test_what_the_filesystem_refuses_to_link_is_written(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = model()
    save(made, tmp_path / "1")

    def refuse(link: Link, name: str) -> bool:
        raise OSError(code, os.strerror(code), name)

    with monkeypatch.context() as patched:
        patched.setattr(Link, "_link", refuse)
        assert save(made, tmp_path / "2").shared_nbytes == 0
    assert "linking unchanged files is not used" in caplog.text
    assert os.strerror(code) in caplog.text
    check(values(made), tmp_path / "2")
    save(made, tmp_path / "3")
    assert is_link(tmp_path / "2", tmp_path / "3")


@contextmanager
def immutable(file: Path) -> Iterator[None]:
    def change(how: str) -> bool:
        return subprocess.run(["chattr", how, str(file)], capture_output=True, check=False).returncode == 0

    if shutil.which("chattr") is None or not change("+i"):
        pytest.skip("no file can be made immutable here")
    try:
        yield
    finally:
        change("-i")


def test_an_immutable_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    save(made, tmp_path / "1")
    with immutable(frozen_file(tmp_path / "1")):
        assert save(made, tmp_path / "2").shared_nbytes == 0
    assert os.strerror(errno.EPERM) in caplog.text
    check(values(made), tmp_path / "2")


@pytest.mark.torture
def test_a_file_with_as_many_names_as_there_may_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = model()
    save(made, tmp_path / "1")
    (tmp_path / "names").mkdir()
    for number in range(70_000):
        try:
            os.link(frozen_file(tmp_path / "1"), tmp_path / "names" / str(number))
        except OSError as error:
            assert error.errno == errno.EMLINK
            break
    else:
        pytest.skip("files of this filesystem may have more names")
    assert save(made, tmp_path / "2").shared_nbytes == 0
    assert os.strerror(errno.EMLINK) in caplog.text
    check(values(made), tmp_path / "2")


def test_another_device(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second filesystem at /dev/shm")
    made = model()
    save(made, tmp_path / "1")
    folder = memory / f"fastensor-links-{os.getpid()}"
    try:
        assert save(made, folder).shared_nbytes == 0
        check(values(made), folder)
    finally:
        shutil.rmtree(folder)


def test_the_earlier_model_is_removed_before_the_link_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    save(made, tmp_path / "1")
    link = Link._link

    def remove_first(self: Link, name: str) -> bool:
        shutil.rmtree(tmp_path / "1")
        return link(self, name)

    monkeypatch.setattr(Link, "_link", remove_first)
    save(made, tmp_path / "2")
    check(values(made), tmp_path / "2")


def test_the_earlier_file_is_edited_while_the_link_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    save(made, tmp_path / "1")
    link = Link._link

    def edit_first(self: Link, name: str) -> bool:
        edited(frozen_file(tmp_path / "1"))
        return link(self, name)

    monkeypatch.setattr(Link, "_link", edit_first)
    assert save(made, tmp_path / "2").shared_nbytes == 0
    check(values(made), tmp_path / "2")


def test_a_locked_file_is_not_linked(tmp_path: Path) -> None:
    """Another save links it, or something writes it in place."""
    made = model()
    save(made, tmp_path / "1")
    with frozen_file(tmp_path / "1").open("rb") as file:
        assert posix.try_lock(file.fileno())
        assert save(made, tmp_path / "2").shared_nbytes == 0
    check(values(made), tmp_path / "2")


def test_a_file_of_several_names_is_not_written_in_place(tmp_path: Path) -> None:
    made = model()
    for number in "12":
        save(made, tmp_path / number)
    file = frozen_file(tmp_path / "2")
    before = file.read_bytes()
    with file.open("r+b") as opened:
        with pytest.raises(CheckpointWriteError, match=r"it has other names .*; save under another name"):
            fastensor.save({"x": torch.ones(3)}, f"/dev/fd/{opened.fileno()}", container="safetensors")
        with fastensor.AsyncWriter() as writer, pytest.raises(CheckpointWriteError, match="it has other names"):
            writer.save({"x": torch.ones(3)}, f"/dev/fd/{opened.fileno()}", container="safetensors")
    assert file.read_bytes() == before
    check(values(made), tmp_path / "1")


# --- a new model in the place of another one


@pytest.mark.crash
@pytest.mark.parametrize("frozen_before", [False, True])
@pytest.mark.parametrize("frozen_after", [False, True])
@pytest.mark.parametrize("again", [False, True], ids=["a new folder", "the same folder"])
def test_killed_before_the_nth_call(tmp_path: Path, frozen_before: bool, frozen_after: bool, again: bool) -> None:
    """The model that was there stays until the new one is whole, and so do others. The next save is whole, whatever was
    left."""
    made = model()
    found = []
    for fatal in count(1):
        old = tmp_path / f"{fatal}"
        new = old if again else tmp_path / f"{fatal}-new"
        made[0].requires_grad_(not frozen_before)
        save(made, tmp_path / f"{fatal}-other", durable=False)
        save(made, old, durable=False)
        before = values(made)
        train(made)
        after = values(made)
        made[0].requires_grad_(not frozen_after)
        pid = os.fork()
        if pid == 0:
            with intercepted(Killer(fatal, ("pwrite", "rename", "link", "unlink", "fsync"))):
                save(made, new)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        left = dict(sorted(fastensor.load_sharded(old).items()))
        found.append(torch.equal(left["1.weight"], after["1.weight"]))
        assert_equal(left, after if found[-1] else before)
        if (old / WHOLE).exists():  # which other readers prefer
            whole = dict(sorted(safetensors.torch.load_file(old / WHOLE).items()))
            assert_equal(whole, after if torch.equal(whole["1.weight"], after["1.weight"]) else before)
        check(before, tmp_path / f"{fatal}-other")
        save(made, new, durable=False)
        check(after, new)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert found == sorted(found)
    assert found[-1] == again
    assert fatal > 6


def test_a_save_whose_nth_call_fails(tmp_path: Path) -> None:
    """It raises, or has written what it could not link. The earlier model stays whole."""
    made = model()
    for number in count(1):
        old, new = tmp_path / f"{number}-old", tmp_path / f"{number}-new"
        save(made, old)
        expected = values(made)
        train(made)
        has_failed = True
        with failing_call(number) as fault, suppress(CheckpointWriteError):
            save(made, new)
            has_failed = False
        if not has_failed:
            check(values(made), new)
        elif new.exists() and fault.fired != "unlink":
            assert not leftovers(new)
        check(expected, old)
        save(made, new)
        check(values(made), new)
        if not fault.fired:
            break
    assert number > 20


def test_a_link_without_an_index_was_left(tmp_path: Path) -> None:
    """By a process that was killed: the next save wants to give the same file the same name."""
    made = model()
    save(made, tmp_path / "1")
    (tmp_path / "2").mkdir()
    os.link(frozen_file(tmp_path / "1"), tmp_path / "2" / frozen_file(tmp_path / "1").name)
    save(made, tmp_path / "2")
    assert frozen_file(tmp_path / "1").stat().st_nlink == 2
    check(values(made), tmp_path / "2")


def test_another_file_has_the_name(tmp_path: Path) -> None:
    """The old file is replaced by a new one with the same rights, which a link would not have."""
    made = model()
    save(made, tmp_path / "1")
    (tmp_path / "2").mkdir()
    other = tmp_path / "2" / frozen_file(tmp_path / "1").name
    other.write_bytes(b"other")
    other.chmod(0o600)
    save(made, tmp_path / "2")
    assert other.stat().st_mode & 0o777 == 0o600
    assert frozen_file(tmp_path / "1").stat().st_mode & 0o777 != 0o600
    check(values(made), tmp_path / "2")


def test_an_old_index_goes_only_when_the_whole_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    save(made, tmp_path)
    before = values(made)
    train(made)
    made.requires_grad_(True)

    def fail(path: str) -> None:
        raise OSError(errno.EIO, "the disk has failed")

    with monkeypatch.context() as patched:
        patched.setattr(posix, "sync_directory", fail)
        with pytest.raises(CheckpointWriteError):
            save(made, tmp_path)
    old = fastensor.load_sharded(tmp_path / "model.safetensors.index.json")
    assert_equal(dict(sorted(old.items())), before)
    new = fastensor.load_sharded(tmp_path)  # which has its name, as for transformers
    assert_equal(dict(sorted(new.items())), dict(sorted(values(made).items())))
    save(made, tmp_path)
    check(values(made), tmp_path)


# --- single files, and asynchronous saves


def test_asynchronous_links(tmp_path: Path) -> None:
    state = {"a": torch.randn(1000), "b": torch.zeros(0), "c": torch.ones(3, dtype=torch.int8)}
    with fastensor.AsyncWriter() as writer:
        for number in range(4):
            if number == 2:
                state["a"] += 1
            handle = writer.save(state, tmp_path / f"{number}.safetensors", share_unchanged="link")
            assert (handle.result().shared_nbytes > 0) == (number in (1, 3))
            assert_equal(fastensor.load(tmp_path / f"{number}.safetensors"), state)
        assert writer.statistics().shared_nbytes == 2 * handle.result().nbytes
    inodes = [(tmp_path / f"{number}.safetensors").stat().st_ino for number in range(4)]
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]
    assert not leftovers(tmp_path)


def test_a_header_that_is_larger_than_the_staging_memory(tmp_path: Path) -> None:
    state = {f"{number:>02000}": torch.ones(1) for number in range(2200)}
    with fastensor.AsyncWriter(staging_bytes="4MiB") as writer:
        for number in "12":
            writer.save(state, tmp_path / f"{number}.safetensors", share_unchanged="link").result()
    assert (tmp_path / "1.safetensors").stat().st_nlink == 2


def test_a_link_that_is_dropped(tmp_path: Path) -> None:
    state = {"a": torch.randn(1000)}
    fastensor.save(state, tmp_path / "1.safetensors", share_unchanged="link")
    gate = threading.Event()
    with fastensor.AsyncWriter() as writer:
        first = writer.save({"b": torch.ones(3)}, tmp_path / "0.ckpt")
        first.add_done_callback(lambda handle: gate.wait(30))
        handle = writer.save(state, tmp_path / "2.safetensors", share_unchanged="link")
        writer.remove(tmp_path / "2.safetensors")
        gate.set()
        writer.wait()
    assert handle.stage in ("cancelled", "durable")
    assert {*os.listdir(tmp_path)} == {"0.ckpt", "1.safetensors"}
    assert_equal(fastensor.load(tmp_path / "1.safetensors"), state)


def test_threads_that_link_the_same_file(tmp_path: Path) -> None:
    made = model()
    save(made, tmp_path / "first")
    begin = threading.Barrier(4)

    def save_some(thread: int) -> None:
        begin.wait()
        for number in range(5):
            save(made, tmp_path / f"{thread}-{number}", durable=False)

    threads = [threading.Thread(target=save_some, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for folder in tmp_path.iterdir():
        check(values(made), folder)


# --- random histories


def replay(folder: Path, seed: int) -> None:
    """Models are changed, saved, removed and damaged. Each folder has the values that were saved there last."""
    random = Random(seed)
    made = model()
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for _ in range(random.randint(5, 25)):
        name = random.choice("abcd")
        layer = random.choice([0, 0, 1])
        match random.choice(("save", "save", "save", "link", "step", "data", "load", "freeze", "remove", "replace")):
            case "link" | "save" as what:
                how = "link" if what == "save" else random.choice([True, False])
                largest = random.choice([200, 10_000, 1_000_000])
                save(made, folder / name, share_unchanged=how, shard_nbytes=largest, durable=False)
                expected[name] = values(made)
            case "step":
                with torch.no_grad():
                    made[layer].weight += random.random()
            case "data":
                made[layer].bias.data[random.randrange(8)] += 1
            case "load":
                made.load_state_dict({name: one + 1 for name, one in made.state_dict().items()})
            case "freeze":
                made[layer].requires_grad_(random.random() < 0.5)
            case "remove":
                shutil.rmtree(folder / name, ignore_errors=True)
                expected.pop(name, None)
            case "replace" if name in expected:
                file = random.choice(sorted((folder / name).glob("*.safetensors")))
                safetensors.torch.save_file(safetensors.torch.load_file(file), file)
    for name, state in expected.items():
        assert_equal(dict(sorted(fastensor.load_sharded(folder / name, verify=True).items())), state)
        assert not leftovers(folder / name)


@pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")
def test_random_histories(tmp_path: Path) -> None:
    for seed in range(40):
        replay(tmp_path / str(seed), seed)


@pytest.mark.torture
@pytest.mark.filterwarnings("ignore::fastensor.UnverifiedCheckpointWarning")
def test_many_random_histories(tmp_path: Path) -> None:
    for seed in range(1000, 4000):
        replay(tmp_path / str(seed), seed)
        shutil.rmtree(tmp_path / str(seed), ignore_errors=True)
