"""Files made by hand, and the places in archives where one can lie."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

FOUR_FLOATS = struct.pack("<4f", 1, 2, 3, 4)
MAX16, MAX32 = 0xFFFF, 0xFFFFFFFF


def saved_by_torch(state: object, *, alignment: int = 64, **options: Any) -> bytes:
    file = io.BytesIO()
    with torch.utils.serialization.config.patch("save.storage_alignment", alignment):
        torch.save(state, file, **options)
    return file.getvalue()


@dataclass(frozen=True)
class Layout:
    """A struct of the zip format, and the names of its fields."""

    codes: str
    names: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return struct.calcsize(f"<{self.codes}")

    def pack(self, *values: Any) -> bytes:
        return struct.pack(f"<{self.codes}", *values)

    def fields(self, at: int) -> dict[str, tuple[int, str]]:
        """Where the fields of one that begins at ``at`` are, and how they are written."""
        codes = [self.codes[:2], *self.codes[2:]] if self.codes.startswith("4s") else list(self.codes)
        begins = [at + struct.calcsize(f"<{''.join(codes[:i])}") for i in range(len(codes))]
        return dict(zip(self.names, zip(begins, codes, strict=True), strict=True))


def _layout(codes: str, names: str) -> Layout:
    return Layout(codes, tuple(names.split()))


_RECORD = "flags method time date crc32 stored nbytes name_nbytes extra_nbytes"
LOCAL = _layout("4sHHHHHLLLHH", f"signature version {_RECORD}")
ENTRY = _layout(
    "4sHHHHHHLLLHHHHHLL", f"signature made_by version {_RECORD} comment_nbytes disk internal attributes offset"
)
EXTRA64 = _layout("HHQQQ", "kind length nbytes stored offset")
END64 = _layout("4sQHHLLQQQQ", "signature length made_by version disk start_disk here total size offset")
LOCATOR = _layout("4sLQL", "signature disk offset disks")
END = _layout("4sHHHHLLH", "signature disk start_disk here total size offset comment_nbytes")


def local_records(records: Mapping[str, bytes], *, base: int = 0) -> tuple[bytes, dict[str, int]]:
    """Records one behind the other, not compressed, and where their local headers are."""
    body = bytearray()
    offsets = {}
    for name, data in records.items():
        offsets[name] = base + len(body)
        text = name.encode()
        body += LOCAL.pack(b"PK\3\4", 20, 0x800, 0, 0, 0, zlib.crc32(data), len(data), len(data), len(text), 0)
        body += text + data
    return bytes(body), offsets


def directory(records: Mapping[str, bytes], offsets: Mapping[str, int], *, zip64: bool = False) -> bytes:
    """Their central directory."""
    result = bytearray()
    for name, data in records.items():
        text, crc32, nbytes, offset = name.encode(), zlib.crc32(data), len(data), offsets[name]
        extra = EXTRA64.pack(1, 24, nbytes, nbytes, offset) if zip64 else b""
        sizes = (MAX32, MAX32) if zip64 else (nbytes, nbytes)
        lengths, place = (len(text), len(extra), 0), MAX32 if zip64 else offset
        result += ENTRY.pack(b"PK\1\2", 20, 20, 0x800, 0, 0, 0, crc32, *sizes, *lengths, 0, 0, 0, place)
        result += text + extra
    return bytes(result)


def end64(count: int, size: int, offset: int, *, at: int) -> bytes:
    """The zip64 end record, which begins at ``at``, and its locator."""
    return END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset) + LOCATOR.pack(b"PK\6\7", 0, at, 1)


def end(count: int, size: int, offset: int, comment: bytes = b"") -> bytes:
    return END.pack(b"PK\5\6", 0, 0, count, count, size, offset, len(comment)) + comment


def archive(records: Mapping[str, bytes], *, comment: bytes = b"", gap: bytes = b"") -> bytes:
    """A zip archive with right checksums; the gap is between its records and its directory."""
    body, offsets = local_records(records)
    entries = directory(records, offsets)
    return body + gap + entries + end(len(records), len(entries), len(body) + len(gap), comment)


def archive64(records: Mapping[str, bytes]) -> bytes:
    """One whose sizes, offsets and counts all stand in zip64 fields."""
    body, offsets = local_records(records)
    entries = directory(records, offsets, zip64=True)
    after = len(body) + len(entries)
    return body + entries + end64(len(records), len(entries), len(body), at=after) + end(MAX16, MAX32, MAX32)


def archive_of_two_minds(records: Mapping[str, bytes], others: Mapping[str, bytes]) -> bytes:
    """One whose classic end record points to a directory of ``records``, and its zip64 end record to another.

    In the other one, records of the same name are ``others``.
    """
    body, offsets = local_records(records)
    shadows, elsewhere = local_records(others, base=len(body))
    body += shadows
    second = directory({**records, **others}, {**offsets, **elsewhere})
    first = directory(records, offsets)
    after = len(body) + len(second) + len(first)
    return b"".join(
        (
            body,
            second,
            first,
            end64(len(records), len(second), len(body), at=after),
            end(len(records), len(first), len(body) + len(second)),
        )
    )


def fields_of(data: bytes) -> dict[str, tuple[int, str]]:
    """Where the fields of a sound archive are: ``end.total``, ``entry[data.pkl].nbytes``, ``local[data/0].flags``."""
    found: dict[str, tuple[int, str]] = {}

    def add(what: str, layout: Layout, at: int) -> None:
        found.update({f"{what}.{name}": field for name, field in layout.fields(at).items()})

    def number(field: str) -> int:
        return int(read_field(data, found[field]))

    at = data.rindex(b"PK\5\6")
    add("end", END, at)
    last = "end"
    if data[at - LOCATOR.nbytes :].startswith(b"PK\6\7"):
        add("locator", LOCATOR, at - LOCATOR.nbytes)
        add("end64", END64, number("locator.offset"))
        last = "end64"
    at = number(f"{last}.offset")
    for _ in range(number(f"{last}.total")):
        lengths = struct.unpack_from("<HH", data, at + 28)
        name_at = at + ENTRY.nbytes
        name = data[name_at : name_at + lengths[0]].decode().partition("/")[2]
        add(f"entry[{name}]", ENTRY, at)
        offset = number(f"entry[{name}].offset")
        if offset == MAX32:
            add(f"extra64[{name}]", EXTRA64, name_at + lengths[0])
            offset = number(f"extra64[{name}].offset")
        add(f"local[{name}]", LOCAL, offset)
        at = name_at + sum(lengths)
    return found


def read_field(data: bytes, field: tuple[int, str]) -> Any:
    at, code = field
    return struct.unpack_from(f"<{code}", data, at)[0]


def flipped(data: bytes, bit: int) -> bytes:
    """The same with one bit flipped. Negative ones count from the end, by bytes."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


