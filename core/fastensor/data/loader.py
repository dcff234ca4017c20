"""Batches of an LMDB dataset, in an order that is known ahead and can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from fastensor.data.dataset import LmdbDataset
from fastensor.data.epochs import EpochLoader
from fastensor.data.plan import EpochPlan, Shuffle
from fastensor.data.samplers import ReadAheadSampler

T = TypeVar("T")

_BLOCK_NBYTES = 256 << 10
_BLOCKS_PER_GROUP = 64
_FEWEST_AHEAD = 2
_MOST_AHEAD = 1024
"""How many batches a worker knows ahead."""


class LmdbLoader(EpochLoader):
    """Iterates over the batches of one epoch after the other, like a ``DataLoader``, which it uses.

    Each ``iter(loader)`` begins the next epoch, in another order, if the last one has given out any batch. The first
    one begins epoch 0, or goes on where :meth:`load_state_dict` says. One iteration is used at a time.

    Every rank makes a loader with the same arguments. The ranks divide the samples, see :class:`EpochPlan`; no
    ``DistributedSampler`` is needed. An epoch can be resumed with another number of ranks or workers, and another
    batch size: each of its samples is still given out once.

    Lightning takes the loader as it is, and saves and loads its state. But it asks how long epochs are before it loads
    the state, and only once: to resume with another number of ranks, or another batch size, use
    ``fastensor_lightning.FastensorDataModule``, or the end of the epoch may be lost. Accelerate leaves the
    loader alone, too, so ``accelerator.prepare`` may be given it: batches stay on the CPU, and the ranks divide the
    samples as above. ``accelerator.register_for_checkpointing(loader)`` has it save and load the state.

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
        num_workers: processes that read and decode; with 0 this one does. Reading ahead needs no processes, only
            decoding gains by them.
        collate_fn, pin_memory, persistent_workers, prefetch_factor, multiprocessing_context, worker_init_fn: as for a
            ``DataLoader``.

    Raises:
        ValueError: an argument is out of its range.
    """

    _kind = "an LmdbLoader"

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
        plan = EpochPlan(
            len(dataset),
            seed=seed,
            shuffle=shuffle,
            batch_size=batch_size,
            drop_last=drop_last,
            block_size=max(int(_BLOCK_NBYTES / max(dataset.mean_nbytes, 1)), 1) if block_size is None else block_size,
            blocks_per_group=blocks_per_group,
        )
        super().__init__(plan, ranks=ranks)
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

    def _batches_of(self, plan: EpochPlan) -> Iterator[Any]:
        return iter(self._loader)

    @cached_property
    def _content(self) -> str:
        return self.dataset.content_id()
