"""What processes learn reaches the disk, however they end, and writing it delays no caller."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from programs import run

from fastensor.files import afterwards
from fastensor.select import current, files
from fastensor.select.context import Context
from fastensor.select.current import current_selector
from fastensor.select.files import DictionaryFile, file_for, read

NBYTES = 1 << 20
WRITE = Context("write")


def printed_by(folder: Path, program: str, *arguments: str) -> str:
    """Run a program that learns about files in a folder, where its dictionaries are, too; returns what it prints."""
    (folder / "program.py").write_text(program)
    variables = {"FASTENSOR_DICTIONARIES": str(folder), "FASTENSOR_EXPLORE": "1"}
    done = run("program.py", *arguments, folder=folder, **variables)
    assert done.stderr == ""
    return done.stdout


def learned(folder: Path) -> dict[str, int]:
    """How often each backend was measured."""
    timings = read(file_for(folder, folder).path).dictionary.of(WRITE, NBYTES).timings
    return {name: timing.count for name, timing in timings.items()}


LEARN = """
import multiprocessing, sys
from fastensor.files import afterwards
from fastensor.select import current, files
from fastensor.select.context import Context

def learn(name):
    current.current_selector(".").record(1 << 20, Context("write"), name, 1.0)
"""

WITH_CHILDREN = f"""{LEARN}
learn(__name__)
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=learn, args=("child",))
    child.start()
    child.join()
    assert child.exitcode == 0
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_of_multiprocessing(tmp_path: Path, method: str) -> None:
    printed_by(tmp_path, WITH_CHILDREN, method)
    found = learned(tmp_path)
    imported = found.pop("__mp_main__", None)
    assert found == {"__main__": 1, "child": 1}
    assert imported == {"fork": None, "spawn": 1}.get(method, imported)  # the server ends later


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that nothing is known of; what is learned there is always due to be written."""
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path))
    monkeypatch.setenv("FASTENSOR_EXPLORE", "1")
    monkeypatch.setattr(current, "_made", {})
    monkeypatch.setattr(files, "_FLUSH_SECONDS", 0.0)
    monkeypatch.setattr(afterwards, "_worker", afterwards.Worker("test-afterwards"))
    return tmp_path


def learn(folder: Path, name: str) -> None:
    """And go on to the next transfer."""
    current_selector(folder).record(NBYTES, WRITE, name, 1.0)
    current_selector(folder)


def test_a_disk_that_does_not_answer_delays_no_transfer(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = DictionaryFile.update
    asked, answers, written = threading.Event(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def stuck(file: DictionaryFile, changes: Any) -> None:
        threads.append(threading.current_thread())
        asked.set()
        assert answers.wait(20), "a transfer waited for the disk"
        update(file, changes)
        written.set()

    monkeypatch.setattr(DictionaryFile, "update", stuck)
    for name in ("numpy", "direct", "torch"):
        learn(here, name)
    assert asked.wait(20)
    assert len(threads) == 1
    assert not list(here.glob("*.json"))
    child = os.fork()
    if child == 0:  # which has no such thread
        status = 1
        try:
            answers.set()
            learn(here, "of a child")
            current.flush()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert learned(here) == {"of a child": 1}
    answers.set()
    assert written.wait(20)
    learn(here, "numpy")
    current.flush()
    assert learned(here) == {"of a child": 1, "numpy": 2, "direct": 1, "torch": 1}


def test_no_thread_can_be_started(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        learn(here, "numpy")
    assert not list(here.glob("*.json"))
    learn(here, "direct")
    current.flush()
    assert learned(here) == {"numpy": 1, "direct": 1}


def test_nothing_is_done_where_nothing_was_learned(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("there is nothing to write"))
    for _ in range(3):
        current_selector(here)


ENDING = f"""{LEARN}
import atexit, threading
from fastensor.select import files
from fastensor.select.files import DictionaryFile
files._FLUSH_SECONDS = 0.0
update = DictionaryFile.update
writing, ending = threading.Event(), threading.Event()

def wait(file, changes):
    writing.set()
    ending.wait()
    print("written by", threading.current_thread().name)
    update(file, changes)

DictionaryFile.update = wait
learn("numpy")
learn("direct")
writing.wait()
threading._register_atexit(ending.set)
"""


def test_the_end_of_a_process_waits_for_what_is_being_written(tmp_path: Path) -> None:
    assert printed_by(tmp_path, ENDING).splitlines()[0] == "written by fastensor-afterwards"
    assert learned(tmp_path) == {"numpy": 1, "direct": 1}
