"""Replacing files: modes, links, leftovers, and what must not be replaced."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from disks import leftovers
from programs import Program, run

import fastensor
from fastensor.checkpoint.files import make_directories
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.checkpoint.writing.target import open_output, resolve_target
from fastensor.errors import CheckpointWriteError
from fastensor.files import atomic, posix
from fastensor.files.os_errors import kept_at
from fastensor.testing.calls import Call, intercepted

STATE = {"w": torch.arange(10)}


def hidden_name(path: Path) -> str:
    return next(atomic.hidden_names(str(path)))


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
    with closing(open_output(resolve_target(tmp_path / "x"))) as output:
        assert stat.S_IMODE(os.fstat(output.fd).st_mode) == 0o600


@pytest.mark.usefixtures("temporaries")
def test_concurrent_saves_over_existing_files(tmp_path: Path) -> None:
    def save(number: int) -> None:
        for _ in range(30):
            fastensor.save({"w": torch.full((1000,), number)}, tmp_path / str(number % 3))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(save, range(6)))
    for name in range(3):
        assert int(fastensor.load(tmp_path / str(name))["w"][0]) % 3 == name
    assert not leftovers(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dir").mkdir()
    refused = {
        "dir": "a directory",
        "dir/": "a slash",
        "new/": "a slash",
        "loop": "symbolic links",
        "no/x": "create it",
    }
    for name, expected in refused.items():
        with pytest.raises(CheckpointWriteError, match=expected):
            fastensor.save(STATE, f"{tmp_path}/{name}")
    assert sorted(os.listdir(tmp_path)) == ["dir", "loop"]
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


def test_a_name_that_is_taken_is_not_asked_for(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x")
    names: list[str] = []

    def note(call: Call) -> Any:
        names.append(call.name)
        return call.perform()

    with intercepted(note):
        fastensor.save(STATE, tmp_path / "x")
    assert names.count("link") == 1


def test_a_file_that_is_removed_while_it_is_replaced_is_there_again(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x")
    publish = atomic.NewFile.publish

    def remove_and_publish(new: atomic.NewFile, *, durable: bool) -> None:
        (tmp_path / "x").unlink()
        publish(new, durable=durable)

    with mock.patch.object(atomic.NewFile, "publish", remove_and_publish):
        fastensor.save(STATE, tmp_path / "x")
    assert torch.equal(torch.load(tmp_path / "x")["w"], STATE["w"])
    assert os.listdir(tmp_path) == ["x"]


def test_the_old_file_stays_readable_while_it_is_replaced(tmp_path: Path) -> None:
    fastensor.save({"w": 1}, tmp_path / "x")
    with (tmp_path / "x").open("rb") as old:
        fastensor.save({"w": 2}, tmp_path / "x")
        assert torch.load(old)["w"] == 1
    wait_for_space()


def test_a_leftover_of_the_same_target_is_removed_at_once(tmp_path: Path, temporaries: str) -> None:
    """A process was killed between getting the hidden name and the rename."""
    fastensor.save(STATE, tmp_path / "x")
    dead = Path(hidden_name(tmp_path / "x"))
    dead.write_bytes(b"cut off")
    foreign = tmp_path / f".x.notes{posix.TEMPORARY_SUFFIX}"
    foreign.write_text("not one of ours")
    with closing(open_output(resolve_target(tmp_path / "x"))) as alive:
        fastensor.save(STATE, tmp_path / "x")
        alive.replace(durable=False)
    assert sorted(os.listdir(tmp_path)) == [foreign.name, "x"]


def test_a_leftover_that_is_read_only_is_removed(tmp_path: Path) -> None:
    """Root may open anything: the refusal that others get is injected."""
    fastensor.save(STATE, tmp_path / "x")
    leftover = Path(hidden_name(tmp_path / "x"))
    leftover.touch(0o444)
    real_open = os.open

    def refuse_writing(path: str, flags: int, *arguments: int) -> int:
        if path == str(leftover) and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(path, flags, *arguments)

    with mock.patch.object(os, "open", refuse_writing):
        fastensor.save(STATE, tmp_path / "x")
    assert not leftover.exists()


@pytest.mark.usefixtures("only_named")
def test_where_files_have_names_leftovers_of_other_targets_are_removed_once(tmp_path: Path) -> None:
    """Killed saves under names that differ from save to save, as Lightning's do."""
    old, young, locked = (tmp_path / Path(hidden_name(tmp_path / name)).name for name in ("a", "b", "c"))
    for path in (old, young, locked):
        path.write_bytes(b"cut off")
        os.utime(path, (time.time() - (3000 if path is young else 4000),) * 2)
    with locked.open("r+b") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        fastensor.save(STATE, tmp_path / "x")
        assert {path.name for path in tmp_path.iterdir()} == {young.name, locked.name, "x"}
    os.utime(young, (0, 0))
    with mock.patch.object(os, "listdir", side_effect=AssertionError("once is enough")):
        fastensor.save(STATE, tmp_path / "y")
    assert young.exists()


