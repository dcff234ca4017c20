"""Conversions whose target is their source, of which nothing may be lost then."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fastensor.checkpoint.location import Location, RemotePath, locate, name_of
from fastensor.checkpoint.tools.catalog import Catalog, ties_in
from fastensor.checkpoint.tools.conversion.selection import Selection
from fastensor.checkpoint.tools.conversion.settings import ConvertSettings
from fastensor.checkpoint.tools.conversion.sources import ConversionSource
from fastensor.errors import UnsupportedContentError
from fastensor.stitch.safetensors import beyond_format


def is_same_file(source: Location, target: Location) -> bool:
    """True if source and target are one file, which may have several names."""
    one, other = _identity_of(source), _identity_of(target)
    return one is not None and one == other


def _identity_of(location: Location) -> object:
    """A value that is equal for two locations of one file; None if there is no file yet."""
    found = locate(location)
    if isinstance(found, RemotePath):
        return found.filesystem, found.path
    try:
        status = os.stat(found if isinstance(found, str) else found.fileno())
    except (OSError, AttributeError):  # it is not there; or an open file that is not the operating system's
        return None if isinstance(found, str) else id(found)
    return status.st_dev, status.st_ino


def check_nothing_is_lost(
    source: ConversionSource, settings: ConvertSettings, target: Location, texts: Mapping[str, str]
) -> None:
    """Refuse to replace the source by a file that holds less, or while it is read.

    Args:
        source: has the target for one of its files.
        settings: of the conversion.
        target: the file to be written.
        texts: the metadata that it gets.

    Raises:
        UnsupportedContentError: the source holds more than the new file will; or the target is open.
    """
    if not isinstance(target, str | os.PathLike):
        raise UnsupportedContentError(
            f"{name_of(target)}: the target is the file that is to be read, which would be written over before that; "
            f"give its path, which is replaced when all is written, or another target"
        )
    losses = {"what is in its other files": True} if source.only is None else _losses(*source.only, settings, texts)
    if lost := [what for what, is_lost in losses.items() if is_lost]:
        raise UnsupportedContentError(
            f"{source.where}: the target is the source, of which this would be lost: {', '.join(lost)}; choose another "
            f"target"
        )


def _losses(
    catalog: Catalog, selection: Selection, settings: ConvertSettings, texts: Mapping[str, str]
) -> dict[str, bool]:
    """Possible losses of a file, each with a flag if it occurs."""
    tensors = selection.tensors
    return {
        f"everything beside {settings.root!r}": settings.root is not None,
        "what is no tensor": settings.root is None and bool(selection.left_out),
        "which tensors share memory": bool(ties_in(tensors)),
        "metadata": not beyond_format(catalog.metadata).keys() <= texts.keys(),
        "which tensors are parameters": any(one.info.kind != "Tensor" for one in tensors.values()),
        "attributes of the dict": bool(getattr(catalog.structure, "__dict__", {})),
        "names of tensors": bool(settings.rename),
        "values of tensors": any(settings.cast(one.info.dtype) != one.info.dtype for one in tensors.values()),
    }
