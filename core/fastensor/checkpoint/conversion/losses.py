"""What a conversion leaves out, before it is done."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import cast

from fastensor.checkpoint.conversion.selection import beside
from fastensor.checkpoint.conversion.settings import ConvertSettings
from fastensor.checkpoint.conversion.sources import Source
from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.location import Location
from fastensor.checkpoint.names import nodes
from fastensor.checkpoint.opened import opened
from fastensor.checkpoint.rewriting import read_catalog_of_any
from fastensor.checkpoint.sharded import is_index, weights_at
from fastensor.stitch.safetensors import beyond_format


def left_out_of_files(source: Source, settings: ConvertSettings) -> tuple[str, ...]:
    """Names of what a conversion of open files to a file, or to files of a model, leaves out.

    Not listed are: which tensors are parameters, attributes of the dict, and which tensors share memory.

    Args:
        source: was opened with ``drop``.
        settings: of the conversion, with the container of the target.
    """
    return (*source.left_out, *(_metadata(source.metadata) if settings.container == "torch" else ()))


def left_out_of_directories(source: Location, settings: ConvertSettings) -> tuple[str, ...]:
    """Names of what a conversion from or to a distributed checkpoint would leave out, with ``drop``. Only the directory
    of the source is read, unless torch wrote it before 1.6.

    Args:
        source: as for :func:`fastensor.convert`.
        settings: of the conversion, with the container of the target.

    Raises:
        Exception: as :func:`fastensor.convert`, for what it finds before it writes.
    """
    if not metadata_names(source):
        return _left_out_of_directory(source, settings)
    if settings.container == "dcp":
        return ()
    from fastensor.checkpoint.dcp import catalog, convert  # loads torch.distributed.checkpoint

    contents = catalog.read_contents(cast(str, source))
    only_tensors = settings.container != "torch" or bool(settings.rename)
    return convert.left_out(contents, settings.root, only_tensors=only_tensors)


def _left_out_of_directory(source: Location, settings: ConvertSettings) -> tuple[str, ...]:
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
