"""A program whose saves are interrupted by a real signal, whose handler saves, at one line after the other.

Arguments: a folder, "save" or "writer", "same" or "other" path, and how many lines are left out between two signals.
Run by ``test_nested.py``. Prints how many signals there were.
"""

from __future__ import annotations

import concurrent.futures
import faulthandler
import os
import signal
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import torch

import fastensor
from fastensor.checkpoint import ordering
from fastensor.files import arguments

HANG_SECONDS = 30
OLD, PROGRAMS, HANDLERS = 0, 1, 2
OWN = (os.path.dirname(fastensor.__file__), os.path.dirname(concurrent.futures.__file__), threading.__file__)


def state(content: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5 << 20,), content, dtype=torch.uint8)}


def content(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    w = torch.load(path)["w"]
    assert torch.equal(w, w[:1].expand_as(w))
    return int(w[0])


class Signal:
    """Sends SIGUSR1 when the main thread comes to a line of Fastensor, or of the threads that it uses.

    Args:
        number: of the line, counted from the beginning of the block.
    """

    def __init__(self, number: int) -> None:
        self._left = number
        self.sent_in = ""
        """The file of that line, once the signal was sent."""

    def __enter__(self) -> Signal:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OWN):
            return None
        if event == "line":
            self._left -= 1
            if not self._left:
                self.sent_in = frame.f_code.co_filename
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGUSR1)  # the handler has returned when this returns
        return self._trace


class Handler:
    """Saves.

    Args:
        path: the path that is saved to.
        writer: saves, if given.
        may_find: what may be at the path then.
    """

    def __init__(self, path: Path, writer: fastensor.AsyncWriter | None, may_find: tuple[int, ...]) -> None:
        self._path = path
        self._writer = writer
        self._may_find = may_find
        self.report: fastensor.SaveReport | None = None

    def __call__(self, number: int, frame: Any) -> None:
        if self._writer is not None:
            self.report = self._writer.save(state(HANDLERS), self._path).result()
        else:
            self.report = fastensor.save(state(HANDLERS), self._path)
        assert content(self._path) in self._may_find


def interrupt_at(number: int, folder: Path, way: str, same: bool) -> bool:
    """One save that is interrupted at a line; False if it has less lines."""
    path, other = folder / "path", folder / "other"
    fastensor.save(state(OLD), path)
    writer = fastensor.AsyncWriter(staging_bytes=4 << 20)  # saves stream through one block
    # An asynchronous save that is about to end replaces what the handler has saved.
    may_find = (HANDLERS, PROGRAMS) if same and way == "writer" else (HANDLERS,)
    handler = Handler(path if same else other, writer if number % 2 and way == "writer" else None, may_find)
    signal.signal(signal.SIGUSR1, handler)
    if way == "writer":
        writer.save(state(OLD), folder / "earlier")
    with Signal(number) as sent:
        if way == "writer":
            writer.save(state(PROGRAMS), path, backend="direct")
        else:
            fastensor.save(state(PROGRAMS), path, backend="direct")
    writer.close(HANG_SECONDS)
    if not sent.sent_in:
        return False
    assert handler.report is not None
    assert handler.report.durable
    if sent.sent_in != arguments.__file__:  # nothing has begun in the check of keywords
        assert handler.report.backend == "numpy"
    if not same:
        assert (content(path), content(other)) == (PROGRAMS, HANDLERS)
    else:
        assert content(path) in (PROGRAMS, HANDLERS)
    assert set(os.listdir(folder)) - {"earlier"} == ({"path"} if same else {"path", "other"})
    assert not ordering._pending
    return True


def main(folder: Path, way: str, target: str, step: int) -> None:
    count = 0
    for number in range(1, 1_000_000, step):
        faulthandler.dump_traceback_later(2 * HANG_SECONDS, exit=True)
        if not interrupt_at(number, folder, way, target == "same"):
            break
        count += 1
        for name in os.listdir(folder):
            os.unlink(folder / name)
    print(count)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
