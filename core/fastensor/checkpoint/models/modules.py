"""``fastensor.load_model`` and ``fastensor.save_model``: the weights of a module, in a file or in several."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fastensor.backends import registry
from fastensor.backends.registry import announce
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.models.contested import Incoming, check_agree, contested, held
from fastensor.checkpoint.models.into import Filling, Pairing, check_fit, fill, in_turn, incoming, naming
from fastensor.checkpoint.models.sharded import check_holds, files_behind
from fastensor.checkpoint.models.ties import copies_of, covered_by
from fastensor.checkpoint.progress import Meter, Progress, reporting
from fastensor.checkpoint.reading.load import load
from fastensor.checkpoint.reading.opened import OpenedFile, opened
from fastensor.checkpoint.reading.request import LoadRequest, check_verify, is_restricted
from fastensor.checkpoint.report import warn_unverified
from fastensor.checkpoint.tools.catalog import (
    Catalog,
    Located,
    branches_of,
    check_root,
    dict_in,
    read_catalog,
    roots_in_words,
)
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.checkpoint.writing.save import choose_container, save
from fastensor.errors import StateMismatchError, UnsupportedContentError
from fastensor.files.arguments import check_flags, checks_keywords
from fastensor.files.words import unended
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch.plain_tensors import values_kept
from fastensor.stitch.torch_pickle import STATE

_SHOWN = 5
_METADATA = "_metadata"
"""The attribute of a state dict that has the versions of modules."""
_OF_TORCH: tuple[Any, ...] = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
"""Methods by which modules copy their tensors, and do nothing else with them."""
_NOT_STRICT = "strict=False keeps the one that load_state_dict would: the last in the order of the model"
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)


class LoadedNames(NamedTuple):
    """Names that the model and the file do not share, as ``load_state_dict`` returns them."""

    missing_keys: list[str]
    """Names of the model that nothing was loaded for. A tensor that is the same as one that was loaded is not missing.
    """
    unexpected_keys: list[str]
    """Names in the file that the model does not have."""


@checks_keywords
def save_model(
    model: nn.Module,
    path: Location,
    *,
    metadata: Mapping[str, str] | None = None,
    checksums: bool = True,
    backend: BackendChoice = registry.AUTO,
    durable: bool = True,
    progress: Progress | None = None,
) -> SaveReport:
    """Save the weights of a model: as ``safetensors.torch.save_model`` does if the name ends in ``.safetensors``, else
    as ``torch.save(model.state_dict())``.

    A ``.safetensors`` file holds tensors that are the same memory once, under the least of their names; its metadata
    say which names were left out, and tensors are made contiguous. A file of torch keeps ties and strides.

    Args:
        model: the model.
        path: as for :func:`fastensor.save`.
        metadata: texts for a ``.safetensors`` file.
        checksums, backend, durable, progress: as for :func:`fastensor.save`.

    Raises:
        UnsupportedContentError: a ``.safetensors`` file cannot hold the state of the model: tensors overlap, none of
            them holding the others, or something is no dense tensor.
        Exception: as :func:`fastensor.save`.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    >>> model[1].weight = model[0].weight
    >>> _ = fastensor.save_model(model, path)
    >>> sorted(fastensor.load(path))
    ['0.bias', '0.weight', '1.bias']
    """
    _check_model(model)
    state: dict[str, Any] = model.state_dict()
    if choose_container(None, name_of(path), metadata, checksums) == "safetensors":
        tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
        left_out = copies_of(tensors, keep="least")
        kept = {name: one for name, one in state.items() if name not in left_out}
        state = {name: one.contiguous() if name in tensors else one for name, one in kept.items()}
        metadata = {**left_out, **(metadata or {})} if left_out else metadata
    return save(
        state, path, metadata=metadata, checksums=checksums, backend=backend, durable=durable, progress=progress
    )


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a torch.nn.Module, found one of type {type(model).__name__}; fastensor.save and fastensor.load "
            f"take a dict of tensors"
        )


@checks_keywords
def load_model(
    model: nn.Module,
    path: Location,
    strict: bool = True,
    *,
    root: str | None = None,
    weights_only: bool | None = None,
    verify: bool | Literal["first"] | None = None,
    backend: BackendChoice = registry.AUTO,
    progress: Progress | None = None,
) -> LoadedNames:
    """Load weights into a model, straight into the memory of its parameters and buffers, on whatever device.

    Names and shapes are compared before anything is overwritten, by the model's own ``load_state_dict``. Modules that
    do more in it than to copy tensors (hooks, a ``_load_from_state_dict`` of their own, extra state) get their tensors
    by it: then the weights of the file are in host memory for a while, which is logged.

    Args:
        model: the model. Parameters on the meta device have no memory to load into: ``model.to_empty(device="cuda")``
            gives them some before. In an inference model, or one that trains, the same tensors stay in use.
        path: a file of torch or of safetensors, as for :func:`fastensor.load`; or the index of a model in several
            files, or the folder that it is in.
        strict: whether names that the model or the file lacks are an error, as for ``load_state_dict``; and tied
            tensors of the model that have different values in the file, of which otherwise the last one counts, in the
            order of the model, as in ``load_state_dict``.
        root: the name of the dict in the file that has the weights: ``state_dict`` for checkpoints of Lightning.
        weights_only: as for :func:`fastensor.load`; used only for files that cannot be read tensor by tensor.
        verify: as for :func:`fastensor.load` with ``into``.
        backend, progress: as for :func:`fastensor.load`.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, both empty if ``strict``.

    Raises:
        StateMismatchError: names or shapes differ, or a file has two values for the same memory.
        Exception: as :func:`fastensor.load`. ``error.overwritten`` names the tensors whose old values are gone.

    >>> import os, tempfile, torch, fastensor
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> _ = fastensor.save({"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, path)
    >>> model = torch.nn.Linear(2, 1)
    >>> fastensor.load_model(model, path)
    LoadedNames(missing_keys=[], unexpected_keys=[])
    >>> model.weight
    Parameter containing:
    tensor([[1., 1.]], requires_grad=True)
    """
    _check_model(model)
    check_choice(backend)
    check_flags(strict=strict)
    check_verify(verify)
    is_restricted(weights_only)
    if not isinstance(root, str | None):
        raise TypeError(f"root is the name of a dict, found {root!r}")
    overwritten: list[str] = []
    with naming(overwritten), reporting(progress) as tell, ExitStack() as stack:
        meter = None if progress is None else Meter(tell)
        request = LoadRequest([], None, None, weights_only, False, verify is not False, backend, meter=meter)
        sources = [_open(stack, file, expected, root, request) for file, expected in files_behind(path).items()]
        own = dict(_tensors_of(model))
        _check_memory(model, own)
        why = _why_beside(model, own, sources)
        if not why:
            found = _load_in_place(model, own, sources, request, overwritten, strict=strict, first=verify == "first")
            _warn_unverified(sources, request)
        else:
            announce("loading straight into the model", f"{why}; its load_state_dict copies all tensors")
            found = _load_beside(model, own, sources, root, request, overwritten, strict=strict)
        if meter is not None:
            meter.finish(sum(one.file.nbytes for one in sources))
    return found


@dataclass(frozen=True, slots=True)
class _Source:
    """One of the files, open."""

    location: Location
    file: OpenedFile
    catalog: Catalog | None
    """None if it can only be loaded whole."""
    entries: Mapping[str, Located | None]
    """The values of the dict by name, as far as the model may take them; None for what is more than its bytes."""
    versions: Mapping[str, Any] | None
    """The versions of modules, if the file has them."""


def _open(
    stack: ExitStack, location: Location, expected: Collection[str] | None, root: str | None, request: LoadRequest
) -> _Source:
    file = stack.enter_context(opened(location))
    try:
        catalog = read_catalog(file, verify=request.checked)
    except UnsupportedContentError:
        return _Source(location, file, None, {}, None)
    entries, versions = _entries(catalog, root, file.where)
    if expected is not None:
        check_holds(file.where, entries, expected)
        entries = {name: one for name, one in entries.items() if name in expected}
    return _Source(location, file, catalog, entries, versions)


def _entries(
    catalog: Catalog, root: str | None, where: str
) -> tuple[Mapping[str, Located | None], Mapping[str, Any] | None]:
    check_root(catalog, root, where)
    branch = dict_in(catalog.structure, root, where)
    versions = getattr(branch, STATE, {}).get(_METADATA)
    entries = {str(name): catalog.by_identity.get(id(value)) for name, value in branch.items()}
    return entries, versions if isinstance(versions, dict) else None


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a state dict of the model has, themselves, by name, in the order in which ``load_state_dict``
    copies them. Tied ones occur under each name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        yield from module.named_parameters(prefix, recurse=False, remove_duplicate=False)
        for name, buffer in module.named_buffers(prefix, recurse=False, remove_duplicate=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _check_memory(model: nn.Module, own: Mapping[str, torch.Tensor]) -> None:
    if empty := [name for name, tensor in own.items() if tensor.is_meta]:
        raise StateMismatchError(
            f"{len(empty)} tensors of the {type(model).__name__}, {empty[0]!r} among them, are on the meta device and "
            f"have no memory; model.to_empty(device=...) gives them some"
        )


def _why_beside(model: nn.Module, own: Mapping[str, torch.Tensor], sources: Sequence[_Source]) -> str:
    """Reason for which tensors cannot be read straight into the model; empty if they can."""
    if odd := next((one for one in sources if one.catalog is None), None):
        return f"{odd.file.where} can only be loaded whole"
    entries = {name: one for source in sources for name, one in source.entries.items()}
    if odd_names := [name for name, one in entries.items() if one is None and name in own]:
        return f"{odd_names[0]!r} in the file is more than its bytes"
    if odd_names := [name for name, one in own.items() if type(one) not in _PLAIN_TYPES]:
        return f"{odd_names[0]!r} of the model is a {type(own[odd_names[0]]).__name__}"
    if torch.__future__.get_swap_module_params_on_conversion():
        return "torch is to swap parameters"
    if _has_own_load(model):
        return f"{type(model).__name__} has a load_state_dict of its own"
    names = [*own, *entries]
    for prefix, module in model.named_modules():
        if (what := _does_more(module)) and _concerns(prefix, names):
            return f"the module {prefix!r} ({type(module).__name__}) has {what}"
    return ""


def _has_own_load(model: nn.Module) -> bool:
    return type(model).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(model)


def _does_more(module: nn.Module) -> str:
    """Names of the methods by which a module does more than to copy tensors; empty if it has none."""
    if type(module)._load_from_state_dict not in _OF_TORCH or "_load_from_state_dict" in vars(module):
        return "a _load_from_state_dict of its own"
    if module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks:
        return "hooks for load_state_dict"
    return "extra state" if type(module).set_extra_state is not nn.Module.set_extra_state else ""


def _concerns(prefix: str, names: Iterable[str]) -> bool:
    return not prefix or any(name.startswith(f"{prefix}.") for name in names)


def _load_in_place(
    model: nn.Module,
    own: Mapping[str, torch.Tensor],
    sources: Sequence[_Source],
    request: LoadRequest,
    overwritten: list[str],
    *,
    strict: bool,
    first: bool,
) -> LoadedNames:
    where = sources[0].file.where
    order = {name: rank for rank, name in enumerate(own)}
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    pairings = []
    for source in sources:
        fillings = []
        for name, located in source.entries.items():
            if name in own and located is not None:
                fillings.append(Filling(name, located, own[name]))
            state[name] = _stand_in(own.get(name), located)
        pairings.append(Pairing(source.file, fillings))
    if sources[0].versions is not None:
        setattr(state, _METADATA, sources[0].versions)
    try:
        found = model.load_state_dict(state, strict=False)  # copies each tensor to itself, which torch leaves out
    except RuntimeError as error:
        raise StateMismatchError(f"{where}: {unended(error)}; nothing was overwritten") from error
    written = [one.name for pairing in pairings for one in pairing.fillings]
    names = _names(found.missing_keys, found.unexpected_keys, written, own)
    if strict:
        _check_names(names, model, where, sources, "nothing was overwritten")
    check_fit(pairings)
    with ExitStack() as stack:
        groups = contested(sorted(incoming(pairings, request, stack), key=lambda one: order[one.name]))
        if strict:
            check_agree(groups, _all_in_words(sources), _NOT_STRICT)
    fill(in_turn(pairings, groups), request, overwritten, verify_first=first)
    return names


def _all_in_words(sources: Sequence[_Source]) -> str:
    """The name of the file, or of the folder that all files are in."""
    where = sources[0].file.where
    return where if len(sources) == 1 else os.path.dirname(where)


def _stand_in(tensor: torch.Tensor | None, located: Located | None) -> torch.Tensor:
    """Tensor that ``load_state_dict`` gets for one of the file: the model's own one, unless that has another shape."""
    shape = () if located is None else located.info.shape
    if tensor is not None and tuple(tensor.shape) == shape:
        return tensor
    return torch.empty(shape, device="meta")


def _load_beside(
    model: nn.Module,
    own: Mapping[str, torch.Tensor],
    sources: Sequence[_Source],
    root: str | None,
    request: LoadRequest,
    overwritten: list[str],
    *,
    strict: bool,
) -> LoadedNames:
    """Load all tensors to the host, and let the model take them."""
    state: dict[str, Any] = OrderedDict()
    for source in sources:
        with values_kept():
            loaded = load(
                source.location,
                "cpu",
                keys=None if root is None else [root],
                weights_only=request.weights_only,
                verify=request.checked,
                backend=request.backend,
            )
        branch = dict_in(loaded, root, source.file.where)
        state.update(branch if not source.entries else {name: branch[name] for name in source.entries})
        if hasattr(branch, _METADATA):
            setattr(state, _METADATA, getattr(branch, _METADATA))
    if strict:
        check_agree(contested(_copied(model, own, state)), _all_in_words(sources), _NOT_STRICT)
    written = [name for name in state if name in own]
    overwritten += written
    found = model.load_state_dict(state, strict=False)
    names = _names(found.missing_keys, found.unexpected_keys, written, own)
    if strict:
        _check_names(names, model, sources[0].file.where, sources, "what fits has been overwritten")
    overwritten.clear()
    return names


def _copied(model: nn.Module, own: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Iterator[Incoming]:
    """The tensors that ``load_state_dict`` copies as they are, as far as that can be known: not those of modules whose
    own code decides."""
    if _has_own_load(model):
        return
    deciding = [prefix for prefix, module in model.named_modules(remove_duplicate=False) if _does_more(module)]
    for name, tensor in own.items():
        values = state.get(name)
        if not isinstance(values, torch.Tensor) or values.shape != tensor.shape:
            continue
        if not any(_concerns(prefix, [name]) for prefix in deciding):
            yield held(name, tensor, values)


def _names(
    missing: Sequence[str], unexpected: Sequence[str], written: Sequence[str], own: Mapping[str, torch.Tensor]
) -> LoadedNames:
    """Without the names of tensors that are the same memory as one that is loaded."""
    covered = covered_by(missing, written, own)
    return LoadedNames([name for name in missing if name not in covered], list(unexpected))


def _check_names(names: LoadedNames, model: nn.Module, where: str, sources: Sequence[_Source], outcome: str) -> None:
    """
    Raises:
        StateMismatchError: there are names.
    """
    problems = [
        f"{len(some)} names are {what}: {', '.join(map(repr, some[:_SHOWN]))}"
        for some, what in ((names.missing_keys, "missing in the file"), (names.unexpected_keys, "not in the model"))
        if some
    ]
    if not problems:
        return
    structures = [one.catalog.structure for one in sources if one.catalog is not None]
    roots = {name: one for tree in structures for name, one in branches_of(tree, where).items()}
    advice = roots_in_words(roots) if names.missing_keys and roots else ""
    raise StateMismatchError(
        f"{where}: it is not the state of this {type(model).__name__}: {'; '.join(problems)}; {outcome}. strict=False "
        f"loads what both have{'; ' * bool(advice)}{advice}"
    )


def _warn_unverified(sources: Sequence[_Source], request: LoadRequest) -> None:
    for source in sources:
        if request.checked and source.catalog is not None and not source.catalog.checked:
            warn_unverified(source.file.where, source.catalog.unchecked)
