"""What backends and adapters have to pass. Needs pytest; not imported by the rest of the package."""

from fastensor.testing.backends import BackendTests
from fastensor.testing.faults import Fault, failing_call, short_call

__all__ = ["BackendTests", "Fault", "failing_call", "short_call"]
