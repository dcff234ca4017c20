"""The settings of an offload: one record, checked when it is made."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, get_args

import torch

from fastensor.backends import registry
from fastensor.files.arguments import as_nbytes, check_flags, check_word, checks_keywords, did_you_mean
from fastensor.files.budgets import available_memory
from fastensor.files.launchers import local_processes
from fastensor.files.shown import record_repr
from fastensor.offload.codecs import LOSSY, Codec

Schedule: TypeAlias = Literal["auto", "all"] | int | float
Tier: TypeAlias = Literal["ssd", "dram"]
WhenFull: TypeAlias = Literal["keep", "raise"]
Recompute: TypeAlias = Literal["auto", False] | tuple[str, ...]
_SIZES = ("min_bytes", "memory_bytes", "staging_bytes", "prefetch_bytes", "dram_bytes", "ssd_bytes")
_LEAST_BUDGET = 128 << 20
_SHARE_OF_GPU, _SHARE_OF_HOST = 32, 8
_LEAST = {"min_bytes": 1, "memory_bytes": 64, "staging_bytes": 1}
"""The least values of sizes that may not be 0. Each part of ``memory_bytes`` is to be at least a byte."""
SHARES_OF_TRANSFERS = (4, 16, 2)
"""Transfers have one part in so many of ``memory_bytes``: the first one, until the plan chooses."""


@checks_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Options of activation offload. Sizes are in bytes, or texts (``"2GiB"``), which become numbers.

    >>> OffloadConfig(min_bytes="1MiB").min_bytes
    1048576
    >>> OffloadConfig(prefetch_bytes=-1)
    Traceback (most recent call last):
    ValueError: prefetch_bytes is at least 0, found -1
    """

    directories: tuple[str, ...] = ()
    """Folders on SSDs. Several folders take turns, to be as fast together as all of them. Without any, the system's
    temporary folder, or ``/var/tmp`` if the temporary folder is in memory."""
    target: Tier = "ssd"
    """``"dram"`` moves tensors of a GPU to host memory only (the FlashNeuron paper's FlashNeuron-Memory)."""
    schedule: Schedule = "auto"
    """Schedule of the saved tensors that leave memory.

    ``"auto"``: as few as have to, so that the rest fits into what is free of the device's memory when a forward pass
    begins (limits of cgroups and the process count), and those that cost the least time. ``"all"``: all of them. An
    integer, or a size in words: as few as have to, so that at most so many bytes stay on each device. A float from 0 to
    1: the same for a share of the bytes that a forward pass saves, if that much is free; the first pass of a kind goes
    by ``"auto"``, because nobody knows yet how many bytes there will be.

    A number of bytes is that of saved tensors that stay. What comes on top in the memory of a CPU is said by
    ``staging_bytes``, ``prefetch_bytes``, ``dram_bytes`` and ``return_freed_memory``.

    Free host memory is looked at again while tensors are saved: if it gets short, nothing more stays. What stays
    already does not leave, nor does anything in passes that are not examined because everything fits.

    The first forward passes of a kind are measured, and then planned (the FlashNeuron paper, section 3.3):
    :meth:`ActivationOffload.plan` shows it."""
    memory_bytes: int | None = None
    """The most bytes of memory that saved tensors may take on each device in all: those that stay, a block that is
    computed again, and transfers. The plan divides it, so that a step is the shortest. In place of ``schedule``,
    ``staging_bytes`` and ``prefetch_bytes``, of which it is ``schedule + staging_bytes + 2 * prefetch_bytes``.

    Transfers have a quarter of it, until forward passes that begin alike were measured twice, and something leaves:
    then a sixteenth, a quarter or a half, for good. They keep the quarter where a pass saves tensors on several
    devices. A tensor that leaves and is larger than what may be read ahead, a quarter of their part, takes more than is
    given while it moves, and divisions in which none does are preferred. So does a tensor that is needed in another
    order than before. ``dram_bytes``, staging blocks (32 MiB) and what :attr:`return_freed_memory` leaves come on
    top."""
    min_bytes: int = 256 << 10
    """Saved tensors of fewer bytes stay in memory."""
    staging_bytes: int | None = None
    """The most bytes that are saved and not on the SSD yet, or in host memory. A forward pass that is faster than the
    SSD waits. A larger tensor is moved when nothing else is. None means 128 MiB, or, on a GPU, a 32nd of its memory if
    that is more, but no more than an eighth of the host memory that is free, divided by the processes of the job on
    this machine."""
    prefetch_bytes: int | None = None
    """The most bytes that are read before they are needed, or kept because they may be needed again. On top of that
    come the tensor that is needed at once, as many bytes of host memory that is reused for the next tensors, and 32 MiB
    of staging blocks. None means as many as for ``staging_bytes``."""
    dram_bytes: int | None = None
    """The most bytes that stay in host memory: the latest tensors of a forward pass, before older tensors go to the
    SSD. None means 0, or, with ``target="dram"``, half of the memory that is free when the first tensor is offloaded,
    divided by the processes of the job on this machine."""
    ssd_bytes: int | None = None
    """The most bytes that are on the SSDs at a time. None means nine tenths of what is free there when the first tensor
    is offloaded, divided by the processes of the job on this machine."""
    include: tuple[str, ...] = ()
    """Patterns (``fnmatch``) of names of modules whose saved tensors are offloaded, those of modules inside included.
    Without any pattern, all modules. Needs :meth:`ActivationOffload.attach`."""
    exclude: tuple[str, ...] = ()
    """Patterns of names of modules whose saved tensors stay in memory. The innermost module that a pattern fits
    decides.

    Where ``torch.compile`` meets a module that a pattern of ``include`` or ``exclude`` fits, it breaks the graph before
    and after that module: compiled code saves all of its tensors when it ends. With ``fullgraph=True`` torch raises
    instead. Compile modules that no pattern fits, or one by one those that patterns fit."""
    recompute: Recompute = False
    """Blocks of the model that may be computed again in the backward pass, where that costs less time than to move what
    they save. ``"auto"``: modules of one class that a ``ModuleList`` or ``Sequential`` has several of, such as the
    layers of a transformer. A tuple of patterns of names of modules: these. Needs :meth:`ActivationOffload.attach`.

    The schedule decides for each block, by the measured times of the first passes, whether what it saves stays, leaves,
    or is computed again, and whether the inputs of such a block stay or leave. Nothing is computed again if everything
    fits, or with ``"all"``. It is done by torch's non-reentrant checkpoint (``torch.utils.checkpoint``): gradients are
    the same to the last bit, dropout included. Buffers (statistics of batch norms), and attributes that are numbers,
    texts or tensors without gradients, are then as they were in the forward pass, and change once. What a block does
    besides happens twice: do not name blocks that append losses to a list of theirs.

    Left alone are blocks that change an input in place, or whose input is changed in place afterwards; that get objects
    which they may change, such as caches; in which processes wait for each other; and those inside of what
    ``torch.compile`` compiles: compile each block."""
    codecs: tuple[Codec, ...] = ()
    """Codecs that make tensors smaller before they go to the SSD, at a cost in time of the host's processors.

    ``"csr"`` leaves zeros out, and keeps every bit: it is used for tensors that get smaller by that, such as outputs of
    ReLU. ``"fp16"`` or ``"bf16"`` rounds float32 to 16 bits, and so changes gradients: those of tensors that were
    written and read, which depends on timing. Other dtypes are left alone, and with ``fp16`` so are 4 MiB in
    which a finite number would become infinity. ``("csr", "fp16")`` does both (the FlashNeuron paper, section 3.2).

    Nothing is encoded that stays in host memory by ``dram_bytes``, nor tensors of a GPU that are larger than
    ``staging_bytes``."""
    backend: str = registry.AUTO
    """The backend that moves the bytes: ``direct``, ``numpy``, ``gds``, or by default the one that was the fastest for
    tensors of the size on this machine (the Fastensor paper's WRDic)."""
    verify: bool = True
    """Compare the CRC32 of the bytes that are read with that of the bytes that were written."""
    return_freed_memory: bool = True
    """Have the C library return freed memory of the host to the system (``malloc_trim``, glibc) each time that 128 MiB
    of tensors were saved or came back, and at the end. Otherwise holes in its heap keep much of the memory. Where a
    part of the tensors stays (any schedule but ``"all"``), the next step takes what was freed again: then it is
    returned when memory gets short (less is free than ``staging_bytes``, ``prefetch_bytes`` and 128 MiB together, or
    than a quarter of the holes), and at the end.

    With a number of bytes as the schedule, it is also returned when the holes are larger than what the pass may take
    yet: what is left of that number, of ``staging_bytes``, of ``prefetch_bytes`` and of ``dram_bytes``, and gradients
    that the attached model does not have yet; and 64 MiB, or four times the largest saved tensor.

    Memory that is new costs time, less of it if torch uses huge pages for large tensors: set
    ``THP_MEM_ALLOC_ENABLE=1`` in the environment before the process begins. In a process whose address space is limited
    (``ulimit -d``, ``ulimit -v``) when the first tensor goes, the C library maps each large tensor by itself from then
    on (``mallopt``): such limits count the holes."""
    when_full: WhenFull = "keep"
    """Behaviour if there is no space for a tensor, or its write fails. ``"keep"``: the tensor stays in memory, and a
    warning is logged. ``"raise"``: in addition, the next saved tensor or step raises the error."""
    trace: str | None = None
    """A file that gets a trace of what was moved when, for https://ui.perfetto.dev. It is written when the offload is
    closed, or the process ends; or else at the end of the step in which the trace has 65536 events, with which it ends.
    In a job of several processes the file's name gets the rank: ``trace-rank3.json``."""
    drive_tbw: float | None = None
    """Terabytes (10¹² bytes) that the drives together are guaranteed to endure (TBW)."""
    drive_days: float = 365.0
    """Warn if at the present pace the drives are worn out in fewer days."""

    def __post_init__(self) -> None:
        check_word(self.target, "target", get_args(Tier))
        check_word(self.when_full, "when_full", get_args(WhenFull))
        check_flags(verify=self.verify, return_freed_memory=self.return_freed_memory)
        _check_number("drive_days", self.drive_days)
        if self.drive_tbw is not None:
            _check_number("drive_tbw", self.drive_tbw)
        self._read_sizes()
        _check_schedule(self.schedule)
        divided = {
            "schedule": self.schedule,
            "staging_bytes": self.staging_bytes,
            "prefetch_bytes": self.prefetch_bytes,
        }
        given = [f"{name}={value!r}" for name, value in divided.items() if value not in ("auto", None)]
        if self.memory_bytes is not None and given:
            raise TypeError(
                f"memory_bytes is divided by the plan: give it without {', '.join(divided)}, found {', '.join(given)}"
            )
        names = ("directories", "include", "exclude", "codecs")
        for name in names if self.recompute in ("auto", False) else (*names, "recompute"):
            value = getattr(self, name)
            is_one = isinstance(value, str) or not isinstance(value, Collection)
            if is_one or not all(isinstance(one, str | os.PathLike) for one in value):
                hint = f"; one is written ({value!r},)" if isinstance(value, str) else ""
                raise TypeError(f"{name} is a tuple of strings, found {value!r}{hint}")
            object.__setattr__(self, name, tuple(os.fspath(one) for one in value))
        unknown = set(self.codecs).difference(get_args(Codec))
        if unknown or len(LOSSY.keys() & self.codecs) > 1:
            raise ValueError(
                f"codecs are some of {get_args(Codec)}, and not fp16 and bf16 at once, found {self.codecs}"
            )
        if self.trace is not None:
            if not isinstance(self.trace, str | os.PathLike):
                raise TypeError(f"trace is the name of a file, found {self.trace!r}")
            object.__setattr__(self, "trace", os.fspath(self.trace))
        if self.backend != registry.AUTO and self.backend not in registry.names_with_slots():
            raise ValueError(
                f"backend is auto or one of {', '.join(registry.names_with_slots())}, found {self.backend!r}"
                f"{did_you_mean(str(self.backend), registry.names_with_slots())}"
            )

    __repr__ = record_repr

    if TYPE_CHECKING:  # what is read of a size is a number, whatever is given

        def __init__(self, **options: Unpack[OffloadOptions]) -> None: ...

    @property
    def staging_nbytes(self) -> int:
        """The number that ``staging_bytes`` means for host memory, or for a device if :meth:`for_device` gave this."""
        return _LEAST_BUDGET if self.staging_bytes is None else self.staging_bytes

    @property
    def prefetch_nbytes(self) -> int:
        """As :attr:`staging_nbytes`."""
        return _LEAST_BUDGET if self.prefetch_bytes is None else self.prefetch_bytes

    def for_device(self, device: torch.device) -> OffloadConfig:
        """The configuration with the numbers that budgets mean for tensors of a device."""
        if self.memory_bytes is not None:
            return self.divided()
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch gives it no types
        if device.type != "cuda" or not in_use or None not in (self.staging_bytes, self.prefetch_bytes):
            return self
        budget = max(_LEAST_BUDGET, _share_of_gpu(device))
        staging, prefetch = self.staging_bytes, self.prefetch_bytes
        return dataclasses.replace(
            self,
            staging_bytes=budget if staging is None else staging,
            prefetch_bytes=budget if prefetch is None else prefetch,
        )

    def divided(self, share: int = SHARES_OF_TRANSFERS[0]) -> OffloadConfig:
        """The configuration with ``memory_bytes`` divided.

        Args:
            share: transfers have one part in so many: half of it on their way out, a quarter and what is reused on
                their way in.

        >>> divided = OffloadConfig(memory_bytes=1600).divided(16)
        >>> divided.schedule, divided.staging_bytes, divided.prefetch_bytes, OffloadConfig().divided().schedule
        (1500, 50, 25, 'auto')
        """
        if self.memory_bytes is None:
            return self
        moving = self.memory_bytes // share
        return dataclasses.replace(
            self,
            memory_bytes=None,
            schedule=self.memory_bytes - moving,
            staging_bytes=moving // 2,
            prefetch_bytes=moving // 4,
        )

    @property
    def keeps_some(self) -> bool:
        """True if saved tensors may stay in memory, as the planner says."""
        return self.schedule != "all"

    def _read_sizes(self) -> None:
        """Replace texts by the numbers that they say.

        Raises:
            TypeError, ValueError: a size is none, or too small.
        """
        for name in _SIZES:
            if getattr(self, name) is not None or name == "min_bytes":  # all others are optional
                nbytes = as_nbytes(getattr(self, name), name, at_least=_LEAST.get(name, 0))
                object.__setattr__(self, name, nbytes)
        if isinstance(self.schedule, str) and self.schedule[:1].isdigit() and self.schedule[-1:].isalpha():
            object.__setattr__(self, "schedule", as_nbytes(self.schedule, "schedule"))


