"""How the directory of a state is replaced: whole or not at all.

All files of a state are written to a staging directory. One rename commits them. A state that Accelerate names
(``checkpoints/checkpoint_3``) is staged in ``checkpoints.saving/checkpoint_3``, and the rename publishes it. A
directory that the caller names may hold other files. So its state is staged in its hidden subdirectory
``.fastensor-saving``, the rename to ``.fastensor-saved`` commits it, and then each file moves to its place. If the
process is killed while files move, whoever loads or saves next moves the rest.

Processes on several machines share these directories, or each machine has its own. So the main process acts first, and
then the first process of every other machine, if it does not see that it is done.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from fastensor.checkpoint.directories import METADATA_NAME, remove_replaced_shards
from fastensor.checkpoint.files import make_directories
from fastensor.checkpoint.freeing import freeing_afterwards
from fastensor.files import posix
from fastensor.files.new_directory import ASIDE_SUFFIX, NewDirectory, remove_unless_locked, restore

CHECKPOINTS = "checkpoints"
"""Accelerate's folder of states that it names itself, in the project's folder."""
_STAGING = ".saving"
"""The end of the name of the folder beside it, in which they are staged."""
_SAVING = ".fastensor-saving"
_SAVED = ".fastensor-saved"
_NUMBER = re.compile(r"[\/]?([0-9]+)(?=[^\/]*$)")
"""Accelerate's pattern of the number of a state."""
_MODEL = re.compile(r"(?P<name>model|pytorch_model)(?P<number>_\d+)?\.(?:safetensors|bin)")
_TWINS = {"model": "pytorch_model{}.bin", "pytorch_model": "model{}.safetensors"}
_OBSOLETE = ".fastensor-obsolete"
"""The end of the name of an empty file in a committed state: the file of that name goes from the directory."""


