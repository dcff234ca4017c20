"""Each sample once per epoch, as it is in the source, whatever the cache, the ranks and the workers; and read once."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import Program
from provision.conftest import wait_until, warm_starts, workers_of
from provision.datasets import (
    Interrupts,
    Numbers,
    Refuses,
    Waits,
    foreign_with_5,
    ids_only,
    mark_after,
    mark_before,
    reads_in,
)
from torch.utils.data import DataLoader

from fastensor.data import EpochPlan, processes, ring
from fastensor.data.connection import ConnectionLost
from fastensor.errors import UnsupportedSampleError
from fastensor.files import progress_bar
from fastensor.provision import BatchError, DataService, ProvisionError
from fastensor.provision.embedded import client
from fastensor.provision.embedded.protocol import AskStatus, Hello
from fastensor.provision.engine import EngineLost, Registration
from fastensor.provision.loader import DeviceCopies, ProvisionedLoader
from fastensor.provision.service import NAME_VARIABLE, show_filling

N = 60
Start = Callable[..., DataService]


@pytest.fixture
def start(folder: Path, warm_services: list[Program]) -> Iterator[Start]:
    """Starts services, which end with the test."""
    services: list[DataService] = []

    def start(source: Any = None, *, cache_bytes: int = 1 << 20, workers: int = 2, **options: Any) -> DataService:
        found = Numbers(N, folder) if source is None else source
        services.append(DataService.start(found, cache_bytes=cache_bytes, workers=workers, **options))
        return services[-1]

    yield start
    for service in services:
        service.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataService]:
    """A service of all tests that only use it."""
    source = Numbers(N, tmp_path_factory.mktemp("shared"))
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        warm_starts(monkeypatch),
        DataService.start(source, cache_bytes=1 << 20, workers=2) as service,
    ):
        yield service


def ids(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


def ids_one_by_one(batches: Any) -> Iterator[int]:
    for batch in batches:
        yield from batch["id"].tolist()


def test_batches_are_those_of_a_data_loader(shared: DataService, folder: Path) -> None:
    dataset = Numbers(N, folder)
    loader = shared.loader(8, seed=3)
    assert len(loader) == 8
    for epoch in range(3):
        expected = DataLoader(dataset, batch_sampler=list(EpochPlan(N, seed=3, batch_size=8).batches(epoch)))
        for found, wanted in zip(loader, expected, strict=True):
            assert torch.equal(found["id"], wanted["id"])
            assert torch.equal(found["bytes"], wanted["bytes"])


def test_samples_are_read_once_for_all_epochs_and_ranks(start: Start, folder: Path) -> None:
    service = start()
    for _ in range(3):
        loaders = [service.loader(4, ranks=(rank, 2), seed=1) for rank in range(2)]
        found = [number for pair in zip(*loaders, strict=True) for batch in pair for number in batch["id"].tolist()]
        assert sorted(found) == list(range(N))
    assert set(reads_in(folder).values()) == {1}
    assert service.status()["hits"] > N


def test_transforms_do_not_depend_on_the_worker(start: Start, folder: Path) -> None:
    def values(service: DataService) -> list[list[tuple[float, ...]]]:
        loader = service.loader(7, seed=5)
        return [
            sorted(zip(*(batch[name].tolist() for name in ("id", "before", "after")), strict=True))
            for _ in range(2)
            for batch in loader
        ]

    options = {"before_cache": mark_before, "after_cache": mark_after}
    found = [
        values(start(workers=1, name="a", **options)),
        values(start(workers=3, name="b", cache_bytes=0, **options)),
    ]
    assert found[0] == found[1]
    first, second = ({one[0]: one for batch in epoch for one in batch} for epoch in (found[0][:9], found[0][9:]))
    assert all(first[number][1] == second[number][1] for number in range(N))
    assert all(first[number][2] != second[number][2] for number in range(N))


def test_functions_that_change_samples_change_no_others(start: Start) -> None:
    loader = start(after_cache=mark_after).loader(7)
    for _ in range(3):
        for batch in loader:
            expected = (batch["id"] % 251 + 1)[:, None].expand(-1, 1000)
            assert torch.equal(batch["bytes"].long(), expected)


@pytest.mark.parametrize(("ranks", "size"), [(1, 13), (3, 4), (5, 1)])
def test_an_epoch_goes_on_with_other_ranks(shared: DataService, ranks: int, size: int) -> None:
    service = shared
    loader, found = service.loader(8, seed=2, ranks=(0, 1)), []
    for number, batch in enumerate(loader, 1):
        found += batch["id"].tolist()
        if number == 3:
            break
    state = loader.state_dict()
    assert (state["epoch"], state["consumed"]) == (0, 24)
    others = [service.loader(size, seed=2, ranks=(rank, ranks)) for rank in range(ranks)]
    for other in others:
        other.load_state_dict(state)
    batches = list(zip(*others, strict=True))
    half = len(batches) // 2
    found += ids(batch for step in batches[:half] for batch in step)
    assert {str(other.state_dict()) for other in others} == {str(others[0].state_dict())}
    found += ids(batch for step in batches[half:] for batch in step)
    assert set(found) == set(range(N))
    left = (N - 24) % (size * ranks)
    repeated = ranks - left if 0 < left < ranks else 0
    assert len(found) == N + repeated
    assert sorted(ids(service.loader(size, seed=2, ranks=(0, 1)))) == list(range(N))


def test_a_second_resume_in_one_epoch(shared: DataService) -> None:
    service, found, state = shared, [], None
    for size in (7, 5, 20):
        loader = service.loader(size, seed=4)
        if state is not None:
            loader.load_state_dict(state)
        for number, batch in enumerate(loader):
            found += batch["id"].tolist()
            if number == 1 and size != 20:
                break
        state = loader.state_dict()
    assert sorted(found) == list(range(N))
    loader.load_state_dict(state)
    assert sorted(ids(loader)) == list(range(N))
    assert loader.state_dict()["epoch"] == 1


def test_epochs_that_are_left_begin_anew(shared: DataService) -> None:
    loader = shared.loader(6, seed=1)
    for _ in range(2):
        next(iter(loader))
    order = EpochPlan(N, seed=1).order(2).tolist()
    assert ids(loader) == order
    loader.set_epoch(7)
    assert ids(loader) == EpochPlan(N, seed=1).order(7).tolist()


def test_a_state_of_other_samples_is_refused(shared: DataService) -> None:
    loader = shared.loader(6)
    with pytest.raises(ValueError, match=r"content 'other', not 'numbers-60-1000'"):
        loader.load_state_dict({**loader.state_dict(), "content": "other"})
    with pytest.raises(ValueError, match=r"no state of a ProvisionedLoader: it lacks \['consumed'"):
        loader.load_state_dict({})


@pytest.mark.parametrize("part", [0.3, 0.8])
def test_a_small_cache_keeps_what_is_used_soonest(start: Start, folder: Path, part: float) -> None:
    """Belady: of the samples that the cache holds at the end of an epoch, those that the next one begins with."""
    nbytes = 64 << 10
    service = start(Numbers(N, folder, nbytes=nbytes), cache_bytes=int(part * N * (nbytes + 4096)), workers=1)
    loader = service.loader(4, seed=1, ahead=2)
    epochs = 4
    for _ in range(epochs):
        assert sorted(ids(loader)) == list(range(N))
    status = service.status()
    assert status["evictions"] > 0
    assert sum(reads_in(folder).values()) <= N + (epochs - 1) * N * (1 - part) * 1.5 + 3 * N * (1 - part)
    assert status["cached_samples"] > 0.5 * part * N


def test_no_cache(start: Start, folder: Path) -> None:
    loader = start(cache_bytes=0).loader(8)
    assert sorted(ids(loader)) == sorted(ids(loader)) == list(range(N))
    assert loader.stats().given.hits == 0
    assert min(reads_in(folder).values()) >= 2


def test_preloading_fills_the_cache(start: Start, folder: Path) -> None:
    service = start()
    service.preload(seed=1)
    while service.status()["cached_samples"] < N:
        pass
    loader = service.loader(8, seed=1)
    assert sorted(ids(loader)) == list(range(N))
    given = loader.stats().given
    assert (given.samples, given.hits, given.read_nbytes) == (N, N, 0)
    assert given.waits.count == given.batches == 8


def test_batches_may_be_kept_and_written_to(start: Start, folder: Path) -> None:
    """More than the buffer holds."""
    loader = start(Numbers(N, folder, nbytes=20_000)).loader(5, buffer_bytes=300_000)
    for _ in range(2):
        kept: list[Any] = []
        for batch in loader:
            batch["bytes"] += 1
            kept.append(batch)
        for batch in kept:
            assert torch.equal(batch["bytes"].long(), (batch["id"] % 251 + 1)[:, None].expand(-1, 20_000))
        assert sorted(ids(kept)) == list(range(N))


def test_a_batch_that_is_larger_than_the_buffer(start: Start, folder: Path) -> None:
    loader = start(Numbers(N, folder, nbytes=20_000)).loader(20, buffer_bytes=4096)
    assert sorted(ids(loader)) == list(range(N))


def test_samples_that_are_larger_than_the_cache(start: Start, folder: Path) -> None:
    loader = start(Numbers(N, folder, nbytes=20_000), cache_bytes=1 << 14).loader(20)
    assert sorted(ids(loader)) == list(range(N))


def test_collate_functions_run_in_workers(start: Start) -> None:
    service = start(workers=1)
    batches = list(service.loader(8, collate_fn=ids_only))
    assert sorted(number for batch in batches for number in batch["id"]) == list(range(N))
    assert {batch["process"] for batch in batches} == {service.status()["workers"][0]["pid"]}
    with pytest.raises(ProvisionError, match="top of a module"):
        next(iter(service.loader(8, collate_fn=lambda samples: samples)))


def test_an_error_is_raised_in_its_turn_with_the_traceback_of_the_worker(start: Start, folder: Path) -> None:
    order = EpochPlan(N, seed=1).order(0)
    (folder / f"fail-{order[20]}").touch()
    loader, found, state = start().loader(8, seed=1), [], {}

    def take_all(batches: Iterator[Any]) -> None:
        while True:
            state.update(loader.state_dict())
            found.extend(next(batches)["id"].tolist())

    batches = iter(loader)
    with pytest.raises(BatchError, match=rf"(?s)datasets.py.*ValueError: sample {order[20]} is bad"):
        take_all(batches)
    assert found == order[:16].tolist()
    assert ids(batches) == order[24:].tolist()
    (folder / f"fail-{order[20]}").unlink()
    loader.load_state_dict(state)  # it is tried again
    assert ids(loader) == order[16:].tolist()


def test_an_iterator_goes_on_behind_batches_that_cannot_be_made(start: Start, folder: Path) -> None:
    """They count as given out, also if they are the first and the last one of an epoch."""
    plan = EpochPlan(N, seed=1, batch_size=8)
    order = plan.order(0).tolist()
    bad = {order[0], order[30], order[-1]}
    for position in bad:
        (folder / f"fail-{position}").touch()
    loader, failures = start().loader(8, seed=1), 0
    for epoch in range(2):
        batches, found = iter(loader), []
        while loader.progress.consumed < N or loader.progress.epoch < epoch:
            try:
                found += next(batches)["id"].tolist()
            except BatchError:
                failures += 1
        assert next(batches, None) is None
        sound = (batch.tolist() for batch in plan.batches(epoch) if bad.isdisjoint(batch.tolist()))
        assert found == [number for batch in sound for number in batch]
    assert loader.stats().recoveries == 0
    assert loader.stats().given.batches == 2 * 8 - failures


def test_broken_samples_are_left_out(start: Start, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those that cannot be read, and those that transforms refuse."""
    order = EpochPlan(N, seed=1).order(0).tolist()
    read, before, after = order[3], order[20], order[21]
    (folder / f"fail-{read}").touch()
    service = start(before_cache=Refuses("before", before), after_cache=Refuses("after", after))
    loader = service.loader(8, seed=1, on_error="skip")
    sizes = []
    found = []
    for batch in loader:
        sizes.append(len(batch["id"]))
        found += batch["id"].tolist()
    assert found == [number for number in order if number not in (read, before, after)]
    assert sizes == [7, 8, 6, 8, 8, 8, 8, 4]
    assert (loader.skipped, loader.stats().given.skipped, loader.stats().given.samples) == (3, 3, N - 3)
    assert "Samples left out: 3, of them 3 in the epoch." in str(loader.stats())
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(" is left out")[0] for text in texts] == [f"sample {one}" for one in (read, before, after)]
    assert f"ValueError: sample {read} is bad" in texts[0]
    assert f"ValueError: {before} is refused before" in texts[1]
    assert service.status()["loaders"][0]["skipped"] >= 3  # the next epoch is in the making
    assert sorted(ids(loader)) == sorted(found)
    other = service.loader(8, seed=1)
    with pytest.raises(BatchError, match="is bad"):
        list(other)


