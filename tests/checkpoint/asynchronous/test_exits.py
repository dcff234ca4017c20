"""However a process ends, the path holds the old or the new content, whole, and it ends in time."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import IO

import programs
import pytest
import torch
from disks import assert_only
from programs import Program

import fastensor

PROGRAM = Path(__file__).with_name("program.py")
OLD, NEW = {"w": torch.zeros(3)}, {"w": torch.full((3 << 20,), 2.0)}
TIMEOUT_SECONDS = 60
STARTS_THREADS_AT_EXIT = not (3, 12) <= sys.version_info < (3, 12, 3)
"""https://github.com/python/cpython/issues/113964"""
WITHOUT_THREADS = "direct is not used: no thread can be started (can't create new thread at interpreter shutdown)\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fastensor.save(OLD, tmp_path / "x")
    return tmp_path / "x"


def start(path: Path, way: str, *options: str) -> Program:
    return Program(PROGRAM, path, way, *options)


def run(path: Path, way: str) -> tuple[int, str]:
    """Exit code and standard error. That it waits, as it says where a disk is slow, is not said."""
    with start(path, way, "patient") as process:
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    return process.returncode, errors


def read_until(word: str, file: IO[str] | None) -> None:
    assert file is not None
    assert any(line.strip() == word for line in file), "the program has ended"


@pytest.mark.parametrize(
    ("way", "code", "message"),
    [
        ("end_of_program", 0, ""),
        ("after_the_end_of_the_program", 0, "saving asynchronously is not used: the interpreter exits"),
        ("first_writer_after_the_end_of_the_program", 0, "saving asynchronously is not used: the interpreter exits"),
        ("slow_backend_at_exit", 0, ""),
        ("sys_exit", 3, ""),
        ("exception", 1, "ValueError: of the program"),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("preempted_child", 0, ""),
        ("preempted_child_of_its_own", 0, ""),
        ("handler_that_closes", 0, ""),
        ("fork", 0, ""),
        ("workers", 0, ""),
        ("spawn", 0, ""),
        ("preempted_with_a_handler_around", 5, ""),
        ("second_signal_handler", 0, "saving asynchronously is not used: a signal handler or a callback saves"),
    ],
)
def test_what_is_pending_is_finished(path: Path, way: str, code: int, message: str) -> None:
    found, errors = run(path, way)
    assert (found, message in errors) == (code, True), errors
    assert message or not errors or (errors == WITHOUT_THREADS and not STARTS_THREADS_AT_EXIT)
    assert_only(path, NEW)


def test_no_module_is_imported_by_a_thread(tmp_path: Path) -> None:
    """A child that is forked meanwhile would wait for that module for ever."""
    code = """if True:
        import sys, torch, fastensor
        writer = fastensor.AsyncWriter()
        before = set(sys.modules)
        for path in sys.argv[1:]:
            for numel in (3, 3 << 20):
                assert writer.save({"w": torch.ones(numel)}, path).result().durable
        print(sorted(set(sys.modules) - before))
    """
    paths = tmp_path / "x.ckpt", tmp_path / "x.safetensors"
    assert programs.run("-c", code, *paths, cold=True).stdout == "[]\n"


def test_what_takes_too_long_is_given_up(path: Path) -> None:
    code, errors = run(path, "timeout")
    assert code == 0
    assert f"given up at exit, after 0.2 s: 1 checkpoint of which 0 B are to be written ({path})" in errors
    assert_only(path, OLD)


def test_a_second_interrupt_gives_up(path: Path) -> None:
    with start(path, "interrupt_twice") as process:
        read_until("blocked", process.stdout)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert any("waiting for 1 checkpoint " in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == -signal.SIGINT
    assert "given up at exit, interrupted" in errors
    assert_only(path, OLD)


def test_a_failure_that_was_not_raised_is_logged(path: Path) -> None:
    code, errors = run(path, "failure_at_exit")
    assert code == 0
    assert "an asynchronous save had failed" in errors
    assert f"{path}-folder/x" in errors


def test_sigterm_kills_at_once_if_nothing_was_said(path: Path) -> None:
    with start(path, "terminated") as process:
        read_until("blocked", process.stdout)
        process.terminate()
        assert process.wait(TIMEOUT_SECONDS) == -signal.SIGTERM
    assert_only(path, OLD)
    fastensor.save(OLD, path)
    assert_only(path, OLD)


def test_preemption_waits(path: Path) -> None:
    with start(path, "preempted") as process:
        read_until("ready", process.stdout)
        process.terminate()
        process.communicate("go\n", timeout=TIMEOUT_SECONDS)
    assert process.returncode == -signal.SIGTERM
    assert_only(path, NEW)


def test_preemption_does_not_wait_for_ever(path: Path) -> None:
    with start(path, "preempted_too_late") as process:
        read_until("blocked", process.stdout)
        process.terminate()
        _, errors = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == -signal.SIGTERM
    assert "given up at exit, after" in errors
    assert_only(path, OLD)


def test_preemption_leaves_the_decision_to_the_handler_of_the_program(path: Path) -> None:
    with start(path, "preempted_with_a_handler") as process:
        read_until("blocked", process.stdout)
        process.terminate()
        process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 5
    assert_only(path, NEW)


def test_preemption_leaves_the_decision_to_a_handler_that_comes_meanwhile(path: Path) -> None:
    """And waits as before when that is gone again."""
    with start(path, "preempted_while_a_handler_comes") as process:
        read_until("ready", process.stdout)
        process.terminate()
        process.communicate("go\n", timeout=TIMEOUT_SECONDS)
    assert process.returncode == -signal.SIGTERM
    assert_only(path, NEW)


@pytest.mark.parametrize("way", ["survived", "ignored"])
def test_a_deadline_that_was_survived_does_not_shorten_the_exit(path: Path, way: str) -> None:
    code, errors = run(path, way)
    assert code == 0
    assert "given up" not in errors
    assert_only(path, NEW)
