"""Functions of an asynchronous writer for adapters, beyond those for users."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

from fastensor.checkpoint.asynchronous.writer import LEAST_STAGING_NBYTES, AsyncWriter
from fastensor.files.afterwards import do_afterwards

_logger = logging.getLogger("fastensor")


def settle(writer: AsyncWriter) -> None:
    """Wait as ``writer.wait`` does, for ``exit_seconds`` at most, and leave failures to the next call."""
    writer._drain(writer._settings.exit_seconds)


def log_failures(writer: AsyncWriter) -> None:
    """Log the failures that were not raised, so that no call raises them over a more important exception."""
    try:
        writer._raise_failure(all_of_them=True)
    except Exception as failure:
        _logger.error("an asynchronous save had failed: %s", failure, exc_info=failure)


def in_turn(
    writer: AsyncWriter,
    function: Callable[[], None],
    place: str,
    what: str,
    *,
    at_end: Callable[[], None] = lambda: None,
    leaves_file: bool = True,
) -> Future[None]:
    """Have a file made at a place, or removed, after all work that the writer has accepted, whether that succeeds or
    fails.

    Args:
        writer: its thread calls the function.
        function: makes or removes the file. What it raises is raised by the writer's next call.
        place: the place of the file, as :func:`fastensor.checkpoint.ordering.places_behind` says it.
        what: a description of the work, for messages.
        at_end: called once when the function has ended, or will not be called.
        leaves_file: whether there is a file at the place then.

    Returns:
        The future of the work. To look at its exception leaves that to the writer's next call, too.
    """
    try:
        step = writer._follow(place, function, what, leaves_file=leaves_file, after=None)
    except BaseException:
        at_end()
        raise
    step.future.add_done_callback(lambda future: at_end())
    return step.future


def reserve(writer: AsyncWriter, nbytes: int) -> None:
    """Map staging memory for several saves that follow one another, as much as the writer's budget allows.

    Args:
        writer: whose next saves these are.
        nbytes: of the tensors in all their files. Some memory is added for headers and small files.
    """
    writer._reserve(nbytes + LEAST_STAGING_NBYTES)


def staging_first(writer: AsyncWriter) -> AbstractContextManager[None]:
    """A block for several saves that follow one another: none is written before the block ends.

    Writing would take time from the copying of the next one. A save that waits for staging memory, and a thread that
    waits for a file, have what was accepted written at once. So has a writer that has had no staging memory yet: memory
    that was written from is touched, and copies into it are faster.
    """
    return writer._pace.held() if writer._pool.nbytes else nullcontext()


def touch_staging(writer: AsyncWriter) -> None:
    """Have a thread touch the staging memory that no save has used yet: copies into it are faster then."""
    do_afterwards(writer._pool.touch_idle)
