"""Conformance tests for authors of backends (``backends.py``) and engines of the data service (``provision.py``), and
injected faults (``faults.py``, by the intercepted system calls of ``calls.py``). Needs pytest; no other part imports
this."""

from fastensor.testing.backends import BackendTests
from fastensor.testing.faults import Fault, failing_call, short_call
from fastensor.testing.provision import ProvisionTests

__all__ = ["BackendTests", "Fault", "ProvisionTests", "failing_call", "short_call"]
