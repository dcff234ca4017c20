"""Reading the directory of a zip archive as torch writes them (PKWARE APPNOTE 6.3, sections 4.3 to 4.5).

Only the directory is read. Every offset and size in it is compared with the file's size before it is used, so nothing
here allocates more than the file holds. Archives on several disks and encrypted records are refused. Compressed
records, which torch never writes, are described but not decoded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.parts import LOCAL_HEADER, MAX32, Part

DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
DESCRIPTOR_CRC_OFFSET = 4
END = struct.Struct("<4s4H2LH")
END_SIGNATURE = b"PK\x05\x06"
END64_LOCATOR = struct.Struct("<4sLQL")
END64_LOCATOR_SIGNATURE = b"PK\x06\x07"
END64 = struct.Struct("<4sQ2H2L4Q")
END64_SIGNATURE = b"PK\x06\x06"
ENTRY = struct.Struct("<4s6H3L5H2L")
ENTRY_SIGNATURE = b"PK\x01\x02"
ENTRY_CRC_OFFSET = 16
ZIP64_EXTRA = 0x0001
_DIRECTORY_ATTRIBUTE = 0x10
_NOT_AS_THEY_ARE = 0x2060
"""Flags of strong encryption, of patches, and of masked headers."""
MAX16 = 0xFFFF
_MAX_COMMENT = 0xFFFF

ReadAt = Callable[[int, int], bytes]
"""``read(offset, nbytes)``: exactly that many bytes from that offset, or an exception."""
_DirectoryEntry: TypeAlias = tuple[int, str, int, int, int, int, bool]
"""One entry of the directory: where the local header begins; the name; the size of the data, and that in the file; the
CRC32; the size of the local header without its extra field; whether the data are compressed. A plain tuple costs the
garbage collector nothing, and there may be tens of thousands."""


class ZipDirectory(NamedTuple):
    """The records of an archive, as its central directory lists them."""

    parts: list[Part]
    """The records, in the order of the file. The space of each ends where the next one begins."""
    offset: int
    """Offset of the central directory. All records end at or before it."""
    compressed: bool
    """True if any record is compressed."""


def parse_directory(read: ReadAt, nbytes: int, *, where: str) -> ZipDirectory:
    """Read the central directory of a zip archive of ``nbytes`` bytes.

    Args:
        read: random access to the file.
        nbytes: size of the file.
        where: the file's name, for messages.

    Raises:
        CorruptCheckpointError: the directory is missing, cut off, contradicts itself or points outside the file.
    """
    read = _keeping_the_end(read, nbytes)
    count, size, offset = _find_directory(read, nbytes, where)
    data = read(offset, size)
    entries = []
    position = 0
    for number in range(count):
        entry, position = _parse_entry(data, position, offset, where, number)
        entries.append(entry)
    entries.sort(key=itemgetter(0))
    return ZipDirectory(_parts(entries, offset, where), offset, any(entry[-1] for entry in entries))


def _parts(entries: Sequence[_DirectoryEntry], offset: int, where: str) -> list[Part]:
    """The records of entries that are ordered by offset. Raises if two have one name, or if they overlap."""
    parts: dict[str, Part] = {}
    ends = [entry[0] for entry in entries[1:]]
    ends.append(offset)
    for (begin, name, nbytes, stored_nbytes, crc32, header_nbytes, _), end in zip(entries, ends, strict=False):
        reached = begin + header_nbytes + stored_nbytes
        if name in parts:
            raise CorruptCheckpointError(f"{where}: two records are named {name!r}")
        if reached > offset:
            raise CorruptCheckpointError(
                f"{where}: record {name!r} claims {stored_nbytes} bytes from offset {begin}, past the directory at "
                f"{offset}; the file is damaged or was cut off"
            )
        if reached > end:
            raise CorruptCheckpointError(f"{where}: record {name!r} and the next one overlap at offset {end}")
        parts[name] = Part(name, nbytes, crc32 if nbytes else None, begin, end, header_nbytes)
    return list(parts.values())


def has_end(read: ReadAt, nbytes: int) -> bool:
    """True if a file has the end of a directory where it may be."""
    return _find_end(read, nbytes)[1] >= 0


def _keeping_the_end(read: ReadAt, nbytes: int) -> ReadAt:
    """The same access to a file, of which the end, where most of the directory is looked for, is read once."""
    begin = max(nbytes - END.size - _MAX_COMMENT, 0)
    end = read(begin, nbytes - begin)
    return lambda at, count: end[at - begin : at - begin + count] if at >= begin else read(at, count)


def _find_end(read: ReadAt, nbytes: int) -> tuple[bytes, int]:
    """The end of the file, as far as it may hold the end of the directory; and where in it that begins, or -1."""
    tail_nbytes = min(nbytes, END.size + _MAX_COMMENT)
    tail = read(nbytes - tail_nbytes, tail_nbytes)
    return tail, tail.rfind(END_SIGNATURE, 0, max(len(tail) - END.size + len(END_SIGNATURE), 0))


def _find_directory(read: ReadAt, nbytes: int, where: str) -> tuple[int, int, int]:
    """Number of entries, size and offset of the central directory."""
    tail, at = _find_end(read, nbytes)
    tail_nbytes = len(tail)
    if at < 0:
        raise CorruptCheckpointError(
            f"{where}: no zip end-of-directory record in the last {tail_nbytes} bytes; the file was cut off "
            f"(an interrupted copy, say) or is not a checkpoint"
        )
    end = nbytes - tail_nbytes + at
    _, disk, start_disk, here, count, size, offset, _ = END.unpack_from(tail, at)
    limit = end
    saturated = MAX16 in (here, count) or MAX32 in (size, offset)
    before = end - END64_LOCATOR.size  # torch goes by the zip64 record wherever there is one
    if saturated or (before >= 0 and read(before, len(END64_LOCATOR_SIGNATURE)) == END64_LOCATOR_SIGNATURE):
        classic = (count, size, offset)
        limit, disk, start_disk, here, count, size, offset = _read_end64(read, end, where)
        if any(old not in (new, MAX16, MAX32) for old, new in zip(classic, (count, size, offset), strict=True)):
            raise CorruptCheckpointError(
                f"{where}: the end of the directory at offset {end} and the zip64 one at {limit} contradict each other"
            )
    if disk or start_disk or here != count:
        raise CorruptCheckpointError(f"{where}: an archive in several parts; expected one whole file")
    if offset + size > limit or count * ENTRY.size > size:
        raise CorruptCheckpointError(
            f"{where}: the directory claims {count} entries in {size} bytes from offset {offset}, "
            f"but it must end before {limit}"
        )
    return count, size, offset


def _read_end64(read: ReadAt, end: int, where: str) -> tuple[int, int, int, int, int, int, int]:
    at = end - END64_LOCATOR.size
    locator = END64_LOCATOR.unpack(read(at, END64_LOCATOR.size)) if at >= 0 else (b"", 0, 0, 0)
    if locator[0] != END64_LOCATOR_SIGNATURE:
        raise CorruptCheckpointError(f"{where}: a zip64 archive without its locator at offset {at}")
    offset64 = locator[2]
    if offset64 + END64.size > at or locator[3] != 1:
        raise CorruptCheckpointError(
            f"{where}: the zip64 locator points to {offset64}, outside the file, or to another part of an archive"
        )
    signature, own_nbytes, _, _, disk, start_disk, here, count, size, offset = END64.unpack(read(offset64, END64.size))
    if signature == END64_SIGNATURE and own_nbytes < END64.size - 12:
        raise CorruptCheckpointError(f"{where}: the zip64 end-of-directory record at {offset64} contradicts itself")
    if signature != END64_SIGNATURE:
        raise CorruptCheckpointError(
            f"{where}: no zip64 end-of-directory record at offset {offset64}; the file was damaged, or another archive "
            f"stands in front of the last one: load that one from where it begins, or each from a file of its own"
        )
    return offset64, disk, start_disk, here, count, size, offset


def _parse_entry(data: bytes, at: int, base: int, where: str, number: int) -> tuple[_DirectoryEntry, int]:
    if at + ENTRY.size > len(data):
        raise _defect(where, number, base + at, "cut off")
    (signature, _, _, flags, method, _, _, crc32, stored, nbytes, name_nbytes, extra_nbytes, comment_nbytes, disk, _,
     attributes, header_offset) = ENTRY.unpack_from(data, at)  # fmt: skip
    if signature != ENTRY_SIGNATURE:
        raise _defect(where, number, base + at, f"found {signature!r}, expected {ENTRY_SIGNATURE!r}")
    if disk > 1:
        raise _defect(
            where, number, base + at, f"on disk {disk} of an archive in several parts; expected one whole file"
        )
    if flags & 1:
        raise _defect(where, number, base + at, "encrypted, which no checkpoint is")
    if flags & _NOT_AS_THEY_ARE:
        raise _defect(where, number, base + at, "unsupported encryption, or a patch, which no checkpoint has")
    if attributes & _DIRECTORY_ATTRIBUTE and nbytes:
        what = f"a directory with {nbytes} bytes of contents; torch would not read them"
        raise _defect(where, number, base + at, what)
    name_at = at + ENTRY.size
    extra_at = name_at + name_nbytes
    stop = extra_at + extra_nbytes + comment_nbytes
    if stop > len(data):
        raise _defect(where, number, base + at, "cut off")
    try:
        name = data[name_at:extra_at].decode()
    except UnicodeDecodeError as error:
        raise _defect(where, number, base + at, "its name is not UTF-8") from error
    if MAX32 in (nbytes, stored, header_offset):
        found = _apply_zip64(data[extra_at : extra_at + extra_nbytes], nbytes, stored, header_offset)
        if found is None:
            raise _defect(where, number, base + at, "sizes are said to be in a zip64 field, which is missing")
        nbytes, stored, header_offset = found
    if method == 0 and stored != nbytes:
        what = f"{name!r} is not compressed, yet {nbytes} bytes take {stored}"
        raise _defect(where, number, base + at, what)
    return (header_offset, name, nbytes, stored, crc32, LOCAL_HEADER.size + name_nbytes, method != 0), stop


def _defect(where: str, number: int, offset: int, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{where}: directory entry {number} at offset {offset}: {what}")


def _apply_zip64(extra: bytes, nbytes: int, stored: int, offset: int) -> tuple[int, int, int] | None:
    """The fields, the saturated ones from the zip64 extra field (APPNOTE 4.5.3); None if that is missing."""
    values = [nbytes, stored, offset]
    saturated = [i for i, value in enumerate(values) if value == MAX32]
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        body = extra[at + 4 : at + 4 + length]
        if len(body) < length:
            return None
        if kind == ZIP64_EXTRA and len(body) >= 8 * len(saturated):
            for i, value in zip(saturated, struct.unpack_from(f"<{len(saturated)}Q", body), strict=True):
                values[i] = value
            return values[0], values[1], values[2]
        at += 4 + length
    return None
