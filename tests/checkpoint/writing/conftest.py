"""An S3 server on localhost, which plain ``s3://`` URLs reach."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else one line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a new, empty bucket."""
    import fsspec
    import s3fs
    from moto.backends import get_backend

    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    retries = {"retries": {"max_attempts": 0}, "connect_timeout": 30, "read_timeout": 100}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": s3_endpoint, "config_kwargs": retries})
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    fsspec.filesystem("s3").mkdir("bucket")
    yield "s3://bucket"
    for filesystem in s3fs.S3FileSystem._cache.values():
        if filesystem._s3 is not None:
            filesystem.close_session(filesystem.loop, filesystem._s3creator)
    s3fs.S3FileSystem.clear_instance_cache()
    for account in get_backend("s3").values():
        for region in account.values():
            region.reset()
