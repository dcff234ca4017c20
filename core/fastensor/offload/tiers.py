"""The places that saved bytes are moved to: staging blocks in host memory, and slots on SSDs.

Copies that devices make to blocks and from them are queued, and nobody waits for them here. What they use is given back
once their events are reached.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from fastensor.backends import registry
from fastensor.backends.buffers import BUFFER_NBYTES, Buffer, BufferPool
from fastensor.backends.streams import Event, are_reached
from fastensor.errors import OffloadError
from fastensor.files.budgets import available_memory
from fastensor.files.launchers import local_processes
from fastensor.files.words import human_size
from fastensor.offload import copying
from fastensor.offload.config import OffloadConfig
from fastensor.offload.saved import SavedBytes
from fastensor.offload.slots import FileSlot, SlotFiles
from fastensor.offload.statistics import Counters
from fastensor.select.context import Context, Operation
from fastensor.select.current import current_selector
from fastensor.select.selector import Selector
from fastensor.select.transfer import Transfer

_SHARE_OF_FREE_MEMORY = 0.5
_GROWTH_NBYTES = 64 << 20
"""Bytes by which staging memory grows, within the budgets."""
_logger = logging.getLogger("fastensor")


class StorageTiers:
    """Staging blocks and slots. Both are made when they are first needed.

    Call every method but :meth:`bounce_block` and :meth:`transfer` with the lock of
    :class:`~fastensor.offload.swapper.Swapper` held.

    Args:
        config: where the slots are, and how many bytes may be where.
        counters: gets the most bytes that were in slots.
        threads: how many threads may need a bounce block at once.
    """

    def __init__(self, config: OffloadConfig, counters: Counters, threads: int) -> None:
        self._config = config
        self._counters = counters
        self.dram_nbytes = _dram_budget(config)
        """Bytes of host memory for ranges that stay there."""
        self._slots: SlotFiles | None = None
        self._selector: Selector | None = None
        """None if the user has named a backend."""
        self.staging_nbytes = config.staging_nbytes
        """Bytes of ranges that may be on their way out."""
        self._blocks = BufferPool(
            lambda: in_blocks(self.dram_nbytes) + self.staging_nbytes // BUFFER_NBYTES * BUFFER_NBYTES
        )
        self.copying: deque[SavedBytes] = deque()
        """Ranges that are being copied to blocks, in the order in which that was queued."""
        self._leaving: deque[tuple[Sequence[Event], list[Buffer], torch.UntypedStorage | None]] = deque()
        """Blocks that are given back when events are reached: devices copy from them, or to them from a storage."""
        self._bounce_nbytes = threads * BUFFER_NBYTES
        self._bounce = BufferPool(lambda: self._bounce_nbytes)
        self.broken = ""
        """Reason for which nothing is written any more; empty if ranges are written."""
        self._closed = False

    def set_staging(self, nbytes: int) -> None:
        """Have other bytes of ranges be on their way out at most."""
        self.staging_nbytes = nbytes
        self._blocks.forget_limit()

    @property
    def slots(self) -> SlotFiles:
        """The files for slots, made when they are first needed.

        Raises:
            OffloadError: no file can be made, or the tiers are closed.
        """
        if self._slots is None:
            if self._closed:
                raise OffloadError("it is closed")
            try:
                self._slots = SlotFiles(self._config)
            except (OSError, OffloadError) as error:
                self.broken = str(error)
                raise OffloadError(self.broken) from error
            if self._config.backend == registry.AUTO:
                self._selector = current_selector(self._slots.files[0].folder, of="activations")
        return self._slots

    def stop(self, reason: str) -> None:
        """Have nothing written any more, and report that once."""
        if not self.broken:
            _logger.error("no activations are offloaded any more: %s", reason)
        self.broken = reason

    def sizes(self) -> dict[str, int]:
        """Bytes of memory, of slots in use, and of space that the files take."""
        return {
            "staged": self._blocks.nbytes + self._bounce.nbytes,
            "on_ssd": self._slots.used_nbytes if self._slots else 0,
            "reserved_on_ssd": self._slots.reserved_nbytes if self._slots else 0,
        }

    def transfer(
        self, operation: Operation, saved: SavedBytes, backends: tuple[str, ...], *, learn: bool = True
    ) -> Transfer:
        """The choice of a backend for one transfer. Only writes choose: reads use the first of ``backends`` that works.

        Args:
            operation: what is done.
            saved: with which range.
            backends: the backends that can do it, the preferred one first.
            learn: whether the time of the transfer says how fast the backend is.
        """
        context, chooses = Context(operation, saved.device.type), operation == "write"
        return Transfer(
            backends,
            saved.nbytes,
            context,
            self._selector,
            choose=chooses,
            mode="write_read",
            default=backends[0],
            learn=learn,
        )

    def allocate(self, sizes: Sequence[int]) -> list[FileSlot]:
        """A slot for each of so many bytes, or none at all.

        Raises:
            OSError: the disk has no space, or fails.
            OffloadError: ``ssd_bytes`` leave no room, or there are no slots.
        """
        slots: list[FileSlot] = []
        try:
            for nbytes in sizes:
                if (slot := self.slots.allocate(nbytes)) is None:
                    raise OffloadError(f"ssd_bytes leave no room for {human_size(sum(sizes))} more")
                slots.append(slot)
        except BaseException:
            self.free(slots)
            raise
        self._counters.note_peak("peak_ssd_bytes", self.slots.used_nbytes)
        return slots

    def free(self, slots: Iterable[FileSlot]) -> None:
        """Give slots back, which nothing reads or writes any more."""
        if self._slots is not None:
            for slot in slots:
                self._slots.free(slot)

    def tidy(self, saved: SavedBytes) -> None:
        """Give back what a range needs no more, once no job uses the range."""
        if saved.write is not None or saved.read is not None:
            return
        if saved.released or saved.source is not None or saved.stored is not None:
            self.give(saved)
        if saved.released:
            saved.source = None
            stored, saved.stored = saved.stored, None
            if stored is not None:
                self.free(piece.slot for piece in stored.pieces)

    # Staging blocks. --------------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Events to wait for until no block is copied from or to."""
        leaving = [event for events, _, _ in self._leaving for event in events]
        return [event for saved in self.copying for event in saved.copied] + leaving

    def busy(self, nbytes: int) -> Sequence[Event]:
        """Events to wait for before :meth:`take` has so many bytes; none if that may be called now."""
        with suppress(MemoryError):  # which take raises
            self._reserve(in_blocks(nbytes))
        self._collect()
        return self._leaving[0][0] if self._leaving and self._blocks.free_nbytes < in_blocks(nbytes) else ()

    def take(self, saved: SavedBytes) -> None:
        """Give a range blocks.

        Raises:
            MemoryError: ranges whose write has failed hold the blocks, or the system gives no memory.
        """
        wanted = in_blocks(saved.nbytes)
        self._reserve(wanted)
        if self._blocks.free_nbytes < wanted:
            raise MemoryError("no staging memory is left: activations that could not be written hold it")
        blocks: list[Buffer] = []
        while len(blocks) < wanted // BUFFER_NBYTES:
            self._blocks.take(blocks)
        saved.blocks = sorted(blocks, key=lambda block: block.address)  # neighbours are copied at once

    def begin_copy(self, saved: SavedBytes) -> None:
        """Queue copies of a range to blocks. The device copies when it has computed the bytes.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is no memory for that. Nothing is under way.
        """
        source = saved.source
        assert source is not None
        try:
            self.take(saved)
            saved.copied = copying.queue_out(source, saved.origin, saved.nbytes, saved.blocks, saved.ready)
        except BaseException:
            copying.wait_until_left(saved.device)  # a part may have been queued
            self.give(saved)
            raise
        saved.address = source.data_ptr()
        self.copying.append(saved)

    def copied(self) -> Iterator[SavedBytes]:
        """Take back blocks that no copy uses any more. Returns ranges that were copied, each once. Nothing holds the
        memory any more that they were saved in."""
        self._collect()
        while self.copying and are_reached(self.copying[0].copied):
            saved = self.copying.popleft()
            saved.copied = ()
            _check_unchanged(saved)
            saved.source = saved.ready = None
            yield saved

    def leave(self, saved: SavedBytes) -> None:
        """Leave a range, which is being copied, where it was saved."""
        self.copying.remove(saved)
        self.give(saved)
        saved.copied = ()

    def give(self, saved: SavedBytes) -> None:
        """Take back the blocks of a range, when the copies from them and to them are done that are queued now. Nothing
        else uses them any more."""
        if saved.blocks:
            source = saved.source if saved.copied else None
            self._leaving.append(((*saved.copied, *saved.arrived), saved.blocks, source))
            saved.blocks = []
            self._collect()

    def _collect(self, *, even_in_use: bool = False) -> None:
        """Take back blocks that no copy uses any more."""
        while self._leaving and (even_in_use or are_reached(self._leaving[0][0])):
            for block in self._leaving.popleft()[1]:
                self._blocks.give(block)

    def _reserve(self, nbytes: int) -> None:
        wanted = self._blocks.nbytes - self._blocks.free_nbytes + nbytes
        if wanted > self._blocks.nbytes:  # much at once: it is pinned at once, and ranges find neighbours in it
            self._blocks.reserve(max(wanted, self._blocks.nbytes + _GROWTH_NBYTES))

    @contextmanager
    def bounce_block(self) -> Iterator[Buffer]:
        """A block for pieces on their way. There is one for each thread."""
        self._bounce.reserve(self._bounce_nbytes)
        with self._bounce.lending() as lent:
            yield self._bounce.take(lent)

    def forget(self) -> None:
        """In a forked child: files are the parent's."""
        if self._slots is not None:
            self._slots.forget()

    def close(self) -> None:
        """Give everything back. No job runs any more, and no copy."""
        self._closed = True
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()
        self._collect(even_in_use=True)
        self._blocks.close()
        self._bounce.close()


def _dram_budget(config: OffloadConfig) -> int:
    if config.dram_bytes is not None:
        return config.dram_bytes
    if config.target != "dram":
        return 0
    return int(available_memory() * _SHARE_OF_FREE_MEMORY) // local_processes()


def _check_unchanged(saved: SavedBytes) -> None:
    """Note that a range is lost whose storage was resized while it was copied: its memory was freed before."""
    source, end = saved.source, saved.origin + saved.nbytes
    if source is not None and (source.nbytes() < end or source.data_ptr() != saved.address):
        saved.failure = copying.resized(source, end)


def in_blocks(nbytes: int) -> int:
    """``nbytes`` in whole blocks."""
    return -(-nbytes // BUFFER_NBYTES) * BUFFER_NBYTES


def cost(saved: SavedBytes) -> int:
    """The bytes that a range takes of budgets of host memory: whole blocks if it is copied to blocks."""
    return in_blocks(saved.nbytes) if copying.is_staged(saved.device) else saved.nbytes
