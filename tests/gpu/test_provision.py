"""Batches of a data service arrive on the GPU as they were sent, whatever is done with the host's memory meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastensor.provision.loader import DeviceCopies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def test_copies_are_whole_although_the_source_is_overwritten() -> None:
    copies = DeviceCopies(torch.device("cuda"))
    values, numbers = torch.empty(1 << 20), torch.empty(3, dtype=torch.int64)
    source = {"a": values, "b": (numbers, "text"), "none": None}
    found: list[Any] = []
    for number in range(20):
        values.fill_(number)
        numbers.fill_(number)
        found.append(copies(source))
    for number, batch in enumerate(found):
        assert batch["a"].device.type == "cuda"
        assert batch["a"].eq(number).all()
        assert batch["b"][0].tolist() == [number] * 3
        assert (batch["b"][1], batch["none"]) == ("text", None)


def test_empty_tensors_and_all_dtypes() -> None:
    copies = DeviceCopies(torch.device("cuda"))
    tensors = [
        torch.empty(0, 3), torch.ones((), dtype=torch.bool), torch.ones(5, dtype=torch.bfloat16),
        torch.ones(2, 2, dtype=torch.complex64),
    ]  # fmt: skip
    for found, wanted in zip(copies(tensors), tensors, strict=True):
        assert found.dtype == wanted.dtype
        assert found.cpu().equal(wanted)
