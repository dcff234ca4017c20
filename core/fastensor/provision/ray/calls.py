"""Messages between the processes of a service on Ray, and the user's objects, which Ray keeps for them.

Ray's global control store keeps the objects, so that actors find them whenever Ray starts them again. They are pickled
by ``cloudpickle``, as those of Ray's tasks are, so functions of a script or a notebook come along.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ray import cloudpickle

from fastensor.data.skipping import OnError, Skipped
from fastensor.provision.engine import Cost, EngineLost, Facts, Start
from fastensor.provision.pickling import pickling
from fastensor.provision.ray import names

if TYPE_CHECKING:
    from fastensor.provision.making import UserObjects


class Service(NamedTuple):
    """A service, as all its processes know it."""

    name: str
    facts: Facts
    contents_key: str
    """Under this key :mod:`fastensor.provision.ray.names` keeps the user's objects. A service that is started again has
    another one."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The credit for one batch. Its samples are known: the order of the epoch is a function of the plan."""

    batch: Start
    waited_seconds: float | None
    """Seconds that the trainer has waited for the batch that it has taken last; None if that was said before."""
    collate_fn: bytes
    """A pickle; empty: as a ``DataLoader`` does it."""
    on_error: OnError = "raise"
    """Treatment of samples that cannot be made."""


class EncodedSamples(NamedTuple):
    """The samples of a batch that one server keeps."""

    samples: list[npt.NDArray[np.uint8] | Skipped]
    """Copies of the encoded samples, or why they cannot be made."""
    cost: Cost


class Made(NamedTuple):
    """A batch, or the reason why it cannot be made."""

    content: npt.NDArray[np.uint8] | None
    """A value of :mod:`fastensor.provision.encoding`."""
    cost: Cost
    failure: str = ""


def pickled(value: Any, what: str) -> bytes:
    """A user's object for other processes.

    Args:
        what: names the object in the error.

    Raises:
        ProvisionError: it cannot be pickled.
    """
    with pickling(what, "It may hold no open files or locks"):
        found: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return found


def pickled_contents(contents: UserObjects) -> bytes:
    """The user's objects, and where this process finds modules.

    Raises:
        ProvisionError: something cannot be pickled.
    """
    paths = [path or os.getcwd() for path in sys.path]
    return pickled((paths, pickled(contents, "the source, or a transform,")), "the path of modules")


def contents_of(service: Service) -> UserObjects:
    """The user's objects, in a process that finds modules from now on where that one finds them which has pickled the
    objects.

    Raises:
        EngineLost: the service has ended.
    """
    kept = names.kept(service.contents_key)
    if kept is None:
        raise EngineLost(f"the data service {service.name} has ended")
    paths, contents = cloudpickle.loads(kept)
    sys.path += [path for path in paths if path not in sys.path]
    found: UserObjects = cloudpickle.loads(contents)
    return found
