"""Sound torch files of every kind, all of one state."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from functools import cache

from hostile import crafted
from hostile.attacks import STATE

import fastensor


def saved_by_fastensor() -> bytes:
    file = io.BytesIO()
    fastensor.save(STATE, file)
    return file.getvalue()


def records_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def deflated(data: bytes) -> bytes:
    """The same archive, compressed, which torch reads, too."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents in records_of(data).items():
            archive.writestr(name, contents)
    return file.getvalue()


SOUND: dict[str, Callable[[], bytes]] = {
    "fastensor": cache(saved_by_fastensor),
    "torch": cache(lambda: crafted.saved_by_torch(STATE)),
    "torch, aligned to 4096": cache(lambda: crafted.saved_by_torch(STATE, alignment=4096)),
    "zip64": cache(lambda: crafted.archive64(records_of(saved_by_fastensor()))),
}
"""What we read ourselves."""
BY_TORCH: dict[str, Callable[[], bytes]] = {
    "deflated": lambda: deflated(saved_by_fastensor()),
    "before 1.6": lambda: crafted.saved_by_torch(STATE, _use_new_zipfile_serialization=False),
}
"""What torch reads by itself: after we have compared the checksums, or without any."""
