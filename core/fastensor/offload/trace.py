"""A trace of an offload: what was moved when, by which thread, for Perfetto (https://ui.perfetto.dev) or
``chrome://tracing``.

The file is in Chrome's Trace Event Format. It has

- complete events (``X``) of what threads do for a tensor: ``write``, ``read`` and ``help to read`` in the threads of
  the offload; ``wait to write`` and ``wait to read`` in those that train;
- pairs (``b``, ``e``) of the forward and backward passes: from the first to the last tensor that is saved, or needed;
- counters (``C``): the bytes in each place, and the memory of the process and of its GPUs.

All methods append to lists, which is atomic. None of them takes a lock, so a signal handler may call them, too.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch

from fastensor.errors import OffloadError
from fastensor.files.atomic import NewFile
from fastensor.files.launchers import rank_and_world_size
from fastensor.offload.saved import SavedBytes, StoredBytes

MOST_EVENTS = 1 << 16
"""Events after which a trace ends. They take about 30 MB of memory."""
_SAMPLE_SECONDS = 1e-3
"""Time between two samples of memory."""
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_logger = logging.getLogger("fastensor")


TracedPass: TypeAlias = dict[str, tuple[float, float, int]]
"""The times of a pass, by ``forward`` and ``backward``: the first moment that was noted, the last one, and the native
id of the thread that has begun."""


class Trace:
    """The events of one offload, in memory until :meth:`write`. Call every method from any thread.

    Args:
        path: the file. In a job of several processes, each adds its rank to the name.

    Raises:
        OffloadError: the folder of the file is missing, or the file is a folder.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        folder = os.path.dirname(self._path)
        if not os.path.isdir(folder):
            raise OffloadError(f"the trace cannot be written to {path}: {folder} is not a folder. Make it before")
        if os.path.isdir(self._path):
            raise OffloadError(f"the trace cannot be written to {path!r}, which is a folder. Name a file in it")
        self._process = os.getpid()
        self._origin = time.perf_counter()
        self._events: list[tuple[str, str, float, float, int, Mapping[str, Any]]] = []
        """Phase, name, beginning, seconds, thread and arguments of each."""
        self._passes: list[TracedPass] = []
        self._threads: dict[int, str] = {}
        self._counted: dict[str, Mapping[str, int]] = {}
        self._sampled = 0.0
        self._is_written = False
        self.is_full = False
        """True if the trace has ended, because there are too many events."""

    def complete(self, name: str, started: float, **arguments: Any) -> None:
        """Record what this thread has done.

        Args:
            name: what.
            started: ``time.perf_counter()`` when it began; it ends now.
            arguments: what Perfetto shows of it; values of JSON.
        """
        self._add("X", name, started, time.perf_counter() - started, arguments)

    def count(self, name: str, values: Mapping[str, int]) -> None:
        """Record values of a counter, unless they are the last ones."""
        if self._counted.get(name) == values:
            return
        self._counted[name] = values
        self._add("C", name, time.perf_counter(), 0.0, values)

    def sample_memory(self) -> None:
        """Record how much memory the process takes, if the last sample is old enough."""
        now = time.perf_counter()
        if now - self._sampled < _SAMPLE_SECONDS or self.is_full:
            return
        self._sampled = now
        self._add("C", "memory", now, 0.0, memory_in_use())

    def begin_pass(self) -> TracedPass:
        """A record of a forward pass that begins."""
        began: TracedPass = {}
        if not self.is_full:
            self._passes.append(began)
        return began

    def write(self) -> None:
        """Write the file, whole or not at all. Only the first call does anything, and only in the process that has made
        the trace. Nothing is written if nothing was recorded: the copy of an offload that was used may go later.

        Raises:
            OffloadError: the file cannot be written.
        """
        if self._is_written or os.getpid() != self._process:
            return
        self._is_written = self.is_full = True
        if not self._events and not self._passes:
            return
        path = _of_rank(self._path)
        try:
            with NewFile(path) as new:
                with open(new.fd, "w", closefd=False) as file:
                    file.writelines(self._lines())
                new.publish()
        except OSError as error:
            raise OffloadError(f"the trace cannot be written to {path}: {error.strerror}") from error
        finally:
            self._events.clear()
            self._passes.clear()

    def write_at_exit(self) -> None:
        """Write the file of an offload that was not closed. Errors are logged, because nobody could catch them."""
        try:
            self.write()
        except OffloadError as error:
            _logger.error("%s", error)

    def _add(self, phase: str, name: str, begin: float, seconds: float, arguments: Mapping[str, Any]) -> None:
        if self.is_full:
            return
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        self._events.append((phase, name, begin, seconds, thread, arguments))
        if len(self._events) >= MOST_EVENTS:
            self.is_full = True
            _logger.warning("the trace ends here, because it has %d events", MOST_EVENTS)

    def _lines(self) -> Iterator[str]:
        """The file. Perfetto wants the whole to be JSON; an event on each line is for people."""
        ended = {"trace": f"ended at {MOST_EVENTS} events"} if len(self._events) >= MOST_EVENTS else {}
        yield '{"displayTimeUnit": "ms", "otherData": ' + json.dumps(ended) + ', "traceEvents": [\n'
        separator = ""
        for event in self._all_events():
            yield separator + json.dumps(event)
            separator = ",\n"
        yield "\n]}\n"

    def _all_events(self) -> Iterator[dict[str, Any]]:
        yield _event("M", "process_name", 0.0, self._process) | {"args": {"name": "fastensor activation offload"}}
        for thread, name in list(self._threads.items()):
            yield _event("M", "thread_name", 0.0, thread) | {"args": {"name": name}}
        for number, one in enumerate(list(self._passes)):
            for name, (begin, end, thread) in list(one.items()):
                for phase, moment in (("b", begin), ("e", end)):
                    event = _event(phase, name, moment - self._origin, thread)
                    yield event | {"cat": "pass", "id": 2 * number + (name == "backward"), "args": {"pass": number}}
        for phase, name, begin, seconds, thread, arguments in self._events[:MOST_EVENTS]:
            event = _event(phase, name, begin - self._origin, thread) | {"args": dict(arguments)}
            yield event | {"cat": "offload", "dur": _microseconds(seconds)} if phase == "X" else event


