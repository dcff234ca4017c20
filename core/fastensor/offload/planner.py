"""Choosing the saved tensors of the next forward pass that stay in memory, by plans of earlier passes and free memory.

The planner looks at each forward pass when the next one begins, and has :mod:`fastensor.offload.scheduler` plan it. A
tensor is known again by its mark, which says what the pass has saved so far. A tensor that no plan knows, as in the
first pass or in a graph that changes, stays while there is room.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch

from fastensor.offload.config import SHARES_OF_TRANSFERS, OffloadConfig
from fastensor.offload.host_memory import is_address_space_limited
from fastensor.offload.limits import OPERATION_TENSORS, KeptBytes, MemoryLimits
from fastensor.offload.recomputing import plan_with_blocks, without_blocks
from fastensor.offload.scheduler import (
    OffloadPlan,
    ProfiledBlock,
    ProfiledTensor,
    StepProfile,
    TransferRates,
    badness,
    plan,
    predict,
    undisturbed,
)

_HOST = torch.device("cpu")
_PLANNED_AT = (1, 2, 4)
"""The passes of a form after which it is planned: the first ones are slower than those that follow."""
_MEASURED = 2
"""Passes of a form in which nothing is computed again, before blocks are: the second one is measured well."""
_MOST_FORMS = 16
"""Forms of forward passes that are planned: the latest."""
UNKNOWN_BANDWIDTH = 1e9
"""Bytes per second of transfers, until there were any."""
_WORTH_PLANNING_AGAIN = 1.25
"""Ratio of a limit to that of a plan from which on there is a new plan."""
_EXAMINED_EVERY = 16
"""One pass in so many is examined, though everything has fitted so far."""
_REST = 1
"""First mark in the rest of a pass whose first tensors were not examined."""
_MORE_THAN_BEFORE = 1.05
"""Ratio of the bytes that a pass may save, before the rest is examined, to those of examined passes."""
_LEAST_ELSEWHERE = 4096
"""The least bytes of a tensor on another device from which on a pass is examined: numbers that operations get are often
on the host."""
_AMPLE = 2
"""Memory is ample for a pass if the limit is so many times what the pass saves."""
_MOST_PASSES = 8
"""Forward passes whose backward pass may still come, before the oldest is not looked at any more."""


@dataclass(slots=True)
class SavedTensor:
    """Record of a tensor that a forward pass has saved. Times are those of :class:`PassRecord`."""

    mark: int
    nbytes: int
    device: torch.device
    dtype: torch.dtype
    shape: torch.Size
    made_by: str
    """The name of the autograd node that has made the tensor; empty for inputs."""
    saved_at: float
    ratio: float = 1.0
    """Ratio by which codecs make it smaller."""
    needed_at: float | None = None
    last_needed_at: float | None = None
    holders: int = 1
    """Operations that have saved it, and have not needed it yet."""
    block: int | None = None
    """The block that has saved it; None for what is saved outside of blocks."""


@dataclass(slots=True)
class BlockRecord:
    """Record of a block of the model in a forward pass. Times are those of :class:`PassRecord`."""

    name: str
    begun_at: float = 0.0
    seconds: float | None = None
    """None until the block has ended."""
    inputs: list[tuple[int, int]] = field(default_factory=list)
    """The mark and bytes of each input that would be saved in place of what the block saves."""
    is_pure: bool = True
    """False if the block gets an object that it may change, or for a reason of
    :attr:`fastensor.offload.blocks.BlockForward.is_pure`."""

    @property
    def inputs_nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.inputs)

    @property
    def can_be_recomputed(self) -> bool:
        return self.is_pure and self.seconds is not None


@dataclass(slots=True)
class PassRecord:
    """The saved tensors of one forward pass, in order. Times are seconds of a clock that stands still in hooks."""

    form: int = 0
    tensors: list[SavedTensor] = field(default_factory=list)
    saved_nbytes: int = 0
    """Bytes of all tensors that autograd has saved, those that are never offloaded included."""
    moved_nbytes: int = 0
    """Bytes that were written, and read again when the backward pass needed them."""
    blocks: list[BlockRecord] = field(default_factory=list)
    """The blocks of the model that have run, in order."""
    opening: int = 0
    """A hash of what was saved before the first block, and of its inputs; 0 if no block has begun."""
    recomputed: frozenset[int] = frozenset()
    """Blocks that save their inputs only."""
    is_measured: bool = False
    """True if the times of its blocks will be planned with."""
    source: int | None = None
    """The form whose plan computes them again; None if nothing is computed again."""

    def nothing(self, clock: float) -> SavedTensor:
        """Stands for a tensor whose bytes are not its own: they were saved before, or others keep them in memory."""
        return SavedTensor(self.form, 0, _HOST, torch.uint8, torch.Size(()), "", clock)

    def profile(self) -> StepProfile | None:
        """The profile of the pass; None if its backward pass has not come."""
        needed = [one.needed_at for one in self.tensors if one.needed_at is not None]
        if not needed:
            return None
        begun, backward = self.tensors[0].saved_at, min(needed)
        return StepProfile(
            tuple(
                ProfiledTensor(
                    one.nbytes,
                    one.saved_at - begun,
                    float("inf") if one.needed_at is None else one.needed_at - backward,
                    one.ratio,
                    float("inf") if one.last_needed_at is None or one.holders > 0 else one.last_needed_at - backward,
                )
                for one in self.tensors
            ),
            max(backward - begun, 0.0),
            max(needed) - backward,
            self._profiled_blocks(begun),
        )

    def _profiled_blocks(self, begun: float) -> tuple[ProfiledBlock, ...]:
        """The blocks that can be computed again. A block that cannot saves nothing, as far as this is known."""
        tensors: list[set[int]] = [set() for _ in self.blocks]
        for index, one in enumerate(self.tensors):
            if one.block is not None and self.blocks[one.block].can_be_recomputed:
                tensors[one.block].add(index)
        return tuple(
            ProfiledBlock(frozenset(saved), one.inputs_nbytes, one.begun_at - begun, one.seconds or 0.0)
            for one, saved in zip(self.blocks, tensors, strict=True)
        )


@dataclass(slots=True)
class UnexaminedPass:
    """Budget of a forward pass whose tensors are not examined, because everything fits: all of it stays."""

    kept: KeptBytes
    """The graphs' handle of all that the pass may save so, until no graph needs any of it. After that many bytes the
    rest is examined, for the pass is not what was expected."""
    largest_nbytes: int
    """The most bytes of one tensor that is not examined."""
    count: int = 0
    """Tensors that it has saved so far."""
    nbytes: int = 0
    """Their bytes."""
    seconds: float = 0.0
    """The time in the hooks."""

    def takes(self, nbytes: int, device: torch.device) -> bool:
        """Whether there is room for a tensor."""
        return (
            nbytes <= self.largest_nbytes
            and self.nbytes + nbytes <= self.kept.nbytes
            and (nbytes < _LEAST_ELSEWHERE or device == self.kept.device)
        )


@dataclass(frozen=True, slots=True)
class PlannedForm:
    """The latest plan for forward passes of one form."""

    record: PassRecord
    profile: StepProfile
    """The times of the record without transfers; without blocks, if none may be computed again."""
    plan: OffloadPlan
    limits: Mapping[torch.device, int]
    """The most bytes that may stay, by device."""
    rates: TransferRates
    """As was planned with."""
    passes: int
    """Number of passes of this form."""
    chose_blocks: bool
    """True if blocks could be chosen to be computed again."""
    peak_nbytes: int
    """The most bytes that are in memory at a time."""
    again_nbytes: int
    """By how many bytes they are more than those that stay when the forward pass ends."""

    def leaving(self) -> set[int]:
        """Marks of the tensors that leave memory."""
        tensors, blocks = self.record.tensors, self.record.blocks
        count = len(tensors)
        saved = {tensors[index].mark for index in self.plan.out if index < count}
        return saved | {mark for index in self.plan.out if index >= count for mark, _ in blocks[index - count].inputs}

    def kept_nbytes(self) -> Counter[torch.device]:
        """The most bytes that stay in the memory of each device at a time."""
        if self.plan.recomputed:  # so there is one device
            (device,) = self.limits
            return Counter({device: self.peak_nbytes})
        kept = Counter[torch.device]()
        for index, one in enumerate(self.record.tensors):
            kept[one.device] += one.nbytes if index not in self.plan.out else 0
        return +kept

    @property
    def keeps_all(self) -> bool:
        """True if nothing moves, and nothing is computed again."""
        return not (self.plan.out or self.plan.recomputed)

    def is_outdated(self, limits: Mapping[torch.device, int]) -> bool:
        """True if the limits have become so different that another plan is needed, or much better."""
        kept = self.kept_nbytes()
        too_little = any(kept[device] > limit for device, limit in limits.items())
        more = any(limit > _WORTH_PLANNING_AGAIN * self.limits.get(device, 0) for device, limit in limits.items())
        return too_little or (more and not self.keeps_all)


class Planner:
    """Decides which tensors stay. Call every method from any thread.

    Args:
        config: the schedule, and the budgets of transfers.
        rates: how fast transfers have been; None before the first one.
        unallocated: bytes of gradients that the backward pass will allocate.
        in_transit: bytes of host memory that transfers take now, of their budgets.
    """

    def __init__(
        self,
        config: OffloadConfig,
        rates: Callable[[], TransferRates | None],
        unallocated: Callable[[], int],
        in_transit: Callable[[], int] = lambda: 0,
    ) -> None:
        self._divisions = tuple(map(config.divided, SHARES_OF_TRANSFERS)) if config.memory_bytes else ()
        """What ``memory_bytes`` may be divided into."""
        self._is_divided = False
        """True if that is decided."""
        self._rates = rates
        self._lock = threading.Lock()
        self.memory = MemoryLimits(config.divided(), unallocated, in_transit)
        """With this lock held: what may stay, and does."""
        self._passes: deque[PassRecord] = deque(maxlen=_MOST_PASSES)
        self._unexamined = 0
        """Passes since one was examined."""
        self._forms: OrderedDict[int, PlannedForm] = OrderedDict()
        self._leaving: set[int] = set()
        """Marks of tensors that leave memory by plan."""
        self._overlap = False
        """True if much of a forward pass has stayed in memory until another one began."""

    def divided_budgets(self) -> tuple[int, int] | None:
        """``staging_bytes`` and ``prefetch_bytes`` of the division of memory that is gone by; None if there is none, or
        earlier passes still keep more than may stay by it."""
        with self._lock:
            config = self.memory.config
            if not self._divisions or self.memory.keeps_too_much():
                return None
            return config.staging_nbytes, config.prefetch_nbytes

    def begin_pass(self, *, is_rest: bool = False) -> PassRecord:
        """Plan the passes that have ended, and begin to record one.

        Args:
            is_rest: whether this is the rest of a pass that was not examined before. It is not planned: what it saves
                stays while there is room.
        """
        record = PassRecord(form=_REST if is_rest else 0)
        self.plan_ended()
        if not is_rest:
            with self._lock:
                self._note_overlap()
                self.memory.begin_pass()
                self._passes.append(record)
        return record

    def begin_unexamined(self, device: torch.device) -> UnexaminedPass | None:
        """Budget of the next pass without a look at each tensor; None if it is to be examined.

        A pass is not examined if the latest one that was is planned for good, and nothing leaves in passes of its form
        or of others that are planned for good, all on one device, and if there is room for the largest of them. Nor is
        the first one, as long as memory is ample.

        Args:
            device: of the first tensor.
        """
        if not self.memory.config.keeps_some:
            return None
        self.plan_ended()
        with self._lock:
            found = None
            if self._unexamined < _EXAMINED_EVERY - 1:
                found = self._known_pass() if self._forms else self._first_pass(device)
            self._unexamined = 0 if found is None else self._unexamined + 1
            if found is not None:
                self.memory.begin_pass()
        return found

    def end_unexamined(self, ended: UnexaminedPass) -> None:
        """Give back what a pass that was not examined has not saved of its budget."""
        with self._lock:
            self.memory.give_back(ended.kept, ended.kept.nbytes - ended.nbytes)

    def choose_blocks(self, record: PassRecord) -> None:
        """Choose the blocks of a pass that save their inputs only. Its first block begins.

        Those that are computed again by all plans for passes that have opened alike, after some that were measured:
        nobody knows yet which of these forms it will be. In a pass that opens in a new way nothing is computed again.
        """
        with self._lock:
            chosen = [form for form in self._alike(record.opening) if form.chose_blocks]
            if chosen:
                record.recomputed = frozenset.intersection(*(form.plan.recomputed for form in chosen))
                record.source = chosen[-1].record.form if record.recomputed else None
            else:  # as long as few ways are known, it is likely to come again
                record.is_measured = len(self._forms) < _MOST_FORMS

    def plan_ended(self) -> None:
        """Plan the passes that have ended."""
        with self._lock:
            self.memory.look_again_in_time()
            for ended in list(self._passes):
                if (profile := ended.profile()) is not None:
                    self._passes.remove(ended)
                    self._note(ended, profile)

    def look_again(self) -> None:
        """Find out how much memory is free when that is needed next."""
        with self._lock:
            self.memory.look_again()

    def room_for_holes(self) -> int:
        """See :meth:`fastensor.offload.limits.MemoryLimits.room_for_holes`."""
        with self._lock:
            return self.memory.room_for_holes()

    def kept_bytes(self) -> int:
        """Bytes that stay in memory by plan, now."""
        if not self.memory.config.keeps_some:
            return 0
        with self._lock:
            return self.memory.kept_bytes()

    def keep(self, mark: int, nbytes: int, device: torch.device) -> KeptBytes | None:
        """The handle of bytes that stay in memory; None if they leave."""
        if not self.memory.config.keeps_some:
            return None
        with self._lock:
            self.memory.note_tensor(device, nbytes)
            return None if mark in self._leaving else self.memory.keep(device, nbytes)

    def planned(self, record: PassRecord) -> PlannedForm:
        """The plan of a pass that has ended, whether or not there is one of its form."""
        profile = record.profile()
        assert profile is not None
        with self._lock:
            return self._new_plan(record, profile, _MEASURED)

    def latest(self) -> PlannedForm | None:
        """Latest plan."""
        with self._lock:
            return next(reversed(self._forms.values()), None)

    # --- inside, with the lock held

    def _first_pass(self, device: torch.device) -> UnexaminedPass | None:
        """Budget of a pass of which nothing is known: so much that with room for operations (:class:`MemoryLimits`) all
        is within the limit. If the latest pass was such a one, the next is examined; and so are all where the stacks of
        threads will take memory, too."""
        if not self._keeps_what_fits or self._unexamined or is_address_space_limited():
            return None
        nbytes = max(self.memory.room(device), 0) // _AMPLE
        kept = self.memory.keep(device, nbytes) if nbytes else None
        return None if kept is None else UnexaminedPass(kept, nbytes // OPERATION_TENSORS)

    def _note_overlap(self) -> None:
        """Plan blocks anew if graphs of several passes turn out to be alive at a time."""
        if not self.memory.config.recompute or self._overlap or not self.memory.keeps_much():
            return
        self._overlap = True
        for form in list(self._forms.values()):
            if (profile := form.record.profile()) is not None:
                self._add(self._new_plan(form.record, profile, form.passes))

    @property
    def _keeps_what_fits(self) -> bool:
        return self.memory.config.schedule == "auto"

    def _known_pass(self) -> UnexaminedPass | None:
        """Budget of a pass that is like earlier ones: what those have saved at most, parameters and all, so that
        whatever it saves has room."""
        forms = [
            form
            for form in self._forms.values()
            if form.passes >= _PLANNED_AT[-1]
            or (  # memory is ample for it: one look is enough
                self._keeps_what_fits
                and all(_AMPLE * form.record.saved_nbytes <= self.memory.limit(device) for device in form.limits)
            )
        ]
        if (
            not forms
            or forms[-1] is not next(reversed(self._forms.values()))
            or not all(form.keeps_all for form in forms)
        ):
            return None
        devices = {device for form in forms for device in form.kept_nbytes()}
        if len(devices) != 1:
            return None
        (device,) = devices
        nbytes = int(_MORE_THAN_BEFORE * max(form.record.saved_nbytes for form in forms))
        kept = self.memory.keep(device, nbytes)
        return None if kept is None else UnexaminedPass(kept, nbytes)

    def _note(self, record: PassRecord, profile: StepProfile) -> None:
        """Plan the form of a pass that has ended, if it is new, or its plan is not good any more. A pass in which
        blocks are computed again is one of the form that was planned so, and is not measured."""
        if record.source is not None:
            source = self._forms.get(record.source)
            if source is None or len(source.record.blocks) != len(record.blocks):
                return
            record, profile = source.record, source.record.profile() or profile
        self.memory.end_pass((one.device, one.nbytes) for one in record.tensors)
        known = self._forms.pop(record.form, None)
        passes = 1 if known is None else known.passes + 1
        is_measured = known is None or record is not known.record
        if known is None or (is_measured and passes in _PLANNED_AT) or known.is_outdated(self._limits_of(record)):
            self._add(self._new_plan(record, profile, passes))
        else:
            self._forms[record.form] = dataclasses.replace(known, passes=passes)

    def _add(self, form: PlannedForm) -> None:
        """Go by a new plan."""
        self._forms[form.record.form] = form
        if len(self._forms) > _MOST_FORMS:
            self._forms.popitem(last=False)
        self._leaving = self._merged()
        self.memory.again_nbytes = max(form.again_nbytes for form in self._forms.values())

    def _alike(self, opening: int) -> list[PlannedForm]:
        """The forms of passes that have opened so, the latest one last."""
        return [form for form in self._forms.values() if form.record.opening == opening]

    def _to_try(self, record: PassRecord, passes: int) -> Sequence[OffloadConfig]:
        """The configurations of which the best one is gone by from now on: with ``memory_bytes`` all divisions, until
        there is a plan by which something leaves. Later passes keep that one, so that what leaves settles."""
        devices = {one.device for one in record.tensors if one.nbytes}
        if self._is_divided or len(devices) != 1 or not self._is_known(record, passes):
            return (self.memory.config,)
        return self._divisions or (self.memory.config,)

    def _is_known(self, record: PassRecord, passes: int) -> bool:
        """True if passes of a form, or others that have opened alike, were measured often enough."""
        alike = self._alike_in_blocks(record)
        return passes + sum(form.passes for form in alike) >= _MEASURED

    def _alike_in_blocks(self, record: PassRecord) -> list[PlannedForm]:
        """The forms of passes that have opened like this one, and have as many blocks."""
        return [form for form in self._alike(record.opening) if len(form.record.blocks) == len(record.blocks)]

    def _blocks_to_try(self, record: PassRecord, passes: int) -> Sequence[frozenset[int]] | None:
        """The sets of blocks that a plan may compute again; None for any. If the latest pass that has opened alike was
        of another form, as with experts that get other rows in each step, its blocks are tried alone."""
        if not self.memory.config.recompute or not self._is_known(record, passes):
            return ()
        chosen = [form for form in self._alike_in_blocks(record) if form.chose_blocks]
        return (chosen[-1].plan.recomputed,) if chosen and passes == 1 else None

    def _merged(self) -> set[int]:
        """Union of the plans. Where passes of several forms begin alike, a tensor leaves if it leaves in one
        of them: nobody knows yet which one it will be, and none may keep more than its limit. A plan that is not good
        any more, and is made anew when such a pass comes again, does not count."""
        good = (form for form in self._forms.values() if not form.is_outdated(self._limits_of(form.record)))
        return set[int]().union(*(form.leaving() for form in good))

    def _new_plan(self, record: PassRecord, profile: StepProfile, passes: int) -> PlannedForm:
        known = self._rates()
        alone = profile if known is None else undisturbed(profile, record.moved_nbytes, known)
        alone = dataclasses.replace(
            alone, blocks=alone.blocks if self.memory.config.recompute else (), is_alone=not self._overlap
        )
        blocks = self._blocks_to_try(record, passes)
        device = record.tensors[0].device if record.tensors else _HOST
        limits, tried = self._limits_of(record), []
        for config in (to_try := self._to_try(record, passes)):
            within = dict.fromkeys(limits, config.schedule) if isinstance(config.schedule, int) else limits
            rates = _rates_within(config.for_device(device), known)
            found = _plan(record, alone, within, rates, blocks)
            tried.append(((_beyond(alone, rates, found), badness(found)), config, within, rates, found))
        _, self.memory.config, limits, rates, found = min(tried, key=itemgetter(0))
        self._is_divided = self._is_divided or (len(to_try) > 1 and bool(found.out or found.recomputed))
        rest, numbers = without_blocks(alone, found.recomputed)
        out = {index for index, number in enumerate(numbers) if number in found.out}
        peak = rest.peak_bytes(out)
        return PlannedForm(record, alone, found, limits, rates, passes, blocks != (), peak, peak - rest.kept_bytes(out))

    def _limits_of(self, record: PassRecord) -> dict[torch.device, int]:
        return {
            device: self._limit_of(record, device) for device in {one.device for one in record.tensors if one.nbytes}
        }

    def _limit_of(self, record: PassRecord, device: torch.device) -> int:
        """The most bytes of a pass's tensors that may stay in the memory of a device."""
        if self.memory.config.schedule == "all":
            return 0
        if isinstance(self.memory.config.schedule, float):
            share = int(self.memory.config.schedule * sum(one.nbytes for one in record.tensors if one.device == device))
            return min(share, self.memory.limit(device))
        return self.memory.limit(device)


