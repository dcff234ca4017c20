"""Train a network whose parameters are sharded over two processes (FSDP2), and go on where an earlier run has ended.

Each process writes its own shards, and the directory takes its place when all have written. Run it again with more
epochs, with another number of processes, or without the plugin (``--stock``): each goes on from what another has saved.

    python examples/shard_lightning.py --epochs 2
    python examples/shard_lightning.py --epochs 4 --processes 1
    fastensor verify sharded/last.ckpt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from fastensor_lightning import FastensorCheckpointIO


class Network(LightningModule):
    """Learns to add the numbers of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.layers is None:
            self.layers = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 1))
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        rows, sums = batch
        assert self.layers is not None
        loss = functional.mse_loss(self.layers(rows), sums)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--directory", type=Path, default=Path("sharded"))
    parser.add_argument("--stock", action="store_true", help="without Fastensor")
    options = parser.parse_args()
    seed_everything(0, verbose=False)
    rows = torch.randn(512, 8)
    saver = ModelCheckpoint(options.directory, filename="{epoch}", save_last=True)
    plugin = None if options.stock else FastensorCheckpointIO(asynchronous=True)
    trainer = Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=options.processes, tensor_parallel_size=1),
        devices=options.processes,
        accelerator="cpu",
        plugins=[plugin] if plugin else [],
        callbacks=[saver],
        max_epochs=options.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = options.directory / "last.ckpt"
    batches = DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=64)
    trainer.fit(Network(), batches, ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        files = sorted(path.name for path in last.iterdir())
        print(f"epoch {trainer.current_epoch}, loss {trainer.callback_metrics['loss']:.4f}; {last}: {', '.join(files)}")
        if plugin is not None and plugin.last_save is not None:
            seconds, stall = plugin.last_save.seconds, plugin.last_save.stall_seconds
            print(f"the last save took {seconds:.3f} s, and training stood still for {stall:.3f} s of it")


if __name__ == "__main__":
    main()
