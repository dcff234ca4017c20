"""Tensors that checkpoints of a Trainer leave out, because another file has them: a frozen base, say.

A tensor is left out only if that file, the base, has one with the same bytes when the checkpoint is saved, under
whatever name. Where the module got its tensors from, and when they were frozen, does not matter. The checkpoint says
what was left out, by CRC32s, and a load adds these tensors, or fails. So what is loaded is what was saved.
"""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import torch

import fastensor
from fastensor.backends.registry import announce
from fastensor.backends.storage_crc32 import StoragePart, crc32s_of
from fastensor.checkpoint.location import Location, as_in_fsspec, locate
from fastensor.checkpoint.models.names import resolve
from fastensor.checkpoint.models.sharded import files_behind
from fastensor.checkpoint.models.ties import area_of
from fastensor.checkpoint.ordering import places_behind
from fastensor.errors import FastensorError, StateMismatchError, UnsupportedContentError
from fastensor.files import posix
from fastensor.files.arguments import checks_keywords, did_you_mean

KEY = "fastensor_left_out"
"""The entry of a checkpoint that says what was left out of its ``state_dict``."""
Exclude: TypeAlias = Literal["frozen"] | Sequence[str] | None
_FROZEN = "frozen"
_Kind: TypeAlias = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a tensor."""
_Record: TypeAlias = tuple[str, tuple[int, ...], int, int]
"""The dtype, the shape, and the CRC32s of the two halves of a tensor's bytes. One CRC32 is too short to find a tensor
among many by it."""


class LeftOut:
    """What the checkpoints of one plugin leave out. Pickled without what is known of a run.

    Args:
        exclude, base: as for :class:`FastensorCheckpointIO`.

    Raises:
        TypeError, ValueError: an argument is of a wrong kind, or there is no base for what is excluded.
    """

    def __init__(self, exclude: Exclude, base: str | os.PathLike[str] | None) -> None:
        _check_exclude(exclude)
        if exclude is not None and base is None:
            raise ValueError(
                f"exclude={exclude!r} needs base, a file that has what is left out: the file or the folder that the "
                f"weights came from, or one that is made once by fastensor.save(module.state_dict(), 'base.ckpt') and "
                f"kept"
            )
        self.exclude = exclude
        self.base = None if base is None else as_in_fsspec(base)
        if self.base is not None and isinstance(locate(self.base), str):  # a link may lead elsewhere later
            self.base = os.path.realpath(self.base)
        if exclude is not None and not isinstance(locate(self.base or ""), str):
            raise ValueError(
                f"base={self.base!r} is at a URL, where each save cannot be sure that it is still there: copy it to a "
                f"local folder"
            )
        self._module: weakref.ref[torch.nn.Module] | None = None
        """The module of the latest ``fit``."""
        self._known: dict[_Kind, set[_Record]] = {}
        """The tensors of the base of the kinds that this ``fit`` has asked for, while its files have that status."""
        self._statuses: list[tuple[int, ...]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return LeftOut, (self.exclude, self.base)

    def begin(self, module: torch.nn.Module) -> None:
        """``fit`` begins.

        Raises:
            UnknownKeyError: a name or pattern chooses nothing.
            OSError, FastensorError: the base cannot be read.
        """
        if self.exclude is None:
            return
        if self.exclude != _FROZEN:
            resolve(self.exclude, module.state_dict().keys(), "exclude")
        for file in self._files():
            fastensor.open(file, verify=False).close()
        self._module, self._known = weakref.ref(module), {}

    def is_base(self, path: str | os.PathLike[str]) -> bool:
        """True if a path is that of the base, of a file of it, or of a folder that has it."""
        if self.base is None:
            return False
        places = {self.base}
        with contextlib.suppress(OSError, FastensorError):  # it is gone
            places.update(place for file in self._files() for place in places_behind(file))
        place = next(places_behind(path))
        return any(one == place or one.startswith(place.rstrip("/") + "/") for one in places)

    def check_not_base(self, path: str) -> None:
        """
        Raises:
            ValueError: a save to the path would replace the base.
        """
        if self.is_base(path):
            raise ValueError(
                f"{path} was not saved: it is the base of other checkpoints, which need it; save to another file"
            )

    def without(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint to be saved: itself, or a copy without what the base has."""
        module, state = None if self._module is None else self._module(), checkpoint.get("state_dict")
        if module is None or not isinstance(state, dict):
            return checkpoint
        chosen = self._chosen(module, state)
        if not chosen:
            announce(f"exclude={self.exclude!r}", "no tensor of the checkpoint is excluded; checkpoints are whole")
        try:
            records = {name: record for name in chosen if (record := _record(state[name])) is not None}
            in_base = self._in_base({record[:2] for record in records.values()})
        except (OSError, FastensorError, MemoryError, RuntimeError) as error:  # a save is worth more than its size
            announce(f"exclude={self.exclude!r}", f"{error}; checkpoints are whole")
            return checkpoint
        left_out = {name: record for name, record in records.items() if record in in_base}
        if others := [name for name in chosen if name not in left_out]:
            announce(f"leaving out {others[0]!r}", f"{self.base} has no tensor with these values, so it is saved")
        if not left_out:
            return checkpoint
        kept = copy.copy(state)  # with its attributes
        for name in left_out:
            del kept[name]
        return {**checkpoint, "state_dict": kept, KEY: {"base": self.base, "tensors": left_out}}

    def add(self, checkpoint: Any, where: str) -> None:
        """Add to a loaded checkpoint what it leaves out.

        Raises:
            StateMismatchError: there is no base, or it has other tensors.
            OSError, FastensorError: the base cannot be read.
        """
        left_out = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
        if left_out is None:
            return
        if self.base is None:
            raise StateMismatchError(
                f"{where} leaves out {next(iter(left_out['tensors']))!r} and {len(left_out['tensors']) - 1} more: pass "
                f"FastensorCheckpointIO(base=...), a file that has them; it was saved with base={left_out['base']!r}"
            )
        add_left_out(checkpoint, self.base)

    def _files(self) -> Mapping[Location, set[str] | None]:
        assert self.base is not None, "the caller has looked"
        return files_behind(self.base)

    def _chosen(self, module: torch.nn.Module, state: Mapping[str, Any]) -> list[str]:
        """The names in a state dict that are excluded now."""
        if self.exclude != _FROZEN:
            return [name for name in state if any(fnmatchcase(name, one) or name == one for one in self.exclude or ())]
        parameters = module.named_parameters(remove_duplicate=False)
        return [name for name, parameter in parameters if not parameter.requires_grad and name in state]

    def _in_base(self, kinds: set[_Kind]) -> set[_Record]:
        """The tensors of these kinds in the base. They are read once in a ``fit``, unless its files change."""
        statuses = [posix.identity_of(os.stat(path)) for path in map(locate, self._files()) if isinstance(path, str)]
        if statuses != self._statuses:
            self._known, self._statuses = {}, statuses
        unknown = kinds - self._known.keys()
        read: dict[_Kind, set[_Record]] = {kind: set() for kind in unknown}
        for record, _ in _tensors_in(self._files(), unknown):
            read[record[:2]].add(record)
        self._known |= read
        return set().union(*(self._known[kind] for kind in kinds))


