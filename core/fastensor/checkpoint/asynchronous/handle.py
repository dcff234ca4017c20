"""What a caller gets for a save that goes on without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

from fastensor.checkpoint.asynchronous.queue import in_drain_thread
from fastensor.checkpoint.report import SaveReport

SaveStage: TypeAlias = Literal["staging", "queued", "writing", "durable", "failed", "cancelled", "skipped", "replaced"]


class Handled(Protocol):
    """What a handle needs of its save."""

    def cancel(self) -> bool:
        """Give it up; whether it will leave what is at its path."""

    def tell(self) -> bool:
        """Somebody is told of its failure now."""

    def hurried(self) -> AbstractContextManager[None]:
        """Somebody waits for it in the block."""


class SaveHandle:
    """A save of :class:`~fastensor.AsyncWriter`. Every method may be called from any thread.

    A failure is told once: by :meth:`result` or :meth:`exception`, or else by the writer's next call.
    """

    def __init__(self, path: str, save: Handled) -> None:
        self._path = path
        self._save = save
        self._started = time.perf_counter()
        self._stage: SaveStage = "staging"
        self._stages: dict[SaveStage, float] = {"staging": 0.0}
        self._outcome: SaveReport | BaseException | None = None
        self._future: Future[SaveReport] = Future()

    @property
    def path(self) -> str:
        """What is saved to."""
        return self._path

    @property
    def stage(self) -> SaveStage:
        """Where it is. ``durable`` means finished as asked for; the last four are ends without a new file."""
        return self._stage

    @property
    def stages(self) -> Mapping[SaveStage, float]:
        """The stages so far, and how many seconds after the call of ``save`` each began."""
        return MappingProxyType(self._stages)

    def done(self) -> bool:
        """Whether it has come to an end, whichever."""
        return self._future.done()

    def cancel(self) -> bool:
        """Give it up, unless its file is about to take its place already.

        Returns:
            Whether it will leave what is at the path as it is. It may go on for an instant; see :meth:`done`.
        """
        return self._save.cancel()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the file is in place and durable.

        Args:
            timeout: seconds to wait at most; None means for ever.

        Raises:
            TimeoutError: it takes longer. It goes on.
            SaveDroppedError: it was cancelled, skipped or replaced.
            CheckpointWriteError: it failed, as :func:`fastensor.save` would have.
            RuntimeError: it is not done, and a callback of another save asks, which it may have to wait for.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does, and return what that would raise; None if nothing."""
        if not self.done() and in_drain_thread():
            raise RuntimeError(f"{self._path}: a callback cannot wait for a save in the thread that writes")
        try:
            with self._save.hurried():
                error = self._future.exception(timeout)
        except TimeoutError:
            raise TimeoutError(
                f"{self._path}: the save is not done after {timeout:g} s, but {self.stage}; it goes on"
            ) from None
        self._save.tell()
        return error

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call it with the handle when :meth:`done`, in the thread that has finished; now, if that is so already.

        What it raises is logged.
        """
        self._future.add_done_callback(lambda future: callback(self))

    def enter(self, stage: SaveStage) -> None:
        """Note that a stage begins. For the writer."""
        self._stages = {**self._stages, stage: time.perf_counter() - self._started}
        self._stage = stage

    def end(self, stage: SaveStage, outcome: SaveReport | BaseException) -> None:
        """Note how it ended. For the writer."""
        self.enter(stage)
        self._outcome = outcome
        self._tell(outcome)

    def _tell(self, outcome: SaveReport | BaseException) -> None:
        if isinstance(outcome, BaseException):
            self._future.set_exception(outcome)
        else:
            self._future.set_result(outcome)

    def forget(self, otherwise: BaseException) -> None:
        """In a forked child: nobody waits any more, and no lock is held. For the writer.

        Args:
            otherwise: how it ends for the child if it is not done: that is its parent's.
        """
        self._future = Future()
        if self._outcome is None:
            self.end("cancelled", otherwise)
        else:
            self._tell(self._outcome)

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} belongs to the process that saves; what its result() returns can be copied and sent")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._path!r}: {self.stage}>"