class StateDirectory:
    """Where a state goes, and where its files are written first.

    Args:
        path: the directory that the state is to be found in.
        staging: the directory that the files are written to. It has the same name as ``path``, and is on the same
            filesystem.
        is_named_by_accelerate: whether all that is in the directory is the state.
    """

    def __init__(self, path: str, staging: str, *, is_named_by_accelerate: bool) -> None:
        self.path = path
        self.staging = staging
        self.is_named_by_accelerate = is_named_by_accelerate
        self._new = NewDirectory(path if is_named_by_accelerate else os.path.join(path, _SAVED), staging)

    @property
    def exists(self) -> bool:
        return os.path.lexists(self.path)

    @property
    def is_staged(self) -> bool:
        """Whether there is a staging directory, and not a link in its place. A network filesystem, which may remember
        what a name was, is asked for the names."""
        parent, name = os.path.split(self.staging)
        return name in _names_in(parent) and not os.path.islink(self.staging)

    @property
    def is_intact(self) -> bool:
        """Whether nobody has removed the staging directory that was made here."""
        return self._new.is_intact

    def prepare(self, *, durable: bool) -> None:
        """Create an empty staging directory, which is this process's until it is published or discarded. What a killed
        process has left is removed, or moved to its place.

        Raises:
            DirectoryInUseError: another process saves to the same path.
            OSError: the filesystem refused.
        """
        parent = os.path.dirname(self.staging)
        if self.is_named_by_accelerate:
            make_directories(os.path.dirname(self.path), durable=durable)
            restore_replaced(os.path.dirname(self.path))
        else:
            make_directories(self.path, durable=durable)
            finish(self.path, durable=durable)
        remove_leftovers(parent)
        self._new.create()

    def publish(self, *, durable: bool, link: bool, replaces: bool = False) -> None:
        """Give the state its place. What was written to ``path`` meanwhile stays, unless the state has such a file.

        Args:
            durable: whether the state is on stable storage then.
            link: whether the name of the staging directory, if ``save_state`` has returned it, is to lead to the state.
            replaces: whether there is a state that Accelerate has named, of which nothing stays.

        Raises:
            OSError: the filesystem refused. Whoever loads or saves next goes on, if the state was committed.
        """
        self._new.check()
        if not self.is_named_by_accelerate:
            _mark_obsolete(self.path, self.staging)
        elif os.path.isdir(self.path) and not replaces:
            move_into(self.path, self.staging, durable=durable)  # what a script has written, which knew the name
        self._new.publish(durable=durable)
        if self.is_named_by_accelerate and link:
            # a script has made a directory of that name, or another process has removed the empty folder
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.symlink(os.path.relpath(self.path, os.path.dirname(self.staging)), self.staging)
        if not self.is_named_by_accelerate:
            finish(self.path, durable=durable)
        self.tidy()

    def discard(self) -> None:
        """Remove the staging directory, if it was made here and not published. What cannot be removed is left to the
        next save."""
        with contextlib.suppress(OSError):
            self._new.discard()
        self.tidy()

    def tidy(self) -> None:
        """Remove the directory that staging directories are in, if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.staging))


def named_state(project_dir: str, number: int) -> StateDirectory:
    """The state that Accelerate gives a number.

    >>> state = named_state("project", 3)
    >>> state.path, state.staging
    ('project/checkpoints/checkpoint_3', 'project/checkpoints.saving/checkpoint_3')
    """
    name = f"checkpoint_{number}"
    folder = os.path.join(project_dir, CHECKPOINTS)
    return StateDirectory(
        os.path.join(folder, name), os.path.join(f"{folder}{_STAGING}", name), is_named_by_accelerate=True
    )


def state_in(directory: str | os.PathLike[str]) -> StateDirectory:
    """The state in a directory that the caller names.

    >>> state_in("runs/step_5").staging
    'runs/step_5/.fastensor-saving/step_5'
    """
    path = os.fspath(directory)
    return StateDirectory(
        path, os.path.join(path, _SAVING, os.path.basename(os.path.abspath(path))), is_named_by_accelerate=False
    )


def finish(directory: str | os.PathLike[str], *, durable: bool = True) -> bool:
    """Move the files of a committed state to their places. Returns whether there were any.

    Several processes may do this at a time.

    Raises:
        OSError: the filesystem refused.
    """
    committed = os.path.join(directory, _SAVED)
    try:
        names = os.listdir(committed)
    except FileNotFoundError:
        return False
    for name in names:
        if name.endswith(_OBSOLETE):
            for path in (os.path.join(directory, name.removesuffix(_OBSOLETE)), os.path.join(committed, name)):
                with contextlib.suppress(FileNotFoundError):  # another process was faster
                    os.unlink(path)
    move_into(committed, os.fspath(directory), durable=durable)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(committed)
    return True


def move_into(source: str, target: str, *, durable: bool) -> None:
    """Move everything in a directory to another one, and replace files of the same names, and whole distributed
    checkpoints. Several processes may do this at a time.

    Args:
        source: is empty then.
        target: is on the same filesystem.
        durable: whether the new names are on stable storage then.

    Raises:
        OSError: the filesystem refused.
    """
    for name in sorted(_names_in(source), key=METADATA_NAME.__eq__):  # a distributed checkpoint is complete with these
        here, there = os.path.join(source, name), os.path.join(target, name)
        if os.path.isdir(here) and not os.path.islink(here) and os.path.isdir(there):
            move_into(here, there, durable=durable)
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(here)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.rename(here, there)
    remove_replaced_shards(target)
    if durable:
        posix.sync_directory(target)


def is_incomplete(directory: str | os.PathLike[str]) -> bool:
    """Whether a save to the directory has begun and was not committed."""
    return os.path.isdir(os.path.join(directory, _SAVING))


def states_in(checkpoints: str) -> list[str]:
    """The states in Accelerate's folder, the oldest first. Names without a number are no states.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    folders = [entry.name for entry in os.scandir(checkpoints) if entry.is_dir()]
    numbered = [(int(found[0]), name) for name in folders if (found := _NUMBER.findall(name))]
    return [os.path.join(checkpoints, name) for _, name in sorted(numbered)]


