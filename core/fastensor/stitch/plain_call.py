"""The call that makes a plain tensor, as torch's pickler writes it: most of a pickle consists of such calls. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from fastensor.stitch.shape import is_shape

_GET, _PUT, _INT = rb"(?:h.|j....)", rb"(?:q.|r....)", rb"(?:K.|M..|J...[\x00-\x7f])"
_INTS = rb"(?:\)|%(i)b\x85|%(i)b{2}\x86|%(i)b{3}\x87|\(%(i)b{4,}t)" % {b"i": _INT}
PLAIN_CALL = re.compile(
    rb"\(\((?P<word>%(get)b)(?P<kind>%(get)b)X(?P<length>[\x01-\x09])\0\0\0(?P<key>[0-9]{1,9})(?P<put_key>%(put)b)"
    rb"(?P<location>%(get)b)(?P<numel>%(int)b)t(?P<put_id>%(put)b)Q"
    rb"(?P<offset>%(int)b)(?P<size>%(ints)b)(?P<put_size>%(put)b)?(?P<stride>%(ints)b)(?P<put_stride>%(put)b)?"
    rb"[\x88\x89](?P<hooks>%(get)b)\)R(?P<put_hooks>%(put)b)t(?P<put_arguments>%(put)b)R"
    % {b"get": _GET, b"put": _PUT, b"int": _INT, b"ints": _INTS},
    re.DOTALL,
)
"""The arguments of ``torch._utils._rebuild_tensor_v2``, and its call, behind the first tensor of a kind: the persistent
id of a storage (the word, class, key, location, number of elements), the offset, the size, the strides,
``requires_grad``, an empty dict of hooks. An empty tuple is not put into the memo."""
_INTEGER_NBYTES = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
_MARK = b"("


def number_in(operation: bytes) -> int:
    """The number behind an opcode."""
    return int.from_bytes(operation, "little") >> 8


@lru_cache(maxsize=4096)
def geometry_of(size: bytes, stride: bytes) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape and the strides that opcodes make; None if no tensor has them."""
    shape, steps = _tuple_of(size), _tuple_of(stride)
    return (shape, steps) if len(shape) == len(steps) and is_shape(shape) else None


def _tuple_of(operations: bytes) -> tuple[int, ...]:
    """The tuple that opcodes make: integers, and then what puts them together."""
    found = []
    at = int(operations.startswith(_MARK))
    while (nbytes := _INTEGER_NBYTES.get(operations[at])) is not None:
        found.append(int.from_bytes(operations[at + 1 : at + 1 + nbytes], "little"))
        at += 1 + nbytes
    return tuple(found)