def note_now(traced: TracedPass, name: Literal["forward", "backward"]) -> None:
    """Note that a pass is here now."""
    now = time.perf_counter()
    begin, _, thread = traced.get(name, (now, now, threading.get_native_id()))
    traced[name] = begin, now, thread


def note_move(
    trace: Trace | None, what: str, started: float, saved: SavedBytes, outcome: StoredBytes | Exception | None = None
) -> None:
    """Record in a trace, if there is one, what this thread has done for a range.

    Args:
        trace: where that is recorded.
        what: was done.
        started: when it began.
        saved: the range.
        outcome: its copy on the SSD, if it was moved to it or from it; or why not.
    """
    if trace is None:
        return
    found: dict[str, Any] = {"tensor": saved.position, "memory_bytes": saved.nbytes, "dtype": str(saved.dtype)}
    if isinstance(outcome, StoredBytes):
        found |= {"bytes": outcome.nbytes, "backend": outcome.backend}
        for piece in outcome.pieces:
            if piece.encoding is not None:
                found["codec"] = piece.encoding.name
    elif outcome is not None:
        found["failed"] = str(outcome) or type(outcome).__name__
    trace.complete(what, started, **found)


def memory_in_use() -> dict[str, int]:
    """Bytes of memory that the process takes: resident on the host, and allocated by torch on each GPU."""
    with open("/proc/self/statm") as file:
        found = {"host": int(file.read().split()[1]) * _PAGE_NBYTES}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch gives it no types
        for index in range(torch.cuda.device_count()):
            found[f"cuda:{index}"] = torch.cuda.memory_allocated(index)
    return found


def _event(phase: str, name: str, seconds: float, thread: int) -> dict[str, Any]:
    return {"ph": phase, "name": name, "ts": _microseconds(seconds), "pid": os.getpid(), "tid": thread}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _of_rank(path: str) -> str:
    """The file of this process: with the rank in its name in a job of several processes."""
    rank, count = rank_and_world_size()
    stem, ending = os.path.splitext(path)
    return f"{stem}-rank{rank}{ending}" if count > 1 else path
