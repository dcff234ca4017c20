"""The data service: samples are read and decoded once for all ranks, and pushed to them before they ask. Begin with
``service.py`` and ``loader.py``, which users call. ``cache.py``, ``credits.py`` and ``feeding.py`` decide what is read
and sent when (pure); ``embedded/`` is the engine of one machine, ``ray/`` that of several, and ``engine.py`` their
protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastensor.errors import BatchError, ProvisionError
    from fastensor.provision.loader import LoaderStatistics, ProvisionedLoader
    from fastensor.provision.service import DataService
    from fastensor.provision.sources import FileSource, Source, as_source
else:
    from fastensor.files.importing import on_first_use

    __getattr__ = on_first_use(
        __name__,
        {
            "fastensor.errors": ("BatchError", "ProvisionError"),
            "fastensor.provision.loader": ("LoaderStatistics", "ProvisionedLoader"),
            "fastensor.provision.service": ("DataService",),
            "fastensor.provision.sources": ("FileSource", "Source", "as_source"),
        },
    )

__all__ = [
    "BatchError",
    "DataService",
    "FileSource",
    "LoaderStatistics",
    "ProvisionError",
    "ProvisionedLoader",
    "Source",
    "as_source",
]
