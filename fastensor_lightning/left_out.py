"""Tensors that checkpoints of a Trainer leave out, because the module has them anyway: a frozen base, say.

Left out is what is excluded and has not changed since the run began. The checkpoint says what that is, with CRC32s. A
load gives the module's own tensors in place of what is missing, if they are the ones that were left out. So everything
that loads has the values that were saved, and Lightning's strict loading still finds what is missing besides.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from fastensor.backends.registry import announce
from fastensor.backends.storage_crc32 import StoragePart, crc32s_of
from fastensor.checkpoint.models.names import resolve
from fastensor.checkpoint.models.ties import area_of
from fastensor.errors import StateMismatchError
from fastensor.files.arguments import did_you_mean

KEY = "fastensor_left_out"
"""The entry of a checkpoint that says what was left out of its ``state_dict``."""
Exclude: TypeAlias = Literal["frozen"] | Sequence[str] | None
_FROZEN = "frozen"
_Record: TypeAlias = tuple[str, tuple[int, ...], int]
"""The dtype, the shape and the CRC32 of a tensor."""


def check_exclude(value: object) -> None:
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


class LeftOut:
    """What the checkpoints of one plugin leave out. Pickled without what is known of a run.

    Args:
        exclude: as for :class:`FastensorCheckpointIO`.
    """

    def __init__(self, exclude: Exclude) -> None:
        self.exclude = exclude
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._base: dict[str, _Record] = {}
        """What was excluded when the first run with the module began."""
        self._differing: set[str] = set()
        """Names of tensors of the checkpoint that was loaded last which the module did not have by itself."""

    def __reduce__(self) -> tuple[Any, ...]:
        return LeftOut, (self.exclude,)

    def begin(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """A run begins, after the module was restored, if it was. Returns what may be left out.

        Raises:
            UnknownKeyError: a pattern chooses nothing.
        """
        differing, self._differing = self._differing, set()
        if self.exclude is None:
            return []
        state = module.state_dict()
        if self._module is None or self._module() is not module:
            chosen = self._chosen(module, state) - differing
            self._module, self._base = weakref.ref(module), _records({name: state[name] for name in chosen})
        return [state[name] for name in self._base if name in state]

    def without(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint to be saved: itself, or a copy without what is left out."""
        module, state = None if self._module is None else self._module(), checkpoint.get("state_dict")
        if module is None or not self._base or not isinstance(state, dict):
            return checkpoint
        chosen = self._chosen(module, state) & self._base.keys()
        found = _records({name: state[name] for name in chosen})
        left_out = {name: record for name, record in found.items() if record == self._base[name]}
        if changed := sorted(chosen - left_out.keys()):
            announce(f"leaving out {changed[0]!r}", "it has changed since the run began, so it is saved")
        kept = copy.copy(state)  # with its attributes
        for name in left_out:
            del kept[name]
        return {**checkpoint, "state_dict": kept, KEY: left_out}

    def give_back(self, checkpoint: Any, module: Any, where: str, *, verify: bool) -> None:
        """Give a loaded checkpoint the module's own tensors in place of those that were left out.

        Args:
            checkpoint: is changed.
            module: a LightningModule, as its ``__init__`` and ``configure_model`` have made it.
            where: the file's name, for messages.
            verify: whether the module's tensors are compared with those that were left out.

        Raises:
            StateMismatchError: the module has other tensors than those that were left out, or none of a name.
        """
        state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
        if not isinstance(state, dict):
            return
        own, left_out = module.state_dict(), checkpoint.get(KEY, {})
        missing = sorted(left_out.keys() - own.keys())
        if missing and module.strict_loading:
            raise StateMismatchError(
                f"{where} leaves out {missing[0]!r}, which the module has to have by itself, and has not "
                f"({len(missing)} missing); make the module as it was when the checkpoint was saved"
            )
        present = {name: own[name] for name in left_out if name in own}
        if verify:
            _compare(present, left_out, where)
        if self.exclude is not None:
            chosen = self._chosen(module, own) & state.keys()
            self._differing = {name for name in chosen if not _are_equal(own[name], state[name])}
        state.update(present)

    def _chosen(self, module: torch.nn.Module, state: Mapping[str, Any]) -> set[str]:
        """The names of a state dict that are excluded now."""
        if self.exclude != _FROZEN:
            assert self.exclude is not None, "the caller has looked"
            return resolve(self.exclude, state.keys() | module.state_dict().keys(), "exclude") & state.keys()
        parameters = module.named_parameters(remove_duplicate=False)
        return {name for name, parameter in parameters if not parameter.requires_grad} & state.keys()


def _records(tensors: Mapping[str, Any]) -> dict[str, _Record]:
    """What is known of tensors, but for those whose bytes cannot be compared."""
    dense = {
        name: one.detach().contiguous()
        for name, one in tensors.items()
        if isinstance(one, torch.Tensor) and not one.is_quantized and area_of(one) is not None
    }
    parts = [
        StoragePart(one.untyped_storage(), int(one.storage_offset()) * one.itemsize, one.nbytes)
        for one in dense.values()
    ]
    named = zip(dense.items(), crc32s_of(parts), strict=True)
    return {name: (str(one.dtype).removeprefix("torch."), tuple(one.shape), crc32) for (name, one), crc32 in named}


def _compare(own: Mapping[str, torch.Tensor], left_out: Mapping[str, Any], where: str) -> None:
    """Compare the module's tensors, in the dtypes of those that were left out: precision plugins convert a module only
    when it is restored.

    Raises:
        StateMismatchError: they are others.
    """
    found = _records({name: _in_dtype(one, left_out[name]) for name, one in own.items()})
    differing = sorted(name for name in own if found.get(name) != tuple(left_out[name]))
    if differing:
        raise StateMismatchError(
            f"{where} leaves out {differing[0]!r}, which the module has to have by itself: it has another one than "
            f"when the checkpoint was saved ({len(differing)} of {len(own)} differ). Give the module the same weights "
            f"before it is restored, in __init__ or configure_model; or compare nothing, with verify=False"
        )


def _in_dtype(tensor: torch.Tensor, record: Sequence[Any]) -> torch.Tensor:
    dtype = getattr(torch, str(record[0]), None)
    is_known = isinstance(dtype, torch.dtype) and dtype.is_floating_point and tensor.is_floating_point()
    return tensor.to(dtype) if is_known else tensor


def _are_equal(own: Any, loaded: Any) -> bool:
    if not isinstance(own, torch.Tensor) or not isinstance(loaded, torch.Tensor) or own.shape != loaded.shape:
        return False
    return torch.equal(own.to(loaded.device, loaded.dtype), loaded)
