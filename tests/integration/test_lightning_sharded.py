"""Trainers of several processes that hold parts of a model: what they save and load goes through the plugin."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from integration.sharded_trainers import Rank, counted_calls, fit, loader, make_module, make_trainer, start, values_of
from programs import run_ranks

from fastensor_lightning import CheckpointMonitor, FastensorCheckpointIO

OURS_WRITER, OURS_READER = "FastensorStorageWriter", "FastensorStorageReader"


def run(program: Rank, folder: Path, *, world: int = 2, brand: str = "lightning.pytorch") -> list[Any]:
    """What each rank returns."""
    pytest.importorskip(brand)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_ranks(start, world, program, world, brand, port, folder)
    return [json.loads((folder / f"{program.__name__}-{rank}.json").read_text()) for rank in range(world)]


def names_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def train(pl: Any, rank: int, folder: Path) -> Any:
    """Three epochs of two steps, saved after each; then from checkpoints of both kinds, by both kinds of Trainers."""
    seen: dict[str, Any] = {}
    with counted_calls() as calls:
        saver = pl.callbacks.ModelCheckpoint(
            folder / "c", save_top_k=2, monitor="step_number", mode="max", save_last=True,
            filename="{step}",
        )  # fmt: skip
        plugin = FastensorCheckpointIO()
        trainer, module = fit(pl, folder, plugin, callbacks=[saver, CheckpointMonitor()])
        seen["saved"] = calls.since()
        expected = values_of(trainer, module)
        seen["names"] = names_in(folder / "c")
        seen["report"] = None if plugin.last_save is None else [plugin.last_save.path, plugin.last_save.nbytes]
        trainer.save_checkpoint(folder / "weights", weights_only=True, storage_options={"durable": False})
        seen["weights"] = calls.since()
        stock, module = fit(pl, folder, None, callbacks=[pl.callbacks.ModelCheckpoint(folder / "stock")])
        stock.save_checkpoint(folder / "stock.ckpt")
        assert values_of(stock, module) == expected
        seen["stock saved"] = calls.since()
        for name in ("c/step=4.ckpt", "c/last.ckpt", "stock.ckpt"):
            for plugin in (FastensorCheckpointIO(), None):
                found = fit(pl, folder, plugin, folder / name, enable_checkpointing=False)
                assert values_of(*found) == expected, name
                seen[f"{name} {plugin is None}"] = calls.since()
        trainer = make_trainer(pl, folder, FastensorCheckpointIO(), enable_checkpointing=False)
        scores = [
            trainer.validate(make_module(pl), loader(), ckpt_path=folder / name, verbose=False)
            for name in ("c/last.ckpt", "weights", "stock.ckpt")
        ]
        seen["validated"] = calls.since()
        assert scores[0] == scores[1] == scores[2]
    return seen, expected


def test_two_ranks_save_and_resume(tmp_path: Path) -> None:
    (seen, values), (others, others_values) = run(train, tmp_path)
    assert values == others_values
    report, no_report = seen.pop("report"), others.pop("report")
    assert no_report is None
    assert seen == others
    last = tmp_path / "c" / "last.ckpt"
    assert report == [str(last), sum(path.stat().st_size for path in last.iterdir())]
    assert seen["saved"] == {OURS_WRITER: 6}
    assert seen["names"] == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert seen["weights"] == {OURS_WRITER: 1}
    assert set(seen["stock saved"]) == {"FileSystemWriter"}
    for name in ("c/step=4.ckpt", "c/last.ckpt", "stock.ckpt"):
        assert seen[f"{name} False"] == {OURS_READER: 2}
        assert seen[f"{name} True"] == {"FileSystemReader": 2}
    assert seen["validated"] == {OURS_READER: 3}
