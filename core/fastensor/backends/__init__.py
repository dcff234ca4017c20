"""Ways of moving a file's bytes. Authors of plug-ins implement :class:`Backend`, and test it by
:class:`fastensor.testing.BackendTests`."""

from fastensor.backends.base import Availability, Backend, DeviceSlots, Extent, Reader, SlotBackend, Slots

__all__ = ["Availability", "Backend", "DeviceSlots", "Extent", "Reader", "SlotBackend", "Slots"]
