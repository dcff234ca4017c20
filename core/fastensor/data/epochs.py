"""Base of loaders of epochs that can be resumed: progress, and state dicts."""

from __future__ import annotations

import logging
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, get_args

from fastensor.data.plan import EpochPlan, Positions
from fastensor.data.skipping import OnError, Skipped
from fastensor.files.arguments import check_whole, check_word, checks_keywords
from fastensor.files.launchers import rank_and_world_size
from fastensor.files.shown import shown
from fastensor.files.warning import warn_caller
from fastensor.files.words import counted, is_worth_a_line

_logger = logging.getLogger("fastensor")


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of an epoch, the same on all ranks."""

    epoch: int = 0
    consumed: int = 0
    """Samples that all ranks together have been given."""
    steps: int = 0
    """Batches that each rank has been given, whatever the number of ranks was."""

    def after_step(self, plan: EpochPlan) -> Progress:
        """The progress when each rank has been given one more batch."""
        return Progress(self.epoch, plan.consumed_after(1, self.consumed), self.steps + 1)


@checks_keywords
class EpochLoader(ABC):
    """Gives out the batches of one epoch after the other, in the order of an :class:`EpochPlan`.

    A batch that raises an error counts as given out, and the same iterator goes on with the next one. Of several
    iterations, only the one that began last goes on: the others raise RuntimeError.

    Args:
        plan: without the ranks.
        ranks: this rank, and the number of ranks that divide the samples. By default those of ``torch.distributed``
            when an iteration begins; without it, those that ``torchrun`` has set.
        on_error: what becomes of samples that cannot be made, see :mod:`fastensor.data.skipping`.

    Raises:
        ValueError: an argument is out of its range.
    """

    _kind: ClassVar[str]
    """Name of the loader in messages about its state."""

    def __init__(self, plan: EpochPlan, *, ranks: tuple[int, int] | None, on_error: OnError = "raise") -> None:
        check_word(on_error, "on_error", get_args(OnError))
        self._base_plan = plan
        self._ranks = ranks
        self._on_error: OnError = on_error
        self._progress = Progress()
        self._begins_here = True
        """True if the next iteration begins at the progress, because no batch of that epoch was given out since."""
        self._iteration = 0
        """The number of the only iteration that may go on. It has another number when the loader is told to go on
        elsewhere, after the iteration has begun."""
        self._skipped = 0
        self._told_batches = 0
        """Latest result of ``len``."""

    @shown
    def __repr__(self) -> str:
        plan, at = self._base_plan, self._progress
        return (
            f" of {counted(plan.n, 'samples')}, {plan.batch_size} a batch, shuffle {plan.shuffle!r}: epoch {at.epoch}, "
            f"{counted(at.consumed, 'samples')} given out"
        )

    @abstractmethod
    def _batches_of(self, plan: EpochPlan) -> Iterator[Any]:
        """The batches from the progress on, to the end of its epoch."""

    @abstractmethod
    def _has_taken(self, error: BaseException) -> bool:
        """True if the batch that was to come counts as given out, when its iterator has raised an error."""

    def _goes_on(self, error: BaseException) -> bool:
        """True if an iterator of :meth:`_batches_of` that has raised an error goes on with the batch after that one.
        Otherwise, what the loader keeps of it is given up."""
        return False

    @property
    @abstractmethod
    def _content(self) -> str:
        """Identifies the samples."""

    @property
    def plan(self) -> EpochPlan:
        """Plan of the samples that this rank takes."""
        rank, world_size = self._ranks or rank_and_world_size()
        return replace(self._base_plan, rank=rank, world_size=world_size)

    @property
    def batch_sampler(self) -> _RestOfEpoch:
        """The positions of batches. Lightning finds ``set_epoch`` here."""
        return _RestOfEpoch(self)  # kept by nobody: a loader that is dropped ends at once, and what it has started

    @property
    def progress(self) -> Progress:
        """Progress of the epoch of the last batch."""
        return self._progress

    @property
    def skipped(self) -> int:
        """Samples that ``on_error="skip"`` has left out of this rank's batches since the loader was made."""
        return self._skipped

    def __len__(self) -> int:
        """The number of batches of the epoch, those before it was resumed included."""
        self._told_batches = self._batches_of_epoch()
        return self._told_batches

    def _batches_of_epoch(self) -> int:
        rest = self.plan.steps(self._progress.consumed)
        if not rest and self._begins_here:
            return self.plan.steps()
        return self._progress.steps + rest

    def __iter__(self) -> Iteration:
        if not self._begins_here or not self.plan.steps(self._progress.consumed):
            self._go_to(Progress(self._progress.epoch + 1))
        self._iteration += 1
        return Iteration(self, self._iteration, self.plan)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin an epoch; or go on with it, if :meth:`load_state_dict` has just said so.

        Raises:
            TypeError: the epoch is no whole number.
            ValueError: it is negative.
        """
        check_whole(epoch, "epoch", at_least=0)
        if not (self._begins_here and epoch == self._progress.epoch):
            self._go_to(Progress(int(epoch)))

    def _go_to(self, progress: Progress) -> None:
        """Let the next iteration begin at a progress."""
        if not self._begins_here:
            self._iteration += 1
        self._progress = progress
        self._begins_here = True

    def state_dict(self) -> dict[str, int | str]:
        """State of the epoch: its progress and its order. The same on all ranks after the same number of batches.

        Batches count from when they are given out, whatever was read ahead by then.
        """
        return {**self._order(), **asdict(self._progress)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a state was taken; with the next epoch, if that one was complete.

        Warns:
            UserWarning: ``len`` has said before that the epoch is shorter. A caller that goes by that, as Lightning
                does, loses the end of the epoch.

        Raises:
            ValueError: the state is of other samples, or of another order, or says what cannot be.
        """
        order = self._order()
        if missing := {*order, *(entry.name for entry in fields(Progress))} - {*state}:
            raise ValueError(f"this is no state of {self._kind}: it lacks {sorted(missing)}")
        if other := [f"{name} {state[name]!r}, not {found!r}" for name, found in order.items() if state[name] != found]:
            raise ValueError(f"the state was taken with {', '.join(other)}: the order of its epoch is not known here")
        self._go_to(self._progress_in(state))
        if 0 < self._told_batches < (batches := self._batches_of_epoch()):
            warn_caller(
                f"the resumed epoch has {batches} batches on each rank, those before it was resumed included, and "
                f"len() has said before that it has {self._told_batches}. Lightning goes by that and loses the last "
                f"{batches - self._told_batches}: load the state before Lightning asks, in a data module, as "
                f"fastensor_lightning.FastensorDataModule does. In a loop of your own, ask for len() afterwards"
            )

    def _take(self, progress: Progress) -> None:
        """A batch counts as given out."""
        self._begins_here = False
        self._progress = progress

    def _progress_in(self, state: Mapping[str, Any]) -> Progress:
        """Progress in a state dict.

        Raises:
            ValueError: that cannot be.
        """
        numbers = {}
        for entry in fields(Progress):
            try:
                numbers[entry.name] = operator.index(state[entry.name])
            except TypeError:
                raise ValueError(f"{entry.name} in a state is a whole number, found {state[entry.name]!r}") from None
            if numbers[entry.name] < 0:
                raise ValueError(f"{entry.name} in a state is 0 or more, found {numbers[entry.name]}")
        if numbers["consumed"] > self._base_plan.n:
            raise ValueError(
                f"the state says that {numbers['consumed']} samples of the epoch were given out, and there are "
                f"{self._base_plan.n}: it is damaged, or of another dataset"
            )
        return Progress(**numbers)

    def _note_skipped(self, skipped: Iterable[Skipped]) -> None:
        """Count samples that were left out, and log them, fewer of them the more there are."""
        for position, reason in skipped:
            self._skipped += 1
            if is_worth_a_line(self._skipped):
                _logger.warning(
                    "sample %d is left out of its batch (on_error='skip'; %d so far): %s",
                    position,
                    self._skipped,
                    reason,
                )

    def _order(self) -> dict[str, int | str]:
        """Values on which the order of an epoch depends."""
        plan = self._base_plan
        order: dict[str, int | str] = {"content": self._content, "seed": plan.seed, "shuffle": plan.shuffle}
        if plan.shuffle == "block":
            order |= {"block_size": plan.block_size, "blocks_per_group": plan.blocks_per_group}
        return order