@pytest.mark.parametrize("after", [False, True])
def test_a_batch_without_a_sound_sample_gets_another_one(start: Start, folder: Path, after: bool) -> None:
    """All ranks have as many batches as ``len`` says, and resume where they are."""
    bad = range(8, 24)
    for position in () if after else bad:
        (folder / f"fail-{position}").touch()
    service = start(after_cache=Refuses("after", *bad) if after else None)
    ranks = [service.loader(8, shuffle="none", ranks=(rank, 2), on_error="skip") for rank in range(2)]
    found = [[batch["id"].tolist() for batch in loader] for loader in ranks]
    assert [[len(batch) for batch in batches] for batches in found] == [[8, 1, 8, 6], [1, 8, 8, 6]]
    assert not {number for batches in found for batch in batches for number in batch} & set(bad)
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert sum(loader.stats().given.samples for loader in ranks) == N - len(bad) + 2


def test_a_source_without_a_sound_sample_is_an_error(start: Start) -> None:
    loader = start(after_cache=Refuses("after", *range(N))).loader(8, on_error="skip")
    with pytest.raises(BatchError, match=r"(?s)is refused after.*on_error='skip' does not leave out all"):
        next(iter(loader))


def test_on_error_is_one_of_two_words(shared: DataService) -> None:
    with pytest.raises(ValueError, match=r"on_error is one of \('raise', 'skip'\), found 'ignore'"):
        shared.loader(on_error="ignore")  # type: ignore[arg-type]


