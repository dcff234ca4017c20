"""``save_sharded(link_unchanged=...)``: what does not train is a hard link, and every model holds its own values."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from killer import Killer
from states import assert_equal
from torch import nn

import fastensor
from fastensor.checkpoint.models import links
from fastensor.files import posix
from fastensor.testing.calls import intercepted
from fastensor.testing.faults import failing_call

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def _new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins as a new process, which remembers no file."""
    monkeypatch.setattr(links, "_intact", {})
    links.announce.cache_clear()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    made[0].requires_grad_(False)
    return made


def train(made: nn.Sequential) -> None:
    with torch.no_grad():
        made[1].weight += 1


def save(made: nn.Module, folder: Path, **options: Any) -> fastensor.SaveReport:
    return fastensor.save_sharded(made, folder, **{"link_unchanged": True, **options})


def frozen_file(folder: Path) -> Path:
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / str(places["0.weight"])


def is_link(one: Path, other: Path) -> bool:
    return os.path.samestat(frozen_file(one).lstat(), frozen_file(other).lstat())


def check(made: nn.Module, folder: Path) -> None:
    """The folder has the values of the model, for Fastensor and for safetensors, and verifies."""
    expected = dict(sorted(made.state_dict().items()))
    assert_equal(dict(sorted(fastensor.load_sharded(folder).items())), expected)
    files = {*json.loads((folder / INDEX).read_text())["weight_map"].values()}
    found = {name: one for file in files for name, one in safetensors.torch.load_file(folder / file).items()}
    assert_equal(dict(sorted(found.items())), expected)
    assert fastensor.verify(folder).complete


def test_what_does_not_train_is_a_link(tmp_path: Path) -> None:
    made = model()
    first = save(made, tmp_path / "1")
    train(made)
    second = save(made, tmp_path / "2")
    assert is_link(tmp_path / "1", tmp_path / "2")
    assert first.shared_nbytes == 0
    assert second.shared_nbytes == frozen_file(tmp_path / "2").stat().st_size
    assert second.nbytes == first.nbytes
    assert "unchanged and shared" in str(second)
    check(made, tmp_path / "2")
    shutil.rmtree(tmp_path / "1")  # as a rotation does
    check(made, tmp_path / "2")
    train(made)
    save(made, tmp_path / "3")
    assert is_link(tmp_path / "2", tmp_path / "3")
    check(made, tmp_path / "3")


def test_without_the_option_nothing_is_linked(tmp_path: Path) -> None:
    for number in "12":
        fastensor.save_sharded(model(), tmp_path / number)
    assert os.listdir(tmp_path / "2") == ["model.safetensors"]
    assert (tmp_path / "2" / "model.safetensors").stat().st_nlink == 1


def test_what_has_changed_is_written_whatever_its_flag_says(tmp_path: Path) -> None:
    made = model()
    save(made, tmp_path / "1")
    old = made.state_dict()["0.weight"].clone()
    made[0].weight.data[3, 3] += 1
    report = save(made, tmp_path / "2")
    assert report.shared_nbytes == 0
    assert not is_link(tmp_path / "1", tmp_path / "2")
    check(made, tmp_path / "2")
    assert torch.equal(fastensor.load_sharded(tmp_path / "1")["0.weight"], old)


def test_the_same_folder_again(tmp_path: Path) -> None:
    made = model()
    for _ in range(3):
        save(made, tmp_path)
        check(made, tmp_path)
        train(made)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("metadata", [None, {"step": "1"}])
def test_metadata_are_part_of_a_file(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    save(model(), tmp_path / "1")
    save(model(), tmp_path / "2", metadata=metadata)
    assert is_link(tmp_path / "1", tmp_path / "2") == (metadata is None)


def test_names_and_patterns_of_a_dict(tmp_path: Path) -> None:
    state = dict(model().state_dict())
    for number in "12":
        save(state, tmp_path / number, frozen=["0.*"])  # type: ignore[arg-type]  # a dict
        state["1.weight"] = state["1.weight"] + 1
    assert is_link(tmp_path / "1", tmp_path / "2")
    save(model().state_dict(keep_vars=True), tmp_path / "3")  # type: ignore[arg-type]  # a dict
    assert is_link(tmp_path / "2", tmp_path / "3")


def test_arguments_that_mean_nothing(tmp_path: Path) -> None:
    state = dict(model().state_dict())
    with pytest.raises(ValueError, match="do not say whether they train; give frozen="):
        fastensor.save_sharded(state, tmp_path / "x", link_unchanged=True)
    with pytest.raises(ValueError, match="frozen is for link_unchanged"):
        fastensor.save_sharded(state, tmp_path / "x", frozen=["0.*"])
    with pytest.raises(ValueError, match="checksums=False leaves them out"):
        fastensor.save_sharded(model(), tmp_path / "x", link_unchanged=True, checksums=False)
    with pytest.raises(fastensor.UnknownKeyError, match=r"nothing in it is called or matches '2\.\*'"):
        fastensor.save_sharded(state, tmp_path / "x", link_unchanged=True, frozen=["2.*"])
    with pytest.raises(TypeError, match="link_unchanged is True, False or the folder of a model, found 1"):
        fastensor.save_sharded(model(), tmp_path / "x", link_unchanged=1)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        fastensor.save_sharded(model(), tmp_path / "x", link_unchanged=tmp_path / "nothing")
    assert not (tmp_path / "x").exists()


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


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("harm", [edited, replaced, led_elsewhere, made_a_pipe, given_other_tensors, Path.unlink])
def test_an_earlier_file_that_is_not_what_it_was_is_not_linked(
    tmp_path: Path, harm: Any, explicit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()
    save(made, tmp_path / "1")
    harm(frozen_file(tmp_path / "1"))
    if explicit:
        monkeypatch.setattr(links, "_intact", {})
    report = save(made, tmp_path / "2", link_unchanged=tmp_path / "1" if explicit else True)
    assert report.shared_nbytes == 0
    assert frozen_file(tmp_path / "2").stat().st_nlink == 1
    check(made, tmp_path / "2")


def test_a_folder_that_another_process_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    save(made, tmp_path / "1")
    monkeypatch.setattr(links, "_intact", {})
    train(made)
    assert save(made, tmp_path / "2").shared_nbytes == 0
    monkeypatch.setattr(links, "_intact", {})
    save(made, tmp_path / "3", link_unchanged=tmp_path / "1")
    assert is_link(tmp_path / "1", tmp_path / "3")
    check(made, tmp_path / "3")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.ENOENT])
