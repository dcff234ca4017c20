"""Counts of an offload, the plan of a step, and the wear of a drive: what users get to see."""

from __future__ import annotations

import math
import resource
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import record_repr
from fastensor.files.words import counted, human_seconds, human_size
from fastensor.offload.config import OffloadConfig
from fastensor.offload.planner import UNKNOWN_BANDWIDTH, PlannedForm
from fastensor.offload.recomputing import block_nbytes, plan_with_blocks, scaled, ways
from fastensor.offload.scheduler import Prediction

_TERABYTE = 10**12
_SECONDS_PER_DAY = 86_400
_MOST_ROWS = 20
"""Rows of a table of tensors."""
_WRITE_AMPLIFICATION = 1.0
"""Bytes that a drive writes for each byte that it is given. Writes are sequential and large, for which the FlashNeuron
paper (section 3.4) takes nearly one."""


_WHY_KEPT = {
    "parameter": "parameters",
    "buffer": "buffers of the model",
    "module": "in modules that include and exclude leave out",
    "backward": "saved by the backward pass",
    "externally referenced": "held by others as well",
    "not moved": "there because the disk is full, or fails",
    "fits": "there because they fit",
    "unexamined": "of passes that fit, and were not looked at tensor by tensor",
    "subclass": "of subclasses of Tensor",
    "layout": "no plain dense tensors",
    "device": "inference tensors, or on other devices than CPUs and GPUs",
}
"""In words why bytes stay in memory, after "are"."""


class BusyClock:
    """Clock of the time in which at least one thread was busy. Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._since = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time until now in which at least one thread was doing it."""
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._running else 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._seconds += time.perf_counter() - self._since


