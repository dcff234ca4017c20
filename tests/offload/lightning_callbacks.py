"""Callbacks beside :class:`fastensor_lightning.SSDActivationOffload`."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from fastensor_lightning import SSDActivationOffload


class WrittenFirst(pl.Callback):
    """Lets a backward pass begin when all is written: of so little, all might be taken back before that."""

    def __init__(self, callback: SSDActivationOffload) -> None:
        self.callback = callback

    def on_before_backward(self, *_: Any) -> None:
        assert self.callback._offload is not None
        self.callback._offload._engine.settle()