def surplus(states: list[str], newest: str | None, total_limit: int | None) -> list[str]:
    """The states to be removed, the oldest first, so that ``total_limit`` are left. The newest one, which need not be
    listed, counts, and is never removed. None stands for one that is to come, with any name.

    >>> surplus(["c_0", "c_1", "c_2"], "c_2", 2)
    ['c_0']
    >>> surplus(["c_0", "c_1", "c_2"], None, 2)
    ['c_0', 'c_1']
    """
    if total_limit is None:
        return []
    others = [state for state in states if newest is None or os.path.basename(state) != os.path.basename(newest)]
    return others[: max(len(others) + 1 - max(total_limit, 1), 0)]


def remove_state(state: str) -> None:
    """Remove a state that Accelerate has named, and the link to it where it was staged. No part of the state is left
    among the states, even if the process is killed.
    A thread frees the space of its files afterwards.

    Raises:
        OSError: the filesystem refused.
    """
    folder = f"{os.path.dirname(state)}{_STAGING}"
    os.makedirs(folder, exist_ok=True)
    aside = os.path.join(folder, f"{os.path.basename(state)}.removed")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(state, aside)
    for directory, _, names in os.walk(aside):
        for name in names:
            path = os.path.join(directory, name)
            with freeing_afterwards(path):
                os.unlink(path)
    shutil.rmtree(aside)
    link = os.path.join(folder, os.path.basename(state))
    if os.path.islink(link):
        os.unlink(link)


def remove_leftovers(saving: str) -> None:
    """Remove what killed processes have left in a folder of staging directories, and links to removed states. What a
    process is writing stays.

    Raises:
        OSError: the filesystem refused.
    """
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(saving)):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if entry.is_symlink():
                    if not os.path.exists(entry.path):
                        os.unlink(entry.path)
                elif entry.is_dir():
                    remove_unless_locked(entry.path)


def restore_replaced(checkpoints: str) -> None:
    """Give states their places back that killed processes were about to replace, where the filesystem cannot exchange
    two names.

    Raises:
        OSError: the filesystem refused.
    """
    saving = f"{checkpoints}{_STAGING}"
    for name in _names_in(saving):
        if name.endswith(ASIDE_SUFFIX):
            restore(os.path.join(saving, name), os.path.join(checkpoints, name.removesuffix(ASIDE_SUFFIX)))


def published_path(path: str | os.PathLike[str]) -> Path:
    """Where a state is found now, by the path that ``save_state`` has returned. A directory in the place of the link to
    a state was left by a killed process."""
    found = Path(path)
    folder = found.parent
    if folder.name != f"{CHECKPOINTS}{_STAGING}" or found.is_symlink():
        return found
    published = folder.with_name(CHECKPOINTS) / found.name
    return published if published.exists() or not found.exists() else found


def _twin_of(name: str) -> str | None:
    """The file in which an older state may have had the same model, and which Accelerate would load first.

    >>> _twin_of("pytorch_model_1.bin")
    'model_1.safetensors'
    """
    match = _MODEL.fullmatch(name)
    if match is None:
        return None
    return _TWINS[match["name"]].format(match["number"] or "")


def _mark_obsolete(directory: str, staging: str) -> None:
    """Note in a state which files of a directory hold models that the state has in the other format."""
    names, there = {*os.listdir(staging)}, {*os.listdir(directory)}
    for name in names:
        twin = _twin_of(name)
        if twin in there - names:
            with open(os.path.join(staging, twin + _OBSOLETE), "xb"):
                pass


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def publish_last(hidden: str, path: str) -> None:
    """Give a file its name when everything else in its directory is on stable storage.

    Raises:
        OSError: the filesystem refused.
    """
    directory = os.path.dirname(path)
    posix.sync_tree(directory)
    os.rename(hidden, path)
    posix.sync_directory(directory)
