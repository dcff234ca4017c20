"""The hooks that autograd calls: ``pack`` for each tensor that it saves, ``unpack`` when it needs the tensor again."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.backends.streams import event_now, used_on_current, wait_for
from fastensor.offload.blocks import BlockForward, inputs_of
from fastensor.offload.codecs import LOSSY, sampled_ratio
from fastensor.offload.copying import page_offset_of
from fastensor.offload.engine import NOTHING, OffloadEngine
from fastensor.offload.forward import ForwardPass
from fastensor.offload.limits import KeptBytes
from fastensor.offload.modules import PersistentStorages
from fastensor.offload.planner import BlockRecord, SavedTensor, UnexaminedPass
from fastensor.offload.saved import SavedBytes
from fastensor.offload.swapper import Swapper
from fastensor.offload.tensors import (
    View,
    bytes_to_move,
    empty,
    is_cast_of_parameter,
    nbytes_of,
    reason_to_keep,
    spanned,
    storage_of,
)
from fastensor.offload.trace import TracedPass, note_now

_MOST_LOOKED_AT = 8
"""Ranges of one memory that may have what is saved now, the latest ones."""
_MOST_INPUTS = 4096
"""Inputs of blocks that a pass notes before it is taken for several passes without backward passes."""
_LEAST_TO_TIDY = 256
"""Ranges that a pass saves before a step looks whether graphs still hold most of them."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class RangeHandle:
    """The graphs' handle of a range of bytes that leaves memory, or stays by plan. When the handle goes, the bytes are
    released, or others have room."""

    forward: ForwardPass
    position: int
    """In that forward pass."""
    span: range
    """The bytes, in the storage that they were saved from."""
    owner: weakref.ref[torch.Tensor]
    """The tensor whose version counter counts for the range."""
    kept: KeptBytes | None
    """The planner's leave to stay; None if the bytes leave."""
    saved: SavedBytes | None = None
    """The bytes, if they leave."""

    def leave(self, saved: SavedBytes) -> None:
        """Have the bytes released when the handle goes. No ``__del__``: weak references are dead when a finalizer runs,
        so no step shares a handle that goes."""
        self.saved = saved
        weakref.finalize(self, self.forward.swapper.release, saved).atexit = False


@dataclass(slots=True, eq=False)
class PackedTensor:
    """The graph's record of a saved tensor, which nothing changes. It is not frozen, because to make a frozen record
    takes a fifth of the time of :meth:`StepHooks.pack` in a pass that is not examined."""

    tensor: torch.Tensor
    """The tensor, if it stays in memory. Or else a tensor without memory, with the version counter of the saved one."""
    version: int
    held: RangeHandle | KeptBytes | None = None
    """The graphs' handle of the tensor's bytes, or of those of a pass that was not examined; None if nobody counts
    them."""
    forward: ForwardPass | None = None
    """The pass that has noted the tensor; None if none has."""
    position: int = 0
    """In the forward pass."""
    view: View | None = None
    """The tensor's place in the bytes that leave; None if it stays."""

    @classmethod
    def kept(
        cls,
        tensor: torch.Tensor,
        held: RangeHandle | KeptBytes | None = None,
        forward: ForwardPass | None = None,
        position: int = 0,
    ) -> PackedTensor:
        """A record with the detached tensor: a graph that held its own output would never be freed."""
        detached = _detached(tensor)
        return cls(detached, 0 if detached.is_inference() else detached._version, held, forward, position)

    @classmethod
    def of(cls, tensor: torch.Tensor, handle: RangeHandle, forward: ForwardPass, position: int) -> PackedTensor:
        """A record of a tensor on a range."""
        if handle.saved is None:
            return cls.kept(tensor, handle, forward, position)
        return cls(_without_memory(tensor), tensor._version, handle, forward, position, View.of(tensor))

    def check_version(self) -> None:
        """Raise RuntimeError if the tensor was modified in place."""
        if not self.tensor.is_inference():
            _check_version(self.tensor, self.version, self.tensor if self.view is None else self.view)

    def bring(self, saved: SavedBytes) -> torch.Tensor:
        """The tensor on a range that has left, in memory again.

        Raises:
            OffloadError: see :meth:`fastensor.offload.swapper.Swapper.bring`.
        """
        assert self.view is not None
        assert isinstance(self.held, RangeHandle)
        assert self.forward is not None
        swapper = self.held.forward.swapper
        upcoming = self.forward.look_ahead(saved, self.position)
        storage, origin = swapper.bring(saved, upcoming)
        tensor = _with_version_counter(self.tensor, self.view.on(storage, origin))
        used_on_current(tensor.conj() if tensor.is_conj() else tensor)  # of the memory, not of a conjugated copy
        if upcoming:
            # Reading ahead wakes reader threads, so it comes last, as writing does in pack.
            self.forward.note_read_ahead(swapper.read_ahead(saved, upcoming))
        return tensor


