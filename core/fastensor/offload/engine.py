"""``ActivationOffload``: what autograd saves in the forward pass goes to an SSD, and is back when it is needed."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastensor.errors import OffloadError
from fastensor.offload.cell import Cell
from fastensor.offload.config import OffloadConfig
from fastensor.offload.copying import event_now, lead_of
from fastensor.offload.forward import ForwardPass
from fastensor.offload.geometry import View, bytes_to_move, spanned
from fastensor.offload.modules import AttachedModel
from fastensor.offload.mover import Mover, Token
from fastensor.offload.order import Course, Orders
from fastensor.offload.persistent import is_cast_of_parameter, nbytes_of, reason_to_keep
from fastensor.offload.statistics import WRITTEN_BY, OffloadStatistics, drive_days

_FORGET_ALIVE_EVERY = 64
"""Forward passes, after which it is found out anew whose memory others keep alive."""
_LEAST_TO_TIDY = 256
"""Ranges of memory. Before so many have been offloaded, nothing is done to forget those that are gone."""
_LEAST_SECONDS = 60.0
"""So long is watched before anything is said about the lives of drives."""
_logger = logging.getLogger("fastensor")


class ActivationOffload:
    """Moves saved activations to an SSD in the forward pass, and back in the backward pass. Gradients are the same.

    In the ``with`` block of :meth:`step` autograd hands over what it saves for the backward pass
    (``torch.autograd.graph.saved_tensors_hooks``), in this thread. What is large, and not a parameter, a buffer (of an
    attached model), a view or a cast of one, or alive anyway, is written to a nameless file by threads, and its memory
    is free as soon as that is done. The backward pass may run anywhere, any number of times, wholly or in part or not
    at all; what is wanted next is read ahead, in the order of the last step of the same form. When the graph goes, so
    does all that it has offloaded.

    In-place changes of saved tensors are found as without offloading, at the backward pass. Changes that autograd does
    not see (``tensor.data``, other frameworks) are not: of which values gradients are is then left open.

    Every method may be called from several threads; steps may overlap and nest. Pickled it is a new one with the same
    configuration; so it is in a forked child, attached to the child's model. There a graph that the parent has made
    raises, unless nothing of it was offloaded. Files and threads begin with the first tensor that is offloaded.
    ``torch.func`` refuses to work under hooks of this kind.

    Args:
        config: how much goes where.

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
        self._mover: Mover | None = None
        self._orders = Orders()
        self._forward_passes = 0
        self._counts: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._hook_seconds = 0.0
        self._begun = time.monotonic()
        self._worn = False
        self._closed = False
        _engines.add(self)

    # For users. ------------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[None]:
        """Offload what this thread's forward pass saves in the block. There may be any number of them in it, and of
        backward passes: each costs what it would in a block of its own.

        Raises:
            OffloadError: it has been closed; or, with ``when_full="raise"``, an activation could not be written, be it
                of this step or of an earlier one.
        """
        if self._closed:
            raise OffloadError("this ActivationOffload has been closed; make another one")
        if (self.config.include or self.config.exclude) and self._model is None:
            raise OffloadError("include and exclude name modules of a model: call attach(model) before the first step")
        if self._mover is not None:
            self._mover.raise_failure()
        with self._lock:
            self._counts["steps"] += 1
        step = _Step(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(_untraced(step.pack), _untraced(step.unpack)):
                yield
        finally:
            self._check_drives()

    def attach(self, model: torch.nn.Module) -> None:
        """Say which model runs in the steps, so that its buffers are not offloaded, and ``include`` and ``exclude`` of
        the configuration can name its modules. It takes the place of the one before.

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
        """Forget the model, and take the hooks out of it. Calling it again does nothing."""
        model, self._model = self._model, None
        if model is not None:
            model.remove()

    def settle(self) -> None:
        """Wait until all that is to be on the SSD is there, and nothing is being read."""
        if self._mover is not None:
            self._mover.settle()

    def close(self) -> None:
        """Give back files, threads and memory. What graphs that still live have on the SSD is lost: their backward
        passes raise. Calling it again does nothing."""
        self.detach()
        with self._lock:
            self._closed = True
            mover = self._mover
        if mover is not None:
            mover.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return type(self), (self.config,)

    def gauge(self) -> dict[str, int]:
        """How much is where now, in bytes: to watch, and to test, that budgets hold."""
        return {} if self._mover is None else self._mover.gauge()

    def statistics(self) -> OffloadStatistics:
        """What has been done so far."""
        gauge = self.gauge()
        moved, waited = (Counter[str](), dict[str, float]()) if self._mover is None else self._mover.counted()
        with self._lock:
            kept = self._kept + Counter({"not moved": moved["kept_nbytes"]})
        written_by = {
            name.removeprefix(WRITTEN_BY): nbytes for name, nbytes in moved.items() if name.startswith(WRITTEN_BY)
        }
        return OffloadStatistics(
            steps=self._counts["steps"],
            packed=self._counts["packed"],
            shared_nbytes=self._counts["shared_nbytes"],
            kept={why: nbytes for why, nbytes in kept.items() if nbytes},
            waited_to_write=waited.get("waited_to_write", 0.0),
            waited_to_read=waited.get("waited_to_read", 0.0),
            hook_seconds=self._hook_seconds,
            reserved_ssd_nbytes=gauge.get("reserved_on_ssd", 0),
            written_by=written_by,
            drive_days=drive_days(
                moved["written_nbytes"], time.monotonic() - self._begun, self.config.drive_tbw
            ),
            **{name: moved[name] for name in (
                "offloaded", "offloaded_nbytes", "written_nbytes", "read_nbytes", "taken_back_nbytes", "failed_writes",
                "prefetch_hits", "prefetch_late", "misses", "peak_pending_nbytes", "peak_resident_nbytes",
                "peak_resting_nbytes", "peak_ssd_nbytes",
            )},
        )  # fmt: skip

    # For steps. ------------------------------------------------------------------------------------------------------

    def mover(self) -> Mover:
        with self._lock:
            if self._mover is None:
                self._mover = Mover(self.config)
                if self._closed:  # by another thread, or in the middle of the step: everything stays in memory
                    self._mover.close()
            return self._mover

    def begin_forward(self) -> ForwardPass:
        mover = self.mover()
        with self._lock:
            self._forward_passes += 1
            if self._forward_passes % _FORGET_ALIVE_EVERY == 0:
                mover.alive_anyway.clear()
        return ForwardPass(mover, self._begin_course)

    def _begin_course(self, form: int, saved: Sequence[int]) -> Course:
        with self._lock:
            return self._orders.begin(form, saved)

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

    def _check_drives(self) -> None:
        if self.config.drive_tbw is None or self._worn or time.monotonic() - self._begun < _LEAST_SECONDS:
            return
        days = self.statistics().drive_days
        if days < self.config.drive_days:
            self._worn = True
            _logger.warning(
                "at this pace the drives last %.0f days: they are guaranteed for %g TB. Offload less, by a larger "
                "min_bytes, by exclude, or with dram_bytes",
                days,
                self.config.drive_tbw,
            )


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the graph holds of a tensor that stays in memory."""

    tensor: torch.Tensor
    version: int

    def unpack(self) -> torch.Tensor:
        if not self.tensor.is_inference():
            _check_version(self.tensor, self.version, self.tensor)
        return self.tensor


@dataclass(slots=True)
class _Offloaded:
    """What the graph holds of a tensor that does not."""

    token: Token
    forward: ForwardPass
    position: int
    """In the forward pass."""
    view: View
    witness: torch.Tensor
    """Has no memory, but the version counter of the tensor."""
    version: int

    def unpack(self) -> torch.Tensor:
        mover, cell = self.token.mover, self.token.cell
        mover.check_process()
        _check_version(self.witness, self.version, self.view)
        self.forward.look_ahead(cell, self.position)
        storage, origin = mover.bring(cell)
        tensor = _shown(self.witness, self.view.on(storage, origin))
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor


@dataclass(frozen=True, slots=True)
class _Known:
    """A range of memory that was offloaded, and may be saved again while its token lives."""

    token: weakref.ref[Token]
    owner: weakref.ref[torch.Tensor]
    """The tensor whose version counter the version is of."""
    span: range


class _Step:
    """What is saved in one ``step()`` block, by one forward pass after the other. Packs come from one thread, unpacks
    from any."""

    def __init__(self, engine: ActivationOffload) -> None:
        self._engine = engine
        self._persistent = engine.persistent_storages()
        self._forward: ForwardPass | None = None
        self._is_over = False
        """Whether a backward pass has begun: what is saved next is of another forward pass."""
        self._known: dict[tuple[int, int], list[_Known]] = {}
        """By storage and version."""
        self._count = 0
        """How many are known."""
        self._tidy_at = _LEAST_TO_TIDY

    def pack(self, tensor: torch.Tensor) -> _Kept | _Offloaded:
        """Called by autograd for what it saves. What is returned belongs to the graph."""
        started = time.perf_counter()
        counts, kept = Counter(packed=1), Counter[str]()
        try:
            reason, span = self._why_kept(tensor)
            if not reason:
                return self._offload(tensor, span, counts, kept)
            kept[reason] += len(span)
            return _keep(tensor)
        finally:
            self._engine.count(counts, kept, time.perf_counter() - started)

    def unpack(self, packed: _Kept | _Offloaded) -> torch.Tensor:
        """Called by autograd for what it needs again."""
        self._is_over = True
        if isinstance(packed, _Kept):
            return packed.unpack()
        started = time.perf_counter()
        try:
            return packed.unpack()
        finally:
            self._engine.count(Counter(), Counter(), time.perf_counter() - started)

    def _why_kept(self, tensor: torch.Tensor) -> tuple[str, range]:
        """Why it stays in memory, if it does, and the bytes that are concerned: of its storage, if it does not."""
        backward = "backward" if torch._C._current_graph_task_id() != -1 else ""
        if reason := backward or reason_to_keep(tensor):
            return reason, range(nbytes_of(tensor))
        storage = tensor.untyped_storage()
        span = bytes_to_move(spanned(tensor), storage.nbytes())
        if storage._cdata in self._persistent:
            return "buffer", span
        if len(span) < self._engine.config.min_bytes and (storage._cdata, tensor._version) not in self._known:
            return "small", span
        if is_cast_of_parameter(tensor):
            return "parameter", span
        return "" if self._engine.wants_now else "module", span

    def _offload(
        self, tensor: torch.Tensor, span: range, counts: Counter[str], kept: Counter[str]
    ) -> _Kept | _Offloaded:
        storage = tensor.untyped_storage()
        base = tensor if tensor._base is None else tensor._base
        key = storage._cdata, tensor._version
        forward = self._forward_now()
        if (token := self._share(key, base, span, forward.mover)) is not None:
            counts["shared_nbytes"] += len(span)
            return _offloaded(token, forward, forward.add_again(token.cell), tensor)
        if len(span) < self._engine.config.min_bytes:
            kept["small"] += len(span)
            return _keep(tensor)
        mark = forward.mark(len(span), tensor.dtype)
        if mark in forward.mover.alive_anyway:
            kept["alive anyway"] += len(span)
            forward.add(None)
            return _keep(tensor)
        lead = lead_of(tensor, span)
        cell = Cell(
            nbytes=len(span),
            origin=span.start,
            device=tensor.device,
            live=StorageWeakRef(storage),  # type: ignore[no-untyped-call]  # torch gives it no types
            source=storage,
            straight=lead is not None,
            lead=lead or 0,
            ready=event_now(tensor.device),
            mark=mark,
            position=forward.next_position,
        )
        token = Token(cell, forward.mover)  # first: whatever interrupts what follows, somebody lets go of the cell
        forward.mover.admit(cell)
        forward.add(cell)
        self._know(key, _Known(weakref.ref(token), weakref.ref(base), span))
        return _offloaded(token, forward, cell.position, tensor)

    def _forward_now(self) -> ForwardPass:
        """The forward pass that saves something now: another one after a backward pass, or in a forked child."""
        if self._forward is None or self._is_over or self._forward.mover is not self._engine.mover():
            self._is_over = False
            self._forward = self._engine.begin_forward()
        return self._forward

    def _share(self, key: tuple[int, int], base: torch.Tensor, span: range, mover: Mover) -> Token | None:
        """The token of what is offloaded already, which is unpacked once more; None if there is none."""
        known = self._known.get(key, [])
        known[:] = (one for one in known if one.token() is not None)
        for one in known:
            token = one.token()
            covers = one.owner() is base and one.span.start <= span.start and span.stop <= one.span.stop
            if covers and token is not None and token.mover is mover and mover.share(token.cell):
                return token
        return None

    def _know(self, key: tuple[int, int], one: _Known) -> None:
        """Note what may be saved again. Now and then, so that it costs next to nothing, forget what is gone: positions
        in the forward pass as well if that is most of them."""
        self._known.setdefault(key, []).append(one)
        self._count += 1
        if self._count < self._tidy_at:
            return
        alive = {key: [one for one in known if one.token() is not None] for key, known in self._known.items()}
        self._known = {key: known for key, known in alive.items() if known}
        before, self._count = self._count, sum(map(len, alive.values()))
        self._tidy_at = _LEAST_TO_TIDY + 2 * self._count
        self._is_over |= self._count < before / 2


def _untraced(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, but compiled regions, inside of which it is called, do not try to compile it, too. What is not imported
    compiles nothing, and takes long to import."""
    if "torch._dynamo" not in sys.modules:
        return hook
    disabled: Callable[[Any], Any] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]  # torch gives none
    return disabled


def _offloaded(token: Token, forward: ForwardPass, position: int, tensor: torch.Tensor) -> _Offloaded:
    return _Offloaded(token, forward, position, View.of(tensor), _witness(tensor), tensor._version)


def _keep(tensor: torch.Tensor) -> _Kept:
    """Detached: an output that the graph held itself would be held for ever."""
    return _Kept(tensor.detach(), 0 if tensor.is_inference() else tensor._version)


def _witness(tensor: torch.Tensor) -> torch.Tensor:
    """Without memory, but with the tensor's version counter, which in-place changes of it and its views increase."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness


def _shown(witness: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The same with the version counter of the one that was saved, so that who changes it is found, as in eager."""
    shown = witness.detach()
    shown.data = tensor
    return shown


def _check_version(witness: torch.Tensor, version: int, shown: torch.Tensor | View) -> None:
    """
    Raises:
        RuntimeError: as eager autograd does.
    """
    if witness._version == version:
        return
    nested = isinstance(shown, torch.Tensor) and shown.is_nested  # which may have no shape that could be asked for
    found = f"{shown.dtype} {'nested' if nested else list(shown.shape)}"
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{found}] is at version {witness._version}; expected version {version} instead. "
        f"Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        f"torch.autograd.set_detect_anomaly(True)."
    )


_engines: weakref.WeakSet[ActivationOffload] = weakref.WeakSet()


def _begin_anew() -> None:
    """In a forked child: threads, locks and slots are the parent's."""
    for engine in _engines:
        if engine._mover is not None:
            engine._mover.forget()
        engine._begin()


os.register_at_fork(after_in_child=_begin_anew)
