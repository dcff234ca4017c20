"""Reading the directory and the pickle of a zip archive of torch from an opened file."""

from __future__ import annotations

import zipfile
from functools import partial
from typing import IO, cast

from fastensor.checkpoint.opened import FileView, OpenedFile, read_exactly
from fastensor.errors import CorruptCheckpointError, FastensorError
from fastensor.files.os_errors import read_error
from fastensor.stitch import torch_records
from fastensor.stitch.torch_records import TorchArchive


def read_archive(file: OpenedFile) -> TorchArchive:
    """The archive's directory, checked. See :func:`fastensor.stitch.torch_records.read_archive`."""
    return torch_records.read_archive(partial(read_exactly, file), file.nbytes, where=file.where)


def read_pickle(file: OpenedFile, archive: TorchArchive, *, verify: bool) -> bytes:
    """The bytes of ``data.pkl``. See :func:`fastensor.stitch.torch_records.read_pickle`."""
    return torch_records.read_pickle(partial(read_exactly, file), archive, where=file.where, verify=verify)


def verify_compressed(file: OpenedFile) -> None:
    """Compare every record of an archive with compressed records.

    Call this before torch reads the archive: torch would take a damaged compression method for a sound one.

    Raises:
        CorruptCheckpointError: a record is damaged.
    """
    try:
        with zipfile.ZipFile(cast(IO[bytes], FileView(file))) as opened:
            damaged = opened.testzip()
    except FastensorError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # bz2 raises OSError without errno for damaged data
            raise read_error(error, file.where) from error
        raise CorruptCheckpointError(f"{file.where}: a compressed record is damaged ({error})") from error
    if damaged is not None:
        raise CorruptCheckpointError(f"{file.where}: record {damaged!r} does not match its CRC32")
