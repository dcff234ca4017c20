"""Ranks on identical hardware share timings (the Fastensor paper, section 4.3).

The lowest rank of each kind of device and filesystem, its leader, tries backends, and broadcasts its dictionary to the
ranks of its kind. Ranks that move tensors of other sizes than the others, as in model parallelism, learn by themselves.

A leader learns from its own transfers. If rank 0 alone saves, leaders of other kinds learn from loads only, which is
all that ranks of their kinds do."""

from __future__ import annotations

import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from fastensor.backends.registry import AUTO
from fastensor.files.job_store import call_within
from fastensor.select.choice import winners
from fastensor.select.current import current_selector
from fastensor.select.dictionary import Dictionary, DictionaryError, Key
from fastensor.select.machine import identity
from fastensor.select.selector import Selector

_PATIENCE = timedelta(minutes=5)
"""Time that ranks wait for a rank that does not answer. The death of a rank is noticed at once."""

_logger = logging.getLogger("fastensor")
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""By the group that shares, the numbers of its sharings. They are alike in all ranks of the group."""

_Digest: TypeAlias = dict[Key, tuple[tuple[str | None, ...], tuple[str, ...]]]
"""By key, the best backends, and all backends in order of speed."""


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
    """Leader of each rank: the lowest rank of its kind, or itself if its kind is None.

    >>> leaders_of(["A100", "A100", "H100", None, "H100"])
    (0, 0, 2, 3, 2)
    """
    return tuple(rank if kind is None else kinds.index(kind) for rank, kind in enumerate(kinds))


class Sharing:
    """Sharing of timings among the selectors of some ranks, or of all. These ranks make it, and call :meth:`sync`, at
    the same points. Other ranks are not waited for.

    The ranks communicate over connections of their own, apart from those of the training. A rank whose communication
    fails logs that, and leaves. The other ranks notice at their next sync, and then every rank learns by itself.

    Args:
        selector: this rank's selector. It tries backends only if this rank is a leader.
        kind: this rank's kind (:func:`kind_of`); None to learn by itself.
        group: a process group of ``torch.distributed``, with any backend, which says which ranks share: that of a
            mesh's dimension, for example (``mesh.get_group("dp")``). Nothing is sent in it. None is all ranks. Without
            ``torch.distributed``, and on ranks outside of the group, nothing is shared.
    """

    def __init__(self, selector: Selector, kind: str | None, group: dist.ProcessGroup | None = None) -> None:
        self._selector = selector
        self._connections: Any = None
        """As :func:`_connect` makes them. torch gives their methods no types."""
        self._explores = selector.explore
        """True if the selector tries backends without sharing."""
        self._sent: _Digest | None = None
        """The digest of the dictionary that was sent last."""
        self._rank = self.leader = 0
        self._leaders: tuple[int, ...] = ()
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) < 2:
            return
        self._rank = self.leader = dist.get_rank(group)
        try:
            self._connections = _connect(group)
            kinds = [_broadcast(self._connections, rank, json.dumps(kind)) for rank in range(self._connections.size())]
        except (RuntimeError, TimeoutError) as error:
            self._break_off(error)
            return
        leaders = leaders_of([json.loads(one) for one in kinds])
        self.leader = leaders[self._rank]
        self._leaders = tuple(leader for leader in sorted(set(leaders)) if leaders.count(leader) > 1)
        selector.explore = self._explores and self.leader == self._rank
        self.sync()

    def sync(self) -> None:
        """Broadcast this rank's dictionary to the ranks that it leads, or receive the leader's."""
        for leader in self._leaders:
            try:
                update = _broadcast(self._connections, leader, self._update() if leader == self._rank else "")
            except RuntimeError as error:
                self._break_off(error)
                return
            if leader == self.leader != self._rank and update:
                self._adopt(update)

    def end(self) -> None:
        """Stop sharing. This rank keeps what it knows, and learns by itself. Other ranks notice at their next sync."""
        self._leaders = ()
        self._keep_to_itself()
        self._connections = None

    def _update(self) -> str:
        """The dictionary as JSON; an empty string if no best backend has changed since the last one."""
        dictionary = self._selector.dictionary
        sent = self._sent
        self._sent = {
            key: (winners(dictionary, key), tuple(sorted(entry.timings, key=lambda name: entry.timings[name].seconds)))
            for key, entry in dictionary
        }
        return "" if sent == self._sent else dictionary.to_json()

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


def _connect(group: dist.ProcessGroup | None) -> Any:
    """New connections among the ranks of a group. They are closed when the object goes.

    ``torch.distributed.new_group`` is of no use here: all ranks of the job have to call it; or else, with
    ``use_local_synchronization``, the ranks have to be in equally many groups, and cannot make a group twice.

    Raises:
        RuntimeError: a rank does not come.
        TimeoutError: the store does not answer.
    """
    from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, _get_default_store

    lowest = min(dist.get_process_group_ranks(group))  # no other group of this name has it
    name = "all" if group is None else f"{group.group_name}/{lowest}"
    store = PrefixStore(f"fastensor/sharing/{name}/{next(_numbers[name])}", _get_default_store())
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return call_within(_PATIENCE.total_seconds(), lambda: ProcessGroupGloo(store, rank, size, timeout=_PATIENCE))


def _broadcast(connections: Any, root: int, text: str) -> str:
    """The text of the rank ``root``, on all ranks."""
    data = bytearray(text.encode())
    count = torch.tensor([len(data)])
    connections.broadcast(count, root).wait()
    if connections.rank() != root:
        data = bytearray(int(count))
    if data:
        connections.broadcast(torch.frombuffer(data, dtype=torch.uint8), root).wait()
    return data.decode()


def share_choice(
    backend: str | Selector, folder: str, device: torch.device, group: dist.ProcessGroup | None = None
) -> Sharing | None:
    """Begin to share what chooses backends for files in a folder. All ranks of the group call it, at the same points.

    Args:
        backend: as for :func:`fastensor.save`.
        folder: where the files go; it need not exist.
        device: the device that this rank computes on.
        group: which ranks share; see :class:`Sharing`.

    Returns:
        What shares it; None if the backend is not chosen by a selector.
    """
    if isinstance(backend, str):
        if backend != AUTO:
            return None
        backend = current_selector(folder)
    return Sharing(backend, kind_of(device, identity(folder)), group)
