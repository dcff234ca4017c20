"""The engine ``kvikio``: values go to a GPU, past the memory of the host where the system has GPUDirect Storage."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack, suppress
from typing import Any

import torch

from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.backends.gds import errors_translated, opened
from fastensor.data.coalescing import Extents, Merging, coalesce
from fastensor.data.engines.base import Fetch, ReadsFetch
from fastensor.errors import BackendUnavailableError


class KvikioEngine:
    """Values are tensors of uint8 on the current CUDA device. See :class:`fastensor.data.engines.base.Engine`.

    Worker processes of a ``DataLoader`` that are forked cannot use CUDA: use ``num_workers=0``.

    Args:
        fd: open for reading. The caller keeps ownership.
        merging: what is read together.

    Raises:
        BackendUnavailableError: kvikio or CUDA cannot be used, or cannot open the file.
    """

    name = "kvikio"
    reads_ahead = True

    def __init__(self, fd: int, merging: Merging) -> None:
        if not torch.cuda.is_available():
            raise BackendUnavailableError("the engine kvikio reads to GPUs, and torch finds none")
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._merging = merging
        resources = ExitStack()
        self._file = resources.enter_context(opened(fd, "r"))
        self._under_way: dict[int, tuple[Any, torch.Tensor]] = {}
        """kvikio's futures that nobody has waited for, and the memory that they fill: it must not be freed before."""
        self._count = 0
        self.close = weakref.finalize(self, _close, self._under_way, resources, os.getpid())

    def fetch(self, extents: Extents) -> Fetch:
        reads = coalesce(extents, self._merging)
        offsets, lengths = reads.offsets.tolist(), reads.lengths.tolist()
        begun: dict[int, tuple[int, Any, torch.Tensor]] = {}

        def begin(read: int) -> None:
            begun[read] = self._begin(offsets[read], lengths[read])

        def finish(read: int) -> torch.Tensor:
            number, future, memory = begun.pop(read)
            with errors_translated():
                filled = int(future.get())
            self._under_way.pop(number, None)
            return memory[:filled]

        return ReadsFetch(extents, reads, begin, finish)

    def _begin(self, offset: int, nbytes: int) -> tuple[int, Any, torch.Tensor]:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()  # queued work may use the memory; kvikio knows no streams
        for number in [number for number, (future, _) in self._under_way.items() if future.done()]:
            del self._under_way[number]
        with errors_translated():
            future = self._file.pread(memory, nbytes, offset, BUFFER_NBYTES)
        self._count += 1
        self._under_way[self._count] = future, memory
        return self._count, future, memory


def _close(under_way: dict[int, tuple[Any, torch.Tensor]], resources: ExitStack, process: int) -> None:
    if os.getpid() != process:
        return  # nobody finishes kvikio's futures in a forked child
    for future, _ in under_way.values():
        with suppress(OSError, BackendUnavailableError), errors_translated():  # nobody wants these bytes any more
            future.get()
    under_way.clear()
    resources.close()
