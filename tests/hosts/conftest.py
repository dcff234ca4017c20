"""Machines that tests use one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hosts.machines import CannotMakeMachinesError, Machines, made

MOST = 3


@pytest.fixture(scope="session")
def made_machines() -> Iterator[Machines]:
    if os.geteuid() != 0:
        pytest.skip("only root can make machines in namespaces")
    try:
        with made(MOST) as machines:
            yield machines
    except CannotMakeMachinesError as error:
        pytest.skip(f"machines cannot be made in namespaces here: {error}")


@pytest.fixture
def machines(made_machines: Machines) -> Iterator[Machines]:
    """Three machines, all with their cables in."""
    yield made_machines
    for number in range(MOST):
        made_machines.join(number)
