"""Reading a whole file into the page cache, from its begin to its end, while values are read in any order.

One after the other, the pages of a file come several times as fast as in a shuffled order. So a file that fits into
memory is swept once a part of its values was wanted: the others probably will be.

Several processes may sweep a file, such as the workers of a ``DataLoader``. They share the work: the kernel reads no
page twice, four sweeps at once took no longer than one, and a file that is there already takes 0.1 s of CPU time per
GiB. What other processes sweep is not known here: together with that, the files of this one may not fit.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import suppress

from fastensor.files.budgets import available_memory
from fastensor.files.forks import first_in_children

_MOST_OF_MEMORY = 0.5
"""The files that a process sweeps may take this part of the memory that is available, so that the pages of others
stay."""
_PIECE_NBYTES = 64 << 20
"""Memory is looked at again after each piece: other programs may want it."""
_READ_NBYTES = 4 << 20
"""Large reads, one behind the other, come into large folios of the page cache, whatever the device's read-ahead is."""


def fits(nbytes: float, available: int) -> bool:
    """True if the page cache can take ``nbytes``.

    Args:
        nbytes: what it does not have yet of a file, and :func:`swept_nbytes`.
        available: bytes of memory that are available.

    >>> fits(100, 200), fits(100, 199)
    (True, False)
    """
    return nbytes <= _MOST_OF_MEMORY * available


def swept_nbytes(*, besides: int) -> int:
    """Bytes of the page cache that sweeps of this process take, if their files are still read: those pages are to stay.

    Args:
        besides: a descriptor of the file that does not count.
    """
    sizes: dict[tuple[int, int], int] = {}
    for one in _sweeps.valuerefs():  # not by iterating: other threads begin sweeps
        if (sweep := one()) is not None:
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
    return Sweep(fd, nbytes) if fits(missing + swept_nbytes(besides=fd), available_memory()) else None


def bring(fd: int, offset: int, nbytes: int) -> None:
    """Read a part of a file into the page cache."""
    buffer = memoryview(bytearray(_READ_NBYTES))
    for begin in range(offset, offset + nbytes, _READ_NBYTES):
        os.preadv(fd, [buffer[: offset + nbytes - begin]], begin)


class Sweep:
    """A thread that reads one part of a file after the other. It ends by itself, with the file, or when
    the rest of it does not fit any more, together with what other sweeps take; or with the process.

    It counts in :func:`swept_nbytes` as long as this object exists.

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
        self._file = os.fdopen(os.dup(fd), "rb")
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fastensor-sweep", daemon=True)
        _sweeps[id(self)] = self  # before it begins: another one counts it
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True if nothing more will be read."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Read no more, soon. Waits for nothing."""
        self._stopped = True

    def _run(self) -> None:
        asked = 0
        with self._file as file, suppress(OSError):  # values are read all the same, and say what is wrong
            while left := self.nbytes - asked:
                others = swept_nbytes(besides=file.fileno())
                if self._stopped or not fits(left + others, available_memory()):
                    break
                begin, asked = asked, asked + min(_PIECE_NBYTES, left)
                bring(file.fileno(), begin, asked - begin)
        self.nbytes = asked


_sweeps: weakref.WeakValueDictionary[int, Sweep] = weakref.WeakValueDictionary()
"""The sweeps of this process, by their ids."""
first_in_children(_sweeps.clear)  # the parent's do not count


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
