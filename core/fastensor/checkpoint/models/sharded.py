"""Models in several files, as Hugging Face has them: an index says which tensor is in which file."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastensor.checkpoint.directories import METADATA_NAME, metadata_names
from fastensor.checkpoint.files import make_directories
from fastensor.checkpoint.location import Location, locate
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.errors import CheckpointWriteError, CorruptCheckpointError, NotACheckpointError
from fastensor.files import posix
from fastensor.files.atomic import new_file
from fastensor.files.os_errors import kept_at, read_errors, write_errors
from fastensor.stitch.signatures import SNIFFED_NBYTES, refuse_foreign

INDEX_SUFFIX = ".index.json"
WEIGHT_MAP = "weight_map"
WHOLE = ("model.safetensors", "pytorch_model.bin")
"""Names of the file of a model that is not sharded, by ``save_pretrained`` and ``Accelerator.save_model``."""
SHARD_NBYTES = 5_000_000_000
"""The largest shard that ``save_pretrained`` writes by default."""
_INDEX = f"{WHOLE[0]}{INDEX_SUFFIX}"
_INDEX_NAME = re.compile(r".*\.index(\.[^.]+)?\.json", re.DOTALL)
_INDEX_MOST_NBYTES = 1 << 28
"""A larger file is no index, and would take a multiple of its size in memory."""
_SHARD = re.compile(r"model(-\d+)?-\d{5}-of-\d{5}\.safetensors")
"""The names of shards that are written here."""


def find_weights(folder: Path) -> Path | None:
    """The index or the file in a folder that has the weights of its model: what has the usual name for safetensors
    comes first, then other safetensors, and a file before an index, as for transformers: a program that writes one
    file may leave the index of an earlier model. None if there is none."""
    found = [*folder.glob(f"*{INDEX_SUFFIX}"), *(folder / name for name in WHOLE if (folder / name).exists())]

    def rank(path: Path) -> tuple[bool, bool, bool, str]:
        return path.name not in (_INDEX, WHOLE[0]), ".safetensors" not in path.name, is_index(path), path.name

    return min(found, key=rank, default=None)


def what_is(directory: str) -> str:
    """Words for a directory in the place of a file."""
    if metadata_names(directory):
        return (
            "the directory of a distributed checkpoint; load it by torch.distributed.checkpoint with "
            "FastensorStorageReader, or make a file of it by fastensor.convert"
        )
    if find_weights(Path(directory)) is not None:
        return "the folder of a model; fastensor.load_sharded loads what is in it"
    return f"a directory that is no distributed checkpoint (it has no {METADATA_NAME}); name what is in it"


def is_index(path: Path) -> bool:
    """True if a file is, by its name, the index of a model in several files, or of a variant of one.

    >>> is_index(Path("model.safetensors.index.json")), is_index(Path("model.safetensors.index.fp16.json"))
    (True, True)
    """
    return _INDEX_NAME.fullmatch(path.name) is not None


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


def files_at(path: Location) -> Mapping[Location, set[str] | None]:
    """The files of a checkpoint, and the names of the tensors that an index expects in each.

    Args:
        path: as for :func:`weights_at`. What is neither an index nor the folder of a model stands for itself. None are
            the names of a file without an index.

    Raises:
        CorruptCheckpointError: as :func:`files_of`.
    """
    weights = weights_at(path)
    if weights is None:
        return {path: None}
    if not is_index(weights):
        return {weights: None}
    return located(files_of(weights))


def located(files: Mapping[Path, set[str]]) -> dict[Location, set[str] | None]:
    """The files of an index as those of any checkpoint."""
    return {file: names for file, names in files.items()}  # noqa: C416  # dict() would keep narrower types


def files_behind(path: Location, *, others: str = "") -> Mapping[Location, set[str] | None]:
    """:func:`files_at`, for callers that need a file or a model.

    Args:
        path: as there.
        others: what else the caller looks for in a folder, for messages.

    Raises:
        FileNotFoundError: there is no model in the folder.
        CorruptCheckpointError: as :func:`files_of`.
    """
    files = files_at(path)
    found = locate(path)
    if path in files and isinstance(found, str) and os.path.isdir(found) and not metadata_names(found):
        raise FileNotFoundError(
            errno.ENOENT,
            f"no weights: expected {others}*{INDEX_SUFFIX} or {' or '.join(WHOLE)} in the folder; for a file of "
            f"another name, give its path",
            found,
        )
    return files


def check_holds(where: str, names: Container[str], expected: Collection[str]) -> None:
    """
    Raises:
        CorruptCheckpointError: a file lacks tensors that its index expects in it.
    """
    if missing := [name for name in expected if name not in names]:
        raise CorruptCheckpointError(
            f"{where}: {min(missing)!r} is not in it ({len(missing)} of the tensors that the index expects there "
            "are missing); the index and the file are of different checkpoints"
        )


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object.

    Raises:
        CorruptCheckpointError: it holds something else.
        NotACheckpointError: it is known what, such as a page that a server has sent; or it is a pipe or a device.
    """
    with read_errors(str(path), "cannot read the index"):
        text = _read_index(path)
    return _parsed(path, text)


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith((b"{", b"[")):
            refuse_foreign(text[:SNIFFED_NBYTES], str(path), "the index of a model")
        raise CorruptCheckpointError(f"{path}: the index is not JSON ({error})") from error
    if not isinstance(index, dict):
        raise CorruptCheckpointError(f"{path}: expected a JSON object, found {type(index).__name__}")
    return index


