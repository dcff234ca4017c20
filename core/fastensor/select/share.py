"""Ranks on identical hardware share timings (the Fastensor paper, section 4.3).

The lowest rank of each kind of device and filesystem, its leader, tries backends, and broadcasts its dictionary to the
ranks of its kind. Ranks that move tensors of other sizes than the others, as in model parallelism, learn by themselves.

A leader learns from its own transfers. If rank 0 alone saves, leaders of other kinds learn from loads only, which is
all that ranks of their kinds do."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fastensor.backends.registry import AUTO
from fastensor.select.current import current_selector
from fastensor.select.dictionary import Dictionary, DictionaryError, Key
from fastensor.select.machine import identity
from fastensor.select.selector import Selector
from fastensor.select.winners import Winners, winners

_PATIENCE = timedelta(minutes=5)
"""How long ranks wait for a rank that does not answer. The death of a rank is noticed at once."""

_logger = logging.getLogger("fastensor")


_Digest: TypeAlias = dict[Key, tuple[Winners, tuple[str, ...]]]
"""By key, the best backends, and all backends in order of speed."""


def _digest_of(dictionary: Dictionary) -> _Digest:
    return {
        key: (winners(dictionary, key), tuple(sorted(entry.timings, key=lambda name: entry.timings[name].seconds)))
        for key, entry in dictionary
    }


def kind_of(device: torch.device, machine: Mapping[str, str]) -> str:
    """The kind of a rank's hardware: model and memory of its device, and kind of the target's filesystem. Ranks of the
    same kind share timings.

    Args:
        device: the device that the rank computes on.
        machine: the identity of the target; see :func:`fastensor.select.machine.identity`.

    >>> kind_of(torch.device("cpu"), {"cpu": "2 × AMD EPYC", "filesystem": "ext4", "disk": "nvme"})
    '2 × AMD EPYC on ext4, nvme'
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, {properties.total_memory} bytes"
    else:
        name = machine.get("cpu", device.type)
    return f"{name} on {machine.get('filesystem', '?')}, {machine.get('disk', '?')}"


def leaders_of(kinds: Sequence[str | None]) -> tuple[int, ...]:
    """For each rank, its leader: the lowest rank of its kind, or itself if its kind is None.

    >>> leaders_of(["A100", "A100", "H100", None, "H100"])
    (0, 0, 2, 3, 2)
    """
    return tuple(rank if kind is None else kinds.index(kind) for rank, kind in enumerate(kinds))


class Sharing:
    """Sharing of timings among the selectors of all ranks. All ranks make it, and call :meth:`sync`, at the same
    points.

    The ranks communicate in a process group of their own, apart from that of the training. A rank whose communication
    fails logs that, and leaves. The other ranks notice at their next sync, and then every rank learns by itself.

    Args:
        selector: this rank's selector. It tries backends only if this rank is a leader.
        kind: this rank's kind (:func:`kind_of`); None to learn by itself.
        group: a process group of ``torch.distributed`` that nothing else uses, and that :meth:`end` destroys; None
            makes one of all ranks. Without ``torch.distributed`` nothing is shared.
    """

    def __init__(self, selector: Selector, kind: str | None, group: Any | None = None) -> None:
        self._selector = selector
        self._group: Any = group
        self._explores = selector.explore
        """Whether the selector tries backends without sharing."""
        self._sent: _Digest | None = None
        """The digest of the dictionary that was sent last."""
        self._rank = self.leader = 0
        self._leaders: tuple[int, ...] = ()
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
            return
        self._rank = self.leader = dist.get_rank(group)
        kinds: list[str | None] = [None] * dist.get_world_size(group)
        try:
            if group is None:
                self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            dist.all_gather_object(kinds, kind, group=self._group)
        except RuntimeError as error:
            self._break_off(error)
            return
        leaders = leaders_of(kinds)
        self.leader = leaders[self._rank]
        self._leaders = tuple(leader for leader in sorted(set(leaders)) if leaders.count(leader) > 1)
        selector.explore = self._explores and self.leader == self._rank
        self.sync()

    def sync(self) -> None:
        """Broadcast this rank's dictionary to the ranks that it leads, or receive the leader's."""
        for leader in self._leaders:
            message = [self._update() if leader == self._rank else None]
            try:
                source = dist.get_global_rank(self._group, leader)
                dist.broadcast_object_list(message, source, self._group)
            except (RuntimeError, ValueError) as error:  # ValueError if the group was destroyed
                self._break_off(error)
                return
            if leader == self.leader != self._rank and message[0] is not None:
                self._adopt(message[0])

    def end(self) -> None:
        """Stop sharing. This rank keeps what it knows, and learns by itself. Other ranks notice at their next sync."""
        self._leaders = ()
        self._keep_to_itself()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _update(self) -> str | None:
        """The dictionary as JSON; None if no best backend has changed since the last one."""
        dictionary = self._selector.dictionary
        sent, self._sent = self._sent, _digest_of(dictionary)
        return None if sent == self._sent else dictionary.to_json()

    def _adopt(self, update: str) -> None:
        try:
            dictionary = Dictionary.from_json(update)
        except DictionaryError as error:
            _logger.warning("rank %d cannot read what rank %d has learned: %s", self._rank, self.leader, error)
            self._keep_to_itself()  # and still take part, because the others go on
        else:
            self._selector.adopt(dictionary)

    def _keep_to_itself(self) -> None:
        self.leader = self._rank
        self._selector.explore = self._explores

    def _break_off(self, error: Exception) -> None:
        """Stop sharing: other ranks cannot be reached, or have died, or have left."""
        _logger.warning("ranks cannot share timings of backends; each rank learns by itself from now on: %s", error)
        self.end()


def share_choice(backend: str | Selector, folder: str, device: torch.device) -> Sharing | None:
    """Begin to share what chooses backends for files in a folder. All ranks call it, at the same points.

    Args:
        backend: as for :func:`fastensor.save`.
        folder: where the files go; it need not exist.
        device: the device that this rank computes on.

    Returns:
        What shares it; None if the backend is not chosen by a selector.
    """
    if isinstance(backend, str):
        if backend != AUTO:
            return None
        backend = current_selector(folder)
    return Sharing(backend, kind_of(device, identity(folder)))
