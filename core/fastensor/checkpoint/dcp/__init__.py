"""Storage for ``torch.distributed.checkpoint``: shards with checksums, written durably by the backends of Fastensor.

:class:`FastensorStorageWriter` and :class:`FastensorStorageReader` take the place of torch's ``FileSystemWriter`` and
``FileSystemReader``. Planners, metadata, resharding and asynchronous saves are torch's own.

>>> import tempfile, torch
>>> import torch.distributed.checkpoint as dcp
>>> from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
>>> folder = tempfile.mkdtemp()
>>> _ = dcp.save({"weight": torch.arange(3)}, storage_writer=FastensorStorageWriter(folder), no_dist=True)
>>> state = {"weight": torch.zeros(3, dtype=torch.int64)}
>>> dcp.load(state, storage_reader=FastensorStorageReader(folder), no_dist=True)
>>> state["weight"]
tensor([0, 1, 2])
"""

from __future__ import annotations

from fastensor.checkpoint.dcp.reader import FastensorStorageReader
from fastensor.checkpoint.dcp.writer import FastensorStorageWriter

__all__ = ["FastensorStorageReader", "FastensorStorageWriter"]
