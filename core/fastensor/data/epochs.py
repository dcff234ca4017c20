"""What loaders of epochs that can be resumed have in common: how far they have come, and their state."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch.distributed as dist

from fastensor.data.plan import EpochPlan, Positions
from fastensor.files.launchers import rank_and_world_size


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
        self._told_batches = 0
        """What ``len`` has said last."""

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
    def batch_sampler(self) -> _RestOfEpoch:
        """The positions of batches. Lightning finds ``set_epoch`` here."""
        return _RestOfEpoch(self)  # kept by nobody: a loader that is dropped ends at once, and what it has started

    @property
    def progress(self) -> Progress:
        """How far the epoch of the last batch has come."""
        return self._progress

    def __len__(self) -> int:
        """The number of batches of the epoch, those before it was resumed included."""
        self._told_batches = self._batches_of_epoch()
        return self._told_batches

    def _batches_of_epoch(self) -> int:
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

        Warns:
            UserWarning: ``len`` has said before that the epoch is shorter. Whoever goes by that, as Lightning does,
                loses the end of the epoch.

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
        if 0 < self._told_batches < (batches := self._batches_of_epoch()):
            warnings.warn(
                f"the resumed epoch has {batches} batches on each rank, those before it was resumed included, and "
                f"len() has said before that it has {self._told_batches}. Lightning goes by that and loses the last "
                f"{batches - self._told_batches}: load the state before Lightning asks, in a data module, as "
                f"fastensor_lightning.FastensorDataModule does. In a loop of your own, ask for len() afterwards",
                stacklevel=2,
            )

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
        """The loader itself, whose ``set_epoch`` Lightning calls when an epoch begins. From a checkpoint that was saved
        at the end of an epoch Lightning does not load the loader's state, so only this call says which epoch is
        next."""
        return self._loader


def ranks_of_job() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return rank_and_world_size()
