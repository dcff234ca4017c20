"""Ray for tests: one for a module, in the test's own process, or in a cluster of several nodes."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

OPTIONS: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


@contextmanager
def local_ray() -> Iterator[Any]:
    """A Ray of this machine, which this process has joined."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex())  # or Ray would write one into the user's home
    import ray

    from fastensor.provision.ray.cluster import as_named

    with as_named("127.0.0.1"):
        ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, **OPTIONS)
    try:
        yield ray
    finally:
        ray.shutdown()
