"""The stand-ins for what is remote, which ``benchmarks/provision.py`` measures with."""

from __future__ import annotations

import importlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

DELAY_SECONDS = 0.05
BYTES_PER_SECOND = 16e6
SECONDS = 30
CLIENTS = 5


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("remote_storage")


def test_a_proxy_brings_all_bytes_both_ways_and_late(remote: Any, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096

    def echo() -> None:
        connection, _ = listener.accept()
        with connection:
            while piece := connection.recv(1 << 16):
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        (tmp_path / "port").write_text(str(listener.getsockname()[1]))
        threading.Thread(target=echo, daemon=True).start()
        with remote.Proxy(tmp_path / "port", remote.Link(DELAY_SECONDS, BYTES_PER_SECOND)) as proxy:
            began = time.monotonic()
            with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                threading.Thread(target=client.sendall, args=(content,)).start()
                came = bytearray()
                while len(came) < len(content):
                    came += client.recv(1 << 16)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) == b""
            seconds = time.monotonic() - began
    assert came == content
    assert seconds >= 2 * DELAY_SECONDS
    assert seconds >= 2 * len(content) / BYTES_PER_SECOND


def test_a_client_that_has_gone_is_noticed_by_the_service(remote: Any, tmp_path: Path) -> None:
    def send_for_ever() -> None:
        connection, _ = listener.accept()
        with connection:
            while True:
                connection.sendall(bytes(1 << 20))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        (tmp_path / "port").write_text(str(listener.getsockname()[1]))
        with remote.Proxy(tmp_path / "port", remote.Link(0.0, 1e12)) as proxy:
            for _ in range(CLIENTS):
                sent = pool.submit(send_for_ever)
                with socket.create_connection(("127.0.0.1", proxy.port)) as client:
                    assert client.recv(1) == b"\0"
                assert isinstance(sent.exception(SECONDS), ConnectionError)


def test_a_client_that_comes_before_the_service_is_refused_and_the_next_is_not(remote: Any, tmp_path: Path) -> None:
    with remote.Proxy(tmp_path / "port", remote.Link(0.0, 1e9)) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port), SECONDS) as client:
            assert client.recv(1) == b""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(SECONDS)
            (tmp_path / "port").write_text(str(listener.getsockname()[1]))
            with socket.create_connection(("127.0.0.1", proxy.port), SECONDS) as client:
                client.sendall(b"there")
                service, _ = listener.accept()
                with service:
                    assert service.recv(5, socket.MSG_WAITALL) == b"there"


def test_threads_read_objects_at_the_same_time(remote: Any, tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 100_000)
    with remote.Storage(tmp_path, remote.Link(DELAY_SECONDS, 1e9)) as storage, ThreadPoolExecutor(8) as pool:
        objects = remote.RemoteObjects(storage.port, storage.count, "objects")
        found = list(pool.map(objects.__getitem__, range(8)))
        assert storage.sent_nbytes == 800_000
    assert found == [bytes([number]) * 100_000 for number in range(8)]
