"""A Trainer that gets SIGTERM at its third step and saves a checkpoint of the exception, in no hurry.

Run by ``test_lightning_async.py``. Arguments: the package, and the folder.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO

sys.path.insert(0, str(Path(__file__).parents[1]))


def main(package: str, folder: Path) -> None:
    from lightning_models import fit

    pl = importlib.import_module(package)

    class Preempted(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(folder / "before.ckpt")
                os.kill(os.getpid(), signal.SIGTERM)

        def on_exception(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)  # some send it again and again
            time.sleep(0.3)  # nothing is pending: whoever waits to end the process does it now

    plugin = FastensorCheckpointIO(asynchronous={"preemption_seconds": 60})
    saver = pl.callbacks.OnExceptionCheckpoint(folder, filename="exception")
    try:
        fit(pl, folder, plugin, callbacks=[CheckpointMonitor(), Preempted(), saver])
    finally:
        print(type(sys.exc_info()[1]).__name__)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
