"""The Nth system call fails, for every N: the old content or the new, whole, and nothing left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fastensor
from fastensor import FastensorError
from fastensor.backends import registry
from fastensor.checkpoint.publish import TEMPORARY_SUFFIX, wait_for_space
from fastensor.testing import failing_call

OLD = {"w": torch.full((1000,), 1)}
NEW = {"w": torch.full((3 << 20,), 2, dtype=torch.uint8), "b": torch.ones(5)}
CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT]
MOST_CALLS = 300


def content(path: Path) -> Any:
    return int(fastensor.load(path, verify=True)["w"][0])


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("backend", registry.names())
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_a_save_whose_nth_call_fails(tmp_path: Path, backend: str, overwrite: bool, code: int) -> None:
    path = tmp_path / "x"
    raised = 0
    for number in range(1, MOST_CALLS):
        path.unlink(missing_ok=True)
        if overwrite:
            fastensor.save(OLD, path)
        failure: Any = None
        with failing_call(number, code) as fault:
            try:
                fastensor.save(NEW, path, backend=backend)
            except FastensorError as error:
                failure = error
        if failure is not None:
            raised += 1
            assert isinstance(failure, OSError)
            assert failure.errno == code
            assert str(path) in str(failure)
            in_place = "the new file is in place" in str(failure)
            assert path.exists() == (overwrite or in_place)
            assert not path.exists() or content(path) == (2 if in_place else 1)
        else:
            assert content(path) == 2
        wait_for_space()
        assert not [name for name in os.listdir(tmp_path) if name.endswith(TEMPORARY_SUFFIX)], fault
        if not fault.fired:
            break
    else:
        pytest.fail(f"a save takes more than {MOST_CALLS} calls")
    assert raised >= 5
    assert number > 8


@pytest.mark.parametrize("backend", registry.names())
def test_a_load_whose_nth_call_fails(tmp_path: Path, backend: str) -> None:
    fastensor.save(NEW, tmp_path / "x")
    raised = 0
    for number in range(1, MOST_CALLS):
        with failing_call(number) as fault:
            try:
                loaded = fastensor.load(tmp_path / "x", backend=backend)
            except fastensor.CheckpointReadError as error:
                raised += 1
                assert error.errno == errno.EIO
            else:
                assert all(torch.equal(loaded[key], NEW[key]) for key in NEW)
        if not fault.fired:
            break
    else:
        pytest.fail(f"a load takes more than {MOST_CALLS} calls")
    assert raised >= 5


@pytest.mark.parametrize("backend", ["direct", "numpy"])
def test_short_writes_and_reads_are_continued(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(4096, len(data) // 8192 * 4096)], at))
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, views, at, *f: preadv(fd, [v[: max(4096, len(v) // 8192 * 4096)] for v in views], at, *f),
    )
    fastensor.save(NEW, tmp_path / "x", backend=backend)
    loaded = fastensor.load(tmp_path / "x", backend=backend)
    assert all(torch.equal(loaded[key], NEW[key]) for key in NEW)
    monkeypatch.undo()
    assert all(torch.equal(torch.load(tmp_path / "x")[key], NEW[key]) for key in NEW)


def test_an_interrupt_while_loading_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastensor.save(NEW, tmp_path / "x")

    def interrupt(*arguments: object) -> int:
        raise KeyboardInterrupt

    from fastensor.backends import numpy

    monkeypatch.setattr(numpy, "_read_with_checksum", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fastensor.load(tmp_path / "x", backend="numpy")


def test_an_interrupt_while_saving_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastensor.save(OLD, tmp_path / "x")

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    from fastensor.backends import posix

    monkeypatch.setattr(posix, "sync_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fastensor.save(NEW, tmp_path / "x")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x"]
    assert content(tmp_path / "x") == 1
