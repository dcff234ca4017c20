"""Saving and loading by several ranks together: each rank of data parallel training holds the same state.

All ranks call the same functions at the same points. A process without others saves and loads as always:

>>> import os, tempfile, torch
>>> from fastensor.checkpoint import cooperative
>>> path = os.path.join(tempfile.mkdtemp(), "model.ckpt")
>>> report = cooperative.save({"weight": torch.arange(3)}, path)
>>> cooperative.load(path)
{'weight': tensor([0, 1, 2])}
"""

from __future__ import annotations

from fastensor.checkpoint.cooperative.loading import load, load_with_report
from fastensor.checkpoint.cooperative.options import DEFAULT_TIMEOUT_SECONDS, CooperativeOptions
from fastensor.checkpoint.cooperative.saving import save

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "CooperativeOptions", "load", "load_with_report", "save"]
