"""The backends by name."""

from __future__ import annotations

from fastensor.backends.base import Backend
from fastensor.backends.direct import DirectBackend
from fastensor.backends.numpy import NumpyBackend
from fastensor.backends.torch import TorchBackend
from fastensor.errors import UnknownBackendError

AUTO = "auto"
PAPER_NAMES = {"cpy": "gds", "npy": "numpy", "pt": "torch"}
"""What the Fastensor paper (section 4) calls the tools that it chooses from."""

_backends: dict[str, Backend] = {}


def register(backend: Backend) -> None:
    """Make a backend available under its name.

    Raises:
        ValueError: the name is taken.
    """
    if backend.name in _backends or backend.name == AUTO:
        raise ValueError(f"a backend named {backend.name!r} is registered already")
    _backends[backend.name] = backend


def get(name: str) -> Backend:
    """The backend of that name, or of that name in the paper.

    Raises:
        UnknownBackendError: there is none.

    >>> get("npy").name
    'numpy'
    """
    try:
        return _backends[PAPER_NAMES.get(name, name)]
    except KeyError:
        known = ", ".join([AUTO, *_backends])
        raise UnknownBackendError(f"no backend is named {name!r}; there are: {known}") from None


def names() -> tuple[str, ...]:
    """All registered names."""
    return tuple(_backends)


register(DirectBackend())
register(NumpyBackend())
register(TorchBackend())
