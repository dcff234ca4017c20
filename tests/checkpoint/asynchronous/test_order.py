"""What this process sees at a path is what it asked for last, whatever is still to be written."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import content

import fastensor
from fastensor import AsyncWriter, SaveDroppedError
from fastensor.checkpoint import files, ordering
from fastensor.checkpoint.asynchronous import exits
from fastensor.checkpoint.asynchronous.for_adapters import in_turn, reserve, staging_first, touch_staging
from fastensor.files.afterwards import do_afterwards


def state(number: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), number)}


def has_to_wait(gate: Any, action: Callable[[], Any], *, begun: Callable[[], bool] = lambda: True) -> Any:
    """What an action returns that a closed gate keeps from ending, once it is open, and the action has ``begun``."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    gate.wait_until_reached()
    thread.join(0.05)
    deadline = time.monotonic() + 60
    while not begun():
        assert time.monotonic() < deadline, "it did not begin"
        os.sched_yield()
    assert thread.is_alive(), "it did not wait"
    gate.open()
    thread.join(60)
    return results[0]


READS: dict[str, Callable[[Path], Any]] = {
    "load": content,
    "load of a part": lambda path: int(fastensor.load(path, keys=["w"])["w"][0]),
    "open": lambda path: int(opened_tensor(path)[0]),
    "verify": lambda path: fastensor.verify(path).compared and content(path),
    "inspect": lambda path: fastensor.inspect(path).tensors and content(path),
    "convert": lambda path: fastensor.convert(path, path.with_name("y")) and content(path.with_name("y")),
    "through a link": lambda path: content(link_to(path)),
    "through a link to a link": lambda path: content(link_to(link_to(path))),
    "through a folder that is a link": lambda path: content(link_to(path.parent) / path.name),
    "relative": lambda path: content(os.path.relpath(path)),
}


def opened_tensor(path: Path) -> torch.Tensor:
    with fastensor.open(path) as opened:
        return opened["w"]


def link_to(path: Path) -> Path:
    link = path.with_name(path.name + "-link")
    link.symlink_to(path.name)
    return link


@pytest.mark.parametrize("way", READS)
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_a_read_waits(tmp_path: Path, gate: Any, way: str, overwrite: bool) -> None:
    path = tmp_path / "folder" / "x"
    path.parent.mkdir()
    if overwrite:
        fastensor.save(state(1), path)
    with AsyncWriter() as writer:
        gate.close()
        writer.save(state(2), path)
        assert has_to_wait(gate, lambda: READS[way](path)) == 2


def test_a_url_is_read_when_it_is_there(gate: Any, tmp_path: Path) -> None:
    with AsyncWriter() as writer:
        gate.close()
        writer.save(state(1), tmp_path / "x")  # what stands before it in the queue
        writer.save(state(2), "memory://order/x")
        assert has_to_wait(gate, lambda: content("memory://order/x")) == 2


def test_replacing_waits(tmp_path: Path, gate: Any) -> None:
    with AsyncWriter() as writer:
        gate.close()
        writer.save(state(1), tmp_path / "x")
        writer.save(state(2), tmp_path / "x")
        has_to_wait(gate, lambda: fastensor.save(state(3), tmp_path / "x"))
        assert content(tmp_path / "x") == 3
        writer.save(state(4), tmp_path / "x")
        writer.save(state(5), tmp_path / "x")
    assert content(tmp_path / "x") == 5


def test_a_converted_file_replaces_what_was_saved_before(tmp_path: Path, gate: Any) -> None:
    fastensor.save(state(7), tmp_path / "y")
    with AsyncWriter() as writer:
        gate.close()
        writer.save(state(1), tmp_path / "x")
        has_to_wait(gate, lambda: fastensor.convert(tmp_path / "y", tmp_path / "x"))
    assert content(tmp_path / "x") == 7


def test_others_see_whole_files_only(tmp_path: Path, gate: Any) -> None:
    with AsyncWriter() as writer:
        gate.close()
        writer.save(state(1), tmp_path / "x")
        gate.wait_until_reached()
        assert not (tmp_path / "x").exists()
        assert os.listdir(tmp_path) == []
        gate.open()


