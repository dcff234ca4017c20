"""``fastensor tune``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from fastensor.backends.registry import available_names
from fastensor.cli.checkup.folder import examine
from fastensor.cli.checkup.measurement import (
    Rounds,
    Speed,
    choices_for,
    contenders,
    fitting,
    summary,
    time_torch_save,
)
from fastensor.cli.checkup.printing import leaving_on_sigterm, measured, print_choices, print_speeds
from fastensor.cli.output import FAILED, OK
from fastensor.errors import FastensorError
from fastensor.select import torch_save
from fastensor.select.context import STAGED, Context
from fastensor.select.dictionary import Change
from fastensor.select.files import file_for


def run(path: str, sizes: Sequence[int]) -> int:
    """Measure, and learn."""
    folder = examine(path)
    if folder.error or folder.space is None:
        raise FastensorError(f"{folder.path}: {folder.error or 'its free space is not known'}")
    names = contenders(available_names())
    possible = fitting(sizes, folder.space.free_nbytes)
    speeds: list[Speed] = []
    changes: list[Change] = []
    compared: list[Change] = []
    with leaving_on_sigterm():
        for nbytes in possible:
            for rounds in measured(path, nbytes, names):
                speeds.append(summary(rounds))
                changes += learned(rounds)
            speed, seconds = _time_torch_save(path, nbytes)
            speeds.append(speed)
            compared += torch_save.learned(nbytes, seconds)
    print_speeds(speeds)
    if not changes:
        return FAILED
    file = file_for(path)
    file.update(changes)
    file_for(path, of=torch_save.NAME).update(compared)
    print(f"\nwhat was learned is in {file.path}\n")
    print_choices(choices_for(path, sizes, names))
    return OK


def _time_torch_save(path: str, nbytes: int) -> tuple[Speed, list[float]]:
    """The row of ``torch.save`` in the table, and the seconds of each round; none if it has failed."""
    try:
        seconds = time_torch_save(path, nbytes)
    except (OSError, RuntimeError) as error:
        return Speed(torch_save.NAME, nbytes, None, None, None, True, str(error)), []
    return Speed(torch_save.NAME, nbytes, nbytes / median(seconds), None, None, True, "to compare with"), seconds


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
