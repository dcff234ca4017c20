"""Loaders give out each sample of an epoch once, wherever and by whomever it is resumed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from data.databases import make

from fastensor.data import LmdbDataset, LmdbLoader, decoders

COUNT = 103
DECODE = decoders.Chain((decoders.Array("<i8", (-1,)), decoders.tensor))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> LmdbDataset[torch.Tensor]:
    """The sample at each position is that number."""
    path = tmp_path_factory.mktemp("loader") / "db"
    records = [(b"%06d" % number, number.to_bytes(8, "little")) for number in range(COUNT)]
    return LmdbDataset(make(path, records), decode=DECODE)


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.ravel().tolist()]


def next_of(iterator: Iterator[torch.Tensor], count: int) -> list[int]:
    return numbers(next(iterator) for _ in range(count))


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_have_all_samples_in_new_orders(dataset: LmdbDataset[torch.Tensor], shuffle: Any, workers: int) -> None:
    loader = LmdbLoader(
        dataset, 10, shuffle=shuffle, block_size=4, blocks_per_group=3, num_workers=workers,
        persistent_workers=workers > 0,
    )  # fmt: skip
    epochs = [numbers(loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(COUNT))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == (1 if shuffle == "none" else 3)
    assert len(loader) == 11
    assert loader.progress.epoch == 2


@pytest.mark.parametrize(("workers", "then"), [(0, 2), (2, 0), (2, 1)])
def test_an_epoch_is_resumed_twice(dataset: LmdbDataset[torch.Tensor], workers: int, then: int) -> None:
    """With another number of workers, after batches that workers have read ahead and nobody was given."""
    loader = LmdbLoader(dataset, 10, num_workers=workers)
    list(loader)
    batches = iter(loader)
    taken = next_of(batches, 3)
    for count in (2, 6):
        state = json.loads(json.dumps(loader.state_dict()))
        loader = LmdbLoader(dataset, 10, num_workers=then)
        loader.load_state_dict(state)
        assert len(loader) == 11
        batches = iter(loader)
        taken += next_of(batches, count)
        assert len(loader) == 11
    assert next(batches, None) is None
    assert sorted(taken) == list(range(COUNT))
    assert taken == numbers(EpochOf(dataset, 1))


class EpochOf:
    """An epoch that nothing interrupts."""

    def __init__(self, dataset: LmdbDataset[torch.Tensor], epoch: int) -> None:
        self.loader = LmdbLoader(dataset, 10)
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.loader)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 3)])
def test_other_ranks_resume_an_epoch(dataset: LmdbDataset[torch.Tensor], before: int, after: int) -> None:
    loaders = [LmdbLoader(dataset, 5, ranks=(rank, before), shuffle="block") for rank in range(before)]
    taken = [number for loader in loaders for number in next_of(iter(loader), 4)]
    states = [loader.state_dict() for loader in loaders]
    assert states == states[:1] * before
    loaders = [LmdbLoader(dataset, 7, ranks=(rank, after), shuffle="block") for rank in range(after)]
    for loader in loaders:
        loader.load_state_dict(states[0])
        steps = len(loader) - 4
        batches = list(loader)
        assert len(batches) == steps
        taken += numbers(batches)
    assert sorted(taken) == list(range(COUNT))
    assert len({json.dumps(loader.state_dict()) for loader in loaders}) == 1


def test_who_was_told_of_a_shorter_epoch_is_warned(dataset: LmdbDataset[torch.Tensor]) -> None:
    """Lightning asks for the length of the epoch before it loads the state, and leaves the rest out."""
    loader = LmdbLoader(dataset, 10, ranks=(0, 1))
    next_of(iter(loader), 5)
    more_ranks = LmdbLoader(dataset, 10, ranks=(0, 2))
    assert len(more_ranks) == 6
    with pytest.warns(UserWarning, match=r"has 8 batches .* has 6.* loses the last 2: load the state before"):
        more_ranks.load_state_dict(loader.state_dict())


@pytest.mark.filterwarnings("error")
def test_who_can_know_the_length_of_an_epoch_is_not_warned(dataset: LmdbDataset[torch.Tensor]) -> None:
    loader = LmdbLoader(dataset, 10, ranks=(0, 2))
    next_of(iter(loader), 3)
    for ranks, asks in (((0, 2), True), ((0, 1), True), ((0, 3), False)):
        resumed = LmdbLoader(dataset, 10, ranks=ranks)
        if asks:
            assert len(resumed) == resumed.plan.steps()
        resumed.load_state_dict(loader.state_dict())
        assert len(resumed) == 3 + resumed.plan.steps(60)
        resumed.load_state_dict(loader.state_dict())


def test_the_state_of_a_whole_epoch_leads_to_the_next(dataset: LmdbDataset[torch.Tensor]) -> None:
    loader = LmdbLoader(dataset, 10)
    list(loader)
    state = loader.state_dict()
    resumed = LmdbLoader(dataset, 10)
    resumed.load_state_dict(state)
    assert len(resumed) == 11
    assert numbers(resumed) == numbers(loader) == numbers(EpochOf(dataset, 1))


def test_a_state_before_the_first_batch(dataset: LmdbDataset[torch.Tensor]) -> None:
    loader = LmdbLoader(dataset, 10)
    state = loader.state_dict()
    iter(loader)  # nothing is given out
    assert loader.state_dict() == state
    assert numbers(loader) == numbers(EpochOf(dataset, 0))


def test_an_epoch_that_is_given_up(dataset: LmdbDataset[torch.Tensor]) -> None:
    """The next iteration is another epoch, unless the same one is asked for."""
    loader = LmdbLoader(dataset, 10)
    next_of(iter(loader), 2)
    assert numbers(loader) == numbers(EpochOf(dataset, 1))
    next_of(iter(loader), 2)
    loader.set_epoch(2)
    assert numbers(loader) == numbers(EpochOf(dataset, 2))


def test_set_epoch_keeps_what_was_resumed(dataset: LmdbDataset[torch.Tensor]) -> None:
    loader = LmdbLoader(dataset, 10)
    loader.set_epoch(5)
    taken = next_of(iter(loader), 4)
    resumed = LmdbLoader(dataset, 10)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(5)
    assert sorted(taken + numbers(resumed)) == list(range(COUNT))


def test_states_of_other_orders_are_refused(dataset: LmdbDataset[torch.Tensor]) -> None:
    state = LmdbLoader(dataset, 10, seed=1).state_dict()
    with pytest.raises(ValueError, match="taken with seed 1, not 2: the order"):
        LmdbLoader(dataset, 10, seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="taken with shuffle 'full', not 'none'"):
        LmdbLoader(dataset, 10, seed=1, shuffle="none").load_state_dict(state)
    with pytest.raises(ValueError, match=r"taken with content '\w+', not '\w+'"):
        LmdbLoader(dataset.select(range(100)), 10, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"no state of an LmdbLoader: it lacks \['consumed'"):
        LmdbLoader(dataset, 10).load_state_dict({"content": "", "seed": 0, "shuffle": "full"})


def test_ranks_are_those_of_the_job(dataset: LmdbDataset[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    loader = LmdbLoader(dataset, 10)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert len(loader) == 4
    assert (loader.plan.rank, loader.plan.world_size) == (1, 3)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert (loader.plan.rank, loader.plan.world_size) == (0, 1)
    finally:
        dist.destroy_process_group()


class _Kill:
    """Kills the process that decodes a given number."""

    def __init__(self, number: int) -> None:
        self._number, self._parent = number, os.getpid()

    def __call__(self, value: memoryview) -> int:
        number = int.from_bytes(value, "little")
        if number == self._number and os.getpid() != self._parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return number


def test_a_worker_that_is_killed(dataset: LmdbDataset[torch.Tensor]) -> None:
    """The others do not wait for it."""
    deadly: LmdbDataset[int] = LmdbDataset(dataset.index, decode=_Kill(50))
    with pytest.raises(RuntimeError, match=r"is killed by signal|exited unexpectedly"):
        list(LmdbLoader(deadly, 10, shuffle="none", num_workers=2, collate_fn=list))  # lists need no descriptors


class Seen:
    """What a model was trained with."""

    def __init__(self) -> None:
        self.numbers: list[int] = []


def model_of(pl: Any, seen: Seen) -> Any:
    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            seen.numbers += batch.ravel().tolist()
            loss: torch.Tensor = self.layer(batch.float()).mean() * 1e-6
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    return Model()


def trained(
    dataset: LmdbDataset[torch.Tensor], folder: Path, steps: int, resumed: int = 0, batch: int = 10
) -> list[int]:
    """The numbers that a Trainer takes up to a step, from the checkpoint of an earlier one on."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    seen, loader = Seen(), LmdbLoader(dataset, batch)
    checkpoints = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=steps, max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[checkpoints],
    )  # fmt: skip
    trainer.fit(model_of(pl, seen), loader, ckpt_path=folder / f"step={resumed}.ckpt" if resumed else None)
    return seen.numbers