def test_removing_a_pending_save_gives_it_up(tmp_path: Path, gate: Any) -> None:
    fastensor.save(state(0), tmp_path / "x")
    with AsyncWriter() as writer:
        gate.close()
        handle = writer.save(state(1), tmp_path / "x")
        queued = writer.save(state(2), tmp_path / "x")
        gate.wait_until_reached()
        running = handle._save
        has_to_wait(gate, lambda: writer.remove(tmp_path / "x"), begun=lambda: running._dropped is not None)
        assert not os.listdir(tmp_path)
        assert (handle.stage, queued.stage) == ("cancelled", "cancelled")
        with pytest.raises(SaveDroppedError, match="removed; what was there before is kept"):
            queued.result()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "nothing"])
def test_removing_what_is_not_pending_is_done_at_once(tmp_path: Path, kind: str) -> None:
    fastensor.save(state(0), tmp_path / "x")
    if kind == "folder":
        (tmp_path / "old").mkdir()
        fastensor.save(state(0), tmp_path / "old" / "y")
    elif kind == "link":
        (tmp_path / "old").symlink_to("x")
    elif kind == "file":
        fastensor.save(state(0), tmp_path / "old")
    with AsyncWriter() as writer:
        writer.save(state(1), tmp_path / "x").result()
        writer.remove(tmp_path / "old")
        assert os.listdir(tmp_path) == ["x"]


def test_an_old_file_is_removed_when_the_new_one_is_durable(tmp_path: Path, gate: Any) -> None:
    with AsyncWriter() as writer:
        writer.save(state(0), tmp_path / "old").result()
        gate.close()
        new = writer.save(state(1), tmp_path / "new")
        writer.remove(tmp_path / "old")
        gate.wait_until_reached()
        assert torch.load(tmp_path / "old")["w"][0] == 0  # whoever does not ask us sees what is there
        gate.open()
        new.result()
        writer.wait()
        assert os.listdir(tmp_path) == ["new"]


def test_a_pending_file_is_written_before_it_makes_way_for_a_newer_one(tmp_path: Path, gate: Any) -> None:
    with AsyncWriter() as writer:
        gate.close()
        old = writer.save(state(0), tmp_path / "old")
        writer.save(state(1), tmp_path / "new")
        writer.remove(tmp_path / "old")
        gate.open()
        assert old.result().durable
        writer.wait()
        assert os.listdir(tmp_path) == ["new"]


def test_an_old_file_stays_if_the_new_one_fails(tmp_path: Path, gate: Any, caplog: pytest.LogCaptureFixture) -> None:
    with AsyncWriter() as writer:
        writer.save(state(0), tmp_path / "old").result()
        gate.close()
        new = writer.save(state(1), tmp_path / "new")
        writer.remove(tmp_path / "old")
        gate.wait_until_reached()
        (tmp_path / "new").mkdir()
        gate.open()
        with pytest.raises(fastensor.CheckpointWriteError, match="Is a directory"):
            new.result()
        writer.wait()
        assert content(tmp_path / "old") == 0
        assert "removing" in caplog.text
        writer.remove(tmp_path / "old")  # now it is known that the save failed
        assert not (tmp_path / "old").exists()


def test_a_file_that_is_saved_again_after_its_removal(tmp_path: Path, gate: Any) -> None:
    with AsyncWriter() as writer:
        gate.close()
        writer.save(state(0), tmp_path / "x")
        writer.save(state(1), tmp_path / "y")
        writer.remove(tmp_path / "x")
        writer.save(state(2), tmp_path / "x")
        gate.open()
        assert content(tmp_path / "x") == 2


