"""``fastensor doctor``: what there is, how fast it is, and what is wrong with it."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import command_line

from fastensor.backends import registry
from fastensor.backends.base import Extent, Reader
from fastensor.backends.numpy import BufferedReader, NumpyBackend
from fastensor.backends.registry import available_names
from fastensor.cli.checkup import folder as folders
from fastensor.cli.checkup import software
from fastensor.cli.checkup.folder import DirectIO, Folder, PageCache, Space
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.select import current
from fastensor.select.files import file_for
from fastensor.stitch.source import Source
from fastensor.testing.calls import Call, intercepted

QUICK = ("--quick",)
SMALL = ("--sizes", "8K,1M")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which nothing is left."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def tmpfs() -> Path:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no tmpfs at /dev/shm")
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return command_line(capsys, "doctor", *arguments)


def examine(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    status, out, err = run(capsys, *arguments, "--json")
    assert err == ""
    return status, json.loads(out)


def speeds(found: Any, name: str) -> list[dict[str, Any]]:
    return [one for one in found["speeds"] if one["backend"] == name]


def advice(found: Any) -> str:
    return "\n".join(f"{one['level']}: {one['found']}; {one['todo']}" for one in found["advice"])


# all is well


def test_the_tables(capsys: Any, here: Path) -> None:
    status, out, err = run(capsys, *SMALL)
    assert (status, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["what", "found"]
    for start in (["torch", torch.__version__], ["folder", str(here)], ["direct", "yes"]):
        assert start in [row[: len(start)] for row in rows]
    assert [row[:3] for row in rows if row[1:3] in (["8", "KiB"], ["1", "MiB"])] == [
        [name, *size] for size in (["8", "KiB"], ["1", "MiB"]) for name in ("direct", "numpy", "torch")
    ]
    assert ["write", "cpu", "durable", "8", "KiB", "numpy", "by"] in [row[:7] for row in rows]
    assert os.listdir(here) == []


def test_the_object(capsys: Any, here: Path) -> None:
    status, found = examine(capsys, here, *SMALL)
    assert status == 0
    assert list(found) == [
        *("version", "software", "cuda", "kvikio", "gds", "folder", "backends", "speeds", "dictionary", "choices"),
        "advice",
    ]
    assert (found["version"], found["folder"]["path"], found["folder"]["error"]) == (1, str(here), "")
    assert found["software"]["torch"] == torch.__version__
    assert [one["name"] for one in found["backends"]] == list(registry.names())
    assert [one["name"] for one in found["backends"] if one["available"]] == list(available_names())
    assert all(one["available"] == (not one["reason"]) for one in found["backends"])
    assert [(one["backend"], one["nbytes"]) for one in found["speeds"]] == [
        (name, size) for size in (8 << 10, 1 << 20) for name in available_names()
    ]
    for one in found["speeds"]:
        assert one["correct"]
        kinds = ("write", "cold_read", "warm_read") if found["folder"]["page_cache"]["works"] else ("write",)
        assert all(one[f"{kind}_bytes_per_second"] for kind in kinds), one["reason"]
    assert [one["context"] for one in found["choices"]] == [
        name for name in ("write cpu durable", "read cpu cold", "read cpu resident") for _ in range(2)
    ]
    assert not found["dictionary"]["exists"]
    assert found["dictionary"]["error"] == ""
    assert not found["dictionary"]["explores"]
    assert os.listdir(here) == []


def test_what_would_be_chosen_minds_the_size(capsys: Any) -> None:
    _, found = examine(capsys, *QUICK)
    chosen = {(one["context"], one["nbytes"]): one["backend"] for one in found["choices"]}
    assert chosen["write cpu durable", 64 << 10] == "numpy"
    assert chosen["write cpu durable", 64 << 20] == chosen["read cpu cold", 64 << 20] == "direct"
    assert chosen["read cpu resident", 64 << 20] == "numpy"


def test_quick_measures_nothing(capsys: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastensor.cli.checkup.measurement.save", None)
    status, found = examine(capsys, *QUICK)
    assert (status, found["speeds"]) == (0, [])
    assert found["folder"]["page_cache"]["works"] or found["folder"]["kept_by"] != "disk"
    assert found["folder"]["shared_blocks"]["accepted"] == (not found["folder"]["shared_blocks"]["reason"])
    assert "MiB/s" not in run(capsys, *QUICK)[1]


def test_nothing_is_learned(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path / "dictionaries"))
    monkeypatch.setenv("FASTENSOR_EXPLORE", "1")
    assert examine(capsys, "--sizes", "8K")[0] == 0
    assert not (tmp_path / "dictionaries").exists()


def test_dictionaries_that_are_not_accessible(
    capsys: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Root may look at anything: the refusal that others get is injected."""
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path / "dictionaries"))
    monkeypatch.setattr(current, "_made", {})

    def refuse(call: Call) -> Any:
        if call.arguments and str(call.arguments[0]).startswith(str(tmp_path / "dictionaries")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), call.arguments[0])
        return call.perform()

    with intercepted(refuse):
        status, found = examine(capsys, *QUICK)
        _, out, err = run(capsys, *QUICK)
    assert status == 0
    assert (found["dictionary"]["exists"], found["dictionary"]["error"]) == (False, "Permission denied")
    assert f"{found['dictionary']['path']}, but: Permission denied\n" in out
    assert (err, caplog.records) == ("", []), "it is in the table"


