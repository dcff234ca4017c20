"""Replacing the directory of a state: whole or not at all.

All files of a state are written to a staging directory. One rename commits them. A state that Accelerate names
(``checkpoints/checkpoint_3``) is staged in ``checkpoints.saving/checkpoint_3``, and the rename publishes it. A
directory that the caller names may hold other files. So its state is staged in its hidden subdirectory
``.fastensor-saving``, the rename to ``.fastensor-saved`` commits it, and then each file moves to its place. If the
process is killed while files move, whoever loads or saves next moves the rest. So it is where a script, which knows the
name that Accelerate gives next, has made that directory itself.

Processes on several machines share these directories, or each machine has its own. So the main process acts first, and
then the first process of every other machine, if it does not see that it is done.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from fastensor.checkpoint import ordering
from fastensor.checkpoint.directories import METADATA_NAME, remove_replaced_shards
from fastensor.checkpoint.files import make_directories
from fastensor.checkpoint.writing.freeing import freeing_afterwards
from fastensor.errors import CheckpointWriteError
from fastensor.files import posix
from fastensor.files.new_directory import ASIDE_SUFFIX, DirectoryInUseError, NewDirectory, remove_unless_locked

CHECKPOINTS = "checkpoints"
"""Accelerate's folder of states that it names itself, in the project's folder."""
_STAGING = ".saving"
"""The suffix of the folder beside ``checkpoints`` that holds the staging directories."""
_SAVING = ".fastensor-saving"
_SAVED = ".fastensor-saved"
_NUMBER = re.compile(r"[\/]?([0-9]+)(?=[^\/]*$)")
"""Accelerate's pattern of the number of a state."""
_READ_FIRST = re.compile(r"model(_\d+)?\.safetensors")
"""Names of models that Accelerate loads in place of those in ``pytorch_model.bin``."""
_RANDOM_STATES = "random_states_"
"""Accelerate writes a file of such a name to each state, when it has written most others."""


class StateDirectory:
    """The directory of a state, and the one in which its files are written first.

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
        self._new.contents = path

    @property
    def exists(self) -> bool:
        return os.path.lexists(self.path)

    @property
    def is_staged(self) -> bool:
        """True if there is a staging directory, and not a link in its place."""
        return self._new.is_there

    @property
    def is_intact(self) -> bool:
        """True unless somebody has removed the staging directory that was made here."""
        return self._new.is_intact

    def prepare(self, *, durable: bool) -> None:
        """Create an empty staging directory, which is this process's until it is published or discarded. What a killed
        process has left is removed, or moved to its place. No other process gives ``path`` a state then.

        Raises:
            DirectoryInUseError: another process saves to the same path.
            OSError: the filesystem refused.
        """
        if self.is_named_by_accelerate:
            make_directories(os.path.dirname(self.path), durable=durable)
        else:
            make_directories(self.path, durable=durable)
            finish(self.path, durable=durable)
        remove_leftovers(os.path.dirname(self.staging))
        try:
            self._new.create()
        except DirectoryInUseError as error:
            error.filename = self.path
            raise

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
        if moves := not (self.is_named_by_accelerate and (replaces or _is_free(self.path))):
            self._new.path = os.path.join(self.path, _SAVED)
        self._new.publish(durable=durable)
        if self.is_named_by_accelerate and link:
            # a script has made a directory of that name, or another process has removed the empty folder
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.symlink(os.path.relpath(self.path, os.path.dirname(self.staging)), self.staging)
        if moves:
            finish(self.path, durable=durable)
        self.tidy()

    def check_has_no_safetensors(self) -> None:
        """
        Raises:
            CheckpointWriteError: the directory has a model that Accelerate would load in place of the one in the other
                format that is to be saved.
        """
        for name in filter(_READ_FIRST.fullmatch, _names_in(self.path)):
            what = "load_state would read this model, and not the one that is to be saved in the other format"
            how = "remove it, or save to another directory"
            raise CheckpointWriteError(errno.EEXIST, f"{what}; {how}", os.path.join(self.path, name))

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
    if not os.path.isdir(committed):
        return False
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
    """True if a save to the directory has begun and was not committed."""
    return os.path.isdir(os.path.join(directory, _SAVING))


def states_in(checkpoints: str) -> list[str]:
    """The states in Accelerate's folder, the oldest first. Names without a number are no states.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    paths = [os.path.join(checkpoints, name) for name in os.listdir(checkpoints)]
    states = [path for path in paths if _NUMBER.search(path) and os.path.isdir(path)]
    return sorted(states, key=lambda state: (_number_of(state), state))


