"""The tests that every backend passes.

Subclass :class:`BackendTests` in a test module and override the ``backend`` fixture. The files are made under pytest's
``tmp_path``: put that on the filesystem to be tested (``--basetemp``).
"""

from __future__ import annotations

import errno
import fcntl
import gc
import io
import itertools
import mmap
import os
import pickle
import random
import resource
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastensor.backends.base import Backend, Extent, SlotBackend
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.stitch import safetensors
from fastensor.stitch.torch_zip import TorchZip, plan
from fastensor.testing.faults import failing_call, short_call

STORAGE_NBYTES = (0, 1, 63, 511, 4095, 4096, 4097, 65536, 1 << 20, (2 << 20) - 1, (2 << 20) + 1, (9 << 20) + 7)
_SLACK_NBYTES = 8 << 20
"""Memory that threads and small objects take."""
LARGE_NBYTES = 70 << 20
"""More than the buffers of any backend hold at once."""


def make_source(*storage_nbytes: int, seed: int = 0) -> TorchZip:
    """A planned file with random bytes in storages of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    state = {
        str(i): torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)
        for i, n in enumerate(storage_nbytes)
    }
    return plan(state, pickle_module=pickle, pickle_protocol=2)


class BackendTests:
    """A backend writes exactly the image, reads exactly the file, and leaves nothing behind when it fails."""

    uses_os = True
    """True if functions of :mod:`os` move the bytes: tests make these fail, not calls of a library."""
    may_be_missing = True
    """Skip the tests if the backend is not available, or cannot use pytest's folder."""

    @pytest.fixture
    def backend(self) -> Backend:
        """The backend to test."""
        raise NotImplementedError("override the backend fixture")

    @pytest.fixture
    def extra_nbytes(self) -> int | None:
        """The most memory in bytes, beyond the state itself, that one save takes. None: the memory is not tested."""
        return None

    @pytest.fixture
    def fd(self, tmp_path: Path, backend: Backend) -> Iterator[int]:
        """An empty file that the backend can use."""
        if reason := backend.why_unavailable():
            self._skip(f"{backend.name}: {reason}")
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        try:
            backend.write(make_source(1), fd)
        except BackendUnavailableError as error:
            os.close(fd)
            self._skip(f"{backend.name} cannot use {tmp_path}: {error}")
        os.ftruncate(fd, 0)
        yield fd
        os.close(fd)

    def test_keeps_to_its_extra_memory(self, backend: Backend, extra_nbytes: int | None, fd: int) -> None:
        """In a process of its own, for which the backend is pickled."""
        if extra_nbytes is None:
            pytest.skip(f"no bound is stated for {backend.name}")
        path = os.readlink(f"/proc/self/fd/{fd}")
        process = get_context("spawn").Process(target=_measure_memory, args=(backend, path, extra_nbytes))
        process.start()
        process.join()
        assert process.exitcode == 0

    @pytest.mark.parametrize("nbytes", STORAGE_NBYTES)
    def test_writes_a_storage_of_any_size(self, backend: Backend, fd: int, nbytes: int) -> None:
        _check_written(backend, fd, make_source(nbytes))

    def test_writes_many_storages(self, backend: Backend, fd: int) -> None:
        _check_written(backend, fd, make_source(*STORAGE_NBYTES, *range(200)))

    def test_returns_the_checksums_that_a_head_needs(self, backend: Backend, fd: int) -> None:
        tensors = {"a": torch.arange(300_000), "b": torch.arange(5)}
        source = safetensors.plan(tensors, metadata=None, checksums=True)
        if not backend.can_write(source):
            pytest.skip(f"{backend.name} does not write such files")
        assert source.checksums_first
        checksums = backend.write(source, fd)
        assert list(checksums) == [zlib.crc32(tensor.numpy().data) for tensor in tensors.values()]

    def test_writes_more_than_its_buffers_hold(self, backend: Backend, fd: int) -> None:
        _check_written(backend, fd, make_source(LARGE_NBYTES))

    def test_writes_over_preallocated_space_and_earlier_attempts(self, backend: Backend, fd: int) -> None:
        os.pwrite(fd, b"x" * (1 << 20), 0)
        posix.preallocate(fd, 4 << 20)
        _check_written(backend, fd, make_source(12345))

    def test_leaves_the_descriptor_as_it_was(self, backend: Backend, fd: int) -> None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        backend.write(make_source(5000), fd)
        assert fcntl.fcntl(fd, fcntl.F_GETFL) == flags

    def test_leaks_no_descriptor(self, backend: Backend, fd: int) -> None:
        def cycle() -> int:
            backend.write(make_source(3 << 20), fd)
            size = os.fstat(fd).st_size
            reader = backend.open_reader(fd, size, [Extent(0, size)])
            reader.readinto(0, memoryview(bytearray(size)), checksum=True)
            reader.close()
            return len(os.listdir("/proc/self/fd"))

        gc.collect()  # what earlier tests have left
        wait_for_space()
        assert cycle() == cycle()

    def test_refuses_a_storage_that_was_resized(self, backend: Backend, fd: int) -> None:
        source = make_source(1000)
        source.storages[0].resize_(2000)
        with pytest.raises(RuntimeError):
            backend.write(source, fd)

    def test_saves_from_several_threads(self, backend: Backend, fd: int, tmp_path: Path) -> None:
        def save(number: int) -> None:
            own = os.open(tmp_path / str(number), os.O_RDWR | os.O_CREAT)
            try:
                _check_written(backend, own, make_source(5 << 20, number, seed=number))
            finally:
                os.close(own)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(save, range(8)))

    def test_passes_on_that_a_file_may_not_get_so_large(self, backend: Backend, fd: int) -> None:
        """The kernel cuts one write short, and refuses the writes behind it."""
        source, before = make_source(LARGE_NBYTES), resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE_NBYTES // 2, before[1]))
        try:
            with pytest.raises(OSError, match="large") as caught:
                backend.write(source, fd)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.errno == errno.EFBIG
        os.ftruncate(fd, 0)
        _check_written(backend, fd, make_source(1000))

    def test_passes_on_a_failing_write(self, backend: Backend, fd: int) -> None:
        self._skip_unless_os_is_used()
        with (
            mock.patch.object(os, "pwrite", side_effect=OSError(errno.ENOSPC, "injected")),
            pytest.raises(OSError, match="injected") as caught,
        ):
            backend.write(make_source(LARGE_NBYTES), fd)
        assert caught.value.errno == errno.ENOSPC

    def test_passes_on_whichever_call_fails(self, backend: Backend, fd: int) -> None:
        self._skip_unless_os_is_used()
        source = make_source(5 << 20, 100)
        for number in itertools.count(1):
            os.ftruncate(fd, 0)
            failure: OSError | None = None
            with failing_call(number, errno.EDQUOT) as fault:
                try:
                    backend.write(source, fd)
                except OSError as error:
                    failure = error
            if not fault.fired:
                break
            assert failure is not None, fault
            assert failure.errno == errno.EDQUOT, fault
        assert failure is None
        assert number > 2

    def test_goes_on_after_short_writes(self, backend: Backend, fd: int) -> None:
        self._skip_unless_os_is_used()
        source = make_source(5 << 20, 100)
        for number in itertools.count(1):
            os.ftruncate(fd, 0)
            with short_call(number) as fault:
                backend.write(source, fd)
            if not fault.fired:
                break
            _check_contents(fd, source)
        assert number > 2

    def _skip(self, reason: str) -> None:
        (pytest.skip if self.may_be_missing else pytest.fail)(reason)

    def _skip_unless_os_is_used(self) -> None:
        if not self.uses_os:
            pytest.skip("a library moves the bytes, whose calls cannot be made to fail from here")

    @pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
    def test_reads_what_is_there_in_any_order(self, backend: Backend, fd: int, order: str) -> None:
        content, extents = _random_file(fd)
        asked = list(extents)
        if order == "backward":
            asked.reverse()
        elif order == "shuffled":
            random.Random(0).shuffle(asked)
        reader = backend.open_reader(fd, len(content), extents)
        for extent in asked:
            _check_read(reader.readinto, content, extent.begin, extent.end)
        reader.close()
        reader.close()

    def test_reads_what_was_not_announced(self, backend: Backend, fd: int) -> None:
        content, extents = _random_file(fd)
        reader = backend.open_reader(fd, len(content), extents[10:20])
        _check_read(reader.readinto, content, 0, 10)
        _check_read(reader.readinto, content, len(content) - 1000, len(content))
        for extent in extents[8:22]:
            _check_read(reader.readinto, content, extent.begin, extent.end)
            _check_read(reader.readinto, content, extent.begin, extent.begin + 1)
        reader.close()

    def test_reads_without_checksums(self, backend: Backend, fd: int) -> None:
        content, extents = _random_file(fd)
        reader = backend.open_reader(fd, len(content), extents)
        buffer = bytearray(len(content))
        assert reader.readinto(0, memoryview(buffer), checksum=False) == 0
        assert buffer == content
        reader.close()

    def test_says_where_the_file_ends(self, backend: Backend, fd: int) -> None:
        content, _ = _random_file(fd)
        beyond = len(content) + (1 << 20)
        reader = backend.open_reader(fd, beyond, [Extent(0, beyond)])
        with pytest.raises(posix.EndOfFile, match="ends before"):
            reader.readinto(0, memoryview(bytearray(beyond)), checksum=True)
        reader.close()

    def test_passes_on_a_failing_read(self, backend: Backend, fd: int) -> None:
        self._skip_unless_os_is_used()
        content, extents = _random_file(fd)
        reader = backend.open_reader(fd, len(content), extents)
        with (
            mock.patch.object(os, "preadv", side_effect=OSError(errno.EIO, "injected")),
            pytest.raises(OSError, match="injected"),
        ):
            reader.readinto(0, memoryview(bytearray(len(content))), checksum=True)
        reader.close()

    def test_goes_on_after_short_reads(self, backend: Backend, fd: int) -> None:
        self._skip_unless_os_is_used()
        content, extents = _random_file(fd)
        for number in itertools.count(1):
            buffer = bytearray(len(content))
            with short_call(number) as fault:
                reader = backend.open_reader(fd, len(content), extents)
                for extent in extents:
                    reader.readinto(extent.begin, memoryview(buffer)[extent.begin : extent.end], checksum=False)
                reader.close()
            if not fault.fired:
                break
            assert buffer == content, fault
        assert number > 2

    def test_moves_parts_of_a_file(self, backend: Backend, fd: int) -> None:
        if not isinstance(backend, SlotBackend):
            pytest.skip(f"{backend.name} does not move parts of files")
        page, pages = 4096, 64
        os.ftruncate(fd, pages * page)
        slots = backend.open_slots(fd)
        assert page % slots.alignment == 0
        memory = memoryview(mmap.mmap(-1, 16 * page))
        for seed, (begin, count) in enumerate(((0, 1), (40, 16), (3, 5), (pages - 1, 1), (40, 16))):
            content = random.Random(seed).randbytes(count * page)
            part = memory[: count * page]
            part[:] = content
            slots.write(part, begin * page)
            part[:] = bytes(count * page)
            slots.read(part, begin * page)
            assert part == content
            assert os.pread(fd, count * page, begin * page) == content
        with pytest.raises(OSError, match="ends before"):
            slots.read(memory[: 2 * page], (pages - 1) * page)
        slots.close()
        assert os.fstat(fd).st_size == pages * page


