"""Functions that make a sample of the bytes of a value, for ``decode=`` of :class:`~fastensor.data.LmdbDataset`.

They take any bytes-like object; datasets give them read-only memoryviews. What they return may be a view of those
bytes, and is then read-only, too. They can be pickled, and can be chained with other functions, as in
``torchvision.transforms.v2.Compose([decoders.Image(), ToImage(), Resize(64)])``, or by :class:`Chain`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fastensor.files.arguments import checks_keywords

BytesLike: TypeAlias = bytes | bytearray | memoryview

_NPY_MAGIC = b"\x93NUMPY"
_NPY_PREFIX_NBYTES = 10
"""Magic string, version and, in version 1.0, the length of the header."""


def npy(value: BytesLike) -> npt.NDArray[Any]:
    """The array of a value that :func:`numpy.save` has written. It is a read-only view where it is aligned.

    Raises:
        ValueError: the value is not a ``.npy`` file, or an array of objects, which are pickled.
    """
    view = memoryview(value)
    head = bytes(view[:_NPY_PREFIX_NBYTES])
    if not head.startswith(_NPY_MAGIC):
        raise ValueError(
            f"found {head!r}, expected a value that numpy.save has written, which begins with {_NPY_MAGIC!r}"
        )
    if head[6:7] == b"\1":
        begin = _NPY_PREFIX_NBYTES + int.from_bytes(head[8:], "little")
        dtype, shape, by_columns = _npy_header(bytes(view[:begin]))
        array = _aligned(view[begin:], dtype)
        return array.reshape(shape, order="F" if by_columns else "C")
    loaded: npt.NDArray[Any] = np.load(io.BytesIO(view), allow_pickle=False)
    return loaded


@checks_keywords
@dataclass(frozen=True, slots=True)
class Array:
    """Makes arrays of values that are nothing but numbers, row by row.

    >>> Array("<i2", (2, -1))(bytes(8)).shape
    (2, 2)
    """

    dtype: npt.DTypeLike
    shape: tuple[int, ...] = (-1,)
    """One size may be -1: the number of rows that there are."""

    def __call__(self, value: BytesLike) -> npt.NDArray[Any]:
        """A read-only view where it is aligned.

        Raises:
            ValueError: the value has not the bytes of such an array.
        """
        return _aligned(memoryview(value), np.dtype(self.dtype)).reshape(self.shape)


def tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor of an array. It has memory of its own, because tensors may be written to. Put it at the end of a
    :class:`Chain`."""
    return torch.from_numpy(array.copy())


@checks_keywords
@dataclass(frozen=True, slots=True)
class Chain:
    """Calls functions one after the other.

    >>> Chain((Array("u1"), tensor))(bytes(3))
    tensor([0, 0, 0], dtype=torch.uint8)
    """

    functions: tuple[Callable[[Any], Any], ...]

    def __call__(self, value: Any) -> Any:
        for function in self.functions:
            value = function(value)
        return value


@checks_keywords
@dataclass(frozen=True, slots=True)
class Image:
    """Makes images of PNG, JPEG and other files by Pillow (the extra ``images``)."""

    mode: str | None = "RGB"
    """Pillow's name of the colours that the images get; None leaves the file's own."""

    def __call__(self, value: BytesLike) -> Any:
        """A ``PIL.Image.Image``.

        Raises:
            OSError: Pillow cannot read the file.
        """
        pillow = _imported("PIL.Image", "images")
        with pillow.open(io.BytesIO(value)) as image:
            return image.copy() if self.mode is None else image.convert(self.mode)


def image_tensor(value: BytesLike) -> torch.Tensor:
    """An RGB image as a tensor of uint8 (channels, height, width), by torchvision, from PNG, JPEG and others.

    Raises:
        RuntimeError: torchvision cannot read the file.
    """
    torchvision = _imported("torchvision.io", "images")
    image: torch.Tensor = torchvision.decode_image(torch.frombuffer(bytearray(value), dtype=torch.uint8), mode="RGB")
    return image


def msgpack(value: BytesLike) -> Any:
    """Decode a value that ``msgpack.packb`` has packed (the extra ``msgpack``).

    Raises:
        ValueError: the value is not a message of msgpack.
    """
    return _imported("msgpack", "msgpack").unpackb(value, strict_map_key=False)


def unpickle(value: BytesLike) -> Any:
    """Decode a value that :func:`pickle.dumps` has pickled. Only for databases that you trust: a pickle can run any
    code."""
    return pickle.loads(value)


@lru_cache(maxsize=64)
def _npy_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """The dtype, the shape, and whether the first index changes fastest. Many values have the same header."""
    file = io.BytesIO(header)
    np.lib.format.read_magic(file)
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject:
        raise ValueError("the array has objects, which are pickled: use decoders.unpickle if you trust the database")
    return dtype, shape, by_columns


def _aligned(view: memoryview, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array of all bytes. LMDB aligns small values to 2 bytes only; then they are copied."""
    array: npt.NDArray[Any] = np.frombuffer(view, dtype)
    return array if array.flags.aligned else array.copy()


def _imported(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{module} is missing, which decodes these values: install Fastensor with its extra {extra}"
        ) from error
