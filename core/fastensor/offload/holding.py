"""How much memory of one kind cells take, within a budget that is checked whenever one is added."""

from __future__ import annotations

from fastensor.offload.cell import Cell


class Holding:
    """Cells that take memory of one kind. Used with the mover's lock held.

    Args:
        budget: how many bytes they may take together. One that is larger by itself may be there alone, unless the
            budget is nothing.

    >>> import torch
    >>> from torch.multiprocessing.reductions import StorageWeakRef
    >>> def cell(nbytes):
    ...     storage = torch.UntypedStorage(nbytes)
    ...     return Cell(nbytes, 0, storage.device, StorageWeakRef(storage), storage)
    >>> holding, first, second = Holding(100), cell(80), cell(30)
    >>> holding.add(first, 80)
    >>> holding.fits(30), holding.fits(20)
    (False, True)
    >>> holding.add(second, 30)
    Traceback (most recent call last):
    AssertionError: 110 bytes are held, and 100 allowed
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.nbytes = 0
        self.peak_nbytes = 0
        self._cells: dict[Cell, int] = {}

    def __contains__(self, cell: Cell) -> bool:
        return cell in self._cells

    def __len__(self) -> int:
        return len(self._cells)

    def cells(self) -> list[Cell]:
        """The one that was added, or used, longest ago is the first."""
        return list(self._cells)

    @property
    def oldest(self) -> Cell:
        return next(iter(self._cells))

    def fits(self, nbytes: int) -> bool:
        """Whether a cell that takes so much may be added."""
        return self.nbytes + nbytes <= self.budget or (self.budget > 0 and not self._cells)

    def add(self, cell: Cell, nbytes: int, *, beyond: bool = False) -> None:
        """
        Args:
            nbytes: what it takes.
            beyond: whether it may be added though there is no room for it.
        """
        self.remove(cell)
        total = self.nbytes + nbytes
        assert beyond or self.fits(nbytes), f"{total} bytes are held, and {self.budget} allowed"
        self._cells[cell] = nbytes
        self.nbytes = total
        self.peak_nbytes = max(self.peak_nbytes, total)

    def use(self, cell: Cell) -> None:
        """It becomes the last."""
        self._cells[cell] = self._cells.pop(cell)

    def remove(self, cell: Cell) -> None:
        """It takes nothing any more. Does nothing if it did not."""
        self.nbytes -= self._cells.pop(cell, 0)
        if not self._cells:
            self.nbytes = 0  # an interrupt may have come between the two
