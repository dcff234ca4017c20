"""Saving and loading by several ranks together: each rank of data parallel training holds the same state."""

from __future__ import annotations

from fastensor.checkpoint.cooperative.loading import load, load_with_report
from fastensor.checkpoint.cooperative.options import DEFAULT_TIMEOUT_SECONDS, CooperativeOptions
from fastensor.checkpoint.cooperative.saving import save

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "CooperativeOptions", "load", "load_with_report", "save"]
