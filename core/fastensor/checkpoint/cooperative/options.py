"""How ranks save together."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

DEFAULT_TIMEOUT_SECONDS = 600.0
ReplicaCheck: TypeAlias = Literal["sample", "all"]


class CooperativeOptions(TypedDict, total=False):
    """Keywords of :func:`fastensor.checkpoint.cooperative.save`."""

    timeout: float
    check_replicas: ReplicaCheck
