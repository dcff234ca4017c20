"""In which order an epoch takes its samples, and which rank takes which. Everything here is pure.

The order of an epoch is a function of the number of samples, the seed, the epoch and the kind of shuffling, but not of
the number of ranks. A step takes the next samples of that order, ``batch_size`` for each rank, and the ranks divide
them. So one number, how many samples the epoch has consumed, says where to go on, with any number of ranks and workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from fastensor.files.arguments import check_whole, checks_keywords

Shuffle: TypeAlias = Literal["full", "block", "none"]
"""Shuffling of an epoch; see :class:`EpochPlan`."""
Positions: TypeAlias = npt.NDArray[np.int64]
"""Positions of samples in the dataset, from 0."""

_SHUFFLES: tuple[Shuffle, ...] = get_args(Shuffle)
_LEAST = {"n": 0, "seed": 0, "batch_size": 1, "world_size": 1, "rank": 0, "block_size": 1, "blocks_per_group": 1}


@checks_keywords
@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The samples that each rank takes in each step of an epoch. Each sample is taken once per epoch, by one rank.

    All ranks take the same number of steps. Without ``drop_last``, the last step divides the samples that are left
    evenly: the ranks' batches differ by one sample at most. If fewer samples than ranks are left, ranks that would get
    nothing repeat one of them, because a rank without a batch would let the others wait for ever.

    ``shuffle`` is one of:

    - ``"full"``: all orders of all samples are equally likely.
    - ``"block"``: the dataset is cut into blocks of ``block_size`` consecutive samples. The blocks are shuffled, then
      the samples of each group of ``blocks_per_group`` blocks. The disk can read whole blocks. A batch has samples of
      one group, or of two at the border; :attr:`mixing` says what that costs. In each step the ranks divide the samples
      in the order of the dataset, so that each rank reads only some blocks of the group.
    - ``"none"``: the order of the dataset.

    The order is the same with every version of NumPy: it is drawn by a generator whose stream is frozen (NEP 19).

    Raises:
        ValueError: an argument is out of its range.

    >>> plan = EpochPlan(10, seed=1, batch_size=2, world_size=2)
    >>> plan.steps()
    3
    >>> [batch.tolist() for batch in plan.batches(epoch=0)]
    [[1, 0], [6, 3], [2]]
    """

    n: int
    """The number of samples in the dataset."""
    _: KW_ONLY
    seed: int = 0
    """The same on all ranks. From 0 on."""
    shuffle: Shuffle = "full"
    batch_size: int = 1
    """Samples that one rank takes in one step."""
    world_size: int = 1
    """The number of ranks."""
    rank: int = 0
    """The rank that :meth:`batches` is for."""
    drop_last: bool = False
    """Leave out samples at the end that are too few for a whole step."""
    block_size: int = 256
    """Samples of a block. Only ``"block"`` and :attr:`mixing` use it."""
    blocks_per_group: int = 32
    """Blocks whose samples are mixed. Only ``"block"`` uses it."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_whole(getattr(self, name), name, at_least=least)
            object.__setattr__(self, name, int(getattr(self, name)))  # those of NumPy overflow
        if self.rank >= self.world_size:
            raise ValueError(f"rank is less than world_size ({self.world_size}), found {self.rank}")
        if self.shuffle not in _SHUFFLES:
            raise ValueError(f"shuffle is one of {_SHUFFLES}, found {self.shuffle!r}")

    @property
    def step_size(self) -> int:
        """Samples that all ranks together take in one step."""
        return self.batch_size * self.world_size

    def order(self, epoch: int) -> Positions:
        """All positions in the order in which the epoch takes them. Needs 8 bytes for each sample.

        Args:
            epoch: from 0 on. Each epoch has another order, except without shuffling.
        """
        if self.shuffle == "none":
            return np.arange(self.n, dtype=np.int64)
        rng = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((self.seed, epoch))))
        if self.shuffle == "full":
            return _permutation(rng, self.n)
        blocks = _permutation(rng, -(-self.n // self.block_size))
        order = (blocks[:, None] * self.block_size + np.arange(self.block_size)).ravel()
        group_size = self.block_size * self.blocks_per_group
        # The last block of the dataset may be shorter. Wherever it comes, it is filled up until groups are shuffled.
        for begin in range(0, len(order), group_size):
            rng.shuffle(order[begin : begin + group_size])
        return order[order < self.n]

    def steps(self, consumed: int = 0) -> int:
        """Number of steps of the rest of an epoch, after all ranks have taken ``consumed`` samples."""
        left = self.n - consumed
        return left // self.step_size if self.drop_last else -(-left // self.step_size)

    def consumed_after(self, steps: int, consumed: int = 0) -> int:
        """Number of samples of an epoch that all ranks together have taken after ``steps`` more steps."""
        return min(consumed + steps * self.step_size, self.n)

    def batches(self, epoch: int, consumed: int = 0, *, order: Positions | None = None) -> Iterator[Positions]:
        """The batches of :attr:`rank` in the rest of an epoch, as arrays of positions.

        Args:
            epoch: from 0 on.
            consumed: how many samples of the epoch have been taken already, by all ranks, whose number may have been
                another one.
            order: what :meth:`order` returns, if the caller has it.
        """
        if order is None:
            order = self.order(epoch)
        for begin in range(consumed, consumed + self.steps(consumed) * self.step_size, self.step_size):
            yield self._share(order[begin : begin + self.step_size])

    @property
    def mixing(self) -> float:
        """Number of different blocks that the samples of a step come from, relative to full shuffling: 1 is as good.
        For an average step; borders of groups and a shorter last block are left out of account. Without shuffling,
        blocks are taken to be at least as large as a step.

        It matters if the dataset is sorted, such as by class: a step sees fewer classes the less is mixed.
        """
        size = max(self.block_size, self.step_size) if self.shuffle == "none" else self.block_size
        blocks = max(self.n // size, 1)
        full = _distinct_blocks(blocks, size, self.step_size)
        if self.shuffle == "block":
            return _distinct_blocks(min(self.blocks_per_group, blocks), size, self.step_size) / full
        if self.shuffle == "none":
            aligned = math.gcd(self.step_size, size)  # steps begin at multiples of it from the beginning of a block
            return min(1 + (self.step_size - aligned) / size, blocks) / full
        return 1.0

    def _share(self, samples: Positions) -> Positions:
        """The part of a step's samples that the rank takes."""
        if self.shuffle == "block":
            samples = np.sort(samples)
        begin, end = (len(samples) * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return samples[begin:end] if begin < end else samples[begin : begin + 1]


def _permutation(rng: np.random.RandomState, n: int) -> Positions:
    numbers = np.arange(n, dtype=np.int64)
    rng.shuffle(numbers)
    return numbers


def _distinct_blocks(blocks: int, block_size: int, drawn: int) -> float:
    """Average number of different blocks that ``drawn`` samples come from, drawn at random without repetition."""
    total = blocks * block_size
    if drawn > total - block_size:  # no block can be missed
        return float(blocks)
    missed = _log_choose(total - block_size, drawn) - _log_choose(total, drawn)
    return blocks * -math.expm1(missed)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
