"""The data service: samples are read and decoded once for all ranks, and pushed to them before they ask."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastensor.errors import ProvisionError
    from fastensor.provision.loader import LoaderStatistics, ProvisionedLoader
    from fastensor.provision.service import DataService
    from fastensor.provision.sources import FileSource, Source, as_source
else:
    # Names are imported on their first use (PEP 562): torch takes seconds, and not all processes of a service need it.
    _HOME_OF = {
        "DataService": "service",
        "FileSource": "sources",
        "LoaderStatistics": "loader",
        "ProvisionedLoader": "loader",
        "Source": "sources",
        "as_source": "sources",
    }

    def __getattr__(name):
        if name == "ProvisionError":
            return import_module("fastensor.errors").ProvisionError
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        return value


__all__ = [
    "DataService",
    "FileSource",
    "LoaderStatistics",
    "ProvisionError",
    "ProvisionedLoader",
    "Source",
    "as_source",
]
