"""The files behind a path that hold a model's weights, read tensor by tensor."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

import fastensor
from fastensor.backends.memory import map_file
from fastensor.checkpoint.location import Location, name_of
from fastensor.checkpoint.models.sharded import check_holds, files_behind, read_json
from fastensor.errors import CheckpointReadError, CorruptCheckpointError
from fastensor.files import posix
from fastensor.files.os_errors import read_errors
from fastensor.select.transfer import BackendChoice
from fastensor.stitch.shape import is_shape

_OFFLOAD_INDEX = "index.json"


class WeightFiles(Protocol):
    """Files that hold tensors. For one thread at a time."""

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The tensors by name, in the order of the files, on the meta device."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Names that stand for the same bytes as another name, and that name."""

    def read(self, name: str) -> torch.Tensor:
        """A tensor, on the device that the files were opened for.

        Raises:
            CorruptCheckpointError: its bytes are damaged, or missing.
            CheckpointReadError: the operating system fails to deliver its bytes, or its file was written to meanwhile.
        """

    def close(self) -> None:
        """Close the files. Tensors that were read stay as they are."""


def open_weights(
    path: str | os.PathLike[str], device: torch.device, *, verify: bool, backend: BackendChoice
) -> WeightFiles:
    """Find and open the files behind a path. No tensor is read.

    Args:
        path: as for :class:`fastensor_accelerate.CheckpointMapping`.
        device: where tensors go.
        verify: compare a tensor with its CRC32 when it is read for the first time, if its file has one.
        backend: what reads to other devices than the host.

    Raises:
        FileNotFoundError: nothing is at the path, no weights are in the folder, or a file of the index is missing.
        CorruptCheckpointError: a file is damaged, or an index is none.
        CheckpointReadError, UnsupportedContentError: as for :func:`fastensor.open`.
    """
    found = Path(path, _OFFLOAD_INDEX) if os.path.isdir(path) else Path(path)
    if found.name == _OFFLOAD_INDEX and found.exists():
        return OffloadFolder(found, device)
    files = files_behind(path, others=f"{_OFFLOAD_INDEX} (of disk_offload), ")
    return Checkpoints(files, device, verify=verify, backend=backend)


class Checkpoints:
    """One checkpoint, or the shards of one. On the host, tensors are mapped.

    Args:
        files: the files, and which tensors each must hold; None if any may be there.
        device: where tensors go.
        verify: see :func:`open_weights`.
        backend: see :func:`open_weights`.
    """

    def __init__(
        self, files: Mapping[Location, set[str] | None], device: torch.device, *, verify: bool, backend: BackendChoice
    ) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.ties: dict[str, str] = {}
        self._file_of: dict[str, fastensor.LazyCheckpoint] = {}
        with ExitStack() as stack:
            for path, expected in files.items():
                file = stack.enter_context(
                    fastensor.open(
                        path, device, mmap=device.type == "cpu", verify=verify, verify_again=False, backend=backend
                    )
                )
                self._add(file, path, expected)
            self._open = stack.pop_all()

    def _add(self, file: fastensor.LazyCheckpoint, path: Location, expected: set[str] | None) -> None:
        names = file.info.keys() if expected is None else expected
        check_holds(name_of(path), file.info, names)
        for name, info in file.info.items():
            if name in names:
                self.weights[name] = torch.empty(info.shape, dtype=info.dtype, device="meta")
                self._file_of[name] = file
        self.ties |= {name: other for name, other in file.ties.items() if name in names and other in names}

    def read(self, name: str) -> torch.Tensor:
        return self._file_of[name][name]

    def close(self) -> None:
        self._open.close()


class OffloadFolder:
    """A folder that Accelerate's ``disk_offload`` or ``offload_state_dict`` has written: a raw file for each tensor.

    Such files carry no checksums. Each is opened when it is read: there may be more of them than a process may have
    open.

    Args:
        index: the folder's ``index.json``.
        device: where tensors go, by way of the page cache.
    """

    def __init__(self, index: Path, device: torch.device) -> None:
        self._device = device
        self.weights: dict[str, torch.Tensor] = {}
        self.ties: Mapping[str, str] = {}
        self._paths: dict[str, Path] = {}
        self._found: dict[str, os.stat_result] = {}
        for name, entry in read_json(index).items():
            dtype, shape = _of_entry(entry, f"{index}: {name!r}")
            path = index.parent / f"{name}.dat"
            self._paths[name] = path
            self._found[name] = found = os.stat(path)
            nbytes = math.prod(shape) * dtype.itemsize
            if found.st_size != nbytes and nbytes:  # of an empty tensor, too, a file has bytes
                raise CorruptCheckpointError(
                    f"{path}: expected {nbytes} bytes ({dtype}, {list(shape)}), found {found.st_size}; "
                    "the folder was not written whole, or belongs to another index"
                )
            self.weights[name] = torch.empty(shape, dtype=dtype, device="meta")

    def read(self, name: str) -> torch.Tensor:
        weight = self.weights[name]
        with self._opened(name) as fd:
            storage, _ = map_file(fd, 0, weight.nbytes, checksum=False)
        mapped = torch.empty(0, dtype=weight.dtype, device="cpu").set_(storage).reshape(weight.shape)
        return mapped.to(self._device)

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        path, before = self._paths[name], self._found[name]
        with read_errors(str(path)):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                now = os.fstat(fd)
                if posix.identity_of(now) != posix.identity_of(before):
                    raise CheckpointReadError(
                        errno.ESTALE, "the file was replaced or written to meanwhile; make a new mapping", str(path)
                    )
                yield fd
            finally:
                posix.close_read_only(fd)

    def close(self) -> None:
        """Nothing is open."""


def _of_entry(entry: Any, where: str) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of an entry of ``index.json``."""
    dtype = getattr(torch, str(entry.get("dtype")), None) if isinstance(entry, dict) else None
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list):
        raise CorruptCheckpointError(
            f"{where}: expected a dtype of torch and a shape, as disk_offload writes them, found {entry!r}"
        )
    if not all(type(size) is int and size >= 0 for size in shape) or not is_shape(shape):
        raise CorruptCheckpointError(f"{where}: found the shape {shape!r}")
    return dtype, tuple(shape)
