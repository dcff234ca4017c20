"""For authors of backends: the tests that every backend passes, and injected faults. Needs pytest; the rest of the
package does not import this."""

from fastensor.testing.backends import BackendTests
from fastensor.testing.faults import Fault, failing_call, short_call

__all__ = ["BackendTests", "Fault", "failing_call", "short_call"]
