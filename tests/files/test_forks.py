"""What is done in a forked child, and in which order."""

from __future__ import annotations

from programs import run

FORK = """
import os, sys
from fastensor.files.forks import in_children, lock_of

class Owner:
    pass

def check_in_child(check):
    pid = os.fork()
    if pid == 0:
        try:
            check()
            os._exit(0)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


def test_modules_act_before_objects_that_were_there_before_them() -> None:
    """An object may drop memory of its parent, which the module that has mapped it must have put aside by then."""
    run("-c", FORK + ORDER)


ORDER = """
owner, found = Owner(), []
in_children(owner, lambda one: found.append((gds._kvikio._lock is not of_parent, len(buffers._of_parent))))
from fastensor.backends import buffers, gds
mapped, of_parent = buffers.map_buffers(1), gds._kvikio._lock
def check():
    assert found == [(True, 1)], found
check_in_child(check)
"""


def test_an_act_that_raises_is_reported_and_stops_no_other() -> None:
    reported = run("-c", FORK + RAISING).stderr
    assert "ValueError: the first" in reported
    assert "KeyError" not in reported


RAISING = """
owners = [Owner() for _ in range(3)]
def fail(error):
    raise error
in_children(owners[0], lambda one: fail(ValueError("the first")))
in_children(owners[1], lambda one: fail(KeyError("the second")))
owners[2]._lock = before = lock_of(owners[2])
def check():
    assert owners[2]._lock is not before
check_in_child(check)
"""
