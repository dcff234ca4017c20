"""The options of ``fastensor_accelerate``, and where they come from: flags, YAML, the environment, or code."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Self, cast

from fastensor.backends import registry
from fastensor.checkpoint.asynchronous.settings import WriterSettings
from fastensor.checkpoint.cooperative.options import DEFAULT_TIMEOUT_SECONDS
from fastensor.checkpoint.writing.save_transaction import check_share_unchanged
from fastensor.errors import FastensorError
from fastensor.files.arguments import as_nbytes, checks_keywords, nearest
from fastensor.files.shown import record_repr
from fastensor.offload import OffloadConfig, Schedule

USE = "ACCELERATE_USE_FASTENSOR"
"""The environment variable that switches Fastensor on."""
_PREFIX = "ACCELERATE_FASTENSOR_"
SECTION = "fastensor_config"
"""The section of Accelerate's YAML file."""
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class ConfigError(FastensorError, ValueError):
    """An option of ``fastensor_accelerate`` is unknown, or has a value that means nothing."""


def exit_for_wrong_options(program: str, message: object) -> NoReturn:
    """Print a message, and end the program with the status of a wrong command line, which is 2 as for ``fastensor``."""
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(2)


def _option(default: Any, flag: str, text: str) -> Any:
    return field(default=default, metadata={"flag": flag, "help": text})


