"""The functions by which Accelerate, transformers and PEFT save and load while Fastensor is enabled: at once, later, by
all processes together, or as shards."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
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
from fastensor.checkpoint.models import links
from fastensor.checkpoint.models.ties import area_of, dense_tensors_in
from fastensor.errors import CorruptCheckpointError, NotACheckpointError, UnsupportedContentError
from fastensor_accelerate.config import ConfigError, FastensorConfig
from fastensor_accelerate.saving import StateSave

if TYPE_CHECKING:
    from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter

_MODEL = re.compile(r"model\{suffix\}.*\.safetensors")
"""Names of files of models, which may be several. Those of adapters are not."""
_LAST_SHARD = re.compile(r"model-(\d{5})-of-\1\.safetensors")
_OF_ALL = re.compile(r"(model|pytorch_model|optimizer)(_\d+)?\.(safetensors|bin)")


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
    load_together: bool = False
    """True if all processes load the same files at the same time."""
    damaged: list[CorruptCheckpointError | NotACheckpointError] = field(default_factory=list)
    """Errors of files that are damaged, or no checkpoints."""

    @property
    def is_of_all_processes(self) -> bool:
        """True if all processes write the files of models and optimizers, and not the main one alone."""
        return self.saving is not None and self.saving.is_together

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
        """``safetensors.torch.save_file``."""
        options: dict[str, Any] = {"container": "safetensors", "metadata": metadata}
        if not (self.config.link_unchanged and isinstance(filename, str | os.PathLike)):
            self._write(tensors, filename, **options)
            return
        is_frozen = bool(tensors) and all(self._frozen.has(name, tensor) for name, tensor in tensors.items())
        write = self._link_or_write if is_frozen else self._write
        write(tensors, filename, **options)
        _remove_whole_model(filename)

    def load_file(self, filename: Any, device: str | int = "cpu", **options: Any) -> dict[str, torch.Tensor]:
        """``safetensors.torch.load_file``. Its choice of a way to read is left to Fastensor."""
        links_later = self.config.link_unchanged and self.config.verify and isinstance(filename, str | os.PathLike)
        with links.verifying(filename) if links_later else nullcontext():
            tensors: dict[str, torch.Tensor] = self._load(filename, device)
        return tensors

    def split_shards(self, state_dict: dict[str, torch.Tensor], **options: Any) -> StateDictSplit:
        """``huggingface_hub.split_torch_state_dict_into_shards``. With ``link_unchanged``, tensors of a model that do
        not train are in files of their own."""
        groups: tuple[dict[str, torch.Tensor], ...] = ({}, {})
        for name, tensor in state_dict.items():
            groups[self._frozen.has(name, tensor)][name] = tensor
        pattern = options.get("filename_pattern", "")
        if not (self.config.link_unchanged and all(groups) and _MODEL.fullmatch(pattern)):
            return split_torch_state_dict_into_shards(state_dict, **options)
        splits = [split_torch_state_dict_into_shards(group, **options) for group in groups]
        shards = [names for one in splits for names in one.filename_to_tensors.values()]
        suffixes = (f"-{number:05d}-of-{len(shards):05d}" for number in range(1, len(shards) + 1))
        files = {pattern.format(suffix=suffix): names for suffix, names in zip(suffixes, shards, strict=True)}
        sizes = {"total_size": sum(one.metadata["total_size"] for one in splits)}
        return StateDictSplit(
            metadata={**splits[0].metadata, **sizes},
            filename_to_tensors=files,
            tensor_to_filename={name: file for file, names in files.items() for name in names},
        )

    @cached_property
    def _frozen(self) -> Frozen:
        return Frozen(self.accelerator._models)

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

    def shard_reader(self, path: str | os.PathLike[str]) -> FastensorStorageReader:
        """Takes the place of torch's ``FileSystemReader``."""
        from fastensor.checkpoint.dcp import FastensorStorageReader

        return FastensorStorageReader(path, verify=self.config.verify, backend=self.config.backend)

    def _write(self, obj: object, path: Location, **options: Any) -> None:
        """Write a file. With FSDP, a failure is left to :meth:`StateSave.confirm`: the other processes gather what is
        saved next together with this one."""
        try:
            config = self.config
            options |= {"backend": config.backend, "durable": config.durable}
            self._write_file(obj, path, share_unchanged=config.share_unchanged, **options)
        except Exception as error:
            if self.saving is None or not self.has_shards:
                raise
            self.saving.failure = self.saving.failure or error

    def _write_file(self, obj: object, path: Location, **options: Any) -> None:
        saving = self.saving
        if saving is None or not isinstance(path, str | os.PathLike):
            fastensor.save(obj, path, **options)
        elif self.writer is not None:
            saving.handles.append(self.writer.save(obj, path, **options))
        else:
            self._count(fastensor.save(obj, path, **options))

    def _link_or_write(self, tensors: dict[str, torch.Tensor], path: str | os.PathLike[str], **options: Any) -> None:
        """Link a file of tensors that do not train to an earlier one. What has to be written can be linked later."""
        metadata, durable = options["metadata"], self.config.durable
        if (report := links.link_unchanged(tensors, path, metadata=metadata, durable=durable)) is not None:
            self._count(report)
            return
        self._write(tensors, path, **options)
        if self.saving is None or (self.writer is None and self.saving.failure is None):
            links.remember(path)
        elif self.writer is not None and self.saving.failure is None:
            self.saving.handles[-1].add_done_callback(_remember)

    def _count(self, report: fastensor.SaveReport) -> None:
        if self.saving is not None:
            self.saving.nbytes += report.nbytes
            self.saving.shared_nbytes += report.shared_nbytes

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


class Frozen:
    """The parameters of models that do not train, which state dicts do not tell from others.

    Args:
        models: that an Accelerator has prepared.
    """

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        named = [one for model in models for one in model.named_parameters(remove_duplicate=False)]
        frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self._names = {name for name, _ in frozen}
        self._areas = {area for _, parameter in frozen if (area := area_of(parameter)) is not None}

    def has(self, name: str, tensor: torch.Tensor) -> bool:
        """True if a tensor of a state dict is one of them: by its name, as in the model, or by its memory, which it has
        where the name is another one."""
        return name in self._names or area_of(tensor) in self._areas


def _remember(handle: fastensor.SaveHandle) -> None:
    if handle.stage == "durable":
        links.remember(handle.path)


def _remove_whole_model(shard: str | os.PathLike[str]) -> None:
    """Remove the file of a model in one file when the last shard of a new one is there: readers would prefer the old
    file to the index."""
    folder, name = os.path.split(shard)
    if _LAST_SHARD.fullmatch(name):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, "model.safetensors"))


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
