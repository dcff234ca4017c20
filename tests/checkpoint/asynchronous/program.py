"""A program that saves asynchronously and then ends in some way. Run by ``test_exits.py``.

Arguments: the path, the name of the way, and "patient" if it is not to say that it waits.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from typing import Any

import torch

import fastensor
from fastensor.checkpoint.asynchronous import writer
from fastensor.files import posix

if sys.argv[3:] == ["patient"]:
    writer._QUIET_SECONDS = 1000.0
# Python 3.12 and later warn of any fork in a process with threads. These forks are meant.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
STATE = {"w": torch.full((3 << 20,), 2.0)}


def block_the_disk() -> threading.Event:
    """Syncs never end. The event is set when one has begun."""
    blocked = threading.Event()

    def never(*arguments: Any) -> None:
        print("blocked", flush=True)
        blocked.set()
        time.sleep(1000)

    posix.sync_file = never
    return blocked


def wait_to_be_ended() -> None:
    """Not in one long sleep: a signal that comes in the instant before it does not interrupt it."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        time.sleep(0.01)


def slow_down() -> threading.Event:
    """Syncs end when the event is set."""
    go = threading.Event()
    sync = posix.sync_file

    def later(fd: int) -> None:
        print("blocked", flush=True)
        go.wait(60)
        sync(fd)

    posix.sync_file = later
    return go


def interrupt_staging(answers: list[Any]) -> None:
    """The first write of a file sends a SIGUSR1, and waits until its handler has added to ``answers``. Other threads
    write at the same time: of theirs, a signal could come when the save has returned."""
    interrupts = threading.Lock()
    write = posix.write_fully

    def interrupting(*arguments: Any) -> None:
        if interrupts.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGUSR1)
            while not answers:
                time.sleep(0.001)
        write(*arguments)

    posix.write_fully = interrupting


def end_of_program(path: str) -> None:
    fastensor.AsyncWriter().save(STATE, path)


def after_the_end_of_the_program(path: str) -> None:
    """Another thread saves when it is too late to leave anything pending."""
    writer = fastensor.AsyncWriter()

    def save() -> None:
        threading.main_thread().join()
        assert writer.save(STATE, path).done()

    threading.Thread(target=save).start()


def first_writer_after_the_end_of_the_program(path: str) -> None:
    def save() -> None:
        threading.main_thread().join()
        assert fastensor.AsyncWriter().save(STATE, path).done()

    threading.Thread(target=save).start()


def slow_backend_at_exit(path: str) -> None:
    """What is left to be done when the interpreter has stopped the main thread still needs threads."""
    writer = fastensor.AsyncWriter(max_bytes_per_second=1 << 20)
    writer.save(STATE, path, backend="direct")


def sys_exit(path: str) -> None:
    fastensor.AsyncWriter().save(STATE, path)
    sys.exit(3)


def exception(path: str) -> None:
    fastensor.AsyncWriter().save(STATE, path)
    raise ValueError("of the program")


def interrupt(path: str) -> None:
    fastensor.AsyncWriter().save(STATE, path)
    os.kill(os.getpid(), signal.SIGINT)
    wait_to_be_ended()


def interrupt_twice(path: str) -> None:
    block_the_disk()
    fastensor.AsyncWriter().save(STATE, path)
    wait_to_be_ended()


def timeout(path: str) -> None:
    blocked = block_the_disk()
    fastensor.AsyncWriter(exit_seconds=0.2).save(STATE, path)
    assert blocked.wait(60)


def failure_at_exit(path: str) -> None:
    writer = fastensor.AsyncWriter()
    os.mkdir(path + "-folder")
    go = slow_down()
    writer.save(STATE, path + "-folder/x")
    os.mkdir(path + "-folder/x")
    go.set()


def terminated(path: str) -> None:
    slow_down()
    fastensor.AsyncWriter().save(STATE, path)
    wait_to_be_ended()


def preempted(path: str) -> None:
    go = slow_down()
    fastensor.AsyncWriter(preemption_seconds=60).save(STATE, path)
    print("ready", flush=True)
    sys.stdin.readline()  # the parent has sent SIGTERM
    go.set()
    wait_to_be_ended()


def preempted_too_late(path: str) -> None:
    block_the_disk()
    fastensor.AsyncWriter(preemption_seconds=0.2).save(STATE, path)
    wait_to_be_ended()


def preempted_with_a_handler(path: str) -> None:
    """As frameworks do: note it, and end in good order."""
    received = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: received.set())
    go = slow_down()
    fastensor.AsyncWriter(preemption_seconds=60).save(STATE, path)
    received.wait(60)
    go.set()
    sys.exit(5)


def preempted_with_a_handler_around(path: str) -> None:
    """A handler that was installed later and calls the writer's, as a Trainer's does, decides by itself, too."""
    writer = fastensor.AsyncWriter(preemption_seconds=60)
    inner = signal.getsignal(signal.SIGTERM)
    received = []

    def outer(number: int, frame: Any) -> None:
        received.append(number)
        assert callable(inner)
        inner(number, frame)

    signal.signal(signal.SIGTERM, outer)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # nothing is pending: whoever waits to end the process does it now
    assert received == [signal.SIGTERM] * 2
    writer.save(STATE, path)
    sys.exit(5)


