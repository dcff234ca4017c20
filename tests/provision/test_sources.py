"""Sources read many samples at once, and are known again in other processes."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from data.databases import make, some_records
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image
from programs import run
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from fastensor.data import LmdbDataset
from fastensor.errors import DatasetChangedError, UnknownFilesystemError
from fastensor.provision.encoding import encode
from fastensor.provision.sources import File, FileSource, Source, as_source, fingerprint_of


class Numbers(Dataset[Any]):
    def __init__(self, count: int = 20, *, offset: int = 0) -> None:
        self.count = count
        self.offset = offset

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> Any:
        if not 0 <= position < self.count:
            raise IndexError(f"no number {position}")
        assert type(position) is int
        return {"x": torch.full((3,), position + self.offset), "label": (position, "text")}


class ManyNumbers(Numbers):
    def __getitems__(self, positions: Sequence[int]) -> list[Any]:
        return [self[position]["label"] for position in positions]


def test_map_style_datasets_are_read_unchanged() -> None:
    source = as_source(Numbers())
    assert isinstance(source, Source)
    assert len(source) == 20
    assert [sample["label"] for sample in source.read(np.array([3, 1]))] == [(3, "text"), (1, "text")]
    assert as_source(source) is source


def test_datasets_that_read_many_at_once_do() -> None:
    assert as_source(ManyNumbers()).read([3, 1]) == [(3, "text"), (1, "text")]
    wrong = ManyNumbers()
    wrong.__getitems__ = lambda positions: []  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"ManyNumbers.__getitems__ gave 0 samples of 2"):
        as_source(wrong).read([3, 1])


def test_errors_of_a_dataset_name_the_sample() -> None:
    with pytest.raises(IndexError) as raised:
        as_source(Numbers()).read([3, 99])
    assert raised.value.__notes__ == ["This was sample 99 of Numbers"]


def test_other_objects_are_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter([])

    for data in (Endless(), 5, iter([])):
        with pytest.raises(TypeError, match="map-style"):
            as_source(data)


@pytest.fixture
def lmdb_path(tmp_path: Path) -> Path:
    make(tmp_path / "lmdb", some_records(50).items())
    return tmp_path / "lmdb"


def test_lmdb(lmdb_path: Path) -> None:
    dataset = LmdbDataset(lmdb_path)
    source = pickle.loads(pickle.dumps(as_source(dataset)))
    assert source.read([7, 0]) == [dataset[7], dataset[0]]
    assert source.fingerprint() == dataset.content_id()


def test_hugging_face() -> None:
    dataset = datasets.Dataset.from_dict({"x": [[1, 2], [3], []], "y": ["a", "b", "c"]})
    source = as_source(dataset)
    assert source.read([2, 0]) == [{"x": [], "y": "c"}, {"x": [1, 2], "y": "a"}]
    assert source.fingerprint() == dataset._fingerprint
    assert as_source(dataset.select([1, 2])).fingerprint() != source.fingerprint()
    encode(source.read([0, 1, 2]))


def a_folder(root: Path) -> Path:
    for name, data in {"b/2.txt": b"two", "a/1.txt": b"one", "a/[x]*.txt": b"", "a/4.bin": b"not this"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "c.txt").mkdir()
    return root


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = a_folder(tmp_path)
    source = as_source(root / "**/*.txt")
    names = [str(root / name) for name in ("a/1.txt", "a/[x]*.txt", "b/2.txt")]
    assert source.read([2, 1, 0]) == [File(names[2], b"two"), File(names[1], b""), File(names[0], b"one")]
    monkeypatch.chdir(root)
    assert as_source("**/*.txt").fingerprint() == source.fingerprint()
    copy = a_folder(tmp_path / "copy")
    assert as_source(f"file://{copy}/**/*.txt").fingerprint() == source.fingerprint()
    (copy / "b/2.txt").write_bytes(b"four")
    changed = as_source(f"{copy}/**/*.txt")
    assert changed.fingerprint() != source.fingerprint()
    (copy / "b/2.txt").write_bytes(b"three")
    with pytest.raises(DatasetChangedError, match=r"2.txt had 4 bytes, now 5"):
        pickle.loads(pickle.dumps(changed)).read([2])


def test_one_file(tmp_path: Path) -> None:
    assert as_source(a_folder(tmp_path) / "a/1.txt").read([0])[0].data == b"one"


def test_remote_files() -> None:
    filesystem = MemoryFileSystem()
    for name in ("1.bin", "2.bin"):
        filesystem.pipe_file(f"/fastensor-sources/{name}", name.encode() * 3)
    source = as_source("memory://fastensor-sources/*.bin")
    assert source.read([1])[0].data == b"2.bin" * 3
    assert len(source.fingerprint()) == 32
    filesystem.rm("/fastensor-sources", recursive=True)
    with pytest.raises(FileNotFoundError):
        source.read([1])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file matches '.*nothing"):
        as_source(tmp_path / "nothing*")
    with pytest.raises(UnknownFilesystemError, match="unheard"):
        FileSource.matching("unheard://x/*")


FINGERPRINTS = """
import sys
sys.path[:0] = sys.argv[1:]
import numpy as np, torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from fastensor.provision.sources import as_source
numbers = TensorDataset(torch.arange(100).reshape(20, 5), torch.arange(20.0))
for dataset in (numbers, Subset(numbers, [3, 1]), ConcatDataset([numbers, numbers]), [{"a": "text", "b": None}]):
    print(as_source(dataset).fingerprint())
