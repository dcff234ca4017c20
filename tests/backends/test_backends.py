"""Every backend passes the conformance suite; what only one of them does is tested here."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fastensor
from fastensor.backends import buffers, copier, direct, gds, registry, ring_reader, threads
from fastensor.backends.base import Backend, Extent
from fastensor.backends.buffers import BUFFER_COUNT, BUFFER_NBYTES
from fastensor.backends.direct import DirectBackend
from fastensor.backends.numpy import BufferedReader
from fastensor.backends.registry import available_names
from fastensor.backends.staging import open_stager
from fastensor.errors import BackendUnavailableError, UnknownBackendError
from fastensor.files import posix
from fastensor.stitch.torch_zip import TorchZip, plan
from fastensor.testing import BackendTests
from fastensor.testing.backends import make_source
from fastensor.testing.calls import Call, intercepted

SECONDS = 30


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder on a filesystem with direct I/O."""
    fd = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    try:
        direct._limits(fd)
    except BackendUnavailableError as error:
        pytest.skip(f"no direct I/O at {tmp_path}: {error}")
    finally:
        os.close(fd)
    return tmp_path


@pytest.fixture
def tmpfs() -> Path:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    return folder


class TestBuiltIn(BackendTests):
    """All but gds, which has an environment of its own (``tests/gds``)."""

    @pytest.fixture(params=[point.name for point in registry.BUILT_IN if point.name != "gds"])
    def backend(self, request: pytest.FixtureRequest) -> Backend:
        return registry.get(request.param)

    @pytest.fixture
    def extra_nbytes(self, backend: Backend) -> int | None:
        """torch copies whole storages of devices."""
        return {"torch": None, "numpy": BUFFER_NBYTES}.get(backend.name, BUFFER_COUNT * BUFFER_NBYTES)


def test_all_backends_write_the_same_bytes(disk: Path) -> None:
    state = {"a": torch.arange(100_000), "b": torch.randn(3, 5)}
    files = {}
    for name in available_names():
        fastensor.save(state, disk / name, backend=name)
        files[name] = bytearray((disk / name).read_bytes())
        _blank_serialization_id(files[name])
    assert len(set(map(bytes, files.values()))) == 1


def _blank_serialization_id(data: bytearray) -> None:
    """torch derives it from checksums, which a skeleton lacks: the record and its CRC32s differ."""
    name = b"archive/.data/serialization_id"
    at = data.index(name)
    begin = at + len(name) + int.from_bytes(data[at - 2 : at], "little")
    data[begin : begin + 48] = bytes(48)  # the id, the descriptor's signature and its CRC32
    entry = data.rindex(name) - 46
    data[entry + 16 : entry + 20] = bytes(4)


def test_what_needs_nothing_is_always_available() -> None:
    """Tests ask what is available: it must not be that nothing is."""
    assert set(available_names()) >= {"direct", "numpy", "torch"}


def test_names_of_the_paper_are_accepted() -> None:
    assert registry.get("cpy").name == "gds"
    assert registry.get("npy").name == "numpy"
    assert registry.get("pt").name == "torch"


def test_an_unknown_backend_is_refused_with_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(UnknownBackendError, match=r"'turbo'.*auto, direct, gds, numpy, torch"):
        fastensor.save({}, tmp_path / "x", backend="turbo")
    assert not list(tmp_path.iterdir())


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="already"):
        registry.register(DirectBackend())