def preempted_while_a_handler_comes(path: str) -> None:
    """It was not there for the first signal, and gets the one that is sent when nothing is pending any more."""
    go = slow_down()
    writer = fastensor.AsyncWriter(preemption_seconds=60)
    writer.save(STATE, path)
    os.kill(os.getpid(), signal.SIGTERM)
    inner = signal.getsignal(signal.SIGTERM)
    received = threading.Event()

    def outer(number: int, frame: Any) -> None:
        received.set()
        assert callable(inner)
        inner(number, frame)

    signal.signal(signal.SIGTERM, outer)
    go.set()
    received.wait(60)
    signal.signal(signal.SIGTERM, inner)
    time.sleep(0.2)  # whoever ends the process does it now
    go.clear()
    writer.save(STATE, path)
    print("ready", flush=True)  # and once more
    sys.stdin.readline()
    go.set()
    wait_to_be_ended()


def survived(path: str) -> None:
    """The program gets a SIGTERM with a deadline, and works on for longer. Its exit ignores that deadline."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    _outlive_a_deadline(path)


def ignored(path: str) -> None:
    """A signal that is ignored sets no deadline: the one of the exit is longer."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _outlive_a_deadline(path, seconds=0.3, outlive_seconds=0.0)


def _outlive_a_deadline(path: str, *, seconds: float = 0.01, outlive_seconds: float = 0.02) -> None:
    writers = [fastensor.AsyncWriter(preemption_seconds=seconds) for _ in range(2)]
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(outlive_seconds)
    go = slow_down()
    writers[0].save(STATE, path)
    threading.Timer(0.6, go.set).start()


def preempted_child(path: str) -> None:
    fastensor.AsyncWriter(preemption_seconds=60).save(STATE, path)
    ready, signalled = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(signalled, b"x")  # Python forgets signals that come before it has forked altogether
        wait_to_be_ended()
        os._exit(1)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def preempted_child_of_its_own(path: str) -> None:
    """A forked child that has a writer with a deadline, too."""
    fastensor.AsyncWriter(preemption_seconds=60).save(STATE, path)
    ready, signalled = os.pipe()
    child = os.fork()
    if child == 0:
        go = slow_down()
        fastensor.AsyncWriter(preemption_seconds=60).save(STATE, path + "-child")
        threading.Timer(0.2, go.set).start()
        os.write(signalled, b"x")
        wait_to_be_ended()
        os._exit(1)
    os.read(ready, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert torch.equal(fastensor.load(path + "-child")["w"], STATE["w"])
    os.unlink(path + "-child")


def handler_that_closes(path: str) -> None:
    """It interrupts a save, and cannot wait for it."""
    writer = fastensor.AsyncWriter(staging_bytes=4 << 20)
    refusals = []

    def close(number: int, frame: Any) -> None:
        try:
            writer.wait()
        except RuntimeError as error:
            refusals.append(error)

    signal.signal(signal.SIGUSR1, close)
    interrupt_staging(refusals)
    writer.save(STATE, path)
    writer.close()
    assert "a signal handler cannot wait" in str(refusals[0])


def fork(path: str) -> None:
    go = slow_down()
    writer = fastensor.AsyncWriter()
    handle = writer.save(STATE, path)
    child = os.fork()
    if child == 0:
        assert handle.stage == "cancelled"
        assert isinstance(handle.exception(), fastensor.SaveDroppedError)
        writer.wait()
        assert writer.statistics().staging_bytes == 0
        go.set()
        mine = writer.save(STATE, path + "-child")
        assert mine.result().durable
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(fastensor.load(path + "-child")["w"], STATE["w"])
    os.unlink(path + "-child")
    assert not handle.done()
    go.set()
    assert handle.result().durable


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def workers(path: str) -> None:
    """A DataLoader forks and spawns workers while a save is pending."""
    writer = fastensor.AsyncWriter()
    for method in ("fork", "spawn"):
        writer.save(STATE, path)
        loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context=method)
        assert [int(row) for row in loader] == list(range(8))
    for thread in threading.enumerate():  # torch waits for none; one that the end of Python stops may leave a semaphore
        if thread.name == "QueueFeederThread":
            thread.join()


def save_in_child(writer: fastensor.AsyncWriter, path: str) -> None:
    writer.save(STATE, path)


def spawn(path: str) -> None:
    writer = fastensor.AsyncWriter(staging_bytes=8 << 20)
    copy = pickle.loads(pickle.dumps(writer))
    assert copy._settings.staging_bytes == 8 << 20
    process = multiprocessing.get_context("spawn").Process(target=save_in_child, args=(writer, path))
    process.start()
    process.join()
    assert process.exitcode == 0


def second_signal_handler(path: str) -> None:
    """A handler saves while the main thread is staging another save."""
    writer = fastensor.AsyncWriter(staging_bytes=4 << 20)
    handles = []
    signal.signal(signal.SIGUSR1, lambda number, frame: handles.append(writer.save({"from": "handler"}, path + "-2")))
    interrupt_staging(handles)
    writer.save(STATE, path)
    assert handles[0].done()
    assert fastensor.load(path + "-2") == {"from": "handler"}
    os.unlink(path + "-2")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have background jobs ignore it
    globals()[sys.argv[2]](sys.argv[1])