"""


def test_fingerprints_are_the_same_in_other_processes() -> None:
    numbers = TensorDataset(torch.arange(100).reshape(20, 5), torch.arange(20.0))
    all_of: list[Any] = [
        numbers,
        Subset(numbers, [3, 1]),
        ConcatDataset([numbers, numbers]),
        [{"a": "text", "b": None}],
    ]
    own = [as_source(dataset).fingerprint() for dataset in all_of]
    other = run("-c", FINGERPRINTS, *sys.path, cold=True, PYTHONHASHSEED="5")
    assert other.stdout.split() == own
    assert len(set(own)) == len(own)


def test_fingerprints_differ_if_samples_do() -> None:
    numbers = Numbers()
    datasets_: list[Any] = [
        numbers, Numbers(21), Numbers(offset=1), Subset(numbers, [0, 1]), Subset(numbers, [1, 0]),
        ConcatDataset([numbers, Numbers(1)]), ConcatDataset([Numbers(1), numbers]), [],
    ]  # fmt: skip
    assert len({fingerprint_of(dataset) for dataset in datasets_}) == len(datasets_)
    assert fingerprint_of(numbers) == fingerprint_of(Numbers())


def test_images_identify_a_dataset() -> None:
    images = [(Image.new("RGB", (4, 4), color), label) for label, color in enumerate(("red", "blue"))]
    assert fingerprint_of(images) == fingerprint_of(pickle.loads(pickle.dumps(images)))
    assert fingerprint_of(images) != fingerprint_of(images[::-1])


class SaysItself(Numbers):
    fingerprint = "numbers-v1"


class Unsteady(Numbers):
    def __getitem__(self, position: int) -> Any:
        return random.random()


def test_a_dataset_may_say_what_it_is() -> None:
    assert as_source(SaysItself()).fingerprint() == "numbers-v1"
    assert as_source(SaysItself(), fingerprint="v2").fingerprint() == "v2"
    assert as_source(Unsteady(), fingerprint="v2").fingerprint() == "v2"


def test_a_dataset_that_cannot_be_identified_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"sample 0 of Unsteady differs when it is read again.*after_cache"):
        as_source(Unsteady()).fingerprint()
    with pytest.raises(ValueError, match=r"pass fingerprint=.*type builtins.object"):
        as_source([object()]).fingerprint()
