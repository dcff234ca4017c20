"""Batches of samples that were read just now, and of those that the cache has."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fastensor.data.ring import shared_memory
from fastensor.provision import encoding
from fastensor.provision.cache import kept_nbytes
from fastensor.provision.embedded.worker import ServiceWorker
from fastensor.provision.making import Fresh, MadeBatch, Sample, UserObjects, made_batch, read_samples
from fastensor.provision.sources import DatasetSource

N = 6
MEMORY = torch.zeros(4)


class Rows:
    """Samples are views of memory that the dataset keeps."""

    def __init__(self) -> None:
        self.rows = torch.arange(4 * N, dtype=torch.float32).reshape(N, 4)

    def __len__(self) -> int:
        return N

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"id": position, "row": self.rows[position], "array": self.rows[position].numpy()}


def batch_of(contents: UserObjects, samples: list[Sample], collate_fn: Callable[[list[Any]], Any] | None = None) -> Any:
    made: MadeBatch = made_batch(
        samples, np.arange(N), contents=lambda: contents, collate_fn=collate_fn, seed=0, epoch=0, source_seed=0
    )
    memory = memoryview(bytearray(made.encoded.nbytes))
    made.encoded.write_into(memory)
    return encoding.decode(memory)


def read(contents: UserObjects) -> list[Sample]:
    return read_samples(lambda: contents, np.arange(N), seed=0)


def twice(sample: dict[str, Any], memory: torch.Tensor = MEMORY) -> dict[str, Any]:
    """A transform that uses its memory again for each sample."""
    torch.mul(sample["row"], 2, out=memory)
    return {**sample, "row": memory}


def add(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform that writes to its sample."""
    sample["row"] += 1
    return sample


def add_to_all(samples: list[dict[str, Any]]) -> Any:
    return torch.stack([add(sample)["row"] for sample in samples])


def test_samples_that_were_read_just_now_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    contents, rows = UserObjects(DatasetSource(Rows(), "rows"), None, None), Rows().rows
    samples = read(contents)
    decode = encoding.decode

    def only_batches(memory: memoryview) -> Any:
        assert len(decode(memory)["id"]) == N
        return decode(memory)

    monkeypatch.setattr(encoding, "decode", only_batches)
    batch = batch_of(contents, samples)
    assert batch["id"].tolist() == list(range(N))
    assert torch.equal(batch["row"], rows)
    assert torch.equal(batch["array"], rows)


ROWS = np.arange(4.0 * N, dtype=np.float32).reshape(N, 4)
FIELDS = np.zeros((N, 4), [("odd", np.uint8), ("row", np.float32)])
FIELDS["row"] = ROWS


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        ROWS[:, ::-1],
        FIELDS["row"],
        np.frombuffer(ROWS.tobytes(), np.float32).reshape(N, 4),
        np.asfortranarray(ROWS),
    ],
    ids=["usual", "reversed", "field", "read-only", "columns"],
)
def test_it_makes_no_difference_whether_samples_come_from_the_cache(rows: np.ndarray[Any, Any]) -> None:
    contents = UserObjects(DatasetSource([{"row": row} for row in rows], "rows"), None, None)
    fresh = read(contents)
    cached = [encoded.encoded if isinstance(encoded, Fresh) else encoded for encoded in fresh]
    for samples in (fresh, cached):
        assert np.array_equal(batch_of(contents, samples)["row"], rows)


@pytest.mark.parametrize("taken", [0, 1, 250, 1000])
def test_what_a_call_does_not_write_to_the_cache_is_copied(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    fd, slabs = shared_memory("test", 4096)
    samples = [memoryview(bytes([number]) * 200) for number in (1, 2, 3, 4)]
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset: os.pwrite(fd, b"".join(pieces)[:taken], offset))
    worker = ServiceWorker(mock.Mock(), -1, fd, slabs, seed=0)
    worker._to_be_stored[0] = samples
    offsets = np.array([0, kept_nbytes(200), -1, 2048])
    worker._store(0, offsets)
    for offset, sample in zip(offsets.tolist(), samples, strict=True):
        assert offset < 0 or slabs[offset : offset + 200] == sample
    slabs.release()
    os.close(fd)


def test_a_transform_before_the_cache_may_use_its_memory_again() -> None:
    contents = UserObjects(DatasetSource(Rows(), "rows"), twice, None)
    assert torch.equal(batch_of(contents, read(contents))["row"], 2 * Rows().rows)


@pytest.mark.parametrize(("after_cache", "collate_fn"), [(add, None), (None, add_to_all)])
def test_functions_that_write_to_samples_change_neither_the_dataset_nor_the_cache(
    after_cache: Callable[[Any], Any] | None, collate_fn: Callable[[list[Any]], Any] | None
) -> None:
    dataset, rows = Rows(), Rows().rows
    contents = UserObjects(DatasetSource(dataset, "rows"), None, after_cache)
    samples = read(contents)
    for _ in range(2):
        batch = batch_of(contents, samples, collate_fn)
        assert torch.equal(batch if after_cache is None else batch["row"], rows + 1)
    assert torch.equal(dataset.rows, rows)
