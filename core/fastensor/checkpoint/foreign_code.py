"""Which code a checkpoint names that is not torch's: what ``torch.load(..., weights_only=False)`` would run."""

from __future__ import annotations

import io
import zipfile
from typing import IO, Any, cast

import torch

from fastensor.checkpoint.archive import read_archive, read_pickle
from fastensor.checkpoint.opened import FileView, OpenedFile, container_of
from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.torch_pickle import read_program
from fastensor.stitch.torch_records import TorchArchive


def foreign_code(file: OpenedFile) -> tuple[str, ...]:
    """The functions and classes that a file names and ``weights_only=True`` refuses; or, if it refuses the pickle as a
    whole, the reason. Nothing of the file is run. Of a file of torch before 1.6, nothing is known.

    Raises:
        CorruptCheckpointError: the directory of the file is damaged.
        CheckpointReadError: the operating system failed to deliver bytes.
    """
    if container_of(file) != "torch":
        return ()
    archive = read_archive(file)
    if any(part.name.endswith("/constants.pkl") for part in archive.others):
        return ("the program of a TorchScript archive",)
    try:
        return refused_globals(read_program(_pickle_of(file, archive), where=file.where).naming_globals())
    except CorruptCheckpointError as error:  # torch's unpickler might still run it
        return (f"the pickle ({error})",)


def _pickle_of(file: OpenedFile, archive: TorchArchive) -> bytes:
    if not archive.compressed:
        return read_pickle(file, archive, verify=False)
    with zipfile.ZipFile(cast(IO[bytes], FileView(file))) as opened:
        return opened.read(archive.pickle.name)


def refused_globals(pickled: bytes) -> tuple[str, ...]:
    """The globals of a pickle that torch's restricted unpickler refuses; or why it refuses the pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
    file.seek(0)
    try:
        return tuple(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(cast(Any, file))))
    except Exception as error:  # noqa: BLE001  # torch's reader knows fewer pickles than ours
        return (f"the pickle ({error})",)