@checks_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class FastensorConfig:
    """Options for saving and loading the states of an Accelerator, and for offloading activations.

    Sizes are in bytes, or texts (``"2GiB"``), which become numbers.

    Raises:
        ConfigError: a value means nothing, or names a backend that does not exist.

    >>> FastensorConfig(asynchronous=True).to_environment()["ACCELERATE_FASTENSOR_ASYNCHRONOUS"]
    'true'
    >>> FastensorConfig.from_mapping({"bakend": "direct"})
    Traceback (most recent call last):
    ...
    fastensor_accelerate.config.ConfigError: fastensor_config has no option 'bakend'; did you mean 'backend'?
    """

    backend: str = _option(
        "auto",
        "--fastensor_backend",
        "what moves bytes of states: auto, or a backend that `fastensor doctor` lists",
    )
    durable: bool = _option(
        True, "--fastensor_durable", "a saved state is on stable storage before it replaces another one (default)"
    )
    verify: bool = _option(True, "--fastensor_verify", "loads compare CRC32s (default)")
    asynchronous: bool = _option(
        False, "--fastensor_async", "save_state returns when the state has been copied; default: when it is saved"
    )
    staging_bytes: int | str | None = _option(
        None,
        "--fastensor_staging_bytes",
        "most bytes of memory for copies of an asynchronous save; default: the size of the state, at most half of the "
        "free memory",
    )
    max_bytes_per_second: float | str | None = _option(
        None, "--fastensor_max_bytes_per_second", "how fast asynchronous saves may write; default: no limit"
    )
    exit_seconds: float = _option(
        600.0, "--fastensor_exit_seconds", "how long the end of the process waits for a pending state; default: 600"
    )
    preemption_seconds: float | None = _option(
        None,
        "--fastensor_preemption_seconds",
        "SIGTERM ends the process only when the pending state is durable, or after so many seconds; default: at once",
    )
    cooperative: bool = _option(
        False,
        "--fastensor_cooperative",
        "processes of data parallel training write and read models and optimizers together; default: one writes",
    )
    cooperative_timeout: float = _option(
        DEFAULT_TIMEOUT_SECONDS,
        "--fastensor_cooperative_timeout",
        "how many seconds processes that save together wait for the slowest one; default: 600",
    )
    share_unchanged: bool = _option(
        True,
        "--fastensor_share_unchanged",
        "tensors that have not changed since the last state are not written again on XFS and btrfs (default)",
    )

    link_unchanged: bool = _option(
        False,
        "--fastensor_link_unchanged",
        "in models of transformers and Accelerator.save_model, weights that do not train are files of their own, and "
        "hard links to those of the last checkpoint; default: off",
    )

    offload: bool = _option(
        False, "--fastensor_offload", "activations of models that are trained go to an SSD until the backward pass"
    )
    offload_directories: tuple[str, ...] = _option(
        (),
        "--fastensor_offload_directories",
        "folders on SSDs for activations, separated by commas; default: the project's folder, or a temporary one",
    )
    offload_schedule: str | int | float = _option(
        "auto",
        "--fastensor_offload_schedule",
        "which activations leave memory: auto (as few as what is free demands; default), all, a number of bytes that "
        "may stay, or a share such as 0.5",
    )
    offload_memory_bytes: int | str | None = _option(
        None,
        "--fastensor_offload_memory_bytes",
        "most bytes of memory that activations may take in all, transfers included, in place of a schedule and of "
        "staging and prefetch bytes; default: by the schedule",
    )
    offload_min_bytes: int | str | None = _option(
        None, "--fastensor_offload_min_bytes", "smaller activations stay in memory; default: 262144"
    )
    offload_staging_bytes: int | str | None = _option(
        None,
        "--fastensor_offload_staging_bytes",
        "most bytes of activations on their way to the SSD; default: 134217728",
    )
    offload_prefetch_bytes: int | str | None = _option(
        None,
        "--fastensor_offload_prefetch_bytes",
        "most bytes of activations that are read before they are needed; default: 134217728",
    )
    offload_dram_bytes: int | str | None = _option(
        None, "--fastensor_offload_dram_bytes", "most bytes of activations that stay in host memory; default: 0"
    )
    offload_ssd_bytes: int | str | None = _option(
        None,
        "--fastensor_offload_ssd_bytes",
        "most bytes of activations on the SSDs; default: 0.9 of what is free",
    )
    offload_include: tuple[str, ...] = _option(
        (),
        "--fastensor_offload_include",
        "patterns of names of modules whose activations are offloaded, separated by commas; default: all",
    )
    offload_exclude: tuple[str, ...] = _option(
        (),
        "--fastensor_offload_exclude",
        "patterns of names of modules whose activations stay in memory, separated by commas",
    )
    offload_recompute: tuple[str, ...] | Literal["auto", False] = _option(
        (),
        "--fastensor_offload_recompute",
        "blocks of models that may be computed again, where that costs less than to move what they save: auto, or "
        "patterns of names of modules, separated by commas; default: none",
    )
    offload_codecs: tuple[str, ...] = _option(
        (),
        "--fastensor_offload_codecs",
        "what makes activations smaller: csr (keeps every bit), fp16 or bf16 (round), separated by commas; "
        "default: nothing",
    )
    offload_trace: str | None = _option(
        None, "--fastensor_offload_trace", "a file for a trace of what was moved when, for Perfetto; default: none"
    )

    __repr__ = record_repr

    def __post_init__(self) -> None:
        if self.offload_recompute in ("auto", False):  # as OffloadConfig takes it
            object.__setattr__(self, "offload_recompute", ("auto",) if self.offload_recompute else ())
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if isinstance(value, str) and _is_size(option):
                object.__setattr__(self, option.name, _size(option, value))
            _check_type(option, getattr(self, option.name))
        if self.backend != registry.AUTO and self.backend not in (known := registry.names()):
            raise ConfigError(f"backend is {self.backend!r}, which is no backend{nearest(self.backend, known)}")
        if self.cooperative and self.asynchronous:
            raise ConfigError(
                "cooperative and asynchronous contradict: processes that save together wait for each other; choose one"
            )
        if not self.cooperative_timeout > 0:
            raise ConfigError(f"cooperative_timeout is a number of seconds above 0, found {self.cooperative_timeout}")
        try:
            WriterSettings(**self.writer_options())
            check_share_unchanged("link" if self.link_unchanged else self.share_unchanged, "link")
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
        try:
            self.offload_config()
        except (TypeError, ValueError) as error:
            raise ConfigError(f"offload_{error}") from error

    def writer_options(self) -> dict[str, Any]:
        """The keywords of :class:`fastensor.AsyncWriter`."""
        names = ("staging_bytes", "max_bytes_per_second", "exit_seconds", "preemption_seconds")
        return {name: getattr(self, name) for name in names}

    def offload_config(self) -> OffloadConfig:
        """Options of activation offload, if :attr:`offload` is true."""
        given = {
            name: getattr(self, f"offload_{name}")
            for name in (
                "directories",
                "memory_bytes",
                "min_bytes",
                "staging_bytes",
                "prefetch_bytes",
                "dram_bytes",
                "ssd_bytes",
                "include",
                "exclude",
                "codecs",
                "trace",
            )
        }
        return OffloadConfig(
            schedule=_schedule(self.offload_schedule),
            recompute="auto" if self.offload_recompute == ("auto",) else self.offload_recompute or False,
            **{name: value for name, value in given.items() if value is not None},
        )

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], where: str = SECTION) -> Self:
        """The options of a mapping, and defaults for the others.

        Args:
            options: by name; texts are read as the types of the options, and None means the default.
            where: what the mapping is, for messages.

        Raises:
            ConfigError: an option is unknown, or its value means nothing.
        """
        known = {option.name: option for option in dataclasses.fields(cls)}
        values = {}
        for name, value in options.items():
            if name not in known:
                raise ConfigError(f"{where} has no option {name!r}{nearest(str(name), known)}")
            if value is not None:
                values[name] = _read(known[name], value)
        return cls(**values)

    @classmethod
    def from_environment(cls) -> Self:
        """The options in ``ACCELERATE_FASTENSOR_*``, and defaults for the others.

        Raises:
            ConfigError: as :meth:`from_mapping`.
        """
        return cls.from_mapping(options_in_environment(), f"the environment ({_PREFIX}*)")

    def to_environment(self) -> dict[str, str]:
        """The environment variables by which a process that is launched gets the options."""
        values = {option.name: getattr(self, option.name) for option in dataclasses.fields(self)}
        texts = {_PREFIX + name.upper(): _write(value) for name, value in values.items() if value is not None}
        return {USE: "true", **texts}


