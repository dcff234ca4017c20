"""What the ranks of DDP do together: they save, where Lightning has rank 0 save alone, and share timings, by which they
choose backends."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from fastensor.checkpoint.location import locate
from fastensor.checkpoint.models.ties import dense_tensors_in
from fastensor.files.replacing import wrap_method
from fastensor.select import share
from fastensor.select.share import Sharing
from fastensor_lightning.checkpoint_io import FastensorCheckpointIO


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

    return wrap_method(strategy, "save_checkpoint", save_checkpoint)


def _is_sharded(optimizers: list[Any]) -> bool:
    """True if an optimizer has its state on rank 0 alone when it is saved, as ``ZeroRedundancyOptimizer`` has."""
    names = [type(one).__name__ for one in optimizers if hasattr(one, "consolidate_state_dict")]
    if names:
        warnings.warn(
            f"rank 0 saves alone: {names[0]} collects its state there, so ranks do not hold the same", stacklevel=2
        )
    return bool(names)


def share_choice(plugin: FastensorCheckpointIO, trainer: Any) -> Sharing | None:
    """Begin to share the selector for the folder of the checkpoints: a ``ModelCheckpoint`` that was given none has it
    inside of the first logger's. Call this on all ranks.

    Rank 0 alone saves. Ranks on other hardware than rank 0 only load, so their leader learns from loads only.

    Returns:
        The sharing; None if the backend is not chosen by a selector, or the ranks hold different parts of the model.
    """
    if not plugin._chooses or not is_data_parallel(trainer.strategy):
        return None
    logged = next((logger.save_dir for logger in trainer.loggers), None)
    folder = locate(getattr(trainer.checkpoint_callback, "dirpath", None) or logged or trainer.default_root_dir)
    if not isinstance(folder, str):
        return None
    trainer.strategy.barrier()  # whatever came before may have taken other ranks longer than a sync waits
    return share.share_choice(plugin.backend, folder, trainer.strategy.root_device)


def check_strategy(plugin: FastensorCheckpointIO, strategy: Any) -> None:
    """
    Raises:
        TypeError: checkpoints leave out what is in another file, and the ranks may hold parts of the model.
    """
    is_single = "SingleDeviceStrategy" in {base.__name__ for base in type(strategy).__mro__}
    if plugin._left_out.base is not None and not (is_single or is_data_parallel(strategy)):
        raise TypeError(
            f"FastensorCheckpointIO(exclude=..., base=...) is for one device and for DDP, whose ranks hold the whole "
            f"model; found {type(strategy).__name__}: leave both out"
        )


def is_data_parallel(strategy: Any) -> bool:
    """True for Lightning's DDP, whose ranks hold the same tensors. Ranks of its subclasses may hold parts."""
    names = {base.__name__ for base in type(strategy).__mro__}
    return "DDPStrategy" in names and names.isdisjoint({"DeepSpeedStrategy", "XLAStrategy"})
