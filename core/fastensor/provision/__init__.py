"""The data service: samples are read and decoded once for all ranks, and pushed to them before they ask."""

from fastensor.errors import ProvisionError
from fastensor.provision.loader import LoaderStatistics, ProvisionedLoader
from fastensor.provision.service import DataService
from fastensor.provision.sources import FileSource, Source, as_source

__all__ = [
    "DataService",
    "FileSource",
    "LoaderStatistics",
    "ProvisionError",
    "ProvisionedLoader",
    "Source",
    "as_source",
]
