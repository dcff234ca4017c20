"""What happens when saves come faster than they can be written."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from disks import content

import fastensor
from fastensor import AsyncWriter, SaveDroppedError
from fastensor.backends.buffers import BUFFER_NBYTES, BufferPool

ONE_BLOCK = BUFFER_NBYTES - 100_000


def state(number: int, nbytes: int = ONE_BLOCK) -> dict[str, torch.Tensor]:
    return {"w": torch.full((nbytes,), number, dtype=torch.uint8)}


@pytest.fixture
def blocked(gate: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The gate stands in front of every write, so that no memory comes back."""
    from fastensor.files import posix

    write = posix.write_fully

    def write_behind_gate(*arguments: Any) -> None:
        gate.pass_through()
        write(*arguments)

    monkeypatch.setattr(posix, "write_fully", write_behind_gate)
    return gate


def test_waiting(tmp_path: Path, blocked: Any) -> None:
    with AsyncWriter(staging_bytes=BUFFER_NBYTES) as writer:
        blocked.close()
        writer.save(state(1), tmp_path / "1")
        blocked.wait_until_reached()
        thread = threading.Thread(target=lambda: writer.save(state(2), tmp_path / "2"))
        thread.start()
        while not writer.statistics().staging:
            thread.join(0.001)
        thread.join(0.05)
        assert thread.is_alive()
        assert writer.statistics().writing == 1
        blocked.open()
        thread.join(60)
    assert (content(tmp_path / "1"), content(tmp_path / "2")) == (1, 2)


def test_skipping(tmp_path: Path, blocked: Any, caplog: pytest.LogCaptureFixture) -> None:
    with AsyncWriter(staging_bytes=BUFFER_NBYTES, when_busy="skip") as writer:
        blocked.close()
        writer.save(state(1), tmp_path / "1")
        fastensor_path = tmp_path / "2"
        skipped = writer.save(state(2), fastensor_path)
        assert (skipped.stage, skipped.done()) == ("skipped", True)
        with pytest.raises(SaveDroppedError, match="skipped"):
            skipped.result()
        assert str(fastensor_path) in caplog.text
        blocked.open()
        writer.wait()
        assert writer.save(state(3), tmp_path / "3").result().durable
        assert (writer.statistics().skipped, writer.statistics().durable) == (1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]


def test_a_file_larger_than_the_memory_is_not_skipped_for_that(tmp_path: Path) -> None:
    with AsyncWriter(staging_bytes=BUFFER_NBYTES, when_busy="skip") as writer:
        assert writer.save(state(1, 3 * BUFFER_NBYTES), tmp_path / "1").result().durable


def test_a_file_that_is_written_in_place_needs_no_memory_and_is_not_skipped(tmp_path: Path, blocked: Any) -> None:
    with (tmp_path / "2").open("w+b") as file, AsyncWriter(staging_bytes=BUFFER_NBYTES, when_busy="skip") as writer:
        blocked.close()
        writer.save(state(1), tmp_path / "1")
        blocked.wait_until_reached()
        blocked.open()
        with mock.patch.object(BufferPool, "has_room", return_value=False):
            assert writer.save(state(2), f"/dev/fd/{file.fileno()}").result().nbytes
        assert content(tmp_path / "2") == 2
    with (tmp_path / "3").open("w+b") as file, AsyncWriter() as writer:
        writer.save(state(3), f"/dev/fd/{file.fileno()}")
        assert writer.statistics().staging_bytes == 0


def test_keeping_the_latest(tmp_path: Path, blocked: Any, caplog: pytest.LogCaptureFixture) -> None:
    with AsyncWriter(staging_bytes=3 * BUFFER_NBYTES, when_busy="latest") as writer:
        blocked.close()
        handles = [writer.save(state(0), tmp_path / "0")]
        blocked.wait_until_reached()
        handles += [writer.save(state(number), tmp_path / str(number)) for number in range(1, 6)]
        assert [handle.stage for handle in handles[1:4]] == ["replaced"] * 3
        assert handles[5].stage == "queued"
        with pytest.raises(SaveDroppedError, match=f"replaced by the one to {tmp_path / '3'}"):
            handles[1].result()
        blocked.open()
        writer.wait()
        assert writer.statistics().replaced == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "4", "5"]
    assert [content(tmp_path / name) for name in "045"] == [0, 4, 5]
    assert "replaced by the save to" in caplog.text