def _rates_within(config: OffloadConfig, known: TransferRates | None) -> TransferRates:
    """How fast tensors move within the budgets of a configuration: rates may have been found out within others."""
    found = known or TransferRates(UNKNOWN_BANDWIDTH, UNKNOWN_BANDWIDTH, 0, 0)
    return dataclasses.replace(found, staging_bytes=config.staging_nbytes, prefetch_bytes=config.prefetch_nbytes)


def _beyond(profile: StepProfile, rates: TransferRates, found: OffloadPlan) -> int:
    """The bytes by which the largest tensor that leaves is beyond what may be read ahead."""
    nbytes = [one.nbytes for one in profile.tensors] + [one.inputs_nbytes for one in profile.blocks]
    return max(max((nbytes[index] for index in found.out), default=0) - rates.prefetch_bytes, 0)


def _plan(
    record: PassRecord,
    profile: StepProfile,
    limits: Mapping[torch.device, int],
    rates: TransferRates,
    blocks: Sequence[frozenset[int]] | None,
) -> OffloadPlan:
    """The plan of a pass. Each device has a limit, and the disk is the same. Nothing is computed again if tensors are
    on several devices.

    Args:
        record: the pass.
        profile: its times, without transfers.
        limits: the most bytes that may stay, by device.
        rates: how fast tensors move.
        blocks: sets of blocks that may be computed again; None for any.
    """
    if len(limits) == 1 and blocks != ():
        return plan_with_blocks(profile, next(iter(limits.values())), rates, blocks)
    out: set[int] = set()
    for device, limit in limits.items():
        there = [index for index, one in enumerate(record.tensors) if one.device == device]
        part = dataclasses.replace(profile, tensors=tuple(profile.tensors[index] for index in there))
        out.update(there[index] for index in plan(part, limit, rates).out)
    return OffloadPlan(frozenset(out), predict(profile, out, rates))
