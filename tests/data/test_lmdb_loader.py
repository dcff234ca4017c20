"""Loaders give out each sample of an epoch once, wherever and by whomever it is resumed."""

from __future__ import annotations

import copy
import errno
import gc
import json
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from data.databases import make
from torch.utils.data import DataLoader

from fastensor.data import LmdbDataset, LmdbLoader, decoders
from fastensor.errors import DatasetChangedError

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


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("count", [1, 11])
def test_workers_of_a_loader_that_is_dropped_end_at_once(
    dataset: LmdbDataset[torch.Tensor], persistent: bool, count: int
) -> None:
    """The garbage collector is not needed: it would have torch wait for workers that are not told to end."""
    loader = LmdbLoader(dataset, 10, num_workers=2, persistent_workers=persistent)
    gc.collect()
    gc.disable()
    try:
        batches = iter(loader)
        next_of(batches, count)
        workers = multiprocessing.active_children()
        assert len(workers) == 2
        del loader, batches
        assert multiprocessing.active_children() == []
    finally:
        gc.enable()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_in_use_is_copied(dataset: LmdbDataset[torch.Tensor], workers: int) -> None:
    loader = LmdbLoader(dataset, 10, num_workers=workers)
    next_of(iter(loader), 3)
    found = numbers(pickle.loads(pickle.dumps(loader)))
    assert found == numbers(copy.deepcopy(loader))
    assert sorted(found) == list(range(COUNT))


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


class Failing:
    """Decodes numbers. Some raise an error, in whatever process decodes them."""

    def __init__(self, *bad: int, error: Callable[[str], BaseException] = OSError) -> None:
        self._bad, self._error = bad, error

    def __call__(self, value: memoryview) -> int:
        number = int.from_bytes(value, "little")
        if number in self._bad:
            raise self._error("broken image")
        return number


def failing(dataset: LmdbDataset[Any], *bad: int, error: Callable[[str], BaseException] = OSError) -> LmdbDataset[int]:
    return LmdbDataset(dataset.index, decode=Failing(*bad, error=error))


def taken_in_spite_of(batches: Iterator[Any], *errors: type[BaseException]) -> tuple[list[int], int]:
    """The numbers of the batches that raise no error, and how many do."""
    found: list[int] = []
    failures = 0
    while True:
        try:
            found += next(batches).tolist()
        except StopIteration:
            return found, failures
        except errors:
            failures += 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_goes_on_behind_a_batch_that_raises(dataset: LmdbDataset[Any], workers: int) -> None:
    """Like that of a ``DataLoader``. The batch counts as given out, also if it is the last one."""
    bad = failing(dataset, 37, 55, 102)
    loader = LmdbLoader(bad, 10, shuffle="none", num_workers=workers)
    found, failures = taken_in_spite_of(iter(loader), OSError)
    stock = taken_in_spite_of(iter(DataLoader(bad, 10, num_workers=workers)), OSError)
    assert (found, failures) == stock == ([*range(30), *range(40, 50), *range(60, 100)], 3)
    assert (loader.progress.epoch, loader.progress.consumed, loader.progress.steps) == (0, COUNT, 11)
    assert taken_in_spite_of(iter(loader), OSError) == stock
    assert loader.progress.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_behind_a_batch_that_raises_leads_to_the_next_one(dataset: LmdbDataset[Any], workers: int) -> None:
    loader = LmdbLoader(failing(dataset, 15), 10, shuffle="none", num_workers=workers)
    batches = iter(loader)
    next(batches)
    before = loader.state_dict()
    with pytest.raises(OSError, match="broken image"):
        next(batches)
    resumed = LmdbLoader(dataset, 10, shuffle="none", num_workers=workers)
    resumed.load_state_dict(loader.state_dict())
    assert numbers(resumed) == list(range(20, COUNT))
    resumed.load_state_dict(before)
    assert numbers(resumed) == list(range(10, COUNT))


def test_an_iterator_goes_on_after_an_interrupt(dataset: LmdbDataset[Any]) -> None:
    loader = LmdbLoader(failing(dataset, 37, error=KeyboardInterrupt), 10, shuffle="none")
    found, failures = taken_in_spite_of(iter(loader), KeyboardInterrupt)
    assert (found, failures) == ([*range(30), *range(40, COUNT)], 1)
    assert loader.progress.consumed == COUNT


