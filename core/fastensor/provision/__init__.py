"""The data service: samples are read and decoded once for all ranks, and pushed to them before they ask."""

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
