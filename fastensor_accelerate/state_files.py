"""The functions by which Accelerate, transformers and PEFT save and load while Fastensor is enabled: at once, later, by
all processes together, or as shards."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import accelerate
import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import clean_state_dict_for_safetensors
from huggingface_hub.serialization import (  # type: ignore[attr-defined]  # exported without saying so
    StateDictSplit,
    split_torch_state_dict_into_shards,
)

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.models.sharded import SHARD_NBYTES, WHOLE, alone_in, complete, new_shards
from fastensor.checkpoint.models.ties import dense_tensors_in, frozen_among
from fastensor.checkpoint.writing.save_transaction import ShareOrLink
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor.files.arguments import as_nbytes
from fastensor_accelerate.config import ConfigError, FastensorConfig
from fastensor_accelerate.saving import StateSave

if TYPE_CHECKING:
    from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter

_MODEL = "model{suffix}.safetensors"
"""The pattern of names of the files of a model. Adapters have another one."""
_OF_ALL = re.compile(r"(model|pytorch_model|optimizer)(_\d+)?\.(safetensors|bin)")


class _EveryFile(dict[str, list[str]]):
    """The tensors by files. ``in`` says of every file that it is one of them, so that transformers removes none: the
    model that was there stays until the new one is complete."""

    def __contains__(self, name: object) -> bool:
        return True

    def keys(self) -> Any:  # in which transformers 4 looks
        return self


@dataclass(frozen=True, eq=False)
class StateFiles:
    """The functions that take the place of theirs. They are called in the thread that trains."""

    accelerator: Accelerator
    config: FastensorConfig
    loaded: Callable[[fastensor.LoadReport], None]
    """Called with the report of every load."""
    saving: StateSave | None = None
    """The state that the files are part of; None if each of them is saved for itself, at once."""
    writer: fastensor.AsyncWriter | None = None
    """Writes the files of ``saving`` later."""
    shard_writers: dict[str, FastensorStorageWriter] = field(default_factory=dict)
    """By kind of directories, such as those of the first optimizer, so that memory for copies is used again."""
    max_shard_sizes: dict[str, int | str] = field(default_factory=dict)
    """By name of the file, the size of the files into which :meth:`save_file` splits the model that it gets next."""
    links: bool = True
    """False if no file may become a hard link, or be linked to later."""
    load_together: bool = False
    """True if all processes load the same files at the same time."""
    damaged: list[CorruptCheckpointError | NotACheckpointError] = field(default_factory=list)
    """Errors of files that are damaged, or no checkpoints."""

    @property
    def has_shards(self) -> bool:
        """True if FSDP may have processes save and load shards."""
        return bool(self.accelerator.distributed_type == DistributedType.FSDP)

    def torch_save(self, obj: object, f: Location, *args: Any, **options: Any) -> None:
        """``torch.save``. With other arguments than object and file, torch writes the file itself."""
        if args or options:
            torch.save(obj, f, *args, **options)
        else:
            self._write(obj, f, container="torch")

    def torch_load(self, f: Location, map_location: Any = None, **options: Any) -> Any:
        """``torch.load``. With options that Fastensor does not have, torch reads the file itself."""
        if set(options) - {"weights_only", "mmap"}:
            return torch.load(f, map_location=map_location, **options)
        options["mmap"] = bool(options.get("mmap"))
        return self._load(f, map_location, **options)

    def save_file(
        self, tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None = None
    ) -> None:
        """``safetensors.torch.save_file``. What :meth:`split_shards` has left in one file is several."""
        options: dict[str, Any] = {"container": "safetensors", "metadata": metadata}
        largest = self.max_shard_sizes.pop(os.path.basename(filename), None) if self.config.link_unchanged else None
        if largest is None:
            self._write(tensors, filename, **options)
        else:
            folder = os.path.dirname(os.path.abspath(filename))
            self._write_model(tensors, folder, as_nbytes(largest, "max_shard_size", at_least=1), **options)

    def load_file(self, filename: Any, device: str | int = "cpu", **options: Any) -> dict[str, torch.Tensor]:
        """``safetensors.torch.load_file``. Its choice of a way to read is left to Fastensor."""
        tensors: dict[str, torch.Tensor] = self._load(filename, device)
        return tensors

    def split_shards(self, state_dict: dict[str, Any], **options: Any) -> StateDictSplit:
        """``huggingface_hub.split_torch_state_dict_into_shards``. A model is one file here, which :meth:`save_file`
        splits when it knows the folder. What is no tensor, or has no values yet, is left to the stock function."""
        has_values = all(isinstance(one, torch.Tensor) and not one.is_meta for one in state_dict.values())
        if options.get("filename_pattern") != _MODEL or not has_values:
            return split_torch_state_dict_into_shards(state_dict, **options)
        file = WHOLE[0]
        self.max_shard_sizes[file] = options.get("max_shard_size", SHARD_NBYTES)
        return StateDictSplit({}, _EveryFile({file: [*state_dict]}), dict.fromkeys(state_dict, file))

    def accelerate_save(
        self, obj: object, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
    ) -> None:
        """``accelerate.utils.save``, called in all processes. Other files are those of the main process alone."""
        if save_on_each_node or not _is_of_all(f):
            accelerate.utils.save(obj, f, save_on_each_node, safe_serialization)
        elif not safe_serialization:
            self._write_together(obj, f, container="torch")
        else:  # as there
            tensors = clean_state_dict_for_safetensors(obj) if isinstance(obj, OrderedDict) else obj
            self._write_together(tensors, f, container="safetensors", metadata={"format": "pt"})

    def write_shards(self, state_dict: dict[str, Any], path: str | os.PathLike[str], **options: Any) -> None:
        """``dcp.save``: write shards, with all processes, or copy them if they are to be written later."""
        from fastensor.checkpoint.dcp.redirect import save_shards  # loads torch.distributed.checkpoint

        later = None
        if self.saving is not None:
            self.saving.folders_of_shards.append(os.fspath(path))
            if self.config.asynchronous:
                later, options["process_group"] = self.saving.shards, self.saving.agreement.group
        kind, writers = os.path.basename(path), self.shard_writers
        writers[kind] = save_shards(
            state_dict, path, writers.get(kind), later,
            durable=self.config.durable, backend=self.config.backend, share_unchanged=self.config.share_unchanged,
            **options,
        )  # fmt: skip
        if self.saving is not None and later is None:  # copies share nothing
            self.saving.shared_nbytes += writers[kind].shared_nbytes

    def shard_reader(self, path: str | os.PathLike[str]) -> FastensorStorageReader:
        """Takes the place of torch's ``FileSystemReader``."""
        from fastensor.checkpoint.dcp import FastensorStorageReader

        return FastensorStorageReader(path, verify=self.config.verify, backend=self.config.backend)

    def _write(self, obj: object, path: Location, **options: Any) -> None:
        """Write a file."""
        with self._leaving_failures():
            self._write_file(obj, path, share_unchanged=self.config.share_unchanged, **options)

    def _write_model(self, tensors: dict[str, torch.Tensor], folder: str, largest: int, **options: Any) -> None:
        """Write a model as :func:`fastensor.save_sharded` does by links: its index when all files are durable. If that
        is later, the folder is not locked until then."""
        with self._leaving_failures(), alone_in(folder):
            models = self.accelerator._models
            apart = frozen_among(tensors, [one for model in models for one in model.parameters()])
            sizes = {name: one.nbytes for name, one in tensors.items()}
            shards = new_shards(folder, sizes, largest, apart)
            for file, names in shards.items():
                linked: ShareOrLink = "link" if self.links else False  # a file that shares nothing is not remembered
                how = linked if apart.issuperset(names) else self.config.share_unchanged
                some = {name: tensors[name] for name in names}
                self._write_file(some, os.path.join(folder, file), share_unchanged=how, **options)
            index = {"total_size": sum(sizes.values())}
            finish = partial(complete, folder, shards, index, durable=self.config.durable)
            if self.saving is not None and self.writer is not None:
                self.saving.afterwards.append(finish)
            else:
                finish()

    @contextmanager
    def _leaving_failures(self) -> Iterator[None]:
        """With FSDP, leave a failure to :meth:`StateSave.confirm`: the other processes gather what is saved next
        together with this one."""
        try:
            yield
        except Exception as error:
            if self.saving is None or not self.has_shards:
                raise
            self.saving.failure = self.saving.failure or error

    def _write_file(self, obj: object, path: Location, **options: Any) -> None:
        saving = self.saving
        options |= {"backend": self.config.backend, "durable": self.config.durable}
        if saving is None or not isinstance(path, str | os.PathLike):
            fastensor.save(obj, path, **options)
        elif self.writer is not None:
            saving.handles.append(self.writer.save(obj, path, **options))
        else:
            report = fastensor.save(obj, path, **options)
            saving.nbytes += report.nbytes
            saving.shared_nbytes += report.shared_nbytes

    def _write_together(self, obj: object, path: str | os.PathLike[str], **options: Any) -> None:
        """Write a file, called in all processes. What is not replicated by data parallel training is the main one's."""
        if os.path.basename(path).startswith("optimizer"):
            replicated = list(dense_tensors_in(obj))
        else:
            replicated = [weight for model in self.accelerator._models for weight in model.parameters()]
        config, saving = self.config, self.saving
        how: dict[str, Any] = {"backend": config.backend, "durable": config.durable, **options}
        report = cooperative.save(obj, path, replicated=replicated, timeout=config.cooperative_timeout, **how)
        if saving is not None and saving.is_main:
            saving.nbytes += report.nbytes

    def _load(self, path: Location, map_location: Any, **options: Any) -> Any:
        verify = self.config.verify and not options.get("mmap")
        try:
            if self.load_together and not options.get("mmap") and _is_of_all(path):
                found, report = cooperative.load_with_report(
                    path,
                    map_location,
                    timeout=self.config.cooperative_timeout,
                    weights_only=options.get("weights_only"),
                    verify=verify,
                )
            else:
                found, report = fastensor.load_with_report(
                    path, map_location, verify=verify, backend=self.config.backend, **options
                )
        except (CorruptCheckpointError, NotACheckpointError) as error:
            self.damaged.append(error)
            raise
        self.loaded(report)
        return found


