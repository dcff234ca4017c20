"""``fastensor.checkpoint.cooperative.save``: ranks that hold the same state write one file together.

1. Each rank plans the file, which pickles its state, or takes the tensors that are said to be alike. Rank 0 compares
   what the others found with what it has itself.
2. Rank 0 makes a new file, cuts its plan into extents, and sends each rank the layout of its extent.
3. Each rank writes its extent from its own memory, and syncs the file.
4. Rank 0 fills in the CRC32s that were not known before, syncs, and publishes the file.

For rank 0, all of this is one :class:`~fastensor.checkpoint.writing.save_transaction.SaveTransaction`, as any save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Unpack

import torch
import torch.distributed as dist
from isal import isal_zlib

from fastensor.backends.registry import Fallback, record_fallback
from fastensor.checkpoint.cooperative.extent import SharedFile, opened, share, write_extent
from fastensor.checkpoint.cooperative.options import DEFAULT_TIMEOUT_SECONDS, ReplicaCheck, check_cooperation
from fastensor.checkpoint.cooperative.ranks import Ranks
from fastensor.checkpoint.cooperative.replicas import (
    Replica,
    describe,
    first_difference,
    name_of_storage,
    replica_of,
    storages_of,
)
from fastensor.checkpoint.nested import is_nested
from fastensor.checkpoint.writing.report import Freeing, SaveReport
from fastensor.checkpoint.writing.save import SaveOptions, SaveSettings
from fastensor.checkpoint.writing.save_transaction import ByTorch
from fastensor.errors import CheckpointWriteError, ReplicaMismatchError
from fastensor.files import posix
from fastensor.files.arguments import checks_keywords_with
from fastensor.files.atomic import NewFile
from fastensor.files.job_store import has_others
from fastensor.files.os_errors import write_errors
from fastensor.select.transfer import BackendChoice, Transfer
from fastensor.stitch.extents import Extent, cut
from fastensor.stitch.image import Header, Image, Payload, Segment
from fastensor.stitch.source import Plan, Source

_DESCRIBE = "describe"
"""Rank 0's reply that asks for a description of the state."""


@checks_keywords_with(SaveOptions.__annotations__)
def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
    check_replicas: ReplicaCheck = "sample",
    replicated: Iterable[torch.Tensor] | None = None,
    **options: Unpack[SaveOptions],
) -> SaveReport:
    """Save an object that all ranks of a group hold, as :func:`fastensor.save` does, together.

    All ranks call it, with the same arguments, at the same point. Each one writes a part of the file, from its own
    memory. The file is byte for byte the one that rank 0's :func:`fastensor.save` would have written. When the call
    returns on any rank, the file is in its place, and durable. If it raises, what was there before is kept, unless the
    message says otherwise.

    Args:
        obj: as for :func:`fastensor.save`. The tensors of a rank are borrowed until the call returns on that rank.
        path: a path on a filesystem that all ranks share; it may be on one machine. If ranks give different ones, that
            of rank 0 counts. Where the file would not be replaced but written in place, and for URLs, rank 0 saves
            alone; the report's ``fallbacks`` say that.
        group: the ranks that take part, in a process group of any backend; None for all. Other ranks do not call it.
            Ranks talk through the store of ``torch.distributed``.
        timeout: how many seconds rank 0 waits for the slowest rank: until it has called, and until it has written its
            part after rank 0 has. Others wait twice as long for rank 0. The death of a rank is noticed no sooner,
            unless the store was in its process. No rank waits longer than ``timeout`` for an answer of the store.
        check_replicas: before anything is written, the CRC32s of the tensors are compared: of up to 4096 bytes from the
            middle of each storage (``"sample"``), or of all bytes (``"all"``), which every rank reads once more.
        replicated: the tensors of this rank that all ranks hold alike, in the same order on all of them; for data
            parallel training, parameters and optimizer states. Everything else in the file is rank 0's, whatever the
            other ranks have in ``obj``: buffers of models, say, which have other values on each rank. These tensors
            rank 0 writes alone, behind the others, so they should be small. None means that all of ``obj`` is the same
            on all ranks, other objects than tensors as well.
        options: the keywords of :func:`fastensor.save`.

    Returns:
        The report of rank 0, on all ranks.

    Raises:
        ReplicaMismatchError: ranks hold different states. Nothing was written.
        CheckpointWriteError: as :func:`fastensor.save`; or another rank has failed, did not come in time, or does not
            see the file that rank 0 has made. The message names the rank.
        Exception: as :func:`fastensor.save`, on the rank that has failed.

    Without other ranks, this is :func:`fastensor.save`. Use it in one thread at a time, and not in signal handlers. A
    rank that leaves out a call is one behind from then on: later saves of the group fail, and name it.
    """
    if is_nested():
        raise CheckpointWriteError(
            f"{os.fspath(path)} was not saved: ranks cannot save together inside of other work of Fastensor, which a "
            f"signal handler has interrupted; save on rank 0 alone (fastensor.save)"
        )
    settings = SaveSettings(**options)
    check_cooperation(timeout, check_replicas)
    if not has_others(group):
        transaction, planner = settings.prepare(obj, path)
        return transaction.run(planner)
    ranks = Ranks(group, f"saving {os.fspath(path)}", timeout)
    if ranks.rank:
        return _follow(
            ranks,
            lambda: settings.planner(obj, path)([]) if replicated is None else storages_of(replicated),
            settings,
            check_replicas,
        )
    return _Leader(ranks, settings.backend, check_replicas, replicated).save(obj, path, settings)


