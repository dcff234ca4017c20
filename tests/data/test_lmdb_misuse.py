"""What users get wrong is said at once, nothing wrong is read, and other parts of Fastensor work beside."""

from __future__ import annotations

import errno
import os
import pickle
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.databases import make
from torch.utils.data import DataLoader

import fastensor
from fastensor.data import LmdbDataset, LmdbIndex, LmdbLoader, Merging
from fastensor.errors import BackendUnavailableError
from fastensor.testing.calls import Call, intercepted

COUNT = 200
VALUES = [b"%05d" % number * 900 for number in range(COUNT)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "db", [(b"%05d" % number, value) for number, value in enumerate(VALUES)])


def test_positions_that_are_no_integers(path: Path) -> None:
    """A mask would be taken for the positions 0 and 1."""
    dataset: LmdbDataset[bytes] = LmdbDataset(path)
    with pytest.raises(TypeError, match=r"positions are integers, found bool.*flatnonzero"):
        dataset.select(np.arange(COUNT) % 2 == 0)
    with pytest.raises(TypeError, match="positions are integers, found float64"):
        dataset.__getitems__([1.5])  # type: ignore[list-item]
    assert dataset.select([]).__getitems__([]) == []
    assert dataset.select(np.arange(5, dtype=np.uint8))[-1] == VALUES[4]


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64, torch.tensor])
def test_a_position_of_any_integer_type(path: Path, kind: Any) -> None:
    """Those of NumPy overflow where they are calculated with."""
    dataset: LmdbDataset[bytes] = LmdbDataset(path)
    assert dataset[kind(4)] == VALUES[4]
    assert dataset.select([5, 6])[kind(1)] == VALUES[6]
    if kind is not np.uint8:
        assert dataset[kind(-1)] == VALUES[-1]
    for wrong in (1.0, "1", slice(1, 3)):
        with pytest.raises(TypeError, match="integer"):
            dataset[wrong]  # type: ignore[index]


def _refused(error: type[Exception]) -> Any:
    def decode(value: memoryview) -> bytes:
        if value == VALUES[3]:
            raise error("an empty list, perhaps")
        return bytes(value)

    return decode


@pytest.mark.parametrize("error", [IndexError, StopIteration, ValueError])
def test_no_error_of_a_decoder_ends_an_iteration(path: Path, error: type[Exception]) -> None:
    """IndexError would, if Python iterated by ``__getitem__``, and StopIteration does in a ``DataLoader``."""
    dataset: LmdbDataset[bytes] = LmdbDataset(path, decode=_refused(error))
    expected = RuntimeError if error is StopIteration else error
    for samples in (iter(dataset), map(itemgetter(0), DataLoader(dataset))):
        found = [next(samples) for _ in range(3)]
        with pytest.raises(expected, match=r"an empty list|has raised StopIteration"):
            next(samples)
        found += samples
        assert found == [*VALUES[:3], *VALUES[4:]]


