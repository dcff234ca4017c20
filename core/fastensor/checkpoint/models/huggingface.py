"""``fastensor.save_sharded`` and ``fastensor.load_sharded``: models in several files, as Hugging Face has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from fastensor.backends import registry
from fastensor.checkpoint.directories import nbytes_at
from fastensor.checkpoint.location import Location, RemotePath, locate, name_of
from fastensor.checkpoint.models.contested import check_agree, contested
from fastensor.checkpoint.models.into import (
    LEAVE_OUT,
    Filling,
    Pairing,
    check_fit,
    check_present,
    fill,
    incoming,
    naming,
    targets_in,
)
from fastensor.checkpoint.models.names import resolve
from fastensor.checkpoint.models.sharded import SHARD_NBYTES, check_holds, files_behind, write_sharded
from fastensor.checkpoint.models.ties import copies_of, frozen_among
from fastensor.checkpoint.progress import Meter, Progress, reporting, tell_part
from fastensor.checkpoint.reading.load import load
from fastensor.checkpoint.reading.placement import MapLocation
from fastensor.checkpoint.reading.request import LoadRequest, check_arguments, is_restricted
from fastensor.checkpoint.report import warn_unverified
from fastensor.checkpoint.tools.cataloged import open_files
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.checkpoint.writing.save import save
from fastensor.checkpoint.writing.save_transaction import ShareOrLink, check_share_unchanged
from fastensor.errors import CorruptCheckpointError, UnknownKeyError, UnsupportedContentError
from fastensor.files.arguments import as_nbytes, check_flags, checks_keywords
from fastensor.select.transfer import BackendChoice, check_choice
from fastensor.stitch.safetensors import with_format


@checks_keywords
def save_sharded(
    state: Mapping[str, torch.Tensor] | nn.Module,
    folder: str | os.PathLike[str],
    *,
    shard_nbytes: int | str = SHARD_NBYTES,
    metadata: Mapping[str, str] | None = None,
    checksums: bool = True,
    backend: BackendChoice = registry.AUTO,
    durable: bool = True,
    share_unchanged: ShareOrLink = True,
    progress: Progress | None = None,
) -> SaveReport:
    """Save a model as ``save_pretrained`` does: in ``model-00001-of-0000N.safetensors`` and their index, or in
    ``model.safetensors`` if one file is enough.

    Every file is written as by :func:`fastensor.save`, and the index last. A model that is in the folder already can be
    read until then, because new shards get names that its index does not use (``model-2-00001-of-0000N.safetensors``);
    after a crash at any instant the folder has the old model or the new one, whole. Then old shards are removed. All
    other files in the folder are kept; ``from_pretrained`` needs a ``config.json`` beside the weights.

    Args:
        state: a dict from names to tensors; or a model, whose number of parameters then stands in the index. Tensors
            that are the same memory are stored once, under the first of their names, which is how transformers ties
            weights; so are views that lie within another tensor, as part of that one. A model that is built with the
            same ties gets all of them back; :func:`fastensor.load_sharded` gives the names that are stored. Tensors are
            made contiguous, one file at a time.
        folder: is created if it is missing. One writer at a time may save there.
        shard_nbytes: the most bytes of tensors in a file, unless one tensor has more: a number, or a text such as
            ``"5GB"``.
        metadata: texts for each file. ``{"format": "pt"}`` is added unless they name a format.
        checksums: as for :func:`fastensor.save`. Without them all files are byte for byte those of ``save_pretrained``
            when the folder is new.
        backend, durable: as for :func:`fastensor.save`.
        share_unchanged: as for :func:`fastensor.save`. With ``"link"``, parameters that require no gradient are in
            files of their own, each of which is a hard link to the one that this process has saved last, in whatever
            folder, if nothing in it has changed. That is for folders whose files are replaced, and never edited in
            place: such an edit would be in all models that have the file.
        progress: called after every few MiB with the bytes of all tensors that are on their way to the disk, and to be
            saved.

    Returns:
        A report of all files together.

    Raises:
        CheckpointWriteError: another writer saves to the folder, or the operating system refused an operation. The old
            model is there, or the message says that the new one is.
        ValueError: ``share_unchanged`` is ``"link"``, and the tensors do not say which of them are parameters that
            require no gradient, or ``checksums`` is False.
        UnsupportedContentError: a safetensors file cannot hold the tensors: they overlap, none of them holding the
            others, or something is no dense tensor.

    >>> import os, tempfile, torch, fastensor
    >>> folder = tempfile.mkdtemp()
    >>> _ = fastensor.save_sharded({"a": torch.ones(200), "b": torch.zeros(300)}, folder, shard_nbytes="1kB")
    >>> sorted(os.listdir(folder))
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
    >>> fastensor.load_sharded(folder, keys=["a"])["a"].shape
    torch.Size([200])
    """
    largest = as_nbytes(shard_nbytes, "shard_nbytes", at_least=1)
    check_choice(backend)
    check_flags(checksums=checksums, durable=durable)
    check_share_unchanged(share_unchanged, "link")
    if not isinstance(state, Mapping | nn.Module):
        raise TypeError(f"state is a dict from names to tensors, or a model, found one of type {type(state).__name__}")
    if isinstance(locate(folder), RemotePath):
        raise UnsupportedContentError(
            f"{name_of(folder)}: a model in several files can only be written into a directory of this machine, found "
            f"a URL; save it to a directory, and copy that"
        )
    about = {}
    parameters = _parameters(state)
    if share_unchanged == "link" and not (parameters and checksums):
        raise ValueError(
            "share_unchanged='link' needs checksums, and parameters, which say whether they require gradients, found "
            f"checksums={checksums} and {len(parameters)} parameters: give the model, or state_dict(keep_vars=True)"
        )
    if isinstance(state, nn.Module):
        about["total_parameters"] = sum(parameter.numel() for parameter in parameters)
        state = state.state_dict()
    for name, one in state.items():
        if not isinstance(one, torch.Tensor):
            raise UnsupportedContentError(
                f"the files of a model hold tensors only, but {name!r} is of type {type(one).__name__}; leave it out"
            )
    left_out = copies_of(state, keep="first")
    tensors = {name: one for name, one in state.items() if name not in left_out}
    sizes = {name: one.nbytes for name, one in tensors.items()}
    total = sum(sizes.values())
    apart = frozen_among(tensors, parameters) if share_unchanged == "link" else set()
    before = 0
    with reporting(progress) as tell:

        def write(path: str, names: Sequence[str]) -> SaveReport:
            nonlocal before
            begun, before = before, before + sum(sizes[name] for name in names)
            end = before
            report = save(
                {name: tensors[name].contiguous() for name in names},
                path,
                metadata=with_format(metadata or {}),
                checksums=checksums,
                backend=backend,
                durable=durable,
                share_unchanged=True if share_unchanged == "link" and not apart.issuperset(names) else share_unchanged,
                progress=None if progress is None else lambda done, _: tell(min(begun + done, end), total),
            )
            if progress is not None and report.shared_nbytes == report.nbytes:
                tell(end, total)  # nothing was written
            return report

        return write_sharded(folder, sizes, largest, write, durable=durable, replaces=True, apart=apart, about=about)


def _parameters(state: Mapping[str, Any] | nn.Module) -> list[nn.Parameter]:
    values = state.parameters() if isinstance(state, nn.Module) else state.values()
    return [one for one in values if isinstance(one, nn.Parameter)]


@checks_keywords
def load_sharded(
    path: Location,
    map_location: MapLocation = None,
    *,
    keys: Iterable[str] | None = None,
    into: Mapping[str, Any] | None = None,
    weights_only: bool | None = None,
    verify: bool | Literal["first"] | None = None,
    backend: BackendChoice = registry.AUTO,
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Load the tensors of a model in several files, or in one, as :func:`fastensor.load` does.

    :func:`fastensor.load_model` loads them into a model.

    Args:
        path: the folder of the model; or its index, such as ``model.safetensors.index.json``; or a file.
        map_location: as for :func:`fastensor.load`.
        keys: names, or glob patterns, of the tensors to load.
        into: a dict of tensors that get the values, as for :func:`fastensor.load`. The names and shapes in all files
            are compared before anything is overwritten.
        weights_only, verify, backend: as for :func:`fastensor.load`.
        progress: called after every few MiB with the bytes that have been read and the bytes of all files that are.

    Returns:
        The tensors by name; or ``into``.

    Raises:
        FileNotFoundError: there is no model, or one of its files is missing.
        CorruptCheckpointError: a file is damaged, or lacks a tensor that the index expects in it.
        UnknownKeyError: a name or pattern in ``keys`` chooses nothing.
        Exception: as :func:`fastensor.load`.
    """
    check_arguments(map_location, keys, into, mmap=False, verify=verify)
    check_choice(backend)
    is_restricted(weights_only)
    files = files_behind(path)
    with reporting(progress) as tell:
        if into is None:
            wanted = _wanted(files, keys, name_of(path))
            read = partial(
                load, map_location=map_location, weights_only=weights_only, verify=verify is not False, backend=backend
            )
            return _load_each(files, wanted, keys, read, None if progress is None else tell)
    overwritten: list[str] = []
    with naming(overwritten), reporting(progress) as tell:
        meter = None if progress is None else Meter(tell)
        request = LoadRequest([], None, None, weights_only, False, verify is not False, backend, meter=meter)
        _fill(files, targets_in(into), request, name_of(path), overwritten, verify_first=verify == "first")
        if meter is not None:
            meter.finish(sum(map(nbytes_at, files)))
    return into  # type: ignore[return-value]  # whatever the caller has given