def test_a_batch_that_does_not_come_is_an_error(start: Start, folder: Path) -> None:
    """The service answers meanwhile. The iterator goes on behind that batch."""
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    service = start(after_cache=Waits(5, fifo), workers=1)
    loader = service.loader(8, shuffle="none", timeout=0.5)
    batches = iter(loader)
    for _ in range(2):
        with pytest.raises(BatchError, match=r"within 0.5 s, although the service answers: .*loader\(timeout=\)"):
            next(batches)
    assert loader.progress.consumed == 16
    with fifo.open("wb"):
        fifo.unlink()  # in the next epoch nothing waits any more
    state, loader._timeout = loader.state_dict(), 60
    assert ids(batches) == list(range(16, N))
    assert loader.stats().repeated == 0  # what came too late came once
    other = service.loader(8, shuffle="none")
    other.load_state_dict(state)
    assert ids(other) == list(range(16, N))
    assert loader.stats().recoveries == 0
    for wrong, error in ((0, ValueError), ("soon", TypeError)):
        with pytest.raises(error, match="timeout is a number of seconds"):
            service.loader(8, timeout=wrong)


def test_no_batch_is_lost_by_an_interrupt(start: Start, folder: Path) -> None:
    order = EpochPlan(N, seed=1).order(0).tolist()
    loader = start(after_cache=Interrupts(order[0], os.getpid(), folder / "interrupted")).loader(8, seed=1)
    batches = iter(loader)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert loader.progress.consumed == 0
    assert ids(batches) == order


