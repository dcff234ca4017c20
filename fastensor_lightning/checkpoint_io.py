"""Lightning's checkpoint plugin: the frame's contract on one side, ``fastensor.save`` and ``load`` on the other."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import fastensor
from fastensor.checkpoint.files import make_parent, remove
from fastensor_lightning.frameworks import load_classes

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
else:
    CheckpointIO = type(
        "CheckpointIO",
        load_classes("CheckpointIO", "lightning.fabric.plugins", "lightning_fabric.plugins"),
        {},
    )

SaveListener = Callable[[fastensor.SaveReport], None]

_logger = logging.getLogger(__name__)
_STORAGE_OPTIONS = ("backend", "durable")


class FastensorCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of a Trainer or a Fabric at the speed of the disk, durable and verified.

    The files are standard ones: a Trainer without the plugin, ``load_from_checkpoint`` and ``torch.load`` read them,
    and this plugin reads what those wrote. When a save returns, file and name are on stable storage; until then the
    file that was there before is untouched.

    Args:
        backend: how bytes are moved, as in :func:`fastensor.save` and :func:`fastensor.load`.
        durable: whether saves are synced, as in :func:`fastensor.save`.
        map_location: where checkpoints are loaded to when Lightning does not say, which it never does for resuming.
            ``"cpu"`` is what Lightning does by itself; ``"cuda"`` loads every tensor to the process's own device.
        verify: as in :func:`fastensor.load`.

    A single save can override ``backend`` and ``durable``: ``trainer.save_checkpoint(path, storage_options={"durable":
    False})``. Picklable. Saves are called on global rank 0, loads on all ranks; both block. Paths may be URLs of remote
    filesystems (``s3://...``), as in :func:`fastensor.save`.

    >>> from lightning.pytorch import Trainer
    >>> trainer = Trainer(plugins=[FastensorCheckpointIO()], logger=False, accelerator="cpu")
    >>> type(trainer.strategy.checkpoint_io).__name__
    'FastensorCheckpointIO'
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        durable: bool = True,
        map_location: Any = "cpu",
        verify: bool | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.durable = durable
        self.map_location = map_location
        self.verify = verify
        self.last_save: fastensor.SaveReport | None = None
        """What the latest save in this process did."""
        self._listeners: list[SaveListener] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; its directory is created if missing.

        Args:
            checkpoint: what to save; it must not change until this returns.
            path: the file to create or replace. A symlink is replaced, not what it leads to.
            storage_options: overrides for this save: ``{"backend": ..., "durable": ...}``.

        Raises:
            TypeError: ``storage_options`` is not a dict or holds other keys.
            fastensor.CheckpointWriteError: the save failed, as in :func:`fastensor.save`.
            OSError: the directory is missing and cannot be created.
        """
        options = self._options(storage_options)
        make_parent(path, durable=options["durable"])
        # ModelCheckpoint's "last.ckpt" may be a link to the best checkpoint, which must not be replaced through it.
        report = fastensor.save(checkpoint, path, container="torch", follow_symlinks=False, **options)
        _logger.debug("saved %s", report)
        self.last_save = report
        for listener in self._listeners:
            listener(report)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint and verify it.

        Args:
            path: a file of this plugin, of Lightning's own, or of ``torch.save``.
            map_location: as for ``torch.load``; None means the one given to the plugin.
            weights_only: as for ``torch.load``; None means torch's default, which is True.

        Raises:
            FileNotFoundError: there is no such file.
            fastensor.FastensorError: as :func:`fastensor.load`.
        """
        if map_location is None:
            map_location = self.map_location
        checkpoint: dict[str, Any] = fastensor.load(
            path, map_location, weights_only=weights_only, verify=self.verify, backend=self.backend
        )
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: a file, a directory with all it holds, or a symlink but not its target.

        Nothing happens if there is none.
        """
        remove(path)

    def teardown(self) -> None:
        """Nothing is pending between calls, so there is nothing to do; the plugin can be used again."""

    def subscribe(self, listener: SaveListener) -> Callable[[], None]:
        """Call ``listener`` with the report of every save of this process; returns how to stop that.

        Listeners stay behind when the plugin is pickled.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_listeners": []}

    def _options(self, overrides: Any | None) -> dict[str, Any]:
        if overrides is None:
            overrides = {}
        if not isinstance(overrides, dict) or set(overrides) - set(_STORAGE_OPTIONS):
            raise TypeError(
                f"storage_options of {type(self).__name__} is a dict with keys among {list(_STORAGE_OPTIONS)}, "
                f"found {overrides!r}"
            )
        return {"backend": self.backend, "durable": self.durable, **overrides}
