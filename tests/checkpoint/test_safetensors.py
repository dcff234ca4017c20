"""The safetensors container: the reference implementation's files, plus checksums that it ignores and we verify."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import states
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fastensor
from fastensor import CorruptCheckpointError, UnsupportedContentError, UnverifiedCheckpointWarning
from fastensor.backends.registry import available_names
from fastensor.errors import BackendUnavailableError
from fastensor.stitch import safetensors as stitched

OF_SAFETENSORS = set(safetensors.torch._SIZE)
"""The dtypes that this release of the library reads and writes; from 0.8 on it has all of ours."""
DTYPES = [
    dtype
    for dtype in (*states.DTYPES, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
    if dtype in OF_SAFETENSORS
]
STATE = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(3)}
BACKENDS = [name for name in available_names() if name != "torch"]

texts = st.text(max_size=8)
shapes = st.lists(st.integers(0, 5), max_size=4) | st.just([70_001])
tensors = st.builds(states.random_bytes, st.sampled_from(DTYPES), shapes, st.integers(0, 99))
dicts = st.dictionaries(texts.filter(lambda name: name != "__metadata__"), tensors, max_size=6)


def header_of(data: bytes) -> dict[str, Any]:
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    return header


@given(state=dicts, metadata=st.none() | st.dictionaries(texts, texts, max_size=1))
def test_without_checksums_it_is_the_file_of_safetensors(state: dict[str, Tensor], metadata: Any) -> None:
    if not state and metadata == {}:
        metadata = None  # for that, the reference implementation writes invalid JSON
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder, "ours.safetensors"), Path(folder, "theirs.safetensors")
        fastensor.save(state, ours, metadata=metadata, checksums=False, durable=False)
        safetensors.torch.save_file(state, theirs, metadata)
        assert ours.read_bytes() == theirs.read_bytes()


@given(state=dicts, metadata=st.none() | st.dictionaries(texts, texts, max_size=4), checksums=st.booleans())
def test_everyone_reads_the_same(state: dict[str, Tensor], metadata: Any, checksums: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.safetensors")
        fastensor.save(state, path, metadata=metadata, checksums=checksums, durable=False)
        states.assert_same_tensors(safetensors.torch.load_file(path), state)
        if checksums:
            states.assert_same_tensors(fastensor.load(path), state)
        else:
            with pytest.warns(UnverifiedCheckpointWarning):
                states.assert_same_tensors(fastensor.load(path), state)
        with safetensors.safe_open(path, "pt") as opened:
            found = dict(opened.metadata() or {})
        assert ("fastensor.crc32" in found) == checksums
        found.pop("fastensor.crc32", None)
        assert found == ({"format": "pt"} if checksums else {}) | (metadata or {})


@given(state=dicts)
def test_files_of_safetensors_are_loaded(state: dict[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x")
        safetensors.torch.save_file(state, path)
        with pytest.warns(UnverifiedCheckpointWarning):
            states.assert_same_tensors(fastensor.load(path), state)


def test_packed_four_bit_floats(tmp_path: Path) -> None:
    dtype = torch.float4_e2m1fn_x2
    if dtype not in OF_SAFETENSORS:
        pytest.skip("this safetensors has no float4_e2m1fn_x2")
    state = {"w": torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(dtype)}
    fastensor.save(state, tmp_path / "a.safetensors", checksums=False)
    safetensors.torch.save_file(state, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    fastensor.save(state, tmp_path / "a.safetensors")
    states.assert_same_tensors(fastensor.load(tmp_path / "a.safetensors"), state)


@pytest.mark.parametrize("backend", available_names())
def test_large_tensors_by_every_backend(tmp_path: Path, backend: str) -> None:
    base = torch.randint(0, 256, (11 << 20,), dtype=torch.uint8)
    state = {"a": base[: 5 << 20], "b": base[5 << 20 : -3], "small": torch.ones(3), "none": torch.empty(0, 3)}
    report = fastensor.save(state, tmp_path / "x.safetensors", backend=backend, metadata={"k": "v"})
    assert report.backend == ("numpy" if backend == "torch" else backend) or report.fallbacks
    assert os.path.getsize(tmp_path / "x.safetensors") == report.nbytes
    found, loaded = fastensor.load_with_report(tmp_path / "x.safetensors", backend=backend)
    assert loaded.verified
    assert list(found) == ["none", "small", "a", "b"]
    states.assert_same_tensors(found, state)
    states.assert_same_tensors(safetensors.torch.load_file(tmp_path / "x.safetensors"), state)
    assert found["a"].untyped_storage().nbytes() == found["a"].nbytes


def test_the_name_decides_unless_the_caller_does(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x.ckpt", container="safetensors")
    assert header_of((tmp_path / "x.ckpt").read_bytes()).keys() == {"__metadata__", *STATE}
    fastensor.save({"any": object}, tmp_path / "x.safetensors", container="torch")
    assert (tmp_path / "x.safetensors").read_bytes()[:2] == b"PK"
    with pytest.raises(ValueError, match="'torch', 'safetensors' or None, found 'zip'"):
        fastensor.save(STATE, tmp_path / "y", container="zip")  # type: ignore[arg-type]
    for wrong in ({"metadata": {"a": "b"}}, {"checksums": False}):
        with pytest.raises(ValueError, match="for safetensors"):
            fastensor.save(STATE, tmp_path / "y.ckpt", **wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "y.ckpt").exists()


REFUSED: dict[str, tuple[Any, str]] = {
    "not a dict": ([torch.ones(1)], "found list.*ckpt"),
    "a number": ({"a": 3}, "'a'.*type int"),
    "a dict inside": ({"a": {"b": torch.ones(1)}}, "'a'.*type dict"),
    "a name of another type": ({3: torch.ones(1)}, "3.*type int, expected str"),
    "the name of the metadata": ({"__metadata__": torch.ones(1)}, "use another"),
    "a surrogate": ({"\ud800": torch.ones(1)}, "surrogate"),
    "complex128": ({"a": torch.ones(1, dtype=torch.complex128)}, "no torch.complex128.*view_as_real"),
    "expanded": ({"a": torch.ones(1).expand(2)}, "not contiguous"),
    "a bit field": ({"a": torch.empty(2, dtype=torch.complex32)}, "no torch.complex32"),
    "sparse": ({"a": torch.ones(2).to_sparse()}, "not dense.*to_dense"),
    "transposed": ({"a": torch.ones(2, 3).t()}, r"not contiguous.*\.contiguous\(\)"),
    "conjugate": ({"a": torch.ones(2, dtype=torch.complex64).conj()}, "resolve_conj"),
    "meta": ({"a": torch.empty(2, device="meta")}, "meta device"),
    "tied": ((lambda t: {"a": t, "b": t})(torch.ones(3)), r"share memory.*\['a', 'b'\].*clone"),
    "overlapping": ((lambda t: {"a": t[:3], "b": t[2:]})(torch.ones(5)), r"\['a', 'b'\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_to_do_and_leave_the_old_file(tmp_path: Path, name: str) -> None:
    state, message = REFUSED[name]
    fastensor.save(STATE, tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedContentError, match=message) as caught:
        fastensor.save(state, tmp_path / "x.safetensors")
    assert isinstance(caught.value, ValueError)
    states.assert_same_tensors(fastensor.load(tmp_path / "x.safetensors"), STATE)
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_what_safetensors_refuses_is_refused(tmp_path: Path) -> None:
    """And two things more: for these the reference writes wrong values, and a file that it cannot read."""
    for name, (state, _) in REFUSED.items():
        if name not in ("conjugate", "the name of the metadata"):
            with pytest.raises(BaseException):  # noqa: B017, PT011  # it raises what it likes, panics included
                safetensors.torch.save_file(state, tmp_path / "x")


def test_disjoint_views_of_one_storage_are_no_ties(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    fastensor.save({"a": base[:4], "b": base[4:]}, tmp_path / "x.safetensors")
    states.assert_same_tensors(fastensor.load(tmp_path / "x.safetensors"), {"a": base[:4], "b": base[4:]})


@pytest.mark.parametrize("metadata", [{"a": 1}, {1: "a"}, {"a": "\ud800"}])
def test_metadata_is_texts(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(UnsupportedContentError, match="metadata"):
        fastensor.save(STATE, tmp_path / "x.safetensors", metadata=metadata)


def test_a_format_stands_beside_checksums_unless_the_caller_names_one(tmp_path: Path) -> None:
    """Some libraries refuse a file whose metadata name none."""
    expected: list[tuple[Any, list[tuple[str, str]]]] = [
        (None, [("format", "pt")]),
        ({}, [("format", "pt")]),
        ({"k": "v"}, [("format", "pt"), ("k", "v")]),
        ({"k": "v", "format": "np"}, [("k", "v"), ("format", "np")]),
    ]
    for metadata, entries in expected:
        fastensor.save(STATE, tmp_path / "x.safetensors", metadata=metadata)
        header = header_of((tmp_path / "x.safetensors").read_bytes())
        assert [*header["__metadata__"].items()][:-1] == entries
        fastensor.save(STATE, tmp_path / "x.safetensors", metadata=metadata, checksums=False)
        header = header_of((tmp_path / "x.safetensors").read_bytes())
        assert header.get("__metadata__") == metadata


def test_names_that_look_like_the_entry_for_checksums(tmp_path: Path) -> None:
    metadata = {'x"fastensor.crc32': "00000000 00000000", "y": '"fastensor.crc32":"00000000'}
    state = {'"fastensor.crc32":"00000000': torch.ones(3)}
    fastensor.save(state, tmp_path / "x.safetensors", metadata=metadata)
    states.assert_same_tensors(fastensor.load(tmp_path / "x.safetensors"), state)


def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        fastensor.save(STATE, tmp_path / "x.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("map_location", [None, "cpu", "meta", torch.device("cpu"), {"cpu": "meta"}, lambda s, loc: s])
def test_every_form_of_map_location(tmp_path: Path, map_location: Any) -> None:
    fastensor.save(STATE, tmp_path / "x.safetensors")
    torch.save(STATE, tmp_path / "x.pt")
    found = fastensor.load(tmp_path / "x.safetensors", map_location)
    assert found["w"].device == torch.load(tmp_path / "x.pt", map_location)["w"].device


def test_mapped_tensors_are_private(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x.safetensors")
    before = (tmp_path / "x.safetensors").read_bytes()
    found = fastensor.load(tmp_path / "x.safetensors", mmap=True)
    states.assert_same_tensors(found, STATE)
    found["w"].zero_()
    assert (tmp_path / "x.safetensors").read_bytes() == before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_flipped_bit_is_named(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "x.safetensors"
    fastensor.save(STATE, path)
    data = bytearray(path.read_bytes())
    at = data.index(STATE["w"].numpy().tobytes())
    data[at + 10] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=rf"tensor 'w' \(48 bytes at offset {at}\) has CRC32"):
        fastensor.load(path, backend=backend)
    assert not torch.equal(fastensor.load(path, verify=False, backend=backend)["w"], STATE["w"])
    assert fastensor.load(path, keys=["b"])["b"].sum() == 2


OTHERS = {
    "other values": {"w": torch.full((3, 4), 7.0), "b": torch.zeros(2)},
    "other names": {"w": torch.full((3, 4), 7.0), "c": torch.zeros(2)},
    "other shapes": {"w": torch.full((3, 5), 7.0), "b": torch.zeros(2)},
    "more tensors": {"w": torch.full((3, 4), 7.0), "b": torch.zeros(2), "c": torch.zeros(2)},
    "no tensors": {},
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("more", [{}, {"format": "pt"}], ids=str)
def test_a_file_of_another_tool_that_has_copied_our_checksums(tmp_path: Path, kind: str, more: dict[str, str]) -> None:
    """As tools that merge or tune models do: it is as sound as any file without checksums."""
    fastensor.save({"w": torch.ones(3, 4), "b": torch.ones(2)}, tmp_path / "x.safetensors", metadata=more)
    with safetensors.safe_open(tmp_path / "x.safetensors", "pt") as opened:
        kept = opened.metadata()
    assert "fastensor.crc32" in kept
    path = tmp_path / "tuned.safetensors"
    safetensors.torch.save_file(OTHERS[kind], path, kept)
    why = r"another tool .* copied 'fastensor\.crc32'"
    with pytest.warns(UnverifiedCheckpointWarning, match=why):
        states.assert_same_tensors(fastensor.load(path), OTHERS[kind])
    with pytest.warns(UnverifiedCheckpointWarning, match=why):
        fastensor.open(path).close()
    with pytest.warns(UnverifiedCheckpointWarning, match=why):
        fastensor.convert(path, tmp_path / "converted.safetensors")
    report = fastensor.verify(path)
    assert (report.compared, report.complete) == (0, False)
    assert fastensor.verify(tmp_path / "converted.safetensors").complete
    assert not fastensor.inspect(path).checked


def of_before(path: Path) -> bytes:
    """A file with checksums as Fastensor wrote them before it put spaces in front of them."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    text = data[8 : 8 + length].replace(b'"fastensor.crc32":  "', b'"fastensor.crc32":"').rstrip()
    text += b" " * (-len(text) % 8)
    own = text.index(b'"fastensor.crc32":"') + 19
    blanked = struct.pack("<Q", len(text)) + text[:own] + b"0" * 8 + text[own + 8 :]
    return blanked[: 8 + own] + f"{zlib.crc32(blanked):08x}".encode() + blanked[16 + own :] + data[8 + length :]


