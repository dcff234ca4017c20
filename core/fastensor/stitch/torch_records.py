"""The records of a torch checkpoint: which of them are storages, and which can be verified. Pure."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Container, Sequence
from typing import NamedTuple

from fastensor.errors import CorruptCheckpointError, NotACheckpointError
from fastensor.files.words import some_of
from fastensor.stitch.parts import LOCAL_HEADER, Part, check_crc32, find_data
from fastensor.stitch.zip_directory import ReadAt, ZipDirectory, parse_directory

_PICKLE = "data.pkl"
_OF_TORCH = re.compile(r"[^/]*/(data/.*|version|byteorder|\.data/serialization_id|\.format_version)", re.DOTALL)
"""The names of records that a checkpoint of torch has beside its pickle."""
_OTHERS_OF_TORCH = {
    "archive_format": "a program that torch.export has saved; torch.export.load reads it",
    "extern_modules": "a package of torch.package; torch.package.PackageImporter reads it",
}
"""Archives that torch writes with records of the same kind, by the name of one that no checkpoint has."""
_SHOWN = 3


class TorchArchive(NamedTuple):
    """The records of a checkpoint of torch."""

    pickle: Part
    """``data.pkl``."""
    storages: dict[str, Part]
    """The records of storages by the keys that the pickle has for them, in the order in which the pickle names them."""
    others: Sequence[Part]
    """All other records."""
    checked: bool
    """True if the file carries checksums of its storages and of its other records."""
    why_torch: str
    """Reason for which only torch can read the file; empty if we can."""
    compressed: bool
    """True if any record is compressed."""

    @property
    def parts(self) -> list[Part]:
        """All records."""
        return [*self.others, *self.storages.values()]

    def wanted(self, skipped: Container[str] = ()) -> list[Part]:
        """The records of storages that have data, but those of skipped names, in the order of the file's directory."""
        return [part for part in self.storages.values() if part.nbytes and part.name not in skipped]

    @property
    def swapped(self) -> bool:
        """True if the file was written on a machine of the other byte order."""
        other = "big" if sys.byteorder == "little" else "little"
        return any(part.name.endswith("/byteorder") and part.nbytes == len(other) for part in self.others)


def read_archive(read: ReadAt, nbytes: int, *, where: str) -> TorchArchive:
    """Read the directory of a checkpoint of torch.

    Args:
        read: random access to the file.
        nbytes: size of the file.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpointError: the directory is damaged.
        NotACheckpointError: the archive holds something else.
    """
    directory = parse_directory(read, nbytes, where=where)
    pickle_name = _find_pickle(directory, where)
    prefix = pickle_name.removesuffix(_PICKLE) + "data/"
    storages = [part for part in directory.parts if part.name.startswith(prefix)]
    others = [part for part in directory.parts if not part.name.startswith(prefix)]
    checked = [any(part.crc32 for part in parts) for parts in (storages, others)]
    filled = [any(part.nbytes for part in parts) for parts in (storages, others)]
    if not checked[0]:
        storages = [part._replace(crc32=None) for part in storages]
    if not checked[1]:
        others = [part._replace(crc32=None) for part in others]
    return TorchArchive(
        pickle=next(part for part in others if part.name == pickle_name),
        storages=_by_key(storages, prefix),
        others=others,
        checked=checked[0] >= filled[0] and checked[1] >= filled[1],
        why_torch=_why_torch(others, directory.compressed),
        compressed=directory.compressed,
    )


def _find_pickle(directory: ZipDirectory, where: str) -> str:
    """The name of the record that makes an archive a checkpoint."""
    names = [part.name for part in directory.parts]
    found = [name for name in names if name.endswith(f"/{_PICKLE}") and name.count("/") == 1]
    if not found and (what := _archive_in_words(names)):
        raise NotACheckpointError(f"{where}: expected a checkpoint, found {what}")
    if len(found) != 1:
        raise CorruptCheckpointError(
            f"{where}: the directory at offset {directory.offset} has {len(found)} records named {_PICKLE} at its top, "
            f"expected one; it is not a checkpoint"
        )
    return found[0]


def _archive_in_words(names: Sequence[str]) -> str:
    """Words for an archive without a checkpoint's pickle; empty if it looks like the rest of a checkpoint."""
    for name in names:
        if what := _OTHERS_OF_TORCH.get(name.rpartition("/")[2]):
            return what
    if not names or any(_OF_TORCH.fullmatch(name) or _PICKLE in name.split("/") for name in names):
        return ""
    if all(name.endswith(".npy") for name in names):
        return "an archive of NumPy (.npz); numpy.load reads it"
    shown = some_of(names, _SHOWN, repr)
    return f"a zip archive of {shown}, none of which is {_PICKLE}; unpack it first, if a checkpoint is in it"


def _by_key(storages: Sequence[Part], prefix: str) -> dict[str, Part]:
    """Records by their keys, in the order in which the unpickler will ask for them.

    torch numbers storages in the order of the pickle, and writes them in that order. torch before 2.1 wrote them in the
    order of their numbers as text (0, 1, 10, 11, 2).
    """
    start = len(prefix)
    found = {part.name[start:]: part for part in storages}
    text = "".join(found)
    if list(found) == list(map(str, range(len(found)))) or not (text.isdecimal() and text.isascii()):
        return found
    return dict(sorted(found.items(), key=lambda item: (len(item[0]), item[0])))


def _why_torch(others: Sequence[Part], compressed: bool) -> str:
    if any(part.name.endswith("/constants.pkl") for part in others):
        return "the file is a TorchScript archive, which torch.jit loads"
    return "the archive has been compressed, which torch never does" if compressed else ""


def read_pickle(read: ReadAt, archive: TorchArchive, *, where: str, verify: bool) -> bytes:
    """The bytes of ``data.pkl``.

    Raises:
        CorruptCheckpointError: the record is compressed, or does not match its CRC32.
    """
    part = archive.pickle
    if archive.compressed:
        raise CorruptCheckpointError(f"{where}: {part.name} at offset {part.begin} is compressed")
    begin = find_data(part, read(part.begin, LOCAL_HEADER.size), where)
    data = read(begin, part.nbytes)
    if verify:
        check_crc32(part, begin, zlib.crc32(data), where)
    return data
