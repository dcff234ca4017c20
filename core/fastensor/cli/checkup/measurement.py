"""The measurement: which backends can work here, how fast they are, and which would be chosen."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from fastensor.backends import registry
from fastensor.backends.registry import why_unavailable
from fastensor.checkpoint.progress import Progress
from fastensor.checkpoint.reading.load import load_with_report
from fastensor.checkpoint.report import LoadReport
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.checkpoint.writing.save import save
from fastensor.cli.checkup import Advice
from fastensor.cli.checkup.folder import MAKE_WRITABLE, PREFIX
from fastensor.cli.commands.options import LEAST_NBYTES
from fastensor.errors import BackendUnavailableError, CorruptCheckpointError
from fastensor.files import posix
from fastensor.files.words import human_size
from fastensor.select.context import RESIDENT_FRACTION, Choice, Context, by_rule
from fastensor.select.current import current_selector
from fastensor.select.transfer import BY_SIZE, WHOLE_FILES, rule_decides

ROUNDS = 3
_MOVES = 3
"""Moves of a file in a round: it is saved, read from the disk, and read from the page cache."""
_OVERHEAD_NBYTES = 2 << 10
"""The most that torch's container takes beside one tensor. Subtracted, so that files have about the size asked for."""
_SHARE_OF_FREE = 4
"""No file is larger than a quarter of the free space."""
_CLEARLY_FASTER = 1.25
"""Ratio of bandwidths that is more than the noise of a few rounds."""
_NAME = "values"


@dataclass(frozen=True, slots=True)
class BackendState:
    """Availability of a backend on this machine."""

    name: str
    available: bool
    reason: str
    """Reason for which the backend cannot work; empty if it can."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Bandwidths of a backend for files of one size: medians of a few rounds; None if not measured."""

    backend: str
    nbytes: int
    """Size of the file."""
    write_bytes_per_second: float | None
    """A save, until the file is durable."""
    cold_read_bytes_per_second: float | None
    """A verified load from the disk."""
    warm_read_bytes_per_second: float | None
    """A verified load from the page cache, if the backend uses the cache."""
    correct: bool
    """True if all values came back."""
    reason: str
    """Reason for which something could not be measured; empty if everything was."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Backend that ``backend="auto"`` would use next for one size and context, and the reason."""

    context: str
    nbytes: int
    backend: str
    reason: str
    exploring: bool
    """True if the backend would be tried only to measure it."""


def backend_states() -> tuple[BackendState, ...]:
    """The state of every registered backend."""
    reasons = {name: why_unavailable(name) for name in registry.names()}
    return tuple(BackendState(name, not reason, reason) for name, reason in reasons.items())


def fitting(sizes: Iterable[int], free_nbytes: int) -> tuple[int, ...]:
    """The sizes that are measured where ``free_nbytes`` are free: larger ones are cut.

    >>> fitting([65536, 64 << 20], 1 << 40), fitting([65536, 64 << 20], 16 << 20), fitting([65536], 0)
    ((65536, 67108864), (65536, 4194304), ())
    """
    most = free_nbytes // _SHARE_OF_FREE // LEAST_NBYTES * LEAST_NBYTES
    return tuple(sorted({min(size, most) for size in sizes if most}))


def contenders(names: Iterable[str]) -> tuple[str, ...]:
    """The backends among which ``backend="auto"`` chooses for files.

    >>> contenders(["direct", "numpy", "torch"])
    ('direct', 'numpy')
    """
    return tuple(name for name in names if name not in WHOLE_FILES)


def choices_for(path: str, sizes: Iterable[int], names: Sequence[str]) -> tuple[Chosen, ...]:
    """Choices of ``backend="auto"`` among ``names`` for torch files at a path, from and to host memory."""
    if not names:
        return ()
    selector = current_selector(path)
    found = []
    for context in (Context("write"), Context("read"), Context("read", warm=True)):
        for nbytes in sizes:
            choice = Choice(by_rule(context, nbytes), BY_SIZE)
            if not rule_decides(registry.AUTO, nbytes, context):
                choice = selector.explain(nbytes, context, names, default=choice.backend).choice
            found.append(Chosen(str(context), nbytes, choice.backend, choice.reason, choice.exploring))
    return tuple(found)


def measure_rounds(folder: str, nbytes: int, names: Sequence[str], progress: Progress) -> list[Rounds]:
    """Save, read from the disk, and read from the page cache, by each backend in turn. Nothing is learned.

    The files are in a folder of their own inside ``folder``, which is removed, whatever happens.

    Args:
        folder: where.
        nbytes: size of the files.
        names: of the backends.
        progress: called after each round of a backend with the bytes that were moved, and those to move in all.

    Raises:
        OSError: no folder can be created there.
    """
    total = nbytes * len(names) * ROUNDS * _MOVES
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder) as inside:
        return _measure(Path(inside, "x.ckpt"), nbytes, names, lambda moved: progress(moved, total))


@dataclass(slots=True)
class Rounds:
    """The speeds of one backend for one size, in bytes per second: one for each round."""

    backend: str
    nbytes: int
    """Size of the file."""
    write: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    correct: bool = True
    reason: str = ""


class _WrongValuesError(Exception):
    """Other values were read than were saved."""


def _measure(path: Path, nbytes: int, names: Sequence[str], moved: Callable[[int], object]) -> list[Rounds]:
    found = {name: Rounds(name, nbytes) for name in names}
    try:
        values = _values(nbytes)
    except RuntimeError as error:  # not enough memory
        for rounds in found.values():
            rounds.reason = str(error)
        return list(found.values())
    done = 0
    for number in range(ROUNDS):
        for name in [*names[number:], *names[:number]]:  # so that no backend goes first every time
            if not found[name].reason:
                _add_round(path, values, name, found[name])
            done += 1
            moved(done * nbytes * _MOVES)
    return list(found.values())