class Iteration(Iterator[Any]):
    """The batches of a loader from its progress on, to the end of the epoch.

    The iterator of :meth:`EpochLoader._batches_of` is made when it is needed: at first; after an error that has ended
    it; and in a forked child, which cannot share it with its parent.
    """

    def __init__(self, loader: EpochLoader, number: int, plan: EpochPlan) -> None:
        self._loader = loader
        self._number = number
        self._plan = plan
        self._batches: Iterator[Any] | None = None
        self._process = os.getpid()
        self._has_ended = False

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        self._check_is_last()
        if self._process != os.getpid():
            keep_inherited(self._batches)
            self._batches, self._process = None, os.getpid()
        after = self._loader._progress.after_step(self._plan)
        try:
            if self._batches is None:
                self._batches = self._loader._batches_of(self._plan) if self._is_left else iter(())
            batch = next(self._batches)
            self._loader._take(after)
        except StopIteration as error:
            if self._is_left:
                self._note(error, after)
                raise RuntimeError("the dataset, a decoder or collate_fn has raised StopIteration") from error
            self._batches, self._has_ended = None, True
            raise
        except BaseException as error:
            self._note(error, after)
            raise
        return batch

    def close(self) -> None:
        """End the iteration, and the workers of its ``DataLoader`` unless they are persistent. The loader stays where
        it is."""
        self._batches, self._has_ended = None, True

    @property
    def _is_left(self) -> bool:
        """True if there are more batches."""
        return self._plan.steps(self._loader._progress.consumed) > 0

    def _check_is_last(self) -> None:
        """
        Raises:
            RuntimeError: the loader goes on elsewhere.
        """
        if self._loader._iteration != self._number:
            self._batches = None
            raise RuntimeError(
                "another iteration over this loader has begun since, or it was told to go on elsewhere, and it counts "
                "the samples of one iteration: make a loader for each iteration, or end one before the next begins"
            )

    def _note(self, error: BaseException, after: Progress) -> None:
        """The next batch has raised an error.

        Args:
            after: the progress behind that batch. An interrupt may come when the loader has it already.
        """
        if not self._loader._goes_on(error):
            self._batches = None
        if self._loader._has_taken(error):
            self._loader._take(after)


def keep_inherited(parents: object) -> None:
    """Keep an object of the parent for as long as this process runs, which was forked from it: the end of a
    ``DataLoader`` would end the workers of the parent."""
    _INHERITED.append(parents)


_INHERITED: list[object] = []


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
