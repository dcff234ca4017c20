"""Full disks, damaged files, wrong refs, killed processes: a clear error, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import Program

import fastensor
from fastensor import FastensorError, TensorRef, TensorStore
from fastensor.backends.registry import available_names
from fastensor.files.atomic import NewFile, _remove_old_leftovers
from fastensor.files.posix import TEMPORARY_SUFFIX
from fastensor.testing import failing_call, short_call
from fastensor.testing.calls import Call, intercepted

TENSOR = torch.arange((2 << 20) + 5000, dtype=torch.uint8)
"""Two transfers of every backend, or more."""
SHORT = 0
"""In place of an error: the call succeeds, but moves only a part."""
CODES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR, SHORT]
MOST_CALLS = 300

codes = pytest.mark.parametrize("code", CODES, ids=lambda code: errno.errorcode.get(code, "SHORT"))
tools = pytest.mark.parametrize("tool", available_names())


def every_call(code: int, tally: Counter[str], attempt: Callable[[], None]) -> list[Any]:
    """Do it with the first system call failing, then the second, and so on; returns the errors."""
    failures = []
    for number in range(1, MOST_CALLS):
        tally["calls cut short" if code == SHORT else "calls failed"] += 1
        with short_call(number) if code == SHORT else failing_call(number, code) as fault:
            try:
                attempt()
            except FastensorError as error:
                failures.append(error)
        if not fault.fired:
            return failures
    pytest.fail(f"it takes more than {MOST_CALLS} calls")


@codes
@tools
@pytest.mark.parametrize("durable", [False, True], ids=["", "durable"])
@pytest.mark.usefixtures("direct_io")
def test_a_put_whose_nth_call_fails(
    tmp_path: Path, temporaries: str, tool: str, durable: bool, code: int, tally: Counter[str]
) -> None:
    store = TensorStore(tmp_path, backend=tool, durable=durable)
    done = []

    def put() -> None:
        before = set(os.listdir(tmp_path))
        try:
            done.append(store.put(TENSOR))
        except FastensorError:
            assert set(os.listdir(tmp_path)) == before
            raise

    failures = every_call(code, tally, put)
    assert bool(failures) == (code != SHORT)
    for failure in failures:
        assert isinstance(failure, fastensor.CheckpointWriteError)
        assert failure.errno == code
        assert str(tmp_path) in str(failure)
    assert done
    assert {ref.file for ref in done} == set(os.listdir(tmp_path))
    assert all(torch.equal(store.get(ref), TENSOR) for ref in done)


@codes
@tools
def test_a_get_whose_nth_call_fails(tmp_path: Path, tool: str, code: int, tally: Counter[str]) -> None:
    store = TensorStore(tmp_path, backend=tool)
    ref = store.put(TENSOR)

    def get() -> None:
        assert torch.equal(store.get(ref), TENSOR)

    failures = every_call(code, tally, get)
    assert bool(failures) == (code != SHORT)
    for failure in failures:
        assert isinstance(failure, fastensor.CheckpointReadError)
        assert failure.errno == code
        assert ref.file in str(failure)


def test_a_delete_that_fails_says_so(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    ref = store.put(TENSOR)
    with failing_call(1, errno.EIO), pytest.raises(fastensor.CheckpointWriteError, match="cannot delete"):
        store.delete(ref)
    assert torch.equal(store.get(ref), TENSOR)


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path) -> None:
    store = TensorStore(tmp_path, backend="numpy")
    seen = []

    def fill(call: Call) -> Any:
        seen.append(call.name)
        if call.name == "fallocate64":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return call.perform()

    with (
        intercepted(fill),
        pytest.raises(fastensor.CheckpointWriteError, match=r"No space left.*nothing of it is left"),
    ):
        store.put(TENSOR)
    assert "pwrite" not in seen
    assert not os.listdir(tmp_path)


def test_put_many_stores_all_or_nothing(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    kept = store.put(TENSOR)
    with pytest.raises(fastensor.UnsupportedContentError):
        store.put_many([TENSOR, TENSOR, torch.empty(3, device="meta"), TENSOR])
    with pytest.raises(TypeError):
        store.put_many([TENSOR, "TENSOR"])  # type: ignore[list-item]

    def interrupted() -> Any:
        yield TENSOR
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put_many(interrupted())
    assert os.listdir(tmp_path) == [kept.file]
    assert store.put_many([]) == []


def test_delete_many_removes_what_it_can(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    refs = store.put_many([TENSOR] * 3)
    store.delete(refs[1])
    with pytest.raises(FileNotFoundError, match=refs[1].file):
        store.delete_many(refs)
    assert not os.listdir(tmp_path)
    assert store.statistics().deletes == 3


def test_files_are_durable_before_they_have_a_name(tmp_path: Path, temporaries: str) -> None:
    calls: list[str] = []

    def note(call: Call) -> Any:
        calls.append(call.name)
        return call.perform()

    store = TensorStore(tmp_path, durable=True, backend="numpy")
    with intercepted(note):
        store.put_many([TENSOR, TENSOR])
    naming = "link" if temporaries == "nameless" else "rename"
    order = [name for name in calls if name in ("pwrite", "fsync", naming)]
    compact = [name for name, before in zip(order, ["", *order], strict=False) if name != before]
    assert compact == ["pwrite", "fsync", naming] * 2 + ["fsync"]  # the directory once for both
    calls.clear()
    with intercepted(note):
        TensorStore(tmp_path, backend="numpy").put(TENSOR)
    assert "fsync" not in calls


def test_no_reader_sees_a_part_of_a_file(tmp_path: Path, temporaries: str) -> None:
    store = TensorStore(tmp_path, backend="numpy")
    seen: set[str] = set()

    def look(call: Call) -> Any:
        if call.name == "pwrite":
            seen.update(name for name in os.listdir(tmp_path) if not name.startswith("."))
        return call.perform()

    with intercepted(look):
        store.put(TENSOR)
    assert not seen


def test_the_umask_holds(tmp_path: Path, temporaries: str) -> None:
    before = os.umask(0o027)
    try:
        ref = TensorStore(tmp_path).put(TENSOR)
    finally:
        os.umask(before)
    assert (tmp_path / ref.file).stat().st_mode & 0o777 == 0o640


KILLED = """
import os, sys, torch, fastensor
from fastensor.files import posix
store = fastensor.TensorStore(sys.argv[1], backend="numpy")
def stop(*arguments):
    print("writing", flush=True)
    sys.stdin.read()
