"""Samplers that tell the dataset which batches follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from torch.utils.data import Sampler

from fastensor.data.plan import Positions
from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import shown
from fastensor.files.words import counted


class AnnouncedBatch(list[int]):
    """The positions of a batch; and of batches that the same process will be asked for later."""

    upcoming: tuple[Positions, ...] = ()
    """Batches that earlier batches have not announced, in the order in which they will be asked for."""


@checks_keywords
class ReadAheadSampler(Sampler[list[int]]):
    """Batches of another batch sampler. Each also says which batches its worker will be asked for later.

    With it any ``DataLoader`` of an :class:`~fastensor.data.LmdbDataset` reads ahead::

        sampler = BatchSampler(RandomSampler(dataset), batch_size=64, drop_last=False)
        loader = DataLoader(dataset, batch_sampler=ReadAheadSampler(sampler, num_workers=4), num_workers=4)

    A ``DataLoader`` gives batch i to worker ``i % num_workers``, unless it has ``in_order=False``. A wrong number of
    workers makes reading slow, not wrong. Datasets that wrap the dataset lose the announcement:
    :meth:`~fastensor.data.LmdbDataset.select` takes the place of ``Subset``.

    Args:
        batches: yields batches of positions. Its iteration runs ahead by ``batches_ahead * max(num_workers, 1)``.
        num_workers: as for the ``DataLoader``.
        batches_ahead: how many batches each worker knows ahead. The memory of the dataset limits what is read.

    Raises:
        ValueError: ``batches_ahead`` is less than 1.
    """

    def __init__(self, batches: Iterable[Iterable[int]], *, num_workers: int = 0, batches_ahead: int = 16) -> None:
        if batches_ahead < 1:
            raise ValueError(f"batches_ahead is at least 1, found {batches_ahead}")
        self._batches = batches
        self._workers = max(num_workers, 1)
        self._batches_ahead = batches_ahead

    @shown
    def __repr__(self) -> str:
        kind, workers = type(self._batches).__name__, counted(self._workers, "workers")
        return f" of a {kind}: {self._batches_ahead} batches ahead for {workers}"

    def __iter__(self) -> Iterator[list[int]]:
        batches = (
            np.asarray(batch if isinstance(batch, np.ndarray) else list(batch), np.int64) for batch in self._batches
        )
        ahead = self._batches_ahead * self._workers
        waiting = deque(islice(batches, ahead))
        number = 0
        while waiting:
            waiting.extend(islice(batches, 1))
            batch = AnnouncedBatch(waiting.popleft().tolist())
            if number < self._workers:
                batch.upcoming = tuple(waiting)[self._workers - 1 :: self._workers]
            elif len(waiting) == ahead:
                batch.upcoming = (waiting[-1],)
            number += 1
            yield batch

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # a sampler without a length has none itself
