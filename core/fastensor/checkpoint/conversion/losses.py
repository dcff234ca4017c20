"""What a conversion leaves out, before it is done."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

from fastensor.checkpoint.conversion.selection import beside
from fastensor.checkpoint.conversion.settings import ConvertSettings
from fastensor.checkpoint.conversion.sources import open_source
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.names import nodes
from fastensor.checkpoint.opened import opened
from fastensor.checkpoint.rewriting import read_catalog_of_any
from fastensor.checkpoint.sharded import is_index, weights_at
from fastensor.stitch.safetensors import beyond_format


def left_out(source: Location, settings: ConvertSettings) -> tuple[str, ...]:
    """Names of what a conversion would leave out, with ``drop``. Only the directory of the source is read, unless torch
    wrote it before 1.6.

    Not listed are: which tensors are parameters, attributes of the dict, and which tensors share memory.

    Args:
        source: as for :func:`fastensor.convert`.
        settings: of the conversion, with the container of the target.

    Raises:
        Exception: as :func:`fastensor.convert`, for what it finds before it writes.
    """
    if settings.container == "dcp":
        return () if metadata_names(source) else _left_out_of_directories(source, settings)
    becomes_torch = settings.container == "torch"
    if metadata_names(source):
        from fastensor.checkpoint.dcp import catalog, convert  # loads torch.distributed.checkpoint

        contents = catalog.read_contents(cast(str, source))
        only_tensors = not becomes_torch or bool(settings.rename)
        return convert.left_out(contents, settings.root, only_tensors=only_tensors)
    with ExitStack() as stack:
        found = open_source(source, replace(settings, drop=True, copy_ties=True, rename={}), stack)
        return (*found.left_out, *(_metadata(found.metadata) if becomes_torch else ()))


def _left_out_of_directories(source: Location, settings: ConvertSettings) -> tuple[str, ...]:
    """What a distributed checkpoint does not hold of a file: metadata, and what is beside the root."""
    found = weights_at(source)
    if found is not None and is_index(found):
        return ()
    with opened(source if found is None else found) as file, ExitStack() as stack:
        file, catalog = read_catalog_of_any(file, stack, verify=settings.verify)
        aside: tuple[str, ...] = ()
        if settings.root is not None:
            aside = beside([node.name for node in nodes(catalog.structure, file.where)], settings.root)
        return (*aside, *_metadata(catalog.metadata))


def _metadata(found: Mapping[str, str]) -> list[str]:
    return [f"metadata {name!r}" for name in beyond_format(found)]
