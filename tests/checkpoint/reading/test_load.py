"""``fastensor.load`` means what ``torch.load`` means, and verifies."""

from __future__ import annotations

import collections
import errno
import io
import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import run

import fastensor
from fastensor import CorruptCheckpointError, UnsafeCheckpointError, UnverifiedCheckpointWarning
from fastensor.backends.registry import available_names
from fastensor.files import posix

STATE = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "n": 3}


class Unknown(collections.UserDict):  # type: ignore[type-arg]
    """Not allow-listed."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    fastensor.save(STATE, tmp_path / "x.pt")
    return tmp_path / "x.pt"


@pytest.mark.parametrize(
    "map_location",
    [None, "cpu", "meta", torch.device("cpu"), {"cpu": "cpu"}, {"cpu": "meta"}, lambda s, loc: s, lambda s, loc: None],
)
def test_every_form_of_map_location(path: Path, map_location: Any) -> None:
    found, expected = fastensor.load(path, map_location), torch.load(path, map_location)
    assert found["w"].device == expected["w"].device
    if expected["w"].device.type == "cpu":
        assert torch.equal(found["w"], STATE["w"])


def test_a_callable_map_location_sees_filled_storages(path: Path) -> None:
    seen = []

    def look(storage: Any, location: str) -> Any:
        seen.append((list(storage)[:8], location))
        return storage

    fastensor.load(path, look)
    assert seen == [([0, 0, 0, 0, 0, 0, 128, 63], "cpu"), ([128, 63, 128, 63], "cpu")]


def test_a_wrong_device_is_torchs_error_not_corruption(path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA, so the device is not wrong")
    with pytest.raises((RuntimeError, AssertionError)) as caught:
        fastensor.load(path, "cuda")
    assert not isinstance(caught.value, CorruptCheckpointError)


def test_a_refused_global_is_named_with_the_ways_out(tmp_path: Path) -> None:
    fastensor.save({"u": Unknown()}, tmp_path / "x")
    with pytest.raises(UnsafeCheckpointError, match=r"Unknown.*add_safe_globals.*weights_only=False") as caught:
        fastensor.load(tmp_path / "x")
    assert isinstance(caught.value, pickle.UnpicklingError)
    assert "Unknown" in str(caught.value)
    assert isinstance(fastensor.load(tmp_path / "x", weights_only=False)["u"], Unknown)
    with torch.serialization.safe_globals([Unknown]):
        assert isinstance(fastensor.load(tmp_path / "x")["u"], Unknown)


def test_a_pickle_that_the_restricted_unpickler_cannot_read_is_not_called_corrupt(tmp_path: Path) -> None:
    fastensor.save(STATE, tmp_path / "x", pickle_protocol=4)
    with pytest.raises(UnsafeCheckpointError, match=r"refuses(?s:.*)operand(?s:.*)weights_only=False"):
        fastensor.load(tmp_path / "x")
    assert fastensor.load(tmp_path / "x", weights_only=False)["n"] == 3


class Disconnected:
    """Raises an error of its own when it is loaded."""

    def __setstate__(self, state: object) -> None:
        raise ConnectionRefusedError(111, "db is down")


def test_errors_of_user_code_are_passed_on(path: Path, tmp_path: Path) -> None:
    value = Disconnected()
    value.__dict__["x"] = 1
    fastensor.save(value, tmp_path / "d")
    with pytest.raises(ConnectionRefusedError, match="db is down"):
        fastensor.load(tmp_path / "d", weights_only=False)

    def unknown(storage: Any, location: str) -> Any:
        raise KeyError("no such device")

    for mmap in (False, True):
        with pytest.raises(KeyError, match="no such device"):
            fastensor.load(path, unknown, mmap=mmap)


def test_loads_and_saves_at_interpreter_exit(tmp_path: Path) -> None:
    code = (
        "import atexit, sys, torch, fastensor\n"
        "def late():\n"
        "    for backend in ('auto', 'direct'):\n"
        "        fastensor.save(torch.ones(4 << 20), sys.argv[1], backend=backend)\n"
        "        assert fastensor.load(sys.argv[1], backend=backend).sum() == 4 << 20\n"
        "    print('done')\n"
        "atexit.register(late)"
    )
    assert "done" in run("-c", code, tmp_path / "x").stdout


def test_many_storages_take_no_quadratic_time(tmp_path: Path) -> None:
    """The calls are counted, not timed."""
    import cProfile
    import pstats

    counts = []
    for number in (200, 400):
        fastensor.save([torch.tensor([i]) for i in range(number)], tmp_path / "x")
        with cProfile.Profile() as profile:
            fastensor.load(tmp_path / "x")
        counts.append(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]
    assert counts[1] < 2.5 * counts[0]


def test_a_tensor_subclass_and_dtensor(tmp_path: Path) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.arange(8.0), mesh)
        fastensor.save({"d": tensor, "plain": torch.ones(3)}, tmp_path / "x")
        for location in (None, "cpu", {"cpu": "cpu"}):
            loaded = fastensor.load(tmp_path / "x", location, weights_only=False)
            assert isinstance(loaded["d"], DTensor)
            assert torch.equal(loaded["d"].to_local(), torch.arange(8.0))
            assert torch.equal(loaded["plain"], torch.ones(3))
    finally:
        dist.destroy_process_group()


def test_under_fake_tensor_mode_and_skip_data(path: Path) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert fastensor.load(path)["w"].shape == (3, 4)
    with torch.serialization.skip_data():
        assert fastensor.load(path)["w"].shape == (3, 4)


def test_under_another_default_device(tmp_path: Path) -> None:
    with torch.device("meta"):
        fastensor.save(STATE, tmp_path / "x")
        assert torch.equal(fastensor.load(tmp_path / "x")["w"], STATE["w"])


def test_mmap(path: Path) -> None:
    loaded, report = fastensor.load_with_report(path, mmap=True)
    assert torch.equal(loaded["w"], STATE["w"])
    assert not report.verified
    with pytest.raises(ValueError, match="contradict"):
        fastensor.load(path, mmap=True, verify=True)


def test_files_of_torch_load_verified(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x")
    loaded, report = fastensor.load_with_report(tmp_path / "x")
    assert torch.equal(loaded["w"], STATE["w"])
    assert report.verified


def test_files_without_checksums_load_with_a_warning(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.warns(UnverifiedCheckpointWarning, match="no checksums"):
        loaded, report = fastensor.load_with_report(tmp_path / "x")
    assert torch.equal(loaded["w"], STATE["w"])
    assert not report.verified


def test_files_filled_in_after_skip_data_load_with_a_warning(tmp_path: Path) -> None:
    with torch.serialization.skip_data():
        torch.save(STATE, tmp_path / "x")
    with pytest.warns(UnverifiedCheckpointWarning):
        fastensor.load(tmp_path / "x")


def test_legacy_files_go_through_torch_announced(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x", _use_new_zipfile_serialization=False)
    with pytest.warns(UnverifiedCheckpointWarning):
        loaded, report = fastensor.load_with_report(tmp_path / "x")
    assert torch.equal(loaded["w"], STATE["w"])
    assert "not a zip archive" in report.fallbacks[0].reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastensor.load(tmp_path / "x", verify=False)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torchscript_goes_through_torch_announced(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "x"))
    loaded, report = fastensor.load_with_report(tmp_path / "x", weights_only=False)
    assert loaded(torch.ones(1, 2)).shape == (1, 2)
    assert "TorchScript" in report.fallbacks[0].reason


def rewrite(source: Path, target: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    """Write an archive again, record by record: ``change`` maps names and contents, in the order to be written."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name, data in change([(info.filename, old.read(info)) for info in old.infolist()]):
            new.writestr(name, data)