def test_a_folder_is_never_listed_where_files_need_no_name(tmp_path: Path) -> None:
    with (
        mock.patch.object(os, "listdir", side_effect=AssertionError("the folder is listed")),
        mock.patch.object(os, "scandir", side_effect=AssertionError("the folder is listed")),
    ):
        for _ in range(2):
            fastensor.save(STATE, tmp_path / "x", backend="numpy")


@pytest.mark.parametrize("overwrite", [False, True])
def test_nothing_is_left_of_a_save_that_is_killed_in_mid_write(tmp_path: Path, overwrite: bool) -> None:
    code = (
        "import os, signal, sys, torch, fastensor\n"
        "from fastensor.testing.calls import intercepted\n"
        "def kill(call):\n"
        "    if call.name == 'pwrite': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return call.perform()\n"
        "with intercepted(kill): fastensor.save({'w': torch.zeros(1 << 20)}, sys.argv[1])"
    )
    if overwrite:
        fastensor.save(STATE, tmp_path / "x")
    assert run("-c", code, tmp_path / "x", check=False).returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == (["x"] if overwrite else [])


def test_a_file_of_another_living_process_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from fastensor.files.atomic import announce_writer\n"
        "t = announce_writer(sys.argv[1]); print('announced', flush=True); sys.stdin.read()"
    )
    with Program("-c", code, tmp_path / "x") as process:
        assert process.stdout.readline() == "announced\n"
        for _ in range(2):
            fastensor.save(STATE, tmp_path / "x")
        assert len(leftovers(tmp_path)) == 1
        assert not atomic.wait_for_writers(str(tmp_path / "x"), seconds=0)
        process.kill()
    assert atomic.wait_for_writers(str(tmp_path / "x"), seconds=0)
    fastensor.save(STATE, tmp_path / "x")
    assert not leftovers(tmp_path)


def test_filesystems_without_locks(tmp_path: Path, temporaries: str) -> None:
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "no locks")):
        for _ in range(2):
            fastensor.save(STATE, tmp_path / "x")
    assert not leftovers(tmp_path)


@pytest.mark.usefixtures("only_named")
def test_what_another_machine_has_put_in_our_place_is_not_published(tmp_path: Path) -> None:
    """Its locks are not seen here, nor ours there: it took our file for a leftover, and has begun its own."""
    fastensor.save(STATE, tmp_path / "x")
    with closing(open_output(resolve_target(tmp_path / "x"))) as output:
        name = Path(hidden_name(tmp_path / "x"))
        name.unlink()
        name.write_bytes(b"half of another file")
        with pytest.raises(OSError, match="removed or replaced"):
            output.replace(durable=False)
    assert torch.equal(torch.load(tmp_path / "x")["w"], STATE["w"])
    assert name.read_bytes() == b"half of another file"


