"""Lazy reading: names and shapes at once, tensors and slices of them when they are asked for."""

from __future__ import annotations

import gc
import gzip
import io
import os
import pickle
import tempfile
import warnings
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import states
import torch
from hypothesis import given
from hypothesis import strategies as st

import fastensor
from fastensor import CheckpointReadError, CorruptCheckpointError, UnknownKeyError, UnsupportedContentError
from fastensor.backends import memory
from fastensor.backends.registry import available_names
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.files import posix

WEIGHTS = {"w": torch.arange(600.0).reshape(20, 30), "b": torch.ones(7, dtype=torch.bfloat16), "s": torch.tensor(3)}


class Hyper:
    """A class that weights_only=True refuses; importing it would be seen."""

    def __init__(self) -> None:
        self.rate = 0.1


@pytest.fixture(params=["ckpt", "safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    fastensor.save(WEIGHTS, tmp_path / f"x.{request.param}")
    return tmp_path / f"x.{request.param}"


def test_names_and_shapes(path: Path) -> None:
    with fastensor.open(path) as found:
        assert set(found) == set(WEIGHTS)
        assert len(found) == 3
        assert "w" in found
        assert "x" not in found
        assert (found.info["w"].shape, found.info["w"].dtype) == ((20, 30), torch.float32)
        assert (found.info["w"].nbytes, found.info["s"].shape) == (2400, ())
        assert found.verified
        assert repr(found).endswith("3 tensors>")


@pytest.mark.parametrize("backend", available_names())
def test_tensors_are_equal_and_have_memory_of_their_own(path: Path, backend: str) -> None:
    with fastensor.open(path, backend=backend) as found:
        tensors = dict(found)
        again = found["w"]
    for name, tensor in WEIGHTS.items():
        assert torch.equal(tensors[name], tensor)
        assert tensors[name].untyped_storage().nbytes() == tensor.nbytes
    assert again.data_ptr() != tensors["w"].data_ptr()


INDICES: list[Any] = [
    3, -1, slice(2, 5), slice(None, None, 7), slice(5, 2), Ellipsis, None, (3, 4), (slice(1, 3), slice(None, None, 2)),
    (Ellipsis, -1), (None, slice(3), 2),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("verify", [True, False])
def test_slices(path: Path, index: Any, verify: bool) -> None:
    key = ("w", *index) if isinstance(index, tuple) else ("w", index)
    with fastensor.open(path, verify=verify) as found:
        part = found[key]
    assert torch.equal(part, WEIGHTS["w"][index])
    assert part.is_contiguous()


@given(tensor=states.dense(), data=st.data(), suffix=st.sampled_from(["ckpt", "safetensors"]))
def test_any_slice_of_any_tensor(tensor: torch.Tensor, data: st.DataObject, suffix: str) -> None:
    steps = st.builds(slice, st.integers(-8, 8), st.integers(-8, 8), st.none() | st.integers(1, 3))
    index = tuple(data.draw(steps) for _ in range(data.draw(st.integers(0, tensor.dim()))))
    state = {"w": tensor.t() if tensor.dim() == 2 and suffix == "ckpt" else tensor}
    if suffix == "safetensors" and tensor.dtype == torch.complex128:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"x.{suffix}")
        fastensor.save(state, path, durable=False)
        with fastensor.open(path) as found:
            states.assert_equal(found[("w", *index)], state["w"][index].contiguous().clone())
            whole = found["w"]
            assert (whole.shape, whole.stride()) == (state["w"].shape, state["w"].stride())


@pytest.mark.parametrize("index", [[1, 2], torch.tensor([1]), torch.ones(20, dtype=torch.bool), "x", 99, (0, 0, 0)])
def test_indices_that_do_not_fit(path: Path, index: Any) -> None:
    with fastensor.open(path) as found, pytest.raises((TypeError, IndexError)):
        found[("w", *index) if isinstance(index, tuple) else ("w", index)]


def test_a_slice_reads_only_its_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = posix.read_fully

    def count(fd: int, buffer: memoryview, offset: int, **options: Any) -> int:
        read.append(buffer.nbytes)
        return original(fd, buffer, offset, **options)

    with fastensor.open(path, verify=False) as found:
        monkeypatch.setattr(posix, "read_fully", count)
        assert found["w", 4:6].shape == (2, 30)
    assert sum(read) in (240, 240 + 30)  # the local header of the record


def damage(path: Path, tensor: torch.Tensor, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(tensor.numpy().tobytes()) + at] ^= 1
    path.write_bytes(data)


def test_damage_is_noticed_in_tensors_and_in_their_slices(path: Path) -> None:
    damage(path, WEIGHTS["w"], 2000)
    with fastensor.open(path) as found:
        assert torch.equal(found["b"], WEIGHTS["b"])
        for key in ("w", ("w", 1)):
            with pytest.raises(CorruptCheckpointError, match=r"'(archive/data/0|w)' \(2400 bytes at offset \d+\)"):
                found[key]
    with fastensor.open(path, verify=False) as found:
        assert torch.equal(found["w", 1], WEIGHTS["w"][1])


def test_views_ties_and_kinds_of_a_torch_file(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    state = OrderedDict(
        view=base[10:20], strided=base.reshape(10, 10).t()[::2], tied=base, parameter=torch.nn.Parameter(base),
        subclass=base.as_subclass(states.Scaled), empty=torch.empty(0, 3), lists=[[torch.ones(2)], 7],
    )  # fmt: skip
    fastensor.save(state, tmp_path / "x")
    with fastensor.open(tmp_path / "x") as found:
        assert list(found) == ["view", "strided", "tied", "parameter", "subclass", "empty", "lists.0.0"]
        assert found.others == {"lists.1": 7}
        assert [found.info[name].kind for name in ("view", "parameter", "subclass")] == [
            "Tensor", "Parameter", "Scaled",
        ]  # fmt: skip
        assert found.info["view"].part == found.info["tied"].part
        assert found["view"].untyped_storage().nbytes() == 40
        for name in ("view", "strided", "tied", "empty"):
            assert torch.equal(found[name], state[name])
        assert type(found["parameter"]) is type(found["subclass"]) is torch.Tensor
        assert found["strided"].stride() == state["strided"].stride()


@pytest.mark.parametrize("kind", ["sparse_coo", "quantized", "conjugate", "meta"])
def test_what_is_more_than_its_bytes(tmp_path: Path, kind: str) -> None:
    fastensor.save({"x": states.special_of(kind, 1), "w": torch.ones(1)}, tmp_path / "x")
    with fastensor.open(tmp_path / "x") as found:
        assert found.info["x"].shape
        assert found["w"] == 1
        with pytest.raises(UnsupportedContentError, match=r"keys=\['x'\]"):
            found["x"]


def test_classes_of_the_file_are_neither_run_nor_needed(tmp_path: Path) -> None:
    fastensor.save({"hyper": Hyper(), "w": torch.ones(3)}, tmp_path / "x")
    with fastensor.open(tmp_path / "x") as found:
        assert torch.equal(found["w"], torch.ones(3))
        assert "Hyper>" in repr(found.others["hyper"])
        assert "Hyper>" in found.others_in_words["hyper"]


def test_names_that_are_not_there(path: Path) -> None:
    with fastensor.open(path) as found:
        with pytest.raises(UnknownKeyError, match="'nope'"):
            found["nope"]
        assert found.get("nope") is None


def test_files_of_others(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "x.pt")
    safetensors.torch.save_file(WEIGHTS, tmp_path / "x.safetensors", {"k": "v"})
    for name, verified in (("x.pt", True), ("x.safetensors", False)):
        with fastensor.open(tmp_path / name) as found:
            assert found.verified == verified
            assert all(torch.equal(found[key], tensor) for key, tensor in WEIGHTS.items())
            assert found.metadata == ({} if verified else {"k": "v"})


def legacy(path: Path) -> None:
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)


def torchscript(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


@pytest.mark.parametrize("write", [legacy, torchscript])
def test_files_that_can_only_be_loaded_whole(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "x")
    with pytest.raises(UnsupportedContentError, match="load it whole"):
        fastensor.open(tmp_path / "x")


def test_open_files_stay_open_and_others_are_closed(path: Path) -> None:
    buffer = io.BytesIO(path.read_bytes())
    with fastensor.open(buffer) as found:
        assert torch.equal(found["w", 3], WEIGHTS["w"][3])
    assert not buffer.closed
    gc.collect()  # what earlier tests have left
    wait_for_space()
    before = len(os.listdir("/proc/self/fd"))
    found = fastensor.open(path)
    found.close()
    found.close()
    with pytest.raises(CorruptCheckpointError):
        fastensor.open(io.BytesIO(b"PK\3\4" + bytes(100)))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_map_location(path: Path) -> None:
    with fastensor.open(path, "meta") as found:
        assert found["w"].device.type == "meta"


def test_one_that_is_forgotten_is_closed(path: Path) -> None:
    gc.collect()  # what earlier tests have left
    wait_for_space()
    before = len(os.listdir("/proc/self/fd"))
    fastensor.open(path)["w"]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_is_closed_reads_nothing(path: Path) -> None:
    found = fastensor.open(path)
    found.close()
    with pytest.raises(ValueError, match="is closed"):
        found["w"]


def test_a_borrowed_file_may_be_closed_meanwhile(path: Path) -> None:
    file = path.open("rb")
    with fastensor.open(file) as found:
        file.close()
        with (path.parent / "other").open("wb+"):
            assert torch.equal(found["w"], WEIGHTS["w"])


def test_it_cannot_be_sent_to_another_process(path: Path) -> None:
    with fastensor.open(path) as found, pytest.raises(TypeError, match="open it again in each process"):
        pickle.dumps(found)


def test_a_wrapper_of_a_file_is_not_taken_for_it(path: Path) -> None:
    packed = path.with_suffix(".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with gzip.open(packed) as unpacked, fastensor.open(io.BufferedReader(unpacked)) as found:
        assert torch.equal(found["w"], WEIGHTS["w"])
    with fastensor.open(io.BufferedReader(io.BytesIO(path.read_bytes()))) as found:
        assert torch.equal(found["w"], WEIGHTS["w"])


def mapped_nbytes(path: Path) -> int:
    """How much of a file is mapped into this process."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ranges = [line[0].split("-") for line in lines]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ranges)


def test_mapped_tensors_are_the_files_pages_and_private(path: Path) -> None:
    before = path.read_bytes()
    with fastensor.open(path, mmap=True) as found:
        tensors = dict(found)
        part = found["w", 3:5]
        for name, tensor in WEIGHTS.items():
            states.assert_equal(tensors[name], tensor)
            assert tensors[name].untyped_storage().nbytes() == tensor.nbytes
    assert torch.equal(part, WEIGHTS["w"][3:5])
    assert mapped_nbytes(path) > 0
    tensors["w"].zero_()
    part.zero_()
    assert path.read_bytes() == before
    with fastensor.open(path, mmap=True) as found:
        assert torch.equal(found["w"], WEIGHTS["w"])
    del tensors, part
    assert mapped_nbytes(path) == 0


def test_mapped_views_and_empty_tensors(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    state = {"view": base[10:20], "strided": base.reshape(10, 10).t()[::2], "empty": torch.empty(0, 3)}
    fastensor.save(state, tmp_path / "x")
    with fastensor.open(tmp_path / "x", mmap=True) as found:
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor)
            assert found[name].stride() == tensor.stride()
        assert torch.equal(found["strided", 1, ::3], state["strided"][1, ::3])


def test_a_tensor_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    """safetensors of any tool need not be aligned."""
    header = (
        b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]}}'
    )
    header += b" " * (-len(header) % 8)
    values = bytes([1, 2, 3]) + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values)
    with fastensor.open(tmp_path / "x.safetensors", mmap=True, verify=False) as found:
        assert found["a"].tolist() == [1, 2, 3]
        assert found["b"].tolist() == [1.5, -2.0]
        assert found["b"].data_ptr() % 4 == 0


@pytest.mark.parametrize("options", [{"mmap": True}, {"verify_again": False}], ids=str)
def test_what_is_compared_once(path: Path, options: dict[str, bool]) -> None:
    """A file whose time says that nothing was written shows it: the second time, nothing is compared."""
    before = os.stat(path)
    with fastensor.open(path, **options) as once, fastensor.open(path) as each_time:
        for found in (once, each_time):
            assert torch.equal(found["w"], WEIGHTS["w"])
        damage(path, WEIGHTS["w"], 2000)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert not torch.equal(once["w"], WEIGHTS["w"])
        assert not torch.equal(once["w", 10:], WEIGHTS["w"][10:])
        with pytest.raises(CorruptCheckpointError, match="was damaged after it was written"):
            each_time["w"]
    with fastensor.open(path, **options) as found:
        for key in ("w", ("w", 1), "w"):  # what was not found to be sound is compared again
            with pytest.raises(CorruptCheckpointError, match="was damaged after it was written"):
                found[key]


@pytest.mark.parametrize("options", [{"mmap": True}, {"verify_again": False}], ids=str)
def test_a_file_that_is_written_to_while_it_is_open(path: Path, options: dict[str, bool]) -> None:
    with fastensor.open(path, **options) as found:
        assert torch.equal(found["b"], WEIGHTS["b"])
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointReadError, match="was written to after it was opened; open it again"):
            found["b"]
    with fastensor.open(path, **options) as found:
        os.truncate(path, 100)
        with pytest.raises(CheckpointReadError, match="was written to after it was opened"):
            found["w"]


def test_a_file_that_ends_before_a_mapping_does(path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        assert memory.map_file(file.fileno(), 0, size, checksum=True)[1] == zlib.crc32(path.read_bytes())
        with pytest.raises(posix.EndOfFile, match=f"the file ends before offset {size + 1}"):
            memory.map_file(file.fileno(), 1, size, checksum=False)


@given(st.integers(0, 3 << 12), st.integers(0, (4 << 20) + 9000))
def test_any_range_of_a_file_is_mapped(offset: int, nbytes: int) -> None:
    data = np.random.default_rng(0).bytes((4 << 20) + (6 << 12))
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        storage, crc32 = memory.map_file(file.fileno(), offset, nbytes, checksum=True)
    assert crc32 == zlib.crc32(data[offset : offset + nbytes])
    assert bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy()) == data[offset : offset + nbytes]


def test_a_mapped_file_that_cannot_be_read_is_an_error_and_no_signal(path: Path) -> None:
    with path.open("rb+") as file:
        storage, _ = memory.map_file(file.fileno(), 0, os.fstat(file.fileno()).st_size, checksum=False)
        os.truncate(path, 0)
        with pytest.raises(OSError, match="the file cannot be read"):
            memory._populate_read(storage.data_ptr(), storage.nbytes())


def test_only_files_of_this_machine_are_mapped(path: Path) -> None:
    with pytest.raises(ValueError, match="mmap=True needs the path of a local file"):
        fastensor.open(io.BytesIO(path.read_bytes()), mmap=True)
    with path.open("rb") as file, fastensor.open(file, mmap=True) as found:
        assert torch.equal(found["w"], WEIGHTS["w"])


def test_ties(tmp_path: Path) -> None:
    square = torch.ones(3, 3)
    state = {
        "first": square,
        "tied": square,
        "turned": square.t(),
        "row": square[0],
        "again": square,
        "other": square + 1,
    }
    fastensor.save(state, tmp_path / "x")
    with fastensor.open(tmp_path / "x") as found:
        assert found.ties == {"tied": "first", "again": "first"}


def test_a_default_device_changes_nothing(path: Path) -> None:
    with torch.device("meta"):
        with fastensor.open(path) as found:
            assert torch.equal(found["w"], WEIGHTS["w"])
        assert torch.equal(fastensor.load(path)["w"], WEIGHTS["w"])


def test_a_file_without_checksums_is_announced(tmp_path: Path) -> None:
    safetensors.torch.save_file(WEIGHTS, tmp_path / "x.safetensors")
    with pytest.warns(fastensor.UnverifiedCheckpointWarning, match="no checksums"):
        fastensor.open(tmp_path / "x.safetensors").close()
    with pytest.warns(fastensor.UnverifiedCheckpointWarning, match="no checksums"):
        fastensor.convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors")


def test_an_expanded_tensor_is_not_written_out(tmp_path: Path) -> None:
    fastensor.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "x")
    with fastensor.open(tmp_path / "x") as found:
        assert found.info["w"].nbytes == 4 << 40
        assert found["w", 5:].shape == ((1 << 40) - 5,)


def test_a_mapped_file_that_is_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastensor.checkpoint.containers import safetensors_file

    path = tmp_path / "x.safetensors"
    fastensor.save({"w": torch.ones(1000)}, path)
    original = safetensors_file.read_header

    def replace_it(*arguments: Any, **options: Any) -> Any:
        header = original(*arguments, **options)
        fastensor.save({"another, much longer name": torch.zeros(9)}, path)
        return header

    monkeypatch.setattr(safetensors_file, "read_header", replace_it)
    assert (fastensor.load(path, mmap=True)["w"] == 1).all()


def test_an_empty_tensor_does_not_vouch_for_the_next_one(tmp_path: Path) -> None:
    """Both begin at the same place of the file."""
    path = tmp_path / "x.safetensors"
    fastensor.save({"a": torch.empty(0), "b": torch.arange(300_000.0)}, path)
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)
    with fastensor.open(path, mmap=True) as found:
        assert not found["a"].numel()
        with pytest.raises(CorruptCheckpointError, match="tensor 'b'"):
            found["b"]
