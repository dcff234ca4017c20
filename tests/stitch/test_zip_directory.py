"""Our reading of zip directories against Python's."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastensor.errors import CorruptCheckpointError
from fastensor.stitch.zip_directory import ZipDirectory, parse_directory

names = st.text(
    st.characters(codec="utf-8", exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=9
)


def parse(data: bytes) -> ZipDirectory:
    return parse_directory(lambda at, n: data[at : at + n], len(data), where="x")


@given(
    records=st.dictionaries(names, st.binary(max_size=50), max_size=6),
    comment=st.binary(max_size=30),
    zip64=st.booleans(),
    compress=st.booleans(),
)
def test_the_same_as_python_reads(records: dict[str, bytes], comment: bytes, zip64: bool, compress: bool) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED) as archive:
        archive.comment = comment if b"PK" not in comment else b""
        for name, data in records.items():
            with archive.open(name, "w", force_zip64=zip64) as record:
                record.write(data)
    directory = parse(buffer.getvalue())
    with zipfile.ZipFile(buffer) as archive:
        infos = archive.infolist()
        assert directory.offset == archive.start_dir
    expected = [(info.filename, info.file_size, info.CRC if info.file_size else None) for info in infos]
    assert [(part.name, part.nbytes, part.crc32) for part in directory.parts] == expected
    begins = [info.header_offset for info in infos]
    assert [part.begin for part in directory.parts] == begins
    assert [part.end for part in directory.parts] == [*begins[1:], *[directory.offset] * bool(begins)]
    assert directory.compressed == (compress and bool(records))


def test_archives_in_parts_and_encrypted_ones_are_refused() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", "x")
    parts = bytearray(buffer.getvalue())
    parts[-18] = 1  # number of this disk
    with pytest.raises(CorruptCheckpointError, match="several parts"):
        parse(bytes(parts))
    encrypted = bytearray(buffer.getvalue())
    encrypted[encrypted.rindex(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(CorruptCheckpointError, match="encrypted"):
        parse(bytes(encrypted))


def test_a_missing_zip64_locator() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", "x")
    data = bytearray(buffer.getvalue())
    data[-6:-2] = b"\xff" * 4
    with pytest.raises(CorruptCheckpointError, match="locator"):
        parse(bytes(data))


def test_golden_files_parse() -> None:
    paths = list((Path(__file__).parent / "golden").glob("*.pt"))
    assert len(paths) == 2
    for path in paths:
        assert parse(path.read_bytes()).parts
