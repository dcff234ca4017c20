"""Tensors of a load that share memory, and get values from several places. Only one value can stay in each byte."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch

from fastensor.checkpoint.models.ties import area_of, sharing
from fastensor.errors import StateMismatchError
from fastensor.stitch.safetensors import has_own_memory

_SHOWN = 5
_OF_ROWS, _OF_COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: _OF_ROWS,
    torch.sparse_bsr: _OF_ROWS,
    torch.sparse_csc: _OF_COLUMNS,
    torch.sparse_bsc: _OF_COLUMNS,
}
_AT_ONCE = 1 << 20
"""Elements that are converted to wider floats at a time when values are compared."""
_ALIGNMENT = 16
"""Bytes. The memory in which shared tensors are compared begins at a multiple of it, as complex128 needs."""


class Incoming(NamedTuple):
    """A tensor that is to get values."""

    name: str
    target: torch.Tensor
    within: Hashable
    """Space that the values are a part of: a file, or the memory of this process."""
    begin: int
    """The offset in ``within`` at which the values begin, in bytes."""
    dtype: torch.dtype
    stride: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    """Gives the values, on the host."""

    @property
    def origin(self) -> Hashable:
        """Tensors of one origin get the same values wherever they share memory."""
        target = self.target
        if area_of(target) is None:
            return self.within, self.begin, id(target)
        distance = self.begin - target.data_ptr()
        if (target.dtype, target.stride()) == (self.dtype, self.stride):
            return self.within, distance  # every byte is moved as far
        return self.within, distance, self.begin, self.dtype, self.stride, target.dtype, target.stride()


def held(name: str, target: torch.Tensor, values: torch.Tensor) -> Incoming:
    """A tensor that is to get the values of one on the host."""
    if area_of(values) is None:
        return Incoming(name, target, id(values), 0, values.dtype, (), lambda: values)
    return Incoming(name, target, "memory", values.data_ptr(), values.dtype, values.stride(), lambda: values)


def contested(incoming: Iterable[Incoming]) -> list[list[Incoming]]:
    """Groups of those that share memory, directly or by others between them, and are of several origins. The tensors of
    a group are in the order of ``incoming``. Nothing is read."""
    by_name = {one.name: one for one in incoming}
    groups = [[by_name[name] for name in names] for names in sharing({n: one.target for n, one in by_name.items()})]
    return [group for group in groups if len({one.origin for one in group}) > 1]


def check_agree(groups: Iterable[Sequence[Incoming]], where: str, advice: str) -> None:
    """Make sure that each tensor would have its own values when all have been filled. The values are read for it.

    Args:
        groups: as :func:`contested` gives them. Shapes and dtypes fit.
        where: the name of the file, for messages.
        advice: what to do, for messages.

    Memory on the host: that of a group, and one tensor.

    Raises:
        StateMismatchError: one would lose values to another one.
        Exception: what ``read`` raises.
    """
    for group in groups:
        with torch.no_grad():
            agree = _agree(group)
        if not agree:
            names = " and ".join(repr(one.name) for one in group[:_SHOWN])
            more = f" and {len(group) - _SHOWN} more" if len(group) > _SHOWN else ""
            raise StateMismatchError(
                f"{where}: {names}{more} share memory, and have different values in the file, of which only one can "
                f"stay; nothing was overwritten. {advice}"
            )


def _agree(group: Sequence[Incoming]) -> bool:
    targets = [one.target for one in group]
    areas = [area_of(one) for one in targets]
    are_plain = all(areas) and all(map(_is_plain, targets))
    places = {(area, one.dtype, one.shape, one.stride()) for area, one in zip(areas, targets, strict=True) if are_plain}
    if len(places) > 1:
        return _agree_in_place(group)
    values = (one.read() if one.target.is_quantized else one.read().to(one.target.dtype) for one in group)
    first = next(values)
    return all(_are_equal(first, other) for other in values)


def _agree_in_place(group: Sequence[Incoming]) -> bool:
    """Write all values to memory of the host, as they would be written to the targets, and look what is left."""
    views = _host_views([one.target for one in group])
    for one, view in zip(group, views, strict=True):
        view.copy_(one.read())
    # the last one has lost nothing
    return all(_are_equal(view, one.read().to(view.dtype)) for one, view in zip(group[:-1], views, strict=False))


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if the memory of a tensor, if it has some, holds its elements as they are."""
    return has_own_memory(tensor) and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _host_views(targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the host that share memory as these do."""
    areas = [area for target in targets if (area := area_of(target)) is not None]
    begin = min(area.begin for area in areas) // _ALIGNMENT * _ALIGNMENT
    memory = torch.empty(max(area.end for area in areas) - begin, dtype=torch.uint8, device="cpu").untyped_storage()
    return [
        torch.empty(0, dtype=one.dtype, device="cpu").set_(
            memory, (one.data_ptr() - begin) // one.itemsize, one.shape, one.stride()
        )
        for one in targets
    ]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if tensors have the same values. NaN is NaN, whatever its bits; 0 is -0. Where torch cannot tell, they have.

    torch compares no sparse tensors; their parts are compared.
    """
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout in _PARTS:
        return all(map(_are_equal, _parts_of(one), _parts_of(other)))
    if one.layout == torch.strided and _is_plain(one) and _is_plain(other):
        return torch.equal(_bytes_of(one), _bytes_of(other)) or _are_equal_numbers(one, other)
    try:
        return torch.equal(one, other)
    except NotImplementedError:  # as torch does, the load keeps the last one
        return True


def _are_equal_numbers(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return False
    wide = torch.complex128 if one.is_complex() else torch.float64
    flat = one.reshape(-1), other.reshape(-1)
    pieces = ([part[at : at + _AT_ONCE] for part in flat] for at in range(0, one.numel(), _AT_ONCE))
    try:
        return all(torch.allclose(a.to(wide), b.to(wide), 0.0, 0.0, equal_nan=True) for a, b in pieces)
    except NotImplementedError:  # four-bit floats
        return False


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one consists of."""
    whole = tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
    return [getattr(whole, name)() for name in _PARTS[tensor.layout]]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().contiguous()
    begin = dense.storage_offset() * dense.itemsize
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(dense.untyped_storage(), begin, (dense.nbytes,), (1,))
