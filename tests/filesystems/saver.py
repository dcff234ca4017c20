"""A process that saves until it is killed, a state of which most never changes. Run by ``test_shared_blocks.py``.

Arguments: the folder, the name of the file, and the number of the call before which a save shall kill the process (0:
never).
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import torch

import fastensor
from fastensor.testing.calls import intercepted

sys.path.insert(0, str(Path(__file__).parents[1]))
from killer import Killer

NUMEL = 200_000


def main() -> None:
    path, fatal = Path(sys.argv[1], sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    state = {f"frozen{number}": torch.full((NUMEL,), float(number)) for number in range(4)}
    state["step"] = torch.zeros(NUMEL)
    fastensor.save(state, path)
    for step in count(1):
        state["step"].fill_(step)
        if fatal:
            with intercepted(Killer(fatal)):
                fastensor.save(state, path)
            break
        report = fastensor.save(state, path)
        print(step, report.shared_nbytes, flush=True)


if __name__ == "__main__":
    main()
