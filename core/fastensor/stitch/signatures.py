"""First bytes of files: of checkpoints, and of others that are taken for such."""

from __future__ import annotations

import codecs
import os

from fastensor.errors import NotACheckpointError

SNIFFED_NBYTES = 512
"""Bytes from the start of a file that say what it is."""
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
"""The number that torch pickled in front of everything else before 1.6."""
LEGACY_MAGIC_WITHIN = 32
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
_TAR = "a tar archive; unpack it first, or, if it is a checkpoint of torch before 0.1.11, load it by torch.load"
SAFETENSORS_SUFFIX = ".safetensors"
LENGTH_NBYTES = 8
"""Size of the length in front of the header of a safetensors file."""
MAX_HEADER_NBYTES = 100_000_000
"""The limit of the reference implementation of safetensors."""
LEGACY_AS_TEXT = b"L%dL" % 0x1950A86A20F9469CFC6C
"""The same number as ``pickle_protocol=0`` writes it."""
_COMPRESSED = "a file compressed by {0}; decompress it first"
_SENT = "as a server sends it in place of a file that it does not have, or that needs a login; download the file again"
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (
        b"version https://git-lfs.github.com/spec/",
        "a pointer of Git LFS, not the file that it stands for; in a clone, git lfs pull downloads that",
    ),
    (b"GGUF", "a GGUF file of llama.cpp; transformers reads it (gguf_file=)"),
    (b"\x93NUMPY", "an array of NumPy; numpy.load reads it"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file; h5py or Keras reads it"),
    (b"PK\x05\x06", "a zip archive with nothing in it"),
    (b"\x1f\x8b", _COMPRESSED.format("gzip")),
    (b"BZh", _COMPRESSED.format("bzip2")),
    (b"\xfd7zXZ\0", _COMPRESSED.format("xz")),
    (b"\x28\xb5\x2f\xfd", _COMPRESSED.format("zstd")),
    (b"\x04\x22\x4d\x18", _COMPRESSED.format("lz4")),
    (b"7z\xbc\xaf\x27\x1c", "an archive of 7-Zip; unpack it first"),
    (b"Rar!\x1a\x07", "a RAR archive; unpack it first"),
    (b"PAR1", "a Parquet file; pyarrow reads it"),
    (b"ARROW1", "an Arrow file; pyarrow reads it"),
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"%PDF-", "a PDF document"),
    (b"\x7fELF", "a program or library of Linux"),
)
"""Other formats by their first bytes."""
_SHOWN_CHARACTERS = 40
_MAIN_OPCODES = b"]}(c\x8c\x95KGNXB"
"""Opcodes with which pickles begin, after their protocol."""


def is_tar(start: bytes) -> bool:
    """True if a file that begins like this is a tar archive."""
    return start.startswith(_TAR_MAGIC, _TAR_MAGIC_AT)


def foreign_content(start: bytes) -> str:
    """Words for a file that is no checkpoint, with what to do; empty if its kind is not known.

    Args:
        start: its first :data:`SNIFFED_NBYTES` bytes, or all of it.

    >>> foreign_content(b"GGUF\\x03..."), foreign_content(b"\\x00\\x01\\x02")
    ('a GGUF file of llama.cpp; transformers reads it (gguf_file=)', '')
    """
    for magic, what in _FOREIGN:
        if start.startswith(magic):
            return what
    if is_tar(start):
        return _TAR
    if is_plain_pickle(start):
        return "a pickle that torch.save did not write; pickle.load, or the library that wrote it, reads it"
    return _text_in_words(start)


def refuse_foreign(start: bytes, where: str, expected: str = "a checkpoint") -> None:
    """
    Args:
        start: as for :func:`foreign_content`.
        where: the file's name, for messages.
        expected: what it should be, for messages.

    Raises:
        NotACheckpointError: it is known what the file is, and that is no checkpoint.
    """
    if what := foreign_content(start):
        raise NotACheckpointError(f"{where}: expected {expected}, found {what}")


def is_plain_pickle(start: bytes) -> bool:
    """True if a file that begins like this is a pickle that begins with something else than a long number, as those of
    torch do."""
    if start[:1] != b"\x80" or start[1:2] not in (b"\2", b"\3", b"\4", b"\5"):
        return False
    framed = start[2:3] == b"\x95"
    first = start[11:12] if framed else start[2:3]
    return first != b"" and first in _MAIN_OPCODES


def is_text(start: bytes) -> bool:
    """True if what a file begins with is a text, or nothing.

    >>> is_text(b"{}"), is_text("Ü".encode()[:1]), is_text(b"\\0"), is_text(b"\\xff")
    (True, True, False, False)
    """
    return _decoded(start) is not None


def _decoded(start: bytes) -> str | None:
    """The beginning of a text; None if it is none."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start).strip().removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None
    return text if all(character.isprintable() or character.isspace() for character in text) else None


def _text_in_words(start: bytes) -> str:
    """Words for a text; empty if it is none. Less than eight bytes may be left of a checkpoint."""
    text = _decoded(start)
    if len(start) < LENGTH_NBYTES or not text:
        return ""
    begin = text[:_SHOWN_CHARACTERS].lower()
    if begin.startswith(("<!doctype html", "<html", "<head", "<body", "<!--")):
        return f"an HTML page, {_SENT}"
    if begin.startswith("<"):
        return f"an XML document, {_SENT}"
    kind = "JSON" if begin.startswith(("{", "[")) else "a text"
    return f"{kind} that begins with {text[:_SHOWN_CHARACTERS]!r}, perhaps {_SENT}"


def is_safetensors_name(name: str | os.PathLike[str]) -> bool:
    """True if a name is one of safetensors files.

    >>> is_safetensors_name("model.safetensors"), is_safetensors_name("model.ckpt")
    (True, False)
    """
    return os.fspath(name).lower().endswith(SAFETENSORS_SUFFIX)
