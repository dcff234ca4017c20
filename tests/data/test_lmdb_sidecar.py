"""Where an index is kept, and when what is kept is not used."""

from __future__ import annotations

import logging
import os
import random
import shutil
from pathlib import Path

import pytest
from data.databases import by_index, by_lmdb, make, overwrite, some_records

from fastensor.data import LmdbIndex, sidecar, walk
from fastensor.errors import CorruptDatasetError

RECORDS = some_records(200, (0, 10, 100, 3000))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "data", RECORDS.items())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fastensor" / "indexes"


class Builds:
    """Whether an index was built, or a sidecar used: only a build reports progress."""

    def __init__(self) -> None:
        self.reports: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.reports.append((done, total))


def is_built(path: Path, **options: object) -> bool:
    """Open an index, which has to be right. Returns whether it was built."""
    builds = Builds()
    index = LmdbIndex.open(path, progress=builds, **options)  # type: ignore[arg-type]
    assert by_index(index) == by_lmdb(path)
    return bool(builds.reports)


def test_an_index_is_kept_beside_its_data(path: Path) -> None:
    assert is_built(path)
    assert not is_built(path)
    assert not is_built(path, sidecar=True)
    assert LmdbIndex.open(path).sidecar == str(path / "data.mdb.fastensor-index")
    assert sorted(os.listdir(path)) == ["data.mdb", "data.mdb.fastensor-index", "lock.mdb"]
    assert is_built(path, sidecar=False)
    assert LmdbIndex.open(path, sidecar=False).sidecar is None


def test_an_index_is_kept_where_it_is_asked_for(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "folder" / "index"
    assert is_built(path, sidecar=other)
    assert not is_built(path, sidecar=other)
    assert LmdbIndex.open(path, sidecar=str(other)).sidecar == str(other)
    assert not (path / "data.mdb.fastensor-index").exists()


def test_each_database_has_its_own() -> None:
    names = [None, "one", "two", "ä/ö"]
    places = {sidecar.beside("x", None if name is None else name.encode()) for name in names}
    assert len(places) == len(names)
    assert not any("/" in place for place in places)


def test_a_folder_that_cannot_be_written_to(path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tests run as root, too, who may write to any folder: a folder in its place keeps a file from being written."""
    (path / "data.mdb.fastensor-index" / "occupied").mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "fastensor"):
        assert is_built(path)
    (kept,) = cache.iterdir()
    assert str(kept) in caplog.text
    caplog.clear()
    assert not is_built(path)
    assert not caplog.text
    with pytest.raises(OSError, match="fastensor-index"):
        LmdbIndex.open(path, sidecar=True)


def test_no_folder_can_be_written_to(path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path / "data.mdb.fastensor-index" / "occupied").mkdir(parents=True)
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in the place of the folder")
    with caplog.at_level(logging.WARNING, "fastensor"):
        assert is_built(path)
        assert is_built(path)
    assert caplog.text.count("its index is kept in memory") == 1


def test_progress_is_reported(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "CHUNK_NBYTES", 2 * 4096)
    builds = Builds()
    LmdbIndex.open(path, progress=builds)
    done, totals = zip(*builds.reports, strict=True)
    assert len(done) > 1
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]}


def test_a_rewritten_file_is_noticed(path: Path, tmp_path: Path) -> None:
    assert is_built(path)
    overwrite(path, 1)
    assert is_built(path)
    other = make(tmp_path / "other", [(key, value[::-1]) for key, value in RECORDS.items()])
    os.replace(other / "data.mdb", path / "data.mdb")
    assert is_built(path)
    shutil.copyfile(make(tmp_path / "third", some_records(200).items()) / "data.mdb", path / "data.mdb")
    assert is_built(path)
    assert not is_built(path)


def test_a_sidecar_of_other_data_is_not_used(path: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", some_records(100).items())
    place = tmp_path / "sidecar"
    assert is_built(path, sidecar=place)
    assert is_built(other, sidecar=place)
    assert is_built(path, sidecar=place)


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.torture)], ids=["sample", "many"])
def test_a_damaged_sidecar_is_built_anew(path: Path, tmp_path: Path, count: int) -> None:
    place = tmp_path / "sidecar"
    assert is_built(path, sidecar=place)
    sound = place.read_bytes()
    chance = random.Random(1)
    damaged = [sound[:nbytes] for nbytes in (0, 1, 255, 256, 1000, len(sound) - 1)] + [sound + b"\0"]
    for _ in range(count):
        data = bytearray(sound)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        damaged.append(bytes(data))
    for data in damaged:
        place.write_bytes(data)
        assert is_built(path, sidecar=place), "a damaged sidecar was used"
        assert place.read_bytes() == sound


def test_an_interrupted_build_leaves_nothing(path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        LmdbIndex.open(path, progress=stop)
    assert sorted(os.listdir(path)) == ["data.mdb", "lock.mdb"]


def test_damaged_data_leaves_no_sidecar(path: Path) -> None:
    data = path / "data.mdb"
    os.truncate(data, data.stat().st_size // 2)
    with pytest.raises(CorruptDatasetError):
        LmdbIndex.open(path)
    assert sorted(os.listdir(path)) == ["data.mdb", "lock.mdb"]
