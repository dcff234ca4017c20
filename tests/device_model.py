"""A model of a device with streams, in host memory: what is queued runs as late as it may, or at once, or at random.

A copy that is not waited for has then not run when its bytes are looked at, and a copy that does not follow what makes
its bytes copies others. Both show in what is saved or computed. What does not show there, the model notes: memory of
the device that is freed before a copy from or to it has run, and buffers that are given back to their pool before.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.backends import buffers, streams
from fastensor.backends.buffers import Buffer, BufferPool

CPU = torch.device("cpu")
Order: TypeAlias = Literal["late", "copies late", "early", "random"]
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(eq=False)
class Work:
    """Something that is queued."""

    function: Callable[[Work], None]
    after: list[ModelEvent]
    ranges: list[range] = field(default_factory=list)
    """Addresses that it reads or writes."""
    is_done: bool = False
    is_awaited: bool = False
    """Whether the stream that kernels are queued on waits for it."""
    kept: Any = None
    """Memory that is not to be freed before."""


@dataclass(eq=False)
class ModelEvent:
    """A place in a stream."""

    model: DeviceModel
    works: list[Work]
    """All that was queued before it."""

    def query(self) -> bool:
        with self.model.lock:
            self.model.check()
            self.model.run_some()
            return all(work.is_done for work in self.works)

    def synchronize(self) -> None:
        self.model.check()
        self.model.run(self.works)


class ModelStream:
    """A queue of the model."""

    def __init__(self, model: DeviceModel) -> None:
        self.model = model
        self.works: list[Work] = []
        self.after: list[ModelEvent] = []

    def queue(self, function: Callable[[Work], None], ranges: list[range], kept: Any = None) -> None:
        with self.model.lock:
            before = [ModelEvent(self.model, [self.works[-1]])] if self.works else []
            work = Work(function, [*before, *self.after], ranges, kept=kept)
            self.after = []
            self.works = [one for one in self.works if not one.is_done] + [work]
            self.model.queued.append(work)
            self.model.run_some()

    def record(self) -> ModelEvent:
        with self.model.lock:
            waited_for = [work for event in self.after for work in event.works]
            return ModelEvent(self.model, [work for work in [*self.works[-1:], *waited_for] if not work.is_done])

    def wait(self, event: ModelEvent) -> None:
        with self.model.lock:
            if self is self.model.computing:
                event.synchronize()  # what this program computes is not queued, but done at once
            else:
                self.after.append(event)


class DeviceModel:
    """Host memory as a device with streams. Takes the place of :class:`fastensor.backends.streams.CudaStreams`.

    Args:
        order: when queued work runs, beside what is waited for: never; never but what :meth:`kernel` has queued; at
            once; or some of it at each call.
        seed: of the random order.
    """

    def __init__(self, order: Order = "late", seed: int = 0) -> None:
        self.order = order
        self.lock = threading.RLock()
        self.queued: list[Work] = []
        self.wrong: list[str] = []
        """What happened that must not."""
        self.computing = ModelStream(self)
        """What a program computes is done at once: this stream is never behind."""
        self.kernels: ModelStream | None = None
        """The current stream in a block of :meth:`queuing`."""
        self.copied_nbytes = 0
        self.kept_nbytes = 0
        """Bytes that side streams were to keep."""
        self.has_failed = False
        """Whether all that is waited for fails, as after an assertion on a device."""
        self._random = random.Random(seed)
        self._entered = threading.local()

    # --- as CudaStreams

    def exact(self, device: torch.device) -> torch.device:
        return device

    def are_on(self, device: torch.device) -> bool:
        return device == CPU

    def record(self, stream: ModelStream) -> ModelEvent:
        return stream.record()

    def wait(self, stream: ModelStream, event: ModelEvent) -> None:
        stream.wait(event)
        if stream is self.kernels:
            self._await(event.works)

    def current(self, device: torch.device) -> ModelStream:
        entered: list[ModelStream] = self._stack()
        return entered[-1] if entered else self.kernels or self.computing

    def new(self, device: torch.device) -> ModelStream:
        return ModelStream(self)

    @contextmanager
    def entered(self, stream: Any) -> Iterator[None]:
        self._stack().append(stream)
        try:
            yield
        finally:
            self._stack().pop()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.nbytes == source.nbytes
        assert target.is_contiguous()
        assert source.is_contiguous()
        nbytes, addresses = target.nbytes, (target.data_ptr(), source.data_ptr())
        was_freed = [_freed(one) for one in (target, source)]

        def run(work: Work) -> None:
            target_is_gone, source_is_gone = (freed() for freed in was_freed)
            if source_is_gone or (target_is_gone and not work.is_awaited):
                self.wrong.append("memory was freed before a copy from or to it had run")
            elif not target_is_gone:  # or else it is used again behind the copy, and nobody sees the bytes
                ctypes.memmove(*addresses, nbytes)
            self.copied_nbytes += nbytes

        self.current(CPU).queue(run, [range(address, address + nbytes) for address in addresses])

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        if stream in (self.computing, self.kernels):
            return  # that stream has made the memory: it is used again behind what is queued there
        self.kept_nbytes += tensor.nbytes
        stream.queue(_nothing, [], kept=tensor.untyped_storage())

    # --- running

    def check(self) -> None:
        """Raise an error if the device has failed."""
        if self.has_failed:
            raise torch.AcceleratorError("the device has failed")

    def run(self, works: list[Work]) -> None:
        """Run works, and before each all that it follows."""
        with self.lock:
            todo = list(works)
            while todo:
                work = todo[-1]
                missing = [one for event in work.after for one in event.works if not one.is_done]
                if missing and not work.is_done:
                    todo += missing
                    continue
                todo.pop()
                if not work.is_done:
                    work.is_done = True
                    self.queued.remove(work)
                    work.function(work)
                    work.function, work.kept = _nothing, None

    def run_some(self) -> None:
        """Run what the order lets run now."""
        if self.order == "early":
            self.run(list(self.queued))
        elif self.order == "random":
            while self.queued and self._random.random() < 0.5:
                self.run([self._random.choice(self.queued)])

    def kernel(self, function: Callable[[], None]) -> None:
        """Queue what a device is to compute, in a block of :meth:`queuing`."""
        assert self.kernels is not None
        self.kernels.queue(lambda _: function(), [])
        if self.order == "copies late":
            self.finish_kernels()

    @contextmanager
    def queuing(self) -> Iterator[None]:
        """A block in which the current stream is one that :meth:`kernel` queues on."""
        self.kernels = ModelStream(self)
        try:
            yield
        finally:
            self.finish_kernels()
            self.kernels = None

    def check_idle(self, buffer: Buffer) -> None:
        """Note that a buffer is given back, which nothing that is queued may use."""
        with self.lock:
            memory = range(buffer.address, buffer.address + buffer.nbytes)
            for work in self.queued:
                if any(one.start < memory.stop and memory.start < one.stop for one in work.ranges):
                    self.wrong.append("a buffer was given back before a copy from or to it had run")
                    return

    def finish_kernels(self) -> None:
        """Wait until all that :meth:`kernel` has queued is done."""
        assert self.kernels is not None
        self.kernels.record().synchronize()

    def _await(self, works: list[Work]) -> None:
        """Note that kernels follow works, and all that these follow."""
        todo = list(works)
        while todo:
            work = todo.pop()
            if not work.is_awaited:
                work.is_awaited = True
                todo += [one for event in work.after for one in event.works]

    def _stack(self) -> list[ModelStream]:
        found: list[ModelStream] = self._entered.__dict__.setdefault("streams", [])
        return found


@contextmanager
def modelled(order: Order = "late", seed: int = 0) -> Iterator[DeviceModel]:
    """Host memory is a device with streams in the block, after which nothing wrong must have happened."""
    model = DeviceModel(order, seed)
    give = BufferPool.give

    def checked(pool: BufferPool, buffer: Buffer) -> None:
        model.check_idle(buffer)
        give(pool, buffer)

    with (
        mock.patch.object(streams, "_streams", model),
        mock.patch.dict(streams._side_streams, clear=True),
        mock.patch.object(BufferPool, "give", checked),
    ):
        yield model
        model.run(list(model.queued))
    assert not model.wrong


def _nothing(work: Work) -> None:
    """What is left to do by what is done."""


def _freed(tensor: torch.Tensor) -> Callable[[], bool]:
    """Tells whether the memory of a tensor was freed. That of a buffer belongs to its pool."""
    for mapping in buffers._mappings:
        begin = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        if begin <= tensor.data_ptr() < begin + len(mapping):
            return lambda: False
    return StorageWeakRef(tensor.untyped_storage()).expired  # type: ignore[no-any-return, no-untyped-call]
