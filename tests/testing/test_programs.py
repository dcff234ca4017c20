"""The programs that tests start."""

from __future__ import annotations

import multiprocessing
import subprocess

import pytest
from programs import Program, run


@pytest.mark.parametrize(("cold", "error"), [(False, TimeoutError), (True, subprocess.TimeoutExpired)])
def test_a_program_that_takes_too_long_is_killed_with_what_it_has_started(cold: bool, error: type[Exception]) -> None:
    """A process that goes on holds the pipes of the program open, and whoever reads them would wait for it."""
    waits = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    with pytest.raises(error):
        run("-c", waits, cold=cold, timeout=0.5)


def test_a_program_ends_with_its_input_though_a_child_of_the_test_goes_on() -> None:
    """A child of fork has the descriptors of its parent."""
    context = multiprocessing.get_context("fork")
    may_end = context.Event()
    with Program("-c", "import sys; sys.stdin.read()") as program:
        child = context.Process(target=may_end.wait)
        child.start()
        try:
            program.communicate(timeout=20)
        finally:
            may_end.set()
            child.join()
