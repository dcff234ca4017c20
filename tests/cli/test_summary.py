"""Tensors in numbers, as ``fastensor inspect`` prints them."""

from __future__ import annotations

import torch

from fastensor.checkpoint.tools.catalog import TensorInfo
from fastensor.cli.summary import Totals, grouped, patterns, totals


def tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorInfo:
    return TensorInfo(name, "Tensor", dtype, shape, name, None)


def test_names_that_differ_in_numbers_have_one_pattern() -> None:
    names = ["layers.0.weight", "layers.10.weight", "0", "a1.b", "x.2y", "1.2.3", ""]
    assert patterns([tensor(name) for name in names]) == [
        "layers.*.weight", "layers.*.weight", "*", "a1.b", "x.2y", "*.*.*", "",
    ]  # fmt: skip


def test_many_patterns_are_joined_where_names_begin_alike() -> None:
    names = [f"model.part.{letter}{number}.weight" for letter in "abcdefgh" for number in range(10)]
    assert set(patterns([tensor(name) for name in names])) == {"model.part.*"}


def test_tied_tensors_add_no_parameters_but_the_largest() -> None:
    tensors = [tensor("a", 4), tensor("b", 2), tensor("c", 4), tensor("d", 4, dtype=torch.float64)]
    assert totals(tensors, [("a", "b")]) == Totals(4, 12, 16 + 8 + 16 + 32)
    assert grouped(tensors, [("a", "b")], "xyxx") == {
        "x": (Totals(3, 12, 64), "float32, float64"),
        "y": (Totals(1, 2, 8), "float32"),
    }
