"""The backend for each tensor (the Fastensor paper, section 4, Algorithms 1 and 2), and counts of transfers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fastensor.backends import registry
from fastensor.backends.base import Backend
from fastensor.backends.registry import announce, available_names
from fastensor.files.forks import lock_of
from fastensor.files.words import counted, human_size
from fastensor.select.choice import Mode, SelectorStatistics
from fastensor.select.context import Context, Operation, by_rule
from fastensor.select.selector import Selector
from fastensor.select.transfer import LAST_RESORTS, Transfer
from fastensor.store.ref import Format

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Counts of a :class:`TensorStore`'s transfers."""

    puts: int
    gets: int
    deletes: int
    written_bytes: int
    """Bytes of tensors, without headers."""
    read_bytes: int
    written_by: Mapping[str, int]
    """Number of tensors by backend."""
    read_by: Mapping[str, int]
    fallbacks: Mapping[str, str]
    """Backends that were chosen or named but could not be used, and the latest reason."""
    selector: SelectorStatistics
    """Counts of the selector, which other stores may share. Zeros if a backend was named."""

    def __str__(self) -> str:
        written = "".join(f", {count} by {name}" for name, count in self.written_by.items())
        read = "".join(f", {count} by {name}" for name, count in self.read_by.items())
        lines = [
            f"{counted(self.puts, 'tensors')} put ({human_size(self.written_bytes)}{written})",
            f"{counted(self.gets, 'tensors')} got ({human_size(self.read_bytes)}{read}), {self.deletes} deleted",
            *(f"{name} is not used: {reason}" for name, reason in self.fallbacks.items()),
            str(self.selector),
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Ways:
    """The backends that can do a transfer."""

    names: tuple[str, ...]
    choose: bool
    """Let the selector choose among the backends; False tries them in this order."""
    learn: bool
    """Report the time to the selector, as always if the selector chooses."""


def format_of(backend: str) -> Format:
    """The container that a backend writes and reads.

    >>> format_of("torch"), format_of("direct")
    ('pt', 'npy')
    """
    return "pt" if backend == "torch" else "npy"


def ways_to_write(tool: str, available: Iterable[str], containers: Sequence[Format]) -> Ways:
    """The backends that can write a tensor.

    Args:
        tool: the name of a backend, or ``auto``.
        available: the backends that can work here.
        containers: the containers that can hold the tensor.

    >>> ways_to_write("auto", ["direct", "numpy", "torch"], ["npy", "pt"]).names
    ('direct', 'numpy', 'torch')
    >>> ways_to_write("direct", [], ["npy", "pt"]).names, ways_to_write("direct", [], ["pt"]).names
    (('direct', 'numpy', 'torch'), ('torch',))
    """
    wanted = tuple(available) if tool == registry.AUTO else tuple(dict.fromkeys((tool, *LAST_RESORTS)))
    names = tuple(name for name in wanted if format_of(name) in containers)
    competing = tool == registry.AUTO and len(containers) > 1
    return Ways(names, choose=competing, learn=competing)


def ways_to_read(
    tool: str, available: Iterable[str], container: Format, written_by: str, mode: Mode, *, plain: bool
) -> Ways:
    """The backends that can read a stored tensor. First comes the backend that wrote the tensor, if written and read
    times are to be compared together (Algorithm 2); else the fastest reader of the container.

    >>> ways_to_read("auto", ["direct", "numpy", "torch"], "npy", "numpy", "write_read", plain=True)
    Ways(names=('numpy', 'direct'), choose=False, learn=True)
    >>> ways_to_read("auto", ["direct", "numpy", "torch"], "npy", "numpy", "write", plain=True)
    Ways(names=('direct', 'numpy'), choose=True, learn=True)
    """
    automatic = tool == registry.AUTO
    possible = [name for name in (available if automatic else (tool, *LAST_RESORTS)) if format_of(name) == container]
    if automatic and mode != "write" and written_by in possible:
        possible.insert(0, written_by)
    learn = automatic and plain
    return Ways(tuple(dict.fromkeys(possible)), choose=learn and mode == "write", learn=learn)


class Tools:
    """Runs transfers with the best backend, and counts them. Every method may be called from several threads.

    Args:
        tool: the name of a backend, in the paper or here; or ``auto``.
        selector: returns the selector, which is used only if the tool is ``auto``.
        mode: which transfers the choice is to make fast.

    Raises:
        UnknownBackendError: no backend has that name.
    """

    def __init__(self, tool: str, selector: Callable[[], Selector], mode: Mode) -> None:
        self.tool = tool if tool == registry.AUTO else registry.get(tool).name
        self.mode = mode
        self._selector = selector
        self._lock = lock_of(self)
        self._counts: Counter[str] = Counter()
        self._used: dict[Operation, Counter[str]] = {"write": Counter(), "read": Counter()}
        self._fallbacks: dict[str, str] = {}

    @property
    def available(self) -> tuple[str, ...]:
        """The backends among which the selector chooses now; empty if a backend was named."""
        return available_names() if self.tool == registry.AUTO else ()

    def use(self, ways: Ways, context: Context, nbytes: int, act: Callable[[Backend], T]) -> T:
        """Run a transfer with the best backend that can.

        Args:
            ways: the candidates.
            context: the circumstances of the transfer.
            nbytes: size of the tensor.
            act: the transfer.

        Raises:
            BackendUnavailableError: no backend could.
            Exception: whatever else ``act`` raises.
        """
        transfer = Transfer(
            ways.names,
            nbytes,
            context,
            self._selector() if ways.learn else None,
            choose=ways.choose,
            mode=self.mode,
            default=by_rule(context, nbytes),
        )
        result = transfer.run(act, self.note_fallback)
        transfer.done(time.perf_counter() - transfer.started)
        with self._lock:
            self._used[context.operation][transfer.used] += 1
            self._counts[context.operation] += nbytes
        return result

    def note_fallback(self, name: str, reason: str) -> None:
        """Count a backend that is not used. Logged once per process and reason."""
        announce(name, reason)
        with self._lock:
            self._fallbacks[name] = reason

    def count_delete(self) -> None:
        with self._lock:
            self._counts["deletes"] += 1

    def statistics(self) -> StoreStatistics:
        asked = self._selector().statistics() if self.tool == registry.AUTO else SelectorStatistics()
        with self._lock:
            written, read = self._used["write"], self._used["read"]
            return StoreStatistics(
                puts=written.total(),
                gets=read.total(),
                deletes=self._counts["deletes"],
                written_bytes=self._counts["write"],
                read_bytes=self._counts["read"],
                written_by=dict(written),
                read_by=dict(read),
                fallbacks=dict(self._fallbacks),
                selector=asked,
            )
