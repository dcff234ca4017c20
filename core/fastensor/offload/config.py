"""What an offload is told: one record, checked when it is made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from fastensor.backends import registry

Target: TypeAlias = Literal["ssd", "dram"]
WhenFull: TypeAlias = Literal["keep", "raise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """How activations are offloaded. All sizes are in bytes.

    >>> OffloadConfig(min_bytes=1 << 20).min_bytes
    1048576
    >>> OffloadConfig(prefetch_bytes=-1)
    Traceback (most recent call last):
    ValueError: prefetch_bytes is at least 0, found -1
    """

    directories: tuple[str, ...] = ()
    """Folders on SSDs; several share the bytes, to be as fast as all of them. Without any, the system's temporary
    folder, or ``/var/tmp`` if that one is in memory."""
    target: Target = "ssd"
    """``"dram"`` moves tensors of a GPU to host memory and no further (the FlashNeuron paper's FlashNeuron-Memory)."""
    min_bytes: int = 256 << 10
    """Saved tensors that hold less memory stay where they are."""
    staging_bytes: int = 128 << 20
    """The most that is saved and not on the SSD yet: a forward pass that is faster than the SSD waits. A tensor that is
    larger by itself is moved when nothing else is."""
    prefetch_bytes: int = 128 << 20
    """The most that is read before it is needed, or kept because it may be needed again. What is needed at once comes
    on top of that; so does memory of host tensors that is kept for the next ones, up to as much, and 32 MiB by which
    pieces are moved."""
    dram_bytes: int | None = None
    """What stays in host memory, the latest tensors of a forward pass, before older ones go to the SSD. None means
    nothing, or, with ``target="dram"``, half of the memory that is free when it begins,
    divided likewise."""
    ssd_bytes: int | None = None
    """The most that is on the SSDs at a time. None means nine tenths of what is free there when it begins,
    divided by the processes of the job on this machine (``LOCAL_WORLD_SIZE``)."""
    include: tuple[str, ...] = ()
    """Patterns (``fnmatch``) of names of modules whose saved tensors are offloaded, with those of modules inside;
    without any, all. Needs :meth:`ActivationOffload.attach`."""
    exclude: tuple[str, ...] = ()
    """Patterns of names of modules whose saved tensors are not. The innermost module that a pattern fits decides.

    Where ``torch.compile`` meets a module that a pattern of ``include`` or ``exclude`` fits, it breaks the graph before
    and after that module: compiled code saves all of its tensors when it ends. With ``fullgraph=True`` torch raises
    instead. Compile modules that no pattern fits, or one by one those that patterns fit."""
    backend: str = registry.AUTO
    """What moves the bytes: ``direct``, ``numpy``, ``gds``, or by default what was the fastest for a size on this
    machine (the Fastensor paper's WRDic)."""
    verify: bool = True
    """Compare what is read with the CRC32 of what was written."""
    return_freed_memory: bool = True
    """Where tensors are in host memory: have the C library give what large ones leave behind back to the system at
    once (``mallopt``, glibc), for the whole process and for good. Otherwise much of what is offloaded remains in its
    heap, as gaps. Memory that is new each time costs time, too: much less of it if torch uses huge pages for large
    tensors, as it does with ``THP_MEM_ALLOC_ENABLE=1`` in the environment that the process begins with."""
    when_full: WhenFull = "keep"
    """What happens to a tensor for which there is no space left, or whose write fails: it stays in memory, which is
    logged, or the next saved tensor, or step, raises the failure."""
    drive_tbw: float | None = None
    """How many terabytes (10¹² bytes) the drives together are guaranteed to take in their lives."""
    drive_days: float = 365.0
    """Warn if at this pace they are worn out sooner."""

    def __post_init__(self) -> None:
        for name, choices in (("target", get_args(Target)), ("when_full", get_args(WhenFull))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {choices}, found {getattr(self, name)!r}")
        for name, least in (("min_bytes", 1), ("staging_bytes", 1), ("prefetch_bytes", 0), ("dram_bytes", 0),
                            ("ssd_bytes", 0), ("drive_tbw", 0), ("drive_days", 0)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is at least {least}, found {value}")
        for name in ("directories", "include", "exclude"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(one, str | os.PathLike) for one in value):
                raise TypeError(f"{name} is a tuple of strings, found {value!r}")
            object.__setattr__(self, name, tuple(os.fspath(one) for one in value))
        if self.backend not in (registry.AUTO, *TRANSPORTS):
            raise ValueError(f"backend is auto or one of {', '.join(TRANSPORTS)}, found {self.backend!r}")


def processes_here() -> int:
    """How many processes of a job share this machine, as launchers say it (``LOCAL_WORLD_SIZE``)."""
    found = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(found), 1) if found.isdecimal() else 1


TRANSPORTS = ("direct", "gds", "numpy")
"""The backends that can write to a part of a file."""


def folders_to_try(config: OffloadConfig) -> Sequence[str]:
    """Where slots may be if the user has not said it, the best first; or what the user has said."""
    return config.directories or tuple(dict.fromkeys((tempfile.gettempdir(), "/var/tmp")))
