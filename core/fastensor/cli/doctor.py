"""``fastensor doctor``"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fastensor.cli.checkup.advice import Advice, advise
from fastensor.cli.checkup.backends import (
    BackendState,
    Chosen,
    Speed,
    backend_states,
    choices_for,
    contenders,
    fitting,
    measure,
)
from fastensor.cli.checkup.folder import DirectIO, Folder, PageCache, Space, examine
from fastensor.cli.checkup.printing import leaving_on_sigterm, parse_sizes, print_choices, print_speeds
from fastensor.cli.checkup.software import Cuda, Gds, Kvikio, Software, find_cuda, find_kvikio, find_software
from fastensor.cli.output import FAILED, OK, human_size, print_json, print_table, printable
from fastensor.select.current import current_selector
from fastensor.select.dictionary import DictionaryError
from fastensor.select.files import file_for, read

VERSION = 1
_SIZES = (64 << 10, 64 << 20)


@dataclass(frozen=True, slots=True)
class DictionaryState:
    """What was learned about how fast backends are."""

    path: str
    """Of its file."""
    exists: bool
    """As far as can be seen."""
    explores: bool
    """Whether ``backend="auto"`` tries backends that nothing is known of."""
    error: str
    """Why it cannot be read; nothing if it can, or is not there."""


@dataclass(frozen=True, slots=True)
class Checkup:
    """All that was found out: what ``--json`` prints, under these names. Names are added, but not changed or removed
    within a version; sizes are in bytes."""

    version: int
    """Of this form."""
    software: Software
    cuda: Cuda
    kvikio: Kvikio
    gds: Gds
    folder: Folder
    backends: tuple[BackendState, ...]
    speeds: tuple[Speed, ...]
    """Nothing if it was not measured."""
    dictionary: DictionaryState
    choices: tuple[Chosen, ...]
    advice: tuple[Advice, ...]
    """What is not as it should be, errors first."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        help="look at what there is here, how fast it is, and what is wrong with it",
        description="Look at the software, GPUs and GPUDirect Storage, at a folder and its filesystem, and at the "
        "backends; measure each of them with files in that folder, which are removed; and say what is wrong. "
        "Nothing is learned from that: the dictionary stays as it is.",
        epilog="Exit status: 0 if files can be saved there, whatever the warnings; 1 if not, or if they do not come "
        "back.",
    )
    parser.add_argument("path", metavar="PATH", nargs="?", default=".", help="of a folder; default: this one")
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default=_SIZES,
        metavar="SIZE,...",
        help="of the files that are measured, such as 64K,64M, which is the default; less if there is little space",
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
    kvikio, gds = find_kvikio()
    cuda = find_cuda()
    if cuda.devices:
        with suppress(RuntimeError, AssertionError):  # gds will say that it is not available, and why
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types
    folder = examine(path)
    states = backend_states()
    names = [state.name for state in states if state.available]
    possible = sizes if folder.space is None else fitting(sizes, folder.space.free_nbytes)
    speeds: tuple[Speed, ...] = ()
    if not (quick or folder.error):
        with _unlogged(), leaving_on_sigterm():
            speeds = measure(path, possible, names)
    dictionary = _dictionary_state(path)
    choices = choices_for(path, possible or sizes, contenders(names))
    return Checkup(
        version=VERSION,
        software=find_software(),
        cuda=cuda,
        kvikio=kvikio,
        gds=gds,
        folder=folder,
        backends=states,
        speeds=speeds,
        dictionary=dictionary,
        choices=choices,
        advice=advise(folder, kvikio, gds, states, speeds, choices),
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
    """What would be logged is in the tables."""
    logger = logging.getLogger("fastensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


# what is printed


def _print(found: Checkup) -> None:
    print_table(["what", "found"], [[name, text] for name, text in _facts(found).items() if text])
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
        print(printable(f"{one.level}: {one.found}"))
        print(printable(f"  {one.todo}"))


def _facts(found: Checkup) -> dict[str, str]:
    folder = found.folder
    return {
        "fastensor": found.software.fastensor,
        "Python": found.software.python,
        "torch": found.software.torch,
        "Linux": found.software.kernel,
        "CUDA": _describe_cuda(found.cuda),
        "kvikio": _described(found.kvikio.version, found.kvikio.reason),
        "GDS": _describe_gds(found.gds),
        "folder": folder.path,
        "filesystem": _describe_filesystem(folder),
        "free": _describe_space(folder.space),
        "O_DIRECT": _describe_direct(folder.direct),
        "page cache": _describe_page_cache(folder.page_cache),
        "dictionary": _describe_dictionary(found.dictionary),
    }


def _described(version: str, reason: str) -> str:
    """
    >>> _described("25.10", ""), _described("25.10", "no driver"), _described("", "it is not installed")
    ('25.10', '25.10, but: no driver', 'no: it is not installed')
    """
    if not reason:
        return version
    return f"{version}, but: {reason}" if version else f"no: {reason}"


def _describe_cuda(cuda: Cuda) -> str:
    driver = [f"driver {cuda.driver}"] if cuda.driver else []
    if cuda.reason:
        return _described(", ".join([cuda.built, *driver] if cuda.built else driver), cuda.reason)
    devices = Counter(f"{device.name} ({human_size(device.nbytes)})" for device in cuda.devices)
    return ", ".join([cuda.built, *driver, *(f"{count} × {device}" for device, count in devices.items())])


def _describe_gds(gds: Gds) -> str:
    driver = f"nvidia-fs {gds.driver}" if gds.driver else "nvidia-fs is not loaded"
    mode = "no" if gds.mode == "none" else gds.mode
    return f"{mode}, {driver}" if not gds.reason else f"{mode}: {gds.reason}; {driver}"


def _describe_filesystem(folder: Folder) -> str:
    kept = {"disk": "", "memory": ", in memory", "server": ", kept elsewhere"}[folder.kept_by]
    return f"{folder.filesystem or 'unknown'}{kept}" + (f" on {folder.disk}" if folder.disk else "")


def _describe_space(space: Space | None) -> str:
    if space is None:
        return ""
    files = "" if space.files_left is None else f", {space.files_left} more files"
    return f"{human_size(space.free_nbytes)} of {human_size(space.total_nbytes)}{files}"


def _describe_direct(direct: DirectIO | None) -> str:
    if direct is None:
        return ""
    if not direct.accepted:
        return f"no: {direct.reason}"
    return f"yes, in blocks of {direct.offset_alignment} bytes from memory aligned to {direct.memory_alignment}"


def _describe_page_cache(cache: PageCache | None) -> str:
    if cache is None:
        return ""
    if cache.works:
        return "can be seen and emptied"
    return (
        f"cannot be told or changed: {cache.written_fraction:.0%} of a file that was written are seen in it, and "
        f"{cache.evicted_fraction:.0%} when it was evicted"
    )


def _describe_dictionary(found: DictionaryState) -> str:
    unknown = not (found.exists or found.error)
    return _described(found.path, found.error) + (" (nothing was learned yet)" if unknown else "")
