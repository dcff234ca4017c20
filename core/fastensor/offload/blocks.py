"""Blocks of a model that may be computed again in the backward pass: how they are found, and how they run."""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from numbers import Number
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from fastensor.errors import OffloadError
from fastensor.files.replacing import replace_attribute

Place: TypeAlias = tuple[nn.Module, str]
"""A module, and the name of one of its buffers or attributes."""
_VALUES = (torch.Tensor, Number, str, bytes, Enum, type, type(None), torch.Size, torch.dtype, torch.device)
"""Classes of arguments and attributes that a block cannot change, but for tensors, whose changes are found."""
_OF_TORCH = vars(nn.Module()).keys()
"""Names of the attributes that each module has."""
_MISSING = object()
"""In place of an attribute that is not there."""


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The blocks of a model, by name: none of them is inside of another one.

    Args:
        model: the model, which is no block itself.
        patterns: of names of modules (``fnmatch``). Lists of modules that others call are left out. Without any
            pattern, modules of one class that a ``ModuleList`` or ``Sequential`` has several of, if they have modules
            themselves; and in place of ``Sequential`` ones, the blocks in them.

    >>> model = nn.Sequential(nn.Linear(2, 2), *(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)))
    >>> list(find_blocks(model)), list(find_blocks(model, ["0"]))
    (['1', '2'], ['0'])
    """
    repeated = set() if patterns else {id(one) for one in _all_repeated(model)}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        is_named = name and _has_forward(module) and any(fnmatchcase(name, pattern) for pattern in patterns)
        if not is_inside and (id(module) in repeated or is_named):
            found[name] = module
    return found


def _all_repeated(model: nn.Module) -> list[nn.Module]:
    """The blocks in all lists of a model, those inside of blocks included: others of their class are beside them, or
    they are there several times. Of ``Sequential`` ones that hold blocks, such as the stages of a network, these."""
    found, holders = list[nn.Module](), set[nn.Module]()
    for module in reversed(list(model.modules())):  # what is inside comes first
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        inside = [one for one in module._modules.values() if one is not None]
        children = [one for one in inside if _may_be_block(one) and one not in holders]
        kinds = [type(one) for one in children]
        found += (repeated := [one for one in children if kinds.count(type(one)) > 1])
        if type(module) is nn.Sequential and (repeated or not holders.isdisjoint(inside)):
            holders.add(module)
    return found


def _may_be_block(module: nn.Module) -> bool:
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    return next(module.children(), None) is not None and _has_forward(module) and not is_scripted


def _has_forward(module: nn.Module) -> bool:
    """False for a list of modules, which nobody calls."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def inputs_of(args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[list[torch.Tensor], bool]:
    """The tensors that a block is called with, those in tuples, lists and dicts included; and whether they can be saved
    for the backward pass, and the block gets nothing else that it could change, such as a cache of keys and values."""
    leaves, _ = tree_flatten((args, dict(options)))
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    is_pure = all(isinstance(one, _VALUES) for one in leaves) and not any(one.is_inference() for one in tensors)
    return tensors, is_pure


_SMALL_NBYTES = 64 << 10
"""Buffers, and tensors that are attributes, of no more bytes are copied before a block runs that is computed again: it,
or others, may change them."""


