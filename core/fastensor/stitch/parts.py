"""The parts of a checkpoint that carry checksums, whichever container they are in, and the local headers of those that
are records of an archive. Pure."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from fastensor.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from fastensor.stitch.damage import Damage

LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""The header in front of a record of a zip archive (PKWARE APPNOTE 6.3, section 4.3.7)."""
LOCAL_SIGNATURE = b"PK\x03\x04"
_DESCRIPTOR_NBYTES, _DESCRIPTOR64_NBYTES = 16, 24
MAX32 = 0xFFFFFFFF
_LENGTHS = struct.Struct("<4s22x2H")
"""A local header: its signature, and the sizes of the name and of the extra field."""


class Part(NamedTuple):
    """A run of bytes with a CRC32 of its own: a record of a torch file, or a tensor of a safetensors file."""

    name: str
    nbytes: int
    """Size of its data."""
    crc32: int | None
    """The CRC32 of its data that the file carries; None if it carries none."""
    begin: int
    """Offset of its space in the file. The space of a record begins with a local header."""
    end: int
    """End of its space."""
    header_nbytes: int = 0
    """Size of the local header, including the name but not the extra field; 0 if there is no local header."""
    dtype: str = ""
    """The dtype as a safetensors file names it, such as ``BF16``. The dtypes of torch files are in the pickle."""
    shape: tuple[int, ...] = ()
    """The shape in a safetensors file, in elements of the torch dtype. A torch element of F4 holds two of the file's.
    """

    @property
    def title(self) -> str:
        """The name of the part in messages, such as ``record 'archive/data/0'``."""
        return f"{'record' if self.header_nbytes else 'tensor'} {self.name!r}"

    @property
    def likely_cause(self) -> str:
        """The reason for which its CRC32 differs, for messages."""
        return "the file was damaged after it was written"


def find_damage(part: Part, offset: int, found: int) -> Damage | None:
    """Compare the CRC32 of the data that was read with the one that the file carries.

    Args:
        part: the part.
        offset: where its data begins.
        found: the CRC32 of the data that was read.

    Returns:
        The damage; None if both CRC32s are equal, or if the file carries none.
    """
    if part.crc32 is None or found == part.crc32:
        return None
    from fastensor.stitch.damage import Damage  # most files have none

    return Damage(part.title, offset, part.nbytes, found, part.crc32)


def check_crc32(part: Part, offset: int, found: int, where: str) -> None:
    """:func:`find_damage`, raised as an error of a load; ``where`` is the file's name.

    Raises:
        CorruptCheckpointError: the CRC32s differ.
    """
    if damage := find_damage(part, offset, found):
        raise CorruptCheckpointError(
            f"{where}: {damage}: {part.likely_cause}. Load an older checkpoint, or pass verify=False to get the "
            f"damaged values"
        )


def find_data(part: Part, header: bytes | bytearray | memoryview, where: str) -> int:
    """The offset at which the data of a record begins, from its local header.

    Raises:
        CorruptCheckpointError: the local header contradicts the directory. A changed length in the header would make
            other bytes the data.
    """
    signature, name_nbytes, extra_nbytes = _LENGTHS.unpack_from(header)
    begin: int = part.begin + part.header_nbytes + extra_nbytes
    if (
        signature != LOCAL_SIGNATURE
        or LOCAL_HEADER.size + name_nbytes != part.header_nbytes
        or begin + part.nbytes > part.end
    ):
        raise CorruptCheckpointError(
            f"{where}: the local header of {part.title} at offset {part.begin} contradicts the directory: the file was "
            f"damaged after it was written"
        )
    return begin


def likely_begin(part: Part) -> int:
    """Where the data of a part are expected, before its local header was read: torch puts a data descriptor, and
    nothing else, behind the data. Its sizes have 64 bits where the size or the offset of the record needs them."""
    if not part.header_nbytes:
        return part.begin
    descriptor_nbytes = _DESCRIPTOR64_NBYTES if max(part.nbytes, part.begin) >= MAX32 else _DESCRIPTOR_NBYTES
    return max(part.end - descriptor_nbytes - part.nbytes, part.begin + part.header_nbytes)


def stand_in_header(part: Part) -> bytes:
    """A sound local header for a record that is not read."""
    return LOCAL_HEADER.pack(LOCAL_SIGNATURE, *[0] * 8, part.header_nbytes - LOCAL_HEADER.size, 0)