def test_files_of_old_torch_versions(tmp_path: Path) -> None:
    """As torch 1.6 wrote them: own archive name, no byte order, no format version, storages sorted as text."""
    state = {str(i): torch.full((1000 + i,), i) for i in range(25)}
    torch.save(state, tmp_path / "new")

    def old(records: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        kept = [(n.replace("new/", "model_v1/"), d) for n, d in records if n.split("/", 1)[1][:1] not in (".", "b")]
        return sorted(kept, key=lambda record: ("/data/" in record[0], record[0]))

    rewrite(tmp_path / "new", tmp_path / "old", old)
    for backend in available_names():
        loaded, report = fastensor.load_with_report(tmp_path / "old", backend=backend)
        assert all(torch.equal(loaded[key], state[key]) for key in state)
        assert report.verified


def test_the_other_byte_order(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5, dtype=torch.int32)}, tmp_path / "little")

    def swap(records: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        swapped = []
        for name, data in records:
            if name.endswith("/byteorder"):
                data = b"big"
            elif "/data/" in name and not name.endswith("serialization_id"):
                data = b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
            swapped.append((name, data))
        return swapped

    rewrite(tmp_path / "little", tmp_path / "big", swap)
    assert torch.equal(fastensor.load(tmp_path / "big")["w"], torch.arange(5, dtype=torch.int32))


def test_compressed_archives_go_through_torch_announced(path: Path, tmp_path: Path) -> None:
    rewrite(path, tmp_path / "small", lambda records: records, zipfile.ZIP_DEFLATED)
    loaded, report = fastensor.load_with_report(tmp_path / "small")
    assert torch.equal(loaded["w"], STATE["w"])
    assert "compressed" in report.fallbacks[0].reason
    assert report.verified


def test_a_lying_size_in_the_pickle_is_refused(path: Path, tmp_path: Path) -> None:
    def lie(records: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        return [(n, d.replace(b"K\x0ct", b"K\x7ft") if n.endswith("data.pkl") else d) for n, d in records]

    rewrite(path, tmp_path / "lie", lie)
    with pytest.raises(RuntimeError, match="size"):
        fastensor.load(tmp_path / "lie")


def test_nothing_is_there_or_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fastensor.load(tmp_path / "missing")
    with pytest.raises(fastensor.CheckpointReadError, match="expected a file, found a directory"):
        fastensor.load(tmp_path)


def test_loaded_tensors_have_storages_of_their_own(path: Path) -> None:
    loaded = fastensor.load(path)
    assert loaded["b"].untyped_storage().nbytes() == 4
    buffer = io.BytesIO()
    torch.save(loaded["b"], buffer)
    assert len(buffer.getvalue()) < 2000


def test_forked_children_can_train_after_a_load(path: Path) -> None:
    code = (
        "import os, sys, torch, fastensor; w = fastensor.load(sys.argv[1])['w']; pid = os.fork()\n"
        "if pid == 0:\n"
        "    w.requires_grad_(); (w * 2).sum().backward(); os._exit(0 if w.grad is not None else 1)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    run("-c", code, path)


def test_a_read_of_a_part_of_a_record_is_verified_whole(path: Path) -> None:
    """torch reads records whole; should it ever not, nothing unverified gets through."""
    from fastensor.checkpoint.reading.archive import read_archive
    from fastensor.checkpoint.reading.checked_file import CheckedFile
    from fastensor.checkpoint.reading.opened import ReadOptions, opened
    from fastensor.checkpoint.reading.reader import PartReader

    data = bytearray(path.read_bytes())
    at = data.index(torch.arange(12.0).numpy().tobytes())
    for damage in (False, True):
        if damage:
            data[at + 40] ^= 1
            path.write_bytes(data)
        with opened(path) as file, PartReader(file, (), ReadOptions("numpy"), verify=True) as reader:
            archive = read_archive(file)
            view = CheckedFile(file, reader, archive)
            view.seek(archive.storages["0"].begin)
            view.readinto(bytearray(30))
            view.seek(at)
            got = view.readinto(bytearray(8))
            assert (got, view.failure is None) == ((0, False) if damage else (8, True))


def test_a_file_that_may_not_be_opened_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user, say, has opened the file, and handed the descriptor on."""

    def refuse(*arguments: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    fastensor.save({"w": torch.ones(3)}, tmp_path / "x.ckpt")
    monkeypatch.setattr(posix, "reopen_direct", refuse)
    with (tmp_path / "x.ckpt").open("rb") as file:
        loaded, report = fastensor.load_with_report(file, backend="direct")
    assert torch.equal(loaded["w"], torch.ones(3))
    assert (report.backend, [one.backend for one in report.fallbacks]) == ("numpy", ["direct"])