def test_a_damaged_dictionary(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTENSOR_DICTIONARIES", str(tmp_path))
    monkeypatch.setattr(current, "_made", {})
    file_for(".").path.write_text("{}")
    status, found = examine(capsys, *QUICK)
    assert status == 0
    assert (found["dictionary"]["exists"], found["dictionary"]["error"]) == (True, "not a dictionary of Fastensor's")


@pytest.mark.parametrize("sizes", ["", "64X", "1K", "8K,,9K", "5G", "-8K", "8K 9K"])
def test_wrong_sizes(capsys: Any, sizes: str) -> None:
    status, out, err = run(capsys, f"--sizes={sizes}")
    assert (status, out) == (2, "")
    assert "Invalid value for '--sizes': expected sizes from 4 KiB to 4 GiB, such as 64K,64M" in err


# the folder


def test_a_missing_folder(capsys: Any, here: Path) -> None:
    status, found = examine(capsys, "not/there")
    assert status == 1
    assert advice(found) == f"error: {here}/not/there: there is no such folder; create it, or name another one"
    assert found["speeds"] == []
    status, out, _ = run(capsys, "not/there")
    assert status == 1
    assert out.endswith(f"\nerror: {here}/not/there: there is no such folder; create it, or name another one\n")


def test_a_file_is_no_folder(capsys: Any, here: Path) -> None:
    (here / "x").touch()
    status, found = examine(capsys, "x")
    assert status == 1
    assert advice(found) == f"error: {here}/x: it is no folder; name the folder that it is in"


def test_a_folder_that_is_read_only(capsys: Any, here: Path) -> None:
    folder = here
    if os.geteuid() == 0:  # root is stopped by what is no matter of rights
        folder = Path("/sys/kernel")
        if not folder.is_dir():
            pytest.skip("no sysfs")
    else:
        here.chmod(0o555)
    status, found = examine(capsys, folder)
    assert status == 1
    assert advice(found).startswith(f"error: {folder}: no file can be written there (")
    assert "have the folder made writable" in advice(found)
    assert found["folder"]["filesystem"]
    assert found["choices"]
    here.chmod(0o755)


def test_no_space(capsys: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.statvfs_result((4096, 4096, 1 << 20, 0, 0, 1 << 20, 9, 9, 0, 255))

    def fail(fd: int, data: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr(posix, "write_fully", fail)
    status, found = examine(capsys)
    assert status == 1
    assert "error: " in advice(found)
    assert "no file can be written there (No space left on device)" in advice(found)
    assert "only 0 B are free" in advice(found)
    assert "there can be only 9 more files" in advice(found)
    assert os.listdir(here) == []


def test_little_space_makes_files_smaller(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    little = os.statvfs_result((4096, 4096, 1 << 20, 10, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: little)
    status, found = examine(capsys)
    assert status == 0
    assert {one["nbytes"] for one in found["speeds"]} == {8192}
    assert found["folder"]["space"]["files_left"] is None
    assert "warning: only 40 KiB are free" in advice(found)


def test_space_that_runs_out_meanwhile(capsys: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, nbytes: int) -> bool:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(posix, "preallocate", fail)
    status, found = examine(capsys, *SMALL)
    assert status == 1
    assert advice(found).startswith("error: no backend could save anything: ")
    assert all(os.strerror(errno.EDQUOT) in one["reason"] for one in found["speeds"])
    assert os.listdir(here) == []


def test_memory_is_no_disk(capsys: Any, tmpfs: Path) -> None:
    before = set(os.listdir(tmpfs))
    status, found = examine(capsys, tmpfs, *SMALL)
    assert status == 0
    assert found["folder"]["kept_by"] == "memory"
    assert not found["folder"]["page_cache"]["works"]
    assert not found["folder"]["direct"]["accepted"]
    assert "nothing there survives the next boot" in advice(found)
    for one in speeds(found, "direct"):
        assert one["reason"] == "tmpfs lives in memory and has no direct I/O"
        assert one["write_bytes_per_second"] is None
    for one in speeds(found, "numpy"):
        assert one["reason"] == "its file could not be evicted from the page cache"
        assert one["write_bytes_per_second"]
        assert one["cold_read_bytes_per_second"] is None
    _, out, err = run(capsys, tmpfs, *SMALL)
    assert "  –  " in out
    assert err == "", "fallbacks are in the table"
    assert not {name for name in set(os.listdir(tmpfs)) - before if "doctor" in name}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"direct": DirectIO(True, "", 4, 4096), "page_cache": PageCache(1.0, 0.0, True)}, []),
        ({"direct": DirectIO(False, "it was refused", None, None)}, ["no direct I/O at /x: it was refused"]),
        ({"kept_by": "server"}, ["kept by another machine or program, on whose fsync saves depend"]),
        ({"page_cache": PageCache(1.0, 1.0, False)}, ["the page cache of /x cannot be seen or emptied"]),
        ({"space": Space(1 << 40, 1 << 41, None)}, []),
        ({"error": "it is no folder", "space": Space(1, 1 << 41, 0)}, ["error: ", "only 1 B", "only 0 more files"]),
    ],
)
def test_advice_about_folders(found: dict[str, Any], expected: list[str]) -> None:
    lines = [str(one) for one in folders.advise(Folder("/x", filesystem="ext4", **found))]
    assert len(lines) == len(expected)
    assert all(text in line for text, line in zip(expected, lines, strict=True))


def test_a_filesystem_without_direct_io(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posix, "direct_limits", lambda fd: None)
    status, found = examine(capsys, *SMALL)
    assert status == 0
    assert not found["folder"]["direct"]["accepted"]
    if found["folder"]["kept_by"] == "disk":
        assert "warning: no direct I/O at" in advice(found)
    assert all(one["write_bytes_per_second"] is None for one in speeds(found, "direct"))


# backends


class Other(NumpyBackend):
    """A backend of another package."""

    name = "other"


@pytest.fixture
def other(register: Any) -> type[Other]:
    """Registered for the test."""

    class Registered(Other):
        pass

    register(Registered())
    return Registered


def test_a_backend_of_others_is_measured(capsys: Any, other: Any) -> None:
    status, found = examine(capsys, *SMALL)
    assert status == 0
    assert all(one["correct"] and one["write_bytes_per_second"] for one in speeds(found, "other"))
    assert len(speeds(found, "other")) == 2


def test_a_backend_that_is_not_available(capsys: Any, other: Any) -> None:
    other.why_unavailable = lambda self: "no \x1b driver"
    status, found = examine(capsys, *SMALL)
    assert (status, speeds(found, "other")) == (0, [])
    assert found["backends"][-1] == {"name": "other", "available": False, "reason": "no \x1b driver"}
    assert "other    no: no \\x1b driver\n" in run(capsys, *QUICK)[1]


def test_a_backend_that_raises_when_asked(capsys: Any, other: Any) -> None:
    def fail(self: Any) -> str:
        raise RuntimeError("broken")

    other.why_unavailable = fail
    status, found = examine(capsys, *SMALL)
    assert status == 0
    assert not found["backends"][-1]["available"]
    assert "it raised RuntimeError('broken')" in found["backends"][-1]["reason"]
    assert len(found["speeds"]) == 6


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("broken"), "RuntimeError('broken')"),
        (BackendUnavailableError("not on this disk"), "not on this disk"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
)
def test_a_backend_that_raises_when_used(capsys: Any, here: Path, other: Any, error: Exception, reason: str) -> None:
    def fail(self: Any, source: Source, fd: int) -> Sequence[int]:
        raise error

    other.write = fail
    status, found = examine(capsys, *SMALL)
    assert status == 0
    assert all(reason in one["reason"] and one["write_bytes_per_second"] is None for one in speeds(found, "other"))
    assert all(one["write_bytes_per_second"] for one in speeds(found, "numpy"))
    assert os.listdir(here) == []


