"""Errors about objects of the user that cannot be pickled."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager

from fastensor.errors import ProvisionError


@contextmanager
def pickling(what: str, advice: str) -> Iterator[None]:
    """Within it, a user's object is pickled for other processes.

    Args:
        what: names the object in the error.
        advice: how to make it one that can be pickled.

    Raises:
        ProvisionError: it cannot be pickled.
    """
    try:
        yield
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ProvisionError(f"{what} cannot be sent to the processes that use it: {error}. {advice}") from error
