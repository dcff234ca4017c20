"""Next use of each sample, by its position in the plan of all epochs. Everything here is pure.

The position of a use is ``epoch * n + place``, with the number n of samples and the place in the order of the epoch. So
positions count the uses of all epochs, and no two uses have the same.
"""

from __future__ import annotations

import numpy as np

from fastensor.data.plan import EpochPlan, Positions


class Schedule:
    """Schedule of uses: the order of epochs, and the next use of a sample. Keeps the orders of a few epochs, which take
    16 bytes for each sample.

    >>> schedule, samples = Schedule(EpochPlan(4, shuffle="none")), np.array([1, 2])
    >>> schedule.next_uses(samples, from_position=6), schedule.next_uses(samples, from_position=7)
    (array([9, 6]), array([ 9, 10]))
    """

    def __init__(self, plan: EpochPlan) -> None:
        self._plan = plan
        self._epochs: dict[int, tuple[Positions, Positions]] = {}
        """The order of an epoch, and the place of each sample in it."""

    def order(self, epoch: int) -> Positions:
        """The samples of an epoch, in its order."""
        return self._epoch(epoch)[0]

    def next_uses(self, samples: Positions, *, from_position: int) -> Positions:
        """The first positions from the given one on at which samples are used."""
        epoch, place = divmod(from_position, self._plan.n)
        places = self._epoch(epoch)[1][samples]
        late = places < place
        if late.any():
            places = np.where(late, self._epoch(epoch + 1)[1][samples] + self._plan.n, places)
        return places + epoch * self._plan.n

    def _epoch(self, epoch: int) -> tuple[Positions, Positions]:
        if epoch not in self._epochs:
            order = self._plan.order(epoch)
            places = np.empty_like(order)
            places[order] = np.arange(len(order))
            self._epochs = {known: self._epochs[known] for known in self._epochs if abs(known - epoch) < 2}
            self._epochs[epoch] = order, places
        return self._epochs[epoch]
