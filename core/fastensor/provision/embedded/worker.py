"""A worker: a process that reads samples, prepares them, and makes batches of them.

The server says what is to be done, and where bytes go. The user's objects are used nowhere else, so whatever they do,
the server goes on: it starts another worker for one that has ended.

A sample is encoded when it was read and has gone through ``before_cache``. From then on it makes no difference whether
it came from the cache. Functions of the user get a copy of their own, so they may change it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import default_collate

from fastensor.data.coalescing import Integers
from fastensor.data.connection import Connection, ConnectionLost, Message
from fastensor.errors import CorruptSampleError
from fastensor.provision import encoding
from fastensor.provision.embedded.protocol import NUMBER, Done, Say, Work, work_of
from fastensor.provision.embedded.spec import Contents, contents_of
from fastensor.provision.placement import pin_to
from fastensor.provision.seeding import seed_all

_NO_SAMPLES = np.zeros(0, np.int64)


class Loader:
    """What a worker has of a loader: its collate function, and its ring."""

    def __init__(self, pickled: bytes, ring_fd: int) -> None:
        self._pickled = pickled
        self._collate_fn: Callable[[list[Any]], Any] | None = None
        self.ring = memoryview(mmap.mmap(ring_fd, os.fstat(ring_fd).st_size))
        os.close(ring_fd)

    @property
    def is_default(self) -> bool:
        """Whether batches are made as a ``DataLoader`` makes them, which changes no sample."""
        return not self._pickled

    @property
    def collate_fn(self) -> Callable[[list[Any]], Any]:
        """The function; unpickled when it is first used, so that an error is that of a batch."""
        if self._collate_fn is None:
            self._collate_fn = pickle.loads(self._pickled) if self._pickled else default_collate
        return self._collate_fn


class Worker:
    """See the module.

    Args:
        connection: to the server.
        spec_fd: what is served.
        slabs: the memory of the cache.
        seed: of ``before_cache``.
    """

    def __init__(self, connection: Connection, spec_fd: int, slabs: memoryview, *, seed: int) -> None:
        self._connection = connection
        self._spec_fd = spec_fd
        self._slabs = slabs
        self._seed = seed
        self._contents: Contents | None = None
        self._loaders: dict[int, Loader] = {}
        self._to_be_stored: dict[int, list[memoryview]] = {}
        """By task the samples that the server has to find a place for."""

    def run(self) -> None:
        """Obey the server until it ends."""
        while True:
            while (message := self._connection.receive()) is None:
                self._connection.wait()
            self._obey(message)

    def _obey(self, message: Message) -> None:
        match message.kind:
            case Say.LOADER:
                assert message.fd is not None
                (number,) = NUMBER.unpack_from(message.body)
                self._loaders[number] = Loader(bytes(message.body[NUMBER.size :]), message.fd)
            case Say.FORGET:
                self._loaders.pop(NUMBER.unpack(message.body)[0], None)
            case Say.STORE:
                self._store(message.body)
            case Say.TASK:
                work = work_of(message.body)
                try:
                    self._do(work)
                except Exception:  # noqa: BLE001  # whatever it is, the trainer is told
                    text = traceback.format_exc().encode(errors="replace")
                    self._connection.send(Say.BROKEN, NUMBER.pack(work.number), text)

    def _do(self, work: Work) -> None:
        samples, read, lost = self._samples(work)
        nbytes, fd = self._make_batch(work, samples) if work.loader >= 0 else (0, None)
        read_samples = [samples[place] for place in read]
        lengths = np.array([len(sample) for sample in read_samples], np.int64)
        if read_samples:
            self._to_be_stored[work.number] = read_samples
        done = Done(work.number, nbytes, work.positions[read], lengths, work.positions[lost])
        try:
            self._connection.send(Say.DONE, *done.as_bytes(), fd=fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _samples(self, work: Work) -> tuple[list[memoryview], list[int], list[int]]:
        """The samples, encoded; the places in the batch of those that were read, and of those whose bytes in the cache
        are damaged, which were read, too."""
        samples: list[memoryview] = []
        missing: list[int] = []
        lost: list[int] = []
        for place, (offset, nbytes) in enumerate(zip(work.offsets.tolist(), work.lengths.tolist(), strict=True)):
            sample = self._slabs[offset : offset + nbytes] if offset >= 0 else memoryview(b"")
            samples.append(sample)
            if offset < 0:
                missing.append(place)
            elif not _is_whole(sample):
                missing.append(place)
                lost.append(place)
        if missing:
            for place, sample in zip(missing, self._read(work.positions[missing]), strict=True):
                samples[place] = sample
        return samples, missing, lost

    def _read(self, positions: Integers) -> list[memoryview]:
        """Samples of the source, as the cache takes them."""
        contents = self._loaded()
        samples = []
        wanted = positions.tolist()
        seed_all(self._seed, *wanted)  # a source may draw random numbers
        for position, value in zip(wanted, contents.source.read(wanted), strict=True):
            seed_all(self._seed, position)
            if contents.before_cache is not None:
                value = _named(contents.before_cache, value, f"before_cache, of sample {position}")
            samples.append(_written(_named(encoding.encode, value, f"sample {position}")))
        return samples

    def _make_batch(self, work: Work, samples: list[memoryview]) -> tuple[int, int | None]:
        """Returns the bytes of the batch; and the memory that it is in, if its slot is too small."""
        loader, after_cache = self._loaders[work.loader], self._loaded().after_cache
        untouched = after_cache is None and loader.is_default
        values = [encoding.decode(sample if untouched else _copy(sample)) for sample in samples]
        if after_cache is not None:
            for place, position in enumerate(work.positions.tolist()):
                seed_all(work.seed, work.epoch, position)
                values[place] = _named(after_cache, values[place], f"after_cache, of sample {position}")
        if not loader.is_default:
            seed_all(work.seed, work.epoch, int(work.positions[0]), len(values))
        encoded = encoding.encode(loader.collate_fn(values))
        if encoded.nbytes <= work.slot_nbytes:
            encoded.write_into(loader.ring[work.slot_offset : work.slot_offset + encoded.nbytes])
            return encoded.nbytes, None
        return encoded.nbytes, _memory_with(encoded)

    def _store(self, body: memoryview) -> None:
        (number,) = NUMBER.unpack_from(body)
        offsets = np.frombuffer(body[NUMBER.size :], np.int64).tolist()
        for offset, sample in zip(offsets, self._to_be_stored.pop(number), strict=True):
            if offset >= 0:
                self._slabs[offset : offset + len(sample)] = sample
        self._connection.send(Say.STORED, NUMBER.pack(number))

    def _loaded(self) -> Contents:
        if self._contents is None:
            self._contents = contents_of(self._spec_fd)
        return self._contents


def main(
    connection: Connection,
    *,
    place: int,
    spec_fd: int,
    slabs: memoryview,
    seed: int,
    cpus: Sequence[frozenset[int]],
) -> NoReturn:
    """Be a worker, in a process that was forked for it.

    Args:
        place: which of the workers it is.
        cpus: for each place the processors that it runs on; none: any.
    """
    status = 1
    try:
        pin_to(cpus[place])
        torch.set_num_threads(1)
        Worker(connection, spec_fd, slabs, seed=seed).run()
    except ConnectionLost:
        status = 0  # the server has ended
    except BaseException:  # noqa: BLE001  # it is printed, and the server starts another worker
        traceback.print_exc()
    finally:
        os._exit(status)


def _is_whole(sample: memoryview) -> bool:
    try:
        encoding.check(sample)
    except CorruptSampleError:
        return False
    return True


def _written(encoded: encoding.Encoded) -> memoryview:
    memory = memoryview(bytearray(encoded.nbytes))
    encoded.write_into(memory)
    return memory


def _copy(sample: memoryview) -> memoryview:
    return memoryview(bytearray(sample))


def _memory_with(encoded: encoding.Encoded) -> int:
    """Memory without a name that holds an encoded value."""
    fd = os.memfd_create("fastensor-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, encoded.nbytes)
        with mmap.mmap(fd, encoded.nbytes) as memory, memoryview(memory) as view:
            encoded.write_into(view)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _named(function: Callable[[Any], Any], value: Any, what: str) -> Any:
    """Call a function of the user; an error says of what."""
    try:
        return function(value)
    except Exception as error:
        error.add_note(f"This was {what}")
        raise
