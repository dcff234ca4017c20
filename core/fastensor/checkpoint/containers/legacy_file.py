"""Files that torch wrote before 1.6: a :class:`~fastensor.checkpoint.containers.FileContainer`. They are no zip
archives, carry no checksums, and say nothing about themselves without being run: torch loads them whole."""

from __future__ import annotations

from fastensor.backends.registry import record_fallback
from fastensor.checkpoint.containers import ToCompare
from fastensor.checkpoint.containers.torch_file import load_with_torch
from fastensor.checkpoint.reading.opened import OpenedFile
from fastensor.checkpoint.reading.request import Loaded, LoadRequest
from fastensor.checkpoint.tools.catalog import Catalog
from fastensor.errors import UnsupportedContentError, caught_as


def load(file: OpenedFile, request: LoadRequest) -> Loaded:
    if request.mmap:  # torch refuses it, too, by RuntimeError
        error = UnsupportedContentError(
            f"{file.where}: mmap=True maps zip archives, and this file is none: torch wrote such files before 1.6. "
            f"Load it without mmap, and save it again"
        )
        raise caught_as(error, RuntimeError)
    reason = "the file is not a zip archive (torch wrote such files before 1.6)"
    record_fallback(request.fallbacks, "the verifying reader", reason)
    return Loaded(load_with_torch(file, request, is_zip=False), "torch", reason, False)


def read_catalog(file: OpenedFile, *, verify: bool) -> Catalog:
    raise UnsupportedContentError(
        f"{file.where}: not a zip archive (torch wrote such files before 1.6, which say nothing about themselves "
        f"without being run) and not safetensors; load it whole, and save it again"
    )


def to_compare(file: OpenedFile) -> ToCompare:
    return ToCompare((), uncompared=1)


def foreign_code(file: OpenedFile) -> tuple[str, ...]:
    return ()  # nothing is known of it