def test_what_the_filesystem_refuses_to_link_is_written(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = model()
    save(made, tmp_path / "1")

    def refuse(fd: int, name: str) -> None:
        raise OSError(number, os.strerror(number), name)

    with monkeypatch.context() as patched:
        patched.setattr(links.posix, "link_file", refuse)
        patched.setattr("fastensor.files.atomic.posix.try_nameless", lambda *arguments: None)  # new files need no link
        assert save(made, tmp_path / "2").shared_nbytes == 0
    assert "linking unchanged files is not used" in caplog.text
    assert os.strerror(number) in caplog.text
    check(made, tmp_path / "2")
    save(made, tmp_path / "3")
    assert is_link(tmp_path / "2", tmp_path / "3")


def test_another_device(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second filesystem at /dev/shm")
    made = model()
    save(made, tmp_path / "1")
    folder = memory / f"fastensor-links-{os.getpid()}"
    try:
        assert save(made, folder).shared_nbytes == 0
        check(made, folder)
    finally:
        shutil.rmtree(folder)


def test_the_earlier_model_is_removed_before_the_link_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    save(made, tmp_path / "1")
    link = posix.link_file

    def remove_first(fd: int, name: str) -> None:
        if Path(name).parent == tmp_path / "2" and (tmp_path / "1").exists():
            shutil.rmtree(tmp_path / "1")
        link(fd, name)

    monkeypatch.setattr(links.posix, "link_file", remove_first)
    save(made, tmp_path / "2")
    check(made, tmp_path / "2")


@pytest.mark.crash
@pytest.mark.parametrize("again", [False, True], ids=["a new folder", "the same folder"])
def test_killed_before_the_nth_call(tmp_path: Path, again: bool) -> None:
    """The model that was there stays, and the next save is whole, whatever was left."""
    made = model()
    for fatal in count(1):
        old = tmp_path / f"{fatal}"
        new = old if again else tmp_path / f"{fatal}-new"
        save(made, old, durable=False)
        before = fastensor.load_sharded(old)
        train(made)
        pid = os.fork()
        if pid == 0:
            with intercepted(Killer(fatal, ("pwrite", "rename", "link", "unlink", "fsync"))):
                save(made, new)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        left = fastensor.load_sharded(old)
        assert_equal(left["0.weight"], before["0.weight"])
        assert again or torch.equal(left["1.weight"], before["1.weight"])
        save(made, new, durable=False)
        assert is_link(old, new)
        check(made, new)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert fatal > 6


def test_a_save_whose_nth_call_fails(tmp_path: Path) -> None:
    """It raises, or has written what it could not link. The earlier model stays whole."""
    made = model()
    for number in count(1):
        old, new = tmp_path / f"{number}-old", tmp_path / f"{number}-new"
        save(made, old)
        expected = fastensor.load_sharded(old)
        train(made)
        has_failed = True
        with failing_call(number) as fault, suppress(fastensor.CheckpointWriteError):
            save(made, new)
            has_failed = False
        if not has_failed:
            check(made, new)
        assert_equal(fastensor.load_sharded(old), expected)
        save(made, new)
        check(made, new)
        if not fault.fired:
            break
    assert number > 20


def test_what_is_read_by_a_symlink_is_not_remembered(tmp_path: Path) -> None:
    save(model(), tmp_path / "1")
    file = frozen_file(tmp_path / "1")
    led_elsewhere(file)
    links._intact.clear()
    with links.verifying(file):
        fastensor.load(file)
    assert not links._intact
