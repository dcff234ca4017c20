"""A model's weights, read from its checkpoint when Accelerate asks for them, and ahead of that."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from fastensor.backends import registry, streams
from fastensor.errors import UnknownKeyError
from fastensor.files.arguments import as_nbytes, check_flags, checks_keywords
from fastensor.files.shown import shown
from fastensor.files.words import counted
from fastensor.select.transfer import BackendChoice
from fastensor_accelerate.matching import fill_buffers, match, no_weight, one_of_tied, parameters_of, set_extra_states
from fastensor_accelerate.weight_files import WeightFiles, open_weights

_MOST_AHEAD = 16
"""The most tensors that are read ahead: each request goes through all of them. Small ones are read in no time."""
_PATIENCE = 64
"""Number of other tensors that may be asked for before one that a guess has put in front of them."""


class Order:
    """Predicts which tensor is asked for next. What followed a tensor the last time follows it again.

    Requests have no end, and parts of them repeat, as a decoder does for each token. That is why this is no
    :class:`fastensor.offload.forward.PrefetchSchedule`, which ends, has a tensor as often as it is needed,
    and allows for what comes a little later.

    Args:
        guess: the order in which tensors are asked for the first time, as far as it is known.
    """

    def __init__(self, guess: Sequence[str] = ()) -> None:
        self._guess = guess
        self._place = {name: place for place, name in enumerate(guess)}
        self._next: dict[str, str] = {}
        """Each tensor that was asked for, and the one that was asked for after it the last time."""
        self._first = self._latest = ""
        self._reached = deque([0], maxlen=_PATIENCE)
        """Position in the guess that the first requests have reached, after each of the latest ones."""

    def add(self, name: str) -> None:
        """Note that a tensor is asked for."""
        if self._latest and self._latest != name:
            self._next[self._latest] = name
        if name not in self._next:
            self._reached.append(max(self._reached[-1], self._place.get(name, 0)))
        self._first = self._first or name
        self._latest = name

    def following(self) -> Iterator[str]:
        """The tensors that will be asked for after the latest one, each once.

        >>> order = Order(["a", "b", "c", "d"])
        >>> for name in "acdbe":
        ...     order.add(name)
        ...     print(name, *order.following())
        a b c d
        c b d a
        d b a c
        b a c d
        e a c d b
        """
        seen = {self._latest}
        for name in self._chain():
            if name not in seen:
                seen.add(name)
                yield name

    def _chain(self) -> Iterator[str]:
        name = self._latest
        visited = set()
        while name in self._next and name not in visited:
            visited.add(name)
            name = self._next[name]
            yield name
        if name in visited:
            return
        # Nothing has followed the latest tensor yet. The guess is: the tensors that were never asked for, and then
        # another pass like the first one.
        for place in range(self._reached[0], len(self._guess)):
            if self._guess[place] not in self._next:
                yield self._guess[place]
        name = self._first
        while self._guess and name not in visited:
            visited.add(name)
            yield name
            name = self._next.get(name, name)


class _Ahead(NamedTuple):
    """A tensor that is being read ahead, or was."""

    tensor: Future[torch.Tensor]
    nbytes: int


@checks_keywords
class CheckpointMapping(Mapping[str, torch.Tensor]):
    """A model's weights by name, read from a checkpoint when they are asked for, and ahead of that.

    Accelerate takes it as ``state_dict``, and runs a model that is larger than memory from a checkpoint as it is:

    - ``cpu_offload(model, execution_device, state_dict=mapping)`` runs each module with weights that are freed behind
      it.
    - ``dispatch_model(model, device_map, main_device, state_dict=mapping)`` does that for modules that the map sends to
      ``"cpu"``. With ``"disk"``, Accelerate would copy the weights to ``offload_dir`` first.

    The model may be on the meta device (``init_empty_weights``). Its persistent buffers, which Accelerate leaves in the
    model, are filled when the mapping is made: with the pages of their file, in their dtype and on their device. Other
    buffers are in no checkpoint; they keep the values that the model has computed.

    If transformers 5 converts the checkpoint when it loads it, because experts are stacked or names have changed, the
    mapping does the same. What is converted takes memory, on the host as well, and is converted again in each pass.

    On the host, a tensor is the pages of its file in the page cache, so that nothing is copied, and the system may drop
    them when memory is short. What a program writes to such a tensor stays in this process, and is gone with the
    tensor. Other devices are filled straight from the disk.

    A thread reads ahead what is needed next, in the order of the forward pass before; of the first pass, in the order
    of the model's modules. Read-ahead memory never exceeds ``read_ahead_bytes``. A tensor that is larger is read when
    it is asked for. What was read ahead in vain is kept until its memory is needed.

    A tensor is compared with its CRC32 when it is read for the first time, not in later passes.

    Any thread may ask for tensors, also several at a time. A copy by :mod:`copy` is the mapping itself. It cannot be
    pickled, and not be used in forked processes.

    Args:
        path: a file of safetensors or torch (Fastensor's or anyone's); an index of shards, ``*.index.json``; a folder
            that holds one of these as ``save_pretrained`` names them; or a folder that ``disk_offload`` has written, or
            its ``index.json``.
        model: the model that will run, on any device. Its parameters and persistent buffers must be there, in their
            shapes; dtypes may differ. Names that the checkpoint lacks because they are tied are found under the other
            name. Without a model, the first pass reads nothing ahead, no buffer is filled, and nothing is converted.
            The mapping does not keep the model.
        device: where tensors go: the device that the modules run on.
        read_ahead_bytes: how much memory tensors may take that were read and not asked for yet. 0 reads nothing ahead.
        prefix: what names in the file begin with before the model's names, such as ``"state_dict."`` for a checkpoint
            of Lightning's. Other names are left out.
        verify: compare CRC32s, where the file has them. Without, a file that has none brings no warning.
        backend: as for :func:`fastensor.load`, if ``device`` is not the host.

    Raises:
        FileNotFoundError: a file is missing.
        UnknownKeyError: the checkpoint lacks a parameter or a persistent buffer of the model, or a tensor for an extra
            state that is not empty, or has no name with the prefix; or another buffer of the model is on the meta
            device.
        UnsupportedContentError: a tensor has another shape than the model's; a file can only be loaded whole; tensors
            that the model ties have different values or dtypes; or transformers fails to convert a tensor.
        CorruptCheckpointError: a file is damaged or cut off.
        NotACheckpointError: a file is something else than a checkpoint.
        CheckpointReadError: the operating system failed to deliver bytes.
        PlacementError: there is no such device.

    >>> import os, tempfile, fastensor
    >>> from accelerate import cpu_offload
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> trained = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> _ = fastensor.save(trained.state_dict(), path)
    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> with CheckpointMapping(path, model) as weights, torch.no_grad():
    ...     _ = cpu_offload(model, torch.device("cpu"), state_dict=weights)
    ...     print(torch.equal(model(torch.ones(1, 8)), trained(torch.ones(1, 8))))
    True
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module | None = None,
        *,
        device: torch.device | str | int = "cpu",
        read_ahead_bytes: int | str = 256 << 20,
        prefix: str = "",
        verify: bool = True,
        backend: BackendChoice = registry.AUTO,
    ) -> None:
        check_flags(verify=verify)
        self._path = os.fspath(path)
        self._device = _with_index(torch.device(device))
        self._read_ahead_bytes = as_nbytes(read_ahead_bytes, "read_ahead_bytes")
        self._process = os.getpid()
        opened = partial(open_weights, path, verify=verify, backend=backend)
        files = opened(self._device)
        try:
            self._files, self._names = match(files, self._path, prefix, model)
            if model is not None:
                self._names = self._complete(model, opened, prefix)
        except BaseException:
            files.close()
            raise
        self._order = Order([] if model is None else [name for name, _ in parameters_of(model)])
        self._lock = threading.Lock()
        self._used: dict[str, tuple[weakref.ref[torch.UntypedStorage], torch.Tensor]] = {}
        """Memory of tensors that were given out, each of which begins where its storage does, and their forms, on the
        meta device. Asking for one again gives the same memory, as long as anybody uses it."""
        self._ahead: dict[str, _Ahead] = {}
        """Tensors that the thread reads and has read, by names in the files, in the order of reading."""
        self._thread = ThreadPoolExecutor(1, "fastensor-weights")
        self._is_closed = False

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor on the device.

        Raises:
            UnknownKeyError: there is no tensor of that name.
            UnsupportedContentError: the tensor is not a dense one.
            CorruptCheckpointError: the tensor does not match its CRC32, or its file was cut off.
            CheckpointReadError: the operating system failed to deliver the bytes; or the file was written to since the
                mapping was made.
            ValueError: the mapping is closed.
        """
        with self._lock:
            self._check_usable()
            if name not in self._names:
                raise UnknownKeyError(no_weight(name, self._path, self._names, self._files.weights))
            stored = self._names[name]
            self._order.add(name)
            tensor = self._in_use(stored)
            future = self._take(stored) if tensor is None else None
            self._read_ahead()
        if future is not None:
            tensor = future.result()
            self._used[stored] = weakref.ref(tensor.untyped_storage()), tensor.to("meta")
        assert tensor is not None
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} has open files; make a mapping in each process")

    @shown
    def __repr__(self) -> str:
        return f" {self._path!r}: {counted(len(self), 'weights')}{', closed' if self._is_closed else ''}"

    def close(self) -> None:
        """Stop reading ahead and close the files. Tensors in use stay as they are. Calling it again does nothing.

        A forward pass that another thread has begun fails.
        """
        with self._lock:
            self._is_closed = True
        if self._process == os.getpid():  # a forked process has no such thread
            self._thread.shutdown(cancel_futures=True)
        self._ahead.clear()
        self._files.close()

    def _complete(
        self, model: nn.Module, opened: Callable[[torch.device], WeightFiles], prefix: str
    ) -> Mapping[str, str]:
        """Set extra states, and fill buffers from the page cache. Accelerate moves them to the device, or frees them.

        Returns:
            The names, of which tied ones lead to one tensor.
        """
        files, names = self._files, self._names
        with ExitStack() as until_filled:
            if self._device.type != "cpu":
                on_host = until_filled.enter_context(closing(opened(torch.device("cpu"))))
                files, names = match(on_host, self._path, prefix, model)
            found = one_of_tied(model, files, names, self._path)
            fill_buffers(model, files, found)
            set_extra_states(model, files, found)
        return found

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ValueError(f"{self!r} is closed")
        if self._process != os.getpid():
            raise RuntimeError(f"{self!r} was made before this process was forked; make a mapping in each process")

    def _in_use(self, stored: str) -> torch.Tensor | None:
        memory, form = self._used.get(stored, (lambda: None, None))
        storage = memory()
        if storage is None or form is None:
            return None
        return torch.empty(0, dtype=form.dtype, device=storage.device).set_(storage, 0, form.shape, form.stride())

    def _take(self, stored: str) -> Future[torch.Tensor]:
        """A tensor that is read ahead; or have the thread read it, before all that it has not begun."""
        ahead = self._ahead.get(stored)
        if ahead is not None and ahead.tensor.done():
            return self._ahead.pop(stored).tensor
        waiting = [name for name, one in self._ahead.items() if not (one.tensor.running() or one.tensor.done())]
        if waiting and (stored in waiting[1:] or stored not in self._ahead):
            for name in waiting:
                if self._ahead[name].tensor.cancel():
                    del self._ahead[name]
        return self._ahead.pop(stored).tensor if stored in self._ahead else self._begin(stored)

    def _begin(self, stored: str) -> Future[torch.Tensor]:
        """Have the thread read a tensor."""
        stream = streams.entered_current(self._device)  # memory belongs to the stream that uses it
        return self._thread.submit(self._read, stored, stream)

    def _read(self, stored: str, stream: AbstractContextManager[None]) -> torch.Tensor:
        with stream:
            return self._files.read(stored)

    def _read_ahead(self) -> None:
        """Have the thread read what is expected next, as far as there is memory for it."""
        room = self._read_ahead_bytes
        expected: dict[str, int] = {}
        for name in islice(self._order.following(), _MOST_AHEAD):
            stored = self._names[name]
            nbytes = self._files.weights[stored].nbytes
            if stored in expected or nbytes > self._read_ahead_bytes or self._in_use(stored) is not None:
                continue
            if nbytes > room:
                break
            room -= nbytes
            expected[stored] = nbytes
        taken = sum(one.nbytes for one in self._ahead.values())
        for stored in [name for name in self._ahead if name not in expected]:
            wanted = sum(nbytes for name, nbytes in expected.items() if name not in self._ahead)
            future = self._ahead[stored].tensor
            if taken + wanted > self._read_ahead_bytes and (future.cancel() or future.done()):
                taken -= self._ahead.pop(stored).nbytes
        for stored, nbytes in expected.items():
            if stored not in self._ahead:
                if taken + nbytes > self._read_ahead_bytes:
                    break
                taken += nbytes
                self._ahead[stored] = _Ahead(self._begin(stored), nbytes)


def _with_index(device: torch.device) -> torch.device:
    """The device, also for threads, whose current device is another one."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
