"""One rank explores for all that are like it (the Fastensor paper, section 4.3).

Where all ranks have the same kind of device and filesystem, rank 0 tries the backends, and its dictionary is broadcast.
Where there are several kinds, the lowest rank of each does so for its own. Ranks that move tensors of other sizes than
the others, as in model parallelism, keep to themselves.

A leader learns from what it does itself: where rank 0 alone saves, those of other kinds learn from loads only, which is
all that their ranks do.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fastensor.select.dictionary import Dictionary, DictionaryError, Key
from fastensor.select.selector import Selector
from fastensor.select.winners import Winners, winners

_PATIENCE = timedelta(minutes=5)
"""A rank that does not come is waited for so long; one that has died is noticed at once."""

_logger = logging.getLogger("fastensor")


_Gist: TypeAlias = dict[Key, tuple[Winners, tuple[str, ...]]]
"""The best backends of each key, and the order of all."""


def _gist_of(dictionary: Dictionary) -> _Gist:
    return {
        key: (winners(dictionary, key), tuple(sorted(entry.timings, key=lambda name: entry.timings[name].seconds)))
        for key, entry in dictionary
    }


def kind_of(device: torch.device, machine: Mapping[str, str]) -> str:
    """What ranks have in common that are alike: model and memory of the device, kind of the target's filesystem.

    Args:
        device: that the rank computes on.
        machine: of the target, see :func:`fastensor.select.machine.identity`.

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
    """For each rank the one that explores for it: the lowest of its kind; itself if it has none.

    >>> leaders_of(["A100", "A100", "H100", None, "H100"])
    (0, 0, 2, 3, 2)
    """
    return tuple(rank if kind is None else kinds.index(kind) for rank, kind in enumerate(kinds))


class Sharing:
    """A selector of this rank, and those of the others. Made, and synced, by all ranks at once.

    They talk in a group of their own, so that nothing is ever taken for something of the training's. A rank for which
    it breaks, which is logged, leaves it. The others notice when they sync next, and then every rank goes on by itself.

    Args:
        selector: which learns only if this rank explores.
        kind: of this rank's devices and filesystem (:func:`kind_of`); None if it keeps to itself.
        group: of ``torch.distributed``, used for nothing else, and destroyed at the end; None makes one of all ranks.
            Without ``torch.distributed`` there is nothing to share.
    """

    def __init__(self, selector: Selector, kind: str | None, group: Any | None = None) -> None:
        self._selector = selector
        self._group: Any = group
        self._explores = selector.explore
        """Whether it would by itself."""
        self._sent: _Gist | None = None
        """Of the dictionary that was sent."""
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
        """Give what this rank has learned to those that it explores for, or take it from the one that does."""
        for leader in self._leaders:
            parcel = [self._news() if leader == self._rank else None]
            try:
                source = dist.get_global_rank(self._group, leader)
                dist.broadcast_object_list(parcel, source, self._group)
            except (RuntimeError, ValueError) as error:  # the latter if somebody has destroyed the group
                self._break_off(error)
                return
            if leader == self.leader != self._rank and parcel[0] is not None:
                self._adopt(parcel[0])

    def end(self) -> None:
        """Go on by itself, with what is known by now. The others notice when they sync next, if they still do."""
        self._leaders = ()
        self._keep_to_itself()
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _news(self) -> str | None:
        """The dictionary as JSON, if another backend is the best one somewhere, or is known at all."""
        dictionary = self._selector.dictionary
        sent, self._sent = self._sent, _gist_of(dictionary)
        return None if sent == self._sent else dictionary.to_json()

    def _adopt(self, news: str) -> None:
        try:
            dictionary = Dictionary.from_json(news)
        except DictionaryError as error:
            _logger.warning("rank %d cannot read what rank %d has learned: %s", self._rank, self.leader, error)
            self._keep_to_itself()  # and still takes part, because the others go on
        else:
            self._selector.adopt(dictionary)

    def _keep_to_itself(self) -> None:
        self.leader = self._rank
        self._selector.explore = self._explores

    def _break_off(self, error: Exception) -> None:
        """The others cannot be reached, or have died, or have left."""
        _logger.warning("ranks cannot share what they learn about backends; each goes on by itself: %s", error)
        self.end()