@pytest.mark.usefixtures("only_named")
def test_a_file_taken_for_a_leftover_is_made_again(tmp_path: Path) -> None:
    flock, calls = fcntl.flock, iter([BlockingIOError()])

    def taken(fd: int, operation: int) -> None:
        for error in calls:
            raise error
        flock(fd, operation)

    with mock.patch.object(fcntl, "flock", taken):
        fastensor.save(STATE, tmp_path / "x")
    assert torch.equal(torch.load(tmp_path / "x")["w"], STATE["w"])
    assert not leftovers(tmp_path)


def test_btrfs_has_no_nameless_files_for_us(tmp_path: Path) -> None:
    """Its fsync skips files without names, so that the content would not be durable."""
    call = posix._call

    def on_btrfs(name: str, *arguments: Any) -> None:
        call(name, *arguments)
        if name == "fstatfs64":
            arguments[1][:8] = struct.pack("@l", 0x9123683E)

    with mock.patch.object(posix, "_call", on_btrfs):
        assert posix.try_nameless(str(tmp_path), 0o600) is None
        assert fastensor.save(STATE, tmp_path / "x").durable
    assert os.listdir(tmp_path) == ["x"]


def test_durable_syncs_file_then_name_and_not_durable_syncs_nothing(tmp_path: Path, temporaries: str) -> None:
    events: list[str] = []

    def record(call: Call) -> Any:
        result = call.perform()
        if call.name == "fsync":
            events.append("sync directory" if stat.S_ISDIR(os.fstat(call.arguments[0]).st_mode) else "sync file")
        elif call.name in ("link", "rename"):
            events.append(call.name)
        return result

    naming = ["rename"] if temporaries == "named" else ["link"]
    replacing = ["rename"] if temporaries == "named" else ["link", "rename"]
    with intercepted(record):
        durable = fastensor.save(STATE, tmp_path / "x")
        assert events == ["sync file", *naming, "sync directory"]
        events.clear()
        fastensor.save(STATE, tmp_path / "x")
        assert [event for event in events if event != "link"] == ["sync file", "rename", "sync directory"]
        events.clear()
        fast = fastensor.save(STATE, tmp_path / "x", durable=False)
        assert events[-len(replacing) :] == replacing
        assert not [event for event in events if event.startswith("sync")]
    assert (durable.durable, fast.durable, fast.sync_seconds) == (True, False, 0.0)


def test_directories_are_made_durably(tmp_path: Path) -> None:
    with mock.patch.object(posix, "sync_file", wraps=posix.sync_file) as sync:
        make_directories(tmp_path / "a" / "b" / "c", durable=True)
        assert sync.call_count == 3
        make_directories(tmp_path / "a" / "b" / "c", durable=True)
        make_directories(tmp_path / "d", durable=False)
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
    assert "File too large" in run("-c", code, tmp_path / "x").stdout
    assert torch.equal(fastensor.load(tmp_path / "x")["w"], STATE["w"])
    assert not leftovers(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with (
        mock.patch.object(os, "open", side_effect=PermissionError(errno.EACCES, "Permission denied")),
        pytest.raises(CheckpointWriteError, match="Permission denied"),
    ):
        fastensor.save(STATE, tmp_path / "x")


def test_space_of_replaced_files_is_freed(tmp_path: Path) -> None:
    for _ in range(3):
        fastensor.save({"w": torch.zeros(1 << 20)}, tmp_path / "x")
    wait_for_space()
    held = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.islink(f"/proc/self/fd/{fd}")
    ]
    assert not [name for name in held if str(tmp_path) in name]


def test_what_is_kept_is_claimed_only_where_it_is_seen(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    assert kept_at(str(tmp_path / "x")) == "what was there before is kept"
    assert kept_at(str(tmp_path / "y")) == "nothing was there before, and nothing is left"
    assert kept_at("s3://bucket/y") == "what was there before, if anything, is kept", "a store is not asked again"
    assert kept_at(str(tmp_path / ("x" * 300))) == "what was there before, if anything, is kept", (
        "it cannot be looked at"
    )