@dataclass(frozen=True, slots=True)
class _Work:
    """An extent that a rank is to write."""

    file: SharedFile
    extent: Extent
    segments: Sequence[Segment]
    """An image of the extent, in which storages are numbered in the order of their bytes."""
    storages: Sequence[int]
    """By that number, which of the storages that all ranks hold it is."""


class _Leader:
    """Rank 0 of one save."""

    def __init__(
        self, ranks: Ranks, backend: BackendChoice, check: ReplicaCheck, replicated: Iterable[torch.Tensor] | None
    ) -> None:
        self._ranks = ranks
        self._backend = backend
        self._check = check
        self._replicated = replicated
        self._positions: dict[int, int] = {}
        """Number of each storage of the plan that all ranks hold, among those; the same on all ranks."""
        self._shared = False
        """True if all ranks have written the file."""

    def save(self, obj: object, path: str | os.PathLike[str], settings: SaveSettings) -> SaveReport:
        ranks = self._ranks
        try:
            transaction, planner = settings.prepare(obj, path, write_shared=self._write)
            transaction.before_publishing = ranks.decide_to_publish
            report = self._amended(transaction.run(lambda fallbacks: self._compared(planner(fallbacks))))
            self._report(report)
        except BaseException as error:
            ranks.fail(error)
            raise
        return report

    def _report(self, report: SaveReport) -> None:
        try:
            self._ranks.reply([replace(report, freeing=Freeing())] * (self._ranks.size - 1))
        except CheckpointWriteError as error:
            raise CheckpointWriteError(f"{report.path} is saved, but other ranks could not be told: {error}") from error

    def _amended(self, report: SaveReport) -> SaveReport:
        if self._shared:
            return replace(report, reason=f"{report.reason}; {self._ranks.size} ranks have written a part each")
        fallbacks = list(report.fallbacks)
        record_fallback(fallbacks, "saving together", f"{report.path}: {report.reason}, so rank 0 has saved alone")
        return replace(report, fallbacks=tuple(fallbacks))

    def _compared(self, planned: Plan | ByTorch) -> Plan | ByTorch:
        """Compare what all ranks hold.

        Raises:
            ReplicaMismatchError: a rank holds something else.
            CheckpointWriteError: another rank has failed, or does not come.
        """
        if isinstance(planned, ByTorch):
            self._ranks.gather()
            return planned
        held = planned if self._replicated is None else storages_of(self._replicated)
        own = replica_of(held, self._check)
        found: list[Replica | None] = self._ranks.gather()
        others = [self._planned(rank, one) for rank, one in enumerate(found, 1)]
        self._positions = _positions(planned, held)
        if any(other.structure != own.structure for other in others):
            self._compare_descriptions(held)
        for rank, other in enumerate(others, 1):
            for number, position in self._positions.items():
                if own.crc32s[position] != other.crc32s[position]:
                    raise self._mismatch(rank, f"{name_of_storage(planned, number)!r} has other values")
        return planned

    def _planned(self, rank: int, replica: Replica | None) -> Replica:
        """
        Raises:
            CheckpointWriteError: the rank could not plan the file.
        """
        if replica is None:
            raise CheckpointWriteError(
                f"rank {self._ranks.names[rank]} cannot lay out the file as rank {self._ranks.names[0]} can; its log "
                f"says why"
            )
        return replica

    def _compare_descriptions(self, held: Plan) -> None:
        self._ranks.reply([_DESCRIBE] * (self._ranks.size - 1))
        descriptions = self._ranks.gather()
        own = describe(held)
        for rank, description in enumerate(descriptions, 1):
            if difference := first_difference(own, description):
                name, one, two = difference
                raise self._mismatch(rank, f"{name!r} is {two}, expected {one}")

    def _mismatch(self, rank: int, what: str) -> ReplicaMismatchError:
        names = self._ranks.names
        return ReplicaMismatchError(
            f"rank {names[rank]} holds another state than rank {names[0]}, which are to save it together: {what}. Save "
            f"on rank 0 alone (fastensor.save), or find out where the ranks have parted"
        )

    def _write(self, source: Source, new: NewFile, fallbacks: list[Fallback]) -> tuple[Transfer, Sequence[int]]:
        """Have all ranks write the file. See :data:`~fastensor.checkpoint.writing.save_transaction.Writer`."""
        assert isinstance(source, Plan)
        pieces = cut(source.image, self._ranks.size, range(len(source.storages)) - self._positions.keys())
        parts = [
            _part(segments, self._positions if rank else range(len(source.storages)))
            for rank, segments in enumerate(pieces.parts)
        ]
        file = share(new, source.nbytes)
        self._ranks.reply(
            [
                _Work(file, extent, part.segments, [self._positions[number] for number in part.numbers])
                for extent, part in zip(pieces.extents[1:], parts[1:], strict=True)
            ]
        )
        own = Plan(Image(parts[0].segments), tuple(source.storages[number] for number in parts[0].numbers))
        directory = os.path.dirname(new.path)
        transfer, found = write_extent(own, pieces.extents[0], new.fd, directory, self._backend, fallbacks)
        crc32s = [0] * len(source.storages)
        for part, of_part in zip(parts, (found, *self._ranks.gather()), strict=True):
            for number, nbytes, crc32 in zip(part.numbers, part.sizes, of_part, strict=True):
                crc32s[number] = isal_zlib.crc32_combine(crc32s[number], crc32, nbytes)
        self._write_own(source, new.fd, crc32s)
        for header in pieces.unfilled:
            posix.write_fully(new.fd, memoryview(header.filled(crc32s)), header.offset)
        posix.truncate(new.fd, source.nbytes)
        self._shared = True
        return transfer, crc32s

    def _write_own(self, source: Plan, fd: int, crc32s: list[int]) -> None:
        """Write the storages that other ranks do not hold."""
        if len(self._positions) == len(source.storages):
            return
        for segment in source.image.segments:
            if isinstance(segment, Payload) and segment.storage not in self._positions:
                storage = source.storages[segment.storage]
                assert isinstance(storage, torch.UntypedStorage)
                values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                data = values[segment.before : segment.before + segment.nbytes].cpu().numpy().data
                crc32s[segment.storage] = isal_zlib.crc32(data)
                posix.write_fully(fd, data, segment.offset)


