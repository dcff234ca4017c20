"""The store: tensors in, tensors out."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from functools import partial
from typing import Any, Self, get_args

import torch
from torch import Tensor

from fastensor.backends import registry, stream
from fastensor.backends.base import Backend
from fastensor.backends.registry import can_write
from fastensor.errors import (
    BackendUnavailableError,
    CheckpointReadError,
    CheckpointWriteError,
    LayoutError,
    PlacementError,
)
from fastensor.files import posix
from fastensor.files.arguments import check_flags, check_word, checks_keywords
from fastensor.files.atomic import NewFile
from fastensor.files.shown import shown
from fastensor.select.choice import Mode
from fastensor.select.context import RESIDENT_FRACTION, Context
from fastensor.select.current import current_selector
from fastensor.select.selector import Selector
from fastensor.stitch.torch_zip import TorchZip
from fastensor.store.files import StoredFile, new_name, reading, remove, writing
from fastensor.store.packing import Packed, pack, unpack
from fastensor.store.reading import read_npy, read_pt, stored_crc32
from fastensor.store.ref import Format, TensorRef
from fastensor.store.tools import StoreStatistics, Tools, format_of, ways_to_read, ways_to_write


@checks_keywords
class TensorStore:
    """A directory of tensors, one file each, written and read by the fastest backend for each.

    Files are plain ``.npy``, or ``.pt`` as ``torch.save`` writes them, and hold one tensor without the rest of the
    storage that it may be a view of. ``np.load`` and ``torch.load`` read them; dtypes that NumPy does not have
    (bfloat16, 8-bit floats) stand in a ``.npy`` as unsigned integers. Tensors that are more than their elements
    (sparse, quantized, subclasses) are always ``.pt``; classes that torch does not know have to be allowed by
    ``torch.serialization.add_safe_globals`` before they are read.

    What comes back is equal bit by bit, with dtype, shape and ``requires_grad``, a ``Parameter`` if it was one, and in
    memory of its own. Strides are kept where the elements fill their memory without gaps (a transposed or
    ``channels_last`` tensor), which costs a copy at both ends unless it is transposed as a whole; other tensors come
    back contiguous. Attributes, hooks and the graph of a dense tensor are not stored.

    Every method may be called from several threads, and several processes may use one directory. They share only the
    files, whose names are random. A forked child can use the store of its parent.

    A store can be pickled and copied: the copy has the same directory and settings, is closed if the original is, and
    starts its counts at zero. Each of them can read and delete what the other has put. A selector that was given is
    copied with the store, and learns separately from then on.

    Args:
        directory: the directory of the files, which is created if it is missing. Closing the store removes nothing.
        selector: chooses backends, and learns from every transfer. None means the selector that knows this machine and
            filesystem (``fastensor.current_selector(directory, of="tensors")``). A selector with ``explore=False``
            tries no other backends.
        backend: ``"auto"``, or the name of the backend to use, here or in the paper (``npy``, ``pt``): then the
            selector neither chooses nor learns. Where the backend cannot be used, another one is, which is logged.
        mode: the transfers that the choice is to make fast: ``"write"``, ``"read"`` or ``"write_read"``, by the paper's
            WDic, RDic or WRDic. With the latter two, a tensor is read by the backend that wrote it; with ``"write"``,
            by the fastest backend that reads the container.
        durable: sync file and directory, so that a tensor survives a power failure once :meth:`put` has returned.
            Without ``durable``, every process on this machine still finds the tensor whole or not at all. The default
            is False, other than for checkpoints: single tensors are mostly put for the running program, which a power
            failure ends, and a sync may take longer than the write of a small tensor.
        verify: compare the bytes of a tensor with the CRC32 in its ref.

    Raises:
        CheckpointWriteError: the directory cannot be created.
        UnknownBackendError: no backend has that name.

    >>> import tempfile, torch, fastensor
    >>> with fastensor.TensorStore(tempfile.mkdtemp()) as store:
    ...     ref = store.put(torch.arange(6, dtype=torch.bfloat16).reshape(2, 3))
    ...     print(store.get(ref))
    ...     store.delete(ref)
    tensor([[0., 1., 2.],
            [3., 4., 5.]], dtype=torch.bfloat16)
    >>> ref.dtype, ref.shape, ref.nbytes
    ('bfloat16', (2, 3), 12)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        selector: Selector | None = None,
        backend: str = registry.AUTO,
        mode: Mode = "write",
        durable: bool = False,
        verify: bool = True,
    ) -> None:
        check_flags(durable=durable, verify=verify)
        if not isinstance(selector, Selector | None):
            raise TypeError(f"selector is a fastensor.Selector or None, found {selector!r}")
        self._directory = os.path.abspath(directory)
        self._selector = selector
        current = partial(current_selector, self._directory, of="tensors")
        check_word(mode, "mode", get_args(Mode))
        self._tools = Tools(backend, current if selector is None else lambda: selector, mode)
        self._durable = durable
        self._verify = verify
        self._closed = False
        try:
            os.makedirs(self._directory, exist_ok=True)
        except OSError as error:
            reason = f"cannot make a directory for tensors ({error.strerror})"
            raise CheckpointWriteError(error.errno, reason, self._directory) from error

    def __getstate__(self) -> dict[str, Any]:
        return {
            "directory": self._directory,
            "selector": self._selector,
            "backend": self._tools.tool,
            "mode": self._tools.mode,
            "durable": self._durable,
            "verify": self._verify,
            "closed": self._closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        settings = dict(state)
        closed = settings.pop("closed")
        self.__init__(**settings)  # type: ignore[misc]  # a copy is made like any other store
        self._closed = closed

    @shown
    def __repr__(self) -> str:
        """
        >>> import tempfile
        >>> TensorStore(tempfile.mkdtemp(), backend="numpy")
        <TensorStore '...': backend 'numpy', mode 'write', not durable>
        """
        durable = "durable" if self._durable else "not durable"
        state = ", closed" if self._closed else ""
        return f" {self._directory!r}: backend {self._tools.tool!r}, mode {self._tools.mode!r}, {durable}{state}"

    @property
    def directory(self) -> str:
        """The absolute path of the directory."""
        return self._directory

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Accept no more calls; running ones are finished. The files stay, and refs are valid for the next store."""
        self._closed = True

    def put(self, tensor: Tensor) -> TensorRef:
        """Store a tensor. The tensor is borrowed: it must not change until this returns.

        CUDA work that was queued on the current streams is waited for. Extra memory is the backend's, and a copy of the
        tensor, on its device, if the tensor is not contiguous.

        Raises:
            CheckpointWriteError: the operating system refused an operation, ``errno`` says why; no file is left.
            UnsupportedContentError: the tensor has no values (it is on the meta device, or its storage was freed), or
                is nested.
            StateChangedError: the storage was resized meanwhile.
        """
        return self.put_many([tensor])[0]

    def put_many(self, tensors: Iterable[Tensor]) -> list[TensorRef]:
        """Store tensors, one after the other: all of them or, if one fails, none. See :meth:`put`."""
        self._check_open()
        refs: list[TensorRef] = []
        try:
            for tensor in tensors:
                refs.append(self._put(tensor))
            if self._durable and refs:
                with writing(self._directory):
                    posix.sync_directory(self._directory)
        except BaseException:
            for ref in refs:
                with contextlib.suppress(OSError):
                    remove(self._path(ref))
            raise
        return refs

    def get(self, ref: TensorRef, device: torch.device | str | int | None = None) -> Tensor:
        """Read a tensor, which then belongs to the caller.

        Args:
            ref: the ref that :meth:`put` returned, here or in another process.
            device: the device of the result. None means the current device of the kind on which the tensor was.

        Raises:
            FileNotFoundError: the tensor has been deleted, or was put into another directory.
            CorruptCheckpointError: the file is damaged, or was replaced by another one.
            CheckpointReadError: the operating system failed to deliver the bytes.
            PlacementError: there is no such device.
            UnsafeCheckpointError: the tensor's class is one that ``torch.load(weights_only=True)`` does not allow.
            UnsupportedContentError: this torch does not have the dtype.
        """
        self._check_open()
        target = _checked_device(ref.device if device is None else device)
        path = self._path(ref)
        with reading(path), StoredFile(path) as file:
            resident = posix.resident_fraction(file.fd, file.nbytes)
            context = Context("read", target.type, warm=resident >= RESIDENT_FRACTION)
            tools = self._tools
            ways = ways_to_read(tools.tool, tools.available, ref.format, ref.backend, tools.mode, plain=ref.plain)
            read = partial(self._read, file, ref, target)
            try:
                return tools.use(ways, context, ref.nbytes, read)
            except BackendUnavailableError as error:
                raise CheckpointReadError(errno.EINVAL, f"cannot read a stored tensor: {error}", path) from error

    def get_many(self, refs: Iterable[TensorRef], device: torch.device | str | int | None = None) -> list[Tensor]:
        """Read tensors, one after the other. See :meth:`get`."""
        return [self.get(ref, device) for ref in refs]

    def delete(self, ref: TensorRef) -> None:
        """Remove a tensor. A call that is reading the tensor still gets it whole.

        Not synced: a power failure may bring back the file, to which no ref is left.

        Raises:
            FileNotFoundError: the tensor has been deleted before, or was put into another directory.
            CheckpointWriteError: the filesystem refused.
        """
        self._check_open()
        remove(self._path(ref))
        self._tools.count_delete()

    def delete_many(self, refs: Iterable[TensorRef]) -> None:
        """Remove all tensors that can be removed, then raise the first error, if there was one. See :meth:`delete`."""
        failure: OSError | None = None
        for ref in refs:
            try:
                self.delete(ref)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def statistics(self) -> StoreStatistics:
        """Counts of the transfers so far."""
        return self._tools.statistics()

    def _put(self, tensor: Tensor) -> TensorRef:
        packed = pack(tensor)
        context = Context("write", packed.values.device.type, warm=not self._durable)
        containers: list[Format] = ["pt"] if packed.not_for_npy else ["npy", "pt"]
        tools = self._tools
        ways = ways_to_write(tools.tool, tools.available, containers)
        if tools.tool not in (registry.AUTO, *ways.names):
            tools.note_fallback(tools.tool, f"a .npy file cannot hold a tensor that {packed.not_for_npy}")
        write = partial(self._write, packed)
        try:
            return tools.use(ways, context, packed.nbytes, write)
        except BackendUnavailableError as error:
            raise CheckpointWriteError(errno.EINVAL, f"cannot store a tensor: {error}", self._directory) from error

    def _write(self, packed: Packed, backend: Backend) -> TensorRef:
        container = format_of(backend.name)
        try:
            plan = packed.plan(container)
        except (LayoutError, KeyError) as error:  # KeyError: torch knows some dtypes by name only
            raise BackendUnavailableError(f"torch.save does not take it ({error})") from error
        if not can_write(backend.name, plan):
            raise BackendUnavailableError(f"it cannot write a tensor as .{container}")
        name = new_name(container)
        path = os.path.join(self._directory, name)
        with writing(path), NewFile(path) as new:
            posix.preallocate(new.fd, -(-plan.nbytes // posix.ASSUMED_ALIGNMENT) * posix.ASSUMED_ALIGNMENT)
            checksums = backend.write(plan, new.fd)
            if isinstance(plan, TorchZip):
                crc32: int | None = stored_crc32(new.fd, plan.nbytes, path)
            elif checksums or self._verify:  # a backend may return none
                (crc32,) = checksums or stream.checksums_of(plan)
            else:
                crc32 = None
            if self._durable:
                posix.sync_file(new.fd)
            new.publish()
        return packed.ref(name, container, backend.name, crc32)

    def _read(self, file: StoredFile, ref: TensorRef, device: torch.device, backend: Backend) -> Tensor:
        if ref.format == "npy":
            return unpack(read_npy(backend, file, ref, device, verify=self._verify), ref)
        return unpack(read_pt(file, ref, device, verify=self._verify), ref)

    def _path(self, ref: TensorRef) -> str:
        return os.path.join(self._directory, ref.file)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"the store of {self._directory} has been closed")


def _checked_device(device: torch.device | str | int) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except Exception as error:  # noqa: BLE001  # our error says all that torch's says
        raise PlacementError(f"no tensor can be brought to {device} ({error}); device='cpu' always works") from None
