"""The backend gds for real, on host memory: kvikio and NVIDIA's driver library need no GPU for that.

``make test-gds`` installs both beside the other tests' environment, and runs these.
"""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from devices import filled_at_once
from programs import run

import fastensor
from fastensor import Context, Selector, TensorStore
from fastensor.backends import gds, registry
from fastensor.backends.base import Backend
from fastensor.backends.buffers import BUFFER_COUNT, BUFFER_NBYTES
from fastensor.backends.gds import GdsBackend
from fastensor.backends.registry import available_names
from fastensor.cli import main
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.select.transfer import WHOLE_FILES
from fastensor.stitch.torch_zip import plan
from fastensor.testing import BackendTests

STATE = {"w": torch.randn(3 << 20), "b": torch.arange(1000), "small": torch.tensor(3.0)}
CONTENDERS = {"direct", "gds", "numpy"}
"""What selectors choose from: torch writes whole files only where nothing else can."""


class TestGds(BackendTests):
    uses_os = False
    may_be_missing = not os.environ.get("FASTENSOR_TESTS_NEED_GDS")

    @pytest.fixture
    def backend(self) -> Backend:
        return registry.get("gds")

    @pytest.fixture
    def extra_nbytes(self) -> int:
        """Our buffers, and those that kvikio's threads hold for bytes of devices."""
        defaults = gds._kvikio.module.defaults
        return BUFFER_COUNT * BUFFER_NBYTES + int(defaults.get("num_threads")) * int(defaults.get("bounce_buffer_size"))


def equal(found: Any) -> bool:
    return found.keys() == STATE.keys() and all(torch.equal(found[name], STATE[name]) for name in STATE)


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_files_are_what_others_write_and_read(tmp_path: Path, name: str) -> None:
    report = fastensor.save(STATE, tmp_path / name, backend="gds")
    assert (report.backend, report.fallbacks) == ("gds", ())
    assert fastensor.verify(tmp_path / name).uncompared == 0
    loaded, report = fastensor.load_with_report(tmp_path / name, backend="gds")
    assert (report.backend, report.fallbacks, report.verified) == ("gds", (), True)
    assert equal(loaded)
    assert equal(fastensor.load(tmp_path / name, backend="numpy"))
    if name.endswith(".ckpt"):
        assert equal(torch.load(tmp_path / name))
        fastensor.save(STATE, tmp_path / "direct", backend="direct")
        assert (tmp_path / "direct").stat().st_size == (tmp_path / name).stat().st_size


def test_in_memory_too(tmp_path: Path) -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    path = folder / f"fastensor-gds-{os.getpid()}.ckpt"
    try:
        assert fastensor.save(STATE, path, backend="gds").backend == "gds"
        assert equal(fastensor.load(path, backend="gds"))
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("text", "code"),
    [("POSIX error on pwrite: No space left on device", errno.ENOSPC), ("POSIX error: Input/output error", errno.EIO)],
)
def test_a_write_that_fails_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    fastensor.save({"before": torch.ones(3)}, tmp_path / "x")
    fail_in(monkeypatch, "pwrite", f"KvikIO failure at: posix_io.hpp:90: {text}")
    for backend in ("gds", Selector(paper=True)):
        with pytest.raises(fastensor.CheckpointWriteError) as caught:
            fastensor.save(STATE, tmp_path / "x", backend=backend)
        assert caught.value.errno == code
    assert list(torch.load(tmp_path / "x")) == ["before"]
    assert os.listdir(tmp_path) == ["x"]


def test_what_kvikio_cannot_write_another_backend_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in(monkeypatch, "pwrite", "cuFile error at: file_handle.cpp:60: CU_FILE_INTERNAL_ERROR")
    report = fastensor.save(STATE, tmp_path / "x", backend="gds")
    assert (report.backend, report.fallbacks[0].backend) == ("numpy", "gds")
    assert "CU_FILE_INTERNAL_ERROR" in report.fallbacks[0].reason
    assert equal(torch.load(tmp_path / "x"))


@pytest.mark.parametrize("to_device", [False, True])
def test_a_read_that_fails_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_device: bool) -> None:
    fastensor.save(STATE, tmp_path / "x")
    selector = Selector(paper=True)
    with filled_at_once() if to_device else nullcontext():
        fail_in(monkeypatch, "pread", "KvikIO failure at: posix_io.hpp:90: POSIX error on pread: Input/output error")
        with pytest.raises(fastensor.CheckpointReadError) as caught:
            fastensor.load(tmp_path / "x", "cpu", backend="gds")
        assert caught.value.errno == errno.EIO
        fail_in(monkeypatch, "pread", "cuFile error at: file_handle.cpp:60: CU_FILE_INTERNAL_ERROR")
        if to_device:  # there is another way
            assert equal(fastensor.load(tmp_path / "x", "cpu", backend=selector))
            return
        with pytest.raises(BackendUnavailableError, match="CU_FILE_INTERNAL_ERROR"):
            fastensor.load(tmp_path / "x", "cpu", backend=selector)
        found, report = fastensor.load_with_report(tmp_path / "x", "cpu", backend=selector)
        assert report.backend != "gds", "it is not used for that again"
        assert equal(found)


