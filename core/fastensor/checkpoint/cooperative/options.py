"""Options of saves of one file by several ranks."""

from __future__ import annotations

from numbers import Real
from typing import Literal, TypeAlias, TypedDict, get_args

from fastensor.files.arguments import check_word

DEFAULT_TIMEOUT_SECONDS = 600.0
ReplicaCheck: TypeAlias = Literal["sample", "all"]


class CooperativeOptions(TypedDict, total=False):
    """Keywords of :func:`fastensor.checkpoint.cooperative.save`."""

    timeout: float
    check_replicas: ReplicaCheck


def check_timeout(timeout: object) -> None:
    """
    Raises:
        ValueError: it is no positive number.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not float(timeout) > 0:  # NaN is none either
        raise ValueError(f"timeout is a positive number of seconds, found {timeout!r}")


def check_cooperation(timeout: float = DEFAULT_TIMEOUT_SECONDS, check_replicas: ReplicaCheck = "sample") -> None:
    """
    Raises:
        TypeError, ValueError: an option has a value that means nothing.
    """
    check_timeout(timeout)
    check_word(check_replicas, "check_replicas", get_args(ReplicaCheck))
