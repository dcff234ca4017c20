"""The protocol of a data service's engine, whatever moves the data.

An engine has servers, which read a source, keep samples in memory, and make batches; and a client in each trainer. The
client says once where in the order of samples the trainer begins. From then on servers push batches, in that order, as
far as the client's credit reaches; a batch may come more than once, or out of turn. The loader puts them in order, and
says how many it has given out.

``fastensor.testing.ProvisionTests`` tests what is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple, Protocol

from fastensor.data.plan import EpochPlan
from fastensor.data.skipping import OnError

DEFAULT_BUFFER_NBYTES = 128 << 20
DEFAULT_AHEAD = 8


class EngineLost(Exception):
    """The service cannot be reached any more. :meth:`Engine.recover` finds it again, or starts it."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a service that all its clients know."""

    samples: int
    """The number of samples of the source."""
    fingerprint: str
    """Identifies them."""
    cache_nbytes: int
    """Memory for samples, on all servers together."""
    workers: int
    """Processes that read and prepare samples."""
    seed: int = 0
    """Seed of ``before_cache``."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A loader, as an engine knows it."""

    _: KW_ONLY
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch of a list of samples, in a worker; by default as a ``DataLoader`` does it."""
    buffer_nbytes: int = DEFAULT_BUFFER_NBYTES
    """Memory for batches that were pushed, and not dropped by the trainer yet."""
    ahead: int = DEFAULT_AHEAD
    """The most batches that are pushed ahead."""
    on_error: OnError = "raise"
    """Treatment of samples that cannot be made. With ``"skip"``, a push is a batch and the samples that it lacks: a
    tuple of the batch, their positions, and the reasons."""


@dataclass(frozen=True, slots=True)
class Start:
    """Place at which a loader begins, or goes on: that of a batch."""

    plan: EpochPlan
    epoch: int
    consumed: int
    """Samples of the epoch that all ranks together have been given."""
    generation: int = 0
    """Counts the starts of a loader at places of its choice. Batches of an earlier generation are of no use."""
    index: int = 0
    """The number, in this generation, of the batch that comes first. Not 0 if a service is to go on for another one."""

    def following(self) -> Start:
        """The place of the next batch: after the last one of an epoch, the beginning of the next epoch."""
        consumed = self.plan.consumed_after(1, self.consumed)
        epoch, consumed = (self.epoch, consumed) if self.plan.steps(consumed) else (self.epoch + 1, 0)
        return replace(self, epoch=epoch, consumed=consumed, index=self.index + 1)


class Cost(NamedTuple):
    """Cost of making a batch."""

    samples: int
    """Number of samples in the batch."""
    hits: int
    """Samples that the cache had."""
    read_nbytes: int
    """Bytes of the others, as they are kept."""
    skipped: int = 0
    """Samples that the batch lacks, because they could not be made."""


def cost_of_batch(positions: int, hits: int, read_nbytes: int, skipped: int) -> Cost:
    """The cost of a batch of so many positions. If none of their samples could be made, it has one substitute."""
    return Cost(max(positions - skipped, 1), hits, read_nbytes, skipped)


@dataclass(frozen=True, slots=True)
class Pushed:
    """Message of a server: a batch, or the reason why it cannot be made."""

    generation: int
    index: int
    """The number of the batch in its generation. When an epoch ends, the next one follows, from its beginning on."""
    content: memoryview
    """A value of :mod:`fastensor.provision.encoding`. The trainer may write to it. While it is kept, its memory is
    not used for other batches."""
    cost: Cost
    failure: str = ""
    """A traceback of a worker."""


class Feed(Protocol):
    """The batches of one loader. Used by one thread at a time. All methods may raise :class:`EngineLost`."""

    def start(self, start: Start) -> None:
        """Have batches pushed from there on."""

    def pushed(self, seconds: float) -> Pushed | None:
        """Next message; waits up to ``seconds``. None if nothing has come, although servers are well."""

    def credit(self, generation: int, taken: int, *, waited_seconds: float) -> None:
        """Say that batches before number ``taken`` of a generation were given out, and what memory is free again.

        Args:
            waited_seconds: for how long the trainer has waited for the last one.
        """

    def close(self) -> None:
        """Free what the service keeps for the loader."""


class ServiceEngine(Protocol):
    """The client of a service, in one process. Any thread may use it, one at a time."""

    facts: Facts

    @property
    def address(self) -> str:
        """Address that other processes connect to."""

    def register(self, registration: Registration) -> Feed:
        """Have a loader served.

        Raises:
            EngineLost: the service cannot be reached any more.
            ProvisionError: it refuses, for a reason that the message names.
        """

    def preload(self, plan: EpochPlan, epoch: int) -> None:
        """Fill the cache in the order of an epoch, while there is nothing better to do. Does not wait.

        Raises:
            EngineLost: the service cannot be reached any more.
        """

    def health(self) -> dict[str, Any]:
        """State of the service, for people and monitors.

        Raises:
            EngineLost: the service cannot be reached any more, or does not answer.
        """

    def recover(self) -> None:
        """Reach the service again, or start it again. Loaders have to be registered again.

        Raises:
            ProvisionError: that is not possible.
        """

    def close(self) -> None:
        """Leave. The service ends when the last process that uses it has left, or ended."""
