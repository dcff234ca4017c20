"""Loaders of epochs in Accelerate: on the device, resumed by load_state, with gradients accumulated to the end."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from data.databases import make

from fastensor.data import LmdbDataset, LmdbLoader, decoders
from fastensor_accelerate import prepare_loader

COUNT = 23


@pytest.fixture
def dataset(tmp_path: Path) -> LmdbDataset[torch.Tensor]:
    """The sample at each position is that number."""
    records = [(b"%06d" % number, number.to_bytes(8, "little")) for number in range(COUNT)]
    decode = decoders.Chain((decoders.Array("<i8", (-1,)), decoders.tensor))
    return LmdbDataset(make(tmp_path / "db", records), decode=decode)


def test_an_epoch_goes_on_where_its_state_was_saved(tmp_path: Path, dataset: LmdbDataset[torch.Tensor]) -> None:
    accelerator = Accelerator(cpu=True)
    loader = prepare_loader(accelerator, LmdbLoader(dataset, 4, seed=1))
    whole = [batch.ravel().tolist() for _ in range(2) for batch in loader]
    assert len(loader) == 6
    loader.set_epoch(0)
    seen = []
    for batch in loader:
        seen.append(batch.ravel().tolist())
        if len(seen) == 2:
            accelerator.save_state(str(tmp_path / "state"))
            break
    assert [batch.ravel().tolist() for batch in prepare_loader(Accelerator(cpu=True), LmdbLoader(dataset, 4, seed=1))]
    accelerator.load_state(str(tmp_path / "state"))
    seen += [batch.ravel().tolist() for _ in range(2) for batch in loader]
    assert seen == whole
    assert loader.state_dict() == loader.loader.state_dict()


def test_what_is_accumulated_ends_with_the_epoch(dataset: LmdbDataset[torch.Tensor]) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer = accelerator.prepare(layer := torch.nn.Linear(1, 1), torch.optim.SGD(layer.parameters(), lr=0.1))
    loader = prepare_loader(accelerator, LmdbLoader(dataset, 4))
    synced = []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch.float()).mean())
                optimizer.step()
                optimizer.zero_grad()
                synced.append(accelerator.sync_gradients)
    assert synced == [False, False, False, True, False, True] * 2


def test_an_iteration_that_is_left_leaves_nothing_behind(dataset: LmdbDataset[torch.Tensor]) -> None:
    accelerator = Accelerator(cpu=True)
    loader = prepare_loader(accelerator, LmdbLoader(dataset, 4))
    batches = iter(loader)
    next(batches)
    assert accelerator.gradient_state.in_dataloader
    batches.close()  # type: ignore[attr-defined]
    assert not accelerator.gradient_state.in_dataloader


def test_an_iterator_goes_on_behind_a_batch_that_raises(dataset: LmdbDataset[torch.Tensor]) -> None:
    accelerator = Accelerator(cpu=True)
    bad: LmdbDataset[int] = LmdbDataset(dataset.index, decode=_decoded_but_9)
    batches, found = iter(prepare_loader(accelerator, LmdbLoader(bad, 4, shuffle="none"))), []
    for _ in range(2):
        found += next(batches).tolist()
    with pytest.raises(ValueError, match="9 is broken"):
        next(batches)
    assert accelerator.gradient_state.in_dataloader
    ends = []
    for batch in batches:
        found += batch.tolist()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    assert found == [*range(8), *range(12, COUNT)]
    assert ends == [False, False, True]
    assert not accelerator.gradient_state.in_dataloader


def _decoded_but_9(value: memoryview) -> int:
    if value[0] == 9:
        raise ValueError("9 is broken")
    return value[0]


def test_an_iterator_that_is_at_its_end_stays_there(dataset: LmdbDataset[torch.Tensor]) -> None:
    loader = prepare_loader(Accelerator(cpu=True), LmdbLoader(dataset, 4))
    batches = iter(loader)
    assert len(list(batches)) == 6
    for _ in range(2):
        assert next(batches, None) is None
        assert loader.end_of_dataloader
        assert not loader.gradient_state.in_dataloader


class Unreachable(LmdbLoader):
    def __iter__(self) -> Any:
        raise OSError("no service")


@pytest.mark.filterwarnings("error")
def test_an_iteration_that_does_not_begin_leaves_nothing_behind(dataset: LmdbDataset[torch.Tensor]) -> None:
    loader = prepare_loader(Accelerator(cpu=True), Unreachable(dataset, 4))
    with pytest.raises(OSError, match="no service"):
        iter(loader)
    gc.collect()  # an error in __del__ is a warning of pytest
    assert not loader.gradient_state.in_dataloader


def test_batches_come_to_the_device(dataset: LmdbDataset[torch.Tensor]) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.state.device = torch.device("meta")
    assert {batch.device.type for batch in prepare_loader(accelerator, LmdbLoader(dataset, 4))} == {"meta"}
    kept = prepare_loader(accelerator, LmdbLoader(dataset, 4), device_placement=False)
    assert {batch.device.type for batch in kept} == {"cpu"}
