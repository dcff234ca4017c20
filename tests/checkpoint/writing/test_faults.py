"""The Nth system call fails, for every N: the old content or the new, whole, and nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import io
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from disks import content, leftovers
from states import assert_same_tensors

import fastensor
from fastensor import FastensorError
from fastensor.backends.registry import available_names
from fastensor.checkpoint.writing import outputs
from fastensor.checkpoint.writing.freeing import wait_for_space
from fastensor.errors import LayoutError
from fastensor.stitch import torch_zip
from fastensor.testing import Fault, failing_call, short_call

pytestmark = pytest.mark.crash

OLD = {"w": torch.full((1000,), 1)}
NEW = {"w": torch.full(((2 << 20) + 5000,), 2, dtype=torch.uint8), "b": torch.ones(5)}
"""Two transfers of every backend, or more."""
SHORT = 0
"""In place of an error: the call succeeds, but moves only a part."""
WAYS = [*((backend, "x") for backend in available_names()), ("direct", "x.safetensors")]
CODES, RARE_CODES = (errno.EIO, errno.ENOSPC, SHORT), (errno.EDQUOT, errno.EINTR)
"""The rare ones are tried in one way, and by ``make torture`` in every way."""
MOST_CALLS = 300


def name_of(code: int) -> str:
    return errno.errorcode.get(code, "SHORT")


def every_way() -> Iterator[Any]:
    for way in WAYS:
        for code in (*CODES, *RARE_CODES):
            marks = [pytest.mark.torture] if code in RARE_CODES and way != WAYS[0] else []
            yield pytest.param(*way, code, id="-".join([*way, name_of(code)]), marks=marks)


ways = pytest.mark.parametrize(("backend", "name", "code"), [*every_way()])


def inject(number: int, code: int, tally: Counter[str]) -> AbstractContextManager[Fault]:
    tally["calls cut short" if code == SHORT else "calls failed"] += 1
    return short_call(number) if code == SHORT else failing_call(number, code)


def prepare(path: Path, *, overwrite: bool) -> None:
    """Only the old file is there, if any. Root gives it away, so that a save has an owner to copy."""
    path.unlink(missing_ok=True)
    if overwrite:
        fastensor.save(OLD, path)
        path.chmod(0o640)
        if os.geteuid() == 0:
            os.chown(path, 12345, 12345)


@ways
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.usefixtures("temporaries")
def test_a_save_whose_nth_call_fails(
    tmp_path: Path, backend: str, name: str, overwrite: bool, code: int, tally: Counter[str]
) -> None:
    path = tmp_path / name
    raised = 0
    for number in range(1, MOST_CALLS):
        prepare(path, overwrite=overwrite)
        failure: Any = None
        with inject(number, code, tally) as fault:
            try:
                fastensor.save(NEW, path, backend=backend)
            except FastensorError as error:
                failure = error
            wait_for_space()
        if failure is not None:
            raised += 1
            assert isinstance(failure, OSError)
            assert failure.errno == code, fault
            assert str(path) in str(failure)
            in_place = "the new file is in place" in str(failure)
            assert path.exists() == (overwrite or in_place), fault
            assert not path.exists() or content(path) == (2 if in_place else 1), fault
        else:
            assert content(path) == 2
        assert not leftovers(tmp_path), fault
        if not fault.fired:
            break
    else:
        pytest.fail(f"a save takes more than {MOST_CALLS} calls")
    assert raised == 0 if code == SHORT else raised >= 5
    assert number > 8


@ways
def test_a_load_whose_nth_call_fails(tmp_path: Path, backend: str, name: str, code: int, tally: Counter[str]) -> None:
    path = tmp_path / name
    fastensor.save(NEW, path)
    raised = 0
    for number in range(1, MOST_CALLS):
        with inject(number, code, tally) as fault:
            try:
                loaded = fastensor.load(path, backend=backend)
            except fastensor.CheckpointReadError as error:
                raised += 1
                assert error.errno == code, fault
            else:
                assert_same_tensors(loaded, NEW)
        if not fault.fired:
            break
    else:
        pytest.fail(f"a load takes more than {MOST_CALLS} calls")
    assert raised == 0 if code == SHORT else raised >= 5


def attempts(path: Path, code: int, tally: Counter[str], action: Callable[[], object]) -> Iterator[Any]:
    """Do it with the first call failing, then the second, and so on; yields the errors, or None where it succeeded."""
    raised = 0
    for number in range(1, MOST_CALLS):
        failure: Any = None
        with inject(number, code, tally) as fault:
            try:
                action()
            except FastensorError as error:
                failure = error
            wait_for_space()
        if failure is not None:
            raised += 1
            assert isinstance(failure, OSError)
            assert failure.errno == code, fault
            assert str(path.parent) in str(failure)
        yield failure
        if not fault.fired:
            break
    else:
        pytest.fail(f"it takes more than {MOST_CALLS} calls")
    assert raised == 0 if code == SHORT else raised >= 5


@ways
def test_a_verification_whose_nth_call_fails(
    tmp_path: Path, backend: str, name: str, code: int, tally: Counter[str]
) -> None:
    path = tmp_path / name
    fastensor.save(NEW, path)
    for failure in attempts(path, code, tally, lambda: fastensor.verify(path, backend=backend)):
        assert failure is None or isinstance(failure, fastensor.CheckpointReadError)
    assert fastensor.verify(path).complete


@ways
def test_lazy_reading_whose_nth_call_fails(
    tmp_path: Path, backend: str, name: str, code: int, tally: Counter[str]
) -> None:
    path = tmp_path / name
    fastensor.save(NEW, path)

    def read() -> None:
        with fastensor.open(path, backend=backend) as found:
            assert_same_tensors(dict(found), NEW)
            assert (found["w", 5:9] == 2).all()

    for failure in attempts(path, code, tally, read):
        assert failure is None or isinstance(failure, fastensor.CheckpointReadError)


@ways
def test_a_conversion_whose_nth_call_fails(
    tmp_path: Path, backend: str, name: str, code: int, tally: Counter[str]
) -> None:
    source, target = tmp_path / name, tmp_path / ("y.ckpt" if name.endswith("safetensors") else "y.safetensors")
    fastensor.save(NEW, source)
    fastensor.save(OLD, target)
    for failure in attempts(source, code, tally, lambda: fastensor.convert(source, target, backend=backend)):
        in_place = failure is None or "the new file is in place" in str(failure)
        assert content(target) == (2 if in_place else 1)
        assert sorted(os.listdir(tmp_path)) == sorted([source.name, target.name])
        fastensor.save(OLD, target)


def test_a_temporary_that_cannot_be_removed_goes_with_the_next_save(tmp_path: Path, tally: Counter[str]) -> None:
    """The one case that leaves something behind: a call fails, and then so does removing the temporary."""
    path = tmp_path / "x"
    fastensor.save(OLD, path)
    most = 0
    for number in range(1, MOST_CALLS):
        with (
            mock.patch.object(os, "unlink", side_effect=OSError(errno.EIO, "injected")),
            inject(number, errno.ENOSPC, tally) as fault,
        ):
            with suppress(fastensor.CheckpointWriteError):
                fastensor.save(NEW, path)
            wait_for_space()
        left = len(leftovers(tmp_path))
        most = max(most, left)
        assert left <= 1, fault
        assert content(path) in (1, 2)
        fastensor.save(OLD, path)
        assert os.listdir(tmp_path) == ["x"], fault
        if not fault.fired:
            break
    assert most == 1


def with_each_close_failing(action: Callable[[], object]) -> None:
    """Run ``action`` with its first close failing, with its second, and so on, until none is left to fail."""
    for number in range(1, MOST_CALLS):
        with failing_call(number, name="close") as fault:
            action()
            wait_for_space()
        if not fault.fired:
            assert number > 1
            return
    pytest.fail(f"{MOST_CALLS} closes, and no end")


@pytest.mark.parametrize("backend", ["direct", "numpy"])
def test_a_save_that_cannot_close(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "x"

    def save() -> None:
        path.unlink(missing_ok=True)
        failure: Any = None
        try:
            fastensor.save(NEW, path, backend=backend)
        except fastensor.CheckpointWriteError as error:
            failure = error
        assert path.exists() == (failure is None or "the new file is in place" in str(failure))

    with_each_close_failing(save)


def test_files_of_others_are_not_closed_by_the_collector_within_a_fault() -> None:
    class Other:
        """In a cycle, as a multiprocessing.Process that has ended."""

        def __init__(self) -> None:
            self.me = self
            self.fd = os.open("/dev/null", os.O_RDONLY)

        def __del__(self) -> None:
            os.close(self.fd)

    Other()
    with failing_call(1, errno.EIO) as fault:
        cycles = [[]]  # type: ignore[var-annotated]
        for _ in range(20_000):  # as many objects as let the collector run
            cycles.append([cycles])
    assert fault.calls == 0
    gc.collect()


def test_a_load_that_cannot_close(tmp_path: Path) -> None:
    fastensor.save(NEW, tmp_path / "x")

    def load() -> None:
        with suppress(fastensor.CheckpointReadError):
            assert_same_tensors(fastensor.load(tmp_path / "x", backend="direct"), NEW)

    with_each_close_failing(load)


def test_freeing_a_replaced_file_that_cannot_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uncaught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    monkeypatch.setattr(outputs, "_FREED_LATER_NBYTES", 0)
    fastensor.save(OLD, tmp_path / "x")

    def overwrite() -> None:
        with suppress(fastensor.CheckpointWriteError):
            fastensor.save(OLD, tmp_path / "x")

    with_each_close_failing(overwrite)
    assert not uncaught


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=name_of)
def test_a_disk_that_fails_when_torch_has_to_write_by_itself(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, tally: Counter[str]
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise LayoutError("not a file that we know")

    monkeypatch.setattr(torch_zip, "plan", refuse)
    path = tmp_path / "x"
    for number in range(1, MOST_CALLS):
        with inject(number, code, tally) as fault:
            try:
                fastensor.save(NEW, path)
            except fastensor.CheckpointWriteError as error:
                assert error.errno == code
        assert not path.exists() or content(path) == 2
        assert not leftovers(tmp_path)
        if not fault.fired:
            break
    for writes in range(2):
        with pytest.raises(fastensor.CheckpointWriteError) as caught:
            fastensor.save(NEW, FullAfter(writes, code))
        assert caught.value.errno == code


class FullAfter(io.BytesIO):
    """A file that takes some writes, and then no more."""

    def __init__(self, writes: int, code: int) -> None:
        super().__init__()
        self._left = writes
        self._code = code

    def write(self, data: Any) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(self._code, "injected")
        return super().write(data)


@pytest.mark.parametrize("backend", available_names())
def test_signals_arriving_all_the_time(tmp_path: Path, backend: str) -> None:
    """Real ones, every millisecond: they cut transfers short and interrupt waits."""
    state = {"w": torch.arange(8 << 20), "b": torch.ones(5)}
    handled = []
    before = signal.signal(signal.SIGALRM, lambda *_: handled.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        fastensor.save(state, tmp_path / "x", backend=backend)
        while_saving = len(handled)
        loaded = fastensor.load(tmp_path / "x", backend=backend)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert 0 < while_saving < len(handled)
    assert_same_tensors(loaded, state)
    assert_same_tensors(torch.load(tmp_path / "x"), state)


@pytest.mark.parametrize("backend", available_names())
def test_every_write_and_read_is_short(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[: max(4096, len(data) // 8192 * 4096)], at))
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, views, at, *f: preadv(fd, [v[: max(4096, len(v) // 8192 * 4096)] for v in views], at, *f),
    )
    fastensor.save(NEW, tmp_path / "x", backend=backend)
    loaded = fastensor.load(tmp_path / "x", backend=backend)
    assert_same_tensors(loaded, NEW)
    monkeypatch.undo()
    assert_same_tensors(torch.load(tmp_path / "x"), NEW)


def test_a_direct_read_that_comes_back_at_an_odd_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    fastensor.save(NEW, tmp_path / "x")

    def odd(fd: int, views: list[memoryview], at: int, *flags: int) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        count = preadv(fd, views, at, *flags)
        return count - 1000 if direct and count > 4096 else count

    monkeypatch.setattr(os, "preadv", odd)
    assert_same_tensors(fastensor.load(tmp_path / "x", backend="direct"), NEW)


def test_an_interrupt_while_loading_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastensor.save(NEW, tmp_path / "x")

    def interrupt(*arguments: object) -> int:
        raise KeyboardInterrupt

    from fastensor.backends import numpy

    monkeypatch.setattr(numpy, "_read_block", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fastensor.load(tmp_path / "x", backend="numpy")


def test_an_interrupt_while_saving_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fastensor.save(OLD, tmp_path / "x")

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    from fastensor.files import posix

    monkeypatch.setattr(posix, "sync_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fastensor.save(NEW, tmp_path / "x")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x"]
    assert content(tmp_path / "x") == 1
