"""Lightning's entry points ``lightning.pytorch.callbacks_factory`` and ``pytorch_lightning.callbacks_factory``.

Lightning calls :func:`callbacks` for every Trainer, in every program where Fastensor is installed, used or not. So this
module imports nothing, and neither does the package.
"""

from __future__ import annotations

import sys
from typing import Any

_PLUGIN = "fastensor_lightning.checkpoint_io"


def callbacks() -> list[Any]:
    """The callbacks that a new Trainer gets: one that looks for the plugin when a run begins, if the program has
    imported the plugin at all."""
    if _PLUGIN not in sys.modules:
        return []
    from fastensor_lightning.checkpoint_monitor import AutomaticMonitor

    return [AutomaticMonitor()]
