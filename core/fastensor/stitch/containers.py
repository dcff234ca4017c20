"""The containers of checkpoints, and how to tell them apart."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

from fastensor.stitch.safetensors import LENGTH_NBYTES, MAX_HEADER_NBYTES
from fastensor.stitch.zip_directory import LOCAL_SIGNATURE

Container: TypeAlias = Literal["torch", "safetensors", "legacy"]
"""``torch`` is the zip archive that ``torch.save`` writes, ``legacy`` are the files that torch wrote before 1.6."""
SNIFFED_NBYTES = 512
"""How many bytes from the start of a file :func:`recognize` needs."""
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
"""The number that torch pickled in front of everything else before 1.6."""
_LEGACY_MAGIC_WITHIN = 32
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257
"""torch wrote tar archives before 0.1.11."""
SAFETENSORS_SUFFIX = ".safetensors"


def recognize(start: bytes, nbytes: int, name: str) -> Container | None:
    """The container of a file, by its first bytes, and, only where these say nothing, by its name.

    None if the file is no checkpoint.

    >>> recognize(b"PK\\x03\\x04.....", 1000, "x"), recognize(b"\\x30" + bytes(7) + b"{", 1000, "x")
    ('torch', 'safetensors')
    >>> recognize(b"", 0, "x.safetensors"), recognize(b"\\x80\\x02", 1000, "x.ckpt")
    ('safetensors', None)
    """
    if start.startswith(LOCAL_SIGNATURE):
        return "torch"
    length = int.from_bytes(start[:LENGTH_NBYTES], "little")
    fits = LENGTH_NBYTES + length <= nbytes and length <= MAX_HEADER_NBYTES
    if (fits and start[LENGTH_NBYTES : LENGTH_NBYTES + 1] == b"{") or is_safetensors_name(name):
        return "safetensors"
    if _LEGACY_MAGIC in start[:_LEGACY_MAGIC_WITHIN] or start.startswith(_TAR_MAGIC, _TAR_MAGIC_AT):
        return "legacy"
    return None


def is_safetensors_name(name: str | os.PathLike[str]) -> bool:
    """Whether a name is one of safetensors files.

    >>> is_safetensors_name("model.safetensors"), is_safetensors_name("model.ckpt")
    (True, False)
    """
    return os.fspath(name).lower().endswith(SAFETENSORS_SUFFIX)
