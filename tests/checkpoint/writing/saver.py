"""A process that saves until it is killed. Run by ``test_kill.py``, which reads what it prints.

Arguments: the path, the number of elements, and whether each save is to a new name. For each line of its input, which
is the number of the first state and that of the call before which it shall kill itself (0: never), it forks a child
that saves one state after the other, or, if it is to kill itself, one.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

import fastensor
from fastensor.testing.calls import intercepted

sys.path.insert(0, str(Path(__file__).parents[2]))
from killer import Killer


def main() -> None:
    path, numel, new = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "new"
    torch.set_num_threads(1)
    states = [{"w": torch.full((numel,), float(i)), "i": i} for i in range(2)]
    fastensor.save(states[0], path)
    for line in sys.stdin:
        first, fatal = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            print("saving", os.getpid(), flush=True)
            save(path, states, first, new=new, fatal=fatal)
            os._exit(0)
        print("dead", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def save(path: str, states: list[Any], first: int, *, new: bool, fatal: int) -> None:
    for i in islice(count(first), 1 if fatal else None):
        if new:
            with suppress(FileNotFoundError):
                os.unlink(path)
        with intercepted(Killer(fatal)):
            fastensor.save(states[i % 2], path)


if __name__ == "__main__":
    main()