class _Interrupts:
    """Interrupts the parent and ends its own process, as Ctrl-C in a terminal does, once."""

    def __init__(self, interrupted: Path) -> None:
        self._interrupted = interrupted

    def __call__(self, value: memoryview) -> int:
        if not self._interrupted.exists():
            self._interrupted.touch()
            os.kill(os.getppid(), signal.SIGINT)
            os._exit(0)
        return int.from_bytes(value, "little")


def test_an_interrupt_while_workers_are_waited_for_loses_no_batch(dataset: LmdbDataset[Any], tmp_path: Path) -> None:
    interrupting: LmdbDataset[int] = LmdbDataset(dataset.index, decode=_Interrupts(tmp_path / "interrupted"))
    loader = LmdbLoader(interrupting, 10, shuffle="none", num_workers=1)
    batches = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert loader.progress.consumed == 0
    assert numbers(batches) == list(range(COUNT))


class _KillsOnce(_Kill):
    """Kills the first process that decodes a given number."""

    def __init__(self, number: int, killed: Path) -> None:
        super().__init__(number)
        self._killed = killed

    def __call__(self, value: memoryview) -> int:
        number = int.from_bytes(value, "little")
        if number != self._number or self._killed.exists():
            return number
        self._killed.touch()
        return super().__call__(value)


@pytest.mark.parametrize("persistent", [False, True])
def test_only_one_batch_is_lost_with_a_worker(dataset: LmdbDataset[Any], tmp_path: Path, persistent: bool) -> None:
    """A ``DataLoader`` leaves out all that the worker has been asked for; with persistent workers, all that is left."""
    deadly: LmdbDataset[int] = LmdbDataset(dataset.index, decode=_KillsOnce(50, tmp_path / "killed"))
    loader = LmdbLoader(  # arrays need no descriptors
        deadly, 10, shuffle="none", num_workers=2, collate_fn=np.array, persistent_workers=persistent
    )
    found, failures = taken_in_spite_of(iter(loader), RuntimeError)
    assert failures == 1
    assert len(found) == len(set(found)) in (COUNT - 10, COUNT - 3)
    assert loader.progress.consumed == COUNT


def _raise_local_error(_: object) -> Any:
    class Local(Exception):  # as those of libraries in other languages
        pass

    raise Local("cannot be pickled")


def _decoded_but_37(value: memoryview) -> int:
    number = int.from_bytes(value, "little")
    return _raise_local_error(value) if number == 37 else number


def _collated_but_37(numbers: list[int]) -> Any:
    return _raise_local_error(numbers) if 37 in numbers else torch.tensor(numbers)


