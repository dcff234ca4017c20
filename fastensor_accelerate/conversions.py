"""Checkpoints whose tensors transformers renames, merges or splits when it loads them, read as the model names them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastensor.errors import UnsupportedContentError
from fastensor_accelerate.weight_files import WeightFiles

_WAY_OUT = (
    "have transformers convert it once: "
    "type(model).from_pretrained(path).save_pretrained(folder, save_original_format=False)"
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of a checkpoint that transformers makes one or more tensors of a model from."""

    converter: Any
    """The ``WeightConverter`` of transformers. It collects tensors, so each conversion takes a copy."""
    target: str
    """The first tensor that is made, by the model's name."""
    dtype: torch.dtype
    """The dtype that the model has it in. ``from_pretrained`` casts tensors before it converts them, so this does."""
    model: weakref.ref[nn.Module]
    sources: list[tuple[str, str, str]] = field(default_factory=list)
    """Each tensor that is needed, in order: its name, its name in the files, and the pattern that it matches."""

    def run(self, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that are made, by the model's names.

        Args:
            read: gives a tensor by its name in the files.
        """
        converter, model = copy.deepcopy(self.converter), self.model()
        for name, stored, pattern in self.sources:
            converter.add_tensor(self.target, name, pattern, read(stored).to(self.dtype))
        made = converter.convert(self.target, model=model, config=getattr(model, "config", None))
        made = made[0] if isinstance(made, tuple) else made  # early versions of transformers 5 add what has failed
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


class ConvertedWeights:
    """Files, and beside their own tensors those that are made of them. These take memory, on the host as well.

    Args:
        files: the files. They are closed with this.
        conversions: by the names of the tensors that they make.
        made: these tensors, on the meta device.
    """

    def __init__(
        self, files: WeightFiles, conversions: Mapping[str, Conversion], made: Mapping[str, torch.Tensor]
    ) -> None:
        self._files = files
        self._made_by = {_key(name): (name, conversion) for name, conversion in conversions.items()}
        self.weights = {**files.weights, **{_key(name): tensor for name, tensor in made.items()}}
        self.ties = files.ties

    def read(self, name: str) -> torch.Tensor:
        if name not in self._made_by:
            return self._files.read(name)
        target, conversion = self._made_by[name]
        tensor = conversion.run(self._files.read)[target]
        # A piece of a larger tensor would keep all of it in memory.
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    def close(self) -> None:
        self._files.close()


def converted(
    files: WeightFiles, names: Mapping[str, str], model: nn.Module, path: str
) -> tuple[WeightFiles, Mapping[str, str]]:
    """Convert a checkpoint as ``from_pretrained`` of transformers 5 does it. No tensor is read.

    Args:
        files: the checkpoint.
        names: its tensors, and what they are called in the files.
        model: the model that needs them. Only a model of transformers is one that anything is converted for.
        path: of the checkpoint, for messages.

    Returns:
        The files, which make the converted tensors, and the names of all tensors as the model has them.

    Raises:
        UnsupportedContentError: transformers cannot convert a tensor before it has read it.
    """
    planned = _plan(files, names, model)
    if planned is None:
        return files, names
    renamed, conversions = planned
    targets, made = dict[str, Conversion](), dict[str, torch.Tensor]()
    for conversion in conversions:
        tensors = _without_data(conversion, files, path)
        made |= tensors
        targets |= dict.fromkeys(tensors, conversion)
    return ConvertedWeights(files, targets, made), renamed | {name: _key(name) for name in targets}


def _plan(
    files: WeightFiles, names: Mapping[str, str], model: nn.Module
) -> tuple[dict[str, str], list[Conversion]] | None:
    """The names of tensors that are only renamed, if at all, and the conversions of the others. None if the model is
    not one of transformers 5."""
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:  # transformers is not installed, or is one before version 5
        return None
    if not isinstance(model, PreTrainedModel):
        return None
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    renamed, conversions = dict[str, str](), dict[str, Conversion]()
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state or pattern is None:
            renamed[target if target in state else name] = names[name]
            continue
        new = Conversion(by_pattern[pattern], target, state[target].dtype, weakref.ref(model))
        conversions.setdefault(target, new).sources.append((name, names[name], pattern))
    return renamed, list(conversions.values())


def _without_data(conversion: Conversion, files: WeightFiles, path: str) -> dict[str, torch.Tensor]:
    """The tensors that a conversion makes, on the meta device."""
    try:
        return conversion.run(files.weights.__getitem__)
    except Exception as error:  # any operation of any model: whatever it raises is told
        raise UnsupportedContentError(
            f"{path}: transformers makes {conversion.target!r} of {conversion.sources[0][0]!r} and others "
            f"({len(conversion.sources)} in all), which failed: {type(error).__name__}: {error}; {_WAY_OUT}"
        ) from error


def _key(name: str) -> str:
    """Name of a converted tensor among those of the files."""
    return f"{name} (converted)"
