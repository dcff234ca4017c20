"""Decoders return what was encoded."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as arrays
from PIL import Image as Pillow

from fastensor.data import decoders

SOME = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def npy_of(array: np.ndarray[Any, Any], **how: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **how)
    return file.getvalue()


@given(arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, min_side=0)))
def test_npy_returns_what_was_saved(array: np.ndarray[Any, Any]) -> None:
    for one in (array, array.T):
        found = decoders.npy(memoryview(npy_of(one)))
        assert found.dtype == one.dtype
        assert found.tobytes() == one.tobytes()
        assert found.shape == one.shape


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_of_each_version(version: tuple[int, int]) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, SOME, version)
    assert (decoders.npy(file.getvalue()) == SOME).all()


def test_npy_views_and_copies() -> None:
    """Views where they are aligned, which nobody may write to."""
    data = bytearray(2) + npy_of(SOME) + bytearray(2)
    aligned = decoders.npy(memoryview(bytes(data[2:-2])))
    assert not aligned.flags.writeable
    assert aligned.base is not None
    odd = decoders.npy(memoryview(bytes(data))[2:-2])
    assert odd.flags.aligned
    assert (odd == aligned).all()


def test_npy_runs_no_pickles() -> None:
    with pytest.raises(ValueError, match=r"decoders\.unpickle if you trust"):
        decoders.npy(npy_of(np.array([{}], dtype=object), allow_pickle=True))
    with pytest.raises(ValueError, match=r"found b.*NUMPX.*, expected a value that numpy\.save has written"):
        decoders.npy(b"\x93NUMPX\x01\x00\x00\x00")
    with pytest.raises(ValueError, match=r"reshape|buffer"):
        decoders.npy(npy_of(SOME)[:-4])
    with pytest.raises(ValueError, match="found b'', expected a value that"):
        decoders.npy(b"")


def test_arrays_of_plain_numbers() -> None:
    decode = pickle.loads(pickle.dumps(decoders.Array("<f4", (2, 3, -1))))
    assert (decode(memoryview(SOME.tobytes())) == SOME).all()
    with pytest.raises(ValueError, match="reshape"):
        decode(bytes(20))


def test_tensors_have_memory_of_their_own() -> None:
    data = SOME.tobytes()
    decode = pickle.loads(pickle.dumps(decoders.Chain((decoders.Array("f4"), decoders.tensor))))
    decode(memoryview(data)).zero_()
    assert torch.equal(decode(data), torch.from_numpy(SOME.ravel().copy()))


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images(kind: str) -> None:
    file = io.BytesIO()
    Pillow.new("L", (5, 3), 77).save(file, kind)
    image = pickle.loads(pickle.dumps(decoders.Image()))(memoryview(file.getvalue()))
    assert (image.mode, image.size) == ("RGB", (5, 3))
    assert (np.asarray(image) == 77).all()
    assert decoders.Image(mode=None)(file.getvalue()).mode == "L"
    with pytest.raises(OSError, match="identify"):
        decoders.Image()(b"none")


def test_images_by_torchvision() -> None:
    pytest.importorskip("torchvision")
    file = io.BytesIO()
    Pillow.new("L", (5, 3), 77).save(file, "PNG")
    image = decoders.image_tensor(memoryview(file.getvalue()))
    assert image.shape == (3, 3, 5)
    assert (image == 77).all()


def test_msgpack() -> None:
    msgpack = pytest.importorskip("msgpack")
    record = {"label": 3, "data": b"abc", "name": "ä", 7: [1.5, None]}
    assert decoders.msgpack(memoryview(msgpack.packb(record))) == record


def test_pickles_if_they_are_asked_for() -> None:
    assert decoders.unpickle(memoryview(pickle.dumps({"a": SOME.tolist()}))) == {"a": SOME.tolist()}


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "msgpack", None)
    with pytest.raises(
        ImportError, match=r"msgpack is missing, which decodes these values: install Fastensor with its extra msgpack$"
    ):
        decoders.msgpack(b"")