def test_files_of_before_are_verified(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    fastensor.save(STATE, path, metadata={"k": "v"})
    path.write_bytes(of_before(path))
    found, report = fastensor.load_with_report(path)
    assert report.verified
    states.assert_same_tensors(found, STATE)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        fastensor.load(path)


def test_each_bit_of_what_marks_our_checksums_is_noticed(tmp_path: Path) -> None:
    """No flipped bit turns a file of ours into one of another tool, but for those in the name of the entry."""
    path = tmp_path / "x.safetensors"
    fastensor.save(STATE, path)
    sound = path.read_bytes()
    begin = sound.index(b'":  "')
    for bit in range(8 * begin, 8 * (begin + 5)):
        data = bytearray(sound)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpointError):
            fastensor.load(path)


@pytest.mark.parametrize("checksums", [True, False])
def test_checksums_in_metadata_are_those_of_the_new_file(tmp_path: Path, checksums: bool) -> None:
    """Metadata that was taken from a file of ours brings its entry along."""
    stale = {"fastensor.crc32": "01234567 89abcdef", "k": "v"}
    fastensor.save(STATE, tmp_path / "x.safetensors", metadata=stale, checksums=checksums)
    fastensor.save(STATE, tmp_path / "y.safetensors", metadata={"k": "v"}, checksums=checksums)
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()


def test_a_dtype_that_torch_does_not_have(tmp_path: Path) -> None:
    header = b'{"w":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    with pytest.raises(UnsupportedContentError, match="'w' is of dtype F6_E2M3"):
        fastensor.load(tmp_path / "x", verify=False)


@pytest.mark.parametrize("checksums", [[], [1], [1, 2, 3]])
def test_no_file_is_written_without_the_checksums_of_its_tensors(checksums: list[int]) -> None:
    """A backend of another package may return none."""
    planned = stitched.plan({"a": torch.ones(3), "b": torch.ones(2)}, metadata=None, checksums=True)
    with pytest.raises(BackendUnavailableError, match=f"has returned {len(checksums)} CRC32s, expected one for each"):
        planned.head(checksums)
    assert len(planned.head([1, 2])) == len(planned.header)
