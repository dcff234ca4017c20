"""The engine of an activation offload: what the hooks of its steps share."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from fastensor.errors import OffloadError
from fastensor.files.forks import in_children
from fastensor.offload.config import OffloadConfig
from fastensor.offload.copying import PAGE_NBYTES
from fastensor.offload.forward import ForwardPass, PrefetchSchedules
from fastensor.offload.host_memory import is_address_space_limited, page_fault_seconds, spare_address_space
from fastensor.offload.modules import AttachedModel
from fastensor.offload.planner import Planner, UnexaminedPass
from fastensor.offload.scheduler import TransferRates
from fastensor.offload.statistics import (
    Counters,
    EncodedBytes,
    OffloadEstimate,
    OffloadStatistics,
    drive_days,
    estimate_of,
    report_of,
)
from fastensor.offload.swapper import Swapper
from fastensor.offload.trace import Trace

_FORGET_REFERENCED_EVERY = 64
"""Forward passes after which the engine finds out anew which memory others keep alive."""
_LEAST_SHARE = 0.25
"""The share of all written bytes that must be new before rates are found out again."""
_EXPECTED = (OffloadError, MemoryError, torch.OutOfMemoryError, OSError)
"""Exceptions that leave the records whole."""
_LEAST_SECONDS = 60.0
"""Time before the engine warns about drives that wear out."""
NOTHING: Mapping[str, int] = {}
"""No counts, for hooks that count only their time."""
_logger = logging.getLogger("fastensor")


class OffloadEngine:
    """The swapper, the attached model, the prefetch schedules and the counters of one
    :class:`~fastensor.offload.ActivationOffload`. Call every method from any thread.

    Args:
        config: how many bytes go where.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self.model: AttachedModel | None = None
        self.trace = None if config.trace is None else Trace(config.trace)
        if self.trace is not None:
            weakref.finalize(self, self.trace.write_at_exit)
        self.begin()
        in_children(self, OffloadEngine.begin_in_child)

    def begin(self) -> None:
        """Begin without a swapper, and with all counters at zero. The model stays attached."""
        self._lock = threading.Lock()
        self._swapper: Swapper | None = None
        self._counters = Counters()
        self._schedules = PrefetchSchedules()
        self.planner = self._new_planner(self.config)
        self._forward_passes = 0
        self._window_start = self._counters.transfers()
        """Totals of transfers when their rates were last found out."""
        self._latest_rates: TransferRates | None = None
        self._begun = time.monotonic()
        self._warned_of_wear = False
        self.closed = False

    def swapper(self, device: torch.device) -> Swapper:
        """The open swapper: made for the first tensor that is offloaded, and again after an interrupt. The device of
        that tensor says what budgets mean."""
        with self._lock:
            if self._swapper is None:
                is_limited = is_address_space_limited()
                if is_limited and self.config.return_freed_memory:
                    spare_address_space()
                self._swapper = Swapper(self.config.for_device(device), self._counters, self.trace)
                if is_limited:  # stacks count: what is free is found out when there are all
                    self._swapper.start_threads()
                if self.closed:  # by another thread, or in the middle of the step: everything stays in memory
                    self._swapper.close()
            return self._swapper

    @contextmanager
    def guarded(self, swapper: Swapper | None) -> Iterator[None]:
        """Close ``swapper``, if there is one, if the block raises an unexpected exception, such as Ctrl-C: its records
        may be half changed, and so may those of the planner. The next step begins with new ones."""
        try:
            yield
        except _EXPECTED:
            raise
        except BaseException:
            if self._swapper is swapper and not self.closed:
                self._swapper = None
                self.planner = self._new_planner(self.config)
            if swapper is not None:
                swapper.close()
            raise

    def begin_step(self) -> None:
        """Count a step.

        Raises:
            OffloadError: a tensor of an earlier step could not be written, and ``when_full="raise"``.
        """
        if (swapper := self._swapper) is not None:
            swapper.raise_failure()
        with self._lock:
            self._counters.counts["steps"] += 1

    def end_step(self) -> None:
        """Write a trace that is full. Warn, once, if the drives wear out too soon at the present pace.

        Raises:
            OffloadError: the trace cannot be written.
        """
        if self.trace is not None and self.trace.is_full:
            self.trace.write()
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

    def begin_forward(self, swapper: Swapper, *, is_rest: bool) -> ForwardPass:
        """The record of a forward pass that begins, or of the rest of one that was not examined before."""
        with self._lock:
            self._forward_passes += 1
            if self._forward_passes % _FORGET_REFERENCED_EVERY == 0:
                swapper.externally_referenced.clear()
        record = self.planner.begin_pass(is_rest=is_rest)
        if (budgets := self.planner.divided_budgets()) is not None:
            swapper.set_budgets(*budgets)
        return ForwardPass(swapper, self._schedules, record)

    def _rates(self) -> TransferRates | None:
        """Rates of transfers since they were last found out, or since the one time before, if little has moved
        since; None before the first one."""
        with self._lock:
            now = self._counters.transfers()
            latest = {name: count - self._window_start[name] for name, count in now.items()}
            if latest["written_bytes"] > _LEAST_SHARE * now["written_bytes"] and latest["write_seconds"]:
                config = self.config if self._swapper is None else self._swapper.config
                self._latest_rates = rates_of(latest, config, self._latest_rates)
                self._window_start = now
            return self._latest_rates

    def estimate(self, config: OffloadConfig) -> OffloadEstimate:
        """Expected time and memory of training with another configuration, by measurements of the latest pass.

        Raises:
            OffloadError: no pass with a backward pass was measured.
        """
        self.planner.plan_ended()
        measured = self.planner.latest()
        if measured is None:
            raise OffloadError(
                "nothing was measured: run a forward pass that saves tensors of at least "
                f"{self.config.min_bytes} bytes, and its backward pass; in a dry run, without a step() of their own"
            )
        rates = self._rates()
        return estimate_of(
            report_of(self._new_planner(config).planned(measured.record)),
            rates.write_bandwidth if rates else 0.0,
            rates.read_bandwidth if rates else 0.0,
            config.drive_tbw,
        )

    def _new_planner(self, config: OffloadConfig) -> Planner:
        return Planner(config, self._rates, self._unallocated_gradients, self._transit_bytes)

    def _unallocated_gradients(self) -> int:
        """Bytes of gradients of the attached model that the backward pass will allocate."""
        return 0 if self.model is None else self.model.unallocated_gradients()

    def _transit_bytes(self) -> int:
        """Bytes of memory that transfers take now of their budgets, ``dram_bytes`` included."""
        return 0 if (swapper := self._swapper) is None else swapper.transit_bytes()

    def count(self, seconds: float, counts: Mapping[str, int] = NOTHING, kept: Mapping[str, int] = NOTHING) -> None:
        """Add what one call of a hook has done.

        Args:
            seconds: time in the hook.
            counts: events, and bytes.
            kept: bytes that stay in memory, by the reason.
        """
        with self._lock:
            self._counters.seconds["hook"] += seconds
            for name, count in counts.items():
                self._counters.counts[name] += count
            for reason, nbytes in kept.items():
                self._counters.kept[reason] += nbytes

    def note_recomputed(self, name: str, started: float) -> None:
        """Count that a block was computed again.

        Args:
            name: of the block.
            started: ``time.perf_counter()`` when that began; it ends now.
        """
        with self._lock:
            self._counters.counts["recomputed"] += 1
            self._counters.seconds["recompute"] += time.perf_counter() - started
        if self.trace is not None:
            self.trace.complete("recompute", started, block=name)

    def begin_unexamined(self, device: torch.device) -> UnexaminedPass | None:
        """See :meth:`fastensor.offload.planner.Planner.begin_unexamined`."""
        with self.guarded(self._swapper):
            return self.planner.begin_unexamined(device)

    def end_unexamined(self, ended: UnexaminedPass) -> None:
        """Count what a pass has saved that was not examined."""
        swapper = self._swapper
        with self.guarded(swapper):
            self.planner.end_unexamined(ended)
            self.note_memory(swapper)
        self.count(ended.seconds, {"packed": ended.count}, {"unexamined": ended.nbytes})

    def note_memory(self, swapper: Swapper | None) -> None:
        """Note how many bytes of saved tensors graphs hold, and how many of them are in memory, if more than ever."""
        kept = self.planner.kept_bytes()
        saved, in_memory = (0, 0) if swapper is None else swapper.saved_bytes()
        for name, nbytes in (("peak_saved_bytes", kept + saved), ("peak_memory_bytes", kept + in_memory)):
            if nbytes > self._counters.counts[name]:
                with self._lock:
                    self._counters.note_peak(name, nbytes)

    def note_use(self, nbytes: int, device: torch.device) -> None:
        """Note that a tensor is saved, whether it stays or leaves, or is needed. Now and then, look how much memory is
        free: fewer tensors stay from then on if it is short."""
        swapper = self._swapper
        if swapper is None or device.type != "cpu" or not swapper.note_use(nbytes):
            return
        with self.guarded(swapper):
            swapper.look_at_memory(self.planner.room_for_holes())
            self.planner.look_again()

    def settle(self) -> None:
        """Wait until nothing is being written or read."""
        if (swapper := self._swapper) is not None:
            swapper.settle()

    def memory_usage(self) -> dict[str, int]:
        """Bytes in each place now; empty if nothing has been offloaded."""
        return {} if (swapper := self._swapper) is None else swapper.memory_usage()

    def statistics(self) -> OffloadStatistics:
        """Counts of what the offload has done so far."""
        usage = self.memory_usage()
        counters = self._counters
        counts, seconds = Counter(counters.counts), dict(counters.seconds)  # copied at once
        encoded, encoded_to = Counter(counters.encoded), Counter(counters.encoded_to)
        return OffloadStatistics(
            kept={why: nbytes for why, nbytes in Counter(counters.kept).items() if nbytes},
            wait_to_write_seconds=seconds.get("wait_to_write", 0.0),
            wait_to_read_seconds=seconds.get("wait_to_read", 0.0),
            hook_seconds=seconds.get("hook", 0.0),
            recompute_seconds=seconds.get("recompute", 0.0),
            reserved_ssd_bytes=usage.get("reserved_on_ssd", 0),
            written_by=dict(counters.written_by),
            encoded={name: EncodedBytes(nbytes, encoded_to[name]) for name, nbytes in encoded.items()},
            drive_days=drive_days(
                counts["written_bytes"], time.monotonic() - self._begun, self.config.drive_tbw
            ),
            **{name: counts[name] for name in (
                "steps", "packed", "shared_bytes", "peak_saved_bytes", "peak_memory_bytes", "offloaded",
                "offloaded_bytes", "written_bytes", "read_bytes", "taken_back_bytes",
                "failed_writes", "prefetch_hits", "prefetch_late", "misses", "peak_pending_bytes",
                "peak_loaded_bytes", "peak_dram_bytes", "peak_ssd_bytes", "recomputed",
            )},
        )  # fmt: skip

    def close(self) -> None:
        """Close the swapper, and write the trace. What is saved from now on stays in memory. Calling it again does
        nothing.

        Raises:
            OffloadError: the trace cannot be written.
        """
        with self._lock:
            self.closed = True
            swapper = self._swapper
        if swapper is not None:
            swapper.close()
        if self.trace is not None:
            self.trace.write()

    def begin_in_child(self) -> None:
        """Begin anew in a forked child: threads, locks and slots are the parent's."""
        if self._swapper is not None:
            self._swapper.forget()
        self.trace = None
        self.begin()


