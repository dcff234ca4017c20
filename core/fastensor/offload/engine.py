"""``ActivationOffload``: tensors that autograd saves in the forward pass go to an SSD, and come back when they are
needed."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch

from fastensor.errors import OffloadError
from fastensor.offload.config import OffloadConfig
from fastensor.offload.forward import ForwardPass
from fastensor.offload.hooks import StepHooks, untraced
from fastensor.offload.modules import AttachedModel
from fastensor.offload.schedule import PrefetchSchedule, PrefetchSchedules
from fastensor.offload.statistics import WRITTEN_BY, Counters, OffloadStatistics, drive_days
from fastensor.offload.transfers import Transfers

_FORGET_REFERENCED_EVERY = 64
"""Forward passes after which the offload finds out anew whose memory others keep alive."""
_LEAST_SECONDS = 60.0
"""Time before the offload warns about drives that wear out."""
_EXPECTED = (OffloadError, MemoryError, torch.OutOfMemoryError, OSError)
"""Exceptions that leave the records whole."""
_logger = logging.getLogger("fastensor")


class ActivationOffload:
    """Moves saved activations to an SSD in the forward pass, and back in the backward pass. Gradients are the same.

    In the ``with`` block of :meth:`step` autograd hands over the tensors that it saves for the backward pass
    (``torch.autograd.graph.saved_tensors_hooks``), in this thread. Threads write each large tensor to a nameless file,
    and free its memory as soon as the bytes are written. Parameters, buffers of an attached model, views and casts of
    these, and tensors that others keep alive stay in memory. The backward pass may run anywhere, any number of times,
    wholly or in part or not at all. Threads read ahead what the backward pass needs next, in the order of the last step
    of the same form. When a graph goes, its bytes on the SSD go, too.

    In-place changes of saved tensors are found at the backward pass, as without offloading. Gradients are undefined if
    a saved tensor is changed without autograd's knowledge (``tensor.data``, other frameworks).

    An interrupt (Ctrl-C), or another exception that nobody expects in the offload, closes what the offload has open:
    graphs that still live raise an :class:`OffloadError` if they need bytes that are not in memory any more, and the
    next step begins anew. Nothing hangs, nothing is left on the disk, and no gradient is wrong.

    Every method may be called from several threads; steps may overlap and nest. A pickled offload is a new one with the
    same configuration; so is the offload in a forked child, attached to the child's model. There, a graph of the parent
    raises, unless nothing of it was offloaded. Files and threads begin with the first tensor that is offloaded.
    ``torch.func`` refuses to work under hooks of this kind.

    Args:
        config: how many bytes go where.

    >>> import torch
    >>> from fastensor.offload import ActivationOffload, OffloadConfig
    >>> weight = torch.randn(512, 512, requires_grad=True)
    >>> with ActivationOffload(OffloadConfig(min_bytes=1 << 16)) as offload:
    ...     with offload.step():
    ...         loss = torch.randn(64, 512).mm(weight).sigmoid().mm(weight).exp().sum()
    ...     loss.backward()
    ...     offload.statistics().offloaded
    3
    """

    def __init__(self, config: OffloadConfig | None = None) -> None:
        self.config = config or OffloadConfig()
        self._model: AttachedModel | None = None
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._transfers: Transfers | None = None
        self._counters = Counters()
        self._schedules = PrefetchSchedules()
        self._forward_passes = 0
        self._counts: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._hook_seconds = 0.0
        self._begun = time.monotonic()
        self._warned_of_wear = False
        self._closed = False
        _engines.add(self)

    # For users. ------------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Offload what this thread's forward passes save in the block. There may be any number of forward and backward
        passes in it: each costs what it would in a block of its own.

        Raises:
            OffloadError: the offload has been closed; or, with ``when_full="raise"``, an activation of this step or of
                an earlier one could not be written.
        """
        if self._closed:
            raise OffloadError("this ActivationOffload has been closed; make another one")
        if (self.config.include or self.config.exclude) and self._model is None:
            raise OffloadError("include and exclude name modules of a model: call attach(model) before the first step")
        if (transfers := self._transfers) is not None:
            transfers.raise_failure()
        with self._lock:
            self._counts["steps"] += 1
        hooks = StepHooks(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(untraced(hooks.pack), untraced(hooks.unpack)):
                yield
        finally:
            self._warn_of_wear()

    def attach(self, model: torch.nn.Module) -> None:
        """Name the model that runs in the steps, so that its buffers are not offloaded, and ``include`` and ``exclude``
        of the configuration can name its modules. A model that was attached before is detached.

        Copies of the model (``copy.deepcopy``, ``pickle``, ``torch.save(model)``, averages of weights) are not
        attached, and can be loaded where Fastensor is not installed.

        Raises:
            ValueError: a pattern fits no module of the model.
            OffloadError: FSDP or DeepSpeed's ZeRO stage 3 frees and refills the memory of the model's parameters; or a
                pattern fits a module of TorchScript, which calls no hooks.
        """
        attached = AttachedModel(model, self.config.include, self.config.exclude)
        self.detach()
        self._model = attached

    def detach(self) -> None:
        """Take the hooks out of the attached model. Calling it again does nothing."""
        model, self._model = self._model, None
        if model is not None:
            model.remove()

    def settle(self) -> None:
        """Wait until nothing is being written or read."""
        if (transfers := self._transfers) is not None:
            transfers.settle()

    def close(self) -> None:
        """Give back files, threads and memory. Graphs that still live raise if they need bytes that are not in the
        memory that they were saved from. Calling it again does nothing."""
        self.detach()
        with self._lock:
            self._closed = True
            transfers = self._transfers
        if transfers is not None:
            transfers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return type(self), (self.config,)

    def memory_usage(self) -> dict[str, int]:
        """Bytes in each place now: ``pending``, ``in_dram``, ``loaded``, ``idle``, ``staged`` (memory), ``on_ssd``,
        ``reserved_on_ssd``. Empty if nothing has been offloaded."""
        return {} if (transfers := self._transfers) is None else transfers.memory_usage()

    def statistics(self) -> OffloadStatistics:
        """What the offload has done so far."""
        usage = self.memory_usage()
        with self._lock:
            moved, seconds = Counter(self._counters.counts), dict(self._counters.seconds)
            kept = self._kept + Counter({"not moved": moved["kept_bytes"]})
        written_by = {
            name.removeprefix(WRITTEN_BY): nbytes for name, nbytes in moved.items() if name.startswith(WRITTEN_BY)
        }
        return OffloadStatistics(
            steps=self._counts["steps"],
            packed=self._counts["packed"],
            shared_bytes=self._counts["shared_bytes"],
            kept={why: nbytes for why, nbytes in kept.items() if nbytes},
            wait_to_write_seconds=seconds.get("wait_to_write", 0.0),
            wait_to_read_seconds=seconds.get("wait_to_read", 0.0),
            hook_seconds=self._hook_seconds,
            reserved_ssd_bytes=usage.get("reserved_on_ssd", 0),
            written_by=written_by,
            drive_days=drive_days(
                moved["written_bytes"], time.monotonic() - self._begun, self.config.drive_tbw
            ),
            **{name: moved[name] for name in (
                "offloaded", "offloaded_bytes", "written_bytes", "read_bytes", "taken_back_bytes", "failed_writes",
                "prefetch_hits", "prefetch_late", "misses", "peak_pending_bytes", "peak_loaded_bytes",
                "peak_dram_bytes", "peak_ssd_bytes",
            )},
        )  # fmt: skip

    # For the hooks of steps. -----------------------------------------------------------------------------------------

    def transfers(self) -> Transfers:
        """What moves bytes now: made when it is first wanted, and again after an interrupt."""
        with self._lock:
            if self._transfers is None:
                self._transfers = Transfers(self.config, self._counters)
                if self._closed:  # by another thread, or in the middle of the step: everything stays in memory
                    self._transfers.close()
            return self._transfers

    def guarded(self, transfers: Transfers) -> Guard:
        """A ``with`` block that closes ``transfers`` if an exception that nobody expects leaves it."""
        return Guard(self, transfers)

    def discard(self, transfers: Transfers) -> None:
        """Close ``transfers``, whose records may be half changed. The next step begins with new ones."""
        if self._transfers is transfers and not self._closed:
            self._transfers = None
        transfers.close()

    def begin_forward(self, transfers: Transfers) -> ForwardPass:
        with self._lock:
            self._forward_passes += 1
            if self._forward_passes % _FORGET_REFERENCED_EVERY == 0:
                transfers.externally_referenced.clear()
        return ForwardPass(transfers, self._begin_schedule)

    def _begin_schedule(self, form: int, saved: Sequence[int]) -> PrefetchSchedule:
        with self._lock:
            return self._schedules.begin(form, saved)

    def persistent_storages(self) -> set[int]:
        return set() if self._model is None else self._model.storages()

    @property
    def wants_now(self) -> bool:
        return self._model is None or self._model.wants

    def count(self, counts: Counter[str], kept: Counter[str], seconds: float) -> None:
        with self._lock:
            self._counts += counts
            self._kept += kept
            self._hook_seconds += seconds

    def _warn_of_wear(self) -> None:
        if self.config.drive_tbw is None or self._warned_of_wear or time.monotonic() - self._begun < _LEAST_SECONDS:
            return
        days = self.statistics().drive_days
        if days < self.config.drive_days:
            self._warned_of_wear = True
            _logger.warning(
                "at this pace the drives last %.0f days: they are guaranteed for %g TB. Offload less, by a larger "
                "min_bytes, by exclude, or with dram_bytes",
                days,
                self.config.drive_tbw,
            )


class Guard:
    """See :meth:`ActivationOffload.guarded`."""

    def __init__(self, engine: ActivationOffload, transfers: Transfers) -> None:
        self._engine = engine
        self._transfers = transfers

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, _EXPECTED):
            self._engine.discard(self._transfers)


_engines: weakref.WeakSet[ActivationOffload] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a forked child: threads, locks and slots are the parent's."""
    for engine in _engines:
        if engine._transfers is not None:
            engine._transfers.forget()
        engine._begin()


os.register_at_fork(after_in_child=_begin_anew)
