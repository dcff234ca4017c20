"""Several threads with one store, several processes with one directory."""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from programs import Program

from fastensor import TensorRef, TensorStore
from fastensor.backends.registry import available_names

SIZES = (0, 7, 5000, 1 << 20, (3 << 20) + 1)


def tensor_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (SIZES[seed % len(SIZES)],), dtype=torch.uint8, generator=generator)


def test_threads_put_get_and_delete_at_once(tmp_path: Path) -> None:
    store = TensorStore(tmp_path, mode="write_read")

    def cycle(seed: int) -> TensorRef:
        tensor = tensor_of(seed)
        kept, dropped = store.put_many([tensor, tensor])
        assert torch.equal(store.get(dropped), tensor)
        store.delete(dropped)
        return kept

    with ThreadPoolExecutor(8) as pool:
        refs = list(pool.map(cycle, range(80)))
        for seed, found in enumerate(pool.map(store.get, refs)):
            assert torch.equal(found, tensor_of(seed))
    assert {ref.file for ref in refs} == set(os.listdir(tmp_path))
    statistics = store.statistics()
    assert (statistics.puts, statistics.gets, statistics.deletes) == (160, 160, 80)
    assert statistics.written_bytes == statistics.read_bytes == 2 * sum(tensor_of(seed).nbytes for seed in range(80))
    assert statistics.written_by.keys() <= set(available_names())


def test_a_tensor_that_is_deleted_while_it_is_read_comes_back_whole_or_not_at_all(tmp_path: Path) -> None:
    store = TensorStore(tmp_path)
    tensor = tensor_of(4)

    def get(ref: TensorRef) -> bool:
        try:
            found = store.get(ref)
        except FileNotFoundError:
            return False
        assert torch.equal(found, tensor)
        return True

    with ThreadPoolExecutor(2) as pool:
        for _ in range(30):
            ref = store.put(tensor)
            reading = pool.submit(get, ref)
            pool.submit(store.delete, ref).result()
            reading.result()
    assert not os.listdir(tmp_path)


PROCESS = """
import pickle, sys, torch, fastensor
sys.stdin.readline()  # all begin together
with fastensor.TensorStore(sys.argv[1]) as store:
    tensors = [torch.full((1 << number,), int(sys.argv[2]), dtype=torch.int16) for number in range(16)]
    refs = store.put_many(tensors * 3)
    assert all(torch.equal(found, tensor) for found, tensor in zip(store.get_many(refs), tensors * 3))
    store.delete_many(refs[16:])
print(pickle.dumps(refs[:16]).hex())
"""


def test_processes_share_a_directory(tmp_path: Path) -> None:
    processes = [Program("-c", PROCESS, tmp_path, number) for number in range(2)]
    for process in processes:
        print(file=process.stdin, flush=True)
    printed = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    found = [pickle.loads(bytes.fromhex(out)) for out, _ in printed]
    store = TensorStore(tmp_path)
    for number, refs in enumerate(found):
        assert all((tensor == number).all() for tensor in store.get_many(refs))
    assert {ref.file for refs in found for ref in refs} == set(os.listdir(tmp_path))
    assert len(os.listdir(tmp_path)) == 32


def test_a_forked_child_goes_on(tmp_path: Path) -> None:
    """With small tensors: torch's own threads for large ones do not survive a fork."""
    store = TensorStore(tmp_path)
    ref = store.put(tensor_of(1))
    pid = os.fork()
    if pid == 0:
        sound = False
        try:
            sound = all(store.get(one).tolist() == tensor_of(1).tolist() for one in (ref, store.put(tensor_of(1))))
        finally:
            os._exit(0 if sound else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(os.listdir(tmp_path)) == 2