def test_what_was_to_follow_a_replaced_save_is_not_done(
    tmp_path: Path, blocked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with AsyncWriter(staging_bytes=2 * BUFFER_NBYTES, when_busy="latest") as writer:
        writer.save(state(9), tmp_path / "old").result()
        blocked.close()
        writer.save(state(0), tmp_path / "0")
        blocked.wait_until_reached()
        replaced = writer.save(state(1), tmp_path / "1")
        writer.remove(tmp_path / "old")
        writer.save(state(2), tmp_path / "2")
        assert replaced.stage == "replaced"
        blocked.open()
        writer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "old"]
    assert f"the save to {tmp_path / '1'} was replaced: removing {tmp_path / 'old'}" in caplog.text


def test_a_removal_gives_way_to_a_later_save_of_the_same_file(tmp_path: Path, blocked: Any) -> None:
    """Its own save was replaced, and what it would have removed is another file by now."""
    with AsyncWriter(staging_bytes=3 * BUFFER_NBYTES, when_busy="latest") as writer:
        writer.save(state(9), tmp_path / "x").result()
        blocked.close()
        writer.save(state(0), tmp_path / "0")
        blocked.wait_until_reached()
        replaced = writer.save(state(1), tmp_path / "1")
        writer.remove(tmp_path / "x")
        writer.save(state(2), tmp_path / "x")
        writer.save(state(3), tmp_path / "3")
        assert replaced.stage == "replaced"
        blocked.open()
        writer.wait()
        assert content(tmp_path / "x") == 2


def test_a_save_that_cannot_begin_replaces_nothing(tmp_path: Path, blocked: Any) -> None:
    with AsyncWriter(staging_bytes=2 * BUFFER_NBYTES, when_busy="latest") as writer:
        blocked.close()
        writer.save(state(0), tmp_path / "0")
        blocked.wait_until_reached()
        queued = writer.save(state(1), tmp_path / "1")
        with pytest.raises(fastensor.CheckpointWriteError):
            writer.save(state(2), tmp_path / "no" / "2")
        blocked.open()
        assert queued.result().durable


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"staging_bytes": 100}, "at least 4194304"),
        ({"when_busy": "panic"}, "one of .*'wait'"),
        ({"max_bytes_per_second": 0}, "positive or None, found 0"),
        ({"exit_seconds": -1}, "a number of seconds, 0 or more, found -1"),
        ({"preemption_seconds": -1}, "a number of seconds above 0, found -1"),
    ],
)
def test_wrong_settings(option: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AsyncWriter(**option)


def test_public_names_are_what_users_call() -> None:
    def names(of: type) -> set[str]:
        return {name for name in dir(of) if not name.startswith("_")}

    assert names(AsyncWriter) == {"close", "closed", "remove", "save", "statistics", "wait"}
    assert names(fastensor.SaveHandle) == {
        "add_done_callback", "cancel", "done", "exception", "path", "result", "stage", "stages"
    }  # fmt: skip


def test_options_of_save_that_do_not_exist(tmp_path: Path) -> None:
    with AsyncWriter() as writer, pytest.raises(TypeError, match="colour"):
        writer.save({}, tmp_path / "x", colour="red")  # type: ignore[call-arg]


def test_a_handle_cannot_be_copied_and_says_what_can(tmp_path: Path) -> None:
    with AsyncWriter() as writer:
        handle = writer.save({}, tmp_path / "x")
        with pytest.raises(TypeError, match="what its result"):
            copy.deepcopy(handle)
        assert pickle.loads(pickle.dumps(handle.result())).path == str(tmp_path / "x")