@checks_keywords
def add_left_out(checkpoint: dict[str, Any], base: str | os.PathLike[str]) -> None:
    """Make a checkpoint whole that ``FastensorCheckpointIO(exclude=...)`` has saved.

    The plugin does so by itself. Where something else loads the file, as ``load_from_checkpoint`` does, call this in
    the module's ``on_load_checkpoint``: loading stays strict.

    Args:
        checkpoint: as ``torch.load`` gives it. It is changed, unless nothing was left out of it.
        base: a file or a model's folder that has the tensors that were left out, under whatever names.

    Raises:
        StateMismatchError: it has other tensors. The checkpoint is as it was.
        OSError, fastensor.FastensorError: the base cannot be read.
    """
    left_out = checkpoint.get(KEY)
    if left_out is None:
        return
    names: dict[_Record, list[str]] = {}
    for name, record in left_out["tensors"].items():
        names.setdefault(record, []).append(name)
    found: dict[_Record, torch.Tensor] = {}
    for record, tensor in _tensors_in(files_behind(base), {record[:2] for record in names}):
        if record in names:
            found.setdefault(record, tensor)
    if missing := [record for record in names if record not in found]:
        dtype, shape = missing[0][:2]
        raise StateMismatchError(
            f"{os.fspath(base)} has no tensor with the values of {names[missing[0]][0]!r} ({dtype} {list(shape)}), "
            f"which the checkpoint leaves out; {len(missing)} of {len(names)} are missing. Load it with the base that "
            f"it was saved with, {left_out['base']!r}, or a copy"
        )
    for record, tensor in found.items():
        first, *others = names[record]
        checkpoint["state_dict"] |= {first: tensor, **{name: tensor.clone() for name in others}}
    del checkpoint[KEY]


def _check_exclude(value: object) -> None:
    """
    Raises:
        TypeError, ValueError: the value is no :data:`Exclude`.
    """
    if value is None or value == _FROZEN:
        return
    if isinstance(value, str):
        hint = did_you_mean(value, (_FROZEN,))
        raise ValueError(f"exclude is 'frozen' or a list of names and patterns, found {value!r}{hint}")
    if not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"exclude is 'frozen' or a list of names and patterns, found {value!r}")
    if not value:
        raise ValueError("exclude is empty, so nothing would be left out; leave it out")


def _tensors_in(files: Collection[Location], kinds: set[_Kind]) -> Iterator[tuple[_Record, torch.Tensor]]:
    """The tensors of these kinds in files, one by one.

    Files are not verified: a damaged tensor is another one than was left out.
    """
    for file in files if kinds else ():
        with fastensor.open(file, verify=False) as base:
            for name, one in base.info.items():
                if (str(one.dtype).removeprefix("torch."), one.shape) not in kinds:
                    continue
                try:
                    tensor = base[name]
                except UnsupportedContentError:  # it is more than its bytes
                    continue
                if (record := _record(tensor)) is not None:
                    yield record, tensor


def _record(tensor: Any) -> _Record | None:
    """None if it is no plain tensor with elements."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_quantized or area_of(tensor) is None:
        return None
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    storage, begin, half = plain.untyped_storage(), plain.storage_offset() * plain.itemsize, plain.nbytes // 2
    parts = [StoragePart(storage, begin, half), StoragePart(storage, begin + half, plain.nbytes - half)]
    first, second = crc32s_of(parts)
    return str(plain.dtype).removeprefix("torch."), tuple(plain.shape), first, second
