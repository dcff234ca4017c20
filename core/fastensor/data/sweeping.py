"""Reading a whole file into the page cache, from its begin to its end, while values are read in any order.

One after the other, the pages of a file come several times as fast as in a shuffled order. So a file that fits into
memory is swept once a part of its values was wanted: the others probably will be.

Several processes may sweep a file, such as the workers of a ``DataLoader``. They share the work: the kernel reads no
page twice, four sweeps at once took no longer than one, and a file that is there already takes 27 ms of CPU time per
GiB. What other processes sweep is not known here: together with that, the files of this one may not fit.
"""

from __future__ import annotations

import os
import threading
import weakref
from itertools import takewhile

from fastensor.data.engines.buffered import advise
from fastensor.files import posix
from fastensor.files.budgets import available_memory
from fastensor.files.forks import first_in_children

_MOST_OF_MEMORY = 0.5
"""The files that a process sweeps may take this part of the memory that is available, so that the pages of others
stay."""
_PIECE_NBYTES = 64 << 20
"""A piece is asked for when the end of the one before has come. Memory is looked at again after each: other programs
may want it."""


def fits(nbytes: float, available: int) -> bool:
    """True if the page cache can take ``nbytes``.

    Args:
        nbytes: what it does not have yet of a file, and :func:`swept_nbytes`.
        available: bytes of memory that are available.

    >>> fits(100, 200), fits(100, 199)
    (True, False)
    """
    return nbytes <= _MOST_OF_MEMORY * available


def swept_nbytes(*, besides: int, before: Sweep | None = None) -> int:
    """Bytes of the page cache that sweeps of this process take, if their files are still read: those pages are to stay.

    Args:
        besides: a descriptor of the file that does not count.
        before: only sweeps that have begun before this one count.
    """
    sizes: dict[tuple[int, int], int] = {}
    for sweep in takewhile(lambda one: one is not before, _existing()):
        sizes[sweep.file] = max(sweep.nbytes, sizes.get(sweep.file, 0))
    sizes.pop(_identity(besides), None)
    return sum(sizes.values())


def begin_sweep(fd: int, nbytes: int, missing: float) -> Sweep | None:
    """A sweep of a file that fits into memory, together with what other sweeps take. Any thread may call this.

    Args:
        fd: open for reading. It is duplicated.
        nbytes: the size of the file.
        missing: bytes of it that the page cache does not have yet.

    Raises:
        OSError, RuntimeError: there is no descriptor, or no thread.
    """
    with _beginning:
        fit = fits(missing + swept_nbytes(besides=fd), available_memory())
        return Sweep(fd, nbytes) if fit else None


class Sweep:
    """A thread that asks the kernel for one part of a file after the other. It ends by itself, with the file, or when
    the rest of it does not fit any more, together with what earlier sweeps take; or with the process. So where memory
    gets short, the later sweeps make room.

    It counts in :func:`swept_nbytes` as long as this object exists. In a forked child, it does not.

    Args:
        fd: open for reading. It is duplicated.
        nbytes: the size of the file.

    Raises:
        OSError, RuntimeError: there is no descriptor, or no thread.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self.file = _identity(fd)
        self.nbytes = nbytes
        """Bytes of the page cache that it takes: its file, and after its end what it has asked for."""
        self._fd = os.dup(fd)
        _sweeps[id(self)] = self
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fastensor-sweep", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there is no thread. After an interrupt there may be one, which closes the descriptor
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        """True if nothing more will be asked for. Some of what was may still be on its way."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ask for no more, soon. Waits for nothing."""
        self._stopped = True

    def close(self) -> None:
        """Close the descriptor. Called by the thread at its end, or where there is none."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            posix.close_read_only(fd)

    def _run(self) -> None:
        asked = 0
        try:
            while left := self.nbytes - asked:
                earlier = swept_nbytes(besides=self._fd, before=self)
                if self._stopped or not fits(left + earlier, available_memory()):
                    return
                begin, asked = asked, asked + min(_PIECE_NBYTES, left)
                advise(self._fd, begin, asked - begin)
                if begin:
                    os.pread(self._fd, 1, begin - 1)  # waits for the piece before
        except OSError:  # values are read all the same, and say what is wrong
            pass
        finally:
            self.nbytes = asked
            self.close()


_sweeps: weakref.WeakValueDictionary[int, Sweep] = weakref.WeakValueDictionary()
"""The sweeps of this process, by their ids, the earliest first."""
_beginning = threading.Lock()
"""Held from the question whether a file fits until its sweep counts."""


def _existing() -> list[Sweep]:
    return [sweep for one in _sweeps.valuerefs() if (sweep := one()) is not None]


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _close_in_child() -> None:
    """A forked child has the descriptors, and not the threads that close them, nor the one that may hold the lock."""
    global _beginning
    _beginning = threading.Lock()
    for sweep in _existing():
        sweep.close()
    _sweeps.clear()


first_in_children(_close_in_child)
