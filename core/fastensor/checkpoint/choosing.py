"""How a file is wanted to be read, and the way that was found for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastensor.backends import registry
from fastensor.backends.base import Reader
from fastensor.select.transfer import BackendChoice

NO_LOCAL_FILE = "it is no file of this machine"


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a file is to be read."""

    backend: BackendChoice = registry.AUTO
    device: str = "cpu"
    """Kind of the device that the bytes go to."""
    learn: bool = False
    """Whether all of it is read, once and at once, so that its time says something."""


class OpenedReader(NamedTuple):
    """A way of reading that was found for a file."""

    backend: str
    reason: str
    """Why that one."""
    reader: Reader
