"""All ranks of a Trainer save, where Lightning has rank 0 save alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from fastensor.checkpoint.models.ties import dense_tensors_in
from fastensor.files.replacing import wrap_method
from fastensor_lightning.checkpoint_io import FastensorCheckpointIO
from fastensor_lightning.shared_choice import is_data_parallel


def save_together(plugin: FastensorCheckpointIO, trainer: Any) -> Callable[[], None]:
    """Have the strategy of a Trainer call a cooperative plugin on all ranks. Returns a function that ends that.

    ``Trainer.save_checkpoint`` collects the checkpoint on all ranks, and calls ``save_checkpoint`` of the strategy on
    all of them. Lightning's own calls the plugin on rank 0 alone. There is no hook between.

    Raises:
        TypeError: the ranks do not hold the same state, or the plugin is inside of another one.
    """
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return lambda: None
    if not is_data_parallel(strategy):
        raise TypeError(
            f"FastensorCheckpointIO(cooperative=True) is for DDP, whose ranks hold the same state; found "
            f"{type(strategy).__name__}: leave cooperative out"
        )
    if strategy.checkpoint_io is not plugin:
        raise TypeError(
            f"FastensorCheckpointIO(cooperative=True) is inside of {type(strategy.checkpoint_io).__name__}, which only "
            f"rank 0 calls: pass the plugin itself to the Trainer, or leave cooperative out"
        )

    def save_checkpoint(
        stock: Callable[..., None], checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if plugin._leaves_to_rank_0(filepath) or _is_sharded(trainer.optimizers):
            stock(checkpoint, filepath, storage_options=storage_options)
        else:
            states = dense_tensors_in(checkpoint.get("optimizer_states"))
            replicated = [*trainer.lightning_module.parameters(), *states]
            plugin._save_together(checkpoint, filepath, storage_options, replicated)

    plugin._saves_together = True
    return wrap_method(strategy, "save_checkpoint", save_checkpoint)


def _is_sharded(optimizers: list[Any]) -> bool:
    """True if an optimizer has its state on rank 0 alone when it is saved, as ``ZeroRedundancyOptimizer`` has."""
    names = [type(one).__name__ for one in optimizers if hasattr(one, "consolidate_state_dict")]
    if names:
        warnings.warn(
            f"rank 0 saves alone: {names[0]} collects its state there, so ranks do not hold the same", stacklevel=2
        )
    return bool(names)