def _values(nbytes: int) -> torch.Tensor:
    """Random tensor whose file has about ``nbytes``."""
    return torch.empty(nbytes - _OVERHEAD_NBYTES, dtype=torch.uint8).random_(generator=torch.Generator())


def time_torch_save(folder: str, nbytes: int) -> list[float]:
    """The time of ``torch.save`` for a file of ``nbytes`` that is made durable as :func:`fastensor.save` makes its own:
    beside its place, synced, renamed, and the folder synced. One tensor is saved; more of them take longer.

    Returns:
        Seconds, one number for each round.

    Raises:
        OSError, RuntimeError: the file cannot be written, or there is not enough memory.
    """
    values = _values(nbytes)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=folder) as inside:
        for number in range(ROUNDS):
            path = Path(inside, f"{number}.ckpt")
            wait_for_space()
            started = time.perf_counter()
            _torch_save(values, path)
            seconds.append(time.perf_counter() - started)
            path.unlink()  # not by the next round's rename, which would wait until the space is freed
    return seconds


def _torch_save(values: torch.Tensor, path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save({_NAME: values}, temporary)
    with temporary.open("rb") as file:
        posix.sync_file(file.fileno())
    temporary.replace(path)
    posix.sync_directory(str(path.parent))


def _add_round(path: Path, values: torch.Tensor, name: str, rounds: Rounds) -> None:
    """Add one round, or the reason why there cannot be one."""
    try:
        wait_for_space()  # the space that the previous file took
        saved = save({_NAME: values}, path, backend=name)
        _check_used(saved, name)
        rounds.write.append(saved.bytes_per_second)
        for warm, speeds in ((False, rounds.cold), (True, rounds.warm)):
            (_fill_cache if warm else _empty_cache)(path)
            loaded, report = load_with_report(path, backend=name)
            _check_used(report, name)
            if not torch.equal(loaded[_NAME], values):
                raise _WrongValuesError("other values came back than were saved")
            if (report.resident_fraction >= RESIDENT_FRACTION) == warm:
                speeds.append(report.bytes_per_second)
    except Exception as error:  # noqa: BLE001  # a backend may raise anything, and the table shows it
        rounds.correct = not isinstance(error, _WrongValuesError | CorruptCheckpointError)
        known = isinstance(error, OSError | BackendUnavailableError | _WrongValuesError | CorruptCheckpointError)
        rounds.reason = str(error) if known else repr(error)
    finally:
        path.unlink(missing_ok=True)


def _check_used(report: SaveReport | LoadReport, name: str) -> None:
    if report.backend != name:
        reasons = [one.reason for one in report.fallbacks if one.backend == name]
        raise BackendUnavailableError(reasons[0] if reasons else f"{report.backend} did it: {report.reason}")


def _empty_cache(path: Path) -> None:
    with path.open("rb") as file:
        posix.evict(file.fileno(), path.stat().st_size)


def _fill_cache(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 20):
            pass


def summary(rounds: Rounds) -> Speed:
    """The medians of the rounds."""
    reason = rounds.reason
    if not reason and not (rounds.cold and rounds.warm):
        reason = f"its file could not be {'read into' if rounds.cold else 'evicted from'} the page cache"
    write, cold, warm = (median(speeds) if speeds else None for speeds in (rounds.write, rounds.cold, rounds.warm))
    return Speed(rounds.backend, rounds.nbytes, write, cold, warm, rounds.correct, reason)


def advise(
    folder: str, states: Sequence[BackendState], speeds: Sequence[Speed], choices: Sequence[Chosen]
) -> Iterator[Advice]:
    """Backends that fail, and choices that were not the fastest."""
    if not any(state.available for state in states):
        yield Advice("error", "no backend is available", "install Fastensor anew")
    for speed in speeds:
        if not speed.correct:
            what = f"{speed.backend} does not bring back what it saved ({human_size(speed.nbytes)}): {speed.reason}"
            yield Advice("error", what, "do not use it; if the others fail as well, look for a broken disk or memory")
    if speeds and not any(speed.write_bytes_per_second for speed in speeds):
        yield Advice("error", f"no backend could save anything: {speeds[0].reason}", MAKE_WRITABLE)
    learned = [choice for choice in choices if choice.reason != BY_SIZE]
    if slow := [text for choice in learned if (text := _slow_choice(choice, speeds))]:
        what = f'backend="auto" would not take what was the fastest just now ({"; ".join(slow)})'
        yield Advice(
            "warning", what, f"fastensor tune {folder} measures more sizes, and auto goes by that from then on"
        )


def _slow_choice(choice: Chosen, speeds: Sequence[Speed]) -> str:
    """By how much another backend was faster than the one that would be chosen; empty if not clearly."""
    rates = {
        speed.backend: _rate_in(speed, choice.context) or 0.0
        for speed in speeds
        if speed.nbytes == choice.nbytes and speed.backend not in WHOLE_FILES
    }
    ours = rates.get(choice.backend)
    fastest = max(rates, key=rates.__getitem__, default=choice.backend)
    if not ours or rates[fastest] <= _CLEARLY_FASTER * ours:
        return ""
    ratio = f"{rates[fastest] / ours:.1f} × as fast as {choice.backend}"
    return f"{choice.context}, {human_size(choice.nbytes)}: {fastest} is {ratio}"


def _rate_in(speed: Speed, context: str) -> float | None:
    return {
        str(Context("write")): speed.write_bytes_per_second,
        str(Context("read")): speed.cold_read_bytes_per_second,
        str(Context("read", warm=True)): speed.warm_read_bytes_per_second,
    }.get(context)
