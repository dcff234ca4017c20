"""Files that are refused for what they begin with, or for their directory: that takes no more time and memory than to
look at these, whatever the rest claims."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile.attacks import EVERY, PLAIN
from hostile.isolated import Laboratory, Limits

import fastensor

pytestmark = pytest.mark.hostile

SECONDS = 10
MOST_NBYTES = 64 << 20
ENTRIES = (*EVERY, "load_trusting")


def tar_header(kind: bytes, nbytes: int, *, name: str = "weights", magic: bool = True) -> bytes:
    """The header of a member that claims a size."""
    member = tarfile.TarInfo(name)
    member.type = kind
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"%011o\0" % nbytes if nbytes < 8**11 else b"\x80" + nbytes.to_bytes(11, "big")
    if not magic:
        header[257:265] = bytes(8)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def tar(*headers: bytes) -> bytes:
    return b"".join(headers) + bytes(1024)


def cut_tar() -> bytes:
    return tar_header(tarfile.REGTYPE, 100_000, name="model/weights.bin") + bytes(5000)


def bomb(*names: str) -> bytes:
    """A small archive that is no checkpoint, and has large records."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("x/readme", b"")
        for name in names:
            archive.writestr(name, bytes(256 << 20))
    return file.getvalue()


TYPES = {"file": b"0", "long name": b"L", "pax": b"x", "pax of all": b"g", "sparse": b"S"}
SIZES = {"8 GiB": 2**33 - 1, "2^62": 2**62, "2^80": 2**80}
HOSTILE: dict[str, Callable[[], bytes]] = {
    **{
        f"tar, {kind} of {size}": lambda letter=letter, nbytes=nbytes: tar(tar_header(letter, nbytes))  # type: ignore[misc]
        for kind, letter in TYPES.items()
        for size, nbytes in SIZES.items()
    },
    "tar without its magic": lambda: tar(tar_header(b"L", 2**62, magic=False)),
    "tar, second member": lambda: tar(tar_header(b"0", 0), tar_header(b"L", 2**62)),
    "tar of a negative size": lambda: tar(tar_header(b"L", 2**88 - 1)),
    "tar of long headers only": lambda: tar_header(b"x", 0) * 20_000,
    "tar, cut off": cut_tar,
    "marks": lambda: b"\x80\2" + b"(" * 20_000_000,
    "bomb in the version": lambda: bomb("x/version"),
    "bombs in all that torch reads": lambda: bomb("x/version", "x/.data/version", "x/byteorder", "x/data.pkl/"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.ckpt"
    fastensor.save(PLAIN, path)
    return path


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_at_once(isolated: Laboratory, sound: Path, path: Path, name: str) -> None:
    path.write_bytes(HOSTILE[name]())
    for entry, outcome in isolated.attack(ENTRIES, path, sound, Limits(SECONDS, nbytes=2 << 30)).items():
        assert not outcome.broken, (entry, outcome)
        assert str(path) in outcome.refused, (entry, outcome)
        assert outcome.grown_nbytes < MOST_NBYTES, (entry, outcome)


def test_a_foreign_tar_that_was_cut_off_is_called_so(path: Path) -> None:
    path.write_bytes(cut_tar())
    for read in (fastensor.load, fastensor.verify, fastensor.inspect):
        with pytest.raises(fastensor.NotACheckpointError, match="a tar archive; unpack it first"):
            read(path)
