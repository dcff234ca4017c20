"""Activation offload through kvikio: host memory, also in the place of a device's, which it moves by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import CASES, equal, gradients, large, slot_files

from fastensor.backends import gds, registry, threads
from fastensor.backends.gds import GdsSlots
from fastensor.errors import BackendUnavailableError
from fastensor.offload import ActivationOffload, CorruptActivationError, OffloadConfig, copying


@pytest.fixture
def as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "STAGED", {"cpu"})
    monkeypatch.setattr(GdsSlots, "device_types", frozenset({"cpu"}))


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"directories": (str(tmp_path),), "min_bytes": 1, "backend": "gds"}


@pytest.fixture
def offload(options: dict[str, Any]) -> Iterator[ActivationOffload]:
    with ActivationOffload(OffloadConfig(schedule="all", **options)) as offload:
        yield offload


@pytest.mark.parametrize("name", ["transformer", "convolutions", "complex_numbers", "strides"])
def test_memory_of_the_host(offload: ActivationOffload, name: str) -> None:
    for _ in range(2):
        assert equal(gradients(CASES[name], offload), gradients(CASES[name], None))
    assert set(offload.statistics().written_by) == {"gds"}


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("case", [CASES["transformer"], CASES["complex_numbers"], large])
@pytest.mark.parametrize("more", [{}, {"backend": "auto"}, {"verify": False}, {"prefetch_bytes": 0},
                                  {"staging_bytes": 8 << 20}])  # fmt: skip
def test_memory_of_a_device_goes_straight(options: dict[str, Any], case: Any, more: dict[str, Any]) -> None:
    with ActivationOffload(OffloadConfig(schedule="all", **options | more)) as offload:
        for _ in range(2):
            assert equal(gradients(case, offload), gradients(case, None))
        assert offload.statistics().written_by["gds"] > 0
        if "backend" not in more:
            assert set(offload.statistics().written_by) == {"gds"}
            assert offload.memory_usage()["staged"] == 0, "nothing has been in host memory on its way"


@pytest.mark.usefixtures("as_device")
def test_what_rests_in_host_memory_does_not_go_straight(options: dict[str, Any]) -> None:
    with ActivationOffload(OffloadConfig(schedule="all", dram_bytes=16 << 20, **options)) as offload:
        for _ in range(2):
            assert equal(gradients(CASES["transformer"], offload), gradients(CASES["transformer"], None))
        assert offload.memory_usage()["staged"] > 0


@pytest.mark.usefixtures("as_device")
@pytest.mark.parametrize("way", ["write_from_device", "read_to_device"])
def test_what_kvikio_cannot_move_goes_by_way_of_the_host(offload: ActivationOffload, way: str) -> None:
    refusal = mock.Mock(side_effect=BackendUnavailableError("CU_FILE_INTERNAL_ERROR"))
    with mock.patch.object(GdsSlots, way, refusal):
        assert equal(gradients(CASES["transformer"], offload), gradients(CASES["transformer"], None))
    refusal.assert_called()
    assert offload.statistics().failed_writes == 0


@pytest.mark.usefixtures("as_device")
def test_a_flipped_bit_is_found_on_a_device(offload: ActivationOffload) -> None:
    torch.manual_seed(0)
    with offload.step():
        loss, _ = CASES["transformer"]()
    offload.settle()
    (file,) = slot_files(offload)
    data = bytearray(os.pread(file.fd, 4096, 8192))
    data[100] ^= 1
    os.pwrite(file.fd, data, 8192)
    with pytest.raises(CorruptActivationError, match="has changed on the disk"):
        loss.backward()


@pytest.mark.parametrize("way", ["write", "read"])
def test_after_an_interrupt_nothing_is_moved_any_more(tmp_path: Path, way: str) -> None:
    """Ctrl-C at each line that the main thread comes to: memory that it gives back is not written, nor read into."""
    kvikio = gds._kvikio.module
    files = {gds.__file__, threads.__file__, sys.modules[kvikio.CuFile.__module__].__file__}
    old, new, freed = (torch.full((16 << 20,), value, dtype=torch.uint8) for value in (1, 2, 3))
    lines = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines += 1
            if lines == number:
                raise KeyboardInterrupt
        return trace

    with (tmp_path / "slots").open("w+b") as file:
        file.truncate(old.nbytes)
        slots = registry.get("gds").open_slots(file.fileno())
        number, interrupted = 1, True
        while interrupted:
            slots.write(old.numpy().data, 0)
            data = new.clone()
            lines, interrupted = 0, False
            sys.settrace(trace)
            try:
                with suppress(KeyboardInterrupt):
                    getattr(slots, way)(data.numpy().data, 0)
            finally:
                sys.settrace(None)
            interrupted = lines >= number
            data.copy_(freed)
            found = torch.empty_like(old)
            slots.read(found.numpy().data, 0)  # in the order in which kvikio's threads are given it
            assert not (found == 3).any(), "what was freed has been written"
            assert torch.equal(data, freed)
            number += 1
        slots.close()
    assert number > 5
