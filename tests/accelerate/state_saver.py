"""A process that saves states of an Accelerator until it is killed. ``test_kill.py`` runs it, and reads what it prints.

Arguments: the folder, ``named`` or ``explicit``, and ``asynchronous`` or ``synchronous``. For each line of its input,
which is the first value and the number of the call before which it shall kill itself (0: never), it forks a child that
saves one state after the other, all of whose tensors hold the value; or, if it is to kill itself, two.
"""

from __future__ import annotations

import os
import sys
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import fastensor_accelerate
from fastensor.testing.calls import intercepted

sys.path.insert(0, str(Path(__file__).parents[1]))
from killer import Killer

NUMEL = 300_000


class Value:
    """A custom object."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


class Training:
    """All of its tensors hold one value."""

    def __init__(self, folder: str | None) -> None:
        options = ProjectConfiguration(folder, automatic_checkpoint_naming=folder is not None, total_limit=1)
        self.accelerator = Accelerator(cpu=True, project_config=options)
        model = torch.nn.Linear(NUMEL, 1, bias=False)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        self.custom = Value()
        self.accelerator.register_for_checkpointing(self.custom)
        self.model.weight.grad = torch.zeros_like(self.model.weight)
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        (state,) = self.optimizer.optimizer.state.values()
        return [self.model.weight.data, state["exp_avg"], state["exp_avg_sq"], self.custom.tensor]

    def fill(self, value: int) -> None:
        for tensor in self.tensors():
            tensor.fill_(value)

    def value(self) -> int:
        found = {float(number) for tensor in self.tensors() for number in tensor.aminmax()}
        assert len(found) == 1, f"a mixture of states: {found}"
        return int(found.pop())


def main() -> None:
    folder, kind, mode = sys.argv[1:]
    torch.set_num_threads(1)
    fastensor_accelerate.enable(fastensor_accelerate.FastensorConfig(asynchronous=mode == "asynchronous"))
    training = Training(folder if kind == "named" else None)
    for line in sys.stdin:
        first, fatal = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            print("saving", os.getpid(), flush=True)
            save(training, folder if kind == "explicit" else None, first, fatal)
            os._exit(0)
        print("dead", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def save(training: Training, output_dir: str | None, first: int, fatal: int) -> None:
    with intercepted(Killer(fatal)):
        for value in islice(count(first), 2 if fatal else None):
            training.fill(value)
            training.accelerator.project_configuration.iteration = value
            training.accelerator.save_state(output_dir)
        training.accelerator.end_training()


if __name__ == "__main__":
    main()
