"""Training data from LMDB, read at the speed of the disk, in any order that is known ahead."""

from fastensor.data import decoders
from fastensor.data.coalescing import Merging
from fastensor.data.dataset import LmdbDataset
from fastensor.data.index import LmdbIndex
from fastensor.data.loader import LmdbLoader
from fastensor.data.plan import EpochPlan
from fastensor.data.samplers import ReadAheadSampler
from fastensor.data.staggering import Staggering

__all__ = [
    "EpochPlan",
    "LmdbDataset",
    "LmdbIndex",
    "LmdbLoader",
    "Merging",
    "ReadAheadSampler",
    "Staggering",
    "decoders",
]
