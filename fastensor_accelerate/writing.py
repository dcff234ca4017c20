"""Writing the files of states: at once, later, by all processes together, or as shards."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator, DistributedType

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.models.ties import dense_tensors_in
from fastensor.errors import UnsupportedContentError
from fastensor_accelerate.config import ConfigError, FastensorConfig
from fastensor_accelerate.saving import StateSave
from fastensor_accelerate.seam import Files, Write

if TYPE_CHECKING:
    from fastensor.checkpoint.dcp import FastensorStorageWriter


class StateWriter:
    """Writes the files of one Accelerator's states. Call it in the thread that trains."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._writer: fastensor.AsyncWriter | None = None
        self._shards: dict[str, FastensorStorageWriter] = {}
        """By kind of directories, such as those of the first optimizer, so that memory for copies is used again."""

    def asynchronous(self, config: FastensorConfig) -> fastensor.AsyncWriter:
        """Writer of asynchronous saves, made by the first call."""
        if self._writer is None:
            self._writer = fastensor.AsyncWriter(**config.writer_options())
        return self._writer

    def wait(self) -> None:
        """Wait for the files that are pending.

        Raises:
            Exception: what a save has failed with.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Give memory back. The writer can be used again."""
        self._shards.clear()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def files(self, config: FastensorConfig, saving: StateSave | None = None, **options: Any) -> Files:
        """Functions that take the place of those by which Accelerate saves and loads.

        Args:
            config: the options.
            saving: the state that the files are part of; None if each of them is saved for itself, at once.
            options: fields of :class:`Files`.
        """
        how: dict[str, Any] = {"backend": config.backend, "durable": config.durable}
        write: Write = partial(_write_now, saving, **how)
        if saving is not None and config.asynchronous:
            write = partial(_write_later, saving, self.asynchronous(config), **how)
        shards, together = None, None
        if self._accelerator.distributed_type == DistributedType.FSDP:
            shards = partial(self._write_shards, config, saving)
            write = write if saving is None else partial(_note_failure, saving, write)
        if saving is not None and saving.is_together:
            together = partial(self._write_together, saving, timeout=config.cooperative_timeout, **how)
        return Files(config, write, shards, write_together=together, **options)

    def check_shards(self, number: int) -> None:
        """See that the shards of FSDP went through Fastensor.

        Args:
            number: how often they did.

        Raises:
            UnsupportedContentError: none did.
        """
        plugin = getattr(self._accelerator.state, "fsdp_plugin", None)
        if number or plugin is None:
            return
        if plugin.state_dict_type.name != "SHARDED_STATE_DICT" or not self._accelerator._models:
            return
        raise UnsupportedContentError(
            "this version of Accelerate saves or loads SHARDED_STATE_DICT in a way that is not known to "
            "fastensor_accelerate; use another version of one of them, or fastensor_accelerate.disable()"
        )

    def check_cooperation(self, config: FastensorConfig) -> None:
        """
        Raises:
            ConfigError: processes are to save together, and do not hold the same.
        """
        kind = self._accelerator.distributed_type.value
        if config.cooperative and kind != "NO" and not kind.startswith("MULTI_"):
            raise ConfigError(
                f"cooperative is for data parallel training (DDP), whose processes hold the same state; found {kind}: "
                f"leave it out"
            )

    def _write_together(self, saving: StateSave, obj: object, path: Location, **options: Any) -> None:
        """Write a file, called in all processes. What is not replicated by data parallel training is the main one's."""
        assert isinstance(path, str | os.PathLike)
        if os.path.basename(path).startswith("optimizer"):
            replicated = list(dense_tensors_in(obj))
        else:
            replicated = [weight for model in self._accelerator._models for weight in model.parameters()]
        report = cooperative.save(obj, path, replicated=replicated, **options)
        if saving.is_main:
            saving.metrics.nbytes += report.nbytes

    def _write_shards(
        self,
        config: FastensorConfig,
        saving: StateSave | None,
        state_dict: dict[str, Any],
        path: str | os.PathLike[str],
        **options: Any,
    ) -> None:
        """Write shards, or copy them if they are to be written later."""
        from fastensor.checkpoint.dcp import FastensorStorageWriter  # loads torch.distributed.checkpoint
        from fastensor.checkpoint.dcp.redirect import save_now

        kind = os.path.basename(path)
        writer = self._shards[kind] = self._shards.get(kind) or FastensorStorageWriter(path)
        writer.sync_files, writer.backend = config.durable, config.backend
        writer.reset(path)
        if saving is not None:
            saving.folders_of_shards.append(os.fspath(path))
        if saving is None or not config.asynchronous:
            save_now(state_dict, writer, **options)
        else:
            options["process_group"] = saving.agreement.group
            saving.shards.append(partial(save_now, writer.stage(state_dict), writer, **options))


def _write_now(saving: StateSave | None, obj: object, path: Location, **options: Any) -> None:
    report = fastensor.save(obj, path, **options)
    if saving is not None:
        saving.metrics.nbytes += report.nbytes


def _write_later(saving: StateSave, writer: fastensor.AsyncWriter, obj: object, path: Location, **options: Any) -> None:
    if isinstance(path, str | os.PathLike):
        saving.handles.append(writer.save(obj, path, **options))
    else:
        _write_now(saving, obj, path, **options)


def _note_failure(saving: StateSave, write: Write, *args: Any, **options: Any) -> None:
    """Write a file, and leave a failure to :meth:`StateSave.confirm`: the other processes of FSDP gather what is
    saved next together with this one."""
    try:
        write(*args, **options)
    except Exception as error:  # noqa: BLE001  # raised when the other processes know
        saving.failure = saving.failure or error


def nbytes_of(value: object) -> int:
    """The bytes of the storages of all tensors in nested dicts and lists. Those that share a storage count once.

    >>> import torch
    >>> shared = torch.zeros(6)
    >>> nbytes_of([{"a": shared, "b": shared[:2]}, (torch.zeros(1), "no tensor")])
    28
    """
    storages = (tensor.untyped_storage() for tensor in dense_tensors_in(value))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
