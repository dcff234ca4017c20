"""Shapes and strides of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar, TypeVarTuple, cast

MAX_SIZE = (1 << 63) - 1
_SHORT = 128
"""Dimensions, or bytes of opcodes that make them."""
_Ts = TypeVarTuple("_Ts")
_R = TypeVar("_R")


def kept_if_short(function: Callable[[*_Ts], _R]) -> Callable[[*_Ts], _R]:
    """Keep what a function of shapes returns, for the next tensor of that shape. A file may say that a tensor has a
    million dimensions; that is not kept.

    >>> asked = []
    >>> dimensions = kept_if_short(lambda shape: asked.append(shape) or len(shape))
    >>> [dimensions((1,) * count) for count in (2, 2, 1000, 1000)], len(asked)
    ([2, 2, 1000, 1000], 3)
    """
    kept = lru_cache(maxsize=4096)(function)

    @wraps(function)
    def call(*shapes: *_Ts) -> _R:
        for shape in cast(tuple[Any, ...], shapes):  # all() takes several times as long
            if len(shape) > _SHORT:
                return function(*shapes)
        return kept(*shapes)

    return call


def is_shape(sizes: Sequence[int]) -> bool:
    """True if non-negative sizes are a shape: their product is at most 2^63 - 1.

    Sizes of zero count as one: readers multiply the others first.

    >>> is_shape([3, 0]), is_shape([1 << 40, 1 << 40])
    (True, False)
    """
    numel = 1
    for size in sizes:
        if size > 1:
            numel *= size
            if numel > MAX_SIZE:
                return False
    return True


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a contiguous tensor.

    >>> row_major([2, 3, 4]), row_major([2, 0, 4])
    ((12, 4, 1), (4, 4, 1))
    """
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(strides[::-1]) if shape else ()


def is_same_layout(shape: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """True if two strides put the elements in the same places. The stride of a dimension of size 1 means nothing.

    >>> is_same_layout([1, 3], [3, 1], [99, 1]), is_same_layout([2, 3], [3, 1], [1, 2])
    (True, False)
    """
    return 0 in shape or all(size == 1 or one == two for size, one, two in zip(shape, stride, other, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """True if the elements fill their memory without gaps or overlaps. The shape has at least one element.

    >>> is_dense([2, 3], [1, 2]), is_dense([2, 3], [4, 1]), is_dense([2, 3], [0, 1])
    (True, False, False)
    """
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