def _wanted(
    files: Mapping[Location, set[str] | None], keys: Iterable[str] | None, where: str
) -> dict[Location, set[str] | None]:
    """The files to read, and the tensors to read of each; None for all that it has.

    Raises:
        UnknownKeyError: a key chooses nothing.
    """
    known = {name for names in files.values() for name in names or ()}
    if keys is None or not known:
        return {**files}
    chosen = resolve(keys, known, where)
    return {file: names & chosen for file, names in files.items() if names is not None and names & chosen}


def _load_each(
    files: Mapping[Location, set[str] | None],
    wanted: Mapping[Location, set[str] | None],
    keys: Iterable[str] | None,
    read: Callable[..., Any],
    tell: Progress | None,
) -> dict[str, torch.Tensor]:
    sizes = {file: nbytes_at(file) for file in wanted}
    total, before = sum(sizes.values()), 0
    state: dict[str, torch.Tensor] = {}
    for file, names in wanted.items():
        chosen = keys if names is None else None if names == files[file] else sorted(names)
        report = None if tell is None else partial(tell_part, tell, before, total)
        try:
            loaded = read(file, keys=chosen, progress=report)
        except UnknownKeyError as error:
            if names is None:
                raise
            raise CorruptCheckpointError(f"{error}; the index and the file are of different checkpoints") from error
        if not isinstance(loaded, dict):
            raise UnsupportedContentError(
                f"{name_of(file)}: expected a dict from names to tensors, found one of type {type(loaded).__name__}; "
                f"fastensor.load gives it"
            )
        if names is not None:
            check_holds(name_of(file), loaded, names)
        state.update(loaded if names is None else {name: one for name, one in loaded.items() if name in names})
        before += sizes[file]
        if tell is not None:
            tell(before, total)
    return state


