"""How ranks save together."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict, get_args

from fastensor.files.arguments import check_seconds, check_word

DEFAULT_TIMEOUT_SECONDS = 600.0
ReplicaCheck: TypeAlias = Literal["sample", "all"]


class CooperativeOptions(TypedDict, total=False):
    """Keywords of :func:`fastensor.checkpoint.cooperative.save`."""

    timeout: float
    check_replicas: ReplicaCheck


def check_cooperation(timeout: float = DEFAULT_TIMEOUT_SECONDS, check_replicas: ReplicaCheck = "sample") -> None:
    """
    Raises:
        TypeError, ValueError: an option has a value that means nothing.
    """
    check_seconds(timeout, "timeout")
    check_word(check_replicas, "check_replicas", get_args(ReplicaCheck))
