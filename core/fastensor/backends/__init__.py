"""Backends, which move bytes between memory and files. Begin with ``base.py``, their protocol, and ``direct.py``.
``registry.py`` lists them, ``staging.py`` and ``snapshot.py`` produce the windows of a file, ``pipeline.py`` writes
them, ``ring_reader.py`` reads ahead, ``buffers.py`` lends memory, and ``streams.py`` queues copies of GPUs. Authors of
others implement :class:`Backend`, name their class by an entry point (see :mod:`fastensor.backends.registry`), and test
it by :class:`fastensor.testing.BackendTests`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastensor.backends.base import Backend, BatchReader, DeviceSlots, Extent, Reader, SlotBackend, Slots
    from fastensor.backends.copier import Window
    from fastensor.backends.staging import Stager, open_stager
    from fastensor.files.posix import EndOfFile
    from fastensor.stitch.source import Source
else:
    from fastensor.files.importing import on_first_use

    __getattr__ = on_first_use(
        __name__,
        {
            "fastensor.backends.base": (
                "Backend", "BatchReader", "DeviceSlots", "Extent", "Reader", "SlotBackend", "Slots",
            ),
            "fastensor.backends.copier": ("Window",),
            "fastensor.backends.staging": ("Stager", "open_stager"),
            "fastensor.files.posix": ("EndOfFile",),
            "fastensor.stitch.source": ("Source",),
        },
    )  # fmt: skip

__all__ = [
    "Backend", "BatchReader", "DeviceSlots", "EndOfFile", "Extent", "Reader", "SlotBackend", "Slots",
    "Source", "Stager", "Window", "open_stager",
]  # fmt: skip
