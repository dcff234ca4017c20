"""What loaders of epochs that can be resumed have in common: how far they have come, and their state."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch.distributed as dist

from fastensor.data.plan import EpochPlan, Positions


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an epoch has come. The same on all ranks."""

    epoch: int = 0
    consumed: int = 0
    """Samples that all ranks together have been given."""
    steps: int = 0
    """Batches that each rank has been given, whatever the number of ranks was."""

    def after_step(self, plan: EpochPlan) -> Progress:
        """The progress when each rank has been given one more batch."""
        return Progress(self.epoch, plan.consumed_after(1, self.consumed), self.steps + 1)


class EpochLoader(ABC):
    """Gives out the batches of one epoch after the other, in the order of an :class:`EpochPlan`.

    Args:
        plan: without the ranks.
        ranks: this rank, and the number of ranks that divide the samples. By default those of ``torch.distributed``
            when an iteration begins; without it, those that ``torchrun`` has set.
    """

    _kind: ClassVar[str]
    """What a state is of, for people."""

    def __init__(self, plan: EpochPlan, *, ranks: tuple[int, int] | None) -> None:
        self._base_plan = plan
        self._ranks = ranks
        self._progress = Progress()
        self._begins_here = True
        """Whether the next iteration begins at the progress, because no batch of that epoch was given out since."""
        self.batch_sampler = _RestOfEpoch(self)
        """The positions of batches. Lightning finds ``set_epoch`` here."""

    @abstractmethod
    def _batches_of(self, plan: EpochPlan) -> Iterator[Any]:
        """The batches from the progress on, to the end of its epoch."""

    @property
    @abstractmethod
    def _content(self) -> str:
        """Identifies the samples."""

    @property
    def plan(self) -> EpochPlan:
        """Which samples this rank takes now."""
        rank, world_size = self._ranks or ranks_of_job()
        return replace(self._base_plan, rank=rank, world_size=world_size)

    @property
    def progress(self) -> Progress:
        """How far the epoch has come of which the last batch was."""
        return self._progress

    def __len__(self) -> int:
        """The number of batches of the epoch, those before it was resumed included."""
        rest = self.plan.steps(self._progress.consumed)
        if not rest and self._begins_here:
            return self.plan.steps()
        return self._progress.steps + rest

    def __iter__(self) -> Iterator[Any]:
        if not self._begins_here or not self.plan.steps(self._progress.consumed):
            self._progress = Progress(self._progress.epoch + 1)
            self._begins_here = True
        return self._batches(self.plan)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin an epoch; or go on with it, if :meth:`load_state_dict` has just said so."""
        if not (self._begins_here and epoch == self._progress.epoch):
            self._progress = Progress(epoch)
            self._begins_here = True

    def state_dict(self) -> dict[str, int | str]:
        """Where the epoch is, and what order it has. The same on all ranks after the same number of batches.

        Batches count from when they are given out, whatever was read ahead by then.
        """
        return {**self._order(), **asdict(self._progress)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a state was taken; with the next epoch, if that one was complete.

        Raises:
            ValueError: the state is of other samples, or of another order.
        """
        order = self._order()
        if missing := {*order, *(entry.name for entry in fields(Progress))} - {*state}:
            raise ValueError(f"this is no state of {self._kind}: it lacks {sorted(missing)}")
        if other := [f"{name} {state[name]!r}, not {found!r}" for name, found in order.items() if state[name] != found]:
            raise ValueError(f"the state was taken with {', '.join(other)}: the order of its epoch is not known here")
        self._progress = Progress(*(state[entry.name] for entry in fields(Progress)))
        self._begins_here = True

    def _batches(self, plan: EpochPlan) -> Iterator[Any]:
        for batch in self._batches_of(plan):
            self._begins_here = False
            self._progress = self._progress.after_step(plan)
            yield batch

    def _order(self) -> dict[str, int | str]:
        """What the order of an epoch depends on."""
        plan = self._base_plan
        order: dict[str, int | str] = {"content": self._content, "seed": plan.seed, "shuffle": plan.shuffle}
        if plan.shuffle == "block":
            order |= {"block_size": plan.block_size, "blocks_per_group": plan.blocks_per_group}
        return order


class _RestOfEpoch:
    """The batches from the progress of a loader on, with what Lightning asks of a batch sampler."""

    def __init__(self, loader: EpochLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Positions]:
        progress = self._loader.progress
        return self._loader.plan.batches(progress.epoch, progress.consumed)

    @property
    def batch_size(self) -> int:
        """Samples of a batch of one rank."""
        return self._loader.plan.batch_size

    @property
    def sampler(self) -> EpochLoader:
        """Lightning calls its ``set_epoch`` when an epoch begins. Only that says which epoch is next after a checkpoint
        that was saved when an epoch had ended: Lightning does not load the loader's state from it."""
        return self._loader


def ranks_of_job() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1