def _number_of(state: str) -> int:
    return int(_NUMBER.findall(state)[0])


def is_state(directory: str) -> bool:
    """True if a directory holds what only a state has: a script may have made it, which knew the name."""
    return any(name.startswith(_RANDOM_STATES) for name in _names_in(directory))


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
    process is writing stays, and what it is about to replace.

    Raises:
        OSError: the filesystem refused.
    """
    with contextlib.suppress(FileNotFoundError):
        for entry in list(os.scandir(saving)):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if entry.is_symlink():
                    if not os.path.exists(entry.path):
                        os.unlink(entry.path)
                elif entry.name.endswith(ASIDE_SUFFIX):
                    _settle(entry.path)
                elif entry.is_dir():
                    remove_unless_locked(entry.path)


def restore_replaced(checkpoints: str) -> None:
    """Give states their places back that killed processes were about to replace, where the filesystem cannot exchange
    two names. A process that is between its two renames keeps what it replaces.

    Raises:
        OSError: the filesystem refused.
    """
    saving = f"{checkpoints}{_STAGING}"
    for name in _names_in(saving):
        if name.endswith(ASIDE_SUFFIX):
            _settle(os.path.join(saving, name))


def _settle(aside: str) -> None:
    """Give what a killed process was about to replace its path back, or remove it if it was replaced. If a process is
    between its two renames, it has locked its staging directory, and nothing changes.

    Raises:
        OSError: the filesystem refused.
    """
    staging = aside.removesuffix(ASIDE_SUFFIX)
    saving, name = os.path.split(staging)
    new = NewDirectory(os.path.join(saving.removesuffix(_STAGING), name), staging)
    with contextlib.suppress(DirectoryInUseError):
        new.create()
    new.discard()


def place_of(path: str | os.PathLike[str]) -> Path:
    """The place of a state, published or not, by its path or the one that ``save_state`` has returned.

    >>> print(place_of("project/checkpoints.saving/checkpoint_3"))
    project/checkpoints/checkpoint_3
    """
    found = Path(path)
    is_staging = found.parent.name == f"{CHECKPOINTS}{_STAGING}"
    return found.parent.with_name(CHECKPOINTS) / found.name if is_staging else found


def published_path(path: str | os.PathLike[str]) -> Path:
    """Path of a state now, by the path that ``save_state`` has returned. A directory in the place of the link to
    a state was left by a killed process."""
    found, published = Path(path), place_of(path)
    return published if published.exists() or not found.exists() else found


def find_state(given: str, *, durable: bool) -> Path:
    """:func:`published_path`, when what this process has still to do there is done, and what a killed process has left
    in mid-publication has its place.

    Raises:
        OSError: the filesystem refused.
        Exception: what the pending save of another Accelerator of this process has failed with.
    """
    for place in (place_of(given), given):  # another Accelerator may save there, and stage where the path leads
        ordering.wait_to_read_directory(place)
    restore_replaced(str(place_of(given).parent))
    found = published_path(given)
    if found.is_dir():
        finish(found, durable=durable)
    return found


def settle_states(checkpoints: str, *, durable: bool) -> None:
    """:func:`find_state` for the newest state in Accelerate's folder, if it is there. Several may have its number."""
    ordering.wait_to_read_directory(checkpoints)
    restore_replaced(checkpoints)
    states = states_in(checkpoints) if os.path.isdir(checkpoints) else []
    for state in states:
        if _number_of(state) == _number_of(states[-1]):
            finish(state, durable=durable)


def _is_free(path: str) -> bool:
    """True if the state can take a path whole: there is nothing, or a file or link of a script, which the state
    replaces. A directory that a script has made, and has written nothing to, goes."""
    try:
        os.rmdir(path)
    except (FileNotFoundError, NotADirectoryError):  # where a link leads may be on another filesystem
        return True
    except OSError:  # also if it cannot be told: what is there may be the script's
        return False
    return True


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
