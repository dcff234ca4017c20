"""A job of one process that saves states. ``test_two_jobs.py`` runs it, and reads what it prints.

Arguments: the folder, ``asynchronous`` or ``synchronous``, 1 if Accelerate names the states, how many it saves, 1 if it
shall wait in each save for a line of its input, and the seed of its weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from accelerators import Training, training

import fastensor_accelerate


def raised_by(found: Training, output_dir: str | None) -> list[str] | None:
    try:
        found.accelerator.save_state(output_dir)
        found.accelerator._fastensor_saver.wait()
    except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
        return [type(error).__name__, str(error)]
    return None


def main() -> None:
    folder, mode, named, saves, pauses, seed = sys.argv[1:]
    fastensor_accelerate.enable(fastensor_accelerate.FastensorConfig(asynchronous=mode == "asynchronous"))
    found = training(Path(folder) if int(named) else None, seed=int(seed))

    def pause(*arguments: Any) -> None:
        print("saving", flush=True)
        sys.stdin.readline()

    if int(pauses):
        found.accelerator.register_save_state_pre_hook(pause)
    outcomes = []
    for number in range(int(saves)):
        if int(named):
            found.accelerator.project_configuration.iteration = number
        outcomes.append(raised_by(found, None if int(named) else folder))
    fastensor_accelerate.disable()
    print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main()
