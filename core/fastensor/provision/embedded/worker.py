"""A worker: a process that reads samples, prepares them, and makes batches of them.

The server says what is to be done, and where bytes go. The user's objects are used nowhere else, so whatever they do,
the server goes on: it starts another worker for one that has ended.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from fastensor.data.coalescing import Integers
from fastensor.data.connection import Connection, Message
from fastensor.data.ring import mapped, shared_memory
from fastensor.data.skipping import OnError
from fastensor.provision import encoding
from fastensor.provision.cache import kept_nbytes
from fastensor.provision.embedded.protocol import AddLoader, Broken, ForgetLoader, SamplesStored, StoreSamples
from fastensor.provision.embedded.spec import contents_of
from fastensor.provision.making import UserObjects, found_samples, made_batch, read_samples
from fastensor.provision.placement import pin_to
from fastensor.provision.work import Done, Work

_MOST_PIECES = 512
"""Pieces that are written together; the kernel takes 1024 at most (``IOV_MAX``)."""


class WorkerLoader:
    """A worker's record of a loader: its collate function, its ring, and the treatment of broken samples."""

    def __init__(self, added: AddLoader, ring_fd: int) -> None:
        self.on_error: OnError = added.on_error
        self._pickled = added.collate_fn
        self._collate_fn: Callable[[list[Any]], Any] | None = None
        self.ring = mapped(ring_fd, writable=True).data

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any] | None:
        """The function, if the loader has one; unpickled when it is first used, so that an error is that of a batch."""
        if self._collate_fn is None and self._pickled:
            self._collate_fn = pickle.loads(self._pickled)
        return self._collate_fn


class ServiceWorker:
    """See the module.

    Args:
        connection: to the server.
        spec_fd: what is served.
        slabs_fd: the descriptor of the memory of the cache.
        slabs: that memory.
        seed: of ``before_cache``.
    """

    def __init__(self, connection: Connection, spec_fd: int, slabs_fd: int, slabs: memoryview, *, seed: int) -> None:
        self._connection = connection
        self._spec_fd = spec_fd
        self._slabs_fd = slabs_fd
        self._slabs = slabs
        self._seed = seed
        self._contents: UserObjects | None = None
        self._loaders: dict[int, WorkerLoader] = {}
        self._to_be_stored: dict[int, list[memoryview]] = {}
        """By task the samples that the server has to find a place for."""

    def run(self) -> None:
        """Obey the server until it ends."""
        while True:
            self._connection.wait()
            for message in self._connection.arrived():
                self._obey(message)

    def _obey(self, message: Message) -> None:
        match message.content:
            case AddLoader() as added:
                assert message.fd is not None
                self._loaders[added.number] = WorkerLoader(added, message.fd)
            case ForgetLoader(number):
                self._loaders.pop(number, None)
            case StoreSamples(task, offsets):
                self._store(task, offsets)
            case Work() as work:
                try:
                    self._do(work)
                except Exception:  # noqa: BLE001  # whatever it is, the trainer is told
                    text = traceback.format_exc().encode(errors="replace").decode()
                    self._connection.send(Broken(work.number, text))

    def _do(self, work: Work) -> None:
        loader = self._loaders[work.loader] if work.loader >= 0 else None
        # of what is read ahead, all that can be read is kept
        on_error: OnError = "skip" if loader is None else loader.on_error
        read = partial(read_samples, self._loaded, seed=self._seed, on_error=on_error)
        found = found_samples(work.positions, work.offsets, work.lengths, slabs=self._slabs, read=read)
        made = None
        if loader is not None:
            made = made_batch(
                found.samples,
                work.positions,
                contents=self._loaded,
                collate_fn=loader.collate_fn,
                seed=work.seed,
                epoch=work.epoch,
                source_seed=self._seed,
                on_error=on_error,
            )
        nbytes, fd = self._written(work, made.encoded) if made is not None else (0, None)
        to_be_stored = [found.encoded(place) for place in found.read]
        lengths = np.array([len(sample) for sample in to_be_stored], np.int64)
        if to_be_stored:
            self._to_be_stored[work.number] = to_be_stored
        done = Done(
            work.number,
            nbytes,
            work.positions[found.read],
            lengths,
            work.positions[found.lost],
            made.skipped if made is not None else 0,
        )
        try:
            self._connection.send(done, fd=fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _written(self, work: Work, encoded: encoding.Encoded) -> tuple[int, int | None]:
        """Write a batch. Returns its bytes; and the memory that it is in, if its slot is too small."""
        if encoded.nbytes <= work.slot_nbytes:
            ring = self._loaders[work.loader].ring
            encoded.write_into(ring[work.slot_offset : work.slot_offset + encoded.nbytes])
            return encoded.nbytes, None
        fd, memory = shared_memory("fastensor-batch", encoded.nbytes)
        encoded.write_into(memory)
        return encoded.nbytes, fd

    def _store(self, task: int, offsets: Integers) -> None:
        pieces: list[memoryview | bytes] = []
        begin = end = 0
        for offset, sample in zip(offsets.tolist(), self._to_be_stored.pop(task), strict=True):
            if offset < 0:
                continue
            if offset != end or len(pieces) >= _MOST_PIECES:
                self._write(begin, pieces)
                pieces, begin = [], offset
            end = offset + kept_nbytes(len(sample))
            pieces += [sample, bytes(end - offset - len(sample))]
        self._write(begin, pieces)
        self._connection.send(SamplesStored(task))

    def _write(self, offset: int, pieces: Sequence[memoryview | bytes]) -> None:
        """Write to the cache, by a system call: to memory that is mapped, and not used yet, takes twice the time.
        What one call does not take, such as 2 GiB, is copied to the memory."""
        if os.pwritev(self._slabs_fd, pieces, offset) == sum(map(len, pieces)):
            return
        for piece in pieces:
            self._slabs[offset : offset + len(piece)] = piece
            offset += len(piece)

    def _loaded(self) -> UserObjects:
        if self._contents is None:
            self._contents = contents_of(self._spec_fd)
        return self._contents


def main(
    connection: Connection,
    *,
    place: int,
    spec_fd: int,
    slabs_fd: int,
    slabs: memoryview,
    seed: int,
    cpus: Sequence[frozenset[int]],
) -> None:
    """Be a worker, in a process that was forked for it.

    Args:
        place: which of the workers it is.
        cpus: for each place the processors that it runs on; none: any.

    Raises:
        ConnectionLost: the server has ended.
    """
    pin_to(cpus[place])
    torch.set_num_threads(1)
    ServiceWorker(connection, spec_fd, slabs_fd, slabs, seed=seed).run()
