"""Reading tensors of checkpoints into tensors that are there already: straight into their memory where that can be.

A tensor's bytes are compared with their CRC32 while they arrive. So a damaged tensor is known only when its target has
been written to, unless the files are read twice. Errors name what has been overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from fastensor.backends.memory import is_filled_at_once
from fastensor.checkpoint.models.contested import Incoming, check_agree, contested, held
from fastensor.checkpoint.models.names import walk
from fastensor.checkpoint.models.ties import covered_by
from fastensor.checkpoint.reading.opened import OpenedFile
from fastensor.checkpoint.reading.reader import PartReader, extents_of, is_joined, new_array
from fastensor.checkpoint.reading.request import Loaded, LoadRequest
from fastensor.checkpoint.tools.catalog import Catalog, Located, read_catalog
from fastensor.errors import FastensorError, StateMismatchError, UnsupportedContentError
from fastensor.files.words import some_of
from fastensor.stitch.parts import Part
from fastensor.stitch.plain_tensors import values_kept
from fastensor.stitch.safetensors import has_own_memory

_SHOWN = 5
LEAVE_OUT = "To load only one of them, leave the others out of into"
"""Advice about tensors that share memory and have different values in the file."""


class Filling(NamedTuple):
    """A tensor of a file, and the tensor that gets its values."""

    name: str
    source: Located
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pairing:
    """Tensors that are read of one file."""

    file: OpenedFile
    fillings: Sequence[Filling]

    @property
    def parts(self) -> list[Part]:
        """The parts of the file that are read, each once, in the order of the file."""
        parts = {one.source.part.begin: one.source.part for one in self.fillings if one.source.info.nbytes}
        return sorted(parts.values(), key=attrgetter("begin"))


def targets_in(into: Any) -> dict[str, torch.Tensor]:
    """The tensors in a dict, which may hold other dicts and lists, by the names that a file has for them.

    Raises:
        TypeError: there is something else in it than tensors.
        ValueError: there are none.
    """
    if not isinstance(into, Mapping):
        raise TypeError(f"into is a dict from names to tensors, such as model.state_dict(), found {_kind(into)}")
    targets: dict[str, torch.Tensor] = {}
    for name, value in walk(dict(into)):
        if name in targets:
            raise ValueError(f"into has two tensors that a file would call {name!r}")
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"into holds tensors, whose values are replaced, but {name!r} in it is {_kind(value)}; leave it out, "
                f"and load it by keys=[{name!r}]"
            )
        targets[name] = value
    if not targets:
        raise ValueError("into holds no tensors, so nothing would be loaded")
    return targets


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


@contextmanager
def filling(into: Any, *, verify_first: bool) -> Iterator[Callable[..., Loaded]]:
    """A function that fills tensors with those of a file: :func:`load_into`, which lacks its first three arguments.
    Exceptions of the block name what has been overwritten.

    Args:
        into: as for :func:`targets_in`, which raises.
        verify_first: as for :func:`load_into`.
    """
    overwritten: list[str] = []
    targets = targets_in(into)
    with naming(overwritten):
        yield partial(load_into, targets=targets, verify_first=verify_first, overwritten=overwritten)


def load_into(
    file: OpenedFile,
    request: LoadRequest,
    load: Callable[[OpenedFile, LoadRequest], Loaded],
    *,
    targets: Mapping[str, torch.Tensor],
    verify_first: bool,
    overwritten: list[str],
) -> Loaded:
    """Load tensors of one file into those of the same names.

    Args:
        file: the file.
        request: how it is read. What it says about keys and devices does not count.
        load: loads the tensors that are more than their bytes, and those of files that say nothing about themselves.
        targets: what is filled.
        verify_first: compare everything before anything is overwritten, which reads the file twice.
        overwritten: names of tensors that have been overwritten are added here.

    Raises:
        StateMismatchError: a tensor is not in the file, or does not fit, or shares memory with one that gets other
            values. Nothing is overwritten.
        Exception: as :func:`fastensor.load`.
    """
    catalog = _catalog_of(file, request)
    located = {} if catalog is None else catalog.located
    if catalog is not None:
        check_present(targets, catalog.tensors, file.where)
    pairing = Pairing(file, [Filling(name, located[name], one) for name, one in targets.items() if name in located])
    check_fit([pairing])
    rest = [name for name in targets if name not in located and (catalog is None or name in catalog.tensors)]
    with values_kept():
        others = load(file, request._replace(keys=rest, map_location="cpu")) if rest else None
    leaves = () if others is None else walk(others.result)
    values = {name: one for name, one in leaves if isinstance(one, torch.Tensor)}
    _check_values(values, {name: targets[name] for name in rest}, file.where)
    with ExitStack() as stack:
        own = incoming([pairing], request, stack)
        others_held = [held(name, targets[name], values[name]) for name in rest]
        check_agree(contested([*own, *others_held]), file.where, LEAVE_OUT)
    backend, reason = fill([pairing], request, overwritten, verify_first=verify_first)
    with torch.no_grad():
        for name in rest:
            overwritten.append(name)
            targets[name].copy_(values[name])
    if catalog is None or not pairing.fillings:
        assert others is not None
        return others._replace(result=None)
    verified = request.checked and catalog.checked and (others is None or others.verified)
    return Loaded(None, backend, reason, verified, catalog.unchecked)


def _catalog_of(file: OpenedFile, request: LoadRequest) -> Catalog | None:
    """Contents of the file; None if it has to be loaded whole to know."""
    try:
        return read_catalog(file, verify=request.checked)
    except UnsupportedContentError:
        return None


def check_present(targets: Mapping[str, torch.Tensor], names: Collection[str], where: str) -> None:
    """
    Raises:
        StateMismatchError: a name is not among the names of the file, and its memory is not that of one which is.
    """
    covered = covered_by([name for name in targets if name not in names], names, targets)
    if missing := [name for name in targets if name not in names and name not in covered]:
        raise StateMismatchError(
            f"{where}: {_listed(missing)} not in it; nothing was overwritten. It holds {_listed(list(names))}"
        )


def check_fit(pairings: Sequence[Pairing]) -> None:
    """
    Raises:
        StateMismatchError: a tensor cannot take the values; all such are named. Nothing was overwritten.
    """
    misfits = [
        f"{one.name!r}: {why}"
        for pairing in pairings
        for one in pairing.fillings
        if (why := why_not(one.source.info.shape, one.source.info.dtype, one.target))
    ]
    if misfits:
        shown = "; ".join(misfits[:_SHOWN]) + (f"; and {len(misfits) - _SHOWN} more" if len(misfits) > _SHOWN else "")
        raise StateMismatchError(f"{pairings[0].file.where}: values do not fit, nothing was overwritten: {shown}")


def why_not(
    shape: Sequence[int], dtype: torch.dtype, target: torch.Tensor, layout: torch.layout = torch.strided
) -> str:
    """Reason for which a tensor cannot take values; empty if it can."""
    if target.device.type == "meta":
        return "it is on the meta device and has no memory; module.to_empty(device=...) gives it some"
    if tuple(shape) != tuple(target.shape):
        return f"the file has the shape {list(shape)}, it has {list(target.shape)}"
    if layout != target.layout:
        return f"the file has the layout {layout}, it has {target.layout}; convert one of them"
    if not torch.can_cast(dtype, target.dtype):
        return f"the file has {dtype}, of which {target.dtype} keeps too little; convert one of them"
    if target.layout == torch.strided and any(
        size > 1 and not step for size, step in zip(target.shape, target.stride(), strict=True)
    ):
        return "it is an expanded tensor, whose elements share memory; .clone() it"
    return ""


def _listed(names: Sequence[str]) -> str:
    return some_of(names, _SHOWN, repr) or "no tensors"


def _check_values(values: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], where: str) -> None:
    """
    Raises:
        StateMismatchError: tensors that were loaded do not fit.
    """
    check_present(targets, values, where)
    found = {name: values[name] for name in targets}
    misfits = {name: why_not(one.shape, one.dtype, targets[name], one.layout) for name, one in found.items()}
    for name, why in misfits.items():
        if why:
            raise StateMismatchError(f"{where}: values do not fit, nothing was overwritten: {name!r}: {why}")


def incoming(pairings: Sequence[Pairing], request: LoadRequest, stack: ExitStack) -> list[Incoming]:
    """The tensors that are to be filled, and how to get their values without filling them: by one reader for each file,
    which is opened when it is needed, and closed with ``stack``."""
    return [
        Incoming(
            one.name,
            one.target,
            id(pairing.file),
            one.source.part.begin + one.source.span[0],
            one.source.info.dtype,
            one.source.stride,
            partial(_read_alone, open_reader, one.source),
        )
        for pairing in pairings
        for open_reader in [cache(partial(_open_in_any_order, pairing.file, request, stack))]
        for one in pairing.fillings
    ]


def _open_in_any_order(file: OpenedFile, request: LoadRequest, stack: ExitStack) -> PartReader:
    options = request.options._replace(learn=False)  # what is read, and for what, is not as in other loads
    return stack.enter_context(PartReader(file, (), options, verify=request.checked, fallbacks=request.fallbacks))


def _read_alone(open_reader: Callable[[], PartReader], source: Located) -> torch.Tensor:
    """A tensor of a file, verified."""
    return _values(open_reader(), source)


def in_turn(pairings: Sequence[Pairing], groups: Sequence[Sequence[Incoming]]) -> list[Pairing]:
    """The same fillings. The tensors of each group are filled in its order, whatever the order of the files."""
    names = dict.fromkeys(one.name for group in groups for one in group)
    alone = {one.name: Pairing(pairing.file, [one]) for pairing in pairings for one in pairing.fillings}
    others = [Pairing(pairing.file, [one for one in pairing.fillings if one.name not in names]) for pairing in pairings]
    return [*others, *(alone[name] for name in names)]


def fill(
    pairings: Sequence[Pairing], request: LoadRequest, overwritten: list[str], *, verify_first: bool = False
) -> tuple[str, str]:
    """Read tensors of files into others.

    Args:
        pairings: what is read; :func:`check_fit` has found that it fits.
        request: how.
        overwritten: the name of each tensor is added here before its first byte changes.
        verify_first: compare all parts of all files before that.

    Returns:
        The backend that has read the last file, and why that one.

    Raises:
        CorruptCheckpointError, CheckpointReadError: as for :class:`~fastensor.checkpoint.reading.reader.PartReader`.
    """
    if request.meter is not None and any(pairing.parts for pairing in pairings):
        request.meter.begin((1 + verify_first) * sum(_nbytes(pairing.parts) for pairing in pairings))
    for pairing in pairings if verify_first else ():
        with _open(pairing, request) as reader:
            for part in pairing.parts:
                reader.check(part)
    used = ("numpy", "there is nothing to read")
    for pairing in pairings:
        if not pairing.parts:
            continue
        with _open(pairing, request) as reader:
            for one in sorted(pairing.fillings, key=lambda one: (one.source.part.begin, one.source.offset)):
                if one.source.info.nbytes:
                    _fill(reader, one, overwritten)
            used = (reader.backend, reader.reason)
    return used


def _open(pairing: Pairing, request: LoadRequest) -> PartReader:
    target = next((one.target for one in pairing.fillings), None)
    options = request._replace(map_location=None if target is None else target.device).options
    return PartReader(
        pairing.file,
        extents_of(pairing.parts),
        options,
        verify=request.checked,
        fallbacks=request.fallbacks,
        meter=request.meter,
    )


def _nbytes(parts: Sequence[Part]) -> int:
    return sum(extent.end - extent.begin for extent in extents_of(parts))


def _fill(reader: PartReader, one: Filling, overwritten: list[str]) -> None:
    """Read one tensor. What is read together with others, or converted, is compared before it is copied."""
    part = one.source.part
    begin, end = one.source.span
    memory = _memory_of(one)
    if memory is None:
        values = _values(reader, one.source)
        _note(one, overwritten)
        with torch.no_grad():
            one.target.copy_(values)
    elif end - begin < part.nbytes:
        reader.check(part)
        _note(one, overwritten)
        reader.read_range(part, begin, memory, checksum=False)
    elif is_joined(part):
        found = reader.window.array(reader.read_small(part), part.nbytes)
        _note(one, overwritten)
        torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory).copy_(torch.from_numpy(found))
    else:
        _note(one, overwritten)
        reader.read(part, memory)


def _note(one: Filling, overwritten: list[str]) -> None:
    """Note that a tensor is about to change. A graph that needs its old values raises in the backward pass."""
    overwritten.append(one.name)
    torch.autograd.graph.increment_version(one.target)


def _memory_of(one: Filling) -> torch.UntypedStorage | None:
    """The memory of a target that takes the bytes of the file as they are; None if values have to be converted."""
    target, (begin, end) = one.target, one.source.span
    if target.dtype != one.source.info.dtype or not (target.device.type == "cpu" or is_filled_at_once(target.device)):
        return None
    if target.layout != torch.strided or target.is_quantized or target.is_conj() or target.is_neg():
        return None
    if not (target.is_contiguous() and one.source.on_meta().is_contiguous() and has_own_memory(target)):
        return None
    start = int(target.storage_offset()) * target.itemsize
    memory: torch.UntypedStorage = target.untyped_storage()[start : start + end - begin]
    return memory


def _values(reader: PartReader, source: Located) -> torch.Tensor:
    """A tensor of the file in memory of its own, verified."""
    part = source.part
    begin, end = source.span
    array = new_array(end - begin)
    if end - begin == part.nbytes:
        reader.read(part, array.data)
    else:
        reader.check(part)
        reader.read_range(part, begin, array.data, checksum=False)
    empty = torch.empty(0, dtype=source.info.dtype, device="cpu")
    return empty.set_(torch.from_numpy(array).untyped_storage(), 0, source.info.shape, source.stride)


@contextmanager
def naming(overwritten: Sequence[str]) -> Iterator[None]:
    """Have exceptions of the block name the tensors that have been overwritten."""
    try:
        yield
    except BaseException as error:
        if overwritten:
            _add_names(error, tuple(dict.fromkeys(overwritten)))
        raise


def _add_names(error: BaseException, names: tuple[str, ...]) -> None:
    what = f"{len(names)} tensors had been overwritten before" if len(names) > 1 else "1 tensor had been overwritten"
    if not isinstance(error, FastensorError):
        error.add_note(f"{what}: {', '.join(names)}")
        return
    error.overwritten = names
    message = f"{what} (all are in the exception's overwritten): {_listed(names)}"
    if isinstance(error, OSError):
        error.strerror = f"{error.strerror}; {message}"
    elif error.args:
        error.args = (f"{error.args[0]}; {message}", *error.args[1:])
