"""Shards of FSDP, which ``torch.distributed.checkpoint`` writes. Imported where it is used, since it loads that."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from fastensor.checkpoint.dcp import FastensorStorageWriter
from fastensor.checkpoint.dcp.redirect import save_now
from fastensor_accelerate.config import FastensorConfig


class ShardWriters:
    """Writes the shards of one Accelerator. What it does, all processes do together."""

    def __init__(self) -> None:
        self._writers: dict[str, FastensorStorageWriter] = {}

    def write(
        self, config: FastensorConfig, state_dict: dict[str, Any], path: str | os.PathLike[str], **options: Any
    ) -> None:
        """Save to a directory.

        Args:
            config: the options.
            state_dict: what is saved.
            path: the directory.
            options: as for ``dcp.save``.

        Raises:
            CheckpointWriteError: any process has failed.
        """
        save_now(state_dict, self._writer(config, path), **options)

    def copy(
        self, config: FastensorConfig, state_dict: dict[str, Any], path: str | os.PathLike[str], **options: Any
    ) -> Callable[[], object]:
        """Copy what is to be saved. Returns a function that saves the copy as :meth:`write`, in any thread."""
        writer = self._writer(config, path)
        return partial(save_now, writer.stage(state_dict), writer, **options)

    def _writer(self, config: FastensorConfig, path: str | os.PathLike[str]) -> FastensorStorageWriter:
        """For each kind of directories, such as those of the first optimizer, the same writer, so that its memory for
        copies is used again."""
        kind = os.path.basename(path)
        if kind not in self._writers:
            self._writers[kind] = FastensorStorageWriter(path)
        writer = self._writers[kind]
        writer.sync_files, writer.backend = config.durable, config.backend
        writer.reset(path)
        return writer
