"""``fastensor doctor``."""

from __future__ import annotations

import faulthandler
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

from fastensor.cli.checkup import Advice, measurement, software
from fastensor.cli.checkup import folder as folders
from fastensor.cli.checkup.folder import Folder
from fastensor.cli.checkup.measurement import BackendState, Chosen, Speed
from fastensor.cli.checkup.printing import leaving_on_sigterm, measured, print_choices, print_speeds
from fastensor.cli.checkup.software import Cuda, Gds, KvikioState, Software
from fastensor.cli.output import (
    FAILED,
    OK,
    print_json,
    print_styled,
    print_table,
    printable,
)
from fastensor.select.current import current_selector
from fastensor.select.dictionary import DictionaryError
from fastensor.select.files import file_for, read

VERSION = 1
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
    """Check all up. What is here is printed before anything is measured; as JSON, all is printed in the end."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # says which library ends the interpreter, if one does
    found = _look(path)
    if not json:
        _print_what_is_here(found)
    found = _measured(found, path, sizes, quick=quick)
    if json:
        print_json(asdict(found))
    else:
        _print_the_rest(found)
    return FAILED if any(one.level == "error" for one in found.advice) else OK


def _look(path: str) -> Checkup:
    """Everything that is known without measuring."""
    cuda = software.find_cuda()
    kvikio, gds = software.find_kvikio()
    return Checkup(
        version=VERSION,
        software=software.find_software(),
        cuda=cuda,
        kvikio=kvikio,
        gds=gds,
        folder=folders.examine(path),
        backends=measurement.backend_states(),
        speeds=(),
        dictionary=_dictionary_state(path),
        choices=(),
        advice=(),
    )


def _measured(found: Checkup, path: str, sizes: Sequence[int], *, quick: bool) -> Checkup:
    """Add the speeds, and what follows from all."""
    folder = found.folder
    names = [state.name for state in found.backends if state.available]
    possible = sizes if folder.space is None else measurement.fitting(sizes, folder.space.free_nbytes)
    speeds = () if quick or folder.error else _measure(path, possible, names)
    choices = measurement.choices_for(path, possible or sizes, measurement.contenders(names))
    advice = [
        *folders.advise(folder),
        *software.advise(found.kvikio, found.gds),
        *measurement.advise(folder.path, found.backends, speeds, choices),
    ]
    advice.sort(key=lambda one: one.level != "error")
    return replace(found, speeds=speeds, choices=choices, advice=tuple(advice))


def _measure(path: str, sizes: Sequence[int], names: Sequence[str]) -> tuple[Speed, ...]:
    with _unlogged(), leaving_on_sigterm():
        return tuple(measurement.summary(rounds) for nbytes in sizes for rounds in measured(path, nbytes, names))


def _print_what_is_here(found: Checkup) -> None:
    facts = {
        **software.versions(found.software),
        **software.devices(found.cuda, found.kvikio, found.gds),
        **folders.facts(found.folder),
        "dictionary": _describe(found.dictionary),
    }
    print_table(["what", "found"], [[name, text] for name, text in facts.items() if text])
    print()
    rows = [[state.name, "yes" if state.available else f"no: {state.reason}"] for state in found.backends]
    print_table(["backend", "available"], rows)


def _print_the_rest(found: Checkup) -> None:
    if found.speeds:
        print()
        print_speeds(found.speeds)
    if found.choices:
        print()
        print_choices(found.choices)
    if found.advice:
        print()
    for one in found.advice:
        level, _, rest = str(one).partition(":")
        print_styled((level, _STYLES.get(level, "")), (printable(f":{rest}"), ""))


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