class RunsBlocks(Protocol):
    """Runs blocks of a model in a step."""

    def run_block(self, block: BlockForward, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """What the block's forward pass returns."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A buffer, or an attribute, when a forward pass begins."""

    home: dict[str, Any]
    """The dict of the module that has it by its name."""
    value: Any
    """A copy of a small tensor, or of a buffer that the forward pass has changed before; else the object itself."""
    itself: Any
    """The object."""
    version: int
    """The number of its in-place changes."""

    @property
    def is_copied(self) -> bool:
        return self.value is not self.itself


@dataclass(frozen=True, slots=True)
class _State:
    """What a forward pass of a block depends on, beside its arguments, when it begins."""

    modes: tuple[bool, ...]
    """Training or evaluation mode of each module: True in training."""
    versions: tuple[tuple[int, int], ...]
    """The identity and version of each parameter."""
    values: Mapping[Place, _Value]


class BlockForward:
    """The ``forward`` of a block of an attached model. A copy of the model has the original one, also where Fastensor
    is not installed. In compiled code it is the original, too: compiled code saves its tensors when it ends.

    Args:
        name: the block's name in the model.
        module: the block.
        current: what runs blocks in this thread now; None outside of steps.
    """

    def __init__(self, name: str, module: nn.Module, current: Callable[[], RunsBlocks | None]) -> None:
        self.name = name
        self.forward = self.__wrapped__ = module.forward  # whose signature is this one's for inspect
        self.is_pure = True
        """False if the forward pass, or what came after it, has changed an input in place; if the forward pass has
        changed a parameter, or a tensor that is an attribute, in place, or drawn from a generator that torch's
        checkpoint does not bring back; or if it has communicated with other processes, of which not each may compute it
        again."""
        self._module = module
        self._current = current
        self._changing: dict[tuple[bool, ...], set[Place]] = {}
        """The buffers and attributes that forward passes have changed so far, by the modes of the modules."""
        self._is_removed = False
        self._undo = replace_attribute(module, "forward", self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or (current := self._current()) is None:
            return self.forward(*args, **options)
        return current.run_block(self, args, options)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return getattr, (nullcontext(self.forward), "enter_result")

    def remove(self) -> None:
        """Have the module's own ``forward`` again. If something else has replaced it since, that stays, and calls the
        original through this one."""
        self._is_removed = True
        while isinstance(top := vars(self._module).get("forward"), BlockForward) and top._is_removed:
            top._undo()

    @property
    def can_be_recomputed(self) -> bool:
        """True if nothing forbids it, and it is known which buffers and attributes the forward pass changes."""
        return self.is_pure and _modes(self._modules()) in self._changing

    def run(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run the forward pass, and note which buffers and attributes it changes, and whether it communicates."""
        modules = self._modules()
        result, _ = self._run(modules, _values(modules), args, options)
        return result

    def _run(
        self, modules: Sequence[nn.Module], before: Mapping[Place, Any], args: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Any, Mapping[Place, Any]]:
        """:meth:`run`, and the buffers and attributes after it.

        Args:
            modules: the block, and the modules in it.
            before: the buffers and attributes.
            args: of the forward pass.
            options: its keyword arguments.
        """
        outside = _outside(modules)
        known = self._changing.get(modes := _modes(modules))
        copies = {place: one.clone() if known is None and _is_dense(one) else one for place, one in before.items()}
        versions = {place: _version(one) for place, one in before.items()}
        result = self.forward(*args, **options)
        after = _values(modules)
        there = {place for place, one in before.items() if place in after and after[place] is one}
        in_place = {
            place
            for place in there
            if versions[place] != _version(now := before[place])  # batch norms change theirs without counting it
            or (copies[place] is not now and _is_dense(now) and not torch.equal(copies[place], now))
        }
        self._changing[modes] = (known or set()) | (before.keys() - there) | in_place
        self.is_pure &= _outside(modules) == outside and all(map(_is_buffer, in_place))
        return result, after

    def run_for_inputs(
        self, args: Sequence[Any], options: Mapping[str, Any], note: Callable[[str, float], None]
    ) -> Any:
        """Run the forward pass so that it saves its inputs only, and is computed again in the backward pass, by torch's
        non-reentrant checkpoint. Buffers and attributes change once.

        Args:
            args: of the forward pass.
            options: its keyword arguments.
            note: is told the name of the block, and when it began to be computed again.

        Raises:
            OffloadError: the forward pass has changed a large buffer or attribute in place that it had never changed
                before, and may have read.
            RuntimeError: in the backward pass, if a parameter, or a large buffer or attribute, was changed in place, or
                a parameter was replaced.
        """
        leaves, form = tree_flatten((tuple(args), dict(options)))
        places = [index for index, one in enumerate(leaves) if isinstance(one, torch.Tensor)]
        tensors = [leaves[index] for index in places]
        for index in places:
            leaves[index] = None  # the checkpoint saves tensors; nothing else is to keep their memory
        state, given = self._state(modules := self._modules()), [(args, options)]

        def forward(*values: torch.Tensor) -> Any:
            if given:
                return self._run_first(modules, state, *given.pop())
            args, options = tree_unflatten(_replaced(leaves, zip(places, values, strict=True)), form)
            started = time.perf_counter()
            with self._as_it_was(state):
                try:
                    return self.forward(*args, **options)
                finally:
                    note(self.name, started)

        return checkpoint(forward, *tensors, use_reentrant=False)

    def _state(self, modules: Sequence[nn.Module]) -> _State:
        changing, values = self._all_changing(), dict[Place, _Value]()
        for (module, name), one in _values(modules).items():
            is_buffer = _is_buffer((module, name))
            is_small = _is_dense(one) and one.nbytes <= _SMALL_NBYTES
            is_copied = is_small or (is_buffer and one is not None and (module, name) in changing)
            home = module._buffers if is_buffer else vars(module)
            values[module, name] = _Value(home, one.clone() if is_copied else one, one, _version(one))
        return _State(_modes(modules), _versions(modules), values)

    def _run_first(
        self, modules: Sequence[nn.Module], state: _State, args: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        known = self._all_changing()
        before = {place: one.itself for place, one in state.values.items()}
        result, after = self._run(modules, before, args, options)
        for module, name in self._all_changing() - known:
            one = state.values[module, name]
            if after.get((module, name)) is one.value is not None:
                raise OffloadError(
                    f"block {self.name!r} has changed {name!r} of {type(module).__name__} in place for the first time, "
                    "in a step in which it is to be computed again, for which the values from before are gone. Name "
                    "blocks that do no such thing by recompute=(...)"
                )
        return result

    def _all_changing(self) -> set[Place]:
        """The buffers and attributes that forward passes have changed so far, in any modes."""
        return set[Place]().union(*self._changing.values())

    @contextmanager
    def _as_it_was(self, state: _State) -> Iterator[None]:
        """Have buffers, attributes and modes as they were before the forward pass, and then as they are now.

        Raises:
            RuntimeError: a parameter, or a buffer or attribute of which there is no copy, was changed in place; or a
                parameter was replaced.
        """
        modules, changing = self._modules(), self._all_changing()
        if _versions(modules) != state.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, or "
                f"replaced (torch.func.functional_call): a parameter of {self.name!r}, which is computed again "
                "(recompute in fastensor's OffloadConfig)"
            )
        others = {
            (module, name): one
            for (module, name), one in state.values.items()
            if (module, name) in changing
            or one.home.get(name, _MISSING) is not one.itself
            or _version(one.itself) != one.version
        }
        for (module, name), one in others.items():
            if not one.is_copied and _version(one.itself) != one.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name!r} of {type(module).__name__} in {self.name!r}, which is computed again (recompute in "
                    "fastensor's OffloadConfig)"
                )
        modes = _modes(modules)
        now = [(one.home, name, one.home.get(name, _MISSING)) for (_, name), one in others.items()]
        try:
            _set_modes(modules, state.modes)
            for (_, name), one in others.items():
                one.home[name] = one.value.clone() if one.is_copied else one.value
            yield
        finally:
            _set_modes(modules, modes)
            for home, name, value in now:
                home[name] = value
                if value is _MISSING:
                    del home[name]

    def _modules(self) -> tuple[nn.Module, ...]:
        """The block, and the modules in it now."""
        return tuple(self._module.modules())


def _values(modules: Iterable[nn.Module]) -> dict[Place, Any]:
    """What modules have, beside parameters, that forward passes may read and change: buffers; and attributes that are
    numbers and the like, or tensors without gradients. Those with gradients would keep graphs alive."""
    found = dict[Place, Any]()
    for module in modules:
        found.update({(module, name): one for name, one in module._buffers.items() if one is None or not is_lazy(one)})
        for name, one in _attributes(module):
            if isinstance(one, _VALUES) and not (isinstance(one, torch.Tensor) and (one.requires_grad or is_lazy(one))):
                found[module, name] = one
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Names and values of the attributes that a module has beside those of every module."""
    return ((name, one) for name, one in tuple(vars(module).items()) if name not in _OF_TORCH)


def _is_buffer(place: Place) -> bool:
    module, name = place
    return name in module._buffers


def _is_dense(value: Any) -> bool:
    is_plain = type(value) in (torch.Tensor, nn.Buffer) and not (value.is_meta or value.is_nested)
    return is_plain and value.layout is torch.strided


def _modes(modules: Iterable[nn.Module]) -> tuple[bool, ...]:
    return tuple(one.training for one in modules)


def _set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    for one, mode in zip(modules, modes, strict=False):  # some may have been added
        if one.training != mode:
            one.training = mode


def _versions(modules: Iterable[nn.Module]) -> tuple[tuple[int, int], ...]:
    parameters = (one for module in modules for one in module._parameters.values() if one is not None)
    return tuple((id(one), _version(one)) for one in parameters)


def _version(value: Any) -> int:
    """The number of a tensor's in-place changes. Nobody counts those of inference tensors, and other values have
    none."""
    return 0 if not isinstance(value, torch.Tensor) or value.is_inference() else value._version


def _replaced(values: Sequence[Any], others: Iterable[tuple[int, Any]]) -> list[Any]:
    """Values, of which those at some indices are others."""
    found = list(values)
    for index, value in others:
        found[index] = value
    return found


def _outside(modules: Iterable[nn.Module]) -> tuple[object, ...]:
    """What a forward pass that can be computed again leaves as it is, beside its inputs: parameters, the generators of
    Python and NumPy and those of the modules, which torch's checkpoint does not bring back, and other processes."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    kinds = (random.Random, torch.Generator, *of_numpy)
    own = [_state_of(one) for module in modules for _, one in _attributes(module) if isinstance(one, kinds)]
    drawn = () if numpy is None else _state_of(numpy.random)
    return _versions(modules), random.getstate(), drawn, own, _communications()


def _state_of(generator: Any) -> object:
    """What the next numbers of a generator depend on; something else each time if it has no state, as that of the
    system. The one that NumPy's functions draw from is asked for as the module."""
    try:
        if isinstance(generator, random.Random):
            return generator.getstate()
        if isinstance(generator, torch.Generator):
            return generator.get_state().numpy().tobytes()
        is_legacy = hasattr(generator, "get_state")
        return pickle.dumps(generator.get_state(legacy=False) if is_legacy else generator.bit_generator.state)
    except NotImplementedError:
        return object()


def _communications() -> tuple[int, ...] | object:
    """The number of operations that each process group has begun; something else each time if a group counts none."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ()
    groups = torch.distributed.distributed_c10d._world.pg_map
    backends = (group._get_backend(device) for group in groups for device in group._device_types)
    try:
        return tuple(one._get_sequence_number_for_group() for one in backends)  # type: ignore[attr-defined]  # not in stubs
    except (RuntimeError, AttributeError):  # as for backends of other packages
        return object()
