"""A Trainer's checkpoint counts when all processes have written their files."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import torch.distributed as dist
from accelerate import Accelerator
from programs import run_ranks

from fastensor.errors import CheckpointWriteError
from fastensor_accelerate import FastensorConfig
from fastensor_accelerate.states import StateSaver


def _note_thread(done: list[str]) -> None:
    done.append(threading.current_thread().name)


def _saves(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    for asynchronous in (False, True):
        saver = StateSaver(Accelerator(cpu=True), FastensorConfig(asynchronous=asynchronous))
        done: list[str] = []
        try:
            with saver.saving_in_turn(folder) as afterwards:
                afterwards.append(functools.partial(done.append, "failed"))
                if rank == 1:
                    raise ValueError("the disk of this process is gone")
            saver.wait()
        except (ValueError, CheckpointWriteError) as error:
            assert "the disk of this process is gone" in str(error)
            assert isinstance(error, ValueError) == (rank == 1)
            assert ("process 1: ValueError" in str(error)) == (rank == 0)
        else:
            raise AssertionError("nothing was raised")
        assert not done
        with saver.saving_in_turn(folder) as afterwards:
            afterwards.append(functools.partial(done.append, "saved"))
        with saver.saving_in_turn(folder, reader="the last process" if rank == 1 else None) as afterwards:
            afterwards.append(functools.partial(_note_thread, done))
        assert done == ["saved", threading.current_thread().name], "all processes have waited for it"
        saver.close()
    dist.destroy_process_group()


def test_a_checkpoint_counts_when_all_processes_have_written_it(tmp_path: Path) -> None:
    run_ranks(_saves, 2, str(tmp_path))