def test_tmpfs_falls_back_with_the_reason(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmpfs / f"fastensor-{os.getpid()}.ckpt"
    try:
        with caplog.at_level(logging.WARNING, "fastensor"):
            report = fastensor.save({"a": torch.ones(10)}, path, backend="direct")
            fastensor.save({"a": torch.ones(10)}, path, backend="direct")
            _, loaded = fastensor.load_with_report(path, backend="direct")
    finally:
        path.unlink(missing_ok=True)
    assert report.backend == loaded.backend == "numpy"
    assert [(f.backend, "tmpfs" in f.reason) for f in report.fallbacks + loaded.fallbacks] == [("direct", True)] * 2
    assert len(caplog.records) == 1


def test_a_kernel_that_refuses_direct_writes_falls_back(disk: Path) -> None:
    def refuse(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(22, "Invalid argument")

    pwrite = os.pwrite
    calls = iter([refuse])
    with mock.patch.object(os, "pwrite", lambda *a: next(calls, pwrite)(*a)):
        report = fastensor.save({"a": torch.ones(10)}, disk / "x", backend="direct")
    assert report.backend == "numpy"
    assert "EINVAL" in report.fallbacks[0].reason
    assert torch.equal(torch.load(disk / "x")["a"], torch.ones(10))


def test_limits_are_asked_for_and_assumed_where_the_kernel_does_not_say(disk: Path) -> None:
    fd = os.open(disk / "probe", os.O_RDWR)
    try:
        asked = posix.direct_limits(fd)
        assert asked is not None
        assert asked.offset_alignment & (asked.offset_alignment - 1) == 0
        with mock.patch.object(posix, "_call", side_effect=OSError(38, "no statx")):
            assert posix.direct_limits(fd) == posix.DirectLimits(4096, 4096)
        with (
            mock.patch.object(posix, "direct_limits", return_value=None),
            pytest.raises(BackendUnavailableError, match="no direct I/O"),
        ):
            DirectBackend().open_reader(fd, 0, [])
        with (
            mock.patch.object(posix, "direct_limits", return_value=posix.DirectLimits(1 << 20, 512)),
            pytest.raises(BackendUnavailableError, match="alignment"),
        ):
            DirectBackend().open_reader(fd, 0, [])
    finally:
        os.close(fd)


def test_direct_writes_leave_the_page_cache_alone(disk: Path) -> None:
    fastensor.save({"a": torch.randint(0, 255, (32 << 20,), dtype=torch.uint8)}, disk / "x", backend="direct")
    fd = os.open(disk / "x", os.O_RDONLY)
    try:
        assert posix.resident_fraction(fd, 32 << 20) < 0.1
        while os.read(fd, 1 << 20):
            pass
        assert posix.resident_fraction(fd, 32 << 20) > 0.9  # the kernel may take some back at once
    finally:
        os.close(fd)


def test_looking_into_the_page_cache_reads_nothing(disk: Path) -> None:
    (disk / "x").write_bytes(bytes(1 << 20))
    fd = os.open(disk / "x", os.O_RDWR)
    try:
        os.fsync(fd)
        assert posix.resident_fraction(fd, 1 << 20) == 1.0
        assert [posix.evict(fd, 1 << 20)] + [posix.resident_fraction(fd, 1 << 20) for _ in range(20)] == [0.0] * 21
        os.pread(fd, 1, 0)
        assert 0.0 < posix.resident_fraction(fd, 1 << 20) <= 1.0
    finally:
        os.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_that_does_not_say_what_is_in_the_page_cache(disk: Path, code: int) -> None:
    """It is older than 6.5, or the file belongs to another user."""

    def refuse(call: Call) -> Any:
        if call.name == "syscall":
            raise OSError(code, os.strerror(code))
        return call.perform()

    (disk / "x").write_bytes(bytes(32 << 20))
    fd = os.open(disk / "x", os.O_RDWR)
    try:
        os.fsync(fd)
        with intercepted(refuse):
            assert posix.resident_fraction(fd, 32 << 20) == 1.0
            assert 0.0 <= posix.evict(fd, 32 << 20) <= 1.0, "samples may be read before the next one is taken"
    finally:
        os.close(fd)


def test_a_load_in_order_is_read_ahead_and_never_elsewhere(disk: Path) -> None:
    """Metadata at the file's end is read first, and must not make the reader skip what lies before it."""
    state = {
        str(i): torch.randint(0, 255, (n,), dtype=torch.uint8) for i, n in enumerate([5 << 20, 10, 3000, 9 << 20] * 4)
    }
    fastensor.save(state, disk / "x", backend="direct")
    elsewhere = []
    original = BufferedReader.readinto

    def count(self: object, offset: int, buffer: memoryview, **options: bool) -> int:
        elsewhere.append(buffer.nbytes)
        return original(self, offset, buffer, **options)  # type: ignore[arg-type]

    with mock.patch.object(BufferedReader, "readinto", count):
        loaded = fastensor.load(disk / "x", backend="direct")
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    assert max(elsewhere) < 8192, "payload was read outside the ring"


def test_transfers_reuse_buffers_and_never_share_them(disk: Path) -> None:
    fastensor.save({"a": torch.arange(1 << 20)}, disk / "x", backend="direct")
    kept = set(buffers.transfer_buffers._idle)
    assert kept
    with open_stager(make_source(100)) as first, open_stager(make_source(100)) as second:
        assert first.begin(0, 100).buffer is not second.begin(0, 100).buffer
    assert set(buffers.transfer_buffers._idle) >= kept


@pytest.mark.parametrize("allowed", [0, 3, 9])
def test_threads_that_cannot_be_started_are_done_without(disk: Path, allowed: int) -> None:
    """As at the limit of threads, or when the interpreter exits in the middle of a transfer."""
    state = {"a": torch.arange(3 << 20), "b": torch.arange(5)}
    fastensor.save(state, disk / "x")
    submit, calls = ThreadPoolExecutor.submit, iter(range(allowed))

    def refuse(self: ThreadPoolExecutor, *arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise RuntimeError("can't start new thread")
        return submit(self, *arguments, **options)

    for backend in ("direct", "numpy"):
        with mock.patch.object(ThreadPoolExecutor, "submit", refuse):
            loaded = fastensor.load(disk / "x", backend=backend)
            fastensor.save(state, disk / "y", backend=backend)
        assert all(torch.equal(loaded[key], state[key]) for key in state)
        assert torch.equal(torch.load(disk / "y")["a"], state["a"])


def test_a_reader_that_the_filesystem_refuses_falls_back(disk: Path) -> None:
    state = {"a": torch.arange(1 << 20)}
    fastensor.save(state, disk / "x")
    read_fully = posix.read_fully

    def refuse(fd: int, buffer: memoryview, offset: int, *, alignment: int = 1) -> int:
        if alignment > 1:
            raise OSError(22, "Invalid argument")
        return read_fully(fd, buffer, offset)

    with mock.patch.object(posix, "read_fully", refuse):
        loaded, report = fastensor.load_with_report(disk / "x", backend="direct")
    assert torch.equal(loaded["a"], state["a"])
    assert (report.backend, report.fallbacks[0].backend) == ("numpy", "direct")


def test_storages_of_devices_without_streams_get_their_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such devices (mps, xpu) are not in this machine: a host storage is sent down their path."""
    source = make_source(100, 5 << 10)
    expected = _stage(source, source.nbytes)
    monkeypatch.setattr(copier, "_addresses", lambda storages, devices: [0] * len(storages))
    assert _stage(source, 1000) == expected


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_waits_are_not_cut_short_by_interrupts(interruption: type[BaseException]) -> None:
    """The thread still runs when the interrupt comes, and is done when it is raised."""
    begun, go = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        return go.wait(10)

    def interrupted_wait(futures: Any) -> Any:
        if not go.is_set():
            go.set()
            raise interruption
        return wait(futures)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        begun.wait(10)
        with mock.patch.object(threads, "wait", interrupted_wait), pytest.raises(interruption):
            threads.finish([future])
        assert future.done()


def test_a_window_larger_than_its_buffer_is_refused() -> None:
    source = make_source(100)
    with open_stager(source) as stager, pytest.raises(ValueError, match="does not fit"):
        stager.begin(0, BUFFER_NBYTES + 1)


@pytest.mark.parametrize("nbytes", [1, 2, 3, 5, 7, 64, 1000])
def test_windows_of_any_size_make_the_same_image(nbytes: int) -> None:
    """Headers, checksums and payload are cut anywhere."""
    source = plan({"a": torch.arange(50), "b": torch.ones(3)}, pickle_module=pickle, pickle_protocol=2)
    whole = _stage(source, source.nbytes)
    assert _stage(source, nbytes) == whole


def _stage(source: TorchZip, nbytes: int) -> bytes:
    parts = []
    with open_stager(source) as stager:
        for offset in range(0, source.nbytes, nbytes):
            window = stager.begin(offset, min(nbytes, source.nbytes - offset))
            stager.finish(window)
            parts.append(bytes(window.data))
            stager.release(window)
    return b"".join(parts)


def test_transfers_follow_the_order_that_was_announced() -> None:
    far = 100 << 20
    transfers = ring_reader.plan_reads([Extent(far, far + 10), Extent(0, 10)], 512)
    assert [(t.begin, t.end) for t in transfers] == [(far, far + 512), (0, 512)]


def test_a_thread_of_a_pool_may_shut_it_down() -> None:
    """The call waits for the other threads of the pool, and not for the thread that makes it."""
    pool = threads.open_pool(2, "fastensor-test")
    other_may_end = threading.Event()

    def work() -> None:
        assert other_may_end.wait(SECONDS)

    other = threads.submit(pool, work)
    own = threads.submit(pool, threads.shut_down, pool)
    assert not wait([own], timeout=0.2).done
    other_may_end.set()
    own.result(SECONDS)
    assert other.done()
    with pytest.raises(threads.NoThreadsError):
        threads.submit(pool, work)


def test_kvikio_names_no_file_that_only_this_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvikio, which is not installed here, is given a path in ``/proc``."""

    def refuse(path: str, flags: str) -> object:
        raise RuntimeError(f"open of {path} failed\nwith a trace")

    kvikio = mock.Mock(spec_set=["CuFile"], CuFile=refuse)
    monkeypatch.setattr(gds, "_kvikio", mock.Mock(spec_set=["module"], module=kvikio))
    with (
        pytest.raises(BackendUnavailableError, match=r"^kvikio cannot open the file: open of it failed$"),
        gds.opened(3, "r"),
    ):
        pass
