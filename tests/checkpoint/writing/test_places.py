"""Where files go, and who may use them: what torch.save may write is written, with the rights that were there."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import pickle
import re
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fastensor
from fastensor.checkpoint.location import Target
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.checkpoint.writing.target import open_output
from fastensor.errors import CheckpointWriteError
from fastensor.files import posix
from fastensor.testing import failing_call
from fastensor.testing.calls import Call, intercepted

STATE = {"w": torch.arange(10.0)}
ADA, BOB = 1000, 1001
ACL = "system.posix_acl_access"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for several users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users reach, which they do not reach below ``tmp_path``."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def as_user(uid: int, function: Callable[[], Any], *groups: int) -> Any:
    """What the function returns, or raises, if that user calls it."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setgroups(groups)
        os.setgid(uid)
        os.setuid(uid)
        try:
            outcome: Any = function()
        except BaseException as error:  # noqa: BLE001  # it is the parent's to judge
            outcome = error
        os.write(write_end, pickle.dumps(outcome))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        outcome = pickle.loads(file.read())
    os.waitpid(pid, 0)
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def old_file(path: Path, *, owner: int = ADA, group: int | None = None, mode: int = 0o644) -> Path:
    path.write_bytes(b"old")
    os.chown(path, owner, owner if group is None else group)
    path.chmod(mode)
    return path


def is_saved(path: str | Path) -> bool:
    return torch.equal(torch.load(path)["w"], STATE["w"])


