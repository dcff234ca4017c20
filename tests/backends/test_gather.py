"""Windows that are made in a device's memory: here in the host's, by the same operations of torch."""

from __future__ import annotations

import pickle
import zlib

import pytest
import torch

from fastensor.backends import gather
from fastensor.backends.buffers import BUFFER_NBYTES
from fastensor.backends.gather import ALIGNMENT, DeviceStager, gathering_device
from fastensor.backends.staging import open_stager
from fastensor.errors import StateChangedError
from fastensor.stitch.torch_zip import TorchZip, plan
from fastensor.testing.backends import STORAGE_NBYTES, make_source

HOST = torch.device("cpu")


def gathered(source: TorchZip, nbytes: int) -> bytes:
    parts = []
    with DeviceStager(source, HOST) as stager:
        for offset in range(0, source.nbytes, nbytes):
            window = stager.begin(offset, min(nbytes, source.nbytes - offset))
            stager.finish(window)
            padded = window.padded(ALIGNMENT).numpy().tobytes()
            assert len(padded) % ALIGNMENT == 0
            assert not any(padded[window.nbytes :])
            parts.append(padded[: window.nbytes])
            stager.release(window)
        contents = [torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data for storage in source.storages]
        assert list(stager.checksums) == [zlib.crc32(content) for content in contents]
    return b"".join(parts)


def staged(source: TorchZip) -> bytes:
    parts = []
    with open_stager(source) as stager:
        for offset in range(0, source.nbytes, BUFFER_NBYTES):
            window = stager.begin(offset, min(BUFFER_NBYTES, source.nbytes - offset))
            stager.finish(window)
            parts.append(bytes(window.data))
            stager.release(window)
    return b"".join(parts)


@pytest.mark.parametrize("nbytes", [4096, 3 * 4096, 1 << 20, BUFFER_NBYTES])
def test_windows_of_any_size_make_the_same_image(nbytes: int) -> None:
    source = make_source(*STORAGE_NBYTES[: 9 if nbytes < 1 << 20 else None], *range(50))
    assert gathered(source, nbytes) == staged(source)


def test_headers_that_are_cut_anywhere() -> None:
    source = plan({"a": torch.arange(50), "b": torch.ones(3)}, pickle_module=pickle, pickle_protocol=2)
    assert all(gathered(source, nbytes) == staged(source) for nbytes in (1, 7, 64, 1000))


def test_a_buffer_is_used_again() -> None:
    source = make_source(100)
    for _ in range(3):
        assert gathered(source, 512) == staged(source)


def test_a_storage_that_was_resized_is_refused() -> None:
    source = make_source(1000)
    source.storages[0].resize_(2000)
    with pytest.raises(StateChangedError, match="resized"):
        gathered(source, 4096)
    assert gathered(make_source(1000), 4096) == staged(make_source(1000)), "the ring was given back whole"


def test_what_is_in_host_memory_is_not_gathered() -> None:
    assert gathering_device(make_source(100)) is None
    assert gathering_device(make_source()) is None


def test_a_ring_that_was_made_in_inference_mode_serves_others() -> None:
    source = make_source(100_000)
    gather._idle.clear()
    with torch.inference_mode():
        assert gathered(source, 4096) == staged(source)
    assert gathered(source, 4096) == staged(source)
