"""Batches that a service has made, in the order of epochs, each once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from fastensor.backends.streams import Copies, Event, used_on_current, wait_for
from fastensor.data.epochs import EpochLoader, Progress
from fastensor.data.plan import EpochPlan
from fastensor.data.skipping import Skipped
from fastensor.errors import BatchError, ProvisionError
from fastensor.files.arguments import check_seconds, checks_keywords
from fastensor.files.shown import record_repr
from fastensor.files.words import counted
from fastensor.provision.encoding import decode
from fastensor.provision.engine import EngineLost, Feed, Pushed, Registration, ServiceEngine, Start
from fastensor.provision.metrics import Served, table

T = TypeVar("T")

_CHECK_SECONDS = 5.0
"""A batch that takes longer makes the client ask whether the service is well."""
DEFAULT_TIMEOUT = 1800.0
_MOST_RECOVERIES = 3
"""A service that is lost so often without having brought a batch is not looked for again."""
_NOWHERE = -1
"""No epoch."""


@dataclass(frozen=True, slots=True)
class LoaderStatistics:
    """Counts of what a loader has given out so far."""

    given: Served = field(default_factory=Served)
    """Batches, and how long they were waited for."""
    epoch: Served = field(default_factory=Served)
    """Those of the epoch that is given out, or was last."""
    repeated: int = 0
    """Batches that came again, and were dropped."""
    recoveries: int = 0
    """Number of times that the service was lost, and looked for."""

    __repr__ = record_repr

    def __str__(self) -> str:
        """A table for people: :func:`fastensor.provision.metrics.table`."""
        lines = [table({"epoch": self.epoch, "in all": self.given})]
        if self.repeated or self.recoveries:
            repeated = counted(self.repeated, "batches", one="batch")
            lines.append(f"The service was lost {counted(self.recoveries, 'times')}. {repeated} came again.")
        if self.given.skipped:
            lines.append(f"Samples left out: {self.given.skipped}, of them {self.epoch.skipped} in the epoch.")
        return "\n".join(lines)


@checks_keywords
class ProvisionedLoader(EpochLoader):
    """Iterates over the batches of one epoch after the other, which a service makes. See
    :class:`~fastensor.data.epochs.EpochLoader`, and :meth:`fastensor.provision.DataService.loader`, which makes it.

    Batches come ahead of need, and each is given out once, in the order of the plan, whatever happens to the service.
    Their tensors and arrays are views of memory that only this process uses: they may be written to, and kept. While a
    batch is kept, its part of the buffer is not used for others.

    Used by one thread at a time; one iteration at a time. A forked child that uses the loader is served for itself,
    from where the parent was, if the engine can be used in forked processes: it takes no batch of the parent's.

    A batch that cannot be made raises :class:`~fastensor.errors.BatchError`. It counts as given out, and ``next`` goes
    on with the one after it. So does one that has come, and raises another error when it is decoded or copied to the
    device. After Ctrl-C, or when the service cannot be reached, no batch is lost.

    Args:
        engine: the service.
        registration: what the service has to know.
        plan: without the ranks.
        ranks: see :class:`~fastensor.data.epochs.EpochLoader`.
        device: where tensors of batches are to be. To a GPU they are copied in a stream of their own.
        timeout: for how many seconds a batch is waited for, while the service answers.
    """

    _kind = "a ProvisionedLoader"

    def __init__(
        self,
        engine: ServiceEngine,
        registration: Registration,
        plan: EpochPlan,
        *,
        ranks: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        check_seconds(timeout, "timeout")
        super().__init__(plan, ranks=ranks, on_error=registration.on_error)
        self._timeout = timeout
        self._process = os.getpid()
        """The process that the feed is of."""
        self._engine = engine
        self._registration = registration
        where = torch.device("cpu" if device is None else device)
        self._copies = None if where.type == "cpu" else DeviceCopies(where)
        self._feed: Feed | None = None
        self._is_started = False
        """True once the feed was told where to begin."""
        self._next = Start(plan, _NOWHERE, 0)
        """Position of the batch that the service sends next: its epoch, and its number."""
        self._arrived: dict[int, Pushed] = {}
        """By their numbers, batches that were not given out yet."""
        self._late: set[int] = set()
        """Numbers of batches that were waited for in vain, and have not come yet."""
        self._statistics = LoaderStatistics()
        self._began: float | None = None
        """Time at which the first batch was wanted."""
        self._epoch_began = 0.0
        """Time at which the first batch of the epoch was wanted."""
        self._counted = 0
        """The iteration that the statistics of the epoch are of."""
        self._recoveries = 0
        """Number of times that the service was lost since the last batch."""

    def stats(self) -> LoaderStatistics:
        """Counts of what was given out so far, and how long it was waited for."""
        return self._statistics

    def close(self) -> None:
        """Have the service forget this loader, until it is used again."""
        if self._feed is not None:
            self._feed.close()
            self._feed, self._is_started = None, False
        self._arrived.clear()

    @property
    def _content(self) -> str:
        return self._engine.facts.fingerprint

    def _batches_of(self, plan: EpochPlan) -> Iterator[Any]:
        batches = self._host_batches(plan, self._progress)
        return batches if self._copies is None else map(self._copies, batches)

    def _has_taken(self, error: BaseException) -> bool:
        """Errors of a batch, also those of decoding and copying it; neither interrupts, nor errors of the service."""
        return isinstance(error, Exception) and self._next.epoch != _NOWHERE

    def _host_batches(self, plan: EpochPlan, progress: Progress) -> Iterator[Any]:
        """The batches from a progress to the end of its epoch."""
        if self._counted != self._iteration:
            self._counted = self._iteration
            self._epoch_began = time.perf_counter()
            self._statistics = replace(self._statistics, epoch=Served())
        with self._known_next():
            self._send_from(plan, progress)
        while plan.steps(progress.consumed):
            progress = progress.after_step(plan)
            with self._known_next():
                content = self._content_of_next()
            yield self._decoded(content)
            del content  # or its memory would be kept until the next batch is here

    @contextmanager
    def _known_next(self) -> Iterator[None]:
        """Have the service begin anew after an error of talking with it, or an interrupt: a batch that has come may be
        lost on its way."""
        try:
            yield
        except BatchError:
            raise
        except BaseException:
            self._next = replace(self._next, epoch=_NOWHERE)
            raise

    def _send_from(self, plan: EpochPlan, progress: Progress) -> None:
        """Have the service go on at a progress, if it does not anyway."""
        wanted = Start(plan, progress.epoch, progress.consumed, self._next.generation, self._next.index)
        if self._next != wanted:
            self._is_started = False
            self._arrived.clear()
            self._late.clear()
            self._next = replace(wanted, generation=wanted.generation + 1, index=0)
        self._talk(lambda feed: None)

    def _content_of_next(self) -> memoryview:
        """The next batch, in turn.

        Raises:
            BatchError: it cannot be made, or has not come in time. It counts as given out.
        """
        began = time.perf_counter()
        pushed = self._awaited(began + self._timeout)
        waited_seconds = time.perf_counter() - began
        if pushed is not None and not pushed.failure:
            self._count(pushed, waited_seconds)
        self._pass(waited_seconds)
        if pushed is None:
            self._late.add(self._next.index - 1)
            raise BatchError(
                f"a batch has not come within {self._timeout:g} s, although the service answers: a sample, a transform "
                f"or collate_fn takes longer, or hangs; DataService.status() says what workers do. loader(timeout=) "
                f"lets it take longer"
            )
        if pushed.failure:
            raise BatchError(f"a batch could not be made. This was raised in a worker:\n\n{pushed.failure}")
        return pushed.content

    def _awaited(self, deadline: float) -> Pushed | None:
        """The next batch; None if it has not come by then."""
        while (pushed := self._arrived.pop(self._next.index, None)) is None:
            seconds = min(_CHECK_SECONDS, deadline - time.perf_counter())
            if seconds <= 0:
                return None
            self._sort_in(self._talk(lambda feed: feed.pushed(seconds)))  # noqa: B023  # called at once
        return pushed

    def _pass(self, waited_seconds: float) -> None:
        """The next batch counts as given out. Whoever knows how many there are does not ask once more after the last
        one of an epoch."""
        self._next = self._next.following()
        self._talk(lambda feed: feed.credit(self._next.generation, self._next.index, waited_seconds=waited_seconds))
        self._recoveries = 0

    def _decoded(self, content: memoryview) -> Any:
        """A batch. Samples that it lacks are counted and logged."""
        if self._on_error == "raise":
            return decode(content)
        batch, positions, reasons = decode(content)
        self._note_skipped(map(Skipped, positions, reasons))
        return batch

    def _count(self, pushed: Pushed, waited_seconds: float) -> None:
        now = time.perf_counter()
        if self._began is None:
            self._began = now - waited_seconds

        def counted(served: Served, began: float) -> Served:
            served = served.with_batch(nbytes=len(pushed.content), **pushed.cost._asdict())
            return replace(served, seconds=now - began, waits=served.waits.with_wait(waited_seconds))

        given, epoch = self._statistics.given, self._statistics.epoch
        self._statistics = replace(
            self._statistics, given=counted(given, self._began), epoch=counted(epoch, self._epoch_began)
        )

    def _sort_in(self, pushed: Pushed | None) -> None:
        """Keep what has come until its turn; but each batch once."""
        if pushed is None or pushed.generation != self._next.generation:
            return
        if pushed.index in self._late:
            self._late.remove(pushed.index)
        elif pushed.index < self._next.index or pushed.index in self._arrived:
            self._statistics = replace(self._statistics, repeated=self._statistics.repeated + 1)
        else:
            self._arrived[pushed.index] = pushed

    def _talk(self, action: Callable[[Feed], T]) -> T:
        """Say something to the service, or hear it; to one that was found again, if need be.

        Raises:
            ProvisionError: it is lost again and again.
        """
        if self._process != os.getpid():
            self._feed, self._is_started, self._process = None, False, os.getpid()
            self._arrived.clear()
        while True:
            try:
                if self._feed is None:
                    self._feed = self._engine.register(self._registration)
                if not self._is_started:
                    self._feed.start(self._next)
                    self._is_started = True
                return action(self._feed)
            except EngineLost as error:
                self._feed, self._is_started = None, False
                self._recoveries += 1
                self._statistics = replace(self._statistics, recoveries=self._statistics.recoveries + 1)
                if self._recoveries > _MOST_RECOVERIES:
                    raise ProvisionError(
                        f"the data service was lost {counted(self._recoveries, 'times')}: {error}"
                    ) from error
                self._engine.recover()


class DeviceCopies:
    """Copies the tensors of batches to a device, while it computes.

    For a GPU of CUDA, there are two pieces of pinned memory by turns: a tensor is copied to one of them, and from there
    in a stream of its own. The stream that is current when a batch is copied waits for it; the host does not. When the
    call returns, the batch that was given is not used any more. Copies belong to the caller.

    Args:
        device: another one than the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = Copies([device], "batches")
        self._pinned: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8, device="cpu")] * 2
        self._copied: list[Sequence[Event]] = [(), ()]
        """Events after which each piece of pinned memory can be used again."""
        self._turn = 0

    def __call__(self, batch: Any) -> Any:
        """The batch, with its tensors on the device. Everything else stays as it is."""
        if self._copies.device is None:
            return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device), batch)
        self._turn ^= 1
        wait_for(self._copied[self._turn])
        self._make_room(batch)
        self._used_nbytes = 0
        with self._copies.entered():
            copy = tree_map_only(torch.Tensor, self._copy, batch)
            self._copied[self._turn] = self._copies.events()
        self._copies.precede_current()
        tree_map_only(torch.Tensor, used_on_current, copy)
        return copy

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        begin = self._used_nbytes
        self._used_nbytes += _aligned_nbytes(tensor)
        pinned = self._pinned[self._turn][begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        pinned.copy_(tensor)
        copy = torch.empty_like(pinned, device=self._device)
        self._copies.copy(copy, pinned)
        return copy

    def _make_room(self, batch: Any) -> None:
        nbytes = sum(_aligned_nbytes(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        if nbytes > len(self._pinned[self._turn]):
            self._pinned[self._turn] = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def _aligned_nbytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64
