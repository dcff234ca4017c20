"""``fastensor doctor``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass

import torch

from fastensor.cli.checkup import folder as folders
from fastensor.cli.checkup import measurement, software
from fastensor.cli.checkup.advice import Advice
from fastensor.cli.checkup.folder import Folder
from fastensor.cli.checkup.measurement import BackendState, Chosen, Speed
from fastensor.cli.checkup.printing import leaving_on_sigterm, measured, print_choices, speed_row, speed_table
from fastensor.cli.checkup.software import Cuda, Gds, KvikioState, Software
from fastensor.cli.output import (
    FAILED,
    OK,
    GrowingTable,
    print_json,
    print_styled,
    print_table,
    printable,
)
from fastensor.select.current import current_selector
from fastensor.select.dictionary import DictionaryError
from fastensor.select.files import file_for, read

VERSION = 1
_FACT_WIDTH = len("page cache")
_STYLES = {"error": "bold red", "warning": "yellow"}


@dataclass(frozen=True, slots=True)
class DictionaryState:
    """The dictionary of timings for the folder."""

    path: str
    """The file of the dictionary."""
    exists: bool
    """True if the file can be seen."""
    explores: bool
    """True if ``backend="auto"`` tries backends to measure them."""
    error: str
    """Reason for which the file cannot be read; empty if it can, or is missing."""


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything that was found out: ``--json`` prints it under these names. Within a version, names are added, but not
    changed or removed. Sizes are in bytes."""

    version: int
    """Version of these names."""
    software: Software
    cuda: Cuda
    kvikio: KvikioState
    gds: Gds
    folder: Folder
    backends: tuple[BackendState, ...]
    speeds: tuple[Speed, ...]
    """Empty if nothing was measured."""
    dictionary: DictionaryState
    choices: tuple[Chosen, ...]
    advice: tuple[Advice, ...]
    """Errors come first."""


def run(path: str, sizes: Sequence[int], *, quick: bool, json: bool) -> int:
    """Check all up, and print each part when it is known; as JSON, when all is."""
    found = _check_up(path, sizes, _Silence() if json else _Printer(), quick=quick)
    if json:
        print_json(asdict(found))
    return FAILED if any(one.level == "error" for one in found.advice) else OK


class _Silence:
    """Prints nothing of what is found."""

    def facts(self, rows: Mapping[str, str]) -> None:
        """Rows of the first table."""

    def backends(self, states: Sequence[BackendState]) -> None:
        """The table of backends."""

    def measures(self, names: Sequence[str]) -> None:
        """The speeds of these backends come next."""

    def speed(self, speed: Speed) -> None:
        """The speed of one backend for one size."""

    def end(self, choices: Sequence[Chosen], advice: Sequence[Advice]) -> None:
        """Take the choices of ``backend="auto"``, and the advice."""


class _Printer(_Silence):
    """Prints what is found."""

    def __init__(self) -> None:
        self._facts = GrowingTable(["what", "found"], [_FACT_WIDTH, 0])
        self._speeds: GrowingTable | None = None

    def facts(self, rows: Mapping[str, str]) -> None:
        for name, text in rows.items():
            if text:
                self._facts.add([name, text])

    def backends(self, states: Sequence[BackendState]) -> None:
        print()
        rows = [[state.name, "yes" if state.available else f"no: {state.reason}"] for state in states]
        print_table(["backend", "available"], rows)

    def measures(self, names: Sequence[str]) -> None:
        print()
        self._speeds = speed_table(names)

    def speed(self, speed: Speed) -> None:
        assert self._speeds is not None
        self._speeds.add(speed_row(speed))

    def end(self, choices: Sequence[Chosen], advice: Sequence[Advice]) -> None:
        if choices:
            print()
            print_choices(choices)
        if advice:
            print()
        for one in advice:
            level, _, rest = str(one).partition(":")
            print_styled((level, _STYLES.get(level, "")), (printable(f":{rest}"), ""))


def _check_up(path: str, sizes: Sequence[int], out: _Silence, *, quick: bool) -> Checkup:
    versions = software.find_software()
    out.facts(software.versions(versions))
    kvikio, gds = software.find_kvikio()
    cuda = software.find_cuda()
    out.facts(software.devices(cuda, kvikio, gds))
    if cuda.devices:
        with suppress(RuntimeError, AssertionError):  # gds will say that it is not available, and why
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types
    folder = folders.examine(path)
    dictionary = _dictionary_state(path)
    out.facts({**folders.facts(folder), "dictionary": _describe(dictionary)})
    states = measurement.backend_states()
    out.backends(states)
    names = [state.name for state in states if state.available]
    possible = sizes if folder.space is None else measurement.fitting(sizes, folder.space.free_nbytes)
    speeds = () if quick or folder.error else _measure(path, possible, names, out)
    choices = measurement.choices_for(path, possible or sizes, measurement.contenders(names))
    advice = [
        *folders.advise(folder),
        *software.advise(kvikio, gds),
        *measurement.advise(folder.path, states, speeds, choices),
    ]
    advice.sort(key=lambda one: one.level != "error")
    out.end(choices, advice)
    return Checkup(
        version=VERSION,
        software=versions,
        cuda=cuda,
        kvikio=kvikio,
        gds=gds,
        folder=folder,
        backends=states,
        speeds=speeds,
        dictionary=dictionary,
        choices=choices,
        advice=tuple(advice),
    )


def _measure(path: str, sizes: Sequence[int], names: Sequence[str], out: _Silence) -> tuple[Speed, ...]:
    speeds = []
    if sizes and names:
        out.measures(names)
    with _unlogged(), leaving_on_sigterm():
        for nbytes in sizes:
            for rounds in measured(path, nbytes, names):
                speeds.append(measurement.summary(rounds))
                out.speed(speeds[-1])
    return tuple(speeds)


def _dictionary_state(path: str) -> DictionaryState:
    file = file_for(path).path
    exists, error = True, ""
    try:
        read(file)
    except FileNotFoundError:
        exists = False
    except OSError as refused:
        exists, error = False, refused.strerror or str(refused)
    except DictionaryError as damaged:
        error = str(damaged).removeprefix(f"{file}: ")
    with _unlogged():
        explores = current_selector(path).explore
    return DictionaryState(str(file), exists, explores, error)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Log nothing: the tables show the same."""
    logger = logging.getLogger("fastensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _describe(found: DictionaryState) -> str:
    unknown = not (found.exists or found.error)
    return software.but(found.path, found.error) + (" (nothing was learned yet)" if unknown else "")
