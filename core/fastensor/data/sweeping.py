"""Reading a whole file into the page cache, from its begin to its end, while values are read in any order.

One after the other, the pages of a file come several times as fast as in a shuffled order. So a file that fits into
memory is swept once a part of its values was wanted: the others probably will be.
"""

from __future__ import annotations

import os
import threading

from fastensor.data.engines.buffered import advise
from fastensor.files.budgets import available_memory

_MOST_OF_MEMORY = 0.5
"""A file may take this part of the memory that is available, so that the pages of other files stay."""
_PIECE_NBYTES = 64 << 20
"""A piece is asked for when the end of the one before has come. Memory is looked at again after each: other programs
may want it."""


def fits(nbytes: float, available: int) -> bool:
    """Whether the page cache can take so many bytes of a file.

    Args:
        nbytes: what it does not have yet.
        available: bytes of memory that are available.

    >>> fits(100, 200), fits(100, 199)
    (True, False)
    """
    return nbytes <= _MOST_OF_MEMORY * available


class Sweep:
    """A thread that asks the kernel for one part of a file after the other. It ends by itself, with the file, or when
    the rest of it does not fit any more; or with the process.

    Args:
        fd: open for reading. It is duplicated.
        nbytes: the size of the file.

    Raises:
        OSError, RuntimeError: there is no descriptor, or no thread.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = os.dup(fd)
        self._nbytes = nbytes
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fastensor-sweep", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there is no thread. After an interrupt there may be one, which closes the descriptor
            os.close(self._fd)
            raise

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be asked for. Some of what was may still be on its way."""
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Ask for no more, soon. Waits for nothing."""
        self._stopped = True

    def _run(self) -> None:
        try:
            for begin in range(0, self._nbytes, _PIECE_NBYTES):
                left = self._nbytes - begin
                if self._stopped or not fits(left, available_memory()):
                    return
                advise(self._fd, begin, min(_PIECE_NBYTES, left))
                if begin:
                    os.pread(self._fd, 1, begin - 1)  # waits for the piece before
        except OSError:  # values are read all the same, and say what is wrong
            pass
        finally:
            os.close(self._fd)
