"""Dictionaries on the disk: what several processes learn, and what is in the way of that."""

from __future__ import annotations

import errno
import fcntl
import inspect
import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from fastensor.files import posix
from fastensor.select import files
from fastensor.select.context import Context
from fastensor.select.dictionary import MOST_NBYTES, Change, Dictionary, DictionaryError
from fastensor.select.files import DictionaryFile, default_folder, file_for, files_in, read
from fastensor.select.machine import digest, identity
from fastensor.testing import failing_call, short_call
from fastensor.testing.calls import Call, intercepted

MIB = 1 << 20
WRITE = Context("write")
MACHINE = {"cpu": "2 × AMD EPYC"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_warned", set())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "dictionaries" / "0123456789abcdef.json"


@pytest.fixture
def file(path: Path) -> DictionaryFile:
    return DictionaryFile(path, MACHINE)


def took(seconds: float = 1.0, backend: str = "numpy", nbytes: int = MIB) -> Change:
    return Change(WRITE, nbytes, backend, seconds)


def count(path: Path, backend: str = "numpy") -> int:
    timing = read(path).dictionary.of(WRITE, MIB).timings.get(backend)
    return 0 if timing is None else timing.count


def in_a_child(work: Callable[[], Any]) -> int:
    """Fork, and do something there; the child's id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def succeeded(pid: int) -> bool:
    return os.waitpid(pid, 0)[1] == 0


def test_what_is_noted_is_there_after_a_flush(file: DictionaryFile, path: Path, caplog: Any) -> None:
    assert len(file.load()) == 0
    file.flush()
    assert not path.parent.exists()  # nothing noted, nothing done
    file.note(took(2.0))
    file.note(took(3.0, "direct"))
    assert not path.parent.exists()
    file.flush()
    assert DictionaryFile(path, {}).load().of(WRITE, MIB).best == "numpy"
    assert read(path).machine == MACHINE
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.lock"]
    before = path.read_bytes()
    file.flush()
    assert path.read_bytes() == before
    assert not caplog.records


def test_files_learn_from_each_other(path: Path) -> None:
    first, second = DictionaryFile(path, MACHINE), DictionaryFile(path, MACHINE)
    first.note(took(1.0, "numpy"))
    second.note(took(2.0, "direct"))
    first.flush()
    second.flush()
    first.note(took(3.0, "numpy"))
    first.flush()
    timings = read(path).dictionary.of(WRITE, MIB).timings
    assert {name: timing.samples for name, timing in timings.items()} == {"numpy": (1.0, 3.0), "direct": (2.0,)}


def test_processes_lose_nothing_of_each_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 60.0)
    start, go = os.pipe()

    def work() -> None:
        os.read(start, 1)
        file = DictionaryFile(path, MACHINE)
        for _ in range(20):
            file.note(took(backend="numpy"))
            file.note(took(backend=f"of {os.getpid()}"))
            file.flush()
        assert not file._noted

    children = [in_a_child(work) for _ in range(4)]
    os.write(go, b"4444")
    assert [succeeded(child) for child in children] == [True] * 4
    os.close(start)
    os.close(go)
    assert count(path) == 80
    assert [count(path, f"of {child}") for child in children] == [20] * 4
    assert sorted(os.listdir(path.parent)) == [path.name, f"{path.name}.lock"]


def test_threads_lose_nothing_of_each_other(file: DictionaryFile, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 60.0)

    def work() -> None:
        for _ in range(20):
            file.note(took())
            file.flush()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(path) == 80


def test_a_signal_handler_may_note_and_flush_at_any_time(tmp_path: Path) -> None:
    """In the place of signals: the handler is called before each of the instructions of a note and a flush."""
    methods = {function.__code__ for function in vars(DictionaryFile).values() if inspect.isfunction(function)}
    left = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if frame.f_code not in methods:
            return None
        if event == "opcode":
            left -= 1
            if left == 0:
                file.note(took(backend="direct"))
                file.flush()
        return trace

    def work() -> None:
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks whether any frame wants these when tracing begins
        sys.settrace(trace)
        try:
            file.note(took())
            file.flush()
        finally:
            sys.settrace(before)

    for number in range(1, 1000):
        path = tmp_path / f"{number}.json"
        file, left = DictionaryFile(path, MACHINE), number
        file.note(took())
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(timeout=30)
        assert not worker.is_alive(), f"it hangs at instruction {number}"
        file.flush()
        assert (count(path), count(path, "direct")) == (2, left <= 0)
        if left > 0:
            assert number > 100
            return
    pytest.fail("it never ends")


def test_a_forked_child_begins_with_nothing_noted(file: DictionaryFile, path: Path) -> None:
    file.note(took())

    def work() -> None:
        file.flush()
        assert not path.exists()
        file.note(took(backend="direct"))
        file.flush()

    with file._lock:  # by a thread that the child does not have
        child = in_a_child(work)
        assert succeeded(child)
    assert (count(path), count(path, "direct")) == (0, 1)
    file.flush()
    assert (count(path), count(path, "direct")) == (1, 1)


def test_a_child_that_is_forked_during_a_flush_does_not_keep_the_lock(path: Path) -> None:
    begin, end = os.pipe()
    children = []

    def fork(call: Call) -> Any:
        if call.name == "link":
            children.append(in_a_child(lambda: os.read(begin, 1)))
        return call.perform()

    with intercepted(fork):
        DictionaryFile(path, MACHINE).update([took()])
    DictionaryFile(path, MACHINE).update([took()])
    os.write(end, b"1")
    assert succeeded(children[0])
    os.close(begin)
    os.close(end)
    assert count(path) == 2


def test_files_follow_the_umask(file: DictionaryFile, path: Path) -> None:
    before = os.umask(0o027)
    try:
        file.update([took()])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_links_are_followed(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(path)
    DictionaryFile(link, MACHINE).update([took()])
    DictionaryFile(path, MACHINE).update([took()])
    assert link.is_symlink()
    assert count(link) == count(path) == 2


def test_a_full_dictionary_stays_small(file: DictionaryFile, path: Path) -> None:
    for size in range(12, 42):
        for number in range(40):
            file.note(took(0.123456, f"a rather long name of a backend {number}", 1 << size))
    file.flush()
    assert path.stat().st_size <= MOST_NBYTES
    assert len(file.load()) > 3


DAMAGED = {
    "empty": (b"", "damaged"),
    "text": (b"something else", "damaged"),
    "binary": (bytes(range(256)), "damaged"),
    "cut": (Dictionary().to_json().encode()[:-3], "damaged"),
    "foreign": (b'{"format": "zip"}', "not a dictionary"),
    "of another version": (Dictionary().to_json().replace('"version": 2', '"version": 7').encode(), "version 7"),
    "of no machine": (Dictionary().to_json().replace('"machine": {}', '"machine": 3').encode(), "3 is no machine"),
    "too large": (b" " * (1 << 20) + Dictionary().to_json().encode(), "expected at most 1048576"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_said_and_kept(file: DictionaryFile, path: Path, caplog: Any, name: str) -> None:
    content, what = DAMAGED[name]
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DictionaryError, match=what):
        read(path)
    for _ in range(2):
        assert len(file.load()) == 0
    assert os.listdir(path.parent) == [path.name]  # until there is something to write
    assert path.read_bytes() == content
    (said,) = [record.message for record in caplog.records]
    assert what in said
    assert said.endswith("; what was learned before is not used")
    file.note(took())
    file.flush()
    assert count(path) == 1
    assert Path(f"{path}.damaged").read_bytes() == content
    _, said = [record.message for record in caplog.records]
    assert what in said
    assert said.endswith(f"; learning begins anew, and the file is kept as {path}.damaged")


def test_a_dictionary_without_a_machine_is_read(path: Path) -> None:
    text = json.loads(Dictionary().to_json())
    del text["machine"]
    path.parent.mkdir()
    path.write_text(json.dumps(text))
    assert read(path).machine == {}


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_left_alone(
    file: DictionaryFile, path: Path, caplog: Any, make: Callable[[Path], Any]
) -> None:
    path.parent.mkdir()
    make(path)
    kind = path.stat().st_mode
    for _ in range(2):
        assert len(file.load()) == 0
        file.note(took())
        file.flush()
    assert path.stat().st_mode == kind
    assert [record.message.split(":")[0] for record in caplog.records] == [
        f"{path} cannot be read",
        f"{path} cannot be written",
    ]
    path.rmdir() if stat.S_ISDIR(kind) else path.unlink()
    file.flush()
    assert count(path) == 2


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EIO])
def test_no_failing_call_is_raised_or_loses_anything(tmp_path: Path, caplog: Any, code: int) -> None:
    number, fired = 0, set()
    while True:
        number += 1
        path = tmp_path / f"{number}.json"
        DictionaryFile(path, MACHINE).update([took(backend="torch")])
        file = DictionaryFile(path, MACHINE)
        file.note(took())
        with failing_call(number, code) as fault:
            file.flush()
        fired.add(fault.fired)
        assert count(path, "torch") == 1
        file.note(took(backend="direct"))
        file.flush()
        assert (count(path), count(path, "direct")) == (1, 1)
        assert sum(record.message.startswith(f"{path} cannot be written: ") for record in caplog.records) <= 1
        if not fault.fired:
            break
    assert {"open", "fstat", "flock", "preadv", "pwrite", "rename", "close"} <= fired
    assert not [name for name in os.listdir(tmp_path) if name.endswith(posix.TEMPORARY_SUFFIX)]
    assert caplog.records


def test_failing_calls_of_a_load_are_said(path: Path, caplog: Any) -> None:
    for number in range(1, 10):
        there = path.with_name(f"{number}.json")
        DictionaryFile(there, MACHINE).update([took()])
        caplog.clear()
        with failing_call(number) as fault:
            found = len(DictionaryFile(there, MACHINE).load())
        if not fault.fired:
            return
        assert found == 1 or f"{there} cannot be read: " in caplog.text
    pytest.fail("it never succeeds")


def test_short_calls(tmp_path: Path) -> None:
    for number in range(1, 40):
        path = tmp_path / f"{number}.json"
        DictionaryFile(path, MACHINE).update([took(backend="torch")])
        with short_call(number) as fault:
            DictionaryFile(path, MACHINE).update([took()])
        assert (count(path), count(path, "torch")) == (1, 1)
        if not fault.fired:
            return
    pytest.fail("it never ends")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_filesystems_without_locks(file: DictionaryFile, path: Path, caplog: Any, code: int) -> None:
    def refuse(call: Call) -> Any:
        if call.name == "flock":
            raise OSError(code, os.strerror(code))
        return call.perform()

    with intercepted(refuse):
        file.note(took())
        file.flush()
    assert count(path) == 1
    assert not caplog.records


def test_a_lock_that_is_held_for_long_stops_no_caller(
    file: DictionaryFile, path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.0)
    path.parent.mkdir()
    with open(f"{path}.lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        for _ in range(3):
            file.note(took())
            file.flush()
    assert not path.exists()
    (record,) = caplog.records
    assert "another process holds the lock" in record.message
    file.flush()
    assert count(path) == 3


def test_a_flush_that_takes_long_stops_no_other_thread(
    file: DictionaryFile, path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.0)
    file.note(took())
    with file._lock:
        other = threading.Thread(target=file.flush, daemon=True)
        other.start()
        other.join(timeout=30)
        assert not other.is_alive()
    assert not path.exists()
    (record,) = caplog.records
    assert "another thread has been writing it" in record.message
    file.flush()
    assert count(path) == 1


def test_a_lock_that_was_removed_meanwhile_is_none(file: DictionaryFile, path: Path) -> None:
    locked = []

    def remove(call: Call) -> Any:
        if call.name == "flock" and call.arguments[1] & fcntl.LOCK_EX:
            locked.append(os.fstat(call.arguments[0]).st_ino)
            if len(locked) == 1:
                os.unlink(f"{path}.lock")
        return call.perform()

    with intercepted(remove):
        file.update([took()])
    assert len(locked) == 3, "the last one is the new dictionary's"
    assert os.stat(f"{path}.lock").st_ino == locked[1]
    assert count(path) == 1


def test_only_so_much_is_remembered(file: DictionaryFile, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_NOTED", 5)
    limited = DictionaryFile(path, MACHINE)
    path.parent.write_text("in the way of the folder")
    for number in range(9):
        limited.note(took(float(number)))
        limited.flush()
    path.parent.unlink()
    limited.flush()
    assert read(path).dictionary.of(WRITE, MIB).timings["numpy"].samples == (4.0, 5.0, 6.0, 7.0, 8.0)


def test_what_is_noted_during_a_failing_flush_comes_after_it(file: DictionaryFile, path: Path) -> None:
    def refuse(call: Call) -> Any:
        if call.name == "link":
            file.note(took(2.0))
            raise OSError(errno.ENOSPC, "full")
        return call.perform()

    file.note(took(1.0))
    with intercepted(refuse):
        file.flush()
    file.flush()
    assert read(path).dictionary.of(WRITE, MIB).timings["numpy"].samples == (1.0, 2.0)


def test_removing(file: DictionaryFile, path: Path) -> None:
    assert file.remove() == []
    file.update([took()])
    beside = [Path(f"{path}{ending}") for ending in (".damaged",)]
    others = [
        path.with_name(name) for name in ("notes.txt", f"{path.name}.mine", f"{path.name}x", "fedcba9876543210.json")
    ]
    for other in (*beside, *others):
        other.touch()
    assert set(file.remove()) == {path, Path(f"{path}.lock"), *beside}
    assert sorted(path.parent.iterdir()) == sorted(others)
    assert files_in(path.parent) == [others[-1]]
    file.update([took()])
    assert count(path) == 1


def test_what_is_in_a_folder(tmp_path: Path) -> None:
    assert files_in(tmp_path / "missing") == []
    for name in ("a" * 16 + ".json", "b" * 16 + ".json.lock", "B" * 16 + ".json", "c.json", "d" * 16):
        (tmp_path / name).touch()
    assert files_in(tmp_path) == [tmp_path / ("a" * 16 + ".json"), tmp_path / ("b" * 16 + ".json")]


def test_where_dictionaries_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given, expected in (("mine", tmp_path / "mine"), ("/a/../b", Path("/b")), ("~/d", tmp_path / "home" / "d")):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("FASTENSOR_DICTIONARIES", given)
        assert default_folder() == expected
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert default_folder() == tmp_path / "cache" / "fastensor" / "dictionaries"
    monkeypatch.delenv("FASTENSOR_DICTIONARIES")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == tmp_path / "home" / ".cache" / "fastensor" / "dictionaries"


def no_home(name: str) -> Path:
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize("cache", [no_home, lambda name: Path("~/.cache") / name])  # of platformdirs new and old
def test_who_has_no_home_learns_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, cache: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FASTENSOR_DICTIONARIES", raising=False)
    monkeypatch.setattr(files, "user_cache_path", cache)
    file = file_for(tmp_path)
    assert len(file.load()) == 0
    file.note(took())
    file.flush()
    assert not os.listdir(tmp_path)
    assert "unless FASTENSOR_DICTIONARIES names another folder" in caplog.text


def test_the_dictionary_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path / "mine"))
    machine = identity(tmp_path)
    file = file_for(tmp_path / "not" / "there.ckpt")
    assert (file.path, file.machine) == (tmp_path / "mine" / f"{digest(machine)}.json", machine)
    assert file_for(tmp_path, tmp_path / "other").path == tmp_path / "other" / file.path.name
    assert not os.listdir(tmp_path)


def test_reading_allocates_what_the_file_has(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that shrinks, or grows, while it is read is what was read of it."""
    DictionaryFile(path, MACHINE).update([took()])
    text = path.read_bytes()
    real = posix.read_fully

    def cut(fd: int, buffer: memoryview, offset: int) -> int:
        os.truncate(path, len(text) // 2)
        return real(fd, buffer, offset)

    monkeypatch.setattr(posix, "read_fully", cut)
    with pytest.raises(DictionaryError, match="damaged"):
        read(path)
