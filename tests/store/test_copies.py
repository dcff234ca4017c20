"""Stores go to other processes: a dataset that holds one is pickled into each worker of a loader."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fastensor import Dictionary, Selector, TensorRef, TensorStore

COPIES: dict[str, Callable[[TensorStore], TensorStore]] = {
    "pickle": lambda store: pickle.loads(pickle.dumps(store)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_the_same_files_and_settings(tmp_path: Path, how: str) -> None:
    store = TensorStore(tmp_path, backend="npy", mode="read", durable=True, verify=False)
    ref = store.put(torch.arange(5))
    copied = COPIES[how](store)
    assert copied.__getstate__() == store.__getstate__()
    assert torch.equal(copied.get(ref), torch.arange(5))
    assert torch.equal(store.get(copied.put(torch.ones(3))), torch.ones(3))
    assert (store.statistics().puts, copied.statistics().puts) == (1, 1)


@pytest.mark.parametrize("how", COPIES)
def test_closing_one_closes_no_other(tmp_path: Path, how: str) -> None:
    store = TensorStore(tmp_path)
    ref = store.put(torch.arange(5))
    copied = COPIES[how](store)
    store.close()
    assert torch.equal(copied.get(ref), torch.arange(5))
    copied.delete(ref)
    with pytest.raises(ValueError, match="has been closed"):
        COPIES[how](store).get(ref)


def test_a_selector_that_was_given_is_copied(tmp_path: Path) -> None:
    selector = Selector(Dictionary(), explore=False, mode="read")
    copied = pickle.loads(pickle.dumps(TensorStore(tmp_path, selector=selector)))
    found = copied.__getstate__()["selector"]
    assert found is not selector
    assert not found.explore
    assert torch.equal(copied.get(copied.put(torch.ones(2))), torch.ones(2))


def bring(store: TensorStore, ref: TensorRef) -> TensorRef:
    return store.put(store.get(ref) + 1)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_uses_it(tmp_path: Path, method: str) -> None:
    store = TensorStore(tmp_path)
    with multiprocessing.get_context(method).Pool(1) as pool:
        ref = pool.apply(bring, (store, store.put(torch.zeros(3))))
        pool.close()
        pool.join()
    assert torch.equal(store.get(ref), torch.ones(3))