def files_of(index: Path) -> dict[Path, set[str]]:
    """The files that an index names, and the names of the tensors that it expects in each.

    Raises:
        CorruptCheckpointError: it is no index, or names a file that is not in its folder.
    """
    return files_in(index, read_json(index))


def files_in(index: Path, contents: Mapping[str, Any]) -> dict[Path, set[str]]:
    """:func:`files_of`, for an index that has been read."""
    names = contents.get(WEIGHT_MAP)
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise CorruptCheckpointError(
            f"{index}: expected {WEIGHT_MAP!r}, an object from names of tensors to names of files"
        )
    files: dict[Path, set[str]] = {}
    for name, file in names.items():
        if not _is_in_folder(file):
            raise CorruptCheckpointError(f"{index}: expected names of files in its folder, found {file!r}")
        files.setdefault(index.parent / file, set()).add(name)
    return files


def _is_in_folder(name: str) -> bool:
    """True if a name can be that of a file in a folder, or in a folder of it.

    >>> [name for name in ("a", "b/a", "b/../a", "/a", "a\\0", "\\ud800", ".") if _is_in_folder(name)]
    ['a', 'b/a']
    """
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return Path(name) != Path() and not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


def _read_index(path: Path) -> bytes:
    """
    Raises:
        CorruptCheckpointError: the file is larger than any index.
        NotACheckpointError: it is no file, so that reading it may not end.
    """
    status = path.stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):  # opening a directory says what is wrong
        raise NotACheckpointError(f"{path}: expected the index of a model, found a pipe, a socket or a device")
    if status.st_size > _INDEX_MOST_NBYTES:
        raise CorruptCheckpointError(
            f"{path}: the index has {status.st_size} bytes, expected {_INDEX_MOST_NBYTES} at most"
        )
    return path.read_bytes()


def write_sharded(
    folder: str | os.PathLike[str],
    sizes: Mapping[str, int],
    shard_nbytes: int,
    write: Callable[[str, Sequence[str]], SaveReport],
    *,
    durable: bool,
    replaces: bool = False,
    apart: Container[str] = (),
    about: Mapping[str, int] | None = None,
) -> SaveReport:
    """Write tensors as the shards of a model, and their index when all shards are there.

    A model that is replaced can be read until then: new shards have names that it does not use.

    Args:
        folder: is created.
        sizes: the bytes of each tensor, by name.
        shard_nbytes: shards have no more bytes of tensors, unless a tensor alone has.
        write: writes the tensors with these names into the file at a path, atomically.
        durable: sync the index and the folder.
        replaces: whether a model in the folder is replaced; if not, there must be none. Other files in it are kept.
        apart: names of tensors that share no file with others.
        about: numbers for the ``metadata`` of the index, beside ``total_size``.

    Returns:
        A report of all shards together.

    Raises:
        CheckpointWriteError: the folder holds a model that is not to be replaced, another thread or process is
            writing one there, or a file could not be written. Shards without an index may be left, which the next
            attempt replaces.
    """
    path = os.path.abspath(folder)
    with write_errors(path, "the directory cannot be created"):
        make_directories(path, durable=durable)
    with alone_in(path):
        if not replaces:
            with write_errors(path, "cannot save"):
                _check_is_free(Path(path))
        shards = new_shards(path, sizes, shard_nbytes, apart)
        reports = [write(os.path.join(path, name), tensors) for name, tensors in shards.items()]
        complete(path, shards, {**(about or {}), "total_size": sum(sizes.values())}, durable=durable)
    return _joined(path, reports)


def new_shards(
    folder: str, sizes: Mapping[str, int], shard_nbytes: int, apart: Container[str] = ()
) -> dict[str, list[str]]:
    """The files of a new model, by names that the model in a folder does not use, and the tensors of each.

    Args:
        folder: an absolute path.
        sizes, shard_nbytes, apart: as for :func:`write_sharded`.

    Raises:
        CheckpointWriteError: it is not known which names are used.
    """
    shards = split(sizes, shard_nbytes, apart)
    return dict(zip(_names(len(shards), _used_in(folder)), shards, strict=True))


def complete(folder: str, shards: Mapping[str, Sequence[str]], metadata: Mapping[str, int], *, durable: bool) -> None:
    """Write the index of shards that are all there, if they are several, and remove the model that was there before.

    Args:
        folder: an absolute path.
        shards: as :func:`new_shards` gives them.
        metadata: numbers for the index.
        durable: as for :func:`write_sharded`. The shards are durable, too.

    Raises:
        CheckpointWriteError: the index could not be written, so that the old model is there; or the message says that
            the new one is.
    """
    if len(shards) > 1:
        places = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        _write_index(os.path.join(folder, _INDEX), places, metadata, durable=durable)
    with write_errors(folder, "the new model is there, but the old one could not be removed"):
        _remove_replaced(folder, {*shards}, durable=durable)