@pytest.mark.parametrize("steps", [4, 11, 15])
def test_lightning_resumes_within_an_epoch(dataset: LmdbDataset[torch.Tensor], tmp_path: Path, steps: int) -> None:
    """Interrupted and resumed, two epochs are those that nothing has interrupted."""
    whole = numbers(EpochOf(dataset, 0)) + numbers(EpochOf(dataset, 1))
    taken = trained(dataset, tmp_path, steps)
    taken += trained(dataset, tmp_path, steps + 3, steps)
    assert taken + trained(dataset, tmp_path, 22, steps + 3) == whole


def test_lightning_loses_the_end_of_an_epoch_of_fewer_batches_and_there_is_a_warning(
    dataset: LmdbDataset[torch.Tensor], tmp_path: Path
) -> None:
    taken = trained(dataset, tmp_path, 4)
    with pytest.warns(UserWarning, match="has 8 batches .* has 6.* loses the last 2"):
        taken += trained(dataset, tmp_path, 6, 4, batch=20)
    assert taken == numbers(EpochOf(dataset, 0))[:80]


def test_accelerate_leaves_the_loader_alone(dataset: LmdbDataset[torch.Tensor], tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerators import begin_anew

    def resumable() -> tuple[Any, Any]:
        begin_anew()
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(LmdbLoader(dataset, 10))
        accelerator.register_for_checkpointing(loader)
        return accelerator, loader

    accelerator, loader = resumable()
    assert isinstance(loader, LmdbLoader)
    taken = next_of(iter(loader), 3)
    accelerator.save_state(str(tmp_path))
    accelerator, loader = resumable()
    accelerator.load_state(str(tmp_path))
    assert sorted(taken + numbers(loader)) == list(range(COUNT))
    begin_anew()
