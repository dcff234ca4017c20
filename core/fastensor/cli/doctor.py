"""``fastensor doctor``"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fastensor.cli.checkup import folder as folders
from fastensor.cli.checkup import measurement, software
from fastensor.cli.checkup.advice import Advice
from fastensor.cli.checkup.folder import Folder
from fastensor.cli.checkup.measurement import BackendState, Chosen, Speed
from fastensor.cli.checkup.printing import leaving_on_sigterm, parse_sizes, print_choices, print_speeds
from fastensor.cli.checkup.software import Cuda, Gds, KvikioState, Software
from fastensor.cli.output import FAILED, OK, print_json, print_table, printable
from fastensor.select.current import current_selector
from fastensor.select.dictionary import DictionaryError
from fastensor.select.files import file_for, read

VERSION = 1
_SIZES = (64 << 10, 64 << 20)


@dataclass(frozen=True, slots=True)
class DictionaryState:
    """The dictionary of timings for the folder."""

    path: str
    """The file of the dictionary."""
    exists: bool
    """Whether the file can be seen."""
    explores: bool
    """Whether ``backend="auto"`` tries backends to measure them."""
    error: str
    """Why the file cannot be read; empty if it can, or is missing."""


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


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="show the software, devices and backends here, how fast they are, and what is wrong",
        description="Look at the software, GPUs and GPUDirect Storage, at a folder and its filesystem, and at the "
        "backends; measure each of them with files in that folder, which are removed; and say what is wrong. "
        "Nothing is learned from that: the dictionary stays as it is.",
        epilog="Exit status: 0 if files can be saved there, whatever the warnings; 1 if not, or if they do not come "
        "back.",
    )
    parser.add_argument("path", metavar="PATH", nargs="?", default=".", help="the folder; default: this one")
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default=_SIZES,
        metavar="SIZE,...",
        help="sizes of the files that are measured; default: 64K,64M, less if there is little space",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: one object, as fastensor.cli.doctor.Checkup")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = _check_up(options.path, options.sizes, quick=options.quick)
    if options.json:
        print_json(asdict(found))
    else:
        _print(found)
    return FAILED if any(one.level == "error" for one in found.advice) else OK


def _check_up(path: str, sizes: Sequence[int], *, quick: bool) -> Checkup:
    kvikio, gds = software.find_kvikio()
    cuda = software.find_cuda()
    if cuda.devices:
        with suppress(RuntimeError, AssertionError):  # gds will say that it is not available, and why
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types
    folder = folders.examine(path)
    states = measurement.backend_states()
    names = [state.name for state in states if state.available]
    possible = sizes if folder.space is None else measurement.fitting(sizes, folder.space.free_nbytes)
    speeds: tuple[Speed, ...] = ()
    if not (quick or folder.error):
        with _unlogged(), leaving_on_sigterm():
            speeds = tuple(map(measurement.summary, measurement.measure_rounds(path, possible, names)))
    dictionary = _dictionary_state(path)
    choices = measurement.choices_for(path, possible or sizes, measurement.contenders(names))
    advice = [
        *folders.advise(folder),
        *software.advise(kvikio, gds),
        *measurement.advise(folder.path, states, speeds, choices),
    ]
    return Checkup(
        version=VERSION,
        software=software.find_software(),
        cuda=cuda,
        kvikio=kvikio,
        gds=gds,
        folder=folder,
        backends=states,
        speeds=speeds,
        dictionary=dictionary,
        choices=choices,
        advice=tuple(sorted(advice, key=lambda one: one.level != "error")),
    )


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


def _print(found: Checkup) -> None:
    rows = {
        **software.facts(found.software, found.cuda, found.kvikio, found.gds),
        **folders.facts(found.folder),
        "dictionary": _describe(found.dictionary),
    }
    print_table(["what", "found"], [[name, text] for name, text in rows.items() if text])
    print()
    print_table(
        ["backend", "available"],
        [[state.name, "yes" if state.available else f"no: {state.reason}"] for state in found.backends],
    )
    if found.speeds:
        print()
        print_speeds(found.speeds)
    if found.choices:
        print()
        print_choices(found.choices)
    if found.advice:
        print()
    for one in found.advice:
        print(printable(str(one)))


def _describe(found: DictionaryState) -> str:
    unknown = not (found.exists or found.error)
    return software.but(found.path, found.error) + (" (nothing was learned yet)" if unknown else "")
