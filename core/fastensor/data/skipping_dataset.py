"""Samples that are left out of the batches of a ``DataLoader``; see :mod:`fastensor.data.skipping`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate

from fastensor.data.skipping import Skipped, substitute, tried_together


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