class Liar(BufferedReader):
    """Reads something else, and says that it is the right thing."""

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        crc32 = super().readinto(offset, buffer, checksum=checksum)
        if buffer.nbytes > 4000:
            buffer[2000] ^= 1
        return crc32


class Forger(BufferedReader):
    """Reads something else, as a broken disk does."""

    def readinto(self, offset: int, buffer: memoryview, *, checksum: bool) -> int:
        super().readinto(offset, buffer, checksum=checksum)
        buffer[buffer.nbytes // 2] ^= 1
        return zlib.crc32(buffer)


@pytest.mark.parametrize("reader", [Liar, Forger])
def test_a_backend_that_brings_other_values(
    capsys: Any, other: Any, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_reader(self: Any, fd: int, nbytes: int, order: Sequence[Extent]) -> Reader:
        found: Reader = reader(fd)
        return found

    other.open_reader = open_reader
    little = os.statvfs_result((4096, 4096, 1 << 20, 100_000, 100_000, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: little)
    status, found = examine(capsys, "--sizes", "64K")
    assert status == 1
    assert not speeds(found, "other")[0]["correct"]
    assert [one["level"] for one in found["advice"][:2]] == ["error", "warning"], "errors come first"
    assert "other does not bring back what it saved (64 KiB)" in found["advice"][0]["found"]


def test_no_backend_at_all(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyBackend, "why_unavailable", lambda self: "gone")
    monkeypatch.setattr(registry, "_backends", {"direct": registry.get("direct"), "numpy": registry.get("numpy")})
    monkeypatch.setattr(type(registry.get("direct")), "why_unavailable", lambda self: "gone, too")
    status, found = examine(capsys)
    assert (status, found["speeds"], found["choices"]) == (1, [], [])
    assert "error: no backend is available" in advice(found)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Shells have background jobs ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_interrupted(
    capsys: Any, here: Path, other: Any, number: int, interruptible: None
) -> None:
    seen: list[list[str]] = []

    def interrupt(self: Any, source: Source, fd: int) -> Sequence[int]:
        seen.append(os.listdir(here))
        os.kill(os.getpid(), number)
        return NumpyBackend.write(self, source, fd)

    other.write = interrupt
    before = signal.getsignal(number)
    status, out, err = run(capsys, *SMALL)
    assert (status, err) == (128 + number, "")
    assert "\nother    yes\n" in out, "what was known by then has been printed"
    assert [len(names) for names in seen] == [1]
    assert os.listdir(here) == []
    assert signal.getsignal(number) == before


# CUDA and kvikio


def test_a_torch_without_cuda(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    _, found = examine(capsys, *QUICK)
    assert found["cuda"]["reason"] == "this torch is built without CUDA"
    assert not torch.cuda.is_initialized()


def test_a_torch_with_cuda_says_why_it_has_no_devices(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, found = examine(capsys, *QUICK)
    assert (found["cuda"]["built"], found["cuda"]["devices"]) == ("12.8", [])
    assert found["cuda"]["reason"]
    assert not torch.cuda.is_initialized()


def test_devices_are_counted(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version:  gcc 12.3\n"
    )
    monkeypatch.setattr(software, "ROOT", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: device)
    _, out, _ = run(capsys, *QUICK)
    assert "\nCUDA        12.8, driver 580.65.06, 2 × NVIDIA H200 (140 GiB)\n" in out


def test_gds_is_not_advised_where_there_is_no_kvikio(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "find_spec", lambda name: None)
    _, found = examine(capsys, *QUICK)
    assert found["kvikio"] == {"version": "", "imports": False, "reason": "it is not installed", "libcufile": ""}
    assert found["gds"]["mode"] == "none"
    assert "kvikio" not in advice(found)


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the backend ``gds`` say why it cannot be used, or why it copies through host memory."""
    monkeypatch.setattr(software, "find_spec", lambda name: name)
    monkeypatch.setattr(software, "software_versions", lambda: {"kvikio": "25.12.00"})
    driver = SimpleNamespace(libcufile_version=lambda: (1, 13))
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)

    def state(unavailable: str, compat: str) -> None:
        monkeypatch.setattr(type(registry.get("gds")), "why_unavailable", lambda self: unavailable)
        monkeypatch.setitem(registry._NEEDED, "gds", ("", ""))
        monkeypatch.setattr(software, "compat_reason", lambda: compat)

    return state


@pytest.mark.parametrize("reason", ["", "libcufile does not reach the kernel module nvidia-fs"])
def test_the_mode_of_kvikio(capsys: Any, kvikio: Any, reason: str) -> None:
    kvikio("", reason)
    _, found = examine(capsys, *QUICK)
    assert found["kvikio"] == {"version": "25.12.00", "imports": True, "reason": "", "libcufile": "1.13"}
    assert found["gds"]["mode"] == ("compat" if reason else "native")
    assert found["gds"]["reason"] == reason
    assert bool(reason) == ("kvikio is in compat mode, which is not GPUDirect" in advice(found))


def test_a_kvikio_that_says_nothing(capsys: Any, kvikio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kvikio("", "")
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", SimpleNamespace())
    _, found = examine(capsys, *QUICK)
    assert (found["kvikio"]["imports"], found["gds"]["mode"]) == (True, "compat")
    assert found["gds"]["reason"].startswith("kvikio does not say that it uses it (AttributeError")


def test_a_kvikio_that_cannot_be_used(capsys: Any, kvikio: Any) -> None:
    kvikio("the library of NVIDIA's driver cannot be loaded", "")
    status, found = examine(capsys, *QUICK)
    assert status == 0
    assert (found["kvikio"]["imports"], found["gds"]["mode"]) == (False, "none")
    assert "kvikio 25.12.00 is installed, but cannot be used: the library of NVIDIA's driver" in advice(found)


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("version", "version: 2.24.2\n", "2.24.2"),
        ("stats", "GDS Version: 1.0.0.80\nNVFS statistics(ver: 4.0)\nNVFS Driver(version: 2.7.49)\n", "2.7.49"),
        ("stats", "something else", "of an unknown version"),
        ("", "", ""),
    ],
)
def test_the_kernel_module_of_gds(tmp_path: Path, file: str, text: str, version: str) -> None:
    if file:
        (tmp_path / "proc/driver/nvidia-fs").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia-fs" / file).write_text(text)
    assert software.nvidia_fs(tmp_path) == version
