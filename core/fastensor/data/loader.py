"""Batches of an LMDB dataset, in an order that is known ahead and can be resumed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import DataLoader, Dataset, default_collate

from fastensor.data.dataset import LmdbDataset
from fastensor.data.epochs import EpochLoader, Progress, keep_inherited
from fastensor.data.plan import EpochPlan, Positions, Shuffle
from fastensor.data.samplers import ReadAheadSampler
from fastensor.data.skipping import OnError, Skipped, substitute, tried_together
from fastensor.data.worker_errors import SendableErrors
from fastensor.files.arguments import checks_keywords

T = TypeVar("T")

_BLOCK_NBYTES = 256 << 10
_BLOCKS_PER_GROUP = 64
_FEWEST_AHEAD = 2
_MOST_AHEAD = 1024
"""Batches that a worker knows ahead."""
_BY_WORKER = "in DataLoader worker process"
"""Words that torch adds to an error of a worker that goes on."""


class _Rest:
    """The batches that an iteration has left. It knows no loader: in a cycle with the loader, persistent workers would
    wait for the garbage collector, and there torch cannot tell them to end, and waits 5 s for each."""

    def begin(self, plan: EpochPlan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress

    def __iter__(self) -> Iterator[Positions]:
        return self._plan.batches(self._progress.epoch, self._progress.consumed)


@checks_keywords
class LmdbLoader(EpochLoader):
    """Iterates over the batches of one epoch after the other, like a ``DataLoader``, which it uses.

    Each ``iter(loader)`` begins the next epoch, in another order, if the last one has given out any batch. The first
    one begins epoch 0, or goes on where :meth:`load_state_dict` says. One iteration is used at a time: an older one
    raises RuntimeError.

    If a batch raises an error, it counts as given out, and ``next`` goes on with the one after it, like a
    ``DataLoader``. So does Ctrl-C while this process decodes; while it waits for workers, no batch is lost. To try a
    batch again, load a state that was taken before it.

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
        on_error: ``"raise"``: the error of a sample is raised in place of its batch. ``"skip"``: the sample is left
            out, logged, and counted in :attr:`skipped`. Its batch is smaller; one that has no sample left gets another
            one of the dataset, so that each rank has as many batches as ``len`` says. Raised all the same: errors of
            ``collate_fn``, and those that concern all samples, see :mod:`fastensor.data.skipping`.
        num_workers: processes that read and decode; with 0 this one does. They make decoding faster; reading ahead
            does not need them.
        timeout: for how many seconds a batch of the workers is waited for; then RuntimeError is raised in its place,
            and the iterator goes on with other workers. 0: for ever.
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
        on_error: OnError = "raise",
        num_workers: int = 0,
        timeout: float = 0,
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
        super().__init__(plan, ranks=ranks, on_error=on_error)
        batch_nbytes = max(batch_size * dataset.mean_nbytes, 1)
        self._rest = _Rest()
        sampler = ReadAheadSampler(
            self._rest,
            num_workers=num_workers,
            batches_ahead=min(max(int(dataset.read_ahead_nbytes / batch_nbytes), _FEWEST_AHEAD), _MOST_AHEAD),
        )
        self._has_workers = num_workers > 0
        collate = SendableErrors(collate_fn) if self._has_workers and collate_fn is not None else collate_fn
        self._made_loader: partial[DataLoader[Any]] = partial(
            DataLoader,
            SkippingDataset(dataset) if on_error == "skip" else dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=SkippingCollate(collate) if on_error == "skip" else collate,
            pin_memory=pin_memory,
            timeout=timeout,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
        )
        self._loader = self._made_loader()
        self._process = os.getpid()
        """The process that the loader's workers serve."""

    def _batches_of(self, plan: EpochPlan) -> Iterator[Any]:
        if self._process != os.getpid():
            keep_inherited(self._loader)
            self._loader, self._process = self._made_loader(), os.getpid()
        self._rest.begin(plan, self._progress)
        batches = iter(self._loader)
        return map(self._without_skipped, batches) if self._on_error == "skip" else batches

    def _without_skipped(self, found: WithSkipped) -> Any:
        self._note_skipped(found.skipped)
        return found.batch

    def _has_taken(self, error: BaseException) -> bool:
        return isinstance(error, Exception) or not self._has_workers

    def _goes_on(self, error: BaseException) -> bool:
        """A ``DataLoader`` goes on after an error of a sample. After Ctrl-C, or when a worker has ended, others may be
        gone, or what comes from them incomplete. With ``persistent_workers``, it would keep them."""
        goes_on = isinstance(error, Exception) and (_BY_WORKER in str(error) or not self._has_workers)
        if not goes_on:
            self._loader = self._made_loader()
        return goes_on

    @cached_property
    def _content(self) -> str:
        return self.dataset.content_id()


class Kept(list[Any]):
    """The samples of a batch that are not left out."""

    skipped: tuple[Skipped, ...] = ()


class SkippingDataset(Dataset[Any]):
    """A dataset whose batches lack samples that cannot be made, as a ``DataLoader`` with :class:`SkippingCollate` uses
    it.

    Args:
        dataset: what is read, with ``__getitems__``.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, positions: Sequence[int]) -> Kept:
        found = tried_together(self.dataset.__getitems__, self.dataset.__getitem__, positions)
        kept = Kept(sample for sample in found if not isinstance(sample, Skipped))
        kept.skipped = tuple(sample for sample in found if isinstance(sample, Skipped))
        if not kept:
            kept.append(substitute(self.dataset.__getitem__, positions[0], len(self)))
        return kept


class WithSkipped(NamedTuple):
    """A batch, and what it lacks."""

    batch: Any
    skipped: tuple[Skipped, ...]


class SkippingCollate:
    """Makes a batch of the samples that a :class:`SkippingDataset` gives.

    Args:
        collate_fn: makes it of a list of samples; by default as a ``DataLoader`` does.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        self._collate_fn = collate_fn or default_collate

    def __call__(self, samples: list[Any]) -> WithSkipped:
        assert isinstance(samples, Kept)
        return WithSkipped(self._collate_fn(list(samples)), samples.skipped)
