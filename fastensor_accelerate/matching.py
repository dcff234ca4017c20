"""Matching the tensors of a checkpoint with those of a model."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from accelerate.utils import check_tied_parameters_in_config, find_tied_parameters
from torch import nn

from fastensor.errors import FastensorError, UnknownKeyError, UnsupportedContentError
from fastensor.files.words import counted
from fastensor_accelerate.conversions import converted
from fastensor_accelerate.weight_files import WeightFiles


def match(files: WeightFiles, path: str, prefix: str, model: nn.Module | None) -> tuple[WeightFiles, Mapping[str, str]]:
    """Find a model's tensors in a checkpoint. No tensor is read.

    Args:
        files: the checkpoint.
        path: of the checkpoint, for messages.
        prefix: what names begin with before those of the model.
        model: the model; None takes all tensors that begin with the prefix.

    Returns:
        The files, which may convert tensors; and the names of tensors as the model has them, with their names there.

    Raises:
        UnknownKeyError: no name has the prefix; the checkpoint lacks a parameter, a persistent buffer or an extra state
            of the model; or another buffer of the model is on the meta device.
        UnsupportedContentError: a tensor has another shape than the model's, or cannot be converted.
    """
    names = {name[len(prefix) :]: files.ties.get(name, name) for name in files.weights if name.startswith(prefix)}
    if not names:
        some = ", ".join([*map(repr, islice(files.weights, 3)), "…"])
        raise UnknownKeyError(
            f"{path}: expected names that begin with {prefix!r}, found {some}"
            if files.weights
            else f"{path}: there are no tensors in it"
        )
    if model is None:
        return files, names
    _check_computed_buffers(model, path)
    found = _with_ties(names, model)
    if _misfit(files, path, found, model) is not None:
        files, converted_names = converted(files, names, model, path)
        found = _with_ties(converted_names, model)
        if (error := _misfit(files, path, found, model)) is not None:
            raise error
    _check_extra_states(found, model, path)
    return files, found


def parameters_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters in the order of the modules, tied ones under each name."""
    return model.named_parameters(remove_duplicate=False)


def one_of_tied(model: nn.Module, files: WeightFiles, names: Mapping[str, str], path: str) -> dict[str, str]:
    """The names, of which those that the model ties lead to one tensor of the files, if these have several.

    Raises:
        UnsupportedContentError: the files have different values for tensors that the model ties.
    """
    found = dict(names)
    for group in _ties(model):
        stored = list(dict.fromkeys(names[name] for name in group if name in names))
        if len(stored) < 2:
            continue
        if not all(_is_same(files.read(stored[0]), files.read(other)) for other in stored[1:]):
            dtypes = list(dict.fromkeys(str(files.weights[one].dtype) for one in stored))
            has = f"them in different dtypes ({', '.join(dtypes)})" if dtypes[1:] else "different values for them"
            raise UnsupportedContentError(
                f"{path}: the model ties {' and '.join(map(repr, group))}, but the checkpoint has {has}: make a model "
                "that does not tie them (config.tie_word_embeddings=False in transformers)"
            )
        found |= dict.fromkeys(group, stored[0])
    return found


def fill_buffers(model: nn.Module, files: WeightFiles, names: Mapping[str, str]) -> None:
    """Give a model's persistent buffers the values that they have in a checkpoint.

    Each keeps its dtype and its device; one on the meta device becomes the tensor of the files. Buffers that are one
    under several names stay one.
    """
    filled = dict[torch.Tensor, torch.Tensor]()
    for name, buffer in list(_persistent_buffers_of(model)):
        if buffer not in filled and name in names:
            device = None if buffer.is_meta else buffer.device
            filled[buffer] = files.read(names[name]).to(device=device, dtype=buffer.dtype)
        if buffer in filled:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, filled[buffer])


def set_extra_states(model: nn.Module, files: WeightFiles, names: Mapping[str, str]) -> None:
    """Give each module that has an extra state (``get_extra_state``) the one of a checkpoint, if that has it."""
    for name, module, _ in _extra_states_of(model):
        if name in names:
            model.get_submodule(module).set_extra_state(files.read(names[name]))


def no_weight(name: str, path: str, names: Iterable[str], stored: Iterable[str]) -> str:
    """Message for a name that is not there."""
    longer = [known for known in stored if known.endswith(f".{name}")]
    if longer:
        why = f"{longer[0]!r} is there: pass prefix={longer[0][: -len(name)]!r}"
        return f"{path}: no weight is called {name!r}, but {why}"
    nearest = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    return f"{path}: no weight is called {name!r}; the nearest name is {nearest[0]!r}"


