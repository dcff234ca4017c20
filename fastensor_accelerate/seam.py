"""Which names of Accelerate's modules are replaced while a state is saved or loaded, and by what.

Everything that Accelerate writes and reads goes through four functions: ``torch.save``, ``torch.load``, and
``save_file`` and ``load_file`` of safetensors. Accelerate's modules see other ones while :func:`replaced` is active.
What decides which rank writes, how tied weights are cleaned, and which globals are safe to load stays Accelerate's own
code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Protocol

import accelerate.accelerator
import accelerate.checkpointing
import accelerate.utils.fsdp_utils
import accelerate.utils.other
import torch

import fastensor
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.save import SavedContainer
from fastensor_accelerate.config import FastensorConfig


class Write(Protocol):
    """Writes one file."""

    def __call__(self, obj: object, path: Location, *, container: SavedContainer, **options: Any) -> None: ...


@dataclass(frozen=True)
class Files:
    """The four functions, by Fastensor.

    Args:
        config: the options.
        write: writes a file: takes what :func:`fastensor.save` takes.
        loaded: called with the report of every load.
    """

    config: FastensorConfig
    write: Write
    loaded: Callable[[fastensor.LoadReport], None]

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

    def _load(self, path: Location, map_location: Any, **options: Any) -> Any:
        verify = self.config.verify and not options.get("mmap")
        found, report = fastensor.load_with_report(
            path, map_location, verify=verify, backend=self.config.backend, **options
        )
        self.loaded(report)
        return found


class _Torch(ModuleType):
    """The module ``torch`` with another ``save`` and ``load``."""

    def __init__(self, files: Files) -> None:
        super().__init__("torch")
        self.save = files.torch_save
        self.load = files.torch_load

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def replaced(files: Files) -> Iterator[None]:
    """Accelerate's modules save and load by ``files`` in the block."""
    own_torch = _Torch(files)
    with ExitStack() as undo:
        for module in _MODULES_WITH_TORCH:
            undo.enter_context(_replaced_name(module, "torch", own_torch))
        undo.enter_context(_replaced_name(accelerate.utils.other, "safe_save_file", files.save_file))
        load_model = _with_globals(accelerate.checkpointing.load_model, load_file=files.load_file)
        undo.enter_context(_replaced_name(accelerate.checkpointing, "load_model", load_model))
        yield


_MODULES_WITH_TORCH: tuple[ModuleType, ...] = (
    accelerate.accelerator,
    accelerate.checkpointing,
    accelerate.utils.fsdp_utils,
    accelerate.utils.other,
)


@contextmanager
def _replaced_name(module: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _with_globals(function: Any, **names: Any) -> Any:
    """A function with the same code that sees other objects under some global names."""
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