Edit = Callable[[bytes], bytes]


def lie(values: Mapping[str, int | bytes | Callable[[int], int]]) -> Edit:
    """Other values for fields of an archive: new ones, or functions of the right ones."""

    def edit(data: bytes) -> bytes:
        fields = fields_of(data)
        damaged = bytearray(data)
        for name, value in values.items():
            at, code = fields[name]
            struct.pack_into(
                f"<{code}", damaged, at, value(read_field(data, fields[name])) if callable(value) else value
            )
        return bytes(damaged)

    return edit


# Pickles, opcode by opcode.


def text(value: str) -> bytes:
    encoded = value.encode(errors="surrogatepass")
    return b"X" + struct.pack("<L", len(encoded)) + encoded


def number(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<l", value)
    encoded = pickle.encode_long(value)
    return b"\x8b" + struct.pack("<L", len(encoded)) + encoded if len(encoded) > 255 else _long1(encoded)


def _long1(encoded: bytes) -> bytes:
    return b"\x8a" + bytes([len(encoded)]) + encoded


def named(module: str, name: str) -> bytes:
    """A class or function."""
    return f"c{module}\n{name}\n".encode()


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def list_of(*items: bytes) -> bytes:
    return b"](" + b"".join(items) + b"e"


def dict_of(**items: bytes) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + tuple_of(*arguments) + b"R"


def built(instance: bytes, state: bytes) -> bytes:
    return instance + state + b"b"


def storage(
    key: str = "0", *, kind: bytes = named("torch", "FloatStorage"), numel: int = 4, word: str = "storage"
) -> bytes:
    return tuple_of(text(word), kind, text(key), text("cpu"), number(numel)) + b"Q"


REBUILD = named("torch._utils", "_rebuild_tensor_v2")
NO_HOOKS = call(named("collections", "OrderedDict"))


def tensor(
    within: bytes = b"", *, offset: int = 0, size: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,)
) -> bytes:
    geometry = (number(offset), tuple_of(*map(number, size)), tuple_of(*map(number, stride)))
    return call(REBUILD, within or storage(), *geometry, b"\x89", NO_HOOKS)


def program(body: bytes, *, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def checkpoint(pickled: bytes, storages: Mapping[str, bytes] | None = None, *, top: str = "archive") -> bytes:
    """A torch checkpoint with that pickle, and by default one storage of four floats."""
    records = {f"data/{key}": data for key, data in ({"0": FOUR_FLOATS} if storages is None else storages).items()}
    whole = {"data.pkl": pickled, "byteorder": b"little", **records, "version": b"3\n"}
    return archive({f"{top}/{name}": data for name, data in whole.items()})


# safetensors files.


def safetensors_file(header: object, body: bytes = b"", *, length: int | None = None) -> bytes:
    """With any header, given as bytes or as what JSON is to say, and any length stated for it."""
    encoded = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + body
