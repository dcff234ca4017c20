"""How the directory of a state is replaced: units, and what a filesystem that refuses or a kill leaves."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerators import files_in

from fastensor.errors import CheckpointWriteError
from fastensor.files import posix
from fastensor.files.new_directory import DirectoryInUseError
from fastensor.testing import failing_call
from fastensor.testing.calls import Call, intercepted
from fastensor_accelerate.directories import (
    StateDirectory,
    finish,
    is_incomplete,
    move_into,
    named_state,
    published_path,
    remove_leftovers,
    remove_state,
    restore_replaced,
    settle_states,
    state_in,
    states_in,
    surplus,
)

MOST_CALLS = 300
CHANGES = ("mkdir", "rename", "link", "unlink", "symlink", "fsync")
"""Calls between which a kill makes a difference."""
NEW = {"model.safetensors": "new", "random_states_0.pkl": "new", "deep/file": "new", "deep/deeper/file": "new"}
OLD = {
    "model.safetensors": "old",
    "random_states_0.pkl": "old",
    "deep/file": "old",
    "deep/foreign": "mine",
    "mine": "mine",
}


class Killed(BaseException):
    """In place of the end of the process: nothing is cleaned up after it."""


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def content(folder: Path) -> dict[str, str]:
    """The text of each file below a folder."""
    return {name: (folder / name).read_text() for name in files_in(folder) if not name.endswith("/")}


def named(folder: Path, number: int = 3) -> StateDirectory:
    return named_state(str(folder), number)


def stage(state: StateDirectory) -> None:
    state.prepare(durable=True)
    write(Path(state.staging), NEW)


def die(state: StateDirectory) -> None:
    """What the end of its process does."""
    state._new._unlock()


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_a_named_state_appears_by_one_rename(tmp_path: Path, link: bool, durable: bool) -> None:
    state = named(tmp_path)
    stage(state)
    assert not state.exists
    assert os.listdir(tmp_path / "checkpoints") == []
    state.publish(durable=durable, link=link)
    assert content(Path(state.path)) == NEW
    assert os.listdir(tmp_path / "checkpoints") == ["checkpoint_3"]
    assert os.path.exists(state.staging) == link
    assert not state.is_staged
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "checkpoints.saving"][: 1 + link]


@pytest.mark.parametrize("durable", [False, True])
def test_a_directory_of_the_script_gets_the_files(tmp_path: Path, durable: bool) -> None:
    write(tmp_path, OLD)
    state = state_in(tmp_path)
    stage(state)
    assert is_incomplete(tmp_path)
    state.publish(durable=durable, link=True)
    assert content(tmp_path) == {**NEW, "deep/foreign": "mine", "mine": "mine"}
    assert not is_incomplete(tmp_path)
    assert not state.is_staged


@pytest.mark.parametrize("name", ["model.safetensors", "model_1.safetensors"])
def test_a_model_that_would_be_read_first_is_named(tmp_path: Path, name: str) -> None:
    state = state_in(tmp_path / "x")
    write(tmp_path / "x", {"pytorch_model.bin": "old", "my_model.safetensors": "mine"})
    state.check_has_no_safetensors()
    write(tmp_path / "x", {name: "old"})
    with pytest.raises(CheckpointWriteError, match="remove it, or save to another directory") as caught:
        state.check_has_no_safetensors()
    assert caught.value.filename == str(tmp_path / "x" / name)


@pytest.mark.parametrize("kind", ["named", "explicit"])
def test_what_was_discarded_is_gone(tmp_path: Path, kind: str) -> None:
    write(tmp_path, OLD)
    state = named(tmp_path) if kind == "named" else state_in(tmp_path)
    stage(state)
    for _ in range(2):
        state.discard()
        assert content(tmp_path) == OLD
        assert not [name for name in os.listdir(tmp_path) if "saving" in name]


def every_call(act: Callable[[], None], code: int | None) -> Any:
    """Do it with the first call failing, then the second, and so on; or, without a code, with the process ending there.

    Yields what it has raised, or None.
    """
    for number in range(1, MOST_CALLS):
        raised: BaseException | None = None
        try:
            if code is None:
                calls = iter(range(number))

                def end(call: Call, calls: Any = calls) -> Any:
                    if call.name in CHANGES and next(calls, None) is None:
                        raise Killed
                    return call.perform()

                with intercepted(end):
                    act()
                fired = False
            else:
                with failing_call(number, code) as fault:
                    act()
                fired = bool(fault.fired)
        except (OSError, Killed) as error:
            raised, fired = error, True
        yield raised
        if not fired:
            return
    pytest.fail(f"it takes more than {MOST_CALLS} calls")


ends = pytest.mark.parametrize("code", [None, errno.EIO, errno.ENOSPC], ids=["killed", "EIO", "ENOSPC"])


@ends
@pytest.mark.parametrize("link", [False, True])
def test_publishing_a_named_state_ends_at_the_nth_call(tmp_path: Path, code: int | None, link: bool) -> None:
    number = 0

    def act() -> None:
        named(tmp_path, number).publish(durable=True, link=link)

    outcomes = []
    stage(named(tmp_path, number))
    for _ in every_call(act, code):
        state = named(tmp_path, number)
        outcomes.append(state.exists)
        if state.exists:
            assert content(Path(state.path)) == NEW
        else:
            assert content(Path(state.staging)) == NEW
        number += 1
        stage(named(tmp_path, number))
        for other in states_in(str(tmp_path / "checkpoints")):
            assert content(Path(other)) == NEW
    assert {False, True} == {*outcomes}


@ends
@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("link", [False, True])
def test_replacing_a_named_state_ends_at_the_nth_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, link: bool, exchanges: bool
) -> None:
    """There is the old state or the new one, whole, by either of its names."""
    if not exchanges:  # as on some network filesystems
        monkeypatch.setattr(posix, "exchange", lambda one, two: False)
    path, outcomes = tmp_path / "checkpoints" / "checkpoint_3", []
    write(path, OLD)
    states = [named(tmp_path)]
    stage(states[0])
    for _ in every_call(lambda: states[-1].publish(durable=True, link=link, replaces=True), code):
        state = states.pop()
        die(state)
        restore_replaced(str(path.parent))
        outcomes.append(content(path))
        assert content(path) in (OLD, NEW)
        assert os.listdir(path.parent) == ["checkpoint_3"]
        if code is None and outcomes[-1] == NEW:
            assert content(published_path(state.staging)) == NEW
        state = named(tmp_path)
        state.prepare(durable=True)  # whoever saves next
        state.discard()
        assert content(path) == outcomes[-1]
        assert not os.path.lexists(tmp_path / "checkpoints.saving")
        shutil.rmtree(path)
        write(path, OLD)
        states.append(named(tmp_path))
        stage(states[0])
    assert OLD in outcomes
    assert outcomes[-1] == NEW


@pytest.mark.parametrize("kind", ["named", "explicit"])
def test_a_directory_that_another_process_saves_to(tmp_path: Path, kind: str) -> None:
    def state() -> StateDirectory:
        return named(tmp_path) if kind == "named" else state_in(tmp_path)

    one, two = state(), state()
    stage(one)
    for _ in range(2):
        with pytest.raises(DirectoryInUseError, match="another process is saving to the same path") as caught:
            two.prepare(durable=True)
        assert caught.value.filename == one.path
        two.discard()
    named(tmp_path, 2).prepare(durable=True)  # takes nothing for a leftover that is not one
    assert content(Path(one.staging)) == NEW
    one.publish(durable=True, link=False)
    assert content(Path(one.path)).items() >= NEW.items()
    two.prepare(durable=True)
    assert two.is_intact
    shutil.rmtree(two.staging)  # by a machine that does not see our locks
    assert not two.is_intact
    with pytest.raises(OSError, match="removed or replaced, perhaps by another machine"):
        two.publish(durable=True, link=False)
    two.discard()
    assert content(Path(one.path)).items() >= NEW.items()


@ends
def test_publishing_to_a_directory_of_the_script_ends_at_the_nth_call(tmp_path: Path, code: int | None) -> None:
    """Once committed it is finished by the next who comes, and before that nothing has changed."""
    folder = tmp_path / "x"
    state = state_in(folder)
    expected = {**NEW, "deep/foreign": "mine", "mine": "mine"}
    outcomes = []

    def begin() -> None:
        if folder.exists():
            shutil.rmtree(folder)
        write(folder, OLD)
        stage(state)

    begin()
    for _ in every_call(lambda: state.publish(durable=True, link=False), code):
        if finish(folder) or content(folder) == expected:
            outcomes.append(True)
            assert content(folder) == expected
        else:
            outcomes.append(False)
            found = content(folder)
            assert {name: text for name, text in found.items() if not name.startswith(".fastensor")} == OLD
        die(state)
        state.prepare(durable=True)  # whoever saves next
        state.discard()
        assert content(folder) == (expected if outcomes[-1] else OLD)
        begin()
    assert {False, True} == {*outcomes}


@pytest.mark.parametrize("kind", ["named", "explicit"])
@ends
def test_preparing_ends_at_the_nth_call(tmp_path: Path, code: int | None, kind: str) -> None:
    """What is left does not keep the next one from it."""
    state = named(tmp_path / "x") if kind == "named" else state_in(tmp_path / "x")

    def begin() -> None:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        write(tmp_path / "x", OLD)
        write(Path(state.staging), {"left/over": "old"})
        if kind == "explicit":
            write(tmp_path / "x" / ".fastensor-saved", {"committed": "yes"})

    begin()
    for _ in every_call(lambda: state.prepare(durable=True), code):
        die(state)
        state.prepare(durable=True)
        assert files_in(Path(state.staging)) == []
        committed = {"committed": "yes"} if kind == "explicit" else {}
        assert content(tmp_path / "x") == {**OLD, **committed}
        die(state)
        begin()


@ends
def test_removing_a_state_ends_at_the_nth_call(tmp_path: Path, code: int | None) -> None:
    state = str(tmp_path / "checkpoints" / "checkpoint_0")
    write(Path(state), NEW)
    for _ in every_call(lambda: remove_state(state), code):
        assert not os.path.exists(state) or content(Path(state)) == NEW
        remove_leftovers(str(tmp_path / "checkpoints.saving"))
        assert not os.path.exists(tmp_path / "checkpoints.saving") or not os.listdir(tmp_path / "checkpoints.saving")
        write(Path(state), NEW)


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("same", [True, False])
@ends
def test_what_a_script_has_written_stays_whichever_call_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, same: bool, exchanges: bool
) -> None:
    """A file that the script has written stays where it is. Of two files of one name, that of the state counts. Once
    committed, the state is finished by the next who comes."""
    if not exchanges:
        monkeypatch.setattr(posix, "exchange", lambda one, two: False)
    mine = {"mine": "mine", "deep/deeper/mine": "mine", **({"model.safetensors": "mine"} if same else {})}
    outcomes, state = [], named(tmp_path)

    def begin() -> None:
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        stage(state)
        write(Path(state.path), mine)

    begin()
    for raised in every_call(lambda: state.publish(durable=True, link=False), code):
        state.discard()
        finish(state.path)
        outcomes.append(content(Path(state.path)))
        assert outcomes[-1] in ({**mine, **NEW}, mine)
        assert raised or outcomes[-1] != mine
        begin()
    assert mine in outcomes
    assert outcomes[-1] != mine


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_link_or_a_file_of_the_script_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, exchanges: bool
) -> None:
    """The link may lead to another filesystem, to which no rename leads."""
    if not exchanges:
        monkeypatch.setattr(posix, "exchange", lambda one, two: False)
    state = named(tmp_path)
    stage(state)
    write(tmp_path / "elsewhere", OLD)
    if kind == "link":
        os.symlink(tmp_path / "elsewhere", state.path)
    else:
        Path(state.path).write_text("mine")
    state.publish(durable=True, link=False)
    assert not os.path.islink(state.path)
    assert content(Path(state.path)) == NEW
    assert content(tmp_path / "elsewhere") == OLD
    assert sorted(os.listdir(tmp_path)) == ["checkpoints", "elsewhere"]


def test_an_empty_directory_of_the_script_is_no_state_when_publishing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = named(tmp_path)
    stage(state)
    os.mkdir(state.path)
    with monkeypatch.context() as patches:
        patches.setattr(os, "rename", lambda *_: os.stat(tmp_path / "missing"))
        with pytest.raises(FileNotFoundError):
            state.publish(durable=True, link=False)
    state.discard()
    assert os.listdir(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("call", ["load", "prepare"])
def test_another_process_comes_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The cleaning takes no state that was set aside for a leftover: the old state is needed if the second rename
    fails."""
    monkeypatch.setattr(posix, "exchange", lambda one, two: False)
    state = named(tmp_path)
    write(Path(state.path), OLD)
    stage(state)
    rename, renamed = os.rename, []

    def rename_and_come(one: str, two: str) -> None:
        if renamed and renamed[-1].endswith(".fastensor-replaced"):
            renamed.append("")
            if call == "load":
                restore_replaced(os.path.dirname(state.path))
            else:
                named(tmp_path, 4).prepare(durable=True)
            assert content(Path(renamed[0])) == OLD
            raise OSError(errno.EIO, "the second rename")
        renamed.append(two)
        rename(one, two)

    monkeypatch.setattr(os, "rename", rename_and_come)
    with pytest.raises(OSError, match="the second rename"):
        state.publish(durable=True, link=False, replaces=True)
    assert content(Path(state.path)) == OLD


