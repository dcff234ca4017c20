"""What is to be done about what was found. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fastensor.backends.posix import ASSUMED_ALIGNMENT
from fastensor.cli.checkup.backends import BackendState, Chosen, Speed
from fastensor.cli.checkup.folder import Folder
from fastensor.cli.checkup.software import Gds, Kvikio
from fastensor.cli.output import human_size
from fastensor.select.context import Context
from fastensor.select.transfer import WHOLE_FILES

_LITTLE_NBYTES = 1 << 30
_FEW_FILES = 100
_CLEARLY_FASTER = 1.25
"""So many times as fast is more than the noise of a few rounds."""

Level: TypeAlias = Literal["warning", "error"]


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that is not as it should be."""

    level: Level
    """An error means that nothing can be saved there, or that it would not come back."""
    found: str
    todo: str
    """What to do about it."""


def advise(
    folder: Folder,
    kvikio: Kvikio,
    gds: Gds,
    states: tuple[BackendState, ...],
    speeds: tuple[Speed, ...],
    choices: tuple[Chosen, ...],
) -> tuple[Advice, ...]:
    """What is to be done, errors first."""
    found = [*_of_folder(folder), *_of_kvikio(kvikio, gds), *_of_backends(states), *_of_speeds(speeds)]
    found += _of_choices(choices, speeds, folder.path)
    return tuple(sorted(found, key=lambda one: one.level != "error"))


def _of_folder(folder: Folder) -> Iterator[Advice]:
    where = folder.path
    if folder.error:
        yield Advice("error", f"{where}: {folder.error}", _REMEDIES.get(folder.error, _WRITABLE))
    if folder.kept_by == "memory":
        yield Advice(
            "warning", f"{where} is on {folder.filesystem}, in memory: nothing there survives the next boot, however "
            "durable a save says it is", "save what is to be kept to a disk",
        )  # fmt: skip
    if folder.kept_by == "server":
        yield Advice(
            "warning", f"{where} is on {folder.filesystem}, kept by another machine or program: durable is there what "
            "that one makes of fsync", "find out whether it syncs (an NFS export that is async does not)",
        )  # fmt: skip
    yield from _of_space(folder)
    yield from _of_direct(folder)
    if folder.page_cache is not None and not folder.page_cache.works and folder.kept_by != "memory":
        yield Advice(
            "warning", f"what the page cache holds of {where} cannot be told or changed", "cold reads are not measured "
            "here, and loads take every file for cached: name a backend if that is slow",
        )  # fmt: skip


_WRITABLE = "have the folder made writable, free space or quota, or name another one"
_REMEDIES = {
    "there is no such folder": "create it, or name another one",
    "it is no folder": "name the folder that it is in",
}


def _of_space(folder: Folder) -> Iterator[Advice]:
    space = folder.space
    if space is None:
        return
    if space.free_nbytes < _LITTLE_NBYTES:
        yield Advice(
            "warning", f"only {human_size(space.free_nbytes)} are free at {folder.path}", "free some: while a "
            "checkpoint is replaced, there has to be room for the old one and the new one",
        )  # fmt: skip
    if space.files_left is not None and space.files_left < _FEW_FILES:
        yield Advice(
            "warning", f"there can be only {space.files_left} more files at {folder.path}", "remove some: the "
            "filesystem runs out of inodes",
        )  # fmt: skip


def _of_direct(folder: Folder) -> Iterator[Advice]:
    direct = folder.direct
    if direct is None or folder.kept_by == "memory":
        return
    if not direct.accepted:
        yield Advice(
            "warning", f"no direct I/O at {folder.path}: {direct.reason}", "large files are faster on a filesystem "
            "that has it, such as ext4 or XFS; here all goes through the page cache",
        )  # fmt: skip
    if (direct.offset_alignment or 0) > ASSUMED_ALIGNMENT:
        yield Advice(
            "warning", f"direct I/O at {folder.path} moves blocks of {direct.offset_alignment} bytes", "small files "
            "are faster through the page cache: leave the choice to backend=\"auto\"",
        )  # fmt: skip


def _of_kvikio(kvikio: Kvikio, gds: Gds) -> Iterator[Advice]:
    if not kvikio.version:
        return
    if kvikio.reason:
        what = "works only in part" if kvikio.imports else "cannot be imported"
        yield Advice(
            "warning", f"kvikio {kvikio.version} is installed, but {what}: {kvikio.reason}", "install what is missing "
            "(libcuda.so.1 comes with NVIDIA's driver), or remove kvikio",
        )  # fmt: skip
    if gds.mode == "compat":
        yield Advice(
            "warning", f"kvikio is in compat mode, which is not GPUDirect Storage: {gds.reason}", "load the kernel "
            "module nvidia-fs, and see NVIDIA's gdscheck -p; otherwise bytes of GPUs are copied through host memory",
        )  # fmt: skip


def _of_backends(states: tuple[BackendState, ...]) -> Iterator[Advice]:
    if not any(state.available for state in states):
        yield Advice("error", "no backend is available", "install Fastensor anew")


def _of_speeds(speeds: tuple[Speed, ...]) -> Iterator[Advice]:
    for speed in speeds:
        if not speed.correct:
            what = f"{speed.backend} does not bring back what it saved ({human_size(speed.nbytes)}): {speed.reason}"
            yield Advice("error", what, "do not use it; if the others fail as well, look for a broken disk or memory")
    if speeds and not any(speed.write_bytes_per_second for speed in speeds):
        yield Advice("error", f"no backend could save anything: {speeds[0].reason}", _WRITABLE)


def _of_choices(choices: tuple[Chosen, ...], speeds: tuple[Speed, ...], folder: str) -> Iterator[Advice]:
    """Where ``backend="auto"`` would take what was just measured to be slower."""
    slow = []
    contending = [speed for speed in speeds if speed.backend not in WHOLE_FILES]
    for choice in choices:
        rates = {
            speed.backend: _of_context(speed, choice.context) or 0.0
            for speed in contending
            if speed.nbytes == choice.nbytes
        }
        ours = rates.get(choice.backend)
        fastest = max(rates, key=rates.__getitem__, default=choice.backend)
        if ours and rates[fastest] > _CLEARLY_FASTER * ours:
            what = f"{choice.context}, {human_size(choice.nbytes)}"
            slow.append(f"{what}: {fastest} is {rates[fastest] / ours:.1f} × as fast as {choice.backend}")
    if slow:
        yield Advice(
            "warning", f'backend="auto" would not take what was the fastest just now ({"; ".join(slow)})',
            f"fastensor tune {folder} measures more sizes, and auto goes by that from then on",
        )  # fmt: skip


def _of_context(speed: Speed, context: str) -> float | None:
    return {
        str(Context("write")): speed.write_bytes_per_second,
        str(Context("read")): speed.cold_read_bytes_per_second,
        str(Context("read", warm=True)): speed.warm_read_bytes_per_second,
    }.get(context)