@contextmanager
def alone_in(path: str) -> Iterator[None]:
    """Lock a folder in the block: the shards of two writers would get the same names.

    Raises:
        CheckpointWriteError: another one has locked it.
    """
    with write_errors(path, "cannot save", partial(kept_at, path)):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with write_errors(path, "cannot save", partial(kept_at, path)):
            is_alone = posix.try_lock(fd)
        if not is_alone:
            raise CheckpointWriteError(
                errno.EBUSY, "cannot save: a model is being saved there; save one after the other", path
            )
        yield
    finally:
        posix.close_read_only(fd)


def _check_is_free(folder: Path) -> None:
    found = find_weights(folder)
    if found is not None:
        raise FileExistsError(
            errno.EEXIST, "the directory holds a model already; remove it, or choose another directory", found
        )


def split(sizes: Mapping[str, int], shard_nbytes: int, apart: Container[str] = ()) -> list[list[str]]:
    """The names of the tensors of each shard, as ``save_pretrained`` splits them: a larger tensor has a shard of its
    own, which comes before the one that is being filled. What is ``apart`` comes last, in shards of its own.

    >>> split({"a": 4, "b": 3, "c": 9, "d": 1}, 7)
    [['c'], ['a', 'b'], ['d']]
    >>> split({"a": 4, "b": 3, "c": 9, "d": 1}, 7, {"a"})
    [['c'], ['b', 'd'], ['a']]
    """
    groups = [{name: nbytes for name, nbytes in sizes.items() if (name in apart) == last} for last in (False, True)]
    if all(groups):
        return [shard for group in groups for shard in split(group, shard_nbytes)]
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, nbytes in sizes.items():
        if nbytes > shard_nbytes:
            shards.append([name])
            continue
        if filled + nbytes > shard_nbytes:
            shards.append(current)
            current, filled = [], 0
        current.append(name)
        filled += nbytes
    return [*shards, current] if current or not shards else shards


def _names(count: int, used: set[str]) -> list[str]:
    """The names of so many files, none of which is in use.

    >>> _names(2, {"model-00001-of-00002.safetensors"})
    ['model-2-00001-of-00002.safetensors', 'model-2-00002-of-00002.safetensors']
    """
    if count == 1:
        return [WHOLE[0]]
    for number in itertools.count(1):
        tag = f"-{number}" if number > 1 else ""
        names = [f"model{tag}-{shard + 1:05d}-of-{count:05d}.safetensors" for shard in range(count)]
        if not used & set(names):
            return names
    raise AssertionError  # numbers do not end


def _used_in(folder: str) -> set[str]:
    """The names of the files that the index in a folder names; none if there is no index, or it is damaged.

    Raises:
        CheckpointWriteError: the operating system failed to deliver it: which files must be kept is not known.
    """
    index = Path(folder, _INDEX)
    with contextlib.suppress(FileNotFoundError, CorruptCheckpointError, NotACheckpointError):
        with write_errors(folder, "cannot save: the index that is there cannot be read", partial(kept_at, folder)):
            text = _read_index(index)
        return {file.name for file in files_in(index, _parsed(index, text))}
    return set()


def _remove_replaced(folder: str, names: set[str], *, durable: bool) -> None:
    """Remove what a model of other files has left: the file or index that it began with, and its shards.

    Args:
        folder: of the model.
        names: the files of the new one.
        durable: make sure that it does not come back.
    """
    whole = WHOLE[0] in names
    _unlink(os.path.join(folder, _INDEX if whole else WHOLE[0]))
    if durable:  # from_pretrained would take the old file before the new index
        posix.sync_directory(folder)
    for name in os.listdir(folder):
        if _SHARD.fullmatch(name) and name not in names:
            _unlink(os.path.join(folder, name))


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _write_index(path: str, places: Mapping[str, str], metadata: Mapping[str, int], *, durable: bool) -> None:
    """Write the index as ``save_pretrained`` does."""
    index = {"metadata": metadata, "weight_map": places}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    with new_file(path, "the index could not be written") as new:
        new.write_at(memoryview(text.encode()), 0)
        if durable:
            posix.sync_file(new.fd)
        new.publish(durable=durable)


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
        atomic=all(report.atomic for report in reports),
        plan_seconds=total("plan_seconds"),
        write_seconds=total("write_seconds"),
        sync_seconds=total("sync_seconds"),
        publish_seconds=total("publish_seconds"),
        seconds=total("seconds"),
        stall_seconds=total("stall_seconds"),
        wait_seconds=total("wait_seconds"),
        shared_nbytes=total("shared_nbytes"),
        fallbacks=tuple(dict.fromkeys(fallback for report in reports for fallback in report.fallbacks)),
    )