def fail_in(monkeypatch: pytest.MonkeyPatch, call: str, text: str) -> None:
    class Failing(gds._kvikio.module.CuFile):  # type: ignore[misc, name-defined]
        pass

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(text)

    setattr(Failing, call, fail)
    monkeypatch.setattr(gds._kvikio.module, "CuFile", Failing)


def test_a_device_that_is_full_leaves_it_to_another_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gds, "gathering_device", lambda source: torch.device("cpu"))
    monkeypatch.setattr(gds, "DeviceStager", full)
    report = fastensor.save(STATE, tmp_path / "x", backend="gds")
    assert (report.backend, "too little memory" in report.fallbacks[0].reason) == ("numpy", True)


def of_devices(read: mock.Mock) -> list[torch.Tensor]:
    """What has been read to devices."""
    return [call.args[1] for call in read.call_args_list if isinstance(call.args[1], torch.Tensor)]


def test_it_reads_to_devices_by_itself(tmp_path: Path) -> None:
    for name in ("x.ckpt", "x.safetensors"):
        fastensor.save(STATE, tmp_path / name)
        with filled_at_once(), mock.patch.object(gds, "_read_part", wraps=gds._read_part) as by_itself:
            found, report = fastensor.load_with_report(tmp_path / name, "cpu", backend="gds")
        assert equal(found)
        assert (report.backend, report.fallbacks) == ("gds", ())
        assert sum(part.nbytes for part in of_devices(by_itself)) == STATE["w"].nbytes
    with filled_at_once(), mock.patch.object(gds, "_read_part", wraps=gds._read_part) as by_itself:
        store = TensorStore(tmp_path, backend="gds")
        assert torch.equal(store.get(store.put(STATE["w"])), STATE["w"])
    assert len(of_devices(by_itself)) == 3


