"""Errors that other processes can be sent. If a worker of a ``DataLoader`` raises one whose class cannot be pickled, as
may be with one of a library in Rust or C++, torch loses the error, and the training waits for ever.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import get_worker_info

from fastensor.data.skipping import reason_of


@contextmanager
def sendable_errors() -> Iterator[None]:
    """In a worker, have the block raise RuntimeError in place of an error whose class cannot be pickled."""
    try:
        yield
    except Exception as error:
        if get_worker_info() is None or can_be_sent(type(error)):
            raise
        raise RuntimeError(reason_of(error)) from error


class SendableErrors:
    """A function that is called in workers, with errors that can be sent."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, argument: Any) -> Any:
        with sendable_errors():
            return self._function(argument)


def can_be_sent(error: Exception | type[Exception]) -> bool:
    """True if another process gets it as it is."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  # whatever pickle raises
        return False
    return True