@pytest.mark.parametrize("where", ["_sort_in", "_count", "_pass"])
def test_a_batch_that_has_come_is_not_lost_by_an_interrupt(
    start: Start, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for again, and not waited for in vain."""
    loader = start(workers=1).loader(8, shuffle="none", timeout=20)
    batches = iter(loader)
    next(batches)
    do = getattr(ProvisionedLoader, where)

    def interrupted(self: ProvisionedLoader, *args: Any) -> Any:
        if args == (None,):  # nothing has come yet
            return do(self, None)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(ProvisionedLoader, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert loader.progress.consumed == 8
    assert ids(batches) == list(range(8, N))


def test_a_batch_that_cannot_be_decoded_counts_as_given_out(start: Start) -> None:
    loader = start().loader(4, shuffle="none", collate_fn=foreign_with_5)
    batches = iter(loader)
    found = next(batches)["id"].tolist()
    with pytest.raises(UnsupportedSampleError, match="only_in_workers"):
        next(batches)
    assert loader.progress.consumed == 8
    assert found + ids(batches) == [*range(4), *range(8, N)]
    assert loader.stats().repeated == 0


def test_a_batch_that_cannot_be_copied_counts_as_given_out(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = start().loader(8, shuffle="none", device="meta")
    batches = iter(loader)
    next(batches)
    monkeypatch.setattr(DeviceCopies, "__call__", raise_memory_error)
    with pytest.raises(MemoryError):
        next(batches)
    monkeypatch.undo()
    assert loader.progress.consumed == 16
    assert len(list(batches)) == 6
    assert loader.stats().repeated == 0


def raise_memory_error(copies: DeviceCopies, batch: Any) -> Any:
    raise MemoryError("no memory is left to be pinned")


def test_of_two_iterations_the_older_one_raises(shared: DataService) -> None:
    loader = shared.loader(8)
    with pytest.raises(RuntimeError, match="another iteration over this loader has begun"):
        list(zip(loader, loader, strict=True))
    assert sorted(ids(loader)) == list(range(N))


def test_a_state_beyond_the_end_is_refused(shared: DataService) -> None:
    loader = shared.loader(8)
    with pytest.raises(ValueError, match="61 samples of the epoch were given out, and there are 60"):
        loader.load_state_dict({**loader.state_dict(), "consumed": N + 1})


def test_services_and_loaders_show_themselves_without_asking(start: Start) -> None:
    service = start(list(range(10)))
    loader = service.loader(4, shuffle="none")
    assert repr(service) == "<DataService of 10 samples: 2 workers, a cache of 1 MiB>"
    shown = "<ProvisionedLoader of 10 samples, 4 a batch, shuffle 'none': epoch 0"
    assert repr(loader) == f"{shown}, 0 samples given out>"
    assert len(list(loader)) == 3
    assert repr(loader) == f"{shown}, 10 samples given out>"
    service.stop()
    assert repr(service) == "<DataService of 10 samples: 2 workers, a cache of 1 MiB, left>"
    assert repr(loader) == f"{shown}, 10 samples given out>"


def test_integers_of_numpy_are_whole_numbers(start: Start) -> None:
    service = start(cache_bytes=np.int64(1 << 20), workers=np.uint8(1), seed=np.int32(3))
    service.preload(epoch=np.int64(2))
    loader = service.loader(np.uint8(8), seed=np.int64(1), ahead=np.int32(4), buffer_bytes=np.int64(1 << 20))
    loader.set_epoch(np.int64(2))
    assert ids(loader) == EpochPlan(N, seed=1).order(2).tolist()
    with pytest.raises(ValueError, match="epoch is at least 0"):
        service.preload(epoch=-1)


def in_forked_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a forked child."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(function()))
    child.start()
    try:
        child.join(30)
        assert child.exitcode == 0
        return answers.get()
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("is_new", [False, True])
def test_a_forked_child_takes_no_batch_of_its_parent(shared: DataService, is_new: bool) -> None:
    loader = shared.loader(8, seed=1)
    batches = iter(loader)
    kept = next(batches)
    found, number = ids([kept]), kept["id"].clone()
    rest = EpochPlan(N, seed=1).order(0).tolist()[8:]

    def child() -> tuple[list[int], list[int]]:
        del kept["id"]
        taken = [] if is_new else ids(batches)
        return taken, ids(loader)

    assert in_forked_child(child) == ([] if is_new else rest, EpochPlan(N, seed=1).order(1).tolist())
    assert torch.equal(kept["id"], number)
    assert found + ids(batches) == EpochPlan(N, seed=1).order(0).tolist()
    assert loader.stats().recoveries == loader.stats().repeated == 0


def test_a_forked_child_that_drops_a_loader_leaves_its_parents_alone(shared: DataService) -> None:
    held = [shared.loader(8, seed=1)]
    held.append(iter(held[0]))  # type: ignore[arg-type]
    taken = ids([next(held[1])])  # type: ignore[call-overload]
    in_forked_child(lambda: (held.clear(), gc.collect())[0])
    assert sorted(taken + ids(held[1])) == list(range(N))
    assert held[0].stats().recoveries == 0


def test_forked_children_are_answered_for_themselves(shared: DataService) -> None:
    pid = shared.status()["pid"]
    loader = shared.loader(8, seed=1)
    assert (
        in_forked_child(lambda: (shared.status()["pid"], shared.preload(), len(shared.status()["loaders"])))[0] == pid
    )
    assert shared.status()["pid"] == pid
    assert sorted(ids(loader)) == list(range(N))


def test_a_forked_child_that_has_not_reached_the_service_does_not_talk_for_its_parent(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start()
    clients = service.status()["clients"]

    def child() -> int:
        with monkeypatch.context() as cut_off:
            cut_off.setattr(processes, "joined", failing(ConnectionLost("nobody is there")))
            with pytest.raises(ProvisionError, match="nobody is there"):
                service.preload()
        return int(service.status()["clients"])

    assert in_forked_child(child) == clients + 1


def test_a_loader_of_a_service_of_somebody_else(shared: DataService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "connected", failing(PermissionError("x belongs to user 1, not to user 2")))
    with pytest.raises(ProvisionError, match="the data service x belongs to user 1, not to user 2"):
        next(iter(shared.loader(8)))


def test_a_ring_that_cannot_be_mapped(shared: DataService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring.mmap, "mmap", failing(OSError(12, "no room")))

    def child() -> Counter[str]:
        engine = client.EmbeddedEngine(shared.address)
        open_before = Counter(open_files())
        for _ in range(5):
            with pytest.raises(EngineLost, match="no room"):
                engine.register(Registration())
        gc.collect()
        opened = Counter(open_files()) - open_before
        engine.close()
        return opened

    # Only in a process of its own does nothing else open or close a file: here, threads of earlier tests may.
    assert in_forked_child(child) == Counter()


def open_files() -> list[str]:
    folder = "/proc/self/fd"
    fds = os.listdir(folder)  # the last is that of the listing
    return [os.readlink(f"{folder}/{fd}") for fd in fds if os.path.lexists(f"{folder}/{fd}")]


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def test_samples_that_cannot_be_passed_on(start: Start, folder: Path) -> None:
    loader = start(before_cache=Path).loader(8)
    with pytest.raises(ProvisionError, match="This was before_cache, of sample"):
        list(loader)


def test_what_cannot_be_pickled(folder: Path, warm_services: list[Program]) -> None:
    with pytest.raises(ProvisionError, match="top of a module"):
        DataService.start(Numbers(N, folder), cache_bytes=0, before_cache=lambda sample: sample)
    assert not warm_services


def test_arguments_that_make_no_sense(folder: Path) -> None:
    for wrong in ({"workers": 0}, {"cache_bytes": -1}, {"cache_bytes": 5}, {"engine": "wish"}):
        with pytest.raises(ValueError, match="found"):
            DataService.start(Numbers(N, folder), **{"cache_bytes": 0, **wrong})
    with pytest.raises(TypeError, match="map-style"):
        DataService.start(iter([1, 2]), cache_bytes=0)


def test_an_empty_dataset_and_one_that_is_dropped(start: Start, folder: Path) -> None:
    assert list(start(Numbers(0, folder)).loader(4)) == []
    loader: ProvisionedLoader = start(Numbers(3, folder)).loader(4, drop_last=True)
    assert list(loader) == []
    assert len(loader) == 0


def test_two_orders_share_a_cache(start: Start, folder: Path) -> None:
    service = start(workers=1)
    training, validation = service.loader(8, seed=1), service.loader(8, shuffle="none")
    for _ in range(2):
        assert sorted(ids(training)) == list(range(N))
        assert ids(validation) == list(range(N))
    assert set(reads_in(folder).values()) == {1}


def test_a_loader_that_is_closed_registers_again(start: Start) -> None:
    service = start()
    loader = service.loader(8)
    assert len(ids(loader)) == N
    loader.close()
    assert len(ids(loader)) == N
    assert len(service.status()["loaders"]) == 1
    service.stop()
    with pytest.raises(ProvisionError, match="stop"):
        service.status()


def test_arrays_stay_arrays_and_views(shared: DataService) -> None:
    loader = shared.loader(4, collate_fn=list)
    for batch in loader:
        for sample in batch:
            assert isinstance(sample["bytes"], np.ndarray)
            assert sample["bytes"].flags.writeable
            assert sample["bytes"].ctypes.data % 64 == 0


def test_who_knows_the_length_need_not_ask_once_more(shared: DataService) -> None:
    """As Lightning does: what came ahead of the next epoch is not made again."""
    loader = shared.loader(8)
    seen = []
    for _ in range(3):
        batches = iter(loader)
        seen += ids(next(batches) for _ in range(len(loader)))
    assert sorted(seen) == sorted(list(range(N)) * 3)
    assert loader._next.generation == 1


def test_other_arguments_are_no_other_service(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME_VARIABLE, str(folder))
    start(cache_bytes=1 << 20, seed=1)
    for options in ({"cache_bytes": 1 << 20, "seed": 2}, {"cache_bytes": 1 << 21, "seed": 1}):
        with pytest.raises(ProvisionError, match="with other arguments"):
            start(**options)
    assert len(start(cache_bytes=1 << 21, seed=2, name="validation")) == N


def test_a_sample_that_cannot_be_read_ahead_is_tried_once(start: Start, folder: Path) -> None:
    """By who reads ahead; and by the batch that needs it."""
    (folder / "fail-3").touch()
    service = start(workers=1)
    loader = service.loader(4, shuffle="none", ahead=1)
    with pytest.raises(ProvisionError, match="sample 3 is bad"):
        next(iter(loader))
    others = service.loader(4, seed=1, ahead=1)
    for _ in range(40):  # each answer comes between tasks: a worker that reads ahead in vain would go on
        service.status()
    assert reads_in(folder)[3] <= 4
    others.close()


def test_samples_that_are_read_ahead_with_a_broken_one_are_kept(start: Start, folder: Path) -> None:
    (folder / "fail-50").touch()
    service = start(workers=1)
    batches = iter(service.loader(8, shuffle="none", ahead=1, on_error="skip"))
    next(batches)
    wait_until(lambda: service.status()["is_filled"])
    assert service.status()["cached_samples"] == N - 1


def test_a_loader_that_is_dropped_is_not_served_any_more(shared: DataService) -> None:
    """At once: no garbage collector is needed."""
    service = shared
    gc.collect()  # loaders of other tests
    gc.disable()
    try:
        loader = service.loader(8)
        batches = iter(loader)
        next(batches)
        assert len([*loader.batch_sampler]) == 7
        assert loader.batch_sampler.sampler is loader
        dropped = weakref.ref(loader)
        del loader, batches
        assert dropped() is None
        wait_until(lambda: not service.status()["loaders"])
    finally:
        gc.enable()


def test_a_descriptor_that_nobody_wants_is_closed(shared: DataService) -> None:
    def files() -> int:
        return len(os.listdir(f"/proc/{shared.status()['pid']}/fd"))

    gc.collect()  # loaders of other tests, whose connections the server then closes
    wait_until(lambda: not shared.status()["loaders"])
    before = files()
    client = processes.reach(shared.address.removeprefix("local:"))
    with open("/dev/null") as null:
        client.send(AskStatus(), fd=null.fileno())
    for kind in (Hello, dict):
        message = client.awaited(20)
        assert isinstance(message.content, kind)
        if message.fd is not None:
            os.close(message.fd)
    client.close()
    wait_until(lambda: files() == before)


def test_who_connects_when_no_descriptor_is_free_waits(start: Start) -> None:
    service = start(workers=1)
    loader = service.loader(8)
    assert len(ids(loader)) == N
    wait_until(lambda: service.status()["loaders"][0]["ahead"] == 8)
    wait_until(lambda: not any(one["tasks"] for one in service.status()["workers"]))
    pid = service.status()["pid"]
    most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    numbers = max(map(int, os.listdir(f"/proc/{pid}/fd"))) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (numbers, most[1]))
    waiting = [processes.reach(service.address.removeprefix("local:")) for _ in range(numbers + 1)]
    spent = seconds_of(pid)
    assert not waiting[-1].wait(0.5)
    assert seconds_of(pid) - spent < 0.25
    waiting.pop(0).close()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, most)
    assert waiting[-1].wait(20)
    for one in waiting:
        one.close()
    assert len(ids(loader)) == N
    assert service.status()["pid"] == pid


def seconds_of(pid: int) -> float:
    """What a process has taken of the processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_statistics_are_a_table(shared: DataService) -> None:
    loader = shared.loader(8)
    for _ in range(2):
        assert len(ids(loader)) == N
    found = loader.stats()
    assert (found.epoch.batches, found.given.batches) == (8, 16)
    assert (found.epoch.samples, found.epoch.waits.count) == (N, 8)
    assert found.epoch.seconds < found.given.seconds
    head, epoch, total = str(found).splitlines()
    assert head.split()[:2] == ["batches", "samples"]
    assert epoch.split()[:3] == ["epoch", "8", "60"]
    assert total.split()[:4] == ["in", "all", "16", "120"]


def test_a_bar_shows_how_the_cache_fills(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    service = start()
    monkeypatch.setattr(progress_bar, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    observer = DataService.connect(service.address)._engine
    service.preload()
    show_filling(observer, lambda: False)
    nbytes = service.status()["cached_nbytes"] / 1024
    err = capsys.readouterr().err
    assert "filling the cache" in err
    assert f"{nbytes:.1f}/{nbytes:.1f} KiB" in err
    show_filling(observer, lambda: True)
    observer.close()


@pytest.mark.parametrize("samples", [0, N])
def test_a_bar_ends_without_samples_and_with_some_that_cannot_be_read(start: Start, folder: Path, samples: int) -> None:
    (folder / "fail-3").touch()
    service = start(Numbers(samples, folder), workers=1)
    service.preload()
    with closing(DataService.connect(service.address)._engine) as observer:
        looks = iter(range(100))
        show_filling(observer, lambda: next(looks) == 99)
    assert next(looks) < 99
    assert service.status()["is_filled"]


def test_no_bar_where_there_is_no_terminal(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    start()
    assert not set(threading.enumerate()) - before
    assert capfd.readouterr().err == ""


PINNED_SERVER = """
import os, socket, sys
sys.path[:] = sys.argv[4:]
from fastensor.provision import placement
from fastensor.provision.embedded import server
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(chr(0) + sys.argv[1])
spec_fd = os.open(sys.argv[3], os.O_RDWR)
listener.listen(100)
print("listens", flush=True)
cpus = [frozenset({int(text)}) for text in sys.argv[2].split(",")]
found = {str(number): placement.Placement((), None, number, one) for number, one in enumerate(cpus)}
server.placements = lambda: found
server.main(listener.fileno(), spec_fd)
"""


def test_workers_run_on_processors_next_to_gpus(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two GPUs, one of which is next to a processor that this process may not use."""
    (first, *_), elsewhere = sorted(os.sched_getaffinity(0)), 1 << 15

    def begin(name: str, module: str, spec_fd: int) -> bool:
        spec = f"/proc/{os.getpid()}/fd/{spec_fd}"
        programs.append(Program("-c", PINNED_SERVER, name, f"{first},{elsewhere}", spec, *sys.path, provision=True))
        return programs[-1].stdout.readline() == "listens\n"

    programs: list[Program] = []
    monkeypatch.setattr(processes, "start", begin)
    service = start(workers=3)
    pids = workers_of(service, 3)
    wait_until(lambda: os.sched_getaffinity(pids[0]) == {first})
    assert sorted(ids(service.loader(8))) == list(range(N))
    assert [os.sched_getaffinity(pid) for pid in pids[1:]] == [os.sched_getaffinity(0)] * 2
    service.stop()
    for program in programs:
        program.wait()
        program.communicate()


@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_is_shown_if_it_is_wanted(
    start: Callable[..., DataService], monkeypatch: pytest.MonkeyPatch, progress: bool
) -> None:
    shown: list[tuple[Any, ...]] = []
    monkeypatch.setattr("fastensor.provision.service._show_filling_in_thread", lambda *given: shown.append(given))
    start(progress=progress)
    assert len(shown) == progress


@pytest.mark.parametrize("option", ["listen", "token", "metrics_port"])
def test_an_option_that_is_gone_says_what_to_use(tmp_path: Path, option: str) -> None:
    with pytest.raises(TypeError, match=f"'{option}': .*engine='ray'"):
        DataService.start(Numbers(8, tmp_path), cache_bytes=0, **{option: "x"})  # type: ignore[arg-type]


def test_an_address_of_another_machine_says_what_to_use() -> None:
    with pytest.raises(ProvisionError, match=r"local:NAME or .*, found 'tcp://.*engine='ray'"):
        DataService.connect("tcp://10.0.0.1:29501")
