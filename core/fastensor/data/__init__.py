"""Training data from LMDB, read at the speed of the disk, in any order that is known ahead. Begin with ``loader.py``
and ``dataset.py``, which users call. ``plan.py`` says which samples a rank takes when, ``reading.py`` reads batches
ahead by one of ``engines/``, ``pages.py`` and ``walk.py`` parse LMDB's pages for ``index.py``, and ``node/`` is one
reader for all processes of a machine. It shares with the data service ``serving.py`` (the server of one machine),
``processes.py`` (how it is found or started), ``connection.py`` (messages) and ``ring.py`` (shared memory)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastensor.data import decoders
    from fastensor.data.coalescing import Merging
    from fastensor.data.dataset import LmdbDataset
    from fastensor.data.index import LmdbIndex
    from fastensor.data.loader import LmdbLoader
    from fastensor.data.plan import EpochPlan
    from fastensor.data.samplers import ReadAheadSampler
    from fastensor.data.staggering import Staggering
else:
    from fastensor.files.importing import on_first_use

    __getattr__ = on_first_use(
        __name__,
        {
            "fastensor.data.coalescing": ("Merging",),
            "fastensor.data.dataset": ("LmdbDataset",),
            "fastensor.data.decoders": (),
            "fastensor.data.index": ("LmdbIndex",),
            "fastensor.data.loader": ("LmdbLoader",),
            "fastensor.data.plan": ("EpochPlan",),
            "fastensor.data.samplers": ("ReadAheadSampler",),
            "fastensor.data.staggering": ("Staggering",),
        },
    )

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
