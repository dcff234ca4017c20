"""Replacing files: modes, links, leftovers, and what must not be replaced."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
import torch

import fastensor
from fastensor.backends import posix
from fastensor.checkpoint import publish
from fastensor.errors import CheckpointWriteError

STATE = {"w": torch.arange(10)}


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(posix.TEMPORARY_SUFFIX)]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_a_new_file_follows_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        fastensor.save(STATE, tmp_path / "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~umask


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x")
    (tmp_path / "x").chmod(0o640)
    fastensor.save(STATE, tmp_path / "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_a_replaced_file_keeps_its_owner(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    fastensor.save(STATE, tmp_path / "x")
    os.chown(tmp_path / "x", 12345, 12345)
    fastensor.save(STATE, tmp_path / "x")
    assert ((tmp_path / "x").stat().st_uid, (tmp_path / "x").stat().st_gid) == (12345, 12345)


def test_rights_of_a_group_are_not_given_to_another(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x")
    (tmp_path / "x").chmod(0o640)
    if os.geteuid() == 0:
        os.chown(tmp_path / "x", 0, 12345)
    else:
        pytest.skip("only root can give files away")
    with mock.patch.object(os, "fchown", side_effect=OSError(errno.EINVAL, "an unmapped group")):
        fastensor.save(STATE, tmp_path / "x")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600


def test_a_symlinks_target_is_replaced_not_the_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/file")
    for _ in range(2):  # dangling at first
        report = fastensor.save(STATE, tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert report.path == str(tmp_path / "real" / "file")
        assert torch.equal(torch.load(tmp_path / "real" / "file")["w"], STATE["w"])
    assert not leftovers(tmp_path)


def test_a_link_itself_can_be_replaced(tmp_path: Path) -> None:
    fastensor.save({"w": 1}, tmp_path / "best")
    (tmp_path / "last").symlink_to("best")
    fastensor.save({"w": 2}, tmp_path / "last", follow_symlinks=False)
    assert not (tmp_path / "last").is_symlink()
    assert (fastensor.load(tmp_path / "best")["w"], fastensor.load(tmp_path / "last")["w"]) == (1, 2)


def test_the_contents_of_a_private_file_are_never_readable_by_others(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x")
    (tmp_path / "x").chmod(0o600)
    with closing(publish.open_temporary(publish.resolve_target(tmp_path / "x"))) as temporary:
        assert stat.S_IMODE(os.fstat(temporary.fd).st_mode) == 0o600


def test_concurrent_saves_over_existing_files(tmp_path: Path) -> None:
    def save(number: int) -> None:
        for _ in range(30):
            fastensor.save({"w": torch.full((1000,), number)}, tmp_path / str(number % 3))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(save, range(6)))
    for name in range(3):
        assert int(fastensor.load(tmp_path / str(name))["w"][0]) % 3 == name
    assert not leftovers(tmp_path)


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    refused = {"pipe": "not a regular file", "": "a directory", "loop": "not a regular file", "no/x": "create it"}
    for name, expected in refused.items():
        with pytest.raises(CheckpointWriteError, match=expected):
            fastensor.save(STATE, tmp_path / name)
    with pytest.raises(CheckpointWriteError, match="not a regular file"):
        fastensor.save(STATE, "/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(TypeError, match="str"):
        fastensor.save(STATE, b"bytes")  # type: ignore[arg-type]


def test_names_as_long_as_the_filesystem_allows(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    fastensor.save(STATE, path)
    fastensor.save(STATE, path)
    assert torch.equal(torch.load(path)["w"], STATE["w"])


def test_odd_names(tmp_path: Path) -> None:
    for name in (".hidden", "[a]*?.pt", "ünïcode 文", "a\nb"):
        fastensor.save(STATE, tmp_path / name)
        assert torch.equal(fastensor.load(tmp_path / name)["w"], STATE["w"])


def test_the_old_file_stays_readable_while_it_is_replaced(tmp_path: Path) -> None:
    fastensor.save({"w": 1}, tmp_path / "x")
    with (tmp_path / "x").open("rb") as old:
        fastensor.save({"w": 2}, tmp_path / "x")
        assert torch.load(old)["w"] == 1
    publish.wait_for_space()


def test_leftovers_of_the_dead_are_removed_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    target = publish.resolve_target(tmp_path / "x")
    dead, other = publish._stem(target) + "0" * 12, publish._stem(publish.resolve_target(tmp_path / "xy")) + "0" * 12
    for stem in (dead, other):
        Path(stem + posix.TEMPORARY_SUFFIX).write_bytes(b"cut off")
    foreign = tmp_path / f".x.notes{posix.TEMPORARY_SUFFIX}"
    foreign.write_text("not one of ours")
    with closing(publish.open_temporary(target)) as temporary:
        alive = temporary.name
        fastensor.save(STATE, tmp_path / "x")
        assert os.path.exists(alive)
        assert not os.path.exists(dead + posix.TEMPORARY_SUFFIX)
        assert os.path.exists(other + posix.TEMPORARY_SUFFIX)
        assert foreign.exists()
    assert not os.path.exists(alive)


def test_leftovers_that_are_read_only_are_removed(tmp_path: Path) -> None:
    """Root may open anything: the refusal that others get is injected."""
    leftover = Path(publish._stem(publish.resolve_target(tmp_path / "x")) + "0" * 12 + posix.TEMPORARY_SUFFIX)
    leftover.touch(0o444)
    real_open = os.open

    def refuse_writing(path: str, flags: int, *arguments: int) -> int:
        if path == str(leftover) and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, flags, *arguments)

    with mock.patch.object(os, "open", refuse_writing):
        fastensor.save(STATE, tmp_path / "x")
    assert not leftover.exists()


def test_a_temporary_of_another_living_process_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from fastensor.checkpoint.publish import *\n"
        "t = open_temporary(resolve_target(sys.argv[1])); print(t.name, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "x")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    name = process.stdout.readline().strip()
    fastensor.save(STATE, tmp_path / "x")
    assert os.path.exists(name)
    process.kill()
    process.communicate()
    fastensor.save(STATE, tmp_path / "x")
    assert not leftovers(tmp_path)


def test_filesystems_without_locks(tmp_path: Path) -> None:
    with mock.patch.object(publish.fcntl, "flock", side_effect=OSError(errno.ENOLCK, "no locks")):
        fastensor.save(STATE, tmp_path / "x")
    assert not leftovers(tmp_path)


def test_a_temporary_taken_for_a_leftover_is_made_again(tmp_path: Path) -> None:
    flock, calls = publish.fcntl.flock, iter([BlockingIOError()])

    def taken(fd: int, operation: int) -> None:
        for error in calls:
            raise error
        flock(fd, operation)

    with mock.patch.object(publish.fcntl, "flock", taken):
        fastensor.save(STATE, tmp_path / "x")
    assert torch.equal(torch.load(tmp_path / "x")["w"], STATE["w"])
    assert not [name for name in leftovers(tmp_path) if os.path.getsize(tmp_path / name)]


def test_durable_syncs_file_then_name_and_not_durable_syncs_nothing(tmp_path: Path) -> None:
    events: list[str] = []
    sync, rename = posix.sync_file, os.rename

    def on_sync(fd: int) -> None:
        events.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        sync(fd)

    def on_rename(source: str, target: str) -> None:
        events.append("rename")
        rename(source, target)

    with mock.patch.object(posix, "sync_file", on_sync), mock.patch.object(os, "rename", on_rename):
        durable = fastensor.save(STATE, tmp_path / "x")
        assert events == ["file", "rename", "directory"]
        events.clear()
        fast = fastensor.save(STATE, tmp_path / "x", durable=False)
        assert events == ["rename"]
    assert (durable.durable, fast.durable, fast.sync_seconds) == (True, False, 0.0)


def test_directories_are_made_durably(tmp_path: Path) -> None:
    with mock.patch.object(posix, "sync_file", wraps=posix.sync_file) as sync:
        publish.make_directories(tmp_path / "a" / "b" / "c", durable=True)
        assert sync.call_count == 3
        publish.make_directories(tmp_path / "a" / "b" / "c", durable=True)
        publish.make_directories(tmp_path / "d", durable=False)
        assert sync.call_count == 3
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(posix, "preallocate", side_effect=full),
        mock.patch.object(os, "pwrite") as pwrite,
        pytest.raises(CheckpointWriteError, match="No space left") as caught,
    ):
        fastensor.save({"w": torch.zeros(1 << 20)}, tmp_path / "x")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "x")
    pwrite.assert_not_called()
    assert (tmp_path / "x").read_bytes() == before
    assert not leftovers(tmp_path)


def test_a_really_full_disk(tmp_path: Path) -> None:
    """A size limit stands for the full disk: fallocate fails the same way."""
    code = (
        "import resource, signal, sys, torch, fastensor\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: fastensor.save(torch.zeros(1 << 20), sys.argv[1])\n"
        "except fastensor.CheckpointWriteError as error: print(error.strerror)"
    )
    fastensor.save(STATE, tmp_path / "x")
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True, timeout=60, check=True
    )
    assert "File too large" in run.stdout
    assert torch.equal(fastensor.load(tmp_path / "x")["w"], STATE["w"])
    assert not leftovers(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with (
        mock.patch.object(os, "open", side_effect=PermissionError(errno.EACCES, "Permission denied")),
        pytest.raises(CheckpointWriteError, match="temporary file in the target's directory"),
    ):
        fastensor.save(STATE, tmp_path / "x")


def test_space_of_replaced_files_is_freed(tmp_path: Path) -> None:
    for _ in range(3):
        fastensor.save({"w": torch.zeros(1 << 20)}, tmp_path / "x")
    publish.wait_for_space()
    held = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    ]
    assert not [name for name in held if str(tmp_path) in name]