class StepHooks:
    """The hooks of one ``step()`` block, for one forward pass after the other. One thread packs, any thread unpacks.

    Args:
        engine: the engine of the block's offload.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._persistent = PersistentStorages(None if engine.model is None else engine.model.model)
        self._forward: ForwardPass | None = None
        self._traced: TracedPass | None = None
        self._seconds_in_hooks = 0.0
        self._clock = 0.0
        """Seconds at the latest call of :meth:`pack`, by a clock that stands still in hooks."""
        self._is_over = True
        """True if what is saved next belongs to another forward pass: a backward pass has begun, or none at all."""
        self._unexamined: UnexaminedPass | None = None
        """The forward pass, if not each tensor is looked at."""
        self._is_rest = False
        """True if the first tensors of the forward pass were not examined, and the others are."""
        self._saved_nbytes = 0
        """Bytes of all tensors that the forward pass has saved so far."""
        self._known: dict[tuple[object, ...], dict[range, weakref.ref[RangeHandle]]] = {}
        """Ranges that were saved, and may be saved again while a graph holds them."""
        self._remembered = 0
        """Ranges that were known when the latest record began, and that it has saved since."""
        self._is_in_block = False
        """True in a block of the model, blocks that this one calls included."""
        self._inputs: list[tuple[BlockForward, BlockRecord, Callable[[], torch.Tensor | None], int]] = []
        """For each input of a block of the pass: the block, what has the version counter, and the version."""
        self._given = weakref.WeakValueDictionary[int, torch.Tensor]()
        """Inputs of the blocks of the pass, by ``id``."""
        self._is_lossy = not LOSSY.keys().isdisjoint(engine.config.codecs)

    def pack(self, tensor: torch.Tensor) -> PackedTensor:
        """The record that the graph is to hold in place of a tensor that autograd saves."""
        started = time.perf_counter()
        nbytes = nbytes_of(tensor)
        if self._is_over and torch._C._current_graph_task_id() == -1:
            self._begin_pass(tensor.device)
        if (unexamined := self._unexamined) is not None:
            if unexamined.takes(nbytes, tensor.device):
                whole = PackedTensor.kept(tensor, unexamined.kept)
                self._engine.note_use(nbytes, tensor.device)
                unexamined.count += 1
                unexamined.nbytes += nbytes
                unexamined.seconds += time.perf_counter() - started
                return whole
            self.end_unexamined()
            self._is_rest = True
        self._note_pass("forward")
        self._clock = started - self._seconds_in_hooks
        counts, kept = {"packed": 1}, dict[str, int]()
        try:
            reason, span = self._why_kept(tensor, nbytes)
            if not reason:
                swapper = self._engine.swapper(tensor.device)
                with self._engine.guarded(swapper):
                    record = self._offload(tensor, span, swapper, counts, kept)
                    self._engine.note_memory(swapper)
                    return record
            kept[reason] = len(span)
            return PackedTensor.kept(tensor)
        finally:
            self._saved_nbytes += nbytes
            if self._forward is not None:
                self._forward.record.saved_nbytes = self._saved_nbytes
            self._note_pass("forward")
            self._note_time(started, counts, kept)

    def end_unexamined(self) -> None:
        """Count what a pass has saved that was not examined. What it saves from now on is examined."""
        ended, self._unexamined = self._unexamined, None
        if ended is not None:
            self._seconds_in_hooks += ended.seconds
            self._engine.end_unexamined(ended)

    def _begin_pass(self, device: torch.device) -> None:
        """Begin another forward pass.

        Args:
            device: of its first tensor.
        """
        self.end_unexamined()
        self._is_over = self._is_rest = False
        self._begin_record()
        if (trace := self._engine.trace) is not None:
            self._traced = trace.begin_pass()
        else:
            self._unexamined = self._engine.begin_unexamined(device)

    def _begin_record(self) -> None:
        """Record what is saved next as a pass of its own."""
        self._forward, self._saved_nbytes, self._remembered = None, 0, self._count_known()
        self._note_changed_inputs()
        self._given.clear()

    def run_block(self, block: BlockForward, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """What a block of the model returns. By plan it saves its inputs only, and is computed again."""
        if self._is_in_block or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return block.forward(*args, **options)
        self._is_in_block = True
        try:
            with self._in_block(block, args, options) as saves_inputs:
                if saves_inputs is None:
                    return block.forward(*args, **options)
                if saves_inputs:
                    return block.run_for_inputs(args, options, self._engine.note_recomputed)
                return block.run(args, options)
        finally:
            self._is_in_block = False

    @contextmanager
    def _in_block(
        self, block: BlockForward, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Iterator[bool | None]:
        """A block of the model, which saves its inputs only, or what it saves itself; None if the pass is not
        examined."""
        if self._is_over:
            given, _ = inputs_of(args, options)
            self._begin_pass(given[0].device if given else torch.device("cpu"))
        elif len(self._inputs) >= _MOST_INPUTS:
            self._begin_record()
        inputs, is_pure = inputs_of(args, options) if self._unexamined is None and not self._is_rest else ([], False)
        if not inputs:
            yield None
            return
        started, device = time.perf_counter(), max(inputs, key=nbytes_of).device
        with self._engine.guarded(swapper := self._engine.swapper(device)):
            forward = self._begin_block(block, inputs, swapper, is_pure=is_pure)
        self._note_time(started)
        try:
            _await_measured(forward, device)
            clock = time.perf_counter() - self._seconds_in_hooks
            yield forward.run_block(clock, lambda: is_pure and block.can_be_recomputed)
        finally:
            _await_measured(forward, device)
            forward.end_block(time.perf_counter() - self._seconds_in_hooks)

    def _begin_block(
        self, block: BlockForward, inputs: Sequence[torch.Tensor], swapper: Swapper, *, is_pure: bool
    ) -> ForwardPass:
        """The forward pass in which a block begins."""
        saved = []
        for one in inputs:
            reason, span = self._why_kept(one, nbytes_of(one))
            if not reason:
                saved.append((len(span), one.dtype, one.device, id(one) not in self._given))
            self._given[id(one)] = one
        forward = self._current_forward(swapper)
        record = forward.begin_block(block.name, saved, is_pure=is_pure and block.is_pure)
        if record is forward.record.blocks[0]:
            self._engine.planner.choose_blocks(forward.record)
        counted = (one for one in inputs if not one.is_inference())
        self._inputs += [(block, record, _versioned(one), one._version) for one in counted]
        return forward

    def _note_changed_inputs(self) -> None:
        """Note which blocks cannot be computed again, because inputs were changed since they began. Forget the
        inputs."""
        for block, record, versioned, version in self._inputs:
            if (one := versioned()) is not None and one._version != version:
                block.is_pure = False
            record.is_pure &= block.is_pure
        self._inputs.clear()

    def unpack(self, packed: PackedTensor) -> torch.Tensor:
        """The tensor that autograd needs again."""
        if not self._is_over:
            self._is_over = True
            self._note_changed_inputs()
        self._note_pass("backward")
        held, forward = packed.held, packed.forward
        if forward is None:
            packed.check_version()
            if held is not None:
                self._engine.note_use(nbytes_of(packed.tensor), packed.tensor.device)
            return packed.tensor
        assert isinstance(held, RangeHandle)
        started, saved = time.perf_counter(), held.saved
        forward.note_needed(packed.position, started - self._seconds_in_hooks, saved)
        if saved is None:
            packed.check_version()
            self._engine.note_use(len(held.span), packed.tensor.device)
            self._note_time(started)
            return packed.tensor
        swapper = held.forward.swapper
        swapper.check_process()
        packed.check_version()
        try:
            with self._engine.guarded(swapper):
                tensor = packed.bring(saved)
                self._engine.note_memory(swapper)
                self._engine.note_use(saved.nbytes, tensor.device)
                return tensor
        finally:
            self._note_pass("backward")
            self._note_time(started)

    def _note_time(
        self, started: float, counts: Mapping[str, int] = NOTHING, kept: Mapping[str, int] = NOTHING
    ) -> None:
        seconds = time.perf_counter() - started
        self._seconds_in_hooks += seconds
        self._engine.count(seconds, counts, kept)

    def _note_pass(self, name: Literal["forward", "backward"]) -> None:
        """Note in the trace, if there is one, that the forward pass is here, or its backward pass."""
        if (trace := self._engine.trace) is None:
            return
        trace.sample_memory()
        if self._traced is not None and (name == "backward" or torch._C._current_graph_task_id() == -1):
            note_now(self._traced, name)

    def _why_kept(self, tensor: torch.Tensor, nbytes: int) -> tuple[str, range]:
        """Reason for which a tensor of ``nbytes`` stays in memory, or an empty string; and its bytes, as a range of its
        storage."""
        backward = "backward" if torch._C._current_graph_task_id() != -1 else ""
        if reason := backward or reason_to_keep(tensor):
            return reason, range(nbytes)
        if (storage := storage_of(tensor)) is None:
            return "layout", range(nbytes)
        span = bytes_to_move(spanned(tensor), storage.nbytes())
        if len(span) < self._engine.config.min_bytes and self._known_handle(tensor, span) is None:
            return "small", span
        if storage in self._persistent:
            return "buffer", span
        if is_cast_of_parameter(tensor):
            return "parameter", span
        model = self._engine.model
        return "" if model is None or model.wants else "module", span

    def _offload(
        self, tensor: torch.Tensor, span: range, swapper: Swapper, counts: dict[str, int], kept: dict[str, int]
    ) -> PackedTensor:
        forward = self._current_forward(swapper)
        mark = forward.mark(len(span), tensor.dtype, tensor.device)
        shared = self._known_handle(tensor, span)
        if shared is not None and (shared.saved is None or shared.forward.swapper is swapper):
            if shared.saved is not None:
                swapper.share(shared.saved)
                counts["shared_bytes"] = len(span)
            known = shared.position if shared.forward is forward else None
            return PackedTensor.of(tensor, shared, forward, forward.add_again(known, shared.saved, self._clock))
        if mark in swapper.externally_referenced:
            kept["externally referenced"] = len(span)
            forward.add(None, forward.record.nothing(self._clock))
            return PackedTensor.kept(tensor)
        self._engine.note_use(len(span), tensor.device)
        noted = _noted(tensor, mark, len(span), self._clock, self._ratio(tensor, span, mark, swapper))
        staying = self._engine.planner.keep(mark, len(span), tensor.device)
        handle = RangeHandle(forward, forward.next_position, span, weakref.ref(_owner_of(tensor)), staying)
        if staying is None:
            storage = tensor.untyped_storage()
            handle.leave(
                SavedBytes(
                    nbytes=len(span),
                    origin=span.start,
                    device=tensor.device,
                    original=StorageWeakRef(storage),  # type: ignore[no-untyped-call]  # torch gives it no types
                    source=storage,
                    page_offset=page_offset_of(tensor, span),
                    ready=event_now(tensor.device),
                    dtype=tensor.dtype,
                    mark=mark,
                    position=handle.position,
                )
            )
        record = PackedTensor.of(tensor, handle, forward, handle.position)
        if handle.saved is not None:
            swapper.admit(handle.saved)  # wakes a writer thread: no call follows that lets other threads run first
        else:
            kept["fits"] = len(span)
        forward.add(handle.saved, noted)
        self._remember(tensor, handle)
        return record

    def _ratio(self, tensor: torch.Tensor, span: range, mark: int, swapper: Swapper) -> float:
        """Ratio by which codecs make a tensor smaller, as it was written last; or by a sample, before it is written."""
        codecs = self._engine.config.codecs
        if not codecs:
            return 1.0
        if (known := swapper.ratio_of(mark)) is not None:
            return known
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        memory = memory.set_(tensor.untyped_storage(), span.start, (len(span),), (1,))
        try:
            ratio = sampled_ratio([memory], tensor.dtype, set(codecs))
        except torch.OutOfMemoryError:  # a full GPU has no memory for the sample, but may have enough for the step
            ratio = 1.0
        swapper.note_ratio(mark, ratio)
        return ratio

    def _current_forward(self, swapper: Swapper) -> ForwardPass:
        """The forward pass that saves something now: a new one after a backward pass, or with a new swapper."""
        if self._forward is None or self._forward.swapper is not swapper:
            self._forward = self._engine.begin_forward(swapper, is_rest=self._is_rest)
        return self._forward

    def _key(self, tensor: torch.Tensor) -> tuple[object, ...]:
        """What ranges of a tensor's memory are known by, beside their bytes. Numbers of float32 that a codec rounds are
        no bits of another dtype any more."""
        kind = tensor.dtype if self._is_lossy else None
        return tensor.untyped_storage()._cdata, tensor._version, id(_owner_of(tensor)), kind

    def _known_handle(self, tensor: torch.Tensor, span: range) -> RangeHandle | None:
        """The handle of a known range that has all bytes of ``span``, as far as it is among the latest ones of its
        memory; None if there is none."""
        known = self._known.get(self._key(tensor))
        if known is None:
            return None
        owner = _owner_of(tensor)
        for one in (span, *islice(reversed(known), _MOST_LOOKED_AT)):
            covers = one.start <= span.start and span.stop <= one.stop and one in known
            if covers and (handle := known[one]()) is not None and handle.owner() is owner:
                return handle
        return None

    def _remember(self, tensor: torch.Tensor, handle: RangeHandle) -> None:
        """Note a range that may be saved again. Forget the forward pass if most ranges that are known since it began
        are gone: it was dropped, and another one has begun."""
        self._known.setdefault(self._key(tensor), {})[handle.span] = weakref.ref(handle)
        self._remembered += 1
        if self._remembered % _LEAST_TO_TIDY == 0 and self._count_known() < self._remembered / 2:
            self._begin_record()

    def _count_known(self) -> int:
        """Number of known ranges. Those that are gone are forgotten."""
        alive = {
            key: {span: one for span, one in known.items() if one() is not None} for key, known in self._known.items()
        }
        self._known = {key: known for key, known in alive.items() if known}
        return sum(map(len, self._known.values()))


def _await_measured(forward: ForwardPass, device: torch.device) -> None:
    """Wait for the device of a block that is measured: the host's clock is to show the time of its computing."""
    if forward.record.is_measured and (event := event_now(device)) is not None:
        wait_for([event])