@cache
def _share_of_gpu(device: torch.device) -> int:
    """As many bytes as transfers of a GPU may take, as :attr:`OffloadConfig.staging_bytes` says."""
    on_device = int(torch.cuda.get_device_properties(device).total_memory) // _SHARE_OF_GPU
    return min(on_device, available_memory() // _SHARE_OF_HOST // local_processes())


def _check_number(name: str, value: object) -> None:
    """Raise an error for a number that is none, or is negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is a number, found {value!r}")
    if not float(value) >= 0:  # also NaN
        raise ValueError(f"{name} is at least 0, found {value}")


def _check_schedule(schedule: object) -> None:
    if isinstance(schedule, str) and schedule in ("auto", "all"):
        return
    if isinstance(schedule, int | float) and not isinstance(schedule, bool):
        if isinstance(schedule, float) and not 0 <= schedule <= 1:
            raise ValueError(f"schedule is a share from 0 to 1 if it is a float, found {schedule}")
        if schedule == 1 and isinstance(schedule, int):
            raise ValueError("schedule is a number of bytes if it is an int, found 1; a share of 1 is written 1.0")
        if schedule >= 0:
            return
    raise ValueError(f"schedule is 'auto', 'all', a number of bytes, or a share from 0.0 to 1.0, found {schedule!r}")


class OffloadOptions(TypedDict, total=False):
    """The options of :class:`OffloadConfig`, for functions that take them one by one."""

    directories: tuple[str, ...]
    target: Tier
    schedule: Schedule | str
    memory_bytes: int | str | None
    min_bytes: int | str
    staging_bytes: int | str | None
    prefetch_bytes: int | str | None
    dram_bytes: int | str | None
    ssd_bytes: int | str | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    recompute: Recompute
    codecs: tuple[Codec, ...]
    backend: str
    verify: bool
    return_freed_memory: bool
    when_full: WhenFull
    trace: str | None
    drive_tbw: float | None
    drive_days: float


def config_of(
    directory: str | os.PathLike[str] | None, config: OffloadConfig | None, options: Mapping[str, Any]
) -> OffloadConfig:
    """The configuration that a folder, a configuration or single options say.

    Args:
        directory: the only folder; None if ``options`` say where files are, or nothing does.
        config: the configuration, instead of the others.
        options: those of :class:`OffloadOptions`.

    Raises:
        TypeError: something is given twice.
        TypeError, ValueError: as :class:`OffloadConfig`.

    >>> config_of("/nvme", None, {"min_bytes": "1MiB"}).directories
    ('/nvme',)
    """
    given = [*(["a folder"] if directory is not None else []), *options]
    if config is not None and given:
        raise TypeError(f"an OffloadConfig has all options; found {', '.join(given)} beside it: put them into it")
    if directory is None:
        return checked_config(config) if config is not None else OffloadConfig(**options)
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"the first argument is a folder, or an OffloadConfig, found {directory!r}")
    if "directories" in options:
        raise TypeError(f"folders are given twice: {directory!r} and directories={options['directories']!r}")
    return OffloadConfig(directories=(os.fspath(directory),), **options)


def checked_config(config: OffloadConfig | None) -> OffloadConfig:
    """A configuration that was given, or the default one.

    Raises:
        TypeError: it is something else.
    """
    if config is None:
        return OffloadConfig()
    if not isinstance(config, OffloadConfig):
        folder = f": OffloadConfig(directories=({config!r},)) offloads to that folder" * isinstance(config, str)
        raise TypeError(f"config is an OffloadConfig, found {config!r}{folder}")
    return config


def folders_to_try(config: OffloadConfig) -> Sequence[str]:
    """The user's folders, or else those that the slots may be in, the best first."""
    return config.directories or tuple(dict.fromkeys((tempfile.gettempdir(), "/var/tmp")))


def with_default_folder(config: OffloadConfig, folder: str | os.PathLike[str] | None) -> OffloadConfig:
    """The configuration with its files in a folder, which is made if it is missing.

    Args:
        config: is returned as it is if it names folders, or nothing goes to SSDs.
        folder: where a trainer keeps its files; None or an address of other machines (``s3://``) changes nothing.
    """
    if config.directories or config.target != "ssd" or folder is None or "://" in os.fspath(folder):
        return config
    os.makedirs(folder, exist_ok=True)
    return dataclasses.replace(config, directories=(os.path.abspath(folder),))


def dry_run_config(config: OffloadConfig) -> OffloadConfig:
    """The configuration with which a dry run measures: nothing stays, there is no trace, and freed memory is kept as it
    will be in training (:attr:`OffloadConfig.return_freed_memory`).

    >>> dry_run_config(OffloadConfig(schedule=0.5)).schedule, dry_run_config(OffloadConfig(schedule="all")).schedule
    (0, 'all')
    """
    return dataclasses.replace(config.divided(), schedule=0 if config.keeps_some else "all", trace=None)
