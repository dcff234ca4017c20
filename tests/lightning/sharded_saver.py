"""Trainers of two ranks that save until one of them kills itself. Run by ``test_lightning_sharded.py``.

Argument: the path of the checkpoint. For each line of its input, ``PORT FIRST RANK CALL MODE``, two children train
three steps and replace the checkpoint after each. All parameters are FIRST and the number of the step then. The child
RANK kills itself before its CALL-th system call that changes something, and the other one is killed then.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning.pytorch as pl
import torch
from checkpoint.dcp.saver import CALLS, NEVER, Killer
from lightning_models import act_as_rank
from sharded_trainers import fit

from fastensor.testing.calls import intercepted
from fastensor_lightning import FastensorCheckpointIO

WORLD = 2


def main() -> None:
    path = Path(sys.argv[1])
    for line in sys.stdin:
        port, first, rank, call, mode = line.split()
        children = []
        for one in range(WORLD):
            pid = os.fork()
            if pid == 0:
                for stream in (sys.stdout, sys.stderr):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the one that lives will complain
                fatal = int(call) if one == int(rank) else NEVER
                train(path, one, int(port), int(first), fatal, asynchronous=mode == "asynchronous")
                os._exit(0)
            children.append(pid)
        pid, status = os.waitpid(children[int(rank)], 0)
        for child in set(children) - {pid}:
            if status:
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        print("dead", os.waitstatus_to_exitcode(status), flush=True)


def train(path: Path, rank: int, port: int, first: int, fatal: int, *, asynchronous: bool) -> None:
    act_as_rank(rank, port, WORLD)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    class Saver(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            for parameter in module.parameters():
                parameter.data.zero_().add_(first + trainer.global_step)
            module.stamp = first + trainer.global_step
            trainer.save_checkpoint(path)

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["stamp"] = module.stamp

    with intercepted(Killer(fatal)):
        plugin = FastensorCheckpointIO(asynchronous=asynchronous, backend="numpy")
        options = {"enable_checkpointing": False, "callbacks": [Saver()], "max_steps": 3}
        fit(pl, path.parent, plugin, **options)


if __name__ == "__main__":
    assert "renameat2" in CALLS
    main()
