"""The backends by name: those of this package, and those that other packages bring.

A package brings a backend by an entry point of the group ``fastensor.backends`` that names something to be called
without arguments, such as its class::

    [project.entry-points."fastensor.backends"]
    mine = "my_package.backend:MyBackend"

It is imported when somebody asks for all names, or for one that is not known yet. What is wrong with it is logged.
"""

from __future__ import annotations

import logging
import os
import threading
from importlib.metadata import EntryPoint

from fastensor.backends.base import Backend
from fastensor.backends.direct import DirectBackend
from fastensor.backends.gds import GdsBackend
from fastensor.backends.numpy import NumpyBackend
from fastensor.backends.torch import TorchBackend
from fastensor.errors import UnknownBackendError
from fastensor.files.installed import entry_points_of, is_mentioned

AUTO = "auto"
PAPER_NAMES = {"cpy": "gds", "npy": "numpy", "pt": "torch"}
"""What the Fastensor paper (section 4) calls the tools that it chooses from."""

GROUP = "fastensor.backends"
"""Of entry points."""

_logger = logging.getLogger("fastensor")
_backends: dict[str, Backend] = {}
_others_wanted = True
"""Whether nobody has looked for backends of other packages yet."""
_lock = threading.RLock()
"""Held while they are imported."""


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # whoever holds it does not live in the child


def register(backend: Backend) -> None:
    """Make a backend available under its name.

    Raises:
        ValueError: the name is taken.
    """
    if backend.name in (AUTO, *PAPER_NAMES, *_backends):
        raise ValueError(f"a backend named {backend.name!r} is registered already")
    _backends[backend.name] = backend


def get(name: str) -> Backend:
    """The backend of that name, or of that name in the paper.

    Raises:
        UnknownBackendError: there is none.

    >>> get("npy").name
    'numpy'
    """
    wanted = PAPER_NAMES.get(name, name)
    if wanted not in _backends and wanted not in names():
        known = ", ".join([AUTO, *_backends])
        raise UnknownBackendError(f"no backend is named {name!r}; there are: {known}")
    return _backends[wanted]


def names() -> tuple[str, ...]:
    """All registered names."""
    global _others_wanted
    with _lock:
        if _others_wanted:
            _others_wanted = False  # now, because what is being imported may ask, too
            _register_others()
        return tuple(_backends)


def _register_others() -> None:
    try:
        points = entry_points_of(GROUP)
    except Exception as error:  # noqa: BLE001  # somebody's metadata is damaged
        _logger.warning("other packages cannot be asked for backends: %r", error)
        return
    for point in points:
        try:
            register(_make(point))
        except Exception as error:  # noqa: BLE001  # one package must not keep the others from working
            _logger.warning("the backend %s (%s) is left out: %r", point.name, point.value, error)


def _make(point: EntryPoint) -> Backend:
    made = point.load()()
    if not isinstance(made, Backend):
        raise TypeError(f"expected a fastensor.backends.base.Backend, found {type(made).__name__}")
    return made


is_mentioned(GROUP)  # while packages are imported anyway: the first save or load would read many small files
for _backend in (DirectBackend(), GdsBackend(), NumpyBackend(), TorchBackend()):
    register(_backend)
