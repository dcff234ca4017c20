"""Names of Accelerate, transformers and PEFT that are replaced while they save or load.

Everything that they write and read goes through four functions: ``torch.save``, ``torch.load``, and ``save_file`` and
``load_file`` of safetensors. Their modules see other ones while :func:`replaced` is active. Shards of FSDP go through
``save`` and ``load`` of ``torch.distributed.checkpoint``, which are replaced, too. What decides which rank writes, how
tied weights are cleaned, and which globals are safe to load stays their own code.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import accelerate
import safetensors.torch
import torch
from accelerate import DistributedType, PartialState

import fastensor
from fastensor.checkpoint import cooperative
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.writing.save import SavedContainer
from fastensor.errors import CorruptCheckpointError, NotACheckpointError
from fastensor.files.replacing import replace_attribute, replacing
from fastensor_accelerate.config import FastensorConfig

if TYPE_CHECKING:
    from fastensor.checkpoint.dcp import FastensorStorageReader
    from fastensor.checkpoint.dcp.redirect import Redirected


class Write(Protocol):
    """Writes one file."""

    def __call__(self, obj: object, path: Location, *, container: SavedContainer, **options: Any) -> None: ...


@dataclass(frozen=True)
class Files:
    """The functions, by Fastensor.

    Args:
        config: the options.
        write: writes a file: takes what :func:`fastensor.save` takes.
        write_shards: writes the shards of this process, with all processes: takes what ``dcp.save`` takes, and a path.
            None leaves shards to torch.
        loaded: called with the report of every load.
        damaged: gets the errors of files that are damaged, or no checkpoints.
        write_together: writes the file of a model or an optimizer, called in all processes, of which each holds the
            same; None if the main process writes alone, as Accelerate does.
        load_together: whether all processes load the same files at the same time.
    """

    config: FastensorConfig
    write: Write
    write_shards: Callable[..., None] | None
    loaded: Callable[[fastensor.LoadReport], None]
    damaged: list[CorruptCheckpointError | NotACheckpointError] = field(default_factory=list)
    write_together: Write | None = None
    load_together: bool = False

    def torch_save(self, obj: object, f: Location, *args: Any, **options: Any) -> None:
        """``torch.save``. With other arguments than object and file, torch writes the file itself."""
        if args or options:
            torch.save(obj, f, *args, **options)
        else:
            self.write(obj, f, container="torch")

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
        self.write(tensors, filename, container="safetensors", metadata=metadata)

    def load_file(self, filename: Any, device: str | int = "cpu", **options: Any) -> dict[str, torch.Tensor]:
        """``safetensors.torch.load_file``. Its choice of a way to read is left to Fastensor."""
        tensors: dict[str, torch.Tensor] = self._load(filename, device)
        return tensors

    def accelerate_save(
        self, obj: object, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
    ) -> None:
        """``accelerate.utils.save``, in all processes. Its own code prepares what is saved."""
        if save_on_each_node or not _is_of_all(f):
            accelerate.utils.save(obj, f, save_on_each_node, safe_serialization)
            return
        assert self.write_together is not None
        together = replace(self, write=self.write_together)
        save = _with_globals(
            accelerate.utils.save,
            PartialState=_EachIsMain,
            torch=_substitute("torch", together),
            safe_save_file=together.save_file,
        )
        save(obj, f, False, safe_serialization)

    def shard_reader(self, path: str | os.PathLike[str]) -> FastensorStorageReader:
        """Takes the place of torch's ``FileSystemReader``."""
        from fastensor.checkpoint.dcp import FastensorStorageReader

        return FastensorStorageReader(path, verify=self.config.verify, backend=self.config.backend)

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


class _EachIsMain:
    """Stands for ``PartialState`` where each process saves."""

    is_main_process = True

    @property
    def distributed_type(self) -> DistributedType:
        found: DistributedType = PartialState().distributed_type
        return found


def _is_of_all(path: object) -> TypeGuard[str | os.PathLike[str]]:
    """True if a file is that of a model or an optimizer, which all processes hold alike."""
    return isinstance(path, str | os.PathLike) and _OF_ALL.fullmatch(os.path.basename(path)) is not None


class _Module(ModuleType):
    """A module in which some names have other values."""

    def __init__(self, module: ModuleType, **names: object) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


_OF_ALL = re.compile(r"(model|pytorch_model|optimizer)(_\d+)?\.(safetensors|bin)")


@contextmanager
def replaced(files: Files) -> Iterator[Redirected | None]:
    """Accelerate, and transformers and PEFT if they are imported, save and load by ``files``. One thread at a time.

    Yields:
        How often shards were saved and loaded; None if ``files`` leaves them to torch.
    """
    with replacing() as undo, _shards_replaced(files) as shards:
        for name in (*_SEAMS, *[_SAVE] * (files.write_together is not None)):
            module_name, _, attribute = name.rpartition(".")
            module = sys.modules.get(module_name)
            if module is not None and hasattr(module, attribute):
                undo.callback(replace_attribute(module, attribute, _substitute(attribute, files)))
        yield shards


def _shards_replaced(files: Files) -> AbstractContextManager[Redirected | None]:
    if files.write_shards is None:
        return nullcontext()
    from fastensor.checkpoint.dcp.redirect import redirected

    return redirected(save=files.write_shards, reader=files.shard_reader)


def missing_seams(package: str) -> list[str]:
    """The names that this version of a package does not have, so that what it saves or loads there is not seen."""
    names = [name for name in _SEAMS if name.startswith(f"{package}.")]
    missing = [name for name in names if not hasattr(sys.modules.get(name.rpartition(".")[0]), name.rpartition(".")[2])]
    return missing if {*missing} >= _ONE_OF else [name for name in missing if name not in _ONE_OF]


_SAVE = "accelerate.checkpointing.save"
"""Name of the function that decides that the main process writes alone."""
_SEAMS = (
    "accelerate.accelerator.torch",
    "accelerate.checkpointing.torch",
    "accelerate.checkpointing.load_model",
    "accelerate.utils.fsdp_utils.torch",
    "accelerate.utils.other.torch",
    "accelerate.utils.other.safe_save_file",
    "peft.peft_model.safe_save_file",
    "peft.utils.save_and_load.safe_load_file",
    "transformers.modeling_utils.safe_load_file",
    "transformers.modeling_utils.safe_save_file",
    "transformers.trainer.safetensors",
    "transformers.trainer.torch",
    "transformers.trainer_utils.safe_load_file",
    "transformers.trainer_utils.torch",
)
_ONE_OF = {"transformers.modeling_utils.safe_load_file", "transformers.trainer_utils.safe_load_file"}
"""Names of the function that loads shards: the first one in transformers 4, the second one since 5.0."""


def _substitute(name: str, files: Files) -> object:
    if name == "torch":
        return _Module(torch, save=files.torch_save, load=files.torch_load)
    if name == "save":
        return files.accelerate_save
    if name == "safetensors":
        return _Module(
            safetensors, torch=_Module(safetensors.torch, save_file=files.save_file, load_file=files.load_file)
        )
    if name == "load_model":
        return _with_globals(safetensors.torch.load_model, load_file=files.load_file)
    return files.save_file if name == "safe_save_file" else files.load_file


def _with_globals(function: Any, **names: object) -> FunctionType:
    """A function of Python with the same code that sees other objects under some global names."""
    seen = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
