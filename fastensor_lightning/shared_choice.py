"""The ranks of a Trainer on identical hardware share timings, by which they choose backends."""

from __future__ import annotations

from typing import Any

from fastensor.checkpoint.location import locate
from fastensor.select import share
from fastensor.select.share import Sharing
from fastensor_lightning.checkpoint_io import FastensorCheckpointIO


def share_choice(plugin: FastensorCheckpointIO, trainer: Any) -> Sharing | None:
    """Begin to share the selector for the folder of the checkpoints. Call this on all ranks, once it is decided.

    Rank 0 alone saves. Ranks on other hardware than rank 0 only load, so their leader learns from loads only.

    Returns:
        The sharing; None if the backend is not chosen by a selector, or the ranks hold different parts of the model.
    """
    if not plugin._chooses or not is_data_parallel(trainer.strategy):
        return None
    folder = locate(getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir)
    if not isinstance(folder, str):
        return None
    trainer.strategy.barrier()  # whatever came before may have taken other ranks longer than a sync waits
    return share.share_choice(plugin.backend, folder, trainer.strategy.root_device)


def is_data_parallel(strategy: Any) -> bool:
    """True for Lightning's DDP, whose ranks hold the same tensors. Ranks of its subclasses may hold parts."""
    names = {base.__name__ for base in type(strategy).__mro__}
    return "DDPStrategy" in names and names.isdisjoint({"DeepSpeedStrategy", "XLAStrategy"})
