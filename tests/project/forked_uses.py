"""Uses of everything public that holds threads or locks, each of them begun in a parent and repeated in its forked
child. Run by ``test_fork.py``, because a process that forks so much is none for other tests.

Reads lines of a case, a moment and a folder, and prints what came of each as JSON. A case is a generator that uses
something, yields how to use it again, and cleans up. The moments of the fork are: nothing is going on (``idle``);
another thread of the parent is in the middle of the same use (``busy``); another thread holds every lock that can be
found from the use or from a module of ours (``locked``).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import itertools
import json
import logging
import mmap
import os
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from checkpoint.reading.http_folder import served

import fastensor
from fastensor.backends import registry
from fastensor.backends.base import Extent
from fastensor.offload import ActivationOffload, OffloadConfig
from fastensor_lightning import FastensorCheckpointIO

Use: TypeAlias = Callable[[], object]
Uses: TypeAlias = Generator[Use, None, None]
CASES: dict[str, Callable[[Path], Uses]] = {}
REFUSED = {
    "open-file-behind-others": "a forked process shares its position; open the checkpoint again in each",
}
"""The error that the child gets instead, by case."""
AUTOGRAD = ("offload",)
"""The cases that a child is not forked from while a thread is in the middle of torch's own code. Torch does not make
its locks anew in the child, whose ``backward`` can wait for them without end."""
MOMENTS = ("idle", "busy", "locked")
FORKS_WHILE_BUSY = 3
HANG_SECONDS = 50.0
SMALL, LARGE, HUGE = 1 << 10, 1 << 18, 1 << 20
"""Elements of 8 bytes: read at once, by several threads, and through a ring of their own."""
READING = fastensor.Context("read", "cpu", warm=True)
_numbers = itertools.count()


def case(name: str, *arguments: Any) -> Callable[[Callable[..., Uses]], Callable[..., Uses]]:
    """The function, given a folder and these arguments, is a case."""

    def add(function: Callable[..., Uses]) -> Callable[..., Uses]:
        CASES[name] = lambda folder: function(folder, *arguments)
        return function

    return add


def values(numel: int) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(numel), "b": torch.arange(numel) + 1}


def check(found: torch.Tensor, numel: int, name: str = "b") -> None:
    assert found.numpy().tobytes() == values(numel)[name].numpy().tobytes()


def saved(folder: Path, numel: int, name: str = "x.ckpt") -> str:
    path = str(folder / name)
    fastensor.save(values(numel), path, durable=False)
    return path


def new_path(folder: Path) -> Path:
    return folder / f"{os.getpid()}-{next(_numbers)}.ckpt"


def lazily(path: Any, numel: int, backend: str = "auto") -> Uses:
    with fastensor.open(path, backend=backend) as checkpoint:
        check(checkpoint["a"], numel, "a")
        yield lambda: check(checkpoint["b"], numel)


def repeated(use: Use) -> Uses:
    use()
    yield use


# --- reading and writing


@case("open-auto-small", "auto", SMALL)
@case("open-auto-large", "auto", LARGE)
@case("open-auto-huge", "auto", HUGE)
@case("open-direct", "direct", HUGE)
@case("open-numpy", "numpy", LARGE)
@case("open-torch", "torch", LARGE)
@case("open-safetensors", "auto", LARGE, "x.safetensors")
def _open(folder: Path, backend: str, numel: int, name: str = "x.ckpt") -> Uses:
    return lazily(saved(folder, numel, name), numel, backend)


@case("open-slices")
def _open_slices(folder: Path) -> Uses:
    with fastensor.open(saved(folder, LARGE)) as checkpoint:
        assert checkpoint["a", 10:12].tolist() == [10, 11]
        yield lambda: check(checkpoint["b", :SMALL], SMALL)


@case("open-bytes", io.BytesIO)
@case("open-mapped", lambda data: _mapped(data))
def _open_file(folder: Path, of: Callable[[bytes], Any]) -> Uses:
    return lazily(of(Path(saved(folder, LARGE)).read_bytes()), LARGE)


def _mapped(data: bytes) -> mmap.mmap:
    mapped = mmap.mmap(-1, len(data))
    mapped[:] = data
    return mapped


@case("open-file-at-its-start", b"")
@case("open-file-behind-others", b"others")
def _open_file_behind(folder: Path, others: bytes) -> Uses:
    path = folder / "behind"
    path.write_bytes(others + Path(saved(folder, LARGE)).read_bytes())
    with open(path, "rb") as file:
        file.seek(len(others))
        yield from lazily(file, LARGE)


@case("load-auto", "auto")
@case("load-direct", "direct")
@case("load-numpy", "numpy")
@case("load-torch", "torch")
def _load(folder: Path, backend: str) -> Uses:
    path = saved(folder, HUGE)
    return repeated(lambda: check(fastensor.load(path, backend=backend)["b"], HUGE))


@case("save-auto", "auto")
@case("save-direct", "direct")
@case("save-numpy", "numpy")
@case("save-torch", "torch")
def _save(folder: Path, backend: str) -> Uses:
    state = values(HUGE)

    def use() -> None:
        report = fastensor.save(state, new_path(folder), backend=backend, durable=False)
        check(torch.load(report.path)["b"], HUGE)

    return repeated(use)


@case("verify")
def _verify(folder: Path) -> Uses:
    return repeated(partial(fastensor.verify, saved(folder, HUGE)))


@case("reader-direct", "direct")
@case("reader-numpy", "numpy")
@case("reader-torch", "torch")
def _reader(folder: Path, backend: str) -> Uses:
    data = os.urandom(24 << 20)
    (folder / "bytes").write_bytes(data)
    fd = os.open(folder / "bytes", os.O_RDONLY)
    extents = [Extent(begin, begin + (4 << 20)) for begin in range(0, len(data), 4 << 20)]
    reader = registry.get(backend).open_reader(fd, len(data), extents)
    parent = os.getpid()

    def read(extent: Extent) -> None:
        buffer = bytearray(extent.end - extent.begin)
        reader.readinto(extent.begin, memoryview(buffer), checksum=True)
        assert buffer == data[extent.begin : extent.end]

    def use() -> None:
        for extent in extents:
            read(extent)
        if os.getpid() != parent:
            reader.close()

    read(extents[0])
    yield use
    reader.close()
    os.close(fd)


@case("store-auto", "auto")
@case("store-direct", "direct")
@case("store-numpy", "numpy")
@case("store-torch", "torch")
def _store(folder: Path, backend: str) -> Uses:
    tensors = list(values(HUGE).values())
    store = fastensor.TensorStore(folder / "store", backend=backend)

    def use() -> None:
        refs = [store.put(tensors[0]), *store.put_many(tensors)]
        check(store.get(refs[2]), HUGE)
        check(store.get_many(refs)[1], HUGE, "a")
        store.delete_many(refs)
        assert store.statistics().puts >= len(refs)

    return repeated(use)


# --- elsewhere


@case("open-memory-url")
def _open_url(folder: Path) -> Uses:
    url = f"memory://{folder.name}.ckpt"
    fastensor.save(values(HUGE), url)
    return lazily(url, HUGE)


@case("save-memory-url")
def _save_url(folder: Path) -> Uses:
    state = values(HUGE)

    def use() -> None:
        url = f"memory://{new_path(folder).name}"
        fastensor.save(state, url)
        check(fastensor.load(url)["b"], HUGE)

    return repeated(use)


@case("open-http-by-ranges", "ranges")
@case("open-http-whole", "whole")
def _open_http(folder: Path, kind: str) -> Uses:
    saved(folder, HUGE)
    with served(folder, kind) as url:
        yield from lazily(f"{url}/x.ckpt", HUGE)


@case("load-http-by-ranges", "ranges")
@case("load-http-whole", "whole")
def _load_http(folder: Path, kind: str) -> Uses:
    saved(folder, HUGE)
    with served(folder, kind) as url:
        yield from repeated(lambda: check(fastensor.load(f"{url}/x.ckpt")["b"], HUGE))


# --- later


@case("writer")
def _writer(folder: Path) -> Uses:
    state = values(LARGE)
    with fastensor.AsyncWriter() as writer:

        def use() -> None:
            path = new_path(folder)
            assert writer.save(state, path, durable=False).result(60).nbytes
            check(fastensor.load(path)["b"], LARGE)
            writer.remove(path)
            writer.wait(60)
            assert writer.statistics().durable

        yield from repeated(use)


@case("writer-with-pending-saves")
def _pending(folder: Path) -> Uses:
    state = values(SMALL)
    writer = fastensor.AsyncWriter(max_bytes_per_second=1)
    handles = [writer.save(state, new_path(folder), durable=False) for _ in range(3)]
    parent = os.getpid()

    def use() -> None:
        if os.getpid() == parent:
            return
        assert all(handle.done() and not handle.cancel() for handle in handles)
        assert isinstance(handles[-1].exception(), fastensor.SaveDroppedError)
        check(fastensor.load(writer.save(state, new_path(folder), durable=False).result(60).path)["b"], SMALL)
        writer.close(60)

    yield use
    assert all(handle.result(60).nbytes for handle in handles)
    writer.close()


@case("handle-that-is-done")
def _done(folder: Path) -> Uses:
    called: list[object] = []
    with fastensor.AsyncWriter() as writer:
        handle = writer.save(values(SMALL), new_path(folder), durable=False)
        handle.result()

        def use() -> None:
            assert (handle.done(), handle.cancel(), handle.stage) == (True, False, "durable")
            assert (handle.result(60).path, handle.exception(60)) == (handle.path, None)
            handle.add_done_callback(called.append)
            assert called[-1] is handle

        yield from repeated(use)


@case("handle-of-a-cancelled-save")
def _cancelled(folder: Path) -> Uses:
    with fastensor.AsyncWriter(max_bytes_per_second=1) as writer:
        writer.save(values(SMALL), new_path(folder), durable=False)
        handle = writer.save(values(SMALL), new_path(folder), durable=False)
        assert handle.cancel()

        def use() -> None:
            assert isinstance(handle.exception(60), fastensor.SaveDroppedError)
            writer.wait(60)

        yield from repeated(use)


@case("lightning-plugin")
def _plugin(folder: Path) -> Uses:
    plugin = FastensorCheckpointIO(asynchronous=True)
    state = values(LARGE)

    def use() -> None:
        path = new_path(folder)
        plugin.save_checkpoint(state, path)
        check(plugin.load_checkpoint(path)["b"], LARGE)
        plugin.remove_checkpoint(path)
        plugin.teardown()

    return repeated(use)


@case("offload")
def _offload(folder: Path) -> Uses:
    with ActivationOffload(OffloadConfig(schedule="all", directories=(str(folder),), min_bytes=1)) as offload:

        def use() -> None:
            weight = torch.ones(64, 64, requires_grad=True)
            with offload.step():
                (weight.sin() * weight).sum().backward()
            assert weight.grad is not None

        yield from repeated(use)


# --- choosing


@case("selector")
def _selector(folder: Path) -> Uses:
    selector = fastensor.Selector()
    path = saved(folder, SMALL)

    def use() -> None:
        fastensor.load(path, backend=selector)
        assert selector.explain(1 << 20, READING, ("direct", "numpy"))
        selector.statistics()

    return repeated(use)


@case("current-selector")
def _current(folder: Path) -> Uses:
    return repeated(lambda: fastensor.current_selector(folder).explain(1 << 20, READING, ("direct", "numpy")))


# --- what comes of them


def run(name: str, moment: str, folder: Path) -> str:
    """What came of a case: ``works``, or what was raised, or where a child hung."""
    try:
        uses = CASES[name](folder)
        use = next(uses)
        during = {"idle": contextlib.nullcontext, "busy": lambda: busy(use), "locked": lambda: all_locked(use)}[moment]
        with during() as thread:
            found = {
                in_child(use, thread if name in AUTOGRAD else None)
                for _ in range(FORKS_WHILE_BUSY if moment == "busy" else 1)
            }
        use()
        next(uses, None)
        return " / ".join(sorted(found))
    except BaseException as error:  # noqa: BLE001  # it is the outcome
        return f"in the parent: {type(error).__name__}: {error}"


def in_child(use: Use, in_ours: threading.Thread | None = None) -> str:
    """What comes of a use in a forked child. The fork waits until the thread is in code of ours."""
    with tempfile.TemporaryFile() as said:
        while in_ours is not None and in_ours.is_alive() and not is_in_ours(in_ours):
            time.sleep(0)
        child = os.fork()
        if not child:
            torch.set_num_threads(1)  # OpenMP's threads do not live here; a DataLoader's workers do the same
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=said)
            outcome = outcome_of(use)
            gc.collect()  # what goes in the child may be the parent's as well
            faulthandler.cancel_dump_traceback_later()
            os.write(said.fileno(), outcome.encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return said.read().decode() or f"the child ended with status {status}"


def outcome_of(use: Use) -> str:
    try:
        use()
        return "works"
    except BaseException as error:  # noqa: BLE001  # it is the outcome
        return f"{type(error).__name__}: {error}"


def is_in_ours(thread: threading.Thread) -> bool:
    """Whether a thread runs code of ours, or what that has called. It stays there while the caller has the GIL."""
    frame = sys._current_frames().get(thread.ident or 0)
    return any(one.f_globals.get("__name__", "").partition(".")[0] in _OURS for one, _ in traceback.walk_stack(frame))


@contextmanager
def busy(use: Use) -> Iterator[threading.Thread]:
    """Another thread is at it in the block."""
    begun, enough = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not enough.is_set():
                begun.set()
                use()
        except BaseException as failure:  # noqa: BLE001  # raised below
            failures.append(failure)

    with in_thread(work, begun, enough) as thread:
        yield thread
    if failures:
        raise failures[0]


@contextmanager
def all_locked(use: Use) -> Iterator[None]:
    """Another thread holds every lock in the block."""
    held, free = threading.Event(), threading.Event()
    locks = list(locks_behind(use))
    assert locks

    def hold() -> None:
        taken = [lock for lock in locks if lock.acquire(blocking=False)]
        held.set()
        free.wait()
        for lock in taken:
            lock.release()

    with in_thread(hold, held, free):
        yield


@contextmanager
def in_thread(work: Callable[[], None], begun: threading.Event, enough: threading.Event) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        yield thread
    finally:
        enough.set()
        thread.join()


_OURS = ("fastensor", "fastensor_lightning")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_LOOKED_INTO = (
    *(dict, list, tuple, set, deque, weakref.WeakSet, partial, types.CellType, types.MethodType),
    *(Future, threading.Condition, threading.Event),
)


def locks_behind(use: Use) -> Iterator[Any]:
    todo: list[Any] = [use]
    todo += [vars(module) for name, module in tuple(sys.modules.items()) if name.partition(".")[0] in _OURS]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        kind = type(one)  # a weak proxy says that it is what it stands for
        if id(one) in seen:
            continue
        seen.add(id(one))
        if kind in _LOCKS:
            yield one
        elif kind is types.FunctionType:
            todo += one.__closure__ or ()
        elif kind in _LOOKED_INTO or kind.__module__.partition(".")[0] in _OURS:
            todo += list(one) if kind is weakref.WeakSet else gc.get_referents(one)


def main() -> None:
    logging.disable(logging.CRITICAL)
    for line in sys.stdin:
        name, moment, folder = line.split(maxsplit=2)
        print(json.dumps(run(name, moment, Path(folder.strip()))), flush=True)


if __name__ == "__main__":
    main()
