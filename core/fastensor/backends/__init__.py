"""Ways of moving a file's bytes, and what authors of other ways need: they implement :class:`Backend`, name their class
by an entry point (see :mod:`fastensor.backends.registry`), and test it by :class:`fastensor.testing.BackendTests`.
"""

from fastensor.backends.base import Backend, BatchReader, DeviceSlots, Extent, Reader, SlotBackend, Slots
from fastensor.backends.copier import Window
from fastensor.backends.staging import Stager, open_stager
from fastensor.files.posix import EndOfFile
from fastensor.stitch.source import Source

__all__ = [
    "Backend", "BatchReader", "DeviceSlots", "EndOfFile", "Extent", "Reader", "SlotBackend", "Slots",
    "Source", "Stager", "Window", "open_stager",
]  # fmt: skip
