"""A directory takes another one's place: whole or not at all, whichever system call fails."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from programs import Program

from fastensor.checkpoint.files import remove
from fastensor.files import new_directory, posix
from fastensor.files.new_directory import NewDirectory, names_of, replace_link
from fastensor.testing import failing_call
from fastensor.testing.calls import Call, intercepted

pytestmark = pytest.mark.crash

KINDS = ["directory", "file", "link", "nothing"]
KILLED_WITH_CHILD = """
import os, signal, sys
from fastensor.files.new_directory import NewDirectory
new = NewDirectory(sys.argv[1])
new.create()
if os.fork() == 0:
    print(os.getpid(), flush=True)  # what a child does first has been done
signal.pause()
"""


def put(path: Path, kind: str) -> None:
    if kind == "directory":
        path.mkdir()
        (path / "old").write_text("old")
    elif kind == "file":
        path.write_text("old")
    elif kind == "link":
        (path.parent / "target").mkdir()
        path.symlink_to("target")


def is_old(path: Path, kind: str) -> bool:
    if kind == "directory":
        return os.listdir(path) == ["old"]
    if kind == "file":
        return path.is_file() and path.read_text() == "old"
    return path.is_symlink() and os.readlink(path) == "target" if kind == "link" else not os.path.lexists(path)


def is_new(path: Path) -> bool:
    return not path.is_symlink() and path.is_dir() and sorted(os.listdir(path)) == ["a", "folder"]


def save(path: Path) -> None:
    new = NewDirectory(str(path))
    try:
        new.create()
        hidden = Path(new.hidden)
        (hidden / "a").write_text("a")
        (hidden / "folder").mkdir()
        (hidden / "folder" / "b").write_text("b")
        new.publish(durable=True)
    except BaseException:
        new.discard()
        raise


class Killed(BaseException):
    """Nothing runs afterwards."""


def test_a_process_that_is_killed_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    put(path, "directory")
    monkeypatch.setattr(posix, "exchange", lambda one, two: False)
    renames = []
    rename = os.rename

    def killed_afterwards(one: str, two: str) -> None:
        if renames:
            raise Killed
        renames.append(one)
        rename(one, two)

    new = NewDirectory(str(path))
    new.create()
    with monkeypatch.context() as patches:
        patches.setattr(os, "rename", killed_afterwards)
        with pytest.raises(Killed):
            new.publish(durable=True)
    new._unlock()
    assert not path.exists()
    again = NewDirectory(str(path))
    again.create()
    assert is_old(path, "directory")
    again.discard()
    assert os.listdir(tmp_path) == ["x"]


def link(path: Path) -> None:
    (path.parent / "saved").mkdir(exist_ok=True)
    replace_link(str(path.parent / "saved"), str(path))


def is_link(path: Path) -> bool:
    return path.is_symlink() and os.readlink(path) == "saved"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize(("save", "is_new"), [(save, is_new), (link, is_link)], ids=["directory", "link"])
def test_whichever_call_fails_the_old_or_the_new_is_there(
    save: Any, is_new: Any, kind: str, exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:  # as on some network filesystems
        monkeypatch.setattr(posix, "exchange", lambda one, two: False)
    outcomes = []
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        put(folder / "x", kind)
        with failing_call(number) as fault:
            try:
                save(folder / "x")
            except OSError:
                outcomes.append(is_old(folder / "x", kind))
                assert is_new(folder / "x") != outcomes[-1]
        if not fault.fired:
            break
        save(folder / "x")
        assert is_new(folder / "x")
        assert set(os.listdir(folder)) - {"target", "saved"} == {"x"}, "nothing is left over"
    assert True in outcomes
    assert is_new(folder / "x")


def test_two_processes_do_not_fill_the_same_directory(tmp_path: Path) -> None:
    one = NewDirectory(str(tmp_path / "x"))
    one.create()
    two = NewDirectory(str(tmp_path / "x"))
    with pytest.raises(FileExistsError, match="another process is saving"):
        two.create()
    two.discard()
    assert os.path.isdir(one.hidden)
    one.discard()
    assert not os.listdir(tmp_path)


def test_a_forked_child_does_not_keep_what_its_killed_parent_has_locked(tmp_path: Path) -> None:
    """Such as a worker of a DataLoader."""
    new = NewDirectory(str(tmp_path / "x"))
    with Program("-c", KILLED_WITH_CHILD, tmp_path / "x") as program:
        child = int(program.stdout.readline())
        program.kill()
        program.wait()
        try:
            new.create()
        finally:
            os.kill(child, signal.SIGKILL)
    new.discard()


def test_a_forked_child_leaves_its_parents_directory_alone(tmp_path: Path) -> None:
    new = NewDirectory(str(tmp_path / "x"))
    new.create()
    if (child := os.fork()) == 0:
        new.discard()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    assert new.is_intact
    with pytest.raises(FileExistsError, match="another process is saving"):
        NewDirectory(str(tmp_path / "x")).create()
    new.publish(durable=False)
    assert os.path.isdir(tmp_path / "x")


def test_what_killed_processes_have_left_long_ago_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, busy = NewDirectory(str(tmp_path / "left")), NewDirectory(str(tmp_path / "busy"))
    left.create()
    busy.create()
    left._unlock()  # as when its process is killed
    NewDirectory(str(tmp_path / "x")).create()
    assert os.path.isdir(left.hidden), "it may be another machine's"
    monkeypatch.setattr(new_directory, "LEFTOVER_SECONDS", -1)
    NewDirectory(str(tmp_path / "y")).create()
    assert not os.path.isdir(left.hidden)
    assert os.path.isdir(busy.hidden)


def test_whichever_call_fails_a_removed_directory_is_whole_or_gone(tmp_path: Path) -> None:
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "x"
        save(path)
        with failing_call(number) as fault:
            try:
                remove(path)
            except OSError:
                assert is_new(path) or not path.exists()
        if not fault.fired:
            break
        remove(path)
        save(path)
        assert os.listdir(folder) == ["x"]
    assert os.listdir(folder) == []
    assert number > 5


def test_another_process_removes_what_is_old_at_any_instant(tmp_path: Path) -> None:
    """A process that saves something else in the same folder meanwhile."""
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        folder.mkdir()
        calls = itertools.count(1)
        left = NewDirectory(str(folder / "left"))
        put(folder / "x", "directory")
        put(Path(left.hidden), "directory")
        for path in (folder / "x", left.hidden):
            os.utime(path, (0, 0))

        def call_later(call: Call, folder: Path = folder, calls: Any = calls, number: int = number) -> Any:
            if next(calls) == number:
                other = NewDirectory(str(folder / "other"))
                other.create()
                other.discard()
            return call.perform()

        with intercepted(call_later):
            save(folder / "x")
        assert is_new(folder / "x")
        assert os.listdir(folder) == ["x"]
        if next(calls) <= number:
            break
    assert number > 20


def test_the_names_of_a_file_whatever_links_lead_to_it(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for folder in ("real", "link"):
        new = NewDirectory(str(tmp_path / folder / "checkpoint"))
        new.create()
        for path in (Path(new.hidden) / "x", Path(os.path.realpath(new.hidden)) / "x"):
            assert names_of(str(path)) == (str(path), str(tmp_path / folder / "checkpoint" / "x"))
        assert names_of(str(tmp_path / folder / "x")) == (str(tmp_path / folder / "x"),)
        new.discard()