def acl(*entries: tuple[int, int, int]) -> bytes:
    """The bytes of an ACL whose entries are given as tag, permissions and user or group id (see acl(5))."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry[:2], entry[2] & 0xFFFFFFFF) for entry in entries)


FOR_A_COLLEAGUE = acl((1, 6, -1), (2, 6, BOB), (4, 0, -1), (16, 6, -1), (32, 0, -1))
"""The owner and Bob read and write; the group and others do nothing."""


def set_attribute(path: str | Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"the filesystem of {path} has no {name} ({error.strerror})")


# who may use them


@needs_root
@pytest.mark.parametrize(("owner", "mode"), [(ADA, 0o444), (BOB, 0o644)], ids=["read-only", "of-another-user"])
def test_a_file_that_may_not_be_written_is_not_replaced(shared: Path, owner: int, mode: int) -> None:
    path = old_file(shared / "best.ckpt", owner=owner, mode=mode)
    for save in (torch.save, fastensor.save):
        with pytest.raises(
            (CheckpointWriteError, RuntimeError), match=r"denied|may not be written.*save under another"
        ):
            as_user(ADA, lambda save=save: save(STATE, path))  # type: ignore[misc]
    assert (path.read_bytes(), path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) == (b"old", owner, mode)
    assert os.listdir(shared) == ["best.ckpt"]


@needs_root
def test_a_colleagues_file_that_may_be_written_stays_the_colleagues(shared: Path) -> None:
    """A new file would be another user's: it is written in place, as by torch.save."""
    path = old_file(shared / "best.ckpt", owner=BOB, group=2000, mode=0o660)
    report = as_user(ADA, lambda: fastensor.save(STATE, path), 2000)
    assert is_saved(path)
    assert (report.atomic, report.durable, report.fallbacks[0].backend) == (False, True, "atomic replacement")
    assert "owner and rights" in report.fallbacks[0].reason
    assert (path.stat().st_uid, path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (BOB, 2000, 0o660)


@needs_root
def test_in_a_folder_with_the_sticky_bit_a_colleagues_file_is_written_in_place(shared: Path) -> None:
    path = old_file(shared / "best.ckpt", owner=BOB, mode=0o666)
    os.chmod(shared, 0o1777)
    os.chown(shared, BOB, BOB)
    assert "sticky" in as_user(ADA, lambda: fastensor.save(STATE, path)).fallbacks[0].reason
    assert is_saved(path)
    assert path.stat().st_uid == BOB


@pytest.mark.usefixtures("temporaries")
def test_acls_and_attributes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    fastensor.save({}, path)
    set_attribute(path, ACL, FOR_A_COLLEAGUE)
    set_attribute(path, "user.note", b"the best one")
    before = path.stat()
    report = fastensor.save(STATE, path)
    assert report.atomic
    assert path.stat().st_ino != before.st_ino
    assert path.stat().st_mode == before.st_mode
    assert os.getxattr(path, ACL) == FOR_A_COLLEAGUE
    assert os.getxattr(path, "user.note") == b"the best one"


@needs_root
def test_rights_of_a_colleague_are_those_before(shared: Path) -> None:
    path = old_file(shared / "best.ckpt", owner=ADA, group=2000, mode=0o600)
    set_attribute(path, ACL, FOR_A_COLLEAGUE)
    for save in (
        lambda: None,
        lambda: torch.save(STATE, path),
        lambda: as_user(ADA, lambda: fastensor.save(STATE, path)),
    ):
        save()
        assert as_user(BOB, lambda: (os.access(path, os.R_OK), os.access(path, os.W_OK))) == (True, True)
        assert as_user(2500, lambda: os.access(path, os.W_OK), 2000) is False


def test_an_acl_that_only_the_folder_would_give_is_not_added(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    fastensor.save({}, path)
    path.chmod(0o600)
    set_attribute(tmp_path, "system.posix_acl_default", FOR_A_COLLEAGUE)
    fastensor.save(STATE, path)
    assert ACL not in os.listxattr(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    fastensor.save(STATE, tmp_path / "new.ckpt")
    torch.save(STATE, tmp_path / "stock.ckpt")
    assert os.getxattr(tmp_path / "new.ckpt", ACL) == os.getxattr(tmp_path / "stock.ckpt", ACL)


@pytest.mark.parametrize("call", ["listxattr", "getxattr", "setxattr", "fchmod", "fchown"])
def test_where_rights_cannot_be_copied_the_file_is_written_in_place(tmp_path: Path, call: str) -> None:
    """Refusals of the kind that filesystems without attributes, or user namespaces, have are injected."""
    path = tmp_path / "best.ckpt"
    fastensor.save({}, path)
    set_attribute(path, "user.note", b"the best one")
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, ADA, ADA)
    elif call == "fchown":
        pytest.skip("only root can give files away")

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = path.stat()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, refuse)
        report = fastensor.save(STATE, path)
    assert not report.atomic
    assert "Operation not permitted" in report.fallbacks[0].reason
    assert is_saved(path)
    assert os.getxattr(path, "user.note") == b"the best one"
    after = path.stat()
    assert (after.st_ino, after.st_uid, after.st_mode) == (before.st_ino, before.st_uid, before.st_mode)
    assert os.listdir(tmp_path) == ["best.ckpt"]


# where they may be


@needs_root
def test_a_folder_that_may_be_written_but_not_read(shared: Path) -> None:
    os.chmod(shared, 0o733)
    for _ in range(2):
        report = as_user(ADA, lambda: fastensor.save(STATE, shared / "x.ckpt"))
        assert (report.durable, report.atomic) == (True, True)
    assert is_saved(shared / "x.ckpt")
    assert os.listdir(shared) == ["x.ckpt"]


@needs_root
def test_a_writable_file_in_a_folder_that_may_not_be_written(shared: Path) -> None:
    path = old_file(shared / "x.ckpt", owner=ADA)
    os.chmod(shared, 0o755)
    report = as_user(ADA, lambda: fastensor.save(STATE, path))
    assert is_saved(path)
    assert not report.atomic
    assert report.fallbacks[0].reason.endswith("its directory lets no files be created (Permission denied)")
    with pytest.raises(CheckpointWriteError, match="Permission denied"):
        as_user(ADA, lambda: fastensor.save(STATE, shared / "new.ckpt"))


def in_a_mount_namespace(script: str, *arguments: str) -> str:
    """Run a shell script where it may mount; ``$PYTHON`` runs the code given as the last argument."""
    command = ["unshare", "-m", "sh", "-ec", script, "sh", *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("there is no unshare(1)")
    if "unshare failed" in run.stderr or "permission denied" in run.stderr.lower():
        pytest.skip(f"nothing can be mounted here: {run.stderr.strip()}")
    assert run.returncode == 0, run.stderr
    return run.stdout


@needs_root
def test_a_file_that_is_mounted_by_itself(tmp_path: Path) -> None:
    """``docker run -v $PWD/model.pt:/model.pt``."""
    outside, inside = tmp_path / "outside.pt", tmp_path / "inside.pt"
    outside.write_bytes(b"old")
    inside.touch()
    code = (
        "import sys, torch, fastensor; r = fastensor.save({'w': torch.arange(10.)}, sys.argv[1]);"
        "print(r.atomic, r.durable, r.fallbacks[0].reason)"
    )
    script = 'mount --bind "$1" "$2" && $PYTHON -c "$3" "$2"'
    printed = in_a_mount_namespace(script, str(outside), str(inside), code)
    assert printed == f"False True {inside}: it is mounted by itself\n"
    assert is_saved(outside)


@needs_root
def test_a_disk_without_room_for_both_files(tmp_path: Path) -> None:
    """Nothing is lost by refusing, much by writing in place."""
    code = (
        "import os, sys, torch, fastensor; path = sys.argv[1] + '/x.ckpt'\n"
        "fastensor.save({'w': torch.zeros(1 << 20)}, path)\n"
        "try: fastensor.save({'w': torch.ones(1 << 20)}, path)\n"
        "except fastensor.CheckpointWriteError as error: print(error.strerror)\n"
        "print(int(fastensor.load(path)['w'].sum()), os.listdir(sys.argv[1]))"
    )
    script = 'mount -t tmpfs -o size=6m none "$1" && $PYTHON -c "$2" "$1"'
    printed = in_a_mount_namespace(script, str(tmp_path), code)
    assert printed == (
        "the save failed (No space left on device: the new file needs 4.03 MiB beside the old one; 1.97 MiB are free); "
        "what was there before is kept\n0 ['x.ckpt']\n"
    )


@needs_root
def test_a_disk_without_room_for_the_first_file(tmp_path: Path) -> None:
    """The message claims no older file. What writes without reserving says what is free, too."""
    code = (
        "import sys, torch, fastensor; path = sys.argv[1]\n"
        "for save in (lambda: fastensor.save({'w': torch.ones(2 << 20)}, path + '/x.ckpt'),\n"
        "             lambda: fastensor.save_sharded({'w': torch.ones(2 << 20)}, path + '/model')):\n"
        "    try: save()\n"
        "    except fastensor.CheckpointWriteError as error: print(error.strerror)"
    )
    script = 'mount -t tmpfs -o size=6m none "$1" && $PYTHON -c "$2" "$1"'
    assert in_a_mount_namespace(script, str(tmp_path), code).splitlines() == [
        f"the save failed (No space left on device: the new file needs {size}; 6 MiB are free); nothing was there "
        "before, and nothing is left"
        for size in ("8.03 MiB", "8 MiB")
    ]


WITHOUT_PROC = """
import sys, torch, fastensor
from fastensor.offload import ActivationOffload, OffloadConfig
folder = sys.argv[1]
state = {"w": torch.ones(3_000_000)}
for name in ("x.pt", "x.pt", "x.safetensors"):
    report = fastensor.save(state, f"{folder}/{name}")
    assert report.atomic and report.durable
    for backend in ("auto", "numpy", "direct", "torch"):
        assert torch.equal(fastensor.load(f"{folder}/{name}", backend=backend)["w"], state["w"])
    assert fastensor.verify(f"{folder}/{name}").compared
    with fastensor.open(f"{folder}/{name}") as checkpoint:
        assert torch.equal(checkpoint["w", :3], state["w"][:3])
assert torch.equal(fastensor.load(f"{folder}/x.pt", mmap=True)["w"], state["w"])
with fastensor.AsyncWriter() as writer:
    writer.save(state, f"{folder}/later.pt")
store = fastensor.TensorStore(f"{folder}/store")
assert torch.equal(store.get(store.put(state["w"])), state["w"])
weight = torch.randn(512, 512, requires_grad=True)
with ActivationOffload(OffloadConfig(schedule="all", directories=(folder,))) as offload:
    with offload.step():
        loss = weight.exp().sin().sum()
    offload.settle()
    loss.backward()
expected = torch.autograd.grad(weight.exp().sin().sum(), weight)[0]
assert torch.equal(weight.grad, expected)
print("all of it works")
"""


@needs_root
def test_a_machine_without_proc(tmp_path: Path) -> None:
    script = 'umount -l /proc && $PYTHON -c "$2" "$1"'
    assert in_a_mount_namespace(script, str(tmp_path), WITHOUT_PROC) == "all of it works\n"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no folder in memory")
def test_what_is_in_memory_is_not_durable() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder, "x.ckpt")
        for _ in range(2):
            report = fastensor.save(STATE, path)
            assert (report.atomic, report.durable) == (True, False)
        path.write_bytes(b"")
        assert not fastensor.save(STATE, path).durable
        with fastensor.AsyncWriter() as writer:
            assert not writer.save(STATE, path).result().durable


# what is written in place


def test_devices_and_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    report = fastensor.save(STATE, tmp_path / "pipe")
    reader.join()
    (tmp_path / "received").write_bytes(received[0])
    assert is_saved(tmp_path / "received")
    assert (report.nbytes, report.atomic, report.durable) == (len(received[0]), False, False)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert fastensor.save(STATE, "/dev/null").nbytes == report.nbytes
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


@pytest.mark.parametrize("folder", ["/dev/fd", "/proc/self/fd", "/proc/thread-self/fd"])
@pytest.mark.parametrize("named", [True, False])
def test_a_descriptors_file_is_written_for_whoever_has_it(tmp_path: Path, folder: str, named: bool) -> None:
    with (tmp_path / "x").open("w+b") as file:
        file.write(b"longer than what is saved" * 1000)
        file.flush()
        if not named:
            os.unlink(tmp_path / "x")
        report = fastensor.save(STATE, f"{folder}/{file.fileno()}")
        assert not report.atomic
        file.seek(0)
        assert torch.equal(torch.load(file)["w"], STATE["w"])
        assert os.fstat(file.fileno()).st_size == report.nbytes
    assert os.listdir(tmp_path) == (["x"] if named else [])


def test_a_link_to_a_descriptor(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        (tmp_path / "link").symlink_to(f"/dev/fd/{file.fileno()}")
        fastensor.save(STATE, tmp_path / "link")
        file.seek(0)
        assert torch.equal(torch.load(file)["w"], STATE["w"])


def test_a_descriptor_that_is_not_open(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match="no file is open"):
        fastensor.save(STATE, "/dev/fd/987654")


def test_an_empty_file_is_written_for_whoever_has_it_open(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=tmp_path) as file:
        report = fastensor.save(STATE, file.name)
        assert (report.atomic, report.durable, report.fallbacks) == (False, True, ())
        assert torch.equal(torch.load(file)["w"], STATE["w"])
        assert fastensor.save(STATE, file.name).atomic, "there is something to keep now"


@pytest.mark.parametrize("durable", [True, False])
def test_the_name_of_an_empty_file_is_as_durable_as_its_contents(tmp_path: Path, durable: bool) -> None:
    (tmp_path / "x").touch()
    synced = []

    def note(call: Call) -> Any:
        if call.name == "fsync":
            synced.append(os.readlink(f"/proc/self/fd/{call.arguments[0]}"))
        return call.perform()

    with intercepted(note):
        assert not fastensor.save(STATE, tmp_path / "x", durable=durable).atomic
    assert synced == [str(tmp_path / "x"), str(tmp_path)] * durable


def test_an_empty_file_is_empty_again_if_the_save_fails(tmp_path: Path) -> None:
    path = tmp_path / "x"
    failed = 0
    for number in range(1, 100):
        path.write_bytes(b"")
        with failing_call(number) as fault:
            try:
                report = fastensor.save(STATE, path)
            except CheckpointWriteError as error:
                failed += 1
                if "all of it was written" in str(error):  # closing it failed
                    assert is_saved(path)
                else:
                    assert re.search("kept|cannot look at", str(error))
                    assert path.read_bytes() == b""
            else:
                assert is_saved(path)
                assert not report.atomic
        if not fault.fired:
            break
    assert failed > 5
    assert not fault.fired


@pytest.mark.parametrize("container", ["torch", "safetensors"])
@pytest.mark.parametrize("previous", [b"", b"something to lose"], ids=["empty", "filled"])
def test_what_is_written_in_place_is_not_saved_later(
    tmp_path: Path, container: Any, previous: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with (tmp_path / "x").open("w+b") as file, fastensor.AsyncWriter() as writer:
        file.write(previous)
        file.flush()
        for value in range(2):
            handle = writer.save({"w": STATE["w"] + value}, f"/dev/fd/{file.fileno()}", container=container)
            assert handle.done()
            assert not handle.result().atomic
            assert torch.equal(fastensor.load(tmp_path / "x")["w"], STATE["w"] + value)
    assert "written in place" in caplog.text


def test_a_pipe_is_opened_once(tmp_path: Path) -> None:
    """Who reads it sees an end when it is closed, though it is opened again."""
    os.mkfifo(tmp_path / "pipe")
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    with fastensor.AsyncWriter() as writer, mock.patch.object(os, "open", wraps=os.open) as opened:
        reader.start()
        report = writer.save(STATE, tmp_path / "pipe").result()
        reader.join()
    assert [call.args[0] for call in opened.call_args_list].count(str(tmp_path / "pipe")) == 1
    (tmp_path / "received").write_bytes(received[0])
    assert (report.nbytes, is_saved(tmp_path / "received")) == (len(received[0]), True)


def test_what_cannot_be_written_in_place_is_counted_and_leaves_nothing_open(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b") as file, fastensor.AsyncWriter() as writer:
        file.write(b"old")
        file.flush()
        other = os.open(tmp_path / "x", os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX)
        gc.collect()  # what earlier tests have left
        wait_for_space()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(CheckpointWriteError, match="another process has locked it"):
                writer.save(STATE, f"/dev/fd/{file.fileno()}")
        assert len(os.listdir("/proc/self/fd")) == before
        os.close(other)
        assert writer.statistics().failed == 3
        writer.save(STATE, f"/dev/fd/{file.fileno()}")
    assert is_saved(tmp_path / "x")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_was_reserved_in_vain_is_given_back(tmp_path: Path, error: BaseException) -> None:
    """``fallocate`` may have taken blocks behind the file's end when it fails."""

    def interrupt(call: Call) -> Any:
        result = call.perform()
        if call.name == "fallocate64":
            raise error
        return result

    with (tmp_path / "x").open("w+b") as file:
        file.write(b"old")
        file.flush()
        os.fsync(file.fileno())
        blocks = os.fstat(file.fileno()).st_blocks
        with intercepted(interrupt), pytest.raises((CheckpointWriteError, KeyboardInterrupt)):
            fastensor.save({"w": torch.zeros(1 << 20)}, f"/dev/fd/{file.fileno()}")
        assert os.fstat(file.fileno()).st_blocks == blocks
    assert (tmp_path / "x").read_bytes() == b"old"


def test_what_was_written_before_the_lock_was_had_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process writes the empty file, and unlocks it, between our look at it and our lock."""
    path = tmp_path / "x"
    path.touch()
    lock = posix.try_lock

    def late(fd: int) -> bool:
        if not path.stat().st_size:
            torch.save(STATE, path)
        return lock(fd)

    monkeypatch.setattr(posix, "try_lock", late)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posix, "write_fully", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(CheckpointWriteError, match="is kept"):
            fastensor.save({"w": torch.zeros(3)}, path, backend="numpy")
    assert is_saved(path)


def test_a_forked_child_holds_no_lock_of_a_save_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    target = Target(str(path), is_descriptor=True)
    held = open_output(target)
    pid = os.fork()
    if pid == 0:
        signal.pause()
    try:
        held.close()
        open_output(target).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_an_empty_file_that_is_locked_is_replaced(tmp_path: Path) -> None:
    """Another save may be writing it."""
    path = tmp_path / "x"
    path.touch()
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert fastensor.save(STATE, path).atomic
    assert is_saved(path)


def test_what_is_locked_and_cannot_be_replaced_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b") as file:
        file.write(b"old")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        other = os.open(tmp_path / "x", os.O_RDWR)
        try:
            with pytest.raises(CheckpointWriteError, match="another process has locked it"):
                fastensor.save(STATE, f"/dev/fd/{other}")
        finally:
            os.close(other)
    assert (tmp_path / "x").read_bytes() == b"old"


def test_without_room_what_is_written_in_place_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, nbytes: int, *, keep_size: bool) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastensor.files.posix.preallocate", full)
    with (tmp_path / "x").open("w+b") as file:
        file.write(b"old")
        file.flush()
        with pytest.raises(CheckpointWriteError, match=r"No space left on device.*is kept"):
            fastensor.save(STATE, f"/dev/fd/{file.fileno()}")
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_save_in_place_that_is_cut_off_is_no_checkpoint(tmp_path: Path) -> None:
    """Same size, so that the end of the old file would complete the beginning of the new one."""
    old, new = {"w": torch.zeros(1 << 20)}, {"w": torch.ones(1 << 20)}
    tally: Counter[str] = Counter()
    with (tmp_path / "x").open("w+b") as file:
        for number in range(1, 100):
            file.seek(0)
            file.truncate()
            torch.save(old, file)
            file.flush()
            outcome = "all of it was written"
            with failing_call(number) as fault:
                try:
                    fastensor.save(new, f"/dev/fd/{file.fileno()}", backend="numpy")
                except CheckpointWriteError as error:
                    outcome = str(error)
            if "holds a part of the new contents" in outcome:
                tally[fault.fired] += 1
                with pytest.raises((EOFError, RuntimeError)):
                    torch.load(tmp_path / "x")
            else:
                expected = new if "all of it was written" in outcome else old
                assert torch.equal(torch.load(tmp_path / "x")["w"], expected["w"])
            if not fault.fired:
                break
    assert tally["pwrite"] == 2, "it is written in two parts"
    assert not fault.fired


# what a path is


def test_a_path_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    store = fastensor.TensorStore("tensors")
    with fastensor.AsyncWriter() as writer:
        writer.save(STATE, "x.ckpt")
        monkeypatch.chdir(tmp_path / "elsewhere")
        ref = store.put(STATE["w"])
    assert is_saved(tmp_path / "x.ckpt")
    assert torch.equal(store.get(ref), STATE["w"])
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_path_is_taken_as_torch_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a/b")
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("~x.pt", "file:x.pt", "x:y.pt", "./a/../x.pt", "link/../x.pt"):
        fastensor.save(STATE, name)
        assert is_saved(name)
    assert sorted(os.listdir(tmp_path)) == ["a", "file:x.pt", "link", "x.pt", "x:y.pt", "~x.pt"]
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "x.pt"]


def test_a_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(CheckpointWriteError, match="its directory is missing"):
        fastensor.save(STATE, "x.ckpt")
    monkeypatch.chdir(tmp_path)
