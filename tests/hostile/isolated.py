"""Attacks in processes of their own: there, a hang, a crash and a poisoned interpreter are outcomes like others.

A server imports everything once and forks for each attack, which takes milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:  # the process that makes attacks has no use for it
    from programs import Program

_PAGE = resource.getpagesize()
_HARMLESS_NBYTES = 8 << 20
"""Growth by an attack that is tolerated. More would hide the growth by the next attack."""


@dataclass
class Outcome:
    """What came of an attack."""

    refused: str = ""
    """The message, if it ended with an error of ours."""
    broken: str = ""
    """Any other error, the signal that ended the process, or that it did not end."""
    grown_nbytes: int = 0
    """How much memory the process took in addition."""
    imported: list[str] = field(default_factory=list)
    """Modules that were not there before, Python's codecs apart."""
    poisoned: str = ""
    """What a sound file gives afterwards, if it gave something else before."""

    @property
    def harmful(self) -> bool:
        """Whether the process is not as it was: further attacks need another one."""
        return bool(self.broken or self.poisoned or self.imported) or self.grown_nbytes > _HARMLESS_NBYTES


@dataclass(frozen=True)
class Limits:
    seconds: float
    """For a single attack."""
    nbytes: int = 768 << 20
    """The most address space of an attack, in addition to that of an idle process."""


class Laboratory:
    """Where attacks are made. For one thread."""

    def __init__(self) -> None:
        self._server = _started()

    def attack(self, entries: Sequence[str], path: Path, sound: Path, limits: Limits) -> dict[str, Outcome]:
        """Let each entry point read the hostile file, and the sound one before and afterwards.

        Raises:
            RuntimeError: the server has ended. There is another one for the next attack.
        """
        request = {"entries": entries, "path": str(path), "sound": str(sound), "limits": asdict(limits)}
        answer = self._ask(json.dumps(request) + "\n")
        if not answer:
            returncode = self.close()
            self._server = _started()
            raise RuntimeError(f"the process that makes attacks has ended with return code {returncode}")
        return {entry: Outcome(**outcome) for entry, outcome in json.loads(answer).items()}

    def close(self) -> int:
        self._server.communicate(timeout=120)
        return self._server.wait()

    def _ask(self, line: str) -> str:
        """The answer; empty if the server has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.write(line)
            self._server.stdin.flush()
        return self._server.stdout.readline()


def _started() -> Program:
    from programs import Program

    return Program("-m", "hostile.isolated", folder=Path(__file__).parents[1])


@contextlib.contextmanager
def laboratory() -> Iterator[Laboratory]:
    made = Laboratory()
    try:
        yield made
    finally:
        made.close()


def _serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        outcomes: dict[str, dict[str, Any]] = {}
        while missing := [entry for entry in request["entries"] if entry not in outcomes]:
            outcomes.update(
                _forked(missing, Path(request["path"]), Path(request["sound"]), Limits(**request["limits"]))
            )
        print(json.dumps(outcomes), flush=True)


def _forked(entries: Sequence[str], path: Path, sound: Path, limits: Limits) -> dict[str, dict[str, Any]]:
    """The outcomes of as many attacks as one process survived unharmed, and of the one that harmed it."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        os._exit(_work(writing, entries, path, sound, limits))
    os.close(writing)
    with open(reading, "rb", buffering=0) as pipe:
        return _collected(child, pipe, entries, limits.seconds)


def _work(writing: int, entries: Sequence[str], path: Path, sound: Path, limits: Limits) -> int:
    """Attack until harm is done; returns the status to exit with."""
    try:
        _limit(limits.nbytes)
        before = _read_soundly(sound)
        for entry in entries:
            outcome = _attack(entry, path, before, sound)
            os.write(writing, json.dumps(asdict(outcome)).encode() + b"\n")
            if outcome.harmful:
                break
    except BaseException:  # noqa: BLE001  # whatever it is, this process must not go on as the server
        traceback.print_exc()
        return 1
    return 0


def _collected(child: int, pipe: IO[bytes], entries: Sequence[str], seconds: float) -> dict[str, dict[str, Any]]:
    outcomes: dict[str, dict[str, Any]] = {}
    text = b""
    hangs = False
    while not hangs:
        hangs = not select.select([pipe], [], [], seconds)[0]
        piece = b"" if hangs else pipe.read(1 << 16)
        if not piece:
            break
        *lines, text = (text + piece).split(b"\n")
        for line in lines:
            outcomes[entries[len(outcomes)]] = json.loads(line)
    if hangs:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if hangs or status:
        broken = f"hangs for more than {seconds:g} s" if hangs else f"ends the process with status {status}"
        entry = entries[min(len(outcomes), len(entries) - 1)]  # behind the last one, that is to blame
        outcomes[entry] = asdict(Outcome(broken=broken))
    return outcomes


def _limit(nbytes: int) -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (held + nbytes, held + nbytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _attack(entry: str, path: Path, before: dict[str, str], sound: Path) -> Outcome:
    from hostile.attacks import ENTRY_POINTS

    modules, held = set(sys.modules), _most_memory()
    outcome = Outcome()
    try:
        ENTRY_POINTS[entry](path)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome
        _describe(error, outcome)
    outcome.grown_nbytes = _most_memory() - held
    outcome.imported = sorted(name for name in set(sys.modules) - modules if not name.startswith("encodings."))
    after = _read_soundly(sound)
    outcome.poisoned = "; ".join(after[one] for one in before if before[one] != after[one])
    return outcome


def _read_soundly(sound: Path) -> dict[str, str]:
    """What a sound file gives, as text: what torch makes of it, and what we do."""
    from hostile.attacks import ENTRY_POINTS

    found = {}
    for entry in ("load", "open"):
        try:
            found[entry] = repr(ENTRY_POINTS[entry](sound))
        except Exception as error:  # noqa: BLE001
            found[entry] = repr(error)
    return found


def _describe(error: Exception, outcome: Outcome) -> None:
    from fastensor import FastensorError

    if isinstance(error, FastensorError) and not any(isinstance(cause, MemoryError) for cause in _causes(error)):
        outcome.refused = str(error)
    else:
        outcome.broken = f"{type(error).__name__}: {str(error)[:300]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on: for want of memory, no file is damaged."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    import hostile.attacks  # noqa: F401  # so that the children need not

    logging.disable()
    _serve()
