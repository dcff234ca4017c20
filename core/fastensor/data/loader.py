"""Batches of an LMDB dataset, in an order that is known ahead and can be resumed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils.data import DataLoader

from fastensor.data.dataset import LmdbDataset
from fastensor.data.plan import EpochPlan, Positions, Shuffle
from fastensor.data.samplers import ReadAheadSampler
from fastensor.files.launchers import rank_and_world_size

T = TypeVar("T")

_BLOCK_NBYTES = 256 << 10
_BLOCKS_PER_GROUP = 64
_FEWEST_AHEAD = 2
_MOST_AHEAD = 1024
"""How many batches a worker knows ahead."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an epoch has come. The same on all ranks."""

    epoch: int = 0
    consumed: int = 0
    """Samples that all ranks together have been given."""
    steps: int = 0
    """Batches that each rank has been given, whatever the number of ranks was."""


class LmdbLoader:
    """Iterates over the batches of one epoch after the other, like a ``DataLoader``, which it uses.

    Each ``iter(loader)`` begins the next epoch, in another order, if the last one has given out any batch. The first
    one begins epoch 0, or goes on where :meth:`load_state_dict` says. One iteration is used at a time.

    Every rank makes a loader with the same arguments. The ranks divide the samples, see :class:`EpochPlan`; no
    ``DistributedSampler`` is needed. An epoch can be resumed with another number of ranks or workers, and another
    batch size: each of its samples is still given out once.

    Lightning takes the loader as it is, and saves and loads its state. But it asks how long epochs are before it loads
    the state, and only once. So if you resume with more ranks than before, or a larger batch size, it loses the end of
    the epoch, and :meth:`load_state_dict` warns: use ``fastensor_lightning.FastensorDataModule`` then.

    Accelerate's ``accelerator.prepare`` returns the loader as it is: batches stay on the CPU, and the ranks divide the
    samples as above. After ``accelerator.register_for_checkpointing(loader)``, Accelerate saves and loads its state.

    Args:
        dataset: what is read.
        batch_size: samples of a batch of one rank.
        shuffle: ``"full"``, ``"block"`` or ``"none"``, see :class:`EpochPlan`.
        seed: of the shuffling, the same on all ranks.
        drop_last: leave out samples at the end that are too few for a whole step of all ranks.
        block_size: samples of a block; by default so many that they have about 256 KiB.
        blocks_per_group: blocks whose samples are mixed.
        ranks: this rank, and the number of ranks that divide the samples. By default those of ``torch.distributed``
            when an iteration begins; without it, those that ``torchrun`` has set.
        num_workers: processes that read and decode; with 0 this one does. They make decoding faster; reading ahead
            does not need them.
        collate_fn, pin_memory, persistent_workers, prefetch_factor, multiprocessing_context, worker_init_fn: as for a
            ``DataLoader``.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        dataset: LmdbDataset[T],
        batch_size: int = 1,
        *,
        shuffle: Shuffle = "full",
        seed: int = 0,
        drop_last: bool = False,
        block_size: int | None = None,
        blocks_per_group: int = _BLOCKS_PER_GROUP,
        ranks: tuple[int, int] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[T]], Any] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.dataset = dataset
        self._ranks = ranks
        self._base_plan = EpochPlan(
            len(dataset),
            seed=seed,
            shuffle=shuffle,
            batch_size=batch_size,
            drop_last=drop_last,
            block_size=max(int(_BLOCK_NBYTES / max(dataset.mean_nbytes, 1)), 1) if block_size is None else block_size,
            blocks_per_group=blocks_per_group,
        )
        """The plan, without the ranks."""
        self.batch_sampler = _RestOfEpoch(self)
        """The positions of batches. Lightning finds ``set_epoch`` here."""
        batch_nbytes = max(batch_size * dataset.mean_nbytes, 1)
        sampler = ReadAheadSampler(
            self.batch_sampler,
            num_workers=num_workers,
            batches_ahead=min(max(int(dataset.read_ahead_nbytes / batch_nbytes), _FEWEST_AHEAD), _MOST_AHEAD),
        )
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
        )
        self._progress = Progress()
        self._begins_here = True
        """Whether the next iteration begins at the progress, because no batch of that epoch was given out since."""
        self._told_batches = 0
        """What ``len`` has said last."""

    @property
    def plan(self) -> EpochPlan:
        """Which samples this rank takes now."""
        rank, world_size = self._ranks or _ranks_of_job()
        return replace(self._base_plan, rank=rank, world_size=world_size)

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

        Batches count from when they are given out, whatever workers have read by then.
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
            raise ValueError(f"this is no state of an LmdbLoader: it lacks {sorted(missing)}")
        if other := [f"{name} {state[name]!r}, not {found!r}" for name, found in order.items() if state[name] != found]:
            raise ValueError(f"the state was taken with {', '.join(other)}: the order of its epoch is not known here")
        self._progress = Progress(*(state[entry.name] for entry in fields(Progress)))
        self._begins_here = True
        if 0 < self._told_batches < (batches := self._batches_of_epoch()):
            warnings.warn(
                f"the resumed epoch has {batches} batches on each rank, those before it was resumed included, and "
                f"len() has said before that it has {self._told_batches}. Lightning goes by that and loses the last "
                f"{batches - self._told_batches}: give it a fastensor_lightning.FastensorDataModule. In a loop of your "
                f"own, ask for len() after load_state_dict()",
                stacklevel=2,
            )

    def _batches(self, plan: EpochPlan) -> Iterator[Any]:
        for batch in self._loader:
            done = self._progress
            self._begins_here = False
            self._progress = Progress(done.epoch, plan.consumed_after(1, done.consumed), done.steps + 1)
            yield batch

    def _order(self) -> dict[str, int | str]:
        """What the order of an epoch depends on."""
        plan = self._base_plan
        order: dict[str, int | str] = {"content": self._content, "seed": plan.seed, "shuffle": plan.shuffle}
        if plan.shuffle == "block":
            order |= {"block_size": plan.block_size, "blocks_per_group": plan.blocks_per_group}
        return order

    @cached_property
    def _content(self) -> str:
        return self.dataset.content_id()


class _RestOfEpoch:
    """The batches from the progress of a loader on, with what Lightning asks of a batch sampler."""

    def __init__(self, loader: LmdbLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Positions]:
        progress = self._loader.progress
        return self._loader.plan.batches(progress.epoch, progress.consumed)

    @property
    def batch_size(self) -> int:
        """Samples of a batch of one rank."""
        return self._loader.plan.batch_size

    @property
    def sampler(self) -> LmdbLoader:
        """The loader itself, whose ``set_epoch`` Lightning calls when an epoch begins. From a checkpoint that was saved
        at the end of an epoch Lightning does not load the loader's state, so only this call says which epoch is
        next."""
        return self._loader


def _ranks_of_job() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return rank_and_world_size()