def _with_ties(names: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """The names, with those that the checkpoint lacks because they are tied to others."""
    found = dict(names)
    for group in _ties(model):
        if known := [names[name] for name in group if name in names]:
            found |= {name: known[0] for name in group if name not in names}
    return found


def _ties(model: nn.Module) -> list[list[str]]:
    """Names of the same parameter or the same buffer."""
    buffers = defaultdict[torch.Tensor, list[str]](list)
    for name, buffer in _persistent_buffers_of(model):
        buffers[buffer].append(name)
    return [*find_tied_parameters(model), *buffers.values()]


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors have the same bytes."""
    # Bytes get a dimension of their own, because the stride of one element may be any.
    first, second = (one.contiguous().view(-1).unsqueeze(-1) for one in (first, second))
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _misfit(files: WeightFiles, path: str, names: Mapping[str, str], model: nn.Module) -> FastensorError | None:
    """Message about the first tensor of the model that the checkpoint lacks, or has in another shape."""
    parameters, buffers = dict(parameters_of(model)), dict(_persistent_buffers_of(model))
    lacks = [name for name in parameters if name not in names]
    # As for load_state_dict: files of early torch lack num_batches_tracked, and nothing but training needs it.
    lacks_buffers = [name for name in buffers if name not in names and name.rpartition(".")[2] != "num_batches_tracked"]
    for name in (lacks + lacks_buffers)[:1]:
        why = _not_tied(name, path, names, model) or no_weight(name, path, names, files.weights)
        lacking = f"{counted(len(lacks), 'parameters')} and {counted(len(lacks_buffers), 'buffers')}"
        return UnknownKeyError(f"{why}; {lacking} of {type(model).__name__} are missing in all")
    for name, tensor in chain(parameters.items(), buffers.items()):
        if name in names and (found := files.weights[names[name]].shape) != tensor.shape:
            return UnsupportedContentError(
                f"{path}: expected {name!r} in the shape {list(tensor.shape)} that it has in "
                f"{type(model).__name__}, found {list(found)}"
            )
    return None


def _not_tied(name: str, path: str, names: Mapping[str, str], model: nn.Module) -> str:
    """Advice if a tensor is missing because the checkpoint holds tied ones once, and the model's are not tied."""
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}  # of transformers 5
    partners = [other for tied in ties.items() if name in tied for other in tied if other in names]
    if not partners and (ties or not check_tied_parameters_in_config(model)):
        return ""
    other = repr(partners[0]) if partners else "another weight"
    return (
        f"{path}: {name!r} is not there because it is tied to {other}, but in this model it is a tensor of its own "
        f"(init_empty_weights unties weights): call model.tie_weights() before the mapping is made"
    )


def _persistent_buffers_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that checkpoints hold, tied ones under each name."""
    saved = model.state_dict(keep_vars=True)
    return ((name, one) for name, one in model.named_buffers(remove_duplicate=False) if name in saved)


def _check_computed_buffers(model: nn.Module, path: str) -> None:
    """Raise UnknownKeyError if a buffer that the model computes by itself has no values."""
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in saved:
            raise UnknownKeyError(
                f"{path}: the buffer {name!r} of {type(model).__name__} is not persistent, so that no checkpoint holds "
                "it, and has no values on the meta device: make the model under accelerate.init_empty_weights(), which "
                "leaves buffers with their values, or compute it before the mapping is made"
            )


def _check_extra_states(names: Mapping[str, str], model: nn.Module, path: str) -> None:
    """Raise UnknownKeyError if the checkpoint has no tensor for an extra state of the model. The model's
    own may hold nothing: None, or something empty. Then there is nothing to set."""
    for name, module, state in _extra_states_of(model):
        if name not in names and not _is_empty(state):
            raise UnknownKeyError(
                f"{path}: {type(model.get_submodule(module)).__name__} {module!r} has an extra state, and no tensor is "
                f"called {name!r}: load it by load_state_dict, and make the mapping without the model: then buffers "
                "are not filled, names of tied tensors that the checkpoint lacks are not found, and nothing is "
                "converted"
            )


def _is_empty(state: Any) -> bool:
    if isinstance(state, torch.Tensor):
        return state.numel() == 0
    return state is None or (isinstance(state, Mapping | Sequence) and not state)


def _extra_states_of(model: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Extra states: their names, and the names of their modules."""
    for name, state in model.state_dict(keep_vars=True).items():
        module, _, leaf = name.rpartition(".")
        if leaf == "_extra_state":
            yield name, module, state
