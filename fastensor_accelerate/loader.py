"""Loaders whose order is known ahead, in the training loop of Accelerate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import GradientState
from accelerate.utils import send_to_device

from fastensor.data.epochs import EpochLoader, Iteration
from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import shown


@checks_keywords
def prepare_loader(accelerator: Accelerator, loader: EpochLoader, *, device_placement: bool = True) -> PreparedLoader:
    """Prepare a loader as ``accelerator.prepare`` prepares a ``DataLoader``: batches come to the accelerator's device,
    gradient accumulation ends with the epoch, and ``save_state`` and ``load_state`` take along how far the epoch has
    come. Here an epoch that is resumed gives out each remaining sample once, also by another number of processes, and
    without ``skip_first_batches``.

    Call it once for each loader, in the same order in all processes, and before ``load_state``. The loader divides the
    samples among the processes itself. At the end of an epoch, their batches may differ by one sample, which
    ``gather_for_metrics`` cannot gather: use ``drop_last=True``, or ``pad_across_processes`` before.

    Args:
        accelerator: of this process.
        loader: an :class:`~fastensor.data.LmdbLoader`, or the loader of a data service.
        device_placement: whether batches are copied to the device. A loader of a service may do so itself.
    """
    accelerator.register_for_checkpointing(loader)
    return PreparedLoader(loader, accelerator.device if device_placement else None)


@checks_keywords
class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # Accelerate has no types
    """See :func:`prepare_loader`. One iteration is used at a time."""

    def __init__(self, loader: EpochLoader, device: Any) -> None:
        self.loader = loader
        """The loader that was prepared."""
        self.device = device
        self.gradient_state = GradientState()

    @shown
    def __repr__(self) -> str:
        return f" of {self.loader!r}{'' if self.device is None else f', to {self.device}'}"

    def __len__(self) -> int:
        """The number of batches of the epoch, those before it was resumed included."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return _Batches(self, iter(self.loader))

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`fastensor.data.epochs.EpochLoader.set_epoch`."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, int | str]:
        """See :meth:`fastensor.data.epochs.EpochLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See :meth:`fastensor.data.epochs.EpochLoader.load_state_dict`."""
        self.loader.load_state_dict(state)


class _Batches(Iterator[Any]):
    """An iteration over the batches of a prepared loader. Goes on behind a batch that raises an error, as the loader
    does. Accelerate counts it as active from its first batch to its end."""

    def __init__(self, prepared: PreparedLoader, batches: Iteration) -> None:
        self._prepared = prepared
        self._batches = batches
        self._is_active = False

    def __next__(self) -> Any:
        prepared = self._prepared
        try:
            batch = next(self._batches)
        except StopIteration:
            self.close()
            raise
        if not self._is_active:
            prepared.begin()
            prepared.remainder = 0  # nothing is repeated to fill the last batches
            self._is_active = True
        left = prepared.loader.plan.steps(prepared.loader.progress.consumed)
        prepared.end_of_dataloader = left == 0
        return batch if prepared.device is None else send_to_device(batch, prepared.device, non_blocking=True)

    def close(self) -> None:
        """End the iteration."""
        self._batches.close()
        if self._is_active:
            self._is_active = False
            self._prepared.end()

    def __del__(self) -> None:
        self.close()
