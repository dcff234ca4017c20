"""kvikio and NVIDIA's driver library are there, or the tests say why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from unittest import mock

import pytest

from fastensor.backends import gds
from fastensor.backends.gds import GdsBackend


@pytest.fixture(autouse=True, scope="module")
def available() -> Iterator[None]:
    with mock.patch.object(gds, "_DEVICES", ()):  # where there is a GPU, these tests do not use it
        reason = GdsBackend().why_unavailable()
        if reason and os.environ.get("FASTENSOR_TESTS_NEED_GDS"):
            pytest.fail(f"these tests have to run, but: {reason}")
        if reason:
            pytest.skip(f"gds: {reason} (make test-gds)")
        yield
