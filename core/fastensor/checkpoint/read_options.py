"""How a checkpoint is to be read, and the backend reader that was opened for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastensor.backends import registry
from fastensor.backends.base import Reader
from fastensor.select.transfer import BackendChoice, Transfer

NO_LOCAL_FILE = "it is no file of this machine"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a file is to be read."""

    backend: BackendChoice = registry.AUTO
    device: str = "cpu"
    """Kind of the device that the bytes go to."""
    learn: bool = False
    """Whether the selector learns from the time that reading takes: all of the file is read, once and at once."""


class OpenedReader(NamedTuple):
    """The backend reader that was opened for a file."""

    backend: str
    reason: str
    """Why that backend."""
    reader: Reader
    transfer: Transfer | None = None
    """Where the time that reading takes is reported; None if no backend was chosen."""