@dataclass(frozen=True, slots=True)
class Counters:
    """All that an offload counts. Each name is counted with one lock held: that of the hooks, or of the swapper. The
    clocks have locks of their own."""

    counts: Counter[str] = field(default_factory=Counter)
    """Events and bytes, with the names of :class:`OffloadStatistics`."""
    kept: Counter[str] = field(default_factory=Counter)
    """Bytes that stay in memory, by the reason."""
    written_by: Counter[str] = field(default_factory=Counter)
    """Bytes written, by backend."""
    encoded: Counter[str] = field(default_factory=Counter)
    """Bytes of memory that were encoded, by codec."""
    encoded_to: Counter[str] = field(default_factory=Counter)
    """Bytes that were written for them."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time of training threads in hooks (``hook``), of which they have waited; and ``cpu``: what transfers have taken
    of the processors."""
    writes: BusyClock = field(default_factory=BusyClock)
    """Threads that write to SSDs."""
    reads: BusyClock = field(default_factory=BusyClock)
    """Threads that read from SSDs."""

    def note_peak(self, name: str, nbytes: int) -> None:
        if nbytes > self.counts[name]:
            self.counts[name] = nbytes

    def transfers(self) -> Mapping[str, float]:
        """Totals of transfers so far: ``written_bytes`` and ``read_bytes``; ``write_seconds`` and
        ``read_seconds``, in which at least one was under way; ``cpu_seconds`` of the threads that move bytes;
        ``hook_seconds`` of training threads, without waiting; ``offloaded`` ranges and ``offloaded_bytes``; and
        ``page_faults``, the pages that the process has touched first, whatever for."""
        moved = ("written_bytes", "read_bytes", "offloaded", "offloaded_bytes")
        return {name: self.counts[name] for name in moved} | {
            "write_seconds": self.writes.seconds,
            "read_seconds": self.reads.seconds,
            "cpu_seconds": self.seconds["cpu"],
            "hook_seconds": self.seconds["hook"] - self.seconds["wait_to_write"] - self.seconds["wait_to_read"],
            "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        }


@dataclass(frozen=True, slots=True)
class EncodedBytes:
    """Counts of a codec."""

    nbytes: int
    """Bytes of memory that were encoded."""
    encoded_nbytes: int
    """Bytes that were written for them."""

    def __str__(self) -> str:
        return f"{human_size(self.nbytes)}, {self.ratio:.2f} to 1"

    @property
    def ratio(self) -> float:
        """Ratio by which the bytes have become smaller.

        >>> EncodedBytes(300, 100).ratio
        3.0
        """
        return self.nbytes / self.encoded_nbytes


@checks_keywords
@dataclass(frozen=True, slots=True)
class OffloadStatistics:
    """Counts of an :class:`ActivationOffload`. Sizes are in bytes, times in seconds."""

    steps: int
    """``step()`` blocks that were entered."""
    packed: int
    """Tensors that autograd has saved in these blocks."""
    offloaded: int
    """Ranges of memory that were taken over, each for one or several saved tensors."""
    offloaded_bytes: int
    """Bytes of these ranges."""
    shared_bytes: int
    """Bytes of saved tensors whose memory had been offloaded already for another saved tensor."""
    written_bytes: int
    """Bytes written to SSDs: encoded bytes, where a codec was used."""
    read_bytes: int
    """Bytes read from SSDs, before they were decoded."""
    taken_back_bytes: int
    """Bytes that were needed before their write had begun, so that they were not written."""
    kept: Mapping[str, int]
    """Bytes that were left in memory, by the reason: ``fits`` (there is room for them, by the schedule), ``parameter``,
    ``small``, ``unexamined`` (in passes like earlier ones, or in a first one with ample memory),
    ``externally referenced``, ``not moved`` (the disk is full, or fails), and others."""
    failed_writes: int
    """Ranges that stay in memory because there was no space, or the disk has failed."""
    prefetch_hits: int
    """Ranges that had been read ahead when they were needed first."""
    prefetch_late: int
    """Ranges that were being read when they were needed first."""
    misses: int
    """Ranges whose read had not begun when they were needed first."""
    wait_to_write_seconds: float
    """Time that forward passes have waited for the SSD."""
    wait_to_read_seconds: float
    """Time that backward passes have waited for the SSD."""
    hook_seconds: float
    """Time that training threads have spent in the hooks, waiting included."""
    recomputed: int
    """Blocks of the model that backward passes have computed again."""
    recompute_seconds: float
    """Time that this has taken, of the threads of backward passes."""
    peak_saved_bytes: int
    """The most bytes of saved tensors that graphs held at a time, wherever they were: what would have been in memory
    without offloading. Counts what could be offloaded: tensors of at least ``min_bytes``, no parameters. A pass that
    was not examined counts with all that it has saved, parameters included."""
    peak_memory_bytes: int
    """The most bytes of these that were in memory at a time, on the device that they were saved on."""
    peak_pending_bytes: int
    """The most bytes that were saved and not on an SSD yet, at any time."""
    peak_loaded_bytes: int
    """The most bytes that were read, or being read, and not evicted yet, at any time."""
    peak_dram_bytes: int
    """The most bytes that stayed in host memory within ``dram_bytes``, at any time."""
    peak_ssd_bytes: int
    """The most bytes that were in use of the SSDs, at any time."""
    reserved_ssd_bytes: int
    """Bytes that the files take on the SSDs now."""
    written_by: Mapping[str, int]
    """Bytes written, by backend."""
    encoded: Mapping[str, EncodedBytes]
    """Bytes that codecs have made smaller, by codec: ``csr``, ``fp16``, ``fp16+csr``, …"""
    drive_days: float
    """Days that the drives last at this pace; infinity if nothing is written, or ``drive_tbw`` is None."""

    @property
    def stall_seconds(self) -> float:
        """Time that training threads have waited for SSDs."""
        return self.wait_to_write_seconds + self.wait_to_read_seconds

    @property
    def everything_fits(self) -> bool:
        """True if nothing was offloaded because nothing had to be: the schedule has room for all that was saved. Of
        passes that were not examined this is known only as long as no pass was."""
        fits = self.kept.get("fits", 0) > 0 or self.kept.keys() == {"unexamined"}
        return fits and not (self.offloaded or self.recomputed)

    def summary(self) -> str:
        """Gains and costs of the offload, in a line."""
        gained = f"activations took at most {human_size(self.peak_memory_bytes)} of memory in place of "
        gained += human_size(self.peak_saved_bytes)
        cost = human_seconds(self.hook_seconds / max(self.steps, 1))
        lasts = f"; at this pace the drives last {self.drive_days:.0f} days" if math.isfinite(self.drive_days) else ""
        again = ""
        if self.recomputed:
            a_step = human_seconds(self.recompute_seconds / max(self.steps, 1))
            again = f"; {counted(self.recomputed, 'blocks')} computed again, at {a_step} a step"
        return f"{gained}, at {cost} a step; {human_size(self.written_bytes)} written{again}{lasts}"

    def metrics_since(self, before: OffloadStatistics) -> dict[str, float]:
        """Counts since an earlier moment, for loggers and trackers: ``written_bytes``, ``read_bytes``,
        ``stall_seconds`` and ``prefetch_hit_rate``, from 0 to 1.

        Args:
            before: the statistics of the same offload at the earlier moment.
        """
        hits = self.prefetch_hits - before.prefetch_hits
        wanted = hits + self.prefetch_late - before.prefetch_late + self.misses - before.misses
        return {
            "written_bytes": float(self.written_bytes - before.written_bytes),
            "read_bytes": float(self.read_bytes - before.read_bytes),
            "stall_seconds": self.stall_seconds - before.stall_seconds,
            "prefetch_hit_rate": hits / wanted if wanted else 1.0,
        }

    def in_words(self, config: OffloadConfig) -> str:
        """Explanation of what has happened, in a sentence or two.

        Args:
            config: that of the offload.
        """
        if self.offloaded or self.recomputed:
            return self.summary() + self._why_little(config)
        if self.everything_fits:
            fits = f"at most {human_size(self.peak_saved_bytes)} of saved tensors at a time, which fit into memory"
            more = (
                "schedule='all' offloads them all" if config.memory_bytes is None else "less memory_bytes offloads some"
            )
            return f"nothing has left memory: {fits}; {more}"
        if not self.packed:
            return "nothing has left memory: autograd has saved nothing in training steps. Do they run under no_grad?"
        reasons = _WHY_KEPT | {"small": f"smaller than min_bytes ({human_size(config.min_bytes)})"}
        kept = ", ".join(f"{human_size(nbytes)} are {reasons.get(why, why)}" for why, nbytes in self.kept.items())
        return f"nothing has left memory of {self.packed} saved tensors: {kept}"

    def _why_little(self, config: OffloadConfig) -> str:
        """Advice if as much memory as the activations take is lent to transfers."""
        lent, smaller = config.staging_nbytes + config.prefetch_nbytes, self.peak_saved_bytes // 8 >> 20
        frees_little = self.peak_memory_bytes > 0.9 * self.peak_saved_bytes
        if config.keeps_some or not smaller or not frees_little or lent < self.peak_saved_bytes:
            return ""
        return (
            f". Up to {human_size(lent)} of them may be on their way, which is all: "
            f"staging_bytes='{smaller}MiB' and prefetch_bytes='{smaller}MiB' free more"
        )

    def __str__(self) -> str:
        moved = f"{human_size(self.offloaded_bytes)} offloaded ({human_size(self.written_bytes)} written, "
        moved += f"{human_size(self.read_bytes)} read)"
        wanted = self.prefetch_hits + self.prefetch_late + self.misses
        lines = [
            f"{counted(self.steps, 'steps')}: {moved}, {human_size(self.shared_bytes)} shared",
            self.summary(),
            f"stalled {self.stall_seconds:.2f} s, in hooks {self.hook_seconds:.2f} s; "
            f"{self.prefetch_hits} of {wanted} were there in time",
            f"at most {human_size(self.peak_pending_bytes)} on the way out, "
            f"{human_size(self.peak_loaded_bytes)} on the way in, {human_size(self.peak_ssd_bytes)} on SSDs",
            "kept: " + (", ".join(f"{why} {human_size(count)}" for why, count in self.kept.items()) or "nothing"),
        ]
        if self.encoded:
            made = (f"{name} {one}" for name, one in self.encoded.items())
            lines.append("made smaller: " + "; ".join(made))
        return "\n".join(lines)


def drive_days(written_bytes: int, seconds: float, terabytes: float | None) -> float:
    """The days that drives last if they may be given ``terabytes``.

    >>> round(drive_days(3 * 10**9, 1.0, 1400.0), 1)
    5.4
    >>> drive_days(0, 1.0, 1400.0)
    inf
    """
    if terabytes is None or not written_bytes or seconds <= 0:
        return math.inf
    return terabytes * _TERABYTE / (written_bytes / seconds * _WRITE_AMPLIFICATION) / _SECONDS_PER_DAY


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor that a forward pass saves, and where it is until it is needed."""

    number: int
    """In the order in which tensors are saved, from 0."""
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    made_by: str
    """The name of the autograd node that has made the tensor; empty for inputs of the step."""
    saved_at: float
    """Seconds since the forward pass began."""
    idle_seconds: float
    """Seconds from the time when the tensor is saved until it is needed; infinity if it never is."""
    leaves: bool
    """True if the tensor leaves memory."""
    is_recomputed: bool = False
    """True if the tensor neither stays nor leaves, but is computed again."""

    def __str__(self) -> str:
        dtype, made_by = str(self.dtype).removeprefix("torch."), self.made_by or "input"
        where = "leaves" if self.leaves else "is computed again" if self.is_recomputed else "stays"
        return f"{self.number}: {dtype} {self.shape} of {made_by}, {human_size(self.nbytes)}, {where}"


@dataclass(frozen=True, slots=True)
class PlannedBlock:
    """A block of the model that could be computed again."""

    name: str
    nbytes: int
    """Bytes that the block saves."""
    inputs_nbytes: int
    """Bytes that it saves in their place if it is computed again."""
    seconds: float
    """Time of its forward pass."""
    is_recomputed: bool
    inputs_leave: bool
    """True if it is computed again, and its inputs leave memory meanwhile."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The plan for forward passes of the latest kind. ``print`` shows it as a table."""

    tensors: tuple[PlannedTensor, ...]
    limit_bytes: int
    """The most bytes that may stay."""
    transfer_bytes: int
    """The most bytes that transfers may take besides."""
    forward_seconds: float
    backward_seconds: float
    """Measured seconds of the step without offloading: without the time in hooks."""
    prediction: Prediction
    blocks: tuple[PlannedBlock, ...] = ()
    """The blocks that could be computed again (:attr:`OffloadConfig.recompute`)."""
    ways: Mapping[str, Prediction] = field(default_factory=dict)
    """Predictions of steps that would keep, move or recompute all, whatever may stay."""
    twice: Prediction | None = None
    """Prediction of a step with twice the batch, planned with the same limit; None if that is not known."""

    __repr__ = record_repr

    @property
    def kept_bytes(self) -> int:
        """Bytes that stay in memory."""
        inputs = sum(one.inputs_nbytes for one in self.blocks if one.is_recomputed and not one.inputs_leave)
        return inputs + sum(one.nbytes for one in self.tensors if not (one.leaves or one.is_recomputed))

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that leave memory."""
        inputs = sum(one.inputs_nbytes for one in self.blocks if one.inputs_leave)
        return inputs + sum(one.nbytes for one in self.tensors if one.leaves)

    @property
    def recomputed_bytes(self) -> int:
        """Bytes that are computed again."""
        return sum(one.nbytes for one in self.tensors if one.is_recomputed)

    @property
    def slowdown(self) -> float:
        """The predicted time of a step, relative to a step without offloading."""
        alone = self.forward_seconds + self.backward_seconds
        return self.prediction.step_seconds / alone if alone else 1.0

    def __str__(self) -> str:
        leaving = [one for one in self.tensors if one.leaves]
        lines = [
            f"{len(self.tensors)} tensors of {human_size(sum(one.nbytes for one in self.tensors))} are saved in a "
            f"forward pass of {human_seconds(self.forward_seconds)}, and needed in a backward pass of "
            f"{human_seconds(self.backward_seconds)}",
            self._what_stays(),
        ]
        if leaving:
            lines += [
                f"{human_size(self.offloaded_bytes)} leave memory, which is predicted to make a step "
                f"{100 * (self.slowdown - 1):.1f} % longer: {human_seconds(self.prediction.wait_to_write_seconds)} "
                f"waiting for writes, {human_seconds(self.prediction.wait_to_read_seconds)} for reads, "
                f"{human_seconds(self.prediction.slowdown_seconds)} for hooks and what transfers take of the CPU",
                *_table(leaving),
            ]
        return "\n".join([*lines, *self._what_is_recomputed(), *self._other_ways()])

    def _what_is_recomputed(self) -> Iterator[str]:
        """What happens to blocks, if there are any."""
        if not self.blocks:
            return
        able, again = [one for one in self.blocks if one.nbytes], [one for one in self.blocks if one.is_recomputed]
        found = f"{len(able) or 'none'} of {counted(len(self.blocks), 'blocks')} ({self.blocks[0].name} to "
        found += f"{self.blocks[-1].name}) can be computed again, and {len(again) or 'none'} of them "
        found += "is" if len(again) == 1 else "are"
        if again:
            leave = sum(one.inputs_leave for one in again)
            found += f", for {human_size(self.recomputed_bytes)}; that takes "
            found += f"{human_seconds(self.prediction.recompute_seconds)}; the inputs of {leave or 'none'} leave memory"
        if len(able) < len(self.blocks):
            found += ". The others save nothing, change their inputs in place, get objects that they may change, or "
            found += "wait for other processes"
        yield found

    def _other_ways(self) -> Iterator[str]:
        """What each way costs, unless all stays, and a larger batch."""
        costs = dict[str, Prediction]()
        if self.offloaded_bytes or self.recomputed_bytes:
            costs |= {**self.ways, "this plan": self.prediction}
        if self.twice is not None:
            costs["twice the batch, planned alike"] = self.twice
        for name, one in costs.items():
            yield f"{name}: {human_seconds(one.step_seconds)} a step, at most {human_size(one.peak_bytes)} in memory"

    def _what_stays(self) -> str:
        kept, limit = human_size(self.kept_bytes), human_size(self.limit_bytes)
        besides = f", beside {human_size(self.transfer_bytes)} for transfers"
        if not (self.offloaded_bytes or self.recomputed_bytes):
            return f"{kept} stay: all fit into the {limit} that may stay"
        if not self.kept_bytes:
            return f"Nothing stays: {limit} may stay{besides}"
        return f"{kept} stay: what fits into the {limit} that may stay{besides}, and would cost the most to move"


@dataclass(frozen=True, slots=True)
class OffloadEstimate:
    """Expected time and memory of training with an offload. ``print`` shows it."""

    plan: PlanReport
    write_bandwidth: float
    """Bytes per second, as measured; 0 if nothing was written, so that the plan is a guess."""
    read_bandwidth: float
    """Bytes per second."""
    drive_days: float
    """Days until the drives have been given ``drive_tbw``; infinity if nothing is written, or ``drive_tbw`` is None."""

    def __str__(self) -> str:
        lines = [str(self.plan)]
        if self.write_bandwidth:
            lines.append(
                f"measured here: {human_size(int(self.write_bandwidth))}/s written, "
                f"{human_size(int(self.read_bandwidth))}/s read"
            )
        elif self.plan.offloaded_bytes:
            lines.append(f"nothing has moved so far: {human_size(int(UNKNOWN_BANDWIDTH))}/s are assumed")
        step = self.plan.prediction.step_seconds
        if step and (moved := self.plan.prediction.moved_bytes):
            a_day = int(moved / step * _SECONDS_PER_DAY)
            worn = "" if math.isinf(self.drive_days) else f": the drives last {self.drive_days:.0f} days"
            lines.append(f"{human_size(a_day)} are written in a day of training{worn}")
        return "\n".join(lines)


def report_of(form: PlannedForm) -> PlanReport:
    """The report of a plan."""
    profile = form.profile
    again = frozenset[int]().union(*(profile.blocks[block].tensors for block in form.plan.recomputed))
    tensors = tuple(
        PlannedTensor(
            number,
            noted.nbytes,
            noted.dtype,
            tuple(noted.shape),
            noted.device,
            noted.made_by,
            measured.saved_at,
            profile.forward_seconds - measured.saved_at + measured.needed_at,
            number in form.plan.out,
            number in again,
        )
        for number, (noted, measured) in enumerate(zip(form.record.tensors, profile.tensors, strict=True))
        if noted.nbytes
    )
    return PlanReport(
        tensors,
        sum(form.limits.values()),
        form.rates.staging_bytes + 2 * form.rates.prefetch_bytes,
        profile.forward_seconds,
        profile.backward_seconds,
        form.plan.prediction,
        tuple(
            PlannedBlock(
                noted.name,
                block_nbytes(profile, number),
                measured.inputs_nbytes,
                measured.seconds,
                number in form.plan.recomputed,
                number in form.plan.recomputed and len(profile.tensors) + number in form.plan.out,
            )
            for number, (noted, measured) in enumerate(zip(form.record.blocks, profile.blocks, strict=False))
        ),
        ways(profile, form.rates),
        _twice(form),
    )


def _twice(form: PlannedForm) -> Prediction | None:
    """Prediction of a step with twice the batch; None if tensors are on several devices."""
    if len(form.limits) != 1:
        return None
    return plan_with_blocks(scaled(form.profile, 2), next(iter(form.limits.values())), form.rates).prediction


def estimate_of(plan: PlanReport, write_bandwidth: float, read_bandwidth: float, tbw: float | None) -> OffloadEstimate:
    """The estimate of a plan, on transfers as fast as those of the dry run."""
    days = drive_days(plan.prediction.moved_bytes, plan.prediction.step_seconds, tbw)
    return OffloadEstimate(plan, write_bandwidth, read_bandwidth, days)


def _table(leaving: Sequence[PlannedTensor]) -> list[str]:
    rows = [("tensor", "made by", "dtype", "shape", "size", "saved after", "unused for")]
    for one in leaving[:_MOST_ROWS]:
        unused = "ever" if math.isinf(one.idle_seconds) else human_seconds(one.idle_seconds)
        rows.append((
            str(one.number), one.made_by or "input", str(one.dtype).removeprefix("torch."),
            " × ".join(map(str, one.shape)), human_size(one.nbytes), human_seconds(one.saved_at), unused,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if len(leaving) > _MOST_ROWS:
        lines.append(f"and {len(leaving) - _MOST_ROWS} more")
    return lines
