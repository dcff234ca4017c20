"""``fastensor tune``"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import Any

from fastensor.backends.fallback import available_names
from fastensor.cli.checkup.folder import examine
from fastensor.cli.checkup.measurement import Rounds, choices_for, contenders, fitting, measure_rounds, summary
from fastensor.cli.checkup.printing import leaving_on_sigterm, parse_sizes, print_choices, print_speeds
from fastensor.cli.output import FAILED, OK
from fastensor.errors import FastensorError
from fastensor.select.context import STAGED, Context
from fastensor.select.dictionary import Change
from fastensor.select.files import file_for

_SIZES = (64 << 10, 1 << 20, 8 << 20, 64 << 20, 512 << 20)


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "tune",
        help="measure how fast each backend is in a folder, and fill the dictionary with the timings",
        description="Measure how fast each backend saves and loads files in a folder, and learn the timings: "
        'backend="auto" chooses by them from then on, for all folders on the same kind of filesystem. This takes some '
        "seconds, and the files are removed. Untuned, a rule by size decides, and other backends are "
        "tried as far as that costs next to nothing.",
        epilog="Exit status: 0 if something was learned; 1 if nothing could be measured.",
    )
    parser.add_argument("path", metavar="PATH", nargs="?", default=".", help="the folder; default: this one")
    parser.add_argument(
        "--sizes",
        type=parse_sizes,
        default=_SIZES,
        metavar="SIZE,...",
        help="sizes of the files; default: from 64K to 512M, less if there is little space",
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    folder = examine(options.path)
    if folder.error or folder.space is None:
        raise FastensorError(f"{folder.path}: {folder.error or 'its free space is not known'}")
    names = contenders(available_names())
    with leaving_on_sigterm():
        measured = measure_rounds(options.path, fitting(options.sizes, folder.space.free_nbytes), names)
    changes = [change for rounds in measured for change in learned(rounds)]
    print_speeds([summary(rounds) for rounds in measured])
    if not changes:
        return FAILED
    file = file_for(options.path)
    file.update(changes)
    print(f"\nwhat was learned is in {file.path}\n")
    print_choices(choices_for(options.path, options.sizes, names))
    return OK


def learned(rounds: Rounds) -> Iterator[Change]:
    """The changes of a dictionary by the rounds of one backend. They count for asynchronous saves as well, which write
    a copy in host memory."""
    contexts: Iterable[tuple[Context, list[float]]] = [
        (Context("write"), rounds.write),
        (Context("write", STAGED), rounds.write),
        (Context("read"), rounds.cold),
        (Context("read", warm=True), rounds.warm),
    ]
    for context, speeds in contexts:
        for bytes_per_second in speeds:
            seconds = rounds.nbytes / bytes_per_second
            yield Change(context, rounds.nbytes, rounds.backend, seconds, counts=False)
