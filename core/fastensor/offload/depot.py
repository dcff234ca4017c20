"""Where cells are kept: blocks of host memory, and slots on SSDs, both made when they are first wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from fastensor.backends import registry
from fastensor.backends.arena import BLOCK_NBYTES, Arena, ArenaClosedError
from fastensor.backends.memory import Buffer
from fastensor.errors import OffloadError
from fastensor.offload import copying
from fastensor.offload.cell import Cell, Home
from fastensor.offload.config import OffloadConfig
from fastensor.offload.copying import prepare
from fastensor.offload.crew import THREADS
from fastensor.offload.slots import SlotFiles
from fastensor.select.context import Context, Operation
from fastensor.select.current import current_selector
from fastensor.select.selector import Selector
from fastensor.select.transfer import Transfer


class Depot:
    """Used with the mover's lock held, but for :meth:`bounce_block`, and for moving what is in places.

    Args:
        config: where, and how much.
        dram_nbytes: how much of host memory is for cells that rest.
    """

    def __init__(self, config: OffloadConfig, dram_nbytes: int) -> None:
        self._config = config
        self._slots: SlotFiles | None = None
        self._selector: Selector | None = None
        """None if a backend was named."""
        self._staged = Arena(lambda: dram_nbytes + config.staging_bytes // BLOCK_NBYTES * BLOCK_NBYTES)
        self._bounce = Arena(lambda: 2 * THREADS * BLOCK_NBYTES)
        self.broken = ""
        """Why nothing is written any more; empty if it is."""
        self.closed = False

    @property
    def slots(self) -> SlotFiles:
        """
        Raises:
            OffloadError: there are none.
        """
        if self._slots is None:
            if self.closed:
                raise OffloadError("it is closed")
            try:
                self._slots = SlotFiles(self._config)
            except (OSError, OffloadError) as error:
                self.broken = str(error)
                raise OffloadError(self.broken) from error
            if self._config.backend == registry.AUTO:
                self._selector = current_selector(self._slots.files[0].folder, of="activations")
        return self._slots

    def sizes(self) -> dict[str, int]:
        """How much is where, in bytes."""
        return {
            "staged": self._staged.nbytes + self._bounce.nbytes,
            "on_ssd": self._slots.used_nbytes if self._slots else 0,
            "reserved_on_ssd": self._slots.reserved_nbytes if self._slots else 0,
        }

    def transfer(self, operation: Operation, cell: Cell, names: tuple[str, ...]) -> Transfer:
        """Hears how long it takes, and, if it is a write, chooses the backend."""
        context = Context(operation, cell.device.type)
        choose = operation == "write"
        return Transfer(names, cell.nbytes, context, self._selector, choose=choose, mode="write_read", default=names[0])

    def find_slot(self, cell: Cell) -> int:
        """Give a cell a slot. Returns the number of its pieces.

        Raises:
            OSError: the disk has no space, or fails.
            OffloadError: ``ssd_bytes`` leave no room, or there are no slots.
        """
        slot = self.slots.allocate(cell.lead + cell.nbytes)
        if slot is None:
            raise OffloadError(f"ssd_bytes leave no room for {cell.nbytes} bytes more")
        cell.slot = slot
        cell.pieces = list(slot.pieces())
        cell.crc32s = [0] * len(cell.pieces)
        return len(cell.pieces)

    def free_slot(self, cell: Cell) -> None:
        """Nobody reads or writes it any more."""
        slot, cell.slot = cell.slot, None
        if slot is not None and self._slots is not None:
            self._slots.free(slot)

    def find_blocks(self, cell: Cell) -> bool:
        """Give a cell blocks of host memory for all of it, if they can be had at once."""
        nbytes = in_blocks(cell.nbytes)
        with suppress(MemoryError, ArenaClosedError):
            self._staged.reserve(self._staged.nbytes - self._staged.free_nbytes + nbytes)
        if self._staged.free_nbytes < nbytes:
            return False
        while len(cell.blocks) < nbytes // BLOCK_NBYTES:  # it may have some, from before an interrupt
            self._staged.take(cell.blocks, while_waiting=nullcontext, stopped=lambda: False)
        return True

    @contextmanager
    def bounce_block(self, device: torch.device) -> Iterator[Buffer]:
        """A block for a piece on its way from or to a device. There are more than threads; whoever finds none waits for
        one. Any thread may, without the lock."""
        self._bounce.reserve(2 * THREADS * BLOCK_NBYTES)
        holder: list[Buffer] = []
        try:
            block = self._bounce.take(holder, while_waiting=nullcontext, stopped=lambda: False)
            assert block is not None
            prepare(block, device)
            yield block
        finally:
            for one in holder:
                self._bounce.give(one)

    def tidy(self, cell: Cell) -> None:
        """Take back what a cell needs no more, once nobody moves it."""
        if cell.writing is not None or cell.reading is not None:
            return
        if cell.source is not None or cell.home in (Home.STORED, Home.BROKEN, Home.RELEASED):
            while cell.blocks:
                self._staged.give(cell.blocks.pop())
        if cell.home is Home.RELEASED:
            self.free_slot(cell)
            cell.source = cell.storage = cell.memory = None

    def forget(self) -> None:
        """In a forked child: what is pinned, and in the files, is its parent's."""
        self._staged.forget()
        self._bounce.forget()
        if self._slots is not None:
            self._slots.forget()

    def close(self) -> None:
        """Give all of it back; blocks in use as soon as they are. Nothing is moved any more."""
        self.closed = True
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()
        self._staged.close()
        self._bounce.close()


def in_blocks(nbytes: int) -> int:
    """What so many bytes take in whole blocks."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


def cost(cell: Cell) -> int:
    """What a cell takes of budgets of host memory: whole blocks if it is to be in them."""
    return in_blocks(cell.nbytes) if copying.is_staged_first(cell.device) else cell.nbytes
