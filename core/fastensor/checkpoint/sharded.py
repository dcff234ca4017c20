"""Models in several files, as Hugging Face has them: an index says which tensor is in which file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastensor.checkpoint.directories import metadata_names
from fastensor.checkpoint.location import Location, locate
from fastensor.checkpoint.report import SaveReport
from fastensor.errors import CorruptCheckpointError
from fastensor.files import posix
from fastensor.files.atomic import NewFile
from fastensor.files.os_errors import read_errors, write_errors

INDEX_SUFFIX = ".index.json"
WHOLE = ("model.safetensors", "pytorch_model.bin")
"""What ``save_pretrained`` and ``Accelerator.save_model`` call the file of a model that is not sharded."""
SHARD_NBYTES = 5_000_000_000
"""The largest shard that ``save_pretrained`` writes by default."""
_INDEX = f"{WHOLE[0]}{INDEX_SUFFIX}"


def find_weights(folder: Path) -> Path | None:
    """The index or the file in a folder that has the weights of its model; safetensors come first. None if there is
    none."""
    indices = sorted(folder.glob(f"*{INDEX_SUFFIX}"), key=lambda path: (".safetensors." not in path.name, path.name))
    return next(iter([*indices, *(folder / name for name in WHOLE if (folder / name).exists())]), None)


def is_index(path: Path) -> bool:
    """Whether a file is, by its name, the index of a model in several files."""
    return path.name.endswith(INDEX_SUFFIX)


def weights_at(location: Location) -> Path | None:
    """The index, or the file with the weights, of a model that a location of this machine names.

    Args:
        location: what users give as a checkpoint.

    Returns:
        The location, if it is an index; the index or file in it, if it is the folder of a model and not a distributed
        checkpoint. Else None.
    """
    found = locate(location) if isinstance(location, str | os.PathLike) else None
    if not isinstance(found, str):
        return None
    path = Path(found)
    if is_index(path):
        return path
    return find_weights(path) if os.path.isdir(found) and not metadata_names(found) else None


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        CorruptCheckpointError: it holds something else.
    """
    with read_errors(str(path), "cannot read the index"):
        text = path.read_bytes()
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: the index is not JSON ({error})") from error
    if not isinstance(index, dict):
        raise CorruptCheckpointError(f"{path}: expected a JSON object, found {type(index).__name__}")
    return index


def files_of(index: Path) -> dict[Path, set[str]]:
    """The files that an index names, and the names of the tensors that it expects in each.

    Raises:
        CorruptCheckpointError: it is no index, or names a file that is not in its folder.
    """
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CorruptCheckpointError(
            f"{index}: expected 'weight_map', an object from names of tensors to names of files"
        )
    files: dict[Path, set[str]] = {}
    for name, file in names.items():
        if file.startswith("/") or ".." in file.split("/"):
            raise CorruptCheckpointError(f"{index}: expected names of files in its folder, found {file!r}")
        files.setdefault(index.parent / file, set()).add(name)
    return files


def check_has(found: Container[str], expected: Collection[str], file: Path, index: Path) -> None:
    """Compare the names in a file with those that the index expects there.

    Raises:
        CorruptCheckpointError: some are missing.
    """
    if missing := sorted(name for name in expected if name not in found):
        raise CorruptCheckpointError(
            f"{file}: {missing[0]!r} is not in it ({len(missing)} of the tensors that {index.name} expects there are "
            f"missing); the index and the file are of different checkpoints"
        )


def write_sharded(
    folder: str | os.PathLike[str],
    sizes: Mapping[str, int],
    shard_nbytes: int,
    write: Callable[[str, Sequence[str]], SaveReport],
    *,
    durable: bool,
) -> SaveReport:
    """Write tensors as the shards of a model, and their index when all shards are there.

    Args:
        folder: is created. It must not hold a model yet.
        sizes: the bytes of each tensor, by name.
        shard_nbytes: shards have no more bytes of tensors, unless a tensor alone has.
        write: writes the tensors with these names into the file at a path.
        durable: sync the index and the folder.

    Returns:
        A report of all shards together.

    Raises:
        CheckpointWriteError: the folder holds a model, or a file could not be written. Shards without an index may be
            left, which the next attempt replaces.
    """
    path = os.path.abspath(folder)
    with write_errors(path, "the directory cannot be created"):
        os.makedirs(path, exist_ok=True)
        _check_is_free(Path(path))
    shards = _split(sizes, shard_nbytes)
    names = WHOLE[:1] if len(shards) == 1 else [_shard_name(number, len(shards)) for number in range(len(shards))]
    reports = [write(os.path.join(path, name), shard) for name, shard in zip(names, shards, strict=True)]
    if len(shards) > 1:
        places = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        _write_index(os.path.join(path, _INDEX), places, sum(sizes.values()), durable=durable)
    return _joined(path, reports)


def _check_is_free(folder: Path) -> None:
    found = find_weights(folder)
    if found is not None:
        raise FileExistsError(
            errno.EEXIST, "the directory holds a model already; remove it, or choose another directory", found
        )


def _split(sizes: Mapping[str, int], shard_nbytes: int) -> list[list[str]]:
    """The names of the tensors of each shard.

    >>> _split({"a": 4, "b": 3, "c": 9, "d": 1}, 7)
    [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if shards[-1] and filled + nbytes > shard_nbytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += nbytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_index(path: str, places: Mapping[str, str], nbytes: int, *, durable: bool) -> None:
    """Write the index as ``save_pretrained`` does."""
    index = {"metadata": {"total_size": nbytes}, "weight_map": places}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    with write_errors(path, "the index could not be written"), NewFile(path) as new:
        posix.write_fully(new.fd, memoryview(text.encode()), 0)
        if durable:
            posix.sync_file(new.fd)
        new.publish()
        if durable:
            posix.sync_directory(os.path.dirname(path))


def _joined(path: str, reports: Sequence[SaveReport]) -> SaveReport:
    """One report of saves that were made one after the other."""

    def total(name: str) -> Any:
        return sum(getattr(report, name) for report in reports)

    return SaveReport(
        path=path,
        nbytes=total("nbytes"),
        backend=reports[0].backend,
        reason=reports[0].reason,
        durable=all(report.durable for report in reports),
        atomic=len(reports) == 1,
        plan_seconds=total("plan_seconds"),
        write_seconds=total("write_seconds"),
        sync_seconds=total("sync_seconds"),
        publish_seconds=total("publish_seconds"),
        seconds=total("seconds"),
        stall_seconds=total("stall_seconds"),
        fallbacks=tuple(dict.fromkeys(fallback for report in reports for fallback in report.fallbacks)),
    )
