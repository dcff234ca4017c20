"""The handle of an asynchronous save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastensor.checkpoint.asynchronous.work import Save, SaveStage
from fastensor.checkpoint.nested import is_nested
from fastensor.checkpoint.writing.report import SaveReport
from fastensor.files.arguments import checks_keywords
from fastensor.files.shown import shown


@checks_keywords
class SaveHandle:
    """A save of :class:`~fastensor.AsyncWriter`. Every method may be called from any thread.

    A failure is raised by :meth:`result` or returned by :meth:`exception`; if neither is called, the writer's next call
    raises it, once.
    """

    def __init__(self, save: Save) -> None:
        self._save = save

    @property
    def path(self) -> str:
        """The path that is saved to."""
        return self._save.path

    @property
    def stage(self) -> SaveStage:
        """Stage of the save. ``durable`` means finished as asked for. ``failed``, ``cancelled``, ``skipped`` and
        ``replaced`` are ends without a new file."""
        return self._save.stage

    @property
    def stages(self) -> Mapping[SaveStage, float]:
        """The stages so far, and how many seconds after the call of ``save`` each began."""
        return MappingProxyType(self._save.stages)

    def done(self) -> bool:
        """True if the save has come to one of its ends."""
        return self._save.done

    def cancel(self) -> bool:
        """Drop the save, unless its file is about to take its place already.

        Returns:
            Whether the save will leave what is at the path as it is. It may go on for an instant; see :meth:`done`.
        """
        return self._save.drop("cancelled", "the save was cancelled")

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the file is in place and durable.

        Args:
            timeout: seconds to wait at most; None means for ever.

        Raises:
            TimeoutError: the save takes longer. It goes on.
            SaveDroppedError: the save was cancelled, skipped or replaced.
            CheckpointWriteError: the save failed, as :func:`fastensor.save` would have.
            RuntimeError: the save is not done, and may have to wait for the caller: a callback of another save, or a
                signal handler that interrupts Fastensor.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        report: SaveReport = self._save.future.result()
        return report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does, and return what that would raise; None if nothing."""
        if not self.done() and is_nested():
            raise RuntimeError(
                f"{self.path}: a callback cannot wait for a save in the thread that writes, nor can a signal handler "
                "wait for what it interrupts"
            )
        try:
            with self._save.hurried():
                error = self._save.future.exception(timeout)
        except TimeoutError:
            raise TimeoutError(
                f"{self.path}: the save is not done after {timeout:g} s, but {self.stage}; it goes on"
            ) from None
        self._save.report()
        return error

    def add_done_callback(self, callback: Callable[[SaveHandle], object]) -> None:
        """Call ``callback`` with the handle when the save is :meth:`done`, in the thread that has finished it; at once
        if it is done already.

        An exception of the callback is logged. What the callback saves is saved synchronously.
        """
        self._save.future.add_done_callback(lambda future: callback(self))

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} belongs to the process that saves; what its result() returns can be copied and sent")

    @shown
    def __repr__(self) -> str:
        return f" of {self.path!r}: {self.stage}"
