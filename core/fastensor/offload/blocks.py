"""Blocks of a model that may be computed again in the backward pass: how they are found, and how they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastensor.files.replacing import replace_attribute


def find_blocks(model: nn.Module, patterns: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The blocks of a model, by name: none of them is inside of another one.

    Args:
        model: the model.
        patterns: of names of modules (``fnmatch``). Without any, modules of one class that a ``ModuleList`` or
            ``Sequential`` has several of, if they have modules themselves.

    >>> model = nn.Sequential(nn.Linear(2, 2), *(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)))
    >>> list(find_blocks(model)), list(find_blocks(model, ["0"]))
    (['1', '2'], ['0'])
    """
    repeated = set() if patterns else {id(one) for module in model.modules() for one in _repeated(module)}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inside and (id(module) in repeated or any(fnmatchcase(name, pattern) for pattern in patterns)):
            found[name] = module
    return found


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a list that have modules themselves, and others of their class beside them."""
    if isinstance(module, nn.ModuleList | nn.Sequential):
        children = [one for one in module.children() if next(one.children(), None) is not None]
        kinds = [type(one) for one in children]
        yield from (one for one in children if kinds.count(type(one)) > 1)


class RunsBlocks(Protocol):
    """Runs blocks of a model in a step."""

    def run_block(self, block: Block, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """What the block's forward pass returns."""


class Block:
    """The ``forward`` of a block of an attached model. A copy of the model has the original one, also where Fastensor
    is not installed. In compiled code it is the original, too: compiled code saves its tensors when it ends.

    Args:
        name: the block's name in the model.
        module: the block.
        current: what runs blocks in this thread now; None outside of steps.
    """

    def __init__(self, name: str, module: nn.Module, current: Callable[[], RunsBlocks | None]) -> None:
        self.name = name
        self.forward = module.forward
        self._module = module
        self._current = current
        self._changing: set[tuple[nn.Module, str]] = set()
        """The buffers that the forward pass has changed so far."""
        self.undo = replace_attribute(module, "forward", self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or (current := self._current()) is None:
            return self.forward(*args, **options)
        return current.run_block(self, args, options)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return getattr, (nullcontext(self.forward), "enter_result")

    def run(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run the forward pass, and note which buffers it changes."""
        before = list(self._buffers())
        result = self.forward(*args, **options)
        for (place, tensor, version), (_, now, changed) in zip(before, self._buffers(), strict=False):
            if now is not tensor or changed != version:
                self._changing.add(place)
        return result

    def run_for_inputs(
        self, args: Sequence[Any], options: Mapping[str, Any], note: Callable[[str, float], None]
    ) -> Any:
        """Run the forward pass so that it saves its inputs only, and is computed again in the backward pass, by torch's
        non-reentrant checkpoint. Buffers change once.

        Args:
            args: of the forward pass.
            options: its keyword arguments. Tensors among them are saved as the others are.
            note: is told the name of the block, and when it began to be computed again.
        """
        names = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
        before = {place: self._value(place).clone() for place in self._changing}
        first = iter((True,))

        def forward(*values: Any) -> Any:
            inner = {**options, **dict(zip(names, values[len(args) :], strict=True))}
            if next(first, False):
                return self.run(values[: len(args)], inner)
            started = time.perf_counter()
            with self._buffers_as_before(before):
                try:
                    return self.forward(*values[: len(args)], **inner)
                finally:
                    note(self.name, started)

        return checkpoint(forward, *args, *(options[name] for name in names), use_reentrant=False)

    def _buffers(self) -> Iterator[tuple[tuple[nn.Module, str], torch.Tensor, int]]:
        for module in self._module.modules():
            for name, value in module._buffers.items():
                if value is not None:
                    yield (module, name), value, 0 if value.is_inference() else value._version

    @staticmethod
    def _value(place: tuple[nn.Module, str]) -> torch.Tensor:
        module, name = place
        value = module._buffers[name]
        assert value is not None
        return value

    @contextmanager
    def _buffers_as_before(self, values: Mapping[tuple[nn.Module, str], torch.Tensor]) -> Iterator[None]:
        """Have buffers as they were before the forward pass, and then as they are now."""
        now = {place: self._value(place) for place in values}
        try:
            for (module, name), value in values.items():
                module._buffers[name] = value.clone()
            yield
        finally:
            for (module, name), value in now.items():
                module._buffers[name] = value
