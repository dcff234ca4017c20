"""While a framework saves and loads, its calls of ``torch.distributed.checkpoint`` go through Fastensor."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import counted_calls
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, optimizer

import fastensor
from fastensor.checkpoint.dcp import FastensorStorageReader, FastensorStorageWriter
from fastensor.checkpoint.dcp.redirect import redirected, save_now
from fastensor.testing import failing_call

STATE = {"x": torch.arange(5)}
FUNCTIONS = (dcp, "save"), (dcp, "load"), (optimizer, "load_sharded_optimizer_state_dict")


@pytest.fixture(autouse=True)
def _no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def ours(state_dict: dict[str, Any], path: Any, **options: Any) -> None:
    save_now(state_dict, FastensorStorageWriter(path), **options)


def load_into_zeros(**options: Any) -> torch.Tensor:
    state = {"x": torch.zeros(5, dtype=torch.int64)}
    dcp.load(state, **options)
    return state["x"]


def test_calls_with_a_path_or_with_plain_storage_go_through_fastensor(tmp_path: Path) -> None:
    before = [getattr(module, name) for module, name in FUNCTIONS]
    with counted_calls() as calls, redirected(save=ours, reader=FastensorStorageReader) as counts:
        dcp.save(STATE, checkpoint_id=tmp_path / "path")
        dcp.save(STATE, storage_writer=FileSystemWriter(tmp_path / "plain"), planner=dcp.DefaultSavePlanner())
        assert calls.since() == {"FastensorStorageWriter": 2}
        for name in ("path", "plain"):
            for where in ({"checkpoint_id": tmp_path / name}, {"storage_reader": FileSystemReader(tmp_path / name)}):
                assert torch.equal(load_into_zeros(**where), STATE["x"])
        assert calls.since() == {"FastensorStorageReader": 4}
        assert (counts.saves, counts.loads) == (2, 4)
    assert [getattr(module, name) for module, name in FUNCTIONS] == before
    assert fastensor.verify(tmp_path / "plain").complete


class OtherWriter(FileSystemWriter):
    """Storage that its caller has chosen for a reason."""


def test_other_storage_and_other_threads_are_left_alone(tmp_path: Path) -> None:
    with (
        counted_calls() as calls,
        redirected(save=ours, reader=FastensorStorageReader) as counts,
        ThreadPoolExecutor(1) as thread,
    ):
        dcp.save(STATE, storage_writer=OtherWriter(tmp_path / "other"))
        thread.submit(dcp.save, STATE, checkpoint_id=tmp_path / "thread").result()
        thread.submit(load_into_zeros, checkpoint_id=tmp_path / "thread").result()
        assert calls.since() == {"FileSystemWriter": 2, "FileSystemReader": 1}
        assert (counts.saves, counts.loads) == (0, 0)


def test_failures_are_exceptions_that_name_who_has_failed(tmp_path: Path) -> None:
    with redirected(save=ours, reader=FastensorStorageReader):
        with failing_call(10), pytest.raises(fastensor.CheckpointWriteError, match="rank 0: CheckpointWriteError"):
            dcp.save(STATE, checkpoint_id=tmp_path / "x")
        dcp.save(STATE, checkpoint_id=tmp_path / "x")
        (file,) = (tmp_path / "x").glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[data.find(STATE["x"].numpy().tobytes())] ^= 1
        file.write_bytes(data)
        with pytest.raises(fastensor.CorruptCheckpointError, match="rank 0"):
            load_into_zeros(checkpoint_id=tmp_path / "x")
        file.unlink()
        with pytest.raises(fastensor.CheckpointReadError, match="rank 0"):
            load_into_zeros(checkpoint_id=tmp_path / "x")


def test_without_functions_of_ours_everything_goes_to_torch(tmp_path: Path) -> None:
    with counted_calls() as calls, redirected() as counts:
        dcp.save(STATE, checkpoint_id=tmp_path / "x")
        load_into_zeros(checkpoint_id=tmp_path / "x")
        assert calls.since() == {"FileSystemWriter": 1, "FileSystemReader": 1}
        assert (counts.saves, counts.loads) == (0, 0)