def _noted(tensor: torch.Tensor, mark: int, nbytes: int, clock: float, ratio: float) -> SavedTensor:
    made_by = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
    return SavedTensor(mark, nbytes, tensor.device, tensor.dtype, tensor.shape, made_by, clock, ratio)


def _owner_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose version counter counts for a tensor's memory."""
    return tensor if tensor._base is None else tensor._base


def untraced(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The hook, which ``torch.compile`` does not try to compile where a compiled region calls it. If ``torch._dynamo``
    is not imported, nothing is compiled, and importing it takes long."""
    if "torch._dynamo" not in sys.modules:
        return hook
    disabled: Callable[[Any], Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]  # torch gives none
    return disabled


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, with its memory and its version counter."""
    try:
        return tensor.detach()
    except Exception:  # a subclass may refuse all functions of torch, as parameters of lazy modules do
        if type(tensor) is torch.Tensor:
            raise
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.detach()


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, whose version counter is that of ``tensor``: in-place changes of it and its views
    count."""
    found = tensor.detach()
    found.data = empty(tensor.dtype, tensor.device)
    return found


def _versioned(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Gives what has the version counter of ``tensor`` and no memory; or else ``tensor``, as long as it is alive."""
    if reason_to_keep(tensor) in ("subclass", "layout") or storage_of(tensor) is None:
        return weakref.ref(tensor)
    versioned = _without_memory(tensor)
    return lambda: versioned


def _with_version_counter(versioned: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with the version counter of ``versioned``, so that autograd finds later in-place changes, too."""
    found = versioned.detach()
    found.data = tensor
    return found


def _check_version(versioned: torch.Tensor, version: int, shown: torch.Tensor | View) -> None:
    """Raise RuntimeError, with the words of eager autograd, if the saved tensor was modified in place."""
    if versioned._version == version:
        return
    nested = isinstance(shown, torch.Tensor) and shown.is_nested  # whose shape may not be available
    found = f"{shown.dtype} {'nested' if nested else list(shown.shape)}"
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{found}] is at version {versioned._version}; expected version {version} instead. "
        f"Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        f"torch.autograd.set_detect_anomaly(True)."
    )