def _positions(planned: Plan, held: Plan) -> dict[int, int]:
    """Number of each storage of a plan that all ranks hold, among those."""
    if planned is held:
        return {number: number for number in range(len(planned.storages))}
    known = {_identity(storage): position for position, storage in enumerate(held.storages)}
    found = ((number, known.get(_identity(storage))) for number, storage in enumerate(planned.storages))
    return {number: position for number, position in found if position is not None}


def _identity(storage: object) -> int:
    assert isinstance(storage, torch.UntypedStorage)
    return int(storage._cdata)


class _Part(NamedTuple):
    """The layout of one extent, in which storages are numbered in the order of their bytes."""

    segments: list[Segment]
    numbers: list[int]
    """Their numbers in the whole plan."""
    sizes: list[int]
    """Bytes of each that are in the extent."""


def _part(segments: Sequence[Segment], held: Container[int]) -> _Part:
    """Number the storages of an extent anew. There are zeros in place of the storages that its rank does not hold."""
    part = _Part([], [], [])
    anew: dict[int, int] = {}
    for segment in segments:
        if isinstance(segment, Header):
            blanks = tuple((at, anew[number]) for at, number in segment.blanks)
            part.segments.append(segment._replace(blanks=blanks))
        elif segment.storage in held:
            anew[segment.storage] = len(part.numbers)
            part.segments.append(segment._replace(storage=anew[segment.storage]))
            part.numbers.append(segment.storage)
            part.sizes.append(segment.nbytes)
        else:
            part.segments.append(Header(segment.offset, bytes(segment.nbytes)))
    return part


def _follow(
    ranks: Ranks, hold: Callable[[], Plan | ByTorch], settings: SaveSettings, check: ReplicaCheck
) -> SaveReport:
    """All ranks but rank 0. ``hold`` returns what this rank holds as all others do."""
    held: Plan | ByTorch | None = None
    reply: object = None
    answer: Replica | dict[str, str] | Sequence[int] | None
    try:
        while not isinstance(reply, SaveReport):
            if reply is None:
                held = hold()
                answer = replica_of(held, check) if isinstance(held, Plan) else None
            else:
                assert isinstance(held, Plan)
                answer = _do(reply, held, settings) if isinstance(reply, _Work) else describe(held)
            ranks.send(answer)
            reply = ranks.receive()
    except BaseException as error:
        ranks.fail(error)
        raise
    return reply


def _do(work: _Work, held: Plan, settings: SaveSettings) -> Sequence[int]:
    """Write this rank's extent, and make it durable. Returns the CRC32 of each storage's bytes in the extent."""
    if work.extent[0] == work.extent[1]:
        return ()
    directory = os.path.dirname(work.file.path)
    part = Plan(Image(work.segments), tuple(held.storages[number] for number in work.storages))
    with write_errors(directory, "this rank could not write its part of the file"), opened(work.file) as fd:
        _, crc32s = write_extent(part, work.extent, fd, directory, settings.backend, [])
        if settings.durable:
            posix.sync_file(fd)
    return crc32s
