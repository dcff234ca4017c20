"""``ActivationOffload``: tensors that autograd saves in the forward pass go to an SSD, and come back when they are
needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch

from fastensor.errors import OffloadError
from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import given, shown
from fastensor.offload.config import OffloadConfig, checked_config, dry_run_config
from fastensor.offload.engine import OffloadEngine
from fastensor.offload.hooks import StepHooks, untraced
from fastensor.offload.modules import AttachedModel
from fastensor.offload.slots import check_folders
from fastensor.offload.statistics import OffloadEstimate, OffloadStatistics, PlanReport, report_of
from fastensor.offload.undone import undone


@checks_keywords
class ActivationOffload:
    """Moves saved activations to an SSD in the forward pass, and back in the backward pass. Gradients are the same.

    In the ``with`` block of :meth:`step` autograd hands over the tensors that it saves for the backward pass
    (``torch.autograd.graph.saved_tensors_hooks``), in this thread. Threads write large tensors to a nameless file, and
    free their memory as soon as the bytes are written: by default as few tensors as have to go, so that the rest fits
    into memory, and those that cost the least time (``OffloadConfig.schedule``). Parameters, buffers of an attached
    model, views and casts of these, and tensors that others keep alive stay in memory. The backward pass may run
    anywhere, any number of times, wholly or in part or not at all. Threads read ahead what the backward pass needs
    next, in the order of the last step of the same form. When a graph goes, its bytes on the SSD go, too.

    In-place changes of saved tensors are found at the backward pass, as without offloading. Gradients are undefined if
    a saved tensor is changed without autograd's knowledge (``tensor.data``, other frameworks).

    An interrupt (Ctrl-C), or another unexpected exception inside the offload, closes files and threads: graphs that
    still live raise an :class:`OffloadError` if they need bytes that are not in memory any more, and the next step
    begins anew. Nothing hangs, nothing is left on the disk, and no gradient is wrong.

    Every method may be called from several threads; steps may overlap and nest. A pickled offload is a new one with the
    same configuration; so is the offload in a forked child, attached to the child's model. There, a graph of the parent
    raises, unless nothing of it was offloaded. Files and threads begin with the first tensor that is offloaded.
    ``torch.func`` refuses to work under hooks of this kind.

    A model that FSDP2 (``fully_shard``) shards has to be attached: FSDP2 frees the memory of unsharded parameters and
    fills it again, and only the model says which memory that is.

    Args:
        config: how many bytes go where.

    Raises:
        TypeError: ``config`` is something else.
        OffloadError: no file can be made in a folder; or the folder of a trace is missing, or the trace names a folder.

    >>> import torch
    >>> from fastensor.offload import ActivationOffload, OffloadConfig
    >>> weight = torch.randn(512, 512, requires_grad=True)
    >>> with ActivationOffload(OffloadConfig(schedule="all", min_bytes=1 << 16)) as offload:
    ...     with offload.step():
    ...         loss = torch.randn(64, 512).mm(weight).sigmoid().mm(weight).exp().sum()
    ...     loss.backward()
    ...     offload.statistics().offloaded
    3
    """

    def __init__(self, config: OffloadConfig | None = None) -> None:
        self.config = checked_config(config)
        check_folders(self.config)
        self._engine = OffloadEngine(self.config)
        self._running = threading.local()

    @shown
    def __repr__(self) -> str:
        attached = "" if self._engine.model is None else ", attached to a model"
        return f"({', '.join(given(self.config))}){attached}{', closed' if self._engine.closed else ''}"

    @property
    def is_in_step(self) -> bool:
        """True if this thread is in a block of :meth:`step`."""
        return bool(getattr(self._running, "steps", 0))

    @contextmanager
    def step(self) -> Iterator[None]:
        """Offload what this thread's forward passes save in the block. There may be any number of forward and backward
        passes in it: each costs what it would in a block of its own.

        Raises:
            OffloadError: the offload has been closed; or, with ``when_full="raise"``, an activation of this step or of
                an earlier one could not be written.
        """
        engine = self._engine
        if engine.closed:
            raise OffloadError("this ActivationOffload has been closed; make another one")
        if (self.config.include or self.config.exclude) and engine.model is None:
            raise OffloadError("include and exclude name modules of a model: call attach(model) before the first step")
        if self.config.recompute and engine.model is None:
            raise OffloadError("recompute needs the blocks of a model: call attach(model) before the first step")
        engine.begin_step()
        hooks = StepHooks(engine)
        self._running.steps = getattr(self._running, "steps", 0) + 1
        blocks = nullcontext() if engine.model is None else engine.model.running(hooks)
        try:
            with torch.autograd.graph.saved_tensors_hooks(untraced(hooks.pack), untraced(hooks.unpack)), blocks:
                yield
        finally:
            self._running.steps -= 1
            hooks.end_unexamined()
            engine.end_step()

    def attach(self, model: torch.nn.Module) -> None:
        """Name the model that runs in the steps, so that its buffers and what FSDP2 gathers of its parameters are not
        offloaded, ``include`` and ``exclude`` of the configuration can name its modules, and ``recompute`` finds its
        blocks. It may be sharded before or afterwards. A model that was attached before is detached.

        While it is attached, the blocks that ``recompute`` finds have a ``forward`` of ours. Copies of the model
        (``copy.deepcopy``, ``pickle``, ``torch.save(model)``, averages of weights) are not attached, and can be loaded
        where Fastensor is not installed.

        Raises:
            ValueError: a pattern fits no module of the model.
            OffloadError: FSDP version 1 or DeepSpeed's ZeRO stage 3 frees and refills the memory of the model's
                parameters; or a pattern fits a module of TorchScript, which calls no hooks.
        """
        attached = AttachedModel(model, self.config.include, self.config.exclude, self.config.recompute)
        self.detach()
        self._engine.model = attached

    def detach(self) -> None:
        """Take the hooks out of the attached model. Calling it again does nothing."""
        model, self._engine.model = self._engine.model, None
        if model is not None:
            model.remove()

    def plan(self) -> PlanReport | None:
        """Plan of the tensors that stay or leave, with reasons, in forward passes of the kind that was planned last;
        None if no pass has been planned. A pass is planned when the next one begins."""
        form = self._engine.planner.latest()
        return None if form is None else report_of(form)

    def dry_run(self, train: Callable[[], object], passes: int = 3) -> OffloadEstimate:
        """Estimate, before training, what stays in memory, how much longer a step takes, and how long the drives last.

        All that ``train`` saves is offloaded to measure it, with files, threads and counters of its own: a step that
        does not even fit then runs out of memory here. Then the schedule of the configuration is planned on what was
        measured.

        Args:
            train: runs a forward pass and its backward pass, once, as training does, but for :meth:`step`. What it does
                to parameters, buffers and gradients of the attached model, to optimizers of torch from their first step
                on, with their parameters, and to the default random generators is undone when the dry run ends. What
                else it does stays: gradients and buffers of a model that is not attached, steps of schedulers, what it
                logs or saves.
            passes: how often ``train`` is called. The last time counts: the first one is slower than those that follow.

        Raises:
            OffloadError: ``train`` has saved nothing that could be offloaded, has run no backward pass, or is in a
                :meth:`step` of its own.
        """
        model, folders = self._engine.model, self.config.directories
        restored = undone(None if model is None else model.model, folders[0] if folders else None)
        with ActivationOffload(dry_run_config(self.config)) as measuring, restored:
            measuring._engine.model = model
            try:
                for _ in range(passes):
                    with measuring.step():
                        train()
                return measuring.estimate(self.config)
            finally:
                measuring._engine.model = None  # it is attached to this offload

    def estimate(self, config: OffloadConfig | None = None) -> OffloadEstimate:
        """Estimate of the time and memory of training, by the latest pass. Waits for writes and reads.

        Args:
            config: another configuration to train with; None means this one.

        Raises:
            OffloadError: no pass has been measured.
        """
        self.settle()
        return self._engine.estimate(config or self.config)

    def settle(self) -> None:
        """Wait until nothing is being written or read."""
        self._engine.settle()

    def close(self) -> None:
        """Give back files, threads and memory, and write the trace. Graphs that still live raise if they need bytes
        that are not in the memory that they were saved from. Calling it again does nothing.

        Raises:
            OffloadError: the trace cannot be written.
        """
        self.detach()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        return type(self), (self.config,)

    def memory_usage(self) -> dict[str, int]:
        """Bytes in each place now: ``pending``, ``in_dram``, ``loaded``, ``idle``, ``staged`` (memory), ``on_ssd``,
        ``reserved_on_ssd``. Empty if nothing has been offloaded."""
        return self._engine.memory_usage()

    def statistics(self) -> OffloadStatistics:
        """Counts of what the offload has done so far."""
        return self._engine.statistics()
