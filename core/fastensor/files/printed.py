"""End of a program whose output cannot be written, as Unix tools end."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

CLOSED = 128 + signal.SIGPIPE
"""The exit status, in a shell, of a Unix tool whose output was closed by its reader, such as ``head``."""
_FAILED = 1


@contextmanager
def output_errors(program: str) -> Iterator[None]:
    """Write out what the block has printed, and end the program as Unix tools end if that fails.

    A reader that closes the pipe, as ``head`` does, has what it wants: nothing is said. Other failures, such as a full
    disk, are named on standard error. A broken pipe or socket that is not the program's output is passed on.

    Args:
        program: its name, for the message.

    Raises:
        SystemExit: with :data:`CLOSED` if the output was closed; with 1 if it could not be written.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for the rest of the program
    try:
        yield
    except BrokenPipeError:
        if not is_output_closed():
            raise
        for stream in _outputs():
            _drop(stream)
        raise SystemExit(CLOSED) from None
    except SystemExit:
        _write_out(program)
        raise
    except BaseException:
        for stream in _outputs():
            try:
                stream.flush()
            except OSError:
                _drop(stream)
        raise
    _write_out(program)


def is_output_closed() -> bool:
    """True if the reader of standard output or standard error has closed it."""
    poll = select.poll()
    for stream in _outputs():
        with suppress(io.UnsupportedOperation):  # a stream in memory
            poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _write_out(program: str) -> None:
    """Flush what was printed. What cannot be written is dropped, or the interpreter would fail on it again."""
    for stream in _outputs():
        try:
            stream.flush()
        except OSError as error:
            _drop(stream)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(CLOSED) from None
            print(f"{program}: the output cannot be written: {error.strerror}", file=sys.stderr, flush=True)
            raise SystemExit(_FAILED) from None


def _outputs() -> tuple[TextIO, TextIO]:
    return sys.stdout, sys.stderr


def _drop(stream: TextIO) -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
