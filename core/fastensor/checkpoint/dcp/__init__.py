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

try:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager as _StateDictStager
    from torch.distributed.checkpoint.filesystem import SerializationFormat as _SerializationFormat
except ImportError as error:
    raise ImportError(
        f"fastensor.checkpoint.dcp needs a newer torch.distributed.checkpoint than that of this torch ({error}); "
        f"update torch, or save with torch's own FileSystemWriter"
    ) from error

from fastensor.checkpoint.dcp.reader import FastensorStorageReader
from fastensor.checkpoint.dcp.writer import FastensorStorageWriter

__all__ = ["FastensorStorageReader", "FastensorStorageWriter"]
del _StateDictStager, _SerializationFormat
