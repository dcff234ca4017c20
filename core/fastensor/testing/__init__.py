"""For authors of backends and engines: the tests that each has to pass, and injected faults. Needs pytest; the rest of
the package does not import this."""

from fastensor.testing.backends import BackendTests
from fastensor.testing.faults import Fault, failing_call, short_call
from fastensor.testing.provision import ProvisionTests

__all__ = ["BackendTests", "Fault", "ProvisionTests", "failing_call", "short_call"]
