"""The callback for the progress of saves and loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastensor
from fastensor.backends.registry import available_names

STATE = {"large": torch.arange(12_000_000, dtype=torch.int32), **{f"s{n}": torch.ones(n) for n in range(40)}}


class Seen(list[tuple[int, int]]):
    """What a callback was called with."""

    def __call__(self, done: int, total: int) -> None:
        self.append((done, total))

    def is_whole(self, steps: int) -> bool:
        """Whether it went from front to end, in so many steps or more."""
        (total,) = {total for _, total in self}
        counts = [done for done, _ in self]
        return counts == sorted(counts) and counts[-1] == total and len(counts) >= steps


@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
@pytest.mark.parametrize("backend", [name for name in available_names() if name != "gds"])
def test_saves_and_loads(tmp_path: Path, name: str, backend: str) -> None:
    path = tmp_path / name
    saved, loaded = Seen(), Seen()
    report = fastensor.save(STATE, path, backend=backend, progress=saved)
    assert saved.is_whole(3 if report.backend != "torch" else 1)
    assert saved[-1][1] == path.stat().st_size
    fastensor.load(path, backend=backend, progress=loaded)
    assert loaded.is_whole(2)
    into = {"large": torch.zeros(12_000_000, dtype=torch.int32)}
    fastensor.load(path, into=into, backend=backend, progress=(again := Seen()), verify="first")
    assert again.is_whole(4)
    assert torch.equal(into["large"], STATE["large"])


def test_urls_open_files_and_partial_loads(tmp_path: Path) -> None:
    for name in ("x.ckpt", "x.safetensors"):
        fastensor.save(STATE, f"memory://{name}", progress=(saved := Seen()))
        assert saved.is_whole(3)
        fastensor.load(f"memory://{name}", keys=["s3"], progress=(loaded := Seen()))
        assert loaded.is_whole(1)
        assert loaded[-1][1] < 10_000
    fastensor.load("memory://x.ckpt", progress=(loaded := Seen()))
    assert loaded.is_whole(2)


def test_what_torch_loads_by_itself_is_told_at_the_end(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.warns(fastensor.UnverifiedCheckpointWarning):
        fastensor.load(tmp_path / "old.pt", progress=(seen := Seen()))
    nbytes = (tmp_path / "old.pt").stat().st_size
    assert seen == [(nbytes, nbytes)]


class Enough(Exception):
    """The user's own."""


def stop(done: int, total: int) -> None:
    raise Enough


USES: dict[str, Callable[[Path, Any], object]] = {
    "save": lambda path, progress: fastensor.save({"w": torch.zeros(2)}, path, progress=progress),
    "load": lambda path, progress: fastensor.load(path, progress=progress),
    "load without checks": lambda path, progress: fastensor.load(path, progress=progress, verify=False),
    "load trusted": lambda path, progress: fastensor.load(path, progress=progress, weights_only=False),
    "verify": lambda path, progress: fastensor.verify(path, progress=progress),
    "convert": lambda path, progress: fastensor.convert(
        path, path.parent / "x", container="safetensors", progress=progress
    ),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["x.ckpt", "x.safetensors"])
def test_what_a_callback_raises_ends_the_work_and_blames_nobody(
    tmp_path: Path, name: str, use: str, caplog: pytest.LogCaptureFixture
) -> None:
    fastensor.save(STATE, tmp_path / name)
    before = (tmp_path / name).read_bytes()
    with pytest.raises(Enough):
        USES[use](tmp_path / name, stop)
    assert not caplog.records
    assert (tmp_path / name).read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [name]
    with pytest.raises(TypeError, match="progress is a function"):
        USES[use](tmp_path / name, 3)