@pytest.mark.parametrize("by", ["decode", "collate_fn"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_error_that_cannot_be_pickled_does_not_hang(dataset: LmdbDataset[Any], by: str, on_error: Any) -> None:
    """A ``DataLoader`` would wait for the worker for ever."""
    decode = _decoded_but_37 if by == "decode" else failing(dataset).decode
    collate = _collated_but_37 if by == "collate_fn" else None
    loader = LmdbLoader(
        LmdbDataset(dataset.index, decode=decode), 10, shuffle="none", num_workers=1, collate_fn=collate,
        on_error=on_error,
    )  # fmt: skip
    batches = iter(loader)
    found = next_of(batches, 3)
    if (by, on_error) == ("decode", "skip"):
        assert numbers(batches) == [number for number in range(30, COUNT) if number != 37]
        return
    with pytest.raises(RuntimeError, match="Local: cannot be pickled"):
        next(batches)
    assert found + numbers(batches) == [*range(30), *range(40, COUNT)]


class _Hangs:
    """Does not decode a given number."""

    def __call__(self, value: memoryview) -> int:
        number = int.from_bytes(value, "little")
        if number == 15:
            threading.Event().wait()
        return number


@pytest.mark.torture
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_hangs_is_replaced_after_a_time(dataset: LmdbDataset[Any], persistent: bool) -> None:
    hanging: LmdbDataset[int] = LmdbDataset(dataset.index, decode=_Hangs())
    loader = LmdbLoader(hanging, 10, shuffle="none", num_workers=1, timeout=10, persistent_workers=persistent)
    batches = iter(loader)
    found = next_of(batches, 1)
    with pytest.raises(RuntimeError, match="timed out after 10"):
        next(batches)
    assert found + numbers(batches) == [*range(10), *range(20, COUNT)]


@pytest.mark.parametrize("workers", [0, 2])
def test_stop_iteration_of_a_decoder_is_an_error(dataset: LmdbDataset[Any], workers: int) -> None:
    """It would end the epoch, and nobody would notice."""
    loader = LmdbLoader(failing(dataset, 37, error=StopIteration), 10, shuffle="none", num_workers=workers)
    batches = iter(loader)
    next_of(batches, 3)
    with pytest.raises(RuntimeError, match="has raised StopIteration"):
        next(batches)
    assert numbers(batches) == list(range(40, COUNT))


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_samples_are_left_out(dataset: LmdbDataset[Any], workers: int, caplog: pytest.LogCaptureFixture) -> None:
    bad = [7, 37, 38, 102]
    loader = LmdbLoader(failing(dataset, *bad), 10, seed=3, on_error="skip", num_workers=workers)
    batches = iter(loader)
    taken = next_of(batches, 4)
    state = loader.state_dict()
    taken += numbers(batches)
    assert taken == [number for number in numbers(LmdbLoader(dataset, 10, seed=3)) if number not in bad]
    assert loader.skipped == len(bad)
    messages = sorted(record.getMessage() for record in caplog.records)
    assert len(messages) == len(bad)
    assert all("OSError: broken image" in message for message in messages)
    assert messages[0].startswith("sample 102 is left out of its batch")
    resumed = LmdbLoader(failing(dataset, *bad), 10, seed=3, on_error="skip")
    resumed.load_state_dict(state)
    rest = [len(batch) for batch in resumed]
    assert len(rest) == 7
    assert resumed.progress == loader.progress


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_without_a_sound_sample_gets_another_one(dataset: LmdbDataset[Any], workers: int) -> None:
    """All ranks have as many batches as ``len`` says."""
    ranks = [
        LmdbLoader(
            failing(dataset, *range(20, 40)), 10, shuffle="none", ranks=(rank, 2), on_error="skip", num_workers=workers
        )
        for rank in range(2)
    ]
    found = [[batch.tolist() for batch in loader] for loader in ranks]
    assert [len(batches) for batches in found] == [len(loader) for loader in ranks] == [6, 6]
    assert [len(batches[1]) for batches in found] == [1, 1]
    taken = [number for batches in found for number, batch in enumerate(batches) if number != 1 for number in batch]
    assert sorted(taken) == [*range(20), *range(40, COUNT)]
    assert not set(found[0][1] + found[1][1]) & set(range(20, 40))
    assert [loader.skipped for loader in ranks] == [10, 10]
    assert ranks[0].state_dict() == ranks[1].state_dict()


def test_a_dataset_without_a_sound_sample_is_an_error(dataset: LmdbDataset[Any]) -> None:
    loader = LmdbLoader(failing(dataset, *range(COUNT)), 10, on_error="skip")
    with pytest.raises(OSError, match="broken image") as raised:
        next(iter(loader))
    assert any("16 others of the dataset: on_error='skip'" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("error", [MemoryError, DatasetChangedError])
def test_no_sample_is_left_out_for_an_error_that_concerns_all(
    dataset: LmdbDataset[Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        list(LmdbLoader(failing(dataset, 37, error=error), 10, on_error="skip"))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.EMFILE])
@pytest.mark.parametrize("workers", [0, 2])
def test_no_sample_is_left_out_when_the_filesystem_or_the_machine_fails(
    dataset: LmdbDataset[Any], number: int, workers: int
) -> None:
    loader = LmdbLoader(failing(dataset, 37, error=partial(OSError, number)), 10, on_error="skip", num_workers=workers)
    found, failures = taken_in_spite_of(iter(loader), OSError)
    assert (len(found), failures, loader.skipped) == (COUNT - 10, 1, 0)


def test_a_sample_whose_file_is_missing_is_left_out(dataset: LmdbDataset[Any]) -> None:
    loader = LmdbLoader(failing(dataset, 37, error=partial(OSError, errno.ENOENT)), 10, on_error="skip")
    assert len(numbers(loader)) == COUNT - 1


def no_batch(samples: list[int]) -> Any:
    raise LookupError(f"no batch of {len(samples)}")


def test_an_error_of_the_collate_function_is_raised(dataset: LmdbDataset[Any]) -> None:
    with pytest.raises(LookupError, match="no batch of 10"):
        next(iter(LmdbLoader(failing(dataset), 10, on_error="skip", collate_fn=no_batch)))


def test_many_broken_samples_are_logged_with_a_limit(
    dataset: LmdbDataset[Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = LmdbLoader(failing(dataset, *range(0, COUNT, 2)), 10, shuffle="none", on_error="skip")
    for _ in range(4):
        assert len(numbers(loader)) == COUNT // 2
    assert loader.skipped == 4 * 52
    assert len(caplog.records) == 10 + len((16, 32, 64, 128))


def test_on_error_is_one_of_two_words(dataset: LmdbDataset[Any]) -> None:
    with pytest.raises(ValueError, match=r"on_error is one of \('raise', 'skip'\), found 'ignore'"):
        LmdbLoader(dataset, on_error="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_of_two_iterations_the_older_one_raises(dataset: LmdbDataset[torch.Tensor], workers: int) -> None:
    """They would count the samples of both."""
    loader = LmdbLoader(dataset, 10, num_workers=workers)
    with pytest.raises(RuntimeError, match="another iteration over this loader has begun"):
        list(zip(loader, loader, strict=True))
    older = iter(loader)
    taken = next_of(older, 2)
    newer = iter(loader)
    with pytest.raises(RuntimeError, match="make a loader for each iteration"):
        next(older)
    assert numbers(newer) == numbers(EpochOf(dataset, loader.progress.epoch))
    assert len(taken) == 20
    loader.set_epoch(7)
    assert next(newer, None) is None  # it has ended before


def test_an_iteration_does_not_go_on_where_its_loader_was_told_to(dataset: LmdbDataset[torch.Tensor]) -> None:
    loader = LmdbLoader(dataset, 10)
    state = loader.state_dict()
    for elsewhere in (lambda: loader.set_epoch(5), lambda: loader.load_state_dict(state)):
        batches = iter(loader)
        next(batches)
        elsewhere()
        with pytest.raises(RuntimeError, match="was told to go on elsewhere"):
            next(batches)
    batches = iter(loader)
    loader.set_epoch(3)  # before the first batch
    assert numbers(batches) == numbers(EpochOf(dataset, 3))


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_a_forked_child_takes_no_batch_of_its_parent(
    dataset: LmdbDataset[torch.Tensor], workers: int, persistent: bool
) -> None:
    loader = LmdbLoader(dataset, 10, num_workers=workers, persistent_workers=persistent)
    batches = iter(loader)
    taken = next_of(batches, 2)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_answer_in_child, args=(loader, batches, answers), daemon=False)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == (numbers(batches), numbers(EpochOf(dataset, 1)))
    assert sorted(taken) == sorted(numbers(EpochOf(dataset, 0))[:20])
    assert numbers(loader) == numbers(EpochOf(dataset, 1))


def _answer_in_child(loader: LmdbLoader, batches: Iterator[torch.Tensor], answers: Any) -> None:
    torch.set_num_threads(1)
    answers.put((numbers(batches), numbers(loader)))


def test_a_state_that_says_what_cannot_be_is_refused(dataset: LmdbDataset[torch.Tensor]) -> None:
    loader = LmdbLoader(dataset, 10)
    next_of(iter(loader), 2)
    state = loader.state_dict()
    for wrong, words in (
        ({"consumed": COUNT + 1}, r"104 samples of the epoch were given out, and there are 103"),
        ({"consumed": -1}, "consumed in a state is 0 or more, found -1"),
        ({"epoch": -1}, "epoch in a state is 0 or more, found -1"),
        ({"steps": 2.5}, "steps in a state is a whole number, found 2.5"),
        ({"consumed": None}, "consumed in a state is a whole number, found None"),
    ):
        with pytest.raises(ValueError, match=words):
            loader.load_state_dict({**state, **wrong})
    assert loader.state_dict() == state
    loader.load_state_dict({**state, "consumed": torch.tensor(COUNT), "epoch": np.int32(3)})
    assert numbers(loader) == numbers(EpochOf(dataset, 4))


def test_integers_of_numpy_are_whole_numbers(dataset: LmdbDataset[torch.Tensor]) -> None:
    """They would overflow, and a state would not be JSON."""
    ranks = (np.uint8(1), np.uint8(2))
    loader = LmdbLoader(dataset, np.uint8(200), seed=np.int64(1), ranks=ranks)  # type: ignore[arg-type]
    assert loader.plan.step_size == 400
    loader.set_epoch(np.uint8(3))  # type: ignore[arg-type]
    next_of(iter(loader), 1)
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
    for wrong, error in ((-1, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match="epoch is"):
            loader.set_epoch(wrong)  # type: ignore[arg-type]


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
