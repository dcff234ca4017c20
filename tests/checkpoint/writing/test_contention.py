"""States that cannot be saved, or change meanwhile, and processes that save to one name: whole files, no leftovers."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from disks import assert_only
from programs import Program

import fastensor
from fastensor.backends import staging
from fastensor.backends.registry import available_names

pytestmark = pytest.mark.crash

NOBODY = 65534
OLD = {"w": torch.ones(10)}
RACER = """
import sys, torch, fastensor
path, number, times, container = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
for i in range(times):
    fastensor.save({"w": torch.full((300_000,), number), "n": torch.tensor(number)}, path, container=container)
"""


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this")


@pytest.mark.parametrize("state", [{"a": Unpicklable()}, {"a": lambda: None}, {"w": [torch.ones(9), Unpicklable()]}])
def test_what_cannot_be_pickled(tmp_path: Path, state: Any) -> None:
    path = tmp_path / "x.ckpt"
    fastensor.save(OLD, path)
    with pytest.raises(Exception, match="pickle"):
        fastensor.save(state, path)
    assert_only(path, OLD)


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
@pytest.mark.parametrize("nbytes", [0, 100, 5 << 20])
@pytest.mark.parametrize("backend", ["auto", "direct", "numpy"])
def test_a_storage_that_is_resized_meanwhile(tmp_path: Path, backend: str, nbytes: int, name: str) -> None:
    path = tmp_path / name
    fastensor.save(OLD, path)
    state = {"a": torch.ones(3 << 20, dtype=torch.uint8), "w": torch.ones(3 << 20, dtype=torch.uint8)}
    begin = staging.HostStager.begin

    def resize_later(self: Any, offset: int, count: int) -> Any:
        if offset:
            state["w"].untyped_storage().resize_(nbytes)
        return begin(self, offset, count)

    with (
        mock.patch.object(staging.HostStager, "begin", resize_later),
        pytest.raises(fastensor.StateChangedError, match=rf"3145728 bytes was resized to {nbytes}.*unchanged"),
    ):
        fastensor.save(state, path, backend=backend)
    assert_only(path, OLD)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("backend", available_names())
def test_a_directory_that_is_read_only(backend: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # not in pytest's, which others cannot enter
        path = Path(folder, "x")
        fastensor.save(OLD, path)
        os.chmod(folder, 0o555)
        for name in ("x", "new"):
            with as_nobody(), pytest.raises(fastensor.CheckpointWriteError, match="Permission denied") as caught:
                fastensor.save({"w": torch.zeros(10)}, Path(folder, name), backend=backend)
            assert caught.value.errno == errno.EACCES
        os.chmod(folder, 0o755)
        assert_only(path, OLD)


@pytest.mark.parametrize("length", [256, 300, 5000])
def test_a_name_that_is_too_long(tmp_path: Path, length: int) -> None:
    with pytest.raises(fastensor.CheckpointWriteError, match="File name too long"):
        fastensor.save({"w": torch.ones(10)}, tmp_path / ("x" * length))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("times", [15, pytest.param(100, marks=pytest.mark.torture)], ids=["sample", "many"])
@pytest.mark.parametrize("container", ["torch", "safetensors"])
def test_processes_that_save_to_one_name(tmp_path: Path, container: str, times: int) -> None:
    path = tmp_path / "x"
    racers = [Program("-c", RACER, path, number, times, container) for number in range(2)]
    seen = set()
    while any(racer.poll() is None for racer in racers):
        if path.exists():
            found = fastensor.load(path)
            assert (found["w"] == found["n"]).all()
            seen.add(int(found["n"]))
    assert [(racer.communicate(), racer.returncode) for racer in racers] == [(("", ""), 0)] * 2
    found = fastensor.load(path)
    assert (found["w"] == found["n"]).all()
    assert seen
    assert os.listdir(tmp_path) == ["x"]
