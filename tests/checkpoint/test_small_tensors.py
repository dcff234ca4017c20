"""Checkpoints of many small tensors: records are read together, and come out as ``torch.load`` brings them."""

from __future__ import annotations

import gc
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fastensor
from fastensor import CorruptCheckpointError, FastensorError, UnsafeCheckpointError
from fastensor.backends.registry import available_names
from fastensor.checkpoint.reading import checked_file, storages
from fastensor.files import posix
from fastensor.stitch import plain_tensors
from fastensor.stitch.plain_call import Memo
from fastensor.testing.calls import Call, intercepted

SIZES = [0, 1, 3, 64, 1000, 16 << 10, (16 << 10) + 1, 300_000]
"""In elements; some records are read with their neighbours, some by themselves."""


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(SIZES[i % len(SIZES)], generator=generator) for i in range(200)}
    shared = torch.randn(40, generator=generator)
    return {
        **tensors,
        "tied": [shared, shared, shared[3:9]],
        "parameter": torch.nn.Parameter(torch.ones(3, 4).t()),
        "others": [torch.ones(5, dtype=dtype) for dtype in states.DTYPES],
        "sparse": torch.eye(4).to_sparse(),
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save(state(), tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.fixture
def not_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load is not to fall back to ``torch.load``."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("torch.load was called")

    if not storages.is_known():
        pytest.skip("this torch is not known")
    monkeypatch.setattr(checked_file, "load_through_torch", refuse)


@pytest.mark.usefixtures("not_with_torch")
@pytest.mark.parametrize("backend", available_names())
def test_what_comes_back_is_what_torch_brings(path: Path, backend: str) -> None:
    found, expected = fastensor.load(path, backend=backend), torch.load(path)
    states.assert_equal(found, expected)
    assert states.pattern(states.storages_of(found)) == states.pattern(states.storages_of(expected))


@pytest.mark.usefixtures("not_with_torch")
@pytest.mark.parametrize("save", [torch.save, fastensor.save])
def test_a_small_file_is_read_at_once_when_its_directory_was_read(tmp_path: Path, save: Any) -> None:
    expected = {f"t{i}": torch.randn(1024) for i in range(16)}
    save(expected, tmp_path / "x.pt")
    reads: list[int] = []

    def note(call: Call) -> Any:
        if call.name == "preadv":
            reads.append(call.arguments[2])
        return call.perform()

    with intercepted(note):
        states.assert_equal(fastensor.load(tmp_path / "x.pt"), expected)
    assert len(reads) == 3  # its kind, its directory, and all of it
    assert reads[-1] == 0


@pytest.mark.parametrize("name", ["data.pkl", "byteorder", "data/3", "version", ".data/serialization_id"])
def test_every_record_of_a_small_file_is_compared(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.pt"
    fastensor.save({f"t{i}": torch.randn(1024) for i in range(16)}, path)
    with zipfile.ZipFile(path) as archive:
        record = archive.read(f"archive/{name}")
    sound = path.read_bytes()
    at = sound.index(record, sound.index(f"archive/{name}".encode()))
    path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
    with pytest.raises(CorruptCheckpointError, match="has CRC32"):
        fastensor.load(path)


@pytest.mark.usefixtures("not_with_torch")
def test_storages_are_not_resizable_as_those_of_torch(path: Path) -> None:
    loaded = fastensor.load(path)
    assert not loaded["t3"].untyped_storage().resizable()
    assert not loaded["t7"].untyped_storage().resizable()


@pytest.mark.usefixtures("not_with_torch")
@pytest.mark.parametrize(
    "map_location", ["cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, location: storage]
)
def test_forms_of_map_location(path: Path, map_location: Any) -> None:
    found = fastensor.load(path, map_location)
    expected = torch.load(path, map_location)
    assert found["t3"].device == expected["t3"].device
    assert found["t3"].shape == expected["t3"].shape


@pytest.mark.usefixtures("not_with_torch")
def test_a_dict_may_lead_to_the_meta_device(tmp_path: Path) -> None:
    dense = state()
    sparse = {"sparse": dense.pop("sparse")}
    torch.save(dense, tmp_path / "dense.pt")
    found, expected = (load(tmp_path / "dense.pt", {"cpu": "meta"}) for load in (fastensor.load, torch.load))
    assert found["t3"].device == expected["t3"].device == torch.device("meta")
    assert found["t3"].shape == expected["t3"].shape
    torch.save(sparse, tmp_path / "sparse.pt")
    for load in (fastensor.load, torch.load):
        if torch.__version__ >= "2.14":  # it examines indices, which the meta device does not have
            with pytest.raises(NotImplementedError, match="meta tensor"):
                load(tmp_path / "sparse.pt", {"cpu": "meta"})
        else:
            assert load(tmp_path / "sparse.pt", {"cpu": "meta"})["sparse"].device == torch.device("meta")


def test_every_damaged_storage_is_noticed(path: Path) -> None:
    sound, loaded = path.read_bytes(), state()
    for name in ("t1", "t2", "t4", "t5", "t6", "t7", "t197"):
        at = sound.index(loaded[name].numpy().tobytes())
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        with pytest.raises(CorruptCheckpointError, match="has CRC32"):
            fastensor.load(path)
        assert fastensor.load(path, verify=False)["t3"].numel() == loaded["t3"].numel()


def test_records_in_another_order_than_that_of_the_pickle(tmp_path: Path) -> None:
    """Before torch 2.1 they were sorted as text."""
    torch.save(state(), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive, zipfile.ZipFile(tmp_path / "y.pt", "w") as other:
        for name in sorted(archive.namelist()):
            other.writestr(name, archive.read(name))
    states.assert_equal(fastensor.load(tmp_path / "y.pt"), torch.load(tmp_path / "x.pt"))


class NotAllowed:
    """A class that is not allow-listed."""


def test_what_torch_refuses_is_refused(tmp_path: Path) -> None:
    torch.save({**state(), "last": NotAllowed()}, tmp_path / "x.pt")
    with pytest.raises(UnsafeCheckpointError, match="NotAllowed"):
        fastensor.load(tmp_path / "x.pt")


def test_an_unknown_torch_reads_the_records_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_tensors, "_KNOWN_TORCH", re.compile("1.0"))
    assert not storages.is_known()
    states.assert_equal(fastensor.load(path), torch.load(path))


def test_a_wrapped_load_of_torch_is_called(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, own = [], torch.load

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return own(*arguments, **options)

    monkeypatch.setattr(torch, "load", wrapped)
    fastensor.load(path)
    assert calls


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes are read of files, each time."""
    found: list[int] = []
    read = posix.read_fully

    def count(fd: int, buffer: memoryview, offset: int) -> int:
        found.append(buffer.nbytes)
        return read(fd, buffer, offset)

    monkeypatch.setattr(posix, "read_fully", count)
    return found


@pytest.mark.usefixtures("not_with_torch")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("numel", [20_000, 80_000, 230_000])
def test_nothing_is_read_twice(tmp_path: Path, counted: list[int], numel: int, suffix: str) -> None:
    """Large tensors between small ones are not read with those."""
    found = {f"{at:03}{i}": torch.ones(numel if i == 0 else 64) for at in range(20) for i in range(6)}
    path = tmp_path / f"x{suffix}"
    nbytes = fastensor.save(found, path).nbytes
    counted.clear()
    states.assert_equal(fastensor.load(path, backend="numpy"), found)
    assert sum(counted) < 1.02 * nbytes + 100_000
    assert max(counted) <= max(4 * numel, 1 << 20)


@pytest.mark.usefixtures("not_with_torch")
def test_space_that_belongs_to_nothing_is_not_read(tmp_path: Path, counted: list[int]) -> None:
    """One small record, behind which the directory comes much later."""
    torch.save({"a": torch.ones(3)}, tmp_path / "small.pt")
    data = (tmp_path / "small.pt").read_bytes()
    directory = data.index(b"PK\x01\x02")
    end = data.rindex(b"PK\x05\x06")
    moved = 64 << 20
    tail = bytearray(data[directory:])
    tail[end - directory + 16 : end - directory + 20] = (directory + moved).to_bytes(4, "little")
    locator = data.find(b"PK\x06\x07")
    if locator >= 0:
        at = locator - directory
        record = int.from_bytes(tail[at + 8 : at + 16], "little")
        tail[at + 8 : at + 16] = (record + moved).to_bytes(8, "little")
        at = record - directory
        tail[at + 48 : at + 56] = (directory + moved).to_bytes(8, "little")
    with (tmp_path / "x.pt").open("wb") as file:
        file.write(data[:directory])
        file.seek(moved, 1)
        file.write(tail)
    assert torch.equal(fastensor.load(tmp_path / "x.pt")["a"], torch.ones(3))
    assert sum(counted) < 200_000


def test_packages_that_bring_a_device_are_asked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = list(torch.serialization._package_registry)
    monkeypatch.setattr(torch.serialization, "_package_registry", registry)
    asked: list[str] = []
    torch.serialization.register_package(1, lambda storage: None, lambda storage, location: asked.append(location))
    torch.load(path)
    before = len(asked)
    asked.clear()
    fastensor.load(path)
    assert len(asked) == before > 0


@pytest.mark.parametrize("keys", [None, ["a"]])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("backend", available_names())
def test_memory_goes_with_the_object(tmp_path: Path, backend: str, suffix: str, keys: Any) -> None:
    """Not when the garbage collector comes: until then a checkpoint would be in memory twice."""
    path = tmp_path / f"x{suffix}"
    fastensor.save({"a": torch.ones(100_000), "b": torch.ones(5)}, path)
    fastensor.load(path, backend=backend, keys=keys)
    gc.disable()
    try:
        found = fastensor.load(path, backend=backend, keys=keys)
        storage = StorageWeakRef(found["a"].untyped_storage())  # type: ignore[no-untyped-call]
        del found
        assert storage.expired()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["data.pkl", "version", "byteorder"])
def test_a_record_beside_the_folder_is_not_the_archives_own(tmp_path: Path, name: str) -> None:
    torch.save({"tag": "innocent"}, tmp_path / "x.pt")
    torch.save({"tag": "other"}, tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "other.pt") as other:
        content = other.read(f"other/{name}")
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as archive:
        archive.writestr(name, content)
    with pytest.raises(fastensor.FastensorError):
        fastensor.load(tmp_path / "x.pt")


def rewritten(path: Path, edit: Callable[[bytes], bytes]) -> None:
    """Write an archive anew with another pickle."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in records if name.endswith("/data.pkl"))
    edited = edit(records[pickled])
    assert edited != records[pickled]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**records, pickled: edited}.items():
            archive.writestr(name, data)


def behind_the_last(opcodes: bytes) -> Callable[[bytes], bytes]:
    """An edit that sets ``x`` to what opcodes make, as the last item of a dict of tensors."""
    return lambda data: data.removesuffix(b"u.") + b"X\1\0\0\0x" + opcodes + b"u."


UNUSUAL_MEMOS = {
    "a value that no pickler takes": behind_the_last(b"h\x10"),
    "the key of a storage": behind_the_last(b"h\x0f"),
    "a number that nothing has": behind_the_last(b"h\xff"),
    "a number that is used again": behind_the_last(b"K\1q\x10"),
    "a number that a call uses, too": lambda data: behind_the_last(b"h\x18")(data.replace(b"bq\x0e", b"bq\x18")),
    "a function that is not there": lambda data: data.replace(b"_v2\nq\x02", b"_v2\nq\x22"),
    "a location that is a tensor": lambda data: data.replace(b"q\x0fh\x06K", b"q\x0fh\x0dK"),
    "a function as the word": lambda data: data.replace(b"h\x02((h\x03", b"h\x02((h\x02"),
    "hooks that are a text": lambda data: data.replace(b"h\x0a)R", b"h\x01)R"),
}


@pytest.mark.parametrize("edit", UNUSUAL_MEMOS.values(), ids=UNUSUAL_MEMOS)
def test_unusual_memos_mean_what_they_mean_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[bytes], bytes]
) -> None:
    torch.save({"a": torch.ones(2), "b": torch.zeros(3), "c": torch.ones(4)}, path := tmp_path / "x.pt")
    monkeypatch.setattr(storages, "_LARGE_PICKLE_NBYTES", 0)
    found: list[Any] = []
    call_at = Memo.call_at
    monkeypatch.setattr(Memo, "call_at", lambda *arguments: found.append(call_at(*arguments)) or found[-1])
    fastensor.load(path, verify=False)
    assert [call.key_number for call in found] == [0xF, 0x17], "the numbers of UNUSUAL_MEMOS are those of this file"
    rewritten(path, edit)
    try:
        expected = torch.load(path)
    except Exception:  # noqa: BLE001  # any refusal of torch is to be one of ours
        with pytest.raises(FastensorError):
            fastensor.load(path)
    else:
        states.assert_equal(fastensor.load(path, verify=False), expected)


@pytest.mark.usefixtures("not_with_torch")
@pytest.mark.parametrize("large_nbytes", [0, 1 << 20])
def test_plain_tensors_have_all_that_torch_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_nbytes: int
) -> None:
    monkeypatch.setattr(storages, "_LARGE_PICKLE_NBYTES", large_nbytes)
    base = torch.arange(24.0)
    tensors = [base[3:9], base.view(4, 6).t(), torch.ones(()), torch.ones(2, requires_grad=True), torch.ones(0, 3)]
    torch.save(tensors + tensors[:1] + [torch.full((5,), 1j).conj()], tmp_path / "x.pt")
    found, expected = fastensor.load(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt")
    states.assert_equal(found, expected)
    assert states.pattern(states.storages_of(found)) == states.pattern(states.storages_of(expected))
    for one, other in zip(found, expected, strict=True):
        assert one.requires_grad == other.requires_grad
        assert one._backward_hooks == other._backward_hooks
        assert one.is_conj() == other.is_conj()