def test_moving_merges_directories(tmp_path: Path) -> None:
    write(tmp_path / "a", {"x": "a", "deep/x": "a", "deep/deeper/x": "a", "only/a": "a"})
    write(tmp_path / "b", {"x": "b", "deep/x": "b", "deep/y": "b", "only_b": "b"})
    (tmp_path / "a" / "link").symlink_to("deep")
    move_into(str(tmp_path / "a"), str(tmp_path / "b"), durable=True)
    assert os.listdir(tmp_path / "a") == []
    (tmp_path / "b" / "link").unlink()
    assert content(tmp_path / "b") == {
        "x": "a", "deep/x": "a", "deep/deeper/x": "a", "deep/y": "b", "only/a": "a", "only_b": "b"
    }  # fmt: skip


def test_the_state_is_not_moved_over_a_directory_of_the_script(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors/mine": "mine"})
    state = state_in(tmp_path)
    stage(state)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        state.publish(durable=True, link=False)
    assert (tmp_path / "model.safetensors" / "mine").read_text() == "mine"
    os.rename(tmp_path / "model.safetensors", tmp_path / "elsewhere")
    assert finish(tmp_path)
    assert content(tmp_path) == {**NEW, "elsewhere/mine": "mine"}


def test_states_are_sorted_by_accelerates_number(tmp_path: Path) -> None:
    for name in ("checkpoint_10", "checkpoint_9", "notes", "run_3_of_7"):
        (tmp_path / name).mkdir()
    assert [os.path.basename(state) for state in states_in(str(tmp_path))] == [
        "run_3_of_7", "checkpoint_9", "checkpoint_10"
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError):
        states_in(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, []), (0, ["a", "b"]), (1, ["a", "b"]), (2, ["a"]), (3, []), (4, [])]
)
def test_what_is_too_old(limit: int | None, expected: list[str]) -> None:
    assert surplus(["a", "b", "c"], "elsewhere/c", limit) == expected
    assert surplus(["a", "b"], "elsewhere/c", limit) == expected, "the newest one may not be listed"