def _measure_memory(backend: Backend, path: str, extra_nbytes: int) -> None:
    """Assert that a second save takes no more memory: a first save loads modules."""
    fd, source = os.open(path, os.O_RDWR), make_source(2 * LARGE_NBYTES)
    backend.write(make_source(1), fd)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_nbytes("VmRSS")
    backend.write(source, fd)
    assert _resident_nbytes("VmHWM") - before < extra_nbytes + _SLACK_NBYTES


def _resident_nbytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _check_written(backend: Backend, fd: int, source: TorchZip) -> None:
    checksums = backend.write(source, fd)
    _check_contents(fd, source)
    if checksums:
        contents = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in source.storages]
        assert list(checksums) == [zlib.crc32(content.numpy().data) for content in contents]


def _check_contents(fd: int, source: TorchZip) -> None:
    size = os.fstat(fd).st_size
    assert size == source.image.nbytes
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        data = file.read()
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    loaded = torch.load(io.BytesIO(data))
    for storage, tensor in zip(source.storages, loaded.values(), strict=True):
        assert torch.equal(tensor, torch.empty(0, dtype=torch.uint8).set_(storage))


def _random_file(fd: int) -> tuple[bytes, list[Extent]]:
    """Fill a file with random contents. Returns them, and small and large extents that cover them."""
    rng = random.Random(1)
    sizes = [rng.choice((1, 100, 5000, 300_000, 3 << 20)) for _ in range(40)]
    content = rng.randbytes(sum(sizes))
    os.pwrite(fd, content, 0)
    os.fsync(fd)
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return content, [Extent(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]


def _check_read(readinto: Callable[..., int], content: bytes, begin: int, end: int) -> None:
    buffer = bytearray(end - begin)
    assert readinto(begin, memoryview(buffer), checksum=True) == zlib.crc32(content[begin:end])
    assert buffer == content[begin:end]
