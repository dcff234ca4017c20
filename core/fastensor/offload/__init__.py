"""SSD activation offload: ``with ActivationOffload().step(): loss = model(x)``, then ``loss.backward()`` anywhere."""

from fastensor.errors import CorruptActivationError, OffloadError
from fastensor.offload.activation_offload import ActivationOffload
from fastensor.offload.config import OffloadConfig
from fastensor.offload.statistics import EncodedBytes, OffloadStatistics

__all__ = [
    "ActivationOffload",
    "CorruptActivationError",
    "EncodedBytes",
    "OffloadConfig",
    "OffloadError",
    "OffloadStatistics",
]