def test_what_kvikio_cannot_read_to_a_device_goes_by_way_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fastensor.save(STATE, tmp_path / "x")
    read = gds._read_part

    def refuse(file: Any, buffer: memoryview | torch.Tensor, offset: int) -> int:
        if isinstance(buffer, torch.Tensor):
            raise BackendUnavailableError("CU_FILE_INTERNAL_ERROR")
        return read(file, buffer, offset)

    monkeypatch.setattr(gds, "_read_part", refuse)
    with filled_at_once():
        assert equal(fastensor.load(tmp_path / "x", "cpu", backend="gds"))
    assert "by way of the host: CU_FILE_INTERNAL_ERROR" in caplog.text


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x", backend="gds")
    data = bytearray((tmp_path / "x").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(fastensor.CorruptCheckpointError):
        fastensor.load(tmp_path / "x", backend="gds")


def test_what_a_device_gathers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a GPU, but for the kind of memory: the windows, the headers and the checksums are made by torch."""
    monkeypatch.setattr(gds, "_register", lambda memory: lambda: None)
    monkeypatch.setattr(gds, "gathering_device", lambda source: torch.device("cpu"))
    state = {**STATE, **{str(number): torch.full((number % 50,), number) for number in range(500)}}
    for name in ("x.ckpt", "x.safetensors"):
        report = fastensor.save(state, tmp_path / name, backend="gds")
        assert (report.backend, report.fallbacks) == ("gds", ())
        assert fastensor.verify(tmp_path / name).uncompared == 0
        found = fastensor.load(tmp_path / name)
        assert all(torch.equal(found[key], state[key]) for key in state)


def test_asynchronous_saves(tmp_path: Path) -> None:
    with fastensor.AsyncWriter() as writer:
        reports = [writer.save(STATE, tmp_path / "x", backend="gds").result() for _ in range(3)]
    assert {report.backend for report in reports} == {"gds"}
    assert equal(torch.load(tmp_path / "x"))


def test_selectors_use_it(tmp_path: Path) -> None:
    """The paper's algorithm tries it first; by default it is tried when the budget covers that."""
    paper = Selector(paper=True)
    used = [fastensor.save(STATE, tmp_path / "x", backend=paper).backend for _ in range(4)]
    assert used[0] == "gds"
    assert set(used) == CONTENDERS == set(available_names()) - set(WHOLE_FILES)
    used = [fastensor.load_with_report(tmp_path / "x", backend=paper)[1].backend for _ in range(20)]
    assert set(used) == CONTENDERS
    nbytes = (tmp_path / "x").stat().st_size
    assert set(paper.explain(nbytes, Context("write")).timings) == CONTENDERS
    usual = Selector()
    for _ in range(100):
        usual.record(nbytes, Context("write"), "direct", 1.0)
    assert usual.choose(nbytes, Context("write"), CONTENDERS, default="direct").backend in CONTENDERS - {"direct"}


@pytest.mark.parametrize("name", ["gds", "cpy"])
def test_single_tensors(tmp_path: Path, name: str) -> None:
    with TensorStore(tmp_path, backend=name) as store:
        for tensor in (*STATE.values(), STATE["w"].bfloat16(), STATE["w"].view(3, -1).t(), torch.empty(0, 5)):
            ref = store.put(tensor)
            assert ref.backend == "gds"
            found = store.get(ref)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
        assert not store.statistics().fallbacks


def test_writes_and_reads_go_around_the_page_cache(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x", backend="gds")
    nbytes = (tmp_path / "x").stat().st_size
    with (tmp_path / "x").open("rb") as file:
        assert posix.resident_fraction(file.fileno(), nbytes) < 0.1
        fastensor.load(tmp_path / "x", backend="gds")
        assert posix.resident_fraction(file.fileno(), nbytes) < 0.1


def test_in_a_forked_child_it_is_not_available_and_says_why(tmp_path: Path) -> None:
    """kvikio's threads are not there: it would wait for ever."""
    fastensor.save(STATE, tmp_path / "x", backend="gds")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            report = fastensor.save(STATE, tmp_path / "x", backend="gds")
            code = 0 if report.backend == "numpy" and "forked" in report.fallbacks[0].reason else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert fastensor.save(STATE, tmp_path / "x", backend="gds").backend == "gds"


def test_errors_of_the_kernel_keep_their_numbers(tmp_path: Path) -> None:
    """kvikio reports them as text only."""
    fd = os.open(tmp_path / "x", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="directory") as caught, gds.errors_translated():
            gds._kvikio.module.CuFile(str(tmp_path / "missing" / "x"), "r")
        assert caught.value.errno == errno.ENOENT
        with pytest.raises(BackendUnavailableError, match="CU_FILE"), gds.errors_translated():
            raise RuntimeError("cuFile error at: file_handle.cpp:60: CU_FILE_DRIVER_NOT_INITIALIZED")
    finally:
        os.close(fd)


def test_settings_of_the_user_stay() -> None:
    program = (
        "from fastensor.backends.gds import GdsBackend; assert not GdsBackend().why_unavailable()\n"
        "from kvikio import defaults\n"
        "print(*map(defaults.get, ('num_threads', 'auto_direct_io_read', 'auto_direct_io_write')))"
    )
    own = {"KVIKIO_NTHREADS": "2", "KVIKIO_AUTO_DIRECT_IO_READ": "0"}
    for settings, expected in (({}, "4 True True"), (own, "2 False True")):
        assert run("-c", program, **settings).stdout.split() == expected.split()


def test_where_there_is_an_unused_gpu_it_does_not_begin_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds, "_DEVICES", ("/dev/null",))
    assert GdsBackend().why_unavailable() == "this torch is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "does not use CUDA yet" in GdsBackend().why_unavailable()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not GdsBackend().why_unavailable()


def test_the_doctor_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), "--sizes", "64K"]) == 0
    shown = capsys.readouterr().out
    (state,) = (line for line in shown.splitlines() if line.startswith("gds ") and "yes" in line)
    (speed,) = (line for line in shown.splitlines() if line.startswith("gds ") and "64 KiB" in line)
    assert "compat" in shown, "it must not pass for GPUDirect Storage"
    assert state != speed


def test_the_doctor_says_why_not(tmp_path: Path) -> None:
    """Without the driver's library: the environment of this process without the path that leads to it."""
    clean = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    found = subprocess.run(
        [sys.executable, "-m", "fastensor", "doctor", str(tmp_path), "--quick"],
        env=clean, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "libcuda.so.1" not in found.stdout:
        pytest.skip("this machine has NVIDIA's driver")
    (line,) = (line for line in found.stdout.splitlines() if line.startswith("gds "))
    assert "no: the library of NVIDIA's driver cannot be loaded: libcuda.so.1" in line


def test_many_small_tensors(tmp_path: Path) -> None:
    state = {str(number): torch.full((number % 50,), number) for number in range(2000)}
    fastensor.save(state, tmp_path / "x", backend="gds")
    found = fastensor.load(tmp_path / "x", backend="gds")
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_the_image_is_the_same(tmp_path: Path) -> None:
    source = plan(STATE, pickle_module=pickle, pickle_protocol=2)
    files = []
    for name in ("gds", "direct"):
        fd = os.open(tmp_path / name, os.O_RDWR | os.O_CREAT)
        try:
            registry.get(name).write(source, fd)
        finally:
            os.close(fd)
        files.append((tmp_path / name).read_bytes())
    assert files[0] == files[1]
    assert len(files[0]) == source.nbytes
