"""SSD activation offload: ``with ActivationOffload().step(): loss = model(x)``, then ``loss.backward()`` anywhere.
Begin with ``hooks.py``, which autograd calls. ``planner.py`` decides what stays, by the pure plans of ``scheduler.py``;
``swapper.py`` decides what moves when: ``jobs.py`` moves it in threads, ``tiers.py`` has a GPU copy it, ``loaded.py``
has what comes back. ``engine.py`` keeps what steps share."""

from fastensor.errors import CorruptActivationError, OffloadError
from fastensor.offload.activation_offload import ActivationOffload
from fastensor.offload.config import OffloadConfig, Schedule
from fastensor.offload.statistics import EncodedBytes, OffloadEstimate, OffloadStatistics, PlannedTensor, PlanReport

__all__ = [
    "ActivationOffload",
    "CorruptActivationError",
    "EncodedBytes",
    "OffloadConfig",
    "OffloadError",
    "OffloadEstimate",
    "OffloadStatistics",
    "PlanReport",
    "PlannedTensor",
    "Schedule",
]
