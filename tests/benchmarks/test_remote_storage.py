"""The stand-ins for what is remote, which ``benchmarks/provision.py`` measures with."""

from __future__ import annotations

import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

DELAY_SECONDS = 0.05


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("remote_storage")


def test_threads_read_objects_at_the_same_time(remote: Any, tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 100_000)
    with remote.Storage(tmp_path, remote.Link(DELAY_SECONDS, 1e9)) as storage, ThreadPoolExecutor(8) as pool:
        objects = remote.RemoteObjects(storage.port, storage.count, "objects")
        found = list(pool.map(objects.__getitem__, range(8)))
        assert storage.sent_nbytes == 800_000
    assert found == [bytes([number]) * 100_000 for number in range(8)]
