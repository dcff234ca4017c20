"""The process that keeps a Ray of one machine, for the processes of one job: as long as one of them is connected.

So it does not matter which of them has started it, or ends first. Nobody else can reach that Ray: it listens on the
loopback interface, and asks for Ray's token, unless the user has switched that off.
"""

from __future__ import annotations

import logging
import shutil
import signal
import socket
import tempfile

import ray

from fastensor.data.serving import LocalClient, LocalServer
from fastensor.provision.ray.cluster import as_named


def main(fd: int) -> None:
    """Run in a process of its own.

    Args:
        fd: a Unix socket that listens.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = tempfile.mkdtemp(prefix="fastensor-ray-")
    try:
        with as_named("127.0.0.1"):
            ray.init(
                "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _temp_dir=folder
            )
        address = str(ray.get_runtime_context().gcs_address)
        LocalServer(socket.socket(fileno=fd), LocalClient, greeting=address).run()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