def _fill(
    files: Mapping[Location, set[str] | None],
    targets: Mapping[str, torch.Tensor],
    request: LoadRequest,
    where: str,
    overwritten: list[str],
    *,
    verify_first: bool,
) -> None:
    """Read tensors of all files into those of the same names."""
    pairings: list[Pairing] = []
    with ExitStack() as stack:
        wanted = {
            location: targets.keys() if expected is None else targets.keys() & expected
            for location, expected in files.items()
        }
        asked = {location: files[location] and names for location, names in wanted.items() if names}
        for location, file, catalog, _ in open_files(asked, stack, verify=request.checked, rewrite=True):
            names = wanted[location]
            if odd := [name for name in catalog.tensors if name in names and name not in catalog.located]:
                raise UnsupportedContentError(
                    f"{file.where}: {odd[0]!r} is more than its bytes; load it without into, and copy it"
                )
            located = {name: one for name, one in catalog.located.items() if name in names}
            pairings.append(Pairing(file, [Filling(name, one, targets[name]) for name, one in located.items()]))
            if request.checked and not catalog.checked:
                warn_unverified(file.where, catalog.unchecked)
        check_present(targets, {one.name for pairing in pairings for one in pairing.fillings}, where)
        check_fit(pairings)
        check_agree(contested(incoming(pairings, request, stack)), where, LEAVE_OUT)
        fill(pairings, request, overwritten, verify_first=verify_first)
