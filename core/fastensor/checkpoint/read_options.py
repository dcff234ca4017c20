"""Options for reading a checkpoint, and the backend reader that is opened with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fastensor.backends import registry
from fastensor.backends.base import Reader
from fastensor.select.transfer import BackendChoice, Transfer

NO_LOCAL_FILE = "it is no file of this machine"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading a file."""

    backend: BackendChoice = registry.AUTO
    device: str = "cpu"
    """Kind of the device that the bytes go to."""
    learn: bool = False
    """Let the selector learn from the time that reading takes: the whole file is read, once and without pauses."""


class OpenedReader(NamedTuple):
    """The backend reader that was opened for a file."""

    backend: str
    reason: str
    """Reason for the choice of the backend."""
    reader: Reader
    transfer: Transfer | None = None
    """Takes the time of reading for the selector; None if no backend was chosen."""