def test_a_key_that_is_no_bytes(path: Path) -> None:
    dataset: LmdbDataset[bytes] = LmdbDataset(path)
    assert dataset.get(bytearray(b"00003")) == VALUES[3]
    for found in (
        lambda: dataset.get("00003"),  # type: ignore[arg-type]
        lambda: dataset.positions_of(["00003"]),  # type: ignore[list-item]
        lambda: dataset.index.find("00003"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="a key is bytes, found '00003': encode it"):
            found()


def test_a_database_of_an_index(path: Path) -> None:
    with pytest.raises(ValueError, match="db= goes with a path: an index is of one database"):
        LmdbDataset(LmdbIndex.open(path), "train")


def test_an_unknown_engine_is_refused_at_once(path: Path) -> None:
    unknown: Any = "mmap"
    with pytest.raises(ValueError, match=r"engine is 'auto' or one of .*'mapped'.* found 'mmap'"):
        LmdbDataset(path, engine=unknown)


@pytest.mark.parametrize(("name", "least"), [("gap_nbytes", 0), ("read_nbytes", 1)])
def test_limits_of_merging(name: str, least: int) -> None:
    Merging(**{name: least})
    with pytest.raises(ValueError, match=f"{name} is at least {least}, found {least - 1}"):
        Merging(**{name: least - 1})


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("engine", ["pread", "willneed", "direct", "mapped"])
def test_a_closed_index_reads_nothing(path: Path, tmp_path: Path, pin: bool, engine: Any) -> None:
    """Not even if its descriptor is another file's by now."""
    index = LmdbIndex.open(path, pin=pin)
    dataset: LmdbDataset[bytes] = LmdbDataset(index, engine=engine)
    fresh: LmdbDataset[bytes] = LmdbDataset(index, engine=engine)
    try:
        assert dataset[3] == VALUES[3]
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    number = index.fileno()
    index.close()
    other = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "other").write_bytes(bytes(1 << 20))
    os.close(other)
    file = os.open(tmp_path / "other", os.O_RDONLY)
    os.dup2(file, number)
    try:
        for one in (dataset, fresh):
            with pytest.raises(ValueError, match="its index is closed"):
                one[3]
            with pytest.raises(ValueError, match="its index is closed"):
                one.__getitems__([3, 4])
    finally:
        os.close(file)
        if number != file:
            os.close(number)


def test_a_read_that_fails_spoils_no_later_batch(path: Path) -> None:
    """Batches that were announced are read together."""
    dataset: LmdbDataset[bytes] = LmdbDataset(path, engine="direct", merging=Merging(1 << 30, 1 << 30))
    try:
        dataset[0]
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    batches = [[0], list(range(50, 60)), list(range(60, 70))]
    first = int(dataset.index.offsets[0]) // 4096

    def fail(call: Call) -> Any:
        if call.name == "preadv" and call.arguments[2] // 4096 != first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call.perform()

    with intercepted(fail):
        dataset.read_ahead(batches)
        assert dataset.__getitems__(batches[0]) == VALUES[:1]
        with pytest.raises(OSError, match="Input/output error") as caught:
            dataset.__getitems__(batches[1])
    assert caught.value.filename == dataset.index.path
    assert dataset.__getitems__(batches[2]) == VALUES[60:70]
    assert dataset.__getitems__(batches[1]) == VALUES[50:60]


def test_a_relative_sidecar_is_found_from_another_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(LmdbIndex.open(path, sidecar="mine.index"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pickle.loads(pickled).sidecar == str(tmp_path / "mine.index")
    assert os.listdir() == []


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_tiny_databases(tmp_path: Path, count: int, workers: int, shuffle: Any) -> None:
    """Batches may be larger than the database, and ranks more than samples."""
    path = make(tmp_path / "db", [(b"key", b"value")] * count)
    loader = LmdbLoader(LmdbDataset(path), 64, shuffle=shuffle, num_workers=workers, ranks=(1, 2))
    assert len(loader) == count
    for _ in range(2):
        assert list(loader) == [[b"value"]] * count
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert list(loader) == [[b"value"]] * count
    assert not list(LmdbLoader(LmdbDataset(path), 64, shuffle=shuffle, drop_last=True))
    assert loader.plan.mixing == 1


def test_checkpoints_are_saved_and_loaded_around_a_loader(path: Path, tmp_path: Path) -> None:
    """In decoders, and in worker processes that were forked by a loader while a writer was there."""
    fastensor.save({"scale": 3}, tmp_path / "scale.ckpt")

    def decode(value: memoryview) -> int:
        return int(fastensor.load(tmp_path / "scale.ckpt")["scale"]) * int(value[:5])

    loader = LmdbLoader(LmdbDataset(path, decode=decode), 50, shuffle="none", num_workers=2)
    with fastensor.AsyncWriter() as writer:
        for number, batch in enumerate(loader):
            writer.save({"batch": batch}, tmp_path / f"{number}.ckpt")
    assert [fastensor.load(tmp_path / f"{number}.ckpt")["batch"].tolist() for number in range(4)] == [
        [3 * position for position in range(50 * number, 50 * number + 50)] for number in range(4)
    ]
