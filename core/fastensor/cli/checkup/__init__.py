"""The parts of ``fastensor doctor``: ``software.py``, ``folder.py`` and ``measurement.py``. Each finds facts, describes
them and advises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that is not as it should be."""

    level: Literal["warning", "error"]
    """An error means that nothing can be saved there, or that it would not come back."""
    found: str
    todo: str
    """Action that the user can take."""

    def __str__(self) -> str:
        return f"{self.level}: {self.found}; {self.todo}"
