"""The Ray of this machine, as services start it that were given no cluster: one for a module of tests."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from provision.conftest import wait_until


@contextmanager
def local_ray() -> Iterator[Any]:
    """A Ray that this process has joined. It has to end, and leave nothing behind, when this process leaves it."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex())  # or Ray would write one into the user's home
    import ray

    from fastensor.provision.ray.cluster import join

    with tempfile.TemporaryDirectory(prefix="fr-", ignore_cleanup_errors=True) as folder:  # sockets need short paths
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", folder)
            membership = join(f"tests-{os.getpid()}")
        assert os.listdir(folder)
        try:
            yield ray
        finally:
            membership.leave()
        wait_until(lambda: not os.listdir(folder))
