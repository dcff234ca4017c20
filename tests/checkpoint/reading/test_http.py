"""Checkpoints on servers of HTTP, above all on those that send files only whole, which torch.hub downloads as well."""

from __future__ import annotations

import http.server
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fastensor
from fastensor import CheckpointReadError, CorruptCheckpointError

SIZES = {"small": 1 << 10, "large": 3 << 20}
Answer = Callable[[bytes, str], tuple[int, dict[str, str], bytes]]
"""What a server makes of a file and of the range that was asked for: a status, headers, and what it sends."""


def by_ranges(data: bytes, asked: str) -> tuple[int, dict[str, str], bytes]:
    if not asked:
        return 200, {"Content-Length": str(len(data))}, data
    first, _, last = asked.removeprefix("bytes=").partition("-")
    part = data[int(first) : int(last) + 1]
    headers = {"Content-Length": str(len(part)), "Content-Range": f"bytes {first}-{last}/{len(data)}"}
    return 206, headers, part


def whole(data: bytes, asked: str) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Length": str(len(data))}, data


def whole_and_says_so(data: bytes, asked: str) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Length": str(len(data)), "Accept-Ranges": "none"}, data


def of_unknown_length(data: bytes, asked: str) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, data


def ranges_refused(data: bytes, asked: str) -> tuple[int, dict[str, str], bytes]:
    return (416, {"Content-Length": "0"}, b"") if asked else whole(data, asked)


def cut_off(data: bytes, asked: str) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Length": str(len(data))}, data[: len(data) // 2]


def damaged(data: bytes, asked: str) -> tuple[int, dict[str, str], bytes]:
    middle = len(data) // 2
    return 200, {"Content-Length": str(len(data))}, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


WHOLE = [whole, whole_and_says_so, of_unknown_length]


@contextmanager
def served(folder: Path, answer: Answer) -> Iterator[str]:
    """The URL of what the folder holds now."""
    files = {f"/{path.name}": path.read_bytes() for path in folder.iterdir() if path.is_file()}

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answered("")

        def do_GET(self) -> None:
            data = self.answered(self.headers.get("Range", ""))
            with suppress(ConnectionError):  # fsspec may have seen enough
                self.wfile.write(data)

        def answered(self, asked: str) -> bytes:
            status, headers, data = answer(files[self.path], asked)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            return data

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def values(numel: int) -> torch.Tensor:
    return torch.arange(numel)


def saved(folder: Path, size: str, suffix: str = "ckpt") -> str:
    name = f"{size}.{suffix}"
    fastensor.save({"w": values(SIZES[size]), "b": torch.ones(3)}, folder / name, durable=False)
    return name


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
@pytest.mark.parametrize(
    ("answer", "size"), [(ranges_refused, "large"), *((answer, size) for answer in WHOLE for size in SIZES)]
)
def test_a_server_that_sends_files_only_whole(tmp_path: Path, answer: Answer, size: str, suffix: str) -> None:
    name = saved(tmp_path, size, suffix)
    with served(tmp_path, answer) as url:
        found, report = fastensor.load_with_report(f"{url}/{name}")
        with fastensor.open(f"{url}/{name}") as lazily:
            part = lazily["w", 10:20]
    assert torch.equal(found["w"], values(SIZES[size]))
    assert torch.equal(part, torch.arange(10, 20))
    assert report.verified
    assert report.path == f"{url}/{name}"
    if size == "large":
        (fallback,) = report.fallbacks
        assert fallback.backend == "reading by ranges"
        assert "downloaded to a temporary file" in fallback.reason


def test_a_server_that_sends_ranges_is_not_asked_for_more(tmp_path: Path) -> None:
    name = saved(tmp_path, "large")
    with served(tmp_path, by_ranges) as url:
        found, report = fastensor.load_with_report(f"{url}/{name}")
    assert torch.equal(found["w"], values(SIZES["large"]))
    assert report.backend == "stream"
    assert not report.fallbacks


@pytest.mark.parametrize("answer", [whole, of_unknown_length])
def test_as_torch_does(tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = saved(tmp_path, "large")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    with served(tmp_path, answer) as url:
        expected = torch.hub.load_state_dict_from_url(f"{url}/{name}", progress=False)
        found = fastensor.load(f"{url}/{name}")
    assert torch.equal(found["w"], expected["w"])


def test_memory_is_bounded(tmp_path: Path) -> None:
    name = saved(tmp_path, "large")
    with served(tmp_path, whole) as url:
        with fastensor.open(f"{url}/{name}"):  # what is imported then is not counted
            pass
        tracemalloc.start()
        try:
            with fastensor.open(f"{url}/{name}"):
                pass
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < (tmp_path / name).stat().st_size / 2


def test_what_is_cut_off_or_damaged_on_the_way(tmp_path: Path) -> None:
    name = saved(tmp_path, "large")
    with served(tmp_path, cut_off) as url, pytest.raises(CheckpointReadError):
        fastensor.load(f"{url}/{name}")
    with served(tmp_path, damaged) as url, pytest.raises(CorruptCheckpointError, match="CRC32"):
        fastensor.load(f"{url}/{name}")


def test_a_temporary_folder_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = saved(tmp_path, "large")

    def full(*arguments: Any) -> Any:
        return open("/dev/full", "r+b")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with served(tmp_path, whole) as url, pytest.raises(CheckpointReadError, match="set TMPDIR to a folder that has"):
        fastensor.load(f"{url}/{name}")
