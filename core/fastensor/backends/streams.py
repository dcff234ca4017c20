"""Streams of devices: what is queued on them runs in order, and behind the events that they were told to wait for.

All that Fastensor queues on CUDA's streams goes through this module. Queueing copies waits for nothing; whoever
needs their bytes on the host waits for an event. Tests put a model of a device in the place of CUDA
(``tests/device_model.py``), which runs what is queued as late as it may, and notes what is not ordered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from fastensor.backends.threads import uninterrupted
from fastensor.files.forks import first_in_children


@dataclass(frozen=True, slots=True)
class Event:
    """A place in a stream of CUDA, which is reached when all that was queued before it is done. Any thread may ask.

    A thread that has used no device yet would take memory on the first one by asking for it.
    """

    event: torch.cuda.Event
    device: torch.device

    def query(self) -> bool:
        """True if the event is reached."""
        with torch.cuda.device(self.device):
            return bool(self.event.query())  # type: ignore[no-untyped-call]  # torch gives it no types

    def synchronize(self) -> None:
        """Wait on the host until the event is reached."""
        with torch.cuda.device(self.device):
            self.event.synchronize()


class CudaStreams:
    """CUDA's streams and events. Tests have those of a model in their place."""

    def exact(self, device: torch.device) -> torch.device:
        """The device with its number, which stands for the current one if there is none."""
        if device.type == "cuda" and device.index is None:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def are_on(self, device: torch.device) -> bool:
        """True if a device has streams. Copies on other devices are done when the call returns."""
        return device.type == "cuda"

    def current(self, device: torch.device) -> torch.cuda.Stream:
        """The stream that this thread queues work of a device on."""
        return torch.cuda.current_stream(device)

    def new(self, device: torch.device) -> torch.cuda.Stream:
        """Another stream of a device."""
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives no types
        return stream

    @contextmanager
    def entered(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """A block in which this thread queues work of the stream's device on the stream."""
        # ``torch.cuda.stream`` alone would make the thread's former device current at the end, which takes memory there
        # if that device was never used.
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            yield

    def record(self, stream: torch.cuda.Stream) -> Event:
        """An event behind all that has been queued on a stream."""
        # A thread that waits for it leaves the processor to others.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch gives it no types
        with torch.cuda.device(stream.device):
            event.record(stream)
        return Event(event, stream.device)

    def wait(self, stream: torch.cuda.Stream, event: Event) -> None:
        """Have all that is queued on a stream from now on begin when an event is reached."""
        stream.wait_event(event.event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on the current stream of the device of one of them, which may be pinned memory of the host."""
        target.copy_(source, non_blocking=True)

    def keep(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Have the memory of a tensor, once nobody holds it, not be used again before all that has been queued on the
        stream is done."""
        tensor.record_stream(stream)


_streams = CudaStreams()
_side_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
"""By device and purpose. A stream is the same each time, because torch keeps freed memory for the stream that has used
it. Threads share it: what they queue for one purpose runs in the order in which it was queued."""


def are_on(device: torch.device) -> bool:
    """True if a device has streams."""
    return _streams.are_on(device)


def entered_current(device: torch.device) -> AbstractContextManager[None]:
    """A block in which another thread queues work on this thread's current stream of a device."""
    return _streams.entered(_streams.current(device)) if _streams.are_on(device) else nullcontext()


def hold_back_current(device: torch.device, events: Iterable[Event]) -> None:
    """Have what is queued on a device's current stream from now on follow events. The host waits for nothing."""
    for event in events:
        _streams.wait(_streams.current(device), event)


def used_on_current(tensor: torch.Tensor) -> None:
    """Keep the memory of a tensor, once nobody holds it, until all is done that is queued on the current stream of its
    device."""
    if _streams.are_on(tensor.device):
        _streams.keep(tensor, _streams.current(tensor.device))


def event_now(device: torch.device) -> Event | None:
    """An event behind the work that is queued on a device's current stream. None if the device has no streams."""
    return _streams.record(_streams.current(device)) if _streams.are_on(device) else None


def are_reached(events: Iterable[Event]) -> bool:
    """True if all events are reached."""
    return all(event.query() for event in events)


def wait_for(events: Iterable[Event], *, even_if_failed: bool = False) -> None:
    """Wait on the host until events are reached, before memory is used again. An interrupt is raised afterwards.

    Args:
        events: what to wait for.
        even_if_failed: whether a device that has failed raises nothing, because nobody wants the bytes any more.

    Raises:
        RuntimeError: a device has failed, or cannot be asked. It copies nothing any more.
    """
    failures: list[RuntimeError] = []
    for event in events:
        uninterrupted(partial(_wait_for_one, event, failures))
    if failures and not even_if_failed:
        raise failures[0]


def _wait_for_one(event: Event, failures: list[RuntimeError]) -> None:
    try:
        event.synchronize()
    except RuntimeError as error:
        failures.append(error)


class Copies:
    """Copies between devices and the host, queued on the side streams of a purpose.

    Nothing here waits on the host, but :meth:`synchronize`. For devices without streams, :meth:`copy` has copied when
    it returns, and there are no events.

    Args:
        devices: those that are copied from or to.
        purpose: names the side streams.
    """

    def __init__(self, devices: Iterable[torch.device], purpose: str) -> None:
        exact = {_streams.exact(device) for device in devices}
        self._sides = {device: _side_stream(device, purpose) for device in exact if _streams.are_on(device)}

    @property
    def device(self) -> torch.device | None:
        """A device with streams, for which memory of the host is to be pinned; None if there is none."""
        return next(iter(self._sides), None)

    def follow_current(self) -> Self:
        """Have the copies that are queued from now on follow what is queued on the devices' current streams."""
        for device, side in self._sides.items():
            _streams.wait(side, _streams.record(_streams.current(device)))
        return self

    def follow(self, event: Event | None) -> Self:
        """Have the copies that are queued from now on follow an event, if there is one."""
        if event is not None:
            for side in self._sides.values():
                _streams.wait(side, event)
        return self

    def precede_current(self) -> None:
        """Have what is queued on the devices' current streams from now on follow the copies."""
        for device, side in self._sides.items():
            _streams.wait(_streams.current(device), _streams.record(side))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A block in which :meth:`copy` may be called. Entering takes longer than a copy takes to queue."""
        with ExitStack() as stack:
            for side in self._sides.values():
                stack.enter_context(_streams.entered(side))
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of bytes between the host and a device, in an :meth:`entered` block. Memory of the host is to be
        pinned, or else the call may wait until the bytes are copied."""
        if (source.device if target.device.type == "cpu" else target.device) in self._sides:
            _streams.copy(target, source)
        else:
            target.copy_(source)

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor of a device, once nobody holds it, until the copies that are queued now are
        done."""
        if (side := self._sides.get(tensor.device)) is not None:
            _streams.keep(tensor, side)

    def events(self) -> list[Event]:
        """An event of each device, reached when the copies are done that were queued so far."""
        return [_streams.record(side) for side in self._sides.values()]

    def synchronize(self) -> None:
        """Wait on the host until no copy is under way."""
        wait_for(self.events())


def _side_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    key = (device, purpose)
    if key not in _side_streams:
        _side_streams.setdefault(key, _streams.new(device))
    return _side_streams[key]


first_in_children(_side_streams.clear)