@pytest.mark.parametrize("others", [False, True], ids=["own saves", "saves of another writer"])
def test_a_folder_is_gone_when_its_removal_returns(tmp_path: Path, gate: Any, others: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with AsyncWriter() as writer, AsyncWriter() as other:
        gate.close()
        handle = (other if others else writer).save(state(0), folder / "x")
        has_to_wait(gate, lambda: writer.remove(folder))
        assert handle.result().durable
        assert not folder.exists()
        folder.mkdir()
        writer.save(state(1), folder / "y")
    assert os.listdir(folder) == ["y"]
    assert content(folder / "y") == 1


@pytest.mark.parametrize("way", ["remove", "link"])
def test_what_follows_a_save_follows_it_at_exit_too(
    tmp_path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    fastensor.save(state(0), tmp_path / "old")
    with AsyncWriter() as writer:
        gate.close()
        writer.save(state(1), tmp_path / "new")
        monkeypatch.setattr(exits, "_exiting", True)  # another thread may still be at work then

        def act() -> None:
            if way == "remove":
                writer.remove(tmp_path / "old")
            else:
                new, old = tmp_path / "new", tmp_path / "old"
                in_turn(writer, partial(os.replace, new, old), str(old), "moving", at_end=lambda: ends.append(way))

        ends: list[str] = []
        has_to_wait(gate, act)
        assert ends == (["link"] if way == "link" else [])
        assert os.listdir(tmp_path) == (["new"] if way == "remove" else ["old"])


def test_saves_of_a_block_are_written_when_it_ends_or_somebody_waits(tmp_path: Path) -> None:
    with AsyncWriter() as writer:
        with staging_first(writer):  # there is no memory yet, so nothing is put off
            writer.save(state(0), tmp_path / "zeroth").result(60)
        with staging_first(writer):
            first = writer.save(state(1), tmp_path / "first")
            second = writer.save(state(2), tmp_path / "second")
            ended = threading.Event()
            first.add_done_callback(lambda handle: ended.set())
            assert not ended.wait(0.05)
            assert first.stage == "queued"
        assert [first.result(60).durable, second.result(60).durable] == [True, True]
        with staging_first(writer):
            writer.save(state(3), tmp_path / "first")
            assert content(tmp_path / "first") == 3  # waits, so the writer does not
        with staging_first(writer):
            dropped = writer.save(state(4), tmp_path / "first")
            assert dropped.cancel()
        with contextlib.suppress(ValueError), staging_first(writer):
            last = writer.save(state(5), tmp_path / "first")
            raise ValueError
        assert last.result(60).durable


def test_a_block_that_needs_more_memory_than_there_is_goes_on(tmp_path: Path) -> None:
    large = {"w": torch.ones(5 << 20)}
    with AsyncWriter(staging_bytes=8 << 20) as writer:
        reserve(writer, 40 << 20)
        with staging_first(writer):
            handles = [writer.save(large, tmp_path / name) for name in "ab"]
        assert all(handle.result(60).durable for handle in handles)
        touch_staging(writer)
        touched = threading.Event()
        assert do_afterwards(touched.set)  # by the same thread
        assert touched.wait(60)
        assert all(buffer.is_touched for buffer in writer._pool._idle)
        assert writer.save(large, tmp_path / "a").result(60).durable


def test_a_process_that_goes_elsewhere_removes_what_it_meant(
    tmp_path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        fastensor.save(state(0), tmp_path / folder / "old")
    monkeypatch.chdir(tmp_path / "a")
    with AsyncWriter() as writer:
        gate.close()
        writer.save(state(1), "new")
        writer.remove("old")
        monkeypatch.chdir(tmp_path / "b")
        gate.open()
    assert (os.listdir(tmp_path / "a"), os.listdir(tmp_path / "b")) == (["new"], ["old"])


def test_what_has_become_a_folder_is_not_removed(tmp_path: Path, gate: Any) -> None:
    fastensor.save(state(0), tmp_path / "old")
    with AsyncWriter() as writer:
        gate.close()
        writer.save(state(1), tmp_path / "new")
        writer.remove(tmp_path / "old")
        gate.wait_until_reached()
        (tmp_path / "old").unlink()
        (tmp_path / "old").mkdir()
        gate.open()
        with pytest.raises(IsADirectoryError, match="become a directory"):
            writer.wait()
    assert (tmp_path / "old").is_dir()


@pytest.mark.parametrize("action", ["save", "remove"])
def test_what_a_callback_does_comes_after_what_was_asked_before(tmp_path: Path, gate: Any, action: str) -> None:
    with AsyncWriter() as writer:
        gate.close()
        first = writer.save(state(1), tmp_path / "first")
        pending = writer.save(state(2), tmp_path / "x")

        def act(handle: Any) -> None:
            gate.open()
            if action == "save":
                writer.save(state(3), tmp_path / "x")
            else:
                writer.remove(tmp_path / "x")

        first.add_done_callback(act)
        gate.wait_until_reached()
        gate.open()
        with pytest.raises(SaveDroppedError):
            pending.result()
        writer.wait()
    if action == "save":
        assert content(tmp_path / "x") == 3
    assert (tmp_path / "x").exists() == (action == "save")


def test_a_callback_saves_with_another_writer_that_waits_for_its_own(tmp_path: Path, gate: Any) -> None:
    """The other one's memory is held by a save that comes after one of this writer's."""
    with AsyncWriter() as writer, AsyncWriter(staging_bytes=4 << 20) as other:
        gate.close()
        first = writer.save(state(1), tmp_path / "first")
        writer.save(state(2), tmp_path / "x")
        other.save(state(3), tmp_path / "x")
        first.add_done_callback(lambda handle: other.save(state(4), tmp_path / "y"))
        gate.wait_until_reached()
        gate.open()
        writer.wait(60)
        other.wait(60)
    assert (content(tmp_path / "x"), content(tmp_path / "y")) == (3, 4)


def test_a_callback_cannot_wait_for_a_later_save(tmp_path: Path, gate: Any) -> None:
    refusals: list[Exception] = []
    with AsyncWriter() as writer:
        gate.close()
        first = writer.save(state(1), tmp_path / "first")
        later = writer.save(state(2), tmp_path / "later")

        def wait(handle: Any) -> None:
            assert handle.result().durable
            try:
                later.result()
            except RuntimeError as error:
                refusals.append(error)

        first.add_done_callback(wait)
        gate.open()
        assert later.result(60).durable
    assert "a callback cannot wait" in str(refusals)


def test_a_removal_that_fails_raises(tmp_path: Path, gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any) -> None:
        raise PermissionError(13, "no", str(path))

    monkeypatch.setattr(files, "remove_at_once", refuse)
    with AsyncWriter() as writer:
        with pytest.raises(PermissionError):
            writer.remove(tmp_path / "x")
        gate.close()
        writer.save(state(0), tmp_path / "y")
        writer.remove(tmp_path / "x")
        gate.open()
        with pytest.raises(PermissionError) as caught:
            writer.wait()
        assert caught.value.__notes__ == [f"in what was to follow an asynchronous save: removing {tmp_path / 'x'}"]


def test_two_writers_take_turns_at_one_path(tmp_path: Path, gate: Any) -> None:
    with AsyncWriter() as first, AsyncWriter() as second:
        gate.close()
        first.save(state(1), tmp_path / "x")
        gate.wait_until_reached()
        handle = second.save(state(2), tmp_path / "x")
        gate.open()
        handle.result()
        assert content(tmp_path / "x") == 2


def test_nothing_is_left_to_be_waited_for(tmp_path: Path) -> None:
    with AsyncWriter() as writer:
        for number in range(3):
            writer.save(state(number), tmp_path / str(number))
        writer.remove(tmp_path / "1")
    assert not ordering._pending


def test_a_file_that_another_one_removes_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x")
    is_there = os.path.lexists

    def look_and_lose(name: str) -> bool:
        found = is_there(name)
        os.unlink(name)
        return found

    monkeypatch.setattr(os.path, "lexists", look_and_lose)
    with AsyncWriter() as writer:
        writer.remove(path)
    assert not is_there(path)