def rates_of(latest: Mapping[str, float], config: OffloadConfig, before: TransferRates | None) -> TransferRates:
    """Rates of transfers.

    Args:
        latest: what some transfers have taken (:meth:`Counters.transfers`). Some bytes were written.
        config: how many bytes may be on the way.
        before: the rates of earlier transfers.
    """
    write_bandwidth = latest["written_bytes"] / latest["write_seconds"]
    read_bandwidth = write_bandwidth if before is None else before.read_bandwidth
    if latest["read_bytes"] and latest["read_seconds"]:
        read_bandwidth = latest["read_bytes"] / latest["read_seconds"]
    slowdown = latest["cpu_seconds"] * _share_of_processors()
    # Some of what has left stays in host memory.
    slowed_nbytes = max(latest["written_bytes"] + latest["read_bytes"], latest["offloaded_bytes"])
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # no types
        # What has left memory is touched first again, by all threads that compute. Other pages are not the offload's.
        faults = min(latest["page_faults"], latest["offloaded_bytes"] // PAGE_NBYTES)
        slowdown += faults * page_fault_seconds() / torch.get_num_threads()
    return TransferRates(
        write_bandwidth,
        read_bandwidth,
        config.staging_nbytes,
        config.prefetch_nbytes,
        max(latest["hook_seconds"], 0.0) / max(latest["offloaded"], 1),
        slowdown / slowed_nbytes,
    )


def _share_of_processors() -> float:
    """The part of the processors that computing uses. Transfers delay it by that part of their time: the threads of an
    operation wait for the slowest of them. With a GPU, one thread launches what it computes."""
    threads = 1 if torch.cuda.is_initialized() else torch.get_num_threads()  # type: ignore[no-untyped-call]  # no types
    return min(threads / len(os.sched_getaffinity(0)), 1.0)
