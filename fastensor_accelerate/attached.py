"""The object of Fastensor that belongs to an Accelerator, by the options that are in effect."""

from __future__ import annotations

from accelerate import Accelerator

from fastensor_accelerate.activation_offload import PreparedOffloads
from fastensor_accelerate.config import FastensorConfig
from fastensor_accelerate.states import StateSaver

_SAVER = "_fastensor_saver"
"""The attribute of an Accelerator that holds its saver."""
options: FastensorConfig | None = None
"""Options of Accelerators that have no saver yet; None if Fastensor is not enabled."""


def attach_saver(accelerator: Accelerator, config: FastensorConfig) -> StateSaver:
    """Make the saver of an Accelerator."""
    saver = StateSaver(accelerator, config)
    setattr(accelerator, _SAVER, saver)
    return saver


def saver_of(accelerator: Accelerator) -> StateSaver:
    """The saver of an Accelerator, made by the first call."""
    saver: StateSaver | None = accelerator.__dict__.get(_SAVER)
    return saver or attach_saver(accelerator, options or FastensorConfig())


def offloads_of(accelerator: Accelerator) -> PreparedOffloads | None:
    """The offloads of an Accelerator's models; None if the options do not offload: no saver is made then."""
    saver: StateSaver | None = accelerator.__dict__.get(_SAVER)
    config = options if saver is None else saver.config
    return saver_of(accelerator).offloads() if config is not None and config.offload else None
