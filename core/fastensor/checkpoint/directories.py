"""Recognizing directories of distributed checkpoints, and their files. This loads nothing of ``torch.distributed``."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import Any

from fastensor.checkpoint.location import Location, RemotePath, locate
from fastensor.files import posix

METADATA_NAME = ".metadata"
BESIDE_SHARDS = "meta.pt"
"""Lightning's name of the file of everything but model and optimizers, in the directory of a sharded checkpoint."""
_FILE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".safetensors")
SHARD_NAMES = rb"__\d+_(?:[0-9a-f]{16}_)?\d+\.distcp"
"""Names of files with shards, as they stand in a pickle of metadata, which need not be read whole to find them."""
_OF_ONE_RANK = r"__\d+\.metadata"


def is_metadata_name(name: str) -> bool:
    """True if a file of a distributed checkpoint holds metadata: of all ranks, or of one."""
    return name == METADATA_NAME or re.fullmatch(_OF_ONE_RANK, name) is not None


def metadata_names(location: Location) -> list[str]:
    """The names of the metadata files of a distributed checkpoint.

    Args:
        location: what users give as a checkpoint.

    Returns:
        One name; or one for each rank, if ranks have saved without collectives; or none if the location is no directory
        of a distributed checkpoint. What is no file is not among them.
    """
    if not isinstance(location, str | os.PathLike):
        return []
    found = locate(location)
    if isinstance(found, RemotePath):
        if found.path.lower().endswith(_FILE_SUFFIXES):  # a server need not be asked
            return []
        return [METADATA_NAME] if found.filesystem.isfile(f"{found.path.rstrip('/')}/{METADATA_NAME}") else []
    if not isinstance(found, str) or not os.path.isdir(found):
        return []
    names = [name for name in os.listdir(found) if is_metadata_name(name) and _may_be_file(os.path.join(found, name))]
    return [METADATA_NAME] if METADATA_NAME in names else sorted(names)


def _may_be_file(path: str) -> bool:
    """True if this is no pipe, device or directory. If it cannot be told, whoever opens it says why."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def remove_replaced_shards(directory: str) -> None:
    """Remove the files with shards that the metadata in a directory do not name: those of a checkpoint that was there
    before. Nothing happens without metadata. Several processes may do this at a time.

    Raises:
        OSError: the filesystem refused.
    """
    try:
        with open(os.path.join(directory, METADATA_NAME), "rb") as file:
            named = {*re.findall(SHARD_NAMES, file.read())}
    except FileNotFoundError:
        return
    for name in os.listdir(directory):
        encoded = os.fsencode(name)
        if re.fullmatch(SHARD_NAMES, encoded) and encoded not in named:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))


def survives_power_failure(directory: str | os.PathLike[str]) -> bool:
    """True if files in a directory are durable once they are synced: it is on this machine, and not in memory."""
    found = locate(directory)
    return isinstance(found, str) and posix.memory_filesystem_of(found) is None


def nbytes_in_directory(path: str) -> int:
    """The bytes of all files in a directory."""
    return sum(os.stat(os.path.join(path, name)).st_size for name in os.listdir(path))


def nbytes_at(location: Location) -> int:
    """The size of a file of this machine, or of those in a directory; 0 if it cannot be had: whoever opens it says
    why."""
    path: Any = locate(location)
    try:
        return nbytes_in_directory(path) if os.path.isdir(path) else os.stat(path).st_size
    except (OSError, TypeError):
        return 0
