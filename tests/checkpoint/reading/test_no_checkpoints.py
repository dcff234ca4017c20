"""What is no checkpoint at all: empty and tiny files, random bytes, and what is not even a file."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
from hostile.attacks import ENTRY_POINTS, EVERY, PLAIN, STATE, withstand
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor import CheckpointReadError, CorruptCheckpointError, FastensorError

pytestmark = pytest.mark.hostile

every_entry = pytest.mark.parametrize("entry", EVERY)
every_suffix = pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])


SECONDS = 60
"""For a test, or an example of one."""


@pytest.fixture(autouse=True)
def _promptly() -> Iterator[None]:
    """Interrupt what waits for another process."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)  # relative to the working directory, for names of sockets are short


NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a directory": (Path.mkdir, "found a directory"),
    "a FIFO": (os.mkfifo, "something else"),
    "a socket": (_socket, "something else"),
    "a symlink to a directory": (lambda path: path.symlink_to(path.parent), "found a directory"),
    "a symlink to a FIFO": (
        lambda path: (os.mkfifo(path.parent / "fifo"), path.symlink_to("fifo")),
        "something else",
    ),
    "a symlink to itself": (lambda path: path.symlink_to(path), "cannot read the checkpoint"),
    "a symlink to /dev/null": (lambda path: path.symlink_to("/dev/null"), "something else"),
    "a symlink to /dev/zero": (lambda path: path.symlink_to("/dev/zero"), "something else"),
    "a symlink to /proc/self/mem": (lambda path: path.symlink_to("/proc/self/mem"), "cannot read|is empty"),
}


@every_entry
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file(kind: str, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, message = NO_FILES[kind]
    path = tmp_path / "x.ckpt"
    make(path)
    with pytest.raises((CheckpointReadError, CorruptCheckpointError), match=message) as caught:
        ENTRY_POINTS[entry](path)
    assert str(path) in str(caught.value)


@every_entry
@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/"])
def test_devices(path: str, entry: str) -> None:
    found = "found a directory" if path == "/" else "something else"
    with pytest.raises(CheckpointReadError, match=f"{found}.*{path}"):
        ENTRY_POINTS[entry](Path(path))


@every_entry
def test_a_missing_file_is_the_built_in_error(entry: str, tmp_path: Path) -> None:
    (tmp_path / "link.ckpt").symlink_to("nowhere")
    for name in ("x.ckpt", "link.ckpt", "no_directory/x.ckpt"):
        with pytest.raises(FileNotFoundError, match=name):
            ENTRY_POINTS[entry](tmp_path / name)


@every_entry
def test_names_that_no_file_can_have(entry: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for name in ("file/x.ckpt", "x" * 256):
        with pytest.raises(CheckpointReadError, match=name):
            ENTRY_POINTS[entry](tmp_path / name)


@every_entry
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_must_not_be_read(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    fastensor.save(STATE, path)
    path.chmod(0)
    with pytest.raises(CheckpointReadError, match=r"Permission denied.*/x\.ckpt"):
        ENTRY_POINTS[entry](path)


@every_entry
@every_suffix
def test_a_symlink_is_followed(suffix: str, entry: str, tmp_path: Path) -> None:
    fastensor.save(STATE if suffix == ".ckpt" else PLAIN, tmp_path / f"x{suffix}")
    (tmp_path / f"link{suffix}").symlink_to(f"x{suffix}")
    found, expected = (ENTRY_POINTS[entry](tmp_path / f"{name}{suffix}") for name in ("link", "x"))
    assert found == expected


@every_entry
@every_suffix
def test_an_empty_file(suffix: str, entry: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    path.touch()
    with pytest.raises(CorruptCheckpointError, match=rf"{path}: the file is empty"):
        ENTRY_POINTS[entry](path)


BEGINNINGS = {
    "zeros": b"",
    "ones": b"\xff" * 30,
    "zip": b"PK\3\4",
    "the end of a zip": b"PK\5\6",
    "pickle": b"\x80\2}q\0",
    "magic number of old torch": b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\2",
    "tar": b"sys_info" + bytes(20),
    "safetensors": b"\x10\0\0\0\0\0\0\0{",
    "safetensors without tensors": b"\2\0\0\0\0\0\0\0{}",
    "random": random.Random(0).randbytes(30),
}


@every_suffix
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_tiny_files(beginning: str, suffix: str, tmp_path: Path, tally: Counter[str]) -> None:
    path = tmp_path / f"x{suffix}"
    sound = b"\2\0\0\0\0\0\0\0{}"
    for length in range(1, 31):
        data = BEGINNINGS[beginning][:length].ljust(length, b"\0")
        path.write_bytes(data)
        for entry in EVERY:
            # Any bytes may be a file of torch before 1.6, which carries no checksums: verify says so.
            excused = entry == "verify" or data == sound
            assert withstand(entry, path, {}, may_be_unverified=excused) is not None or excused, (entry, data)
        tally["tiny files"] += 1


@given(start=st.sampled_from([b"", b"PK\3\4", b"\x80\2", bytes(8) + b"{"]), data=st.binary(min_size=1, max_size=300))
@every_suffix
def test_any_bytes(
    tmp_path_factory: pytest.TempPathFactory, tally: Counter[str], suffix: str, start: bytes, data: bytes
) -> None:
    signal.alarm(SECONDS)
    path = tmp_path_factory.mktemp("any") / f"x{suffix}"
    path.write_bytes(start + data)
    for entry in EVERY:
        if entry != "verify":
            with pytest.raises(FastensorError):
                ENTRY_POINTS[entry](path)
        else:
            withstand(entry, path, {}, may_be_unverified=True)
    tally["files of random bytes"] += 1
