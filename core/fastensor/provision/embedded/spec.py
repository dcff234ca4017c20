"""Source and options of a service, in memory without a name: whoever has it can start the service.

The server reads only the facts. Objects of the user are unpickled in workers, after the script that has started the
service has been imported there, as ``multiprocessing`` does it (``spawn``).
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from multiprocessing import process, spawn
from typing import TYPE_CHECKING, Any

from fastensor.provision.engine import Facts
from fastensor.provision.pickling import pickling

if TYPE_CHECKING:
    from fastensor.provision.making import UserObjects

_NOT_FOR_WORKERS = ("authkey", "name", "start_method")
"""Preparations of ``multiprocessing`` for its own processes."""


def packed(facts: Facts, contents: UserObjects) -> int:
    """Three pickles: the facts, how ``multiprocessing`` prepares a process, and the contents.

    Returns:
        a descriptor of the spec, which belongs to the caller.

    Raises:
        ProvisionError: something cannot be pickled.
    """
    preparation = spawn.get_preparation_data("fastensor-worker")
    for name in _NOT_FOR_WORKERS:
        preparation.pop(name, None)
    memory = os.fdopen(os.memfd_create("fastensor-spec", os.MFD_CLOEXEC), "wb")
    advice = "Functions have to be defined at the top of a module, and the source may hold no open files or locks"
    with memory, pickling("the source, or a transform,", advice):
        pickle.dump(facts, memory)
        pickle.dump(preparation, memory)
        pickle.dump([getattr(contents, field.name) for field in fields(contents)], memory, protocol=5)
        memory.flush()
        return os.dup(memory.fileno())


def facts_of(fd: int) -> Facts:
    """The facts of a spec."""
    found: Facts = next(_pickled(fd))
    return found


def prepare(fd: int) -> None:
    """Become like the process that has packed a spec: import its script. It is imported once in a process."""
    _, preparation = islice(_pickled(fd), 2)
    _prepare(preparation)


def contents_of(fd: int) -> UserObjects:
    """The user's objects, in a process that was made for them, and is prepared."""
    from fastensor.provision.making import UserObjects  # brings torch, which the server has no use for

    prepare(fd)
    return UserObjects(*next(islice(_pickled(fd), 2, None)))


def _pickled(fd: int) -> Iterator[Any]:
    """The objects of a spec, one after the other. The process has to be prepared for the last one."""
    with mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ) as memory:
        while True:
            yield pickle.load(memory)


def _prepare(preparation: dict[str, Any]) -> None:
    current: Any = process.current_process()
    current._inheriting = True  # a script that starts a service when it is imported gets multiprocessing's explanation
    try:
        spawn.prepare(preparation)
    finally:
        del current._inheriting
