"""The programs that tests start."""

from __future__ import annotations

import subprocess

import pytest
from programs import run


@pytest.mark.parametrize(("cold", "error"), [(False, TimeoutError), (True, subprocess.TimeoutExpired)])
def test_a_program_that_takes_too_long_is_killed_with_what_it_has_started(cold: bool, error: type[Exception]) -> None:
    """A process that goes on holds the pipes of the program open, and whoever reads them would wait for it."""
    waits = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    with pytest.raises(error):
        run("-c", waits, cold=cold, timeout=0.5)
