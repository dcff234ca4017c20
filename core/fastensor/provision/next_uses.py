"""Next use of each sample, by its position in the plan of all epochs. Everything here is pure.

The position of a use is ``epoch * n + place``, with the number n of samples and the place in the order of the epoch. So
positions count the uses of all epochs, and no two uses have the same.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from fastensor.data.plan import EpochPlan, Positions

_WORD_BITS = 64


class Schedule:
    """Schedule of uses: the sample at each position, and the next use of a sample. Keeps the orders of a few epochs,
    which take 16 bytes for each sample.

    >>> schedule = Schedule(EpochPlan(4, shuffle="none"))
    >>> schedule.sample_at(6), schedule.next_use(2, from_position=6), schedule.next_use(2, from_position=7)
    (2, 6, 10)
    """

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._epochs: dict[int, tuple[Positions, Positions]] = {}
        """The order of an epoch, and the place of each sample in it."""

    def sample_at(self, position: int) -> int:
        """The sample that is used at a position."""
        epoch, place = divmod(position, self._plan.n)
        return int(self._epoch(epoch)[0][place])

    def next_use(self, sample: int, *, from_position: int) -> int:
        """The first position from the given one on at which a sample is used."""
        epoch, place = divmod(from_position, self._plan.n)
        own = int(self._epoch(epoch)[1][sample])
        if own < place:
            epoch, own = epoch + 1, int(self._epoch(epoch + 1)[1][sample])
        return epoch * self._plan.n + own

    def order(self, epoch: int) -> Positions:
        """The samples of an epoch, in its order."""
        return self._epoch(epoch)[0]

    def next_uses_of(self, samples: Positions, *, from_position: int) -> Positions:
        """:meth:`next_use` of some samples."""
        epoch, place = divmod(from_position, self._plan.n)
        places = self._epoch(epoch)[1][samples]
        late = places < place
        if late.any():
            places = np.where(late, self._epoch(epoch + 1)[1][samples] + self._plan.n, places)
        return places + epoch * self._plan.n

    def next_uses(self, *, from_position: int) -> Positions:
        """:meth:`next_use` of all samples."""
        epoch, place = divmod(from_position, self._plan.n)
        this, following = self._epoch(epoch)[1], self._epoch(epoch + 1)[1]
        return np.where(this >= place, this, following + self._plan.n) + epoch * self._plan.n

    def _epoch(self, epoch: int) -> tuple[Positions, Positions]:
        if epoch not in self._epochs:
            order = self._plan.order(epoch)
            places = np.empty_like(order)
            places[order] = np.arange(len(order))
            self._epochs = {known: self._epochs[known] for known in self._epochs if abs(known - epoch) < 2}
            self._epochs[epoch] = order, places
        return self._epochs[epoch]


class PositionSet:
    """A set of numbers, a bit for each, whose largest one is found at once: of a billion, in five steps.

    Args:
        present: for each number whether it is in the set.
    """

    __slots__ = ("_levels",)

    def __init__(self, present: npt.NDArray[np.bool_]) -> None:
        self._levels: list[array[int]] = []
        """A bit of the first level is a number. A bit of the others is a word of the level before that is not zero."""
        while not self._levels or len(self._levels[-1]) > 1:
            padded = np.zeros(max(-(-len(present) // _WORD_BITS), 1) * _WORD_BITS, np.bool_)
            padded[: len(present)] = present
            words = np.packbits(padded, bitorder="little").view("<u8")
            self._levels.append(array("Q", words.astype(np.uint64).tobytes()))
            present = words != 0

    def add(self, number: int) -> None:
        """Add a number, unless it is there."""
        for level in self._levels:
            word = number // _WORD_BITS
            before = level[word]
            level[word] = before | 1 << number % _WORD_BITS
            if before:
                return
            number = word

    def discard(self, number: int) -> None:
        """Remove a number, if it is there."""
        for level in self._levels:
            word = number // _WORD_BITS
            level[word] &= ~(1 << number % _WORD_BITS)
            if level[word]:
                return
            number = word

    def largest(self) -> int | None:
        """The largest number; None if there is none."""
        if not self._levels[-1][0]:
            return None
        number = 0
        for level in reversed(self._levels):
            number = number * _WORD_BITS + level[number].bit_length() - 1
        return number


class NextUses:
    """The next uses of some samples, of which it finds the last one. Takes about 8 bytes for each sample of the
    dataset, and 4 for each epoch in which there are next uses, mostly two.

    Args:
        samples: the number of samples in the dataset.

    >>> uses = NextUses(10)
    >>> uses.set(3, position=25); uses.set(4, position=7)
    >>> uses.furthest()
    (3, 25)
    >>> uses.remove(3); uses.furthest()
    (4, 7)
    """

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._positions = array("q", [-1]) * samples
        """Position of each sample's next use; -1 if it is not in here."""
        self._epochs: dict[int, tuple[PositionSet, array[int]]] = {}
        """Places of each epoch that are next uses, and the sample of each place."""

    def set(self, sample: int, *, position: int) -> None:
        """Say when a sample is used next.

        Raises:
            ValueError: another sample is used there.
        """
        self.remove(sample)
        epoch, place = divmod(position, self._samples)
        places, samples = self._epochs.get(epoch) or self._added(epoch)
        if self._positions[samples[place]] == position:
            raise ValueError(f"sample {sample} cannot be used at {position}, where sample {samples[place]} is")
        places.add(place)
        samples[place] = sample
        self._positions[sample] = position

    def remove(self, sample: int) -> None:
        """Forget a sample, if it is there."""
        position = self._positions[sample]
        if position >= 0:
            epoch, place = divmod(position, self._samples)
            self._epochs[epoch][0].discard(place)
            self._positions[sample] = -1

    def furthest(self) -> tuple[int, int] | None:
        """The sample whose next use is the last one, and its position; None if there are no samples."""
        for epoch in sorted(self._epochs, reverse=True):
            places, samples = self._epochs[epoch]
            if (place := places.largest()) is not None:
                return samples[place], epoch * self._samples + place
        return None

    def reset(self, positions: Positions) -> None:
        """Forget all, and say when each sample is used next.

        Args:
            positions: of all samples of the dataset, all different; -1 for samples that are not to be in here.
        """
        self._positions = array("q", positions.astype(np.int64).tobytes())
        self._epochs = {}
        for epoch in np.unique(positions[positions >= 0] // self._samples).tolist():
            of_epoch = np.flatnonzero(positions // self._samples == epoch)
            places = positions[of_epoch] - epoch * self._samples
            present, samples = np.zeros(self._samples, np.bool_), np.zeros(self._samples, np.uint32)
            present[places] = True
            samples[places] = of_epoch
            self._epochs[epoch] = PositionSet(present), array("I", samples.tobytes())

    def _added(self, epoch: int) -> tuple[PositionSet, array[int]]:
        """Epochs that are over are forgotten only when one begins: sets may be empty for a moment."""
        self._epochs = {known: this for known, this in self._epochs.items() if this[0].largest() is not None}
        present = np.zeros(self._samples, np.bool_)
        self._epochs[epoch] = PositionSet(present), array("I", bytes(4 * self._samples))
        return self._epochs[epoch]