def options_in_environment() -> dict[str, str]:
    """The options that the environment gives, as texts."""
    found = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    return {name.removeprefix(_PREFIX).lower(): value for name, value in found.items()}


def is_wanted_by_environment() -> bool | None:
    """True if ``ACCELERATE_USE_FASTENSOR`` switches Fastensor on, False if off; None if it is not set.

    Raises:
        ConfigError: the variable is neither true nor false.
    """
    value = os.environ.get(USE)
    return None if value is None else _as_bool(USE, value)


def _read(option: dataclasses.Field[Any], value: Any) -> Any:
    """A value of an option's type from the text that a flag, the environment or YAML gives."""
    if _is_tuple(option) and isinstance(value, list | str):
        texts = value.split(",") if isinstance(value, str) else value
        return tuple(text.strip() if isinstance(text, str) else text for text in texts if text != "")
    if not isinstance(value, str):
        is_whole = type(value) is int and "int" not in str(option.type)
        return float(value) if is_whole and "float" in str(option.type) else value
    kind = str(option.type)
    if kind == "bool":
        return _as_bool(option.name, value)
    if kind.startswith("str"):
        return value
    if _is_size(option):
        return _size(option, value)
    number = int if kind.startswith("int") else float
    try:
        return number(value)
    except ValueError:
        raise ConfigError(f"{option.name} is a number ({kind}), found {value!r}") from None


def _is_size(option: dataclasses.Field[Any]) -> bool:
    return "_bytes" in option.name


def _size(option: dataclasses.Field[Any], text: str) -> int | float:
    """The bytes in a number, or in a text such as ``2GiB``; or, of a rate, the bytes of each second."""
    number = int if str(option.type).startswith("int") else float
    with suppress(ValueError):
        return number(text)
    try:
        return number(as_nbytes(text, option.name))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _schedule(value: str | float) -> Schedule:
    """The schedule that a number or a text names: a word, bytes, or a share. OffloadConfig refuses others."""
    for number in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return number(value)
    return cast(Schedule, value)


def _is_tuple(option: dataclasses.Field[Any]) -> bool:
    return str(option.type).startswith("tuple")


def _check_type(option: dataclasses.Field[Any], value: Any) -> None:
    if _is_tuple(option):
        if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
            raise ConfigError(f"{option.name} is a list of texts, found {value!r}")
        return
    expected = str(option.type).split(" | ")
    found = "None" if value is None else type(value).__name__
    if found not in expected and not (found == "int" and "float" in expected):
        raise ConfigError(f"{option.name} is {option.type}, found {value!r}")


def _as_bool(name: str, text: str) -> bool:
    try:
        return _WORDS[text.strip().lower()]
    except KeyError:
        raise ConfigError(f"{name} is true or false, found {text!r}") from None


def _write(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