def _is_of_all(path: object) -> TypeGuard[str | os.PathLike[str]]:
    """True if a file is that of a model or an optimizer, which all processes hold alike."""
    return isinstance(path, str | os.PathLike) and _OF_ALL.fullmatch(os.path.basename(path)) is not None


def check_shards(accelerator: Accelerator, number: int) -> None:
    """See that the shards of FSDP went through Fastensor.

    Args:
        accelerator: has saved or loaded.
        number: how often they did.

    Raises:
        UnsupportedContentError: none did.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if number or plugin is None:
        return
    if plugin.state_dict_type.name != "SHARDED_STATE_DICT" or not accelerator._models:
        return
    raise UnsupportedContentError(
        "this version of Accelerate saves or loads SHARDED_STATE_DICT in a way that is not known to "
        "fastensor_accelerate; use another version of one of them, or fastensor_accelerate.disable()"
    )


def check_cooperation(accelerator: Accelerator, config: FastensorConfig) -> None:
    """
    Raises:
        ConfigError: processes are to save together, and do not hold the same.
    """
    kind = accelerator.distributed_type.value
    if config.cooperative and kind != "NO" and not kind.startswith("MULTI_"):
        raise ConfigError(
            f"cooperative is for data parallel training (DDP), whose processes hold the same state; found {kind}: "
            f"leave it out"
        )


def nbytes_of(value: object) -> int:
    """The bytes of the storages of all tensors in nested dicts and lists. Those that share a storage count once.

    >>> shared = torch.zeros(6)
    >>> nbytes_of([{"a": shared, "b": shared[:2]}, (torch.zeros(1), "no tensor")])
    28
    """
    storages = (tensor.untyped_storage() for tensor in dense_tensors_in(value))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
