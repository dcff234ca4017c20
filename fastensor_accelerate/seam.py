"""Names of Accelerate, transformers and PEFT that are replaced while they save or load.

Everything that they write and read goes through four functions: ``torch.save``, ``torch.load``, and ``save_file`` and
``load_file`` of safetensors. Their modules see other ones while :func:`replaced` is active. With ``link_unchanged``, so
does the function of huggingface_hub that splits a model into files. Shards of FSDP go through ``save`` and ``load`` of
``torch.distributed.checkpoint``, which are replaced, too. What decides which rank writes, how tied weights are cleaned,
and which globals are safe to load stays their own code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from fastensor.files.replacing import replace_attribute, replacing

if TYPE_CHECKING:
    from fastensor.checkpoint.dcp.redirect import Redirected
    from fastensor_accelerate.state_files import StateFiles


class _Module(ModuleType):
    """A module in which some names have other values."""

    def __init__(self, module: ModuleType, **names: object) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def replaced(files: StateFiles) -> Iterator[Redirected | None]:
    """Accelerate, and transformers and PEFT if they are imported, save and load by ``files``. One thread at a time.

    Yields:
        How often shards were saved and loaded; None if ``files`` leaves them to torch.
    """
    with replacing() as undo, _shards_replaced(files) as shards:
        all_write = files.saving is not None and files.saving.is_together  # files of models and optimizers
        for name in (*_SEAMS, *[_SAVE] * all_write, *_SPLITS * files.config.link_unchanged):
            module_name, _, attribute = name.rpartition(".")
            module = sys.modules.get(module_name)
            if module is not None and hasattr(module, attribute):
                undo.callback(replace_attribute(module, attribute, _substitute(attribute, files)))
        yield shards


def _shards_replaced(files: StateFiles) -> AbstractContextManager[Redirected | None]:
    if not files.has_shards:
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
_SPLITS = (
    "accelerate.accelerator.split_torch_state_dict_into_shards",  # of older versions
    "huggingface_hub.split_torch_state_dict_into_shards",
    "transformers.modeling_utils.split_torch_state_dict_into_shards",
)
_ONE_OF = {"transformers.modeling_utils.safe_load_file", "transformers.trainer_utils.safe_load_file"}
"""Names of the function that loads shards: the first one in transformers 4, the second one since 5.0."""


def _substitute(name: str, files: StateFiles) -> object:
    """The object that takes the place of one of the names."""
    tensors = _Module(safetensors.torch, save_file=files.save_file, load_file=files.load_file)
    return {
        "torch": _Module(torch, save=files.torch_save, load=files.torch_load),
        "save": files.accelerate_save,
        "safetensors": _Module(safetensors, torch=tensors),
        "load_model": _with_globals(safetensors.torch.load_model, load_file=files.load_file),
        "safe_save_file": files.save_file,
        "split_torch_state_dict_into_shards": files.split_shards,
        "safe_load_file": files.load_file,
    }[name]


def _with_globals(function: Any, **names: object) -> FunctionType:
    """A function of Python with the same code that sees other objects under some global names."""
    seen = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, seen, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
