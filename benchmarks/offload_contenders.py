"""The models whose activations benchmarks offload, and what users do instead of offloading by Fastensor."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastensor.offload.tensors import is_cast_of_parameter, reason_to_keep

PT, NPY = "pt", "npy"


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        stride = 1 if inner == outer else 2
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.short = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


def encoder(layers: int, width: int, heads: int, inner: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, inner, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def resnet(blocks: int) -> nn.Module:
    widths = [64, *(width for width in (64, 128, 256, 512) for _ in range(blocks))]
    parts = [Residual(inner, outer) for inner, outer in itertools.pairwise(widths)]
    return nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), *parts, nn.AdaptiveAvgPool2d(1))


class OfTransformers(nn.Module):
    """A model of transformers with random weights, of vectors in place of words."""

    def __init__(self, kind: str, **sizes: Any) -> None:
        import transformers

        super().__init__()
        config = getattr(transformers, f"{kind}Config")(vocab_size=8, **sizes)
        self.body = getattr(transformers, f"{kind}Model")(config)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(inputs_embeds=x, use_cache=False).last_hidden_state
        return found


_DECODER = {"num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer encoder": lambda: (encoder(6, 512, 8, 2048), torch.randn(8, 256, 512)),
    "BERT-base": lambda: (encoder(12, 768, 12, 3072), torch.randn(4, 128, 768)),
    "ResNet-18": lambda: (resnet(2), torch.randn(32, 3, 128, 128)),
    "ViT-S, 197 tokens": lambda: (encoder(12, 384, 6, 1536), torch.randn(8, 197, 384)),
    **{
        f"48 blocks, batch of {batch}": partial(
            lambda batch: (encoder(48, 256, 4, 1024), torch.randn(batch, 128, 256)), batch
        )
        for batch in (4, 8, 16)
    },
    "Llama": lambda: (
        OfTransformers("Llama", hidden_size=512, num_hidden_layers=12, intermediate_size=1408, **_DECODER),
        torch.randn(4, 256, 512),
    ),
    "Mixtral": lambda: (
        OfTransformers(
            "Mixtral", hidden_size=384, num_hidden_layers=8, intermediate_size=768, num_local_experts=4, **_DECODER
        ),
        torch.randn(4, 256, 384),
    ),
    "tiny": lambda: (encoder(2, 64, 4, 128), torch.randn(8, 32, 64)),
}


class Hooks:
    """Saved tensors go through :meth:`put` and :meth:`get`, but for those that no contender offloads."""

    def __init__(self, least_nbytes: int) -> None:
        self._least_nbytes = least_nbytes
        self.blocked_seconds = 0.0
        self.offloaded_nbytes = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._timed(self._pack), self._timed(self._unpack)):
            yield

    def _timed(self, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(argument: Any) -> Any:
            started = time.perf_counter()
            try:
                return hook(argument)
            finally:
                self.blocked_seconds += time.perf_counter() - started

        return timed

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.nbytes < self._least_nbytes or reason_to_keep(tensor) or is_cast_of_parameter(tensor):
            return tensor.detach()
        self.offloaded_nbytes += tensor.nbytes
        return self.put(tensor.detach())

    def _unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else self.get(packed)

    def put(self, tensor: Tensor) -> Any:
        """Store a tensor, and return what stands for the tensor in the graph, and does not keep it alive."""
        raise NotImplementedError

    def get(self, packed: Any) -> Tensor:
        raise NotImplementedError


class Dropped(Hooks):
    def put(self, tensor: Tensor) -> Any:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def get(self, packed: Any) -> Tensor:
        shape, stride, dtype, device = packed
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


class Counted(Hooks):
    """Nothing is offloaded. What is not zero is counted."""

    def __init__(self, least_nbytes: int) -> None:
        super().__init__(least_nbytes)
        self.sparse_nbytes = 0
        """The bytes of the numbers that are not zero, and a bit for each number; or those of the tensor, if less."""
        self.nbytes = 0
        """The bytes of all tensors."""
        self._kept: dict[tuple[int, int], Tensor] = {}

    def put(self, tensor: Tensor) -> Any:
        key = tensor.untyped_storage().data_ptr(), tensor._version
        if key not in self._kept:  # an offload writes no storage twice
            self._kept[key] = tensor
            self.nbytes += tensor.nbytes
            sparse = int(tensor.count_nonzero()) * tensor.itemsize + tensor.numel() // 8
            self.sparse_nbytes += min(sparse, tensor.nbytes) if tensor.is_floating_point() else tensor.nbytes
        return (tensor,)

    def get(self, packed: Any) -> Tensor:
        (tensor,) = packed
        return tensor  # type: ignore[no-any-return]  # what `put` has returned


class FilePerTensor(Hooks):
    """The Fastensor paper's baselines (section 5.2.2)."""

    def __init__(self, folder: str, kind: str, least_nbytes: int) -> None:
        super().__init__(least_nbytes)
        self._folder, self._kind = Path(folder), kind
        self._numbers = itertools.count()

    def put(self, tensor: Tensor) -> tuple[Path, torch.device]:
        path = self._folder / f"{next(self._numbers)}.{self._kind}"
        if self._kind == PT:
            torch.save(tensor, path)
        else:
            np.save(path, tensor.cpu().numpy())
        return path, tensor.device

    def get(self, packed: tuple[Path, torch.device]) -> Tensor:
        path, device = packed
        found: Tensor = torch.load(path) if self._kind == PT else torch.from_numpy(np.load(path))
        path.unlink()
        return found.to(device)


class Streamed(Hooks):
    """Host memory as the target, as in torchtune: copies on a stream of their own, into pinned memory. The latest five
    tensors are kept on the device until their copies have ended, and what is needed is copied back when it is.

    On a CPU, the same calls have nothing to wait for.
    """

    KEPT = 5

    def __init__(self, least_nbytes: int, device: torch.device | str = "cuda") -> None:
        super().__init__(least_nbytes)
        self._on_gpu = torch.device(device).type == "cuda"
        self._streams: Any = torch.get_device_module(device)
        self._stream = self._streams.Stream()
        self._leaving: deque[tuple[Tensor, Any]] = deque()

    def put(self, tensor: Tensor) -> tuple[Tensor, torch.device]:
        self._stream.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._stream):
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=self._on_gpu)
            copy.copy_(tensor, non_blocking=True)
            self._leaving.append((tensor, self._stream.record_event()))
        while len(self._leaving) > self.KEPT:
            self._streams.current_stream().wait_event(self._leaving.popleft()[1])
        return copy, tensor.device

    def get(self, packed: tuple[Tensor, torch.device]) -> Tensor:
        self._leaving.clear()
        self._streams.current_stream().wait_stream(self._stream)
        copy, device = packed
        with self._streams.stream(self._stream):
            found = copy.to(device, non_blocking=True)
        self._streams.current_stream().wait_stream(self._stream)
        if self._on_gpu:
            found.record_stream(self._streams.current_stream())
        return found


def checkpoint_blocks(net: nn.Module) -> None:
    """Have each block of a model save its input only, and be computed again in the backward pass."""
    for block in [one for one in net.modules() if isinstance(one, Residual | nn.TransformerEncoderLayer)]:
        checkpoint_module(block)
    if isinstance(net, OfTransformers):
        checkpoint_each(net.body.layers)


def checkpoint_each(net: nn.Module) -> None:
    """The same for each child of a module."""
    for block in net.children():
        checkpoint_module(block)


def checkpoint_module(block: nn.Module) -> None:
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