def test_leftovers(tmp_path: Path) -> None:
    saving = tmp_path / "checkpoints.saving"
    remove_leftovers(str(saving))
    state = named(tmp_path)
    stage(state)
    state.publish(durable=False, link=True)
    write(saving, {"checkpoint_4/file": "left", "checkpoint_2.removed/file": "left"})
    (saving / "checkpoint_1").symlink_to("../checkpoints/checkpoint_1")
    remove_leftovers(str(saving))
    assert os.listdir(saving) == ["checkpoint_3"]
    assert content(saving / "checkpoint_3") == NEW


def test_where_a_state_is_found(tmp_path: Path) -> None:
    state = named(tmp_path)
    assert published_path(state.staging) == Path(state.path)
    stage(state)
    assert published_path(state.staging) == Path(state.staging)
    state.publish(durable=False, link=True)
    assert published_path(state.staging).samefile(state.path)
    assert published_path(tmp_path / "other") == tmp_path / "other"


def test_a_file_among_the_states_is_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_1").mkdir()
    (tmp_path / "notes_0.txt").touch()
    assert states_in(str(tmp_path)) == [str(tmp_path / "checkpoint_1")]


def test_states_that_are_not_the_newest_are_in_nobodys_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may have the highest number, and Accelerate loads one of them."""
    for name in ("checkpoint_2", "checkpoint_3", "checkpoint_3_copy"):
        write(tmp_path / name / ".fastensor-saved", NEW)
    for name in ("loop", "loop_1"):
        (tmp_path / name).symlink_to(name)
    look = os.listdir

    def settle(unreadable: str) -> None:
        def refuse(path: Any) -> list[str]:  # root may look at everything
            if unreadable in str(path):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return look(path)

        with monkeypatch.context() as patches:
            patches.setattr(os, "listdir", refuse)
            settle_states(str(tmp_path), durable=True)

    with pytest.raises(PermissionError, match="checkpoint_3"):
        settle("checkpoint_3")
    settle("checkpoint_2")
    assert content(tmp_path / "checkpoint_3") == content(tmp_path / "checkpoint_3_copy") == NEW
    assert finish(tmp_path / "checkpoint_2")
    assert content(tmp_path / "checkpoint_2") == NEW