posix.truncate = stop  # all has been written, but for the end
store.put(torch.ones(1000))
"""


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    with Program("-c", KILLED, tmp_path) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert not os.listdir(tmp_path)


def leftover(folder: Path, name: str, *, age_seconds: float) -> Path:
    path = folder / f".{name}{TEMPORARY_SUFFIX}"
    path.write_text("cut off")
    os.utime(path, (time.time() - age_seconds,) * 2)
    return path


def test_where_files_have_names_those_of_the_dead_are_removed(tmp_path: Path, temporaries: str) -> None:
    old = leftover(tmp_path, "0" * 16 + ".0", age_seconds=4000)
    kept = [
        leftover(tmp_path, "1" * 16 + ".0", age_seconds=3000),  # of another machine, perhaps, whose locks are not seen
        leftover(tmp_path, "x.ckpt.0", age_seconds=4000),
        leftover(tmp_path, "notes", age_seconds=4000),
    ]
    with NewFile(str(tmp_path / "x")) as alive:
        if temporaries == "named":
            (living,) = set(tmp_path.iterdir()) - {old, *kept}
            os.utime(living, (0, 0))
            kept.append(living)
        _remove_old_leftovers.cache_clear()
        ref = TensorStore(tmp_path).put(SMALL)
        assert set(tmp_path.iterdir()) == {tmp_path / ref.file, *kept, *([old] if temporaries == "nameless" else [])}
        alive.publish()


@pytest.mark.parametrize("name", ["open", "fstat", "flock", "unlink"])
@pytest.mark.usefixtures("only_named")
def test_what_cannot_be_removed_is_left(tmp_path: Path, name: str) -> None:
    old = leftover(tmp_path, "0" * 16 + ".0", age_seconds=4000)
    ours: set[int] = set()

    def refuse(call: Call) -> Any:
        first = call.arguments[0]
        if call.name == name and (first in ours or str(first) == str(old)):
            raise OSError(errno.ENOLCK, "not here")
        result = call.perform()
        if call.name == "open" and str(first) == str(old):
            ours.add(result)
        elif call.name == "close":
            ours.discard(first)
        return result

    with intercepted(refuse):
        ref = TensorStore(tmp_path, backend="numpy").put(SMALL)
    assert set(os.listdir(tmp_path)) == {old.name, ref.file}


@pytest.mark.usefixtures("only_named")
def test_filesystems_with_neither_nameless_files_nor_locks(tmp_path: Path) -> None:
    def refuse(call: Call) -> Any:
        if call.name == "flock":
            raise OSError(errno.ENOLCK, "no locks")
        return call.perform()

    with intercepted(refuse):
        ref = TensorStore(tmp_path).put(SMALL)
    assert os.listdir(tmp_path) == [ref.file]


SMALL = torch.arange(40, dtype=torch.int16).reshape(5, 8)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.torture)], ids=["sample", "all"])
@pytest.mark.parametrize("kind", ["dense", "transposed", "sparse", "quantized"])
@pytest.mark.parametrize("tool", ["numpy", "torch"])
def test_a_flipped_bit_is_noticed_or_does_not_matter(tmp_path: Path, kind: str, tool: str, step: int) -> None:
    tensor = {
        "dense": lambda: SMALL,
        "transposed": lambda: SMALL.t(),
        "sparse": lambda: SMALL.relu().to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(SMALL.float(), 0.1, 0, torch.qint8),
    }[kind]()
    store = TensorStore(tmp_path, backend=tool)
    ref = store.put(tensor)
    path = tmp_path / ref.file
    sound = path.read_bytes()
    refused = 0
    for at in range(0, len(sound), step):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            found = store.get(ref)
        except (fastensor.CorruptCheckpointError, fastensor.UnsupportedContentError, fastensor.UnsafeCheckpointError):
            refused += 1
            continue
        assert found.dtype == tensor.dtype
        assert torch.equal(*(one.dequantize() if one.is_quantized else one.to_dense() for one in (found, tensor)))
        if tensor.is_quantized:
            assert (found.q_scale(), found.q_zero_point()) == (tensor.q_scale(), tensor.q_zero_point())
    assert refused == len(range(0, len(sound), step)) if ref.format == "npy" else refused >= ref.nbytes // step


def test_the_first_byte_that_differs_is_shown(tmp_path: Path) -> None:
    store = TensorStore(tmp_path, backend="numpy")
    ref = store.put(SMALL)
    path = tmp_path / ref.file
    sound = path.read_bytes()
    path.write_bytes(sound[:3000] + b"x" + sound[3001:])
    with pytest.raises(fastensor.CorruptCheckpointError, match=r"found b'x .* at offset 3000, expected b'  "):
        store.get(ref)


@pytest.mark.parametrize("tool", ["numpy", "torch"])
@pytest.mark.parametrize("length", [0, 1, 9, 100, 1000, -81, -2, -1])
def test_a_file_of_another_length_is_refused(tmp_path: Path, tool: str, length: int) -> None:
    store = TensorStore(tmp_path, backend=tool)
    ref = store.put(SMALL)
    path = tmp_path / ref.file
    sound = path.read_bytes()
    path.write_bytes(sound[:length])
    with pytest.raises(fastensor.CorruptCheckpointError, match=ref.file):
        store.get(ref)
    if tool == "numpy":
        path.write_bytes(sound + b"x")
        with pytest.raises(fastensor.CorruptCheckpointError, match=ref.file):
            store.get(ref)


@pytest.mark.parametrize("tool", ["numpy", "torch"])
def test_a_file_that_was_swapped_is_noticed(tmp_path: Path, tool: str) -> None:
    store = TensorStore(tmp_path, backend=tool)
    one, two = store.put_many([SMALL, SMALL + 1])
    os.replace(tmp_path / two.file, tmp_path / one.file)
    with pytest.raises(fastensor.CorruptCheckpointError, match=r"CRC32 .* expected"):
        store.get(one)
    assert torch.equal(TensorStore(tmp_path, backend=tool, verify=False).get(one), SMALL + 1)


@pytest.mark.parametrize("other", [SMALL.t(), SMALL.reshape(-1), SMALL.float(), SMALL[:4], torch.zeros(0)])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("tool", ["numpy", "torch"])
def test_a_file_of_another_tensor_is_refused_without_a_checksum(
    tmp_path: Path, tool: str, verify: bool, other: torch.Tensor
) -> None:
    store = TensorStore(tmp_path, backend=tool, verify=verify)
    one, two = store.put_many([SMALL, other])
    os.replace(tmp_path / two.file, tmp_path / one.file)
    with pytest.raises(fastensor.CorruptCheckpointError, match=one.file):
        store.get(one)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "pipe"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, make: Callable[[Any], None]) -> None:
    store = TensorStore(tmp_path)
    ref = store.put(SMALL)
    (tmp_path / ref.file).unlink()
    make(tmp_path / ref.file)
    with pytest.raises(fastensor.CorruptCheckpointError, match="not a regular file"):
        store.get(ref)


def test_a_tensor_that_is_not_there_is_a_missing_file(tmp_path: Path) -> None:
    store, other = TensorStore(tmp_path / "a"), TensorStore(tmp_path / "b")
    ref = other.put(SMALL)
    for action in (store.get, store.delete):
        with pytest.raises(FileNotFoundError, match=r"deleted, or the ref is one of a store in another.*" + ref.file):
            action(ref)
    other.delete(ref)
    with pytest.raises(FileNotFoundError):
        other.get(ref)


def test_a_huge_ref_costs_nothing(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    ref = replace(store.put(SMALL), shape=(1 << 50,), nbytes=1 << 51, stride=None)
    with pytest.raises(fastensor.CorruptCheckpointError):
        store.get(ref)


def test_a_closed_store_accepts_no_calls(tmp_path: Path) -> None:
    with TensorStore(tmp_path) as store:
        ref = store.put(SMALL)
    calls: list[Callable[[], object]] = [
        lambda: store.put(SMALL), lambda: store.get(ref), lambda: store.delete(ref), lambda: store.put_many([])
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="has been closed"):
            call()
    store.close()
    assert torch.equal(TensorStore(tmp_path).get(ref), SMALL)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(fastensor.UnknownBackendError, match="'turbo'"):
        TensorStore(tmp_path / "x", backend="turbo")
    with pytest.raises(ValueError, match=r"mode is one of .* found 'fast'"):
        TensorStore(tmp_path / "x", mode="fast")  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
    (tmp_path / "x").write_text("")
    with pytest.raises(fastensor.CheckpointWriteError, match="cannot make a directory") as caught:
        TensorStore(tmp_path / "x")
    assert caught.value.errno == errno.EEXIST


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    store = TensorStore(tmp_path / "x")
    (tmp_path / "x").rmdir()
    with pytest.raises(fastensor.CheckpointWriteError, match="No such file") as caught:
        store.put(SMALL)
    assert caught.value.errno == errno.ENOENT


def test_a_storage_that_is_resized_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(1000)
    store = TensorStore(tmp_path, backend="numpy")

    def resize(call: Call) -> Any:
        if call.name == "fallocate64":
            tensor.untyped_storage().resize_(8000)
        return call.perform()

    with intercepted(resize), pytest.raises(fastensor.StateChangedError):
        store.put(tensor)
    assert not os.listdir(tmp_path)


def test_an_interrupt_leaves_nothing(tmp_path: Path, temporaries: str) -> None:
    store = TensorStore(tmp_path, durable=True)
    for stop in ("pwrite", "fsync", "link", "rename", "close"):

        def interrupt(call: Call, stop: str = stop) -> Any:
            result = call.perform()
            if call.name == stop:
                raise KeyboardInterrupt
            return result

        with intercepted(interrupt), contextlib.suppress(KeyboardInterrupt):
            store.delete(store.put(SMALL))
            assert stop in ("link", "rename")
        assert not os.listdir(tmp_path), stop
    assert isinstance(store.put(SMALL), TensorRef)
