"""Which backend moves a tensor: Algorithms 1 and 2 of the paper, driven by scripted timings."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fastensor
from fastensor import Change, Context, Dictionary, Selector, TensorRef, TensorStore
from fastensor.backends import registry
from fastensor.backends.numpy import NumpyBackend
from fastensor.backends.registry import available_names
from fastensor.errors import BackendUnavailableError
from fastensor.files import posix
from fastensor.store.tools import Tools

pytestmark = pytest.mark.usefixtures("direct_io")
TENSOR = torch.arange(1000, dtype=torch.float32)
ALL = ("numpy", "torch", "direct")
"""In the paper's order."""
WRITE = Context("write", warm=True)
READS = Context("read"), Context("read", warm=True)


class Script:
    """A clock that moves on only when a tensor is moved, and then by as much as was said.

    Args:
        write: seconds, by backend.
        read: seconds, by backend.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, write: dict[str, float], read: dict[str, float]) -> None:
        self.now = 0.0
        self.used: list[str] = []
        """By which backend tensors were moved."""
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        for method, seconds in (("_write", write), ("_read", read)):
            monkeypatch.setattr(TensorStore, method, self._slowed(getattr(TensorStore, method), seconds))

    def _slowed(self, method: Any, seconds: dict[str, float]) -> Any:
        def slowed(store: TensorStore, *arguments: Any) -> Any:
            backend = arguments[-1].name
            self.used.append(backend)
            self.now += seconds[backend]
            return method(store, *arguments)

        return slowed

    def take(self) -> list[str]:
        """What has been used since this was asked for the last time."""
        used, self.used = self.used, []
        return used


def same(seconds: float, names: Sequence[str] = ALL) -> dict[str, float]:
    return dict.fromkeys(names, seconds)


def cycle(store: TensorStore, times: int = 1) -> None:
    for _ in range(times):
        ref = store.put(TENSOR)
        assert torch.equal(store.get(ref), TENSOR)
        store.delete(ref)


@pytest.fixture
def dictionary() -> Dictionary:
    return Dictionary()


def test_by_the_papers_algorithm_writers_are_tried_in_its_order_and_then_the_fastest_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, {"numpy": 1.0, "torch": 1.2, "direct": 0.9}, same(1.0))
    store = TensorStore(tmp_path, selector=Selector(paper=True))
    refs = [store.put(TENSOR) for _ in range(8)]
    assert script.take() == list(ALL) + ["direct"] * 5
    assert [ref.backend for ref in refs[-5:]] == ["direct"] * 5
    assert store.statistics().written_by == {"numpy": 1, "torch": 1, "direct": 6}
    assert store.statistics().selector.explored == 3


def test_a_new_user_gets_the_rule_and_in_time_what_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, {"numpy": 1.0, "torch": 5.0, "direct": 0.4}, same(1.0))
    store = TensorStore(tmp_path, selector=Selector())
    for _ in range(10):
        store.put(TENSOR)
    assert script.take() == ["numpy"] * 10
    for _ in range(150):
        store.put(TENSOR)
    assert Counter(script.take()[-30:])["direct"] >= 27
    spent = store.statistics().selector
    assert spent.extra_seconds <= 0.05 * spent.seconds + 4.0


def test_reading_fills_rdic_under_the_name_of_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dictionary: Dictionary
) -> None:
    Script(monkeypatch, same(1.0), {"numpy": 0.2, "torch": 0.3, "direct": 0.4})
    store = TensorStore(tmp_path, selector=Selector(dictionary, paper=True), mode="read")
    cycle(store, 3)
    writes = dictionary.of(WRITE, TENSOR.nbytes).timings
    reads = [timing for context in READS for timing in dictionary.of(context, TENSOR.nbytes).timings.items()]
    assert {name: timing.seconds for name, timing in writes.items()} == same(1.0)
    assert {name: timing.seconds for name, timing in reads} == {"numpy": 0.2, "torch": 0.3, "direct": 0.4}
    assert sum(timing.count for _, timing in reads) == 3


@pytest.mark.parametrize(("mode", "expected"), [("write", "numpy"), ("read", "torch"), ("write_read", "direct")])
def test_aware_of_the_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Any, expected: str) -> None:
    script = Script(
        monkeypatch,
        {"numpy": 1.0, "torch": 1.9, "direct": 1.2},
        {"numpy": 3.0, "torch": 1.0, "direct": 1.2},
    )
    store = TensorStore(tmp_path, selector=Selector(paper=True), mode=mode)
    cycle(store, 12)
    script.take()
    ref = store.put(TENSOR)
    assert ref.backend == expected
    store.get(ref)
    wrote, read = script.take()
    assert wrote == expected
    assert read == ("direct" if mode == "write" else expected)  # the fastest reader of .npy, or what wrote it


def test_what_wrote_a_tensor_reads_it_where_tools_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, same(1.0), same(1.0))
    for mode in ("read", "write_read"):
        cycle(TensorStore(tmp_path, selector=Selector(paper=True), mode=mode), 12)  # type: ignore[arg-type]
        used = script.take()
        assert used[::2] == used[1::2]
        assert set(used) == set(ALL)


def test_each_container_is_read_by_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, same(1.0), same(1.0))
    refs = [TensorStore(tmp_path, backend=name).put(TENSOR) for name in ALL]
    script.take()
    for name in ("auto", *ALL, "npy", "pt"):
        store = TensorStore(tmp_path, backend=name)
        for ref in refs:
            for _ in range(10):
                assert torch.equal(store.get(ref), TENSOR)
            used = set(script.take())
            if ref.format == "pt":
                assert used == {"torch"}
            else:
                assert used <= {"auto": {"numpy", "direct"}, "direct": {"direct"}}.get(name, {"numpy"})


@pytest.mark.parametrize("name", ["npy", "pt", "numpy", "direct"])
def test_a_named_tool_is_used_and_nothing_is_learned(tmp_path: Path, name: str, dictionary: Dictionary) -> None:
    store = TensorStore(tmp_path, backend=name, selector=Selector(dictionary))
    cycle(store, 5)
    used = registry.get(name).name
    assert store.statistics().written_by == store.statistics().read_by == {used: 5}
    assert len(dictionary) == 0
    assert store.statistics().selector.explored == 0


def test_a_users_dictionary_decides(tmp_path: Path, dictionary: Dictionary) -> None:
    for name, seconds in {"numpy": 2.0, "torch": 1.0, "direct": 3.0}.items():
        dictionary.apply(Change(WRITE, TENSOR.nbytes, name, seconds))
    text = dictionary.to_json()
    store = TensorStore(tmp_path, selector=Selector(dictionary, explore=False))
    cycle(store, 5)
    assert store.statistics().written_by == {"torch": 5}
    assert dictionary.to_json() == text
    large = torch.zeros(32 << 20, dtype=torch.uint8)  # nothing is known of it
    assert store.put(large).backend == "direct"
    assert store.put(large[1:]).backend == "numpy"


def test_durable_puts_are_another_context(tmp_path: Path, dictionary: Dictionary) -> None:
    selector = Selector(dictionary)
    TensorStore(tmp_path, selector=selector).put(TENSOR)
    TensorStore(tmp_path, selector=selector, durable=True).put(TENSOR)
    assert {str(key.context) for key, _ in dictionary} == {"write cpu unsynced", "write cpu durable"}


@pytest.mark.parametrize(("resident", "state"), [(1.0, "resident"), (0.0, "cold")])
def test_reads_are_told_apart_by_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dictionary: Dictionary, resident: float, state: str
) -> None:
    monkeypatch.setattr(posix, "resident_fraction", lambda fd, nbytes: resident)
    store = TensorStore(tmp_path, selector=Selector(dictionary))
    cycle(store)
    assert {str(key.context) for key, _ in dictionary} == {"write cpu unsynced", f"read cpu {state}"}


def test_special_tensors_teach_nothing(tmp_path: Path, dictionary: Dictionary) -> None:
    store = TensorStore(tmp_path, selector=Selector(dictionary))
    store.get(store.put(torch.eye(4).to_sparse()))
    assert len(dictionary) == 0
    assert store.statistics().written_by == store.statistics().read_by == {"torch": 1}


class Refusing(NumpyBackend):
    """Can neither write nor read."""

    name = "refusing"

    def write(self, *arguments: Any) -> Any:
        raise BackendUnavailableError("not on this file")

    def open_reader(self, *arguments: Any) -> Any:
        raise BackendUnavailableError("not from this file")


class Absent(Refusing):
    name = "absent"

    def why_unavailable(self) -> str:
        return "no driver"


@pytest.fixture
def unable(register: Any) -> None:
    register(Refusing())
    register(Absent())


def test_a_backend_that_cannot_gives_way(
    tmp_path: Path, unable: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Script(monkeypatch, same(1.0, [*ALL, "refusing"]), same(1.0, [*ALL, "refusing"]))
    selector = Selector(paper=True)
    store = TensorStore(tmp_path, selector=selector)
    cycle(store, 20)
    statistics = store.statistics()
    assert statistics.fallbacks == {"refusing": "not from this file"}
    assert "refusing" not in {**statistics.written_by, **statistics.read_by}
    assert statistics.selector.failed >= 2
    warnings = [record.message for record in caplog.records if "is not used" in record.message]
    assert warnings == ["refusing is not used: not on this file", "refusing is not used: not from this file"]
    shown = str(selector.explain(TENSOR.nbytes, WRITE, [*ALL, "refusing"]))
    assert "refusing: not possible (not on this file)" in shown
    assert len(list(tmp_path.iterdir())) == 0


@pytest.mark.parametrize(("name", "reason"), [("refusing", "not from this file"), ("absent", "no driver")])
def test_a_named_tool_that_cannot_gives_way_to_numpy(tmp_path: Path, unable: None, name: str, reason: str) -> None:
    store = TensorStore(tmp_path, backend=name)
    cycle(store, 2)
    statistics = store.statistics()
    assert statistics.written_by == statistics.read_by == {"numpy": 2}
    assert statistics.fallbacks == {name: reason}


def test_statistics_block_no_other_call() -> None:
    def selector() -> Selector:
        tools.count_delete()  # as another thread might, while a dictionary is read
        return made

    made = Selector()
    tools = Tools("auto", selector, "write")
    asking = threading.Thread(target=tools.statistics, daemon=True)
    asking.start()
    asking.join(timeout=30)
    assert not asking.is_alive()
    assert tools.statistics().selector == made.statistics()


def test_a_named_tool_reads_no_dictionary() -> None:
    tools = Tools("numpy", lambda: pytest.fail("no selector is to be asked"), "write")
    assert tools.statistics().selector == Selector().statistics()


def test_what_wrote_a_tensor_may_not_be_there_any_more(tmp_path: Path, unable: None) -> None:
    ref = TensorStore(tmp_path).put(TENSOR)
    for gone in ("absent", "uninstalled", "refusing"):
        there = TensorRef(**{**_as_dict(ref), "backend": gone})
        for mode in ("write", "read"):
            if there.format == "npy":
                assert torch.equal(TensorStore(tmp_path, mode=mode).get(there), TENSOR)  # type: ignore[arg-type]


def _as_dict(ref: TensorRef) -> dict[str, Any]:
    return {name: getattr(ref, name) for name in TensorRef.__slots__}


@pytest.mark.parametrize("answer", ["no", "an exception"])
def test_a_backend_that_cannot_write_such_a_file_is_not_asked_to(tmp_path: Path, register: Any, answer: str) -> None:
    class OnlyCheckpoints(NumpyBackend):
        name = "only-checkpoints"

        def can_write(self, source: Any) -> bool:
            assert answer == "no", "not written for this"
            return False

        def write(self, source: Any, fd: int) -> Any:
            pytest.fail("it was asked")

    register(OnlyCheckpoints())
    store = TensorStore(tmp_path, selector=Selector(paper=True))
    cycle(store, 20)
    assert "only-checkpoints" in store.statistics().fallbacks
    assert TensorStore(tmp_path, backend="only-checkpoints").put(TENSOR).backend == "numpy"


def test_nothing_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = TensorStore(tmp_path, backend="numpy").put(TENSOR)
    monkeypatch.setattr(registry, "_backends", {"refusing": Refusing()})
    store = TensorStore(tmp_path)
    with pytest.raises(fastensor.CheckpointWriteError, match="no backend can do it"):
        store.put(TENSOR)
    with pytest.raises(fastensor.CheckpointReadError, match="no backend can do it"):
        store.get(ref)


def test_a_backend_of_another_package_is_chosen_where_it_is_the_fastest(
    tmp_path: Path, plugin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"numpy": 1.0, "torch": 1.2, "direct": 0.9, "elsewhere": 0.5}
    script = Script(monkeypatch, seconds, seconds)
    selector = Selector(paper=True)
    store = TensorStore(tmp_path, selector=selector, mode="write_read")
    cycle(store, 20)
    used = Counter(script.take())
    assert used["elsewhere"] == max(used.values())
    ref = store.put(TENSOR)
    assert ref.backend == "elsewhere"
    assert ref.crc32 is not None
    store.get(ref)
    assert script.take() == ["elsewhere"] * 2
    assert "elsewhere: 500 ms" in str(selector.explain(TENSOR.nbytes, WRITE, [*ALL, "elsewhere"], "write_read"))


def test_checksums_of_a_backend_that_has_none(tmp_path: Path, plugin: None, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = type(registry.get("elsewhere"))
    write = elsewhere.write

    def without_checksums(self: Any, source: Any, fd: int) -> tuple[int, ...]:
        write(self, source, fd)
        return ()

    monkeypatch.setattr(elsewhere, "write", without_checksums)
    checked = TensorStore(tmp_path, backend="elsewhere")
    unchecked = TensorStore(tmp_path, backend="elsewhere", verify=False)
    by_numpy = TensorStore(tmp_path, backend="numpy").put(TENSOR)
    assert checked.put(TENSOR).crc32 == by_numpy.crc32 is not None
    ref = unchecked.put(TENSOR)
    assert ref.crc32 is None
    assert torch.equal(checked.get(ref), TENSOR)
    assert checked.put(TENSOR[:0]).crc32 == 0


def test_equal_tensors_have_equal_checksums_in_every_container(tmp_path: Path) -> None:
    for tensor in (TENSOR, TENSOR[:0], TENSOR[3:7], TENSOR.reshape(10, 100).t()):
        assert len({TensorStore(tmp_path, backend=name).put(tensor).crc32 for name in available_names()}) == 1
