"""Zip archives whose parts contradict each other: one line for each lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import crafted
from hostile.archives import SOUND, records_of, saved_by_fastensor
from hostile.attacks import COMPARING, Defect, attacks_with
from hostile.crafted import MAX16, MAX32, lie

pytestmark = pytest.mark.hostile


def rebuilt(change: Callable[[dict[str, bytes]], dict[str, bytes]], **options: bytes) -> Callable[[bytes], bytes]:
    """Another archive, of changed records."""
    return lambda data: crafted.archive(change(records_of(data)), **options)


def renamed(old: str, new: str) -> Callable[[bytes], bytes]:
    return rebuilt(lambda records: {name.replace(old, new, 1): data for name, data in records.items()})


def with_record(name: str, data: bytes = b"x") -> Callable[[bytes], bytes]:
    return rebuilt(lambda records: {**records, name: data})


def replaced(old: bytes, new: bytes, *, last: bool = False) -> Callable[[bytes], bytes]:
    """The same file with other bytes at one place."""
    assert len(old) == len(new)

    def replace(data: bytes) -> bytes:
        at = data.rindex(old) if last else data.index(old)
        return data[:at] + new + data[at + len(old) :]

    return replace


def with_another_pickle_and_no_checksum_of_it(data: bytes) -> bytes:
    """Zero is what stands there if there are no checksums; the storages still have theirs."""
    others = [name for name in records_of(data) if "/data/" not in name]
    zeros = {f"entry[{name.partition('/')[2]}].crc32": 0 for name in others}
    return replaced(b"K\x03K\x04\x86", b"K\x02K\x04\x86")(lie(zeros)(data))


def of_two_minds(data: bytes) -> bytes:
    return crafted.archive_of_two_minds(records_of(data), {"archive/data/0": b"\7" * 48})


EVERY_LOAD = ("load", "load_keys", "load_mapped")
READERS = (*EVERY_LOAD, "open", "inspect", "convert")
"""All that look at what the pickle says; verify does not."""
IN_THE_CLASSIC_END = [
    Defect("another disk", lie({"end.disk": 1}), "several parts"),
    Defect("begins on another disk", lie({"end.start_disk": 1}), "several parts"),
    Defect("other counts", lie({"end.total": 3}), "several parts"),
    Defect("many entries", lie({"end.total": 65000, "end.here": 65000}), "claims 65000 entries in"),
    Defect("no entries", lie({"end.total": 0, "end.here": 0}), "0 records named data.pkl|cannot"),
    Defect("few entries", lie({"end.total": 2, "end.here": 2}), "needs|failed|cannot|record", READERS),
    Defect("a large directory", lie({"end.size": 1 << 31}), f"in {1 << 31} bytes from offset"),
    Defect("a directory outside", lie({"end.offset": 1 << 31}), f"from offset {1 << 31}, but it must end"),
    Defect("a directory one byte earlier", lie({"end.offset": lambda old: old - 1}), "entry 0 at offset.*found"),
    Defect("zip64 count without zip64", lie({"end.total": MAX16, "end.here": MAX16}), "without its locator"),
    Defect("zip64 offset without zip64", lie({"end.offset": MAX32}), "without its locator at offset"),
    Defect("a comment that is not there", lie({"end.comment_nbytes": 9}), "", ()),
]
IN_THE_ZIP64_END = [
    Defect("no locator", lie({"locator.signature": b"PK\6\0"}), r"without its locator at offset \d+"),
    Defect("locator outside", lie({"locator.offset": 1 << 62}), f"points to {1 << 62}, outside"),
    Defect("locator astray", lie({"locator.offset": 1}), "no zip64 end-of-directory record at offset 1"),
    Defect("locator of many disks", lie({"locator.disks": 7}), "another part of an archive"),
    Defect("locator on another disk", lie({"locator.disk": 1}), "", ()),
    Defect("other counts", lie({"end64.total": 3}), "several parts"),
    Defect("absurd counts", lie({"end64.total": 1 << 60, "end64.here": 1 << 60}), f"claims {1 << 60} entries"),
    Defect("an absurd size", lie({"end64.size": 1 << 63}), f"in {1 << 63} bytes from offset"),
    Defect("an absurd offset", lie({"end64.offset": 1 << 63}), f"from offset {1 << 63}"),
    Defect("all ones", lie({"end64.offset": (1 << 64) - 1, "end64.size": (1 << 64) - 1}), "claims"),
    Defect("another disk", lie({"end64.disk": 1}), "several parts|contradict each other"),
    Defect("begins on another disk", lie({"end64.start_disk": 1}), "several parts|contradict each other"),
    Defect("an absurd length of the record", lie({"end64.length": 1 << 60}), "", ()),
]
IN_A_ZIP64_FIELD = [
    Defect("of another kind", lie({"extra64[data/0].kind": 2}), "entry .*zip64 field, which is missing"),
    Defect("too short", lie({"extra64[data/0].length": 23}), "zip64 field, which is missing"),
    Defect("too long", lie({"extra64[data/0].length": MAX16}), "zip64 field, which is missing"),
    Defect("other sizes", lie({"extra64[data/0].nbytes": 1 << 60}), f"not compressed, yet {1 << 60} bytes"),
    Defect(
        "absurd sizes",
        lie({"extra64[data/0].nbytes": 1 << 60, "extra64[data/0].stored": 1 << 60}),
        rf"record 'archive/data/0' claims {1 << 60} bytes from offset \d+, past the directory at \d+",
    ),
    Defect("an absurd offset", lie({"extra64[data/0].offset": 1 << 62}), f"offset {1 << 62}, past the direct"),
    Defect("a negative offset", lie({"extra64[data/0].offset": (1 << 64) - 8}), "past the directory"),
    Defect("the offset of another", lie({"extra64[data/0].offset": 0}), "overlap at offset 0"),
]
IN_AN_ENTRY = [
    Defect("signature", lie({"entry[data/0].signature": b"PK\1\3"}), r"entry \d+ at offset \d+: found b'PK"),
    Defect("encrypted", lie({"entry[data/0].flags": 0x809}), r"entry \d+ at offset \d+: encrypted"),
    Defect("strongly encrypted", lie({"entry[data/0].flags": 0x840}), "unsupported encryption", EVERY_LOAD),
    Defect("masked", lie({"entry[data/0].flags": 0x2800}), "unsupported encryption", EVERY_LOAD),
    Defect("on another disk", lie({"entry[data/0].disk": 7}), "on disk 7 of an archive in several parts", EVERY_LOAD),
    Defect("deflated", lie({"entry[data/0].method": 8}), "compressed", (*COMPARING, "inspect")),
    Defect("deflated pickle", lie({"entry[data.pkl].method": 8}), "compressed"),
    Defect("bzip2", lie({"entry[data/0].method": 12}), "compressed"),
    Defect("lzma", lie({"entry[data/0].method": 14}), "compressed|does not match"),
    Defect("no such method", lie({"entry[data/0].method": 99}), "compressed"),
    Defect("CRC32 of a tensor", lie({"entry[data/0].crc32": 7}), "expected 00000007", COMPARING),
    Defect(
        "CRC32 of the pickle",
        lie({"entry[data.pkl].crc32": 7}),
        r"record 'archive/data.pkl' \(\d+ bytes at offset 64\) has CRC32 \w+, expected 00000007",
        (*COMPARING, "inspect"),
    ),
    Defect(
        "CRC32 of the version", lie({"entry[version].crc32": 7}), "'archive/version'", ("load", "load_keys", "verify")
    ),
    Defect("long name", lie({"entry[data/0].name_nbytes": 60000}), r"entry \d+ at offset \d+: cut off"),
    Defect("short name", lie({"entry[data/0].name_nbytes": 13}), "entry .* found|contradicts"),
    Defect("long extra field", lie({"entry[data/0].extra_nbytes": 60000}), "cut off"),
    Defect("long comment", lie({"entry[data/0].comment_nbytes": 60000}), "cut off"),
    Defect("size", lie({"entry[data/0].nbytes": 1 << 31}), f"not compressed, yet {1 << 31} bytes take 48"),
    Defect("stored size", lie({"entry[data/0].stored": 1 << 31}), f"not compressed, yet 48 bytes take {1 << 31}"),
    Defect(
        "one byte more",
        lie({"entry[data/0].nbytes": 49, "entry[data/0].stored": 49}),
        r"'archive/data/0' \(49 bytes at offset \d+\) has CRC32|record size",
        COMPARING,
    ),
    Defect(
        "one byte less",
        lie({"entry[data/0].nbytes": 47, "entry[data/0].stored": 47}),
        "needs 48 bytes of record '0', which has 47|has CRC32|record size",
        (*COMPARING, "inspect"),
    ),
    Defect(
        "no bytes",
        lie({"entry[data/0].nbytes": 0, "entry[data/0].stored": 0}),
        "needs|size",
        ("load", "load_keys", "open", "inspect", "convert"),
    ),
    Defect("far away", lie({"entry[data/0].offset": 1 << 31}), rf"bytes from offset {1 << 31}, past the direct"),
    Defect("one byte further", lie({"entry[data/0].offset": lambda old: old + 1}), "contradicts", COMPARING),
    Defect("at another record", lie({"entry[data/0].offset": 0}), "overlap at offset 0"),
    Defect("zip64 offset", lie({"entry[data/0].offset": MAX32}), "zip64 field, which is missing"),
    Defect("a directory", lie({"entry[data/0].attributes": 0x10}), "a directory with 48 bytes of contents"),
    Defect("on another disk", lie({"entry[data/0].disk": 1}), "", ()),
]
IN_A_LOCAL_HEADER = [
    Defect("signature", lie({"local[data/0].signature": b"PK\3\5"}), "local header of record", COMPARING),
    Defect("long name", lie({"local[data/0].name_nbytes": lambda old: old + 1}), "contradicts", COMPARING),
    Defect("long extra field", lie({"local[data/0].extra_nbytes": 60000}), "contradicts", COMPARING),
    Defect(
        "extra field of 4 more",
        lie({"local[data/0].extra_nbytes": lambda old: old + 4}),
        r"'archive/data/0' \(48 bytes at offset \d+\) has CRC32",
        COMPARING,
    ),
    Defect("no extra field", lie({"local[data/0].extra_nbytes": 0}), "has CRC32", COMPARING),
    Defect("of the pickle", lie({"local[data.pkl].extra_nbytes": 9}), "has CRC32", (*COMPARING, "inspect")),
    Defect("encrypted", lie({"local[data/0].flags": 0x809}), "", ()),
    Defect("sizes", lie({"local[data/0].nbytes": 1 << 31, "local[data/0].stored": 1 << 31}), "", ()),
    Defect("other name", replaced(b"archive/data/0FB", b"archive/data/9FB"), "", ()),
]
IN_NAMES = [
    Defect("two of one name", replaced(b"archive/data/1", b"archive/data/0", last=True), "two records are named"),
    Defect("not UTF-8", replaced(b"archive/data/0", b"archive/data/\xff", last=True), "its name is not UTF-8"),
    Defect("NUL", renamed("data/0", "data/\0"), "needs|failed|cannot", READERS),
    Defect("absolute", renamed("archive/", "/archive/"), "0 records named data.pkl|failed|cannot"),
    Defect("upwards", renamed("data/0", "data/../../0"), "needs|failed|cannot", READERS),
    Defect("no folder", renamed("archive/", ""), "0 records named data.pkl|failed|cannot"),
    Defect("no pickle", renamed("data.pkl", "data.pickle"), "0 records named data.pkl|failed|cannot"),
    Defect("no version", renamed("version", "Version"), "", ()),
    Defect("another pickle", with_record("archive2/data.pkl"), "2 records named data.pkl|cannot"),
    Defect("another folder", with_record("other/data/0", b"\7" * 48), "cannot", EVERY_LOAD),
    Defect("a folder within", with_record("archive/data/x/0", b"\7" * 48), "", ()),
    Defect("the same in capitals", with_record("archive/DATA/0", b"\7" * 48), "", ()),
    Defect("a number of 5000 digits", with_record(f"archive/data/{'9' * 5000}"), "", ()),
    Defect("a missing storage", renamed("data/0", "data/99"), "needs|failed locating file", READERS),
]
IN_THE_WHOLE = [
    Defect("no checkpoint", lambda data: crafted.archive({"readme.txt": b"hello"}), "a zip archive of 'readme.txt'"),
    Defect("an empty archive", lambda data: crafted.archive({}), "a zip archive with nothing in it"),
    Defect("a fake end in its comment", rebuilt(dict, comment=b"PK\5\6" + bytes(18)), "checkpoint|cannot"),
    Defect("half an end in its comment", rebuilt(dict, comment=b"PK\5\6" + bytes(9)), "", ()),
    Defect("the longest comment", rebuilt(dict, comment=b"x" * MAX16), "", ()),
    Defect("a gap before the directory", rebuilt(dict, gap=b"x" * 99), "", ()),
    Defect("bytes behind it", lambda data: data + b"x" * 9, "", ()),
    Defect(
        "many bytes behind it", lambda data: data + b"x" * 70000, "no zip end-of-directory record in the last 65557"
    ),
    Defect("itself behind it", lambda data: data + data, "", ()),
    Defect("a record before it", lambda data: data[:64] + data, r"no zip64 end-of-directory record at offset \d+"),
    Defect("two directories", of_two_minds, "contradict each other"),
    Defect("no checksum of the pickle", with_another_pickle_and_no_checksum_of_it, "", (), may_be_unverified=True),
]


@attacks_with(IN_THE_CLASSIC_END)
def test_lies_in_the_classic_end_record(defect: Defect, entry: str, path: Path) -> None:
    defect.assert_withstood(entry, path, crafted.archive(records_of(saved_by_fastensor())))


@attacks_with([*IN_THE_ZIP64_END, *IN_A_ZIP64_FIELD])
def test_lies_of_zip64(defect: Defect, entry: str, path: Path) -> None:
    defect.assert_withstood(entry, path, SOUND["zip64"]())


@attacks_with([*IN_AN_ENTRY, *IN_A_LOCAL_HEADER, *IN_NAMES, *IN_THE_WHOLE])
def test_lies(defect: Defect, entry: str, path: Path) -> None:
    defect.assert_withstood(entry, path, SOUND["fastensor"]())
